"""A plan in a terminal: its figures, its peak, and its blocks, equal ones together."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from spillway.errors import printable
from spillway.report.facts import Facts, grouped
from spillway.report.table import aligned, cut
from spillway.units import format_bytes, format_seconds

WIDTH = 80
"""Columns, as every terminal has them and every bug report shows them."""

_NAMES = 16
"""Columns of the names of figures."""


def to_text(facts: Facts, *, width: int = WIDTH) -> str:
    """The plan as lines.

    Args:
        facts: of a plan.
        width: characters of a line, at least 60. Long names are cut.
    """
    return "".join(f"{printable(line)}\n" for line in _lines(facts, width))


def _lines(facts: Facts, width: int) -> Iterator[str]:
    yield from textwrap.wrap(f"{facts.plan.model} on {facts.plan.device}: {len(facts.rows)} blocks", width)
    yield ""
    for name, value in facts.figures:
        yield from _wrapped(name, value, width)
    yield ""
    for sentence in facts.peak_sentences:
        yield from textwrap.wrap(sentence, width)
    for what, seconds in facts.waits:
        yield from textwrap.wrap(f"Compute waits {format_seconds(seconds)} {what}.", width)
    yield ""
    yield from _blocks(facts, width)
    if facts.compared:
        yield ""
        columns = zip(("", "predicted", "measured", "difference"), *facts.compared, strict=True)
        yield from aligned([list(column) for column in columns], width)
    if facts.notes:
        yield ""
        for note in facts.notes:
            yield from textwrap.wrap(f"Note: {note}.", width)


def _wrapped(name: str, value: str, width: int) -> list[str]:
    return textwrap.wrap(value, width, initial_indent=name.ljust(_NAMES), subsequent_indent=" " * _NAMES)


def _blocks(facts: Facts, width: int) -> list[str]:
    """Equal blocks in one line: what stays, what leaves, what is computed again, and in what time."""
    columns: list[list[str]] = [["blocks"], ["kept"], ["sent"], ["again"], ["time"]]
    # As many as leave room for four figures of the widest sort.
    most = width - 4 * len(" 1023.9 MiB") - len(" (9999)")
    for names, row, count in grouped(facts.rows):
        cells = (
            cut(names, most) if count == 1 else f"{cut(names, most)} ({count})",
            format_bytes(row.kept_bytes),
            format_bytes(row.sent_bytes),
            format_bytes(row.recomputed_bytes),
            format_seconds(row.rerun_seconds),
        )
        for column, cell in zip(columns, cells, strict=True):
            column.append(cell)
    return aligned(columns, width)
