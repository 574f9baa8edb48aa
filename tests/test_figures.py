"""The tables of the pages say what the files of results say: every row, every cell, by ``benchmarks/_table.py``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*ROOT.glob("README.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^<!-- figures: begin \(from (.*?)\) -->\n(.*?)^<!-- figures: end -->$", re.MULTILINE | re.DOTALL)

Rows = list[list[str]]


def blocks() -> Iterator[tuple[str, list[str], str]]:
    """Page, names of files, and what stands between the markers."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = BLOCK.findall(text)
        assert len(found) == text.count("<!-- figures: begin") == text.count("<!-- figures: end"), page
        for source, body in found:
            yield str(page.relative_to(ROOT)), re.findall(r"[\w-]+\.json", source), body


def tables(lines: list[str]) -> list[tuple[str, Rows]]:
    """What is said before each table, and the table, its heading first and without the line below that."""
    made: list[tuple[str, Rows]] = []
    words: list[str] = []
    rows: Rows = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
            continue
        if rows:
            made.append((" ".join(words), [rows[0], *rows[2:]]))
            words, rows = [], []
        if line:
            words.append(line)
    return made


def columns(some: list[str], of: list[str]) -> list[int]:
    """Where the columns of a page are among those of a file's table, in that order."""
    places: list[int] = []
    for name in some:
        places.append(of.index(name, places[-1] + 1 if places else 0))
    return places


ALL = [pytest.param(names, body, id=f"{page}-{names[0]}") for page, names, body in blocks()]


@pytest.mark.parametrize(("names", "body"), ALL)
def test_a_table_says_what_its_files_say(names: list[str], body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    lines = __import__("_table").lines
    written = [table for name in names for table in tables(lines(json.loads((RESULTS / name).read_text())))]
    shown = tables(body.splitlines())
    assert shown
    assert len(shown) == len(written)
    for (words, rows), (conditions, source) in zip(shown, written, strict=True):
        assert words in ("", conditions)
        places = columns(rows[0], source[0])
        known = [[row[place] for place in places] for row in source[1:]]
        # Rows may be left out, in order.
        left = iter(known)
        assert all(row in left for row in rows[1:]), [row for row in rows[1:] if row not in known]
        assert len(rows) > 1


def test_there_are_tables_of_every_kind_of_benchmark() -> None:
    sources = {name for _, names, _ in blocks() for name in names}
    for kind in ("demo", "step", "parallel", "optimizer", "pareto", "resnet50", "budgets", "libraries"):
        assert any(f"-{kind}-" in name for name in sources), kind
    assert sources <= {path.name for path in RESULTS.glob("*.json")}


def test_what_is_not_in_the_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _, names, body = next(each for each in blocks() if "`checkpoint`" in each[2])
    digit = re.search(r"\d(?= ms)", body[body.index("`checkpoint`") :])
    assert digit is not None
    place = body.index("`checkpoint`") + digit.start()
    wrong = body[:place] + str((int(digit[0]) + 1) % 10) + body[place + 1 :]
    with pytest.raises(AssertionError):
        test_a_table_says_what_its_files_say(names, wrong, monkeypatch)
    assert "_table" in sys.modules
