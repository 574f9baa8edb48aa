"""The names that users may rely on, and what it costs to import them."""

from __future__ import annotations

import functools
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import spillway

SOURCE = Path(__file__).parent.parent / "src"

PUBLIC = {
    "Accumulator",
    "Affinity",
    "Attached",
    "BackendError",
    "BudgetError",
    "CorruptError",
    "Decision",
    "DeviceNumber",
    "Event",
    "EventKind",
    "EventList",
    "GroupStats",
    "Groups",
    "InplaceError",
    "OffloadedOptimizer",
    "OperatorCall",
    "OptimizerStats",
    "Parked",
    "ParkedError",
    "PolicyError",
    "RaceError",
    "Recompute",
    "RecomputeError",
    "SavedTensor",
    "SavedTensorReport",
    "Session",
    "SessionError",
    "SizeError",
    "SpillPathError",
    "SpillwayError",
    "SplitError",
    "StepStats",
    "Summary",
    "SummaryRow",
    "TierError",
    "TierFullError",
    "TransferError",
    "UnsupportedError",
    "UsageError",
    "AccumulationStep",
    "Hardware",
    "Plan",
    "Profile",
    "Timeline",
    "longest",
    "plan",
    "profile",
    "simulate",
    "__version__",
    "keep",
    "keep_tensor",
    "offload",
    "offload_tensor",
    "park",
    "parked",
    "policies",
    "list_saved_tensors",
    "load_weights",
    "attach",
    "bind_to_device",
    "cross_entropy",
    "group",
    "recompute",
    "saved_by",
    "split_equals_whole",
    "summary",
    "within",
}

# What only the command line or one feature needs, and nobody who writes `import spillway` waits for.
LAZY = {"plotly", "pydantic", "rich", "scipy", "typer"}

# Beside what torch itself takes, on the same machine at the same time: some 0.03 of 1.1 seconds. Without a round of
# Python's collector through all that torch has made, which takes 0.09 whenever it comes.
MOST_EXTRA = 0.06

IMPORT_TIMES = """
import gc, json, sys, time
start = time.process_time()
import torch
gc.collect()
gc.freeze()
middle = time.process_time()
before = set(sys.modules)
import spillway
spillway.offload, spillway.attach, spillway.recompute, spillway.list_saved_tensors
end = time.process_time()
print(json.dumps({"torch": middle - start, "spillway": end - middle, "new": sorted(set(sys.modules) - before)}))
"""


def test_all_is_the_list_that_is_promised() -> None:
    assert set(spillway.__all__) == PUBLIC
    assert list(spillway.__all__) == sorted(spillway.__all__)


def test_every_public_name_exists_and_has_a_docstring() -> None:
    for name in spillway.__all__:
        value = getattr(spillway, name)
        if name == "__version__":
            continue
        assert (value.__doc__ or "").strip(), f"spillway.{name} has no docstring"
        if inspect.isclass(value):
            inherited = [base.__doc__ for base in value.__mro__[1:] if base.__doc__]
            assert value.__doc__ not in inherited, f"spillway.{name} has its base's docstring"


def test_every_public_method_of_a_public_class_has_a_docstring_or_its_base_has() -> None:
    classes = [value for name in spillway.__all__ if inspect.isclass(value := getattr(spillway, name))]
    methods = [
        (kind, name)
        for kind in classes
        for name, value in vars(kind).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod))
    ]
    missing = [f"{kind.__name__}.{name}" for kind, name in methods if not inspect.getdoc(getattr(kind, name))]
    assert methods
    assert not missing


def test_every_error_is_public_and_under_the_root() -> None:
    errors = {name for name, value in vars(spillway.errors).items() if inspect.isclass(value)}
    assert errors <= set(spillway.__all__)
    assert all(issubclass(getattr(spillway, name), spillway.SpillwayError) for name in errors)


def test_importing_spillway_adds_little_to_importing_torch() -> None:
    runs = []
    for number in range(3):
        runs.append(_import_times(number))
        # The least is what the import costs; the rest is what else the machine was doing. One that is low will do.
        if float(runs[-1]["spillway"]) / float(runs[-1]["torch"]) <= MOST_EXTRA:
            return
    raise AssertionError(f"got {runs}, expected one of them to be at most {MOST_EXTRA}")


def test_importing_spillway_imports_nothing_before_it_is_needed() -> None:
    new = set(_import_times(0)["new"])
    assert not {name for name in new for lazy in LAZY if name == lazy or name.startswith(lazy + ".")}


def test_importing_spillway_alone_does_not_wait_for_torch_and_all_names_are_there_all_the_same() -> None:
    script = """
import sys, spillway
assert "torch" not in sys.modules
spillway.attach
assert "torch" in sys.modules
assert not [name for name in sys.modules if name.startswith(("spillway.accumulate", "spillway.optim"))]
assert "Accumulator" in dir(spillway)
from spillway import Accumulator
assert spillway.Accumulator is Accumulator is vars(spillway)["Accumulator"]
try:
    spillway.accumulator
except AttributeError as error:
    assert str(error) == "module 'spillway' has no attribute 'accumulator'", error
from types import ModuleType
hidden = [name for name in spillway.__all__ if isinstance(getattr(spillway, name), ModuleType)]
assert hidden == ["policies"], hidden
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True)


def test_the_reference_names_what_exists() -> None:
    pages = (SOURCE.parent / "docs" / "reference").glob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]
    assert len(names) > 40
    # They need torchtitan and axolotl, whose requirements exclude those of the other trainers.
    missing = {name for name in names if not _exists(name)}
    assert {name for name in missing if re.search(r"\.(torchtitan|axolotl)\.", name) is None} == set()


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def _import_times(number: int) -> dict[str, object]:
    """Of the run of that number."""
    # Compiled once, as wherever it is installed.
    written = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_TIMES],
        env={**written, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
