"""Imports run downward only, and in no circle: the order that CONTRIBUTING.md draws, held by reading the sources."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "spillway"

WORDS = {"errors", "units", "types"}
PURE = {"policies", "planner"}
ENGINE = WORDS | PURE | {"_torch", "runtime", "session", "saved_tensors", "checkpointing", "parameters"}
SERVICES = ENGINE | {
    "offloading",
    "recomputing",
    "attaching",
    "parking",
    "profiler",
    "planning",
    "testing",
}
LIBRARY = SERVICES | {"optim", "accumulate"}

# Which packages and modules one may import, beside itself. Each is a file or a folder right under src/spillway.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "types": {"errors", "units"},
    "_torch": {"errors"},
    "policies": WORDS,
    "planner": WORDS,
    "runtime": WORDS | {"_torch"},
    "session": WORDS | {"_torch", "runtime"},
    "saved_tensors": WORDS | {"_torch", "policies", "runtime", "session"},
    "checkpointing": WORDS | {"_torch", "planner", "runtime", "saved_tensors"},
    "parameters": WORDS | {"_torch", "runtime", "session", "saved_tensors", "checkpointing"},
    "parking": ENGINE,
    "testing": WORDS | {"runtime"},
    "offloading": ENGINE,
    "recomputing": ENGINE,
    "attaching": ENGINE | {"offloading", "recomputing", "profiler"},
    "profiler": ENGINE | {"offloading"},
    "planning": ENGINE | {"attaching", "profiler"},
    "optim": SERVICES - {"testing"},
    "accumulate": SERVICES - {"testing"},
    "integrations": LIBRARY - {"testing"} | {"__init__"},
    "compat": LIBRARY - {"testing"} | {"__init__"},
    "__init__": LIBRARY - {"testing"},
    "cli": LIBRARY - {"testing"} | {"__init__", "integrations", "compat"},
    "__main__": {"cli"},
}

TRAINERS = {
    "accelerate",
    "axolotl",
    "deepspeed",
    "haiscale",
    "lightning",
    "megatron",
    "pytorch_lightning",
    "torchtitan",
    "torchtune",
    "transformer_engine",
    "transformers",
    "trl",
    "verl",
}
MAY_KNOW_TRAINERS = {"integrations", "compat", "cli"}

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {str(file.relative_to(PACKAGE)): file for file in FILES}


@dataclass(frozen=True)
class Import:
    """One name that a file imports, as ``spillway.runtime.mover`` or ``torch.autograd``."""

    module: str
    line: int
    for_types_only: bool


def imports_of(file: Path) -> Iterator[Import]:
    """All that a file imports, wherever in it: also inside of functions and for type checkers."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(file, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in typing_only)


def _absolute(file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folder = file.parent.relative_to(SOURCE).parts
    parts = folder[: len(folder) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


def imported_file(module: str) -> Path | None:
    """The file of ours that an import reaches: ``spillway.runtime.mover.Mover`` is in ``runtime/mover.py``."""
    parts = module.split(".")
    if parts[0] != "spillway":
        return None
    for length in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:length])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def package_of(file: Path) -> str:
    """The file or folder right under the package."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def all_imports() -> dict[Path, list[Import]]:
    """Read once, by the first test that wants them: each worker collects this file."""
    return {file: list(imports_of(file)) for file in FILES}


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(SOURCE.parent)}:{line}"


def test_each_file_belongs_to_a_package_of_the_table() -> None:
    unknown = [name for name, file in NAMES.items() if package_of(file) not in ALLOWED]
    assert not unknown, f"say in ALLOWED what these may import: {unknown}"


def test_a_package_imports_only_packages_below_it() -> None:
    wrong = [
        f"{where(file, found.line)} imports {found.module}: {package_of(file)} may not know {package_of(target)}"
        for file in FILES
        for found in all_imports()[file]
        if (target := imported_file(found.module)) is not None
        and package_of(target) not in ALLOWED.get(package_of(file), set()) | {package_of(file)}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_itself_has_no_circle() -> None:
    assert circles({name: set(below) for name, below in ALLOWED.items()}) == []


def test_files_import_each_other_in_no_circle() -> None:
    graph = {
        str(file.relative_to(PACKAGE)): {
            str(target.relative_to(PACKAGE))
            for found in all_imports()[file]
            if not found.for_types_only and (target := imported_file(found.module)) is not None and target != file
        }
        for file in FILES
    }
    assert circles(graph) == []


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What remains when everything that depends on nothing is taken away, again and again."""
    left = {node: set(targets) & graph.keys() for node, targets in graph.items()}
    while free := [node for node, targets in left.items() if not targets]:
        for node in free:
            del left[node]
        for targets in left.values():
            targets.difference_update(free)
    return [f"{node} -> {', '.join(sorted(targets))}" for node, targets in sorted(left.items())]


