"""What groups did on every rank, as a table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from spillway.errors import UsageError, printable
from spillway.records import StepStats

_MIB = 2**20
_GB = 10**9
_NOWHERE = "no group"
_LEAST_WIDTH = 20


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One rank of a :class:`Summary`."""

    rank: int
    """Its number among all processes."""
    stats: StepStats | None
    """What it counted; ``None``: nothing was counted there."""
    seconds: float | None = None
    """What its step took, as the caller measured it; ``None``: unknown."""

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        """Bytes that left, by groups."""
        return {} if self.stats is None else {group.name: group.offloaded_bytes for group in self.stats.groups}

    @property
    def ungrouped_bytes(self) -> int:
        """Bytes that left and were saved in no group."""
        return 0 if self.stats is None else self.stats.offloaded_bytes - sum(self.offloaded_bytes.values())

    @property
    def out_bytes_per_second(self) -> float | None:
        """Bytes that left in a second of the step, on the mean; ``None`` if nobody measured the step."""
        return None if self.stats is None or self.seconds is None else self.stats.offloaded_bytes / self.seconds

    @property
    def back_bytes_per_second(self) -> float | None:
        """Bytes that came back in a second of the step, on the mean; ``None`` if nobody measured the step."""
        return None if self.stats is None or self.seconds is None else self.stats.reloaded_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """What a step did on every rank, by groups: what :func:`spillway.summary` gives. ``str(summary)`` is a table.

    Bytes are MiB there, of 2**20 bytes, and rates GB/s, of 10**9.

    Example:
        >>> from spillway import GroupStats, StepStats, Summary, SummaryRow
        >>> stats = StepStats(offloaded_bytes=3 << 20, groups=(GroupStats("mlp", offloaded_bytes=2 << 20),))
        >>> for line in Summary((SummaryRow(0, stats),)).to_text().splitlines()[:4]:
        ...     print(line)
        offloaded, MiB:
        rank   mlp no group total
        0     2.00     1.00  3.00
        total 2.00     1.00  3.00
    """

    rows: tuple[SummaryRow, ...]
    """One for each rank, in their order."""
    rank: int = field(default=0, compare=False)
    """The one that has this value: only the first of the rows :meth:`print` it."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of all ranks, sorted."""
        return tuple(sorted({name for row in self.rows for name in row.offloaded_bytes}))

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        """Bytes that left on all ranks together, by groups."""
        return {name: sum(row.offloaded_bytes.get(name, 0) for row in self.rows) for name in self.groups}

    def to_text(self, width: int = 80) -> str:
        """Three tables: bytes that left, ranks by groups; all bytes that each rank counted; rates and stalls.

        A rank without a group has 0 there, and one that counted nothing has dashes in the other tables. Rates are
        bytes of the step over the seconds of the step; where nobody measured these, there is a dash, or no column.

        Args:
            width: characters of a line. A table that is wider goes on below, with the column of ranks again, and a
                name that is longer is cut.

        Raises:
            UsageError: for a width that is no whole number of at least 20.
        """
        tables = [_table("all, MiB:", self._of_bytes(), width), _table("over the step:", self._of_times(), width)]
        return "\n\n".join([*([self.groups_to_text(width)] if self.groups else []), *tables])

    def groups_to_text(self, width: int = 80) -> str:
        """The first of the three tables."""
        return _table("offloaded, MiB:", self._of_groups(), width)

    def print(self, file: TextIO | None = None) -> None:
        """Write the table, on the first rank only. Every rank may call it.

        Args:
            file: where to; ``None``: the standard output.
        """
        if not self.rows or self.rank == self.rows[0].rank:
            (sys.stdout if file is None else file).write(f"{self.to_text()}\n")

    def __str__(self) -> str:
        return self.to_text()

    def _of_groups(self) -> Iterator[list[str]]:
        """The columns of the first table, the heading first and the sum last."""
        rows = self.rows
        yield ["rank", *(str(row.rank) for row in rows), "total"]
        for name in self.groups:
            yield _column(name, [row.offloaded_bytes.get(name, 0) for row in rows])
        if any(row.ungrouped_bytes for row in rows):
            yield _column(_NOWHERE, [row.ungrouped_bytes for row in rows])
        yield _column("total", [0 if row.stats is None else row.stats.offloaded_bytes for row in rows])

    def _of_bytes(self) -> Iterator[list[str]]:
        rows = self.rows
        yield ["rank", *(str(row.rank) for row in rows), "total"]
        for name in ("saved", "kept", "offloaded", "reloaded", "reused", "recomputed"):
            yield _column(name, [None if row.stats is None else getattr(row.stats, f"{name}_bytes") for row in rows])

    def _of_times(self) -> Iterator[list[str]]:
        rows = self.rows
        yield ["rank", *(str(row.rank) for row in rows)]
        if any(row.seconds is not None for row in rows):
            yield ["GB/s out", *(_rate(row.out_bytes_per_second) for row in rows)]
            yield ["GB/s back", *(_rate(row.back_bytes_per_second) for row in rows)]
        yield ["stall, s", *("-" if row.stats is None else f"{row.stats.stall_seconds:.3f}" for row in rows)]


def _table(title: str, columns: Iterable[list[str]], width: int) -> str:
    if type(width) is not int or width < _LEAST_WIDTH:
        raise UsageError(f"width: got {width!r}, expected a whole number of at least {_LEAST_WIDTH} characters")
    return "\n".join([title, *aligned(list(columns), width)])


def _column(name: str, counts: Sequence[int | None]) -> list[str]:
    cells = ["-" if count is None else f"{count / _MIB:.2f}" for count in counts]
    return [name, *cells, f"{sum(count or 0 for count in counts) / _MIB:.2f}"]


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{bytes_per_second / _GB:.2f}"


def aligned(columns: list[list[str]], width: int) -> list[str]:
    """Lines of a table: the first column on the left, and as many of the others beside it as a line holds.

    The rest goes on below, with the first column again.

    Args:
        columns: the cells of each, its heading first; as many in each.
        width: characters of a line. No heading has more than half of them.
    """
    first, *others = ([cut(column[0], width // 2), *column[1:]] for column in columns)
    left = [cell.ljust(_width(first)) for cell in first]
    blocks: list[list[str]] = []
    for column in others:
        cells = [" " + cell.rjust(_width(column)) for cell in column]
        if not blocks or len(blocks[-1][0]) + len(cells[0]) > width:
            blocks.append(left)
        blocks[-1] = [line + cell for line, cell in zip(blocks[-1], cells, strict=True)]
    return [
        line.rstrip() for line in itertools.chain.from_iterable(([""] if n else []) + b for n, b in enumerate(blocks))
    ]


def _width(cells: Sequence[str]) -> int:
    return max(map(len, cells))


def cut(text: str, width: int) -> str:
    """A text with no more than so many characters, of which the last ones say so if there were more.

    Characters that a terminal obeys are escaped first: see :func:`~spillway.errors.printable`.
    """
    text = printable(text)
    return text if len(text) <= width else text[: width - 3] + "..."
