"""A plan as text: its figures, its peak, and its blocks, equal ones together. And tables of text."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spillway.errors import printable
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from spillway.planner.report.facts import Facts, Row

WIDTH = 80
"""Columns of a terminal, and of a bug report."""

_NAMES = 16
"""Columns of the names of figures."""


def to_text(facts: Facts) -> str:
    """The plan as lines of at most 80 characters. Long names are cut."""
    return "".join(f"{printable(line)}\n" for line in _lines(facts))


def _lines(facts: Facts) -> Iterator[str]:
    yield from textwrap.wrap(f"{facts.plan.model} on {facts.plan.device}: {len(facts.rows)} blocks", WIDTH)
    yield ""
    yield from textwrap.wrap(facts.in_short, WIDTH)
    yield ""
    ways = (
        (way.name, format_bytes(way.point.peak_bytes), format_seconds(way.point.seconds), way.distance)
        for way in facts.ways
    )
    yield from aligned(zip(("", "peak", "step", ""), *ways, strict=True), WIDTH)
    yield ""
    for name, value in facts.figures:
        yield from textwrap.wrap(value, WIDTH, initial_indent=name.ljust(_NAMES), subsequent_indent=" " * _NAMES)
    yield ""
    for sentence in facts.peak_sentences:
        yield from textwrap.wrap(sentence, WIDTH)
    for why, seconds in facts.stalls:
        yield from textwrap.wrap(f"Compute stalls {format_seconds(seconds)} {why}.", WIDTH)
    yield ""
    yield from _blocks(facts)
    if facts.compared:
        yield ""
        rows = ((cut(name, WIDTH // 2), *figures) for name, *figures in facts.compared)
        yield from aligned(zip(("", "predicted", "measured", "difference"), *rows, strict=True), WIDTH)
    if facts.notes:
        yield ""
        for note in facts.notes:
            yield from textwrap.wrap(f"Note: {note}.", WIDTH)


def _blocks(facts: Facts) -> list[str]:
    """Equal blocks in one line: bytes kept, offloaded and recomputed, and the time of recomputation."""
    lines: list[tuple[str, ...]] = [("blocks", "kept", "offloaded", "recomputed", "time")]
    # Four figures of the greatest width take the rest.
    most = WIDTH - 4 * len(" 1023.9 MiB") - len(" (9999)")
    for names, row, count in grouped(facts.rows):
        name = cut(names, most) if count == 1 else f"{cut(names, most)} ({count})"
        sizes = map(format_bytes, (row.kept_bytes, row.sent_bytes, row.recomputed_bytes))
        lines.append((name, *sizes, format_seconds(row.recompute_seconds)))
    return aligned(zip(*lines, strict=True), WIDTH)


def grouped(rows: Sequence[Row]) -> Iterator[tuple[str, Row, int]]:
    """Equal blocks together: their names (``"layers.0 to 3, 8 to 11"``), the first of them, and how many there are."""
    alike: dict[object, list[Row]] = {}
    for row in rows:
        alike.setdefault(replace(row, name=""), []).append(row)
    for each in alike.values():
        yield names_of([row.name for row in each]), each[0], len(each)


def names_of(names: Sequence[str]) -> str:
    """Names in short, with ranges of their numbers: ``"layers.0 to 11"``."""
    words: list[str] = []
    before = None

    def run_of(place: int) -> tuple[str, int | str]:
        stem = names[place].rstrip("0123456789")
        digits = names[place][len(stem) :]
        return stem, int(digits) - place if digits else f"{place}"

    for (stem, _), run in itertools.groupby(range(len(names)), run_of):
        places = list(run)
        numbers = [names[place][len(stem) :].lstrip("0") or names[place][len(stem) :][-1:] for place in places]
        between = "," if len(places) == 2 else " to"
        # A stem is not repeated.
        first = f"{'' if stem == before and numbers[0] else stem}{numbers[0]}"
        words.append(first if len(places) == 1 else f"{first}{between} {numbers[-1]}")
        before = stem if numbers[0] else None
    return ", ".join(words)


def aligned(columns: Iterable[Sequence[str]], width: int) -> list[str]:
    """Lines of a table: the first column, and as many others beside it as a line holds. The rest follows below.

    Each column has its heading first. Headings are cut to half of the characters of a line.
    """
    first, *others = ([cut(column[0], width // 2), *column[1:]] for column in columns)
    left = [cell.ljust(max(map(len, first))) for cell in first]
    blocks: list[list[str]] = []
    for column in others:
        cells = [" " + cell.rjust(max(map(len, column))) for cell in column]
        if not blocks or len(blocks[-1][0]) + len(cells[0]) > width:
            blocks.append(left)
        blocks[-1] = [line + cell for line, cell in zip(blocks[-1], cells, strict=True)]
    lines = itertools.chain.from_iterable(([""] if n else []) + block for n, block in enumerate(blocks))
    return [line.rstrip() for line in lines]


def cut(text: str, width: int) -> str:
    """A printable text of at most so many characters, which ends in dots if it was longer."""
    text = printable(text)
    return text if len(text) <= width else text[: width - 3] + "..."
