"""Imports run downward only, and in no circle: the order that CONTRIBUTING.md draws, held by reading the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "spillway"

WORDS = {"errors", "units", "types"}
PURE = {"policies", "selectors", "blocks", "planner"}
ENGINE = WORDS | PURE | {"_torch", "runtime", "session", "saved_tensors", "checkpointing", "losses"}
SERVICES = ENGINE | {
    "offloading",
    "recomputing",
    "attaching",
    "profiler",
    "summarizing",
    "planning",
    "sizes",
    "testing",
}
LIBRARY = SERVICES | {"optim", "accumulate"}

# Which packages and modules one may import, beside itself. Each is a file or a folder right under src/spillway.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "requirements": {"errors"},
    "units": {"errors"},
    "types": {"errors", "units"},
    "_torch": {"errors"},
    "policies": WORDS,
    "selectors": WORDS | {"_torch"},
    "blocks": WORDS,
    "planner": WORDS,
    "runtime": WORDS | {"_torch"},
    "session": WORDS | {"_torch", "runtime"},
    "saved_tensors": WORDS | {"_torch", "policies", "runtime", "session"},
    "checkpointing": WORDS | {"_torch", "selectors", "runtime", "saved_tensors"},
    "losses": WORDS | {"_torch"},
    "testing": WORDS | {"runtime"},
    "offloading": ENGINE,
    "recomputing": ENGINE,
    "attaching": ENGINE | {"offloading", "recomputing", "profiler"},
    "profiler": ENGINE | {"offloading"},
    "summarizing": ENGINE,
    "planning": ENGINE | {"attaching", "profiler"},
    "sizes": ENGINE | {"attaching", "profiler", "planning"},
    "optim": SERVICES - {"testing"},
    "accumulate": SERVICES - {"testing"},
    "integrations": LIBRARY - {"testing"} | {"__init__"},
    "compat": LIBRARY - {"testing"} | {"__init__"},
    "__init__": LIBRARY - {"testing"} | {"requirements"},
    "cli": LIBRARY - {"testing"} | {"__init__", "requirements", "integrations", "compat"},
    "__main__": {"cli"},
}

TRAINERS = {
    "accelerate",
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


def room_of(file: Path) -> str:
    """The file or folder right under the package."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(SOURCE.parent)}:{line}"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_belongs_to_a_room_of_the_table(name: str) -> None:
    assert room_of(NAMES[name]) in ALLOWED, f"{name}: say in ALLOWED what this room may import"


@pytest.mark.parametrize("name", NAMES)
def test_a_room_imports_only_rooms_below_it(name: str) -> None:
    file = NAMES[name]
    room = room_of(file)
    wrong = [
        f"{where(file, found.line)} imports {found.module}: {room} may not know {room_of(target)}"
        for found in imports_of(file)
        if (target := imported_file(found.module)) is not None
        and room_of(target) not in ALLOWED.get(room, set()) | {room}
    ]
    assert not wrong, "\n".join(wrong)


def test_the_table_itself_has_no_circle() -> None:
    assert circles({room: set(below) for room, below in ALLOWED.items()}) == []


def test_files_import_each_other_in_no_circle() -> None:
    graph = {
        str(file.relative_to(PACKAGE)): {
            str(target.relative_to(PACKAGE))
            for found in imports_of(file)
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


def test_planning_knows_nothing_of_autograd() -> None:
    for file in FILES:
        if room_of(file) != "planner":
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        modules = [found.module for found in imports_of(file)]
        assert not [name for name in attributes + modules if name.startswith("torch.autograd")], file


def test_runtime_knows_nothing_of_autograd() -> None:
    for file in FILES:
        if room_of(file) == "runtime":
            modules = [found.module for found in imports_of(file)]
            assert not [name for name in modules if name.startswith("torch.autograd")], file


@pytest.mark.parametrize("name", NAMES)
def test_nothing_below_integrations_knows_a_trainer(name: str) -> None:
    file = NAMES[name]
    if room_of(file) in MAY_KNOW_TRAINERS:
        return
    known = [found.module for found in imports_of(file) if found.module.split(".")[0] in TRAINERS]
    assert not known, f"{name} imports {known}"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_nothing_beside_the_repository(name: str) -> None:
    assert "../shared" not in NAMES[name].read_text(encoding="utf-8")


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