def test_offload_is_imported_without_modules_that_few_programs_need() -> None:
    code = "import sys, spillway.offloading; print(*(name for name in sys.modules if name.startswith('spillway.')))"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE
    )
    loaded = {name.rpartition(".")[2] for name in run.stdout.decode().split()}
    assert "mover" in loaded
    assert not loaded & {
        "accelerator",
        "cpu",
        "spill_file",
        "locator",
        "kept",
    }


def test_planner_and_runtime_know_nothing_of_autograd() -> None:
    for file in FILES:
        if package_of(file) not in ("planner", "runtime"):
            continue
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if package_of(file) == "planner" else ()
        attributes = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        modules = [found.module for found in all_imports()[file]]
        assert not [name for name in attributes + modules if name.startswith("torch.autograd")], file


def test_nothing_below_integrations_knows_a_trainer() -> None:
    known = [
        f"{where(file, found.line)} imports {found.module}"
        for file in FILES
        if package_of(file) not in MAY_KNOW_TRAINERS
        for found in all_imports()[file]
        if found.module.split(".")[0] in TRAINERS
    ]
    assert not known, "\n".join(known)


def test_no_file_names_anything_beside_the_repository() -> None:
    assert not [name for name, file in NAMES.items() if "../shared" in file.read_text(encoding="utf-8")]


def test_the_reader_of_imports_sees_what_it_has_to(tmp_path: Path) -> None:
    file = PACKAGE / "runtime" / "imagined.py"
    assert imported_file("spillway.types.Plan") == PACKAGE / "types.py"
    assert imported_file("spillway.runtime.mover.Mover") == PACKAGE / "runtime" / "mover.py"
    assert imported_file("torch.nn") is None
    assert _absolute(file, ast.ImportFrom(module="mover", names=[], level=1)) == "spillway.runtime.mover"
    assert _absolute(file, ast.ImportFrom(module="types", names=[], level=2)) == "spillway.types"
    inside = tmp_path / "inside.py"
    inside.write_text("def f():\n    import torch.autograd.graph\n")
    assert [found.module for found in imports_of(inside)] == ["torch.autograd.graph"]


PRIVATE = frozenset(
    (
        *("_base", "_call_impl", "_cdata", "_execution_engine", "_is_view", "_local_tensor", "_schema"),
        *("_sequence_nr", "_version", "_forward_pre_hooks", "_backward_hooks", "_get_fsdp_state"),
    )
)
"""Private attributes of objects of torch's."""


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names of torch with their lines. Operators (``torch.ops.aten._to_copy``) are no Python names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(part.startswith("_") for part in parts):
                yield node.lineno, f"from {node.module} import {', '.join(alias.name for alias in node.names)}"
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("torch._"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[:2] != "__":
            owner = ast.unparse(node.value)
            of_torch = owner.split(".")[0] == "torch" and not owner.startswith("torch.ops.")
            if of_torch or (node.attr in PRIVATE and owner not in ("self", "cls")):
                yield node.lineno, f"{owner}.{node.attr}"


def test_private_names_of_torch_are_in_one_file() -> None:
    found = [
        f"{where(file, line)}: {name}"
        for name, file in NAMES.items()
        if name != "_torch.py"
        for line, name in private_names(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


def test_private_names_are_seen() -> None:
    private = ["from torch._C import f", "import torch._dynamo", "torch._C.g()", "x._version"]
    source = "\n".join([*private, "self._version", "torch.ops.aten._to_copy", "torch.__version__"])
    assert sorted(line for line, _ in private_names(ast.parse(source))) == [1, 2, 3, 4]
