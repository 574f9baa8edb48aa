"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator, Iterator
from itertools import combinations
from typing import Any

# Before torch: threads that spin at the end of each small kernel take the cores from those that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Here, and not at the end of a run: what its plugins register (trio's, where selenium is installed) must not be frozen.
import hypothesis  # noqa: F401
import pytest
import torch

from integrations.ranks import World
from latest_states import compare_with_walks
from support import FAILED, Way


def pytest_configure() -> None:
    # What is small is slow in several threads, if others want the cores.
    torch.set_num_threads(1)
    # Nothing that is collected is garbage: 25,000 tests would be gone through again and again.
    gc.disable()
    if not torch.accelerator.is_available():
        # Of devices that are not there, torch writes down where each seed came from: three stacks for a manual_seed.
        for absent in (torch.cuda, torch.mtia, torch.xpu):
            absent.manual_seed_all = lambda seed: None


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Tests collect garbage all the time, and need not go through torch and all that ran before each time for it.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a part of large matrices. ``make test-all`` runs all of them.

    Of three axes and more, so much runs that each pair of values of two axes occurs; of a matrix that is marked
    ``covered``, so much that each value of each axis occurs, and with ``covered(times=2)`` twice or more.
    """
    matrices: dict[tuple[Any, str], list[pytest.Function]] = {}
    for item in items:
        is_short = item.get_closest_marker("long") is None
        if is_short and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            matrices.setdefault((item.parent, item.originalname), []).append(item)
    for matrix in matrices.values():
        # Axes without a choice do not count.
        rows = {item: list(_values(item)) for item in matrix}
        axes = sum(len(set(axis)) > 1 for axis in zip(*rows.values(), strict=True))
        covered = matrix[0].get_closest_marker("covered")
        together = 1 if covered else min(axes, 2)
        if together >= axes:
            continue
        rest = {item: set(combinations(row, together)) for item, row in rows.items()}
        used = Counter[Any]()
        for _ in range(covered.kwargs.get("times", 1) if covered else 1):
            missing = set[Any]().union(*rest.values())
            while missing:
                # Of rows that cover as much, the one whose values have occurred least.
                best = max(rest, key=lambda item: (len(rest[item] & missing), -sum(used[one] for one in rows[item])))
                used.update(rows[best] if covered else ())
                missing -= rest.pop(best)
        for item in rest:
            item.add_marker("long")


def _values(item: pytest.Function) -> Iterator[tuple[Any, ...]]:
    """One of each axis: by identity, since all items of a matrix share them.

    Arguments that are listed together are one axis. A way has two, its tier and its window.
    """
    params = dict(item.callspec.params)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        yield tuple((name.strip(), id(params.pop(name.strip()))) for name in names)
    for name, value in sorted(params.items()):
        for number, part in enumerate(vars(value).values() if isinstance(value, Way) else [value]):
            yield f"{name} {number}", id(part)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector: what dies here, dies by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def server() -> Any:
    """A process that forks for each script, so that none has to import torch."""
    from running.scripts import shared_server

    return shared_server()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two ranks, which all tests of several processes share."""
    with World(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(autouse=True)
def _compare_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state of a block that is used again is what a walk would find."""
    compare_with_walks(monkeypatch)
