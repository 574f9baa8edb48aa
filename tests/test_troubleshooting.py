"""Whoever looks an error message up finds the words that are raised."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import spillway

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
ANY = "…"


def said(node: ast.expr) -> str | None:
    """A string of the sources, with ``ANY`` for each value that is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
    return None


@functools.cache
def messages() -> tuple[str, ...]:
    """All strings of the sources but docstrings, each with single blanks."""
    found = []
    for path in sorted((ROOT / "src" / "spillway").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        told = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (said(node) for node in ast.walk(tree) if isinstance(node, ast.expr) and node not in told)
        found += [" ".join(text.split()) for text in texts if text]
    return tuple(found)


def occurs(heading: str, text: str) -> bool:
    """Whether the parts of a heading stand in a text, in their order."""
    between = r".*?"
    return re.search(between.join(re.escape(part.strip()) for part in heading.split(ANY)), text) is not None


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_words_of_a_heading_are_raised(heading: str) -> None:
    assert any(occurs(heading, text) for text in messages())


def test_a_heading_whose_words_nobody_raises_is_found() -> None:
    heading = next(each for each in HEADINGS if ANY not in each)
    assert not any(occurs(heading + " never", text) for text in messages())
    assert not any(occurs(f"{heading} {ANY} never", text) for text in messages())


def test_each_heading_names_its_class_of_errors() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    for section in sections:
        title, *entries = re.split(r"^### ", section, flags=re.MULTILINE)
        for entry in entries:
            words = entry.split("\n\n")[1]
            named = re.match(r"`(\w+)`[.,:]", words)
            if title.startswith("Notes"):
                assert named is None
                continue
            assert named is not None, entry
            assert issubclass(getattr(spillway, named[1]), spillway.SpillwayError)


def test_there_are_enough_of_them() -> None:
    assert len(HEADINGS) == len(set(HEADINGS)) >= 25
