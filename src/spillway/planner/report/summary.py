"""The statistics of every rank in a step, gathered and as a table."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

import torch.distributed as dist

from spillway.errors import UsageError
from spillway.planner.report.text import aligned
from spillway.types import StepStats
from spillway.units import is_number

_MIB = 2**20
_GB = 10**9
_LEAST_WIDTH = 20


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One rank of a :class:`Summary`."""

    rank: int
    """Its global rank."""
    stats: StepStats | None
    """Its statistics; ``None``: it has none."""
    seconds: float | None = None
    """The time of its step, as the caller measured it; ``None``: unknown."""

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        """Offloaded bytes, by groups."""
        return {} if self.stats is None else {group.name: group.offloaded_bytes for group in self.stats.groups}

    @property
    def ungrouped_bytes(self) -> int:
        """Offloaded bytes that were saved in no group."""
        return 0 if self.stats is None else self.stats.offloaded_bytes - sum(self.offloaded_bytes.values())

    @property
    def out_bytes_per_second(self) -> float | None:
        """Offloaded bytes per second of the step; ``None`` without its time."""
        return None if self.stats is None or self.seconds is None else self.stats.offloaded_bytes / self.seconds

    @property
    def back_bytes_per_second(self) -> float | None:
        """Reloaded bytes per second of the step; ``None`` without its time."""
        return None if self.stats is None or self.seconds is None else self.stats.reloaded_bytes / self.seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """A step on every rank, by groups, as :func:`spillway.summary` gives it. ``str(summary)`` is a table.

    The table has bytes in MiB (2**20), and bandwidths in GB/s (10**9).

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
    """One for each rank, in order."""
    rank: int = field(default=0, compare=False)
    """The rank of this process. Only the first rank prints: see :meth:`print`."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of all ranks, sorted."""
        return tuple(sorted({name for row in self.rows for name in row.offloaded_bytes}))

    @property
    def offloaded_bytes(self) -> dict[str, int]:
        """Offloaded bytes of all ranks together, by groups."""
        return {name: sum(row.offloaded_bytes.get(name, 0) for row in self.rows) for name in self.groups}

    def to_text(self, width: int = 80) -> str:
        """Three tables: offloaded bytes, ranks by groups; all bytes that each rank counted; bandwidths and stalls.

        A rank without a group has 0 in the first table. A rank that counted nothing has dashes in the others, and so
        has a bandwidth without the step's time.

        Args:
            width: characters of a line. A wider table continues below, with the column of ranks again. A longer name
                is cut.

        Raises:
            UsageError: for a width that is not an integer of at least 20.
        """
        rows, ranks = self.rows, ["rank", *(str(row.rank) for row in self.rows)]
        counts = [[*ranks, "total"]]
        for name in ("saved", "kept", "offloaded", "reloaded", "reused", "recomputed"):
            of_rows = [None if row.stats is None else getattr(row.stats, f"{name}_bytes") for row in rows]
            counts.append(_column(name, of_rows))
        times = [ranks]
        if any(row.seconds is not None for row in rows):
            times.append(["GB/s out", *(_rate(row.out_bytes_per_second) for row in rows)])
            times.append(["GB/s back", *(_rate(row.back_bytes_per_second) for row in rows)])
        times.append(["stall, s", *("-" if row.stats is None else f"{row.stats.stall_seconds:.3f}" for row in rows)])
        tables = [_table("all, MiB:", counts, width), _table("over the step:", times, width)]
        return "\n\n".join([*([self.groups_to_text(width)] if self.groups else []), *tables])

    def groups_to_text(self, width: int = 80) -> str:
        """The first of the three tables."""
        rows = self.rows
        columns = [["rank", *(str(row.rank) for row in rows), "total"]]
        columns += [_column(name, [row.offloaded_bytes.get(name, 0) for row in rows]) for name in self.groups]
        if any(row.ungrouped_bytes for row in rows):
            columns.append(_column("no group", [row.ungrouped_bytes for row in rows]))
        columns.append(_column("total", [0 if row.stats is None else row.stats.offloaded_bytes for row in rows]))
        return _table("offloaded, MiB:", columns, width)

    def print(self, file: TextIO | None = None) -> None:
        """Write the table, on the first rank only. Every rank may call it.

        Args:
            file: where to; ``None``: the standard output.
        """
        if not self.rows or self.rank == self.rows[0].rank:
            (sys.stdout if file is None else file).write(f"{self.to_text()}\n")

    def __str__(self) -> str:
        return self.to_text()


def _table(title: str, columns: list[list[str]], width: int) -> str:
    if type(width) is not int or width < _LEAST_WIDTH:
        raise UsageError(f"width: got {width!r}, expected an integer of at least {_LEAST_WIDTH} characters")
    return "\n".join([title, *aligned(columns, width)])


def _column(name: str, counts: Sequence[int | None]) -> list[str]:
    cells = ["-" if count is None else f"{count / _MIB:.2f}" for count in counts]
    return [name, *cells, f"{sum(count or 0 for count in counts) / _MIB:.2f}"]


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else f"{bytes_per_second / _GB:.2f}"


def summary(
    stats: StepStats | None, *, seconds: float | None = None, process_group: dist.ProcessGroup | None = None
) -> Summary:
    """Gather the statistics of every rank in a step, by groups: the same value on each rank.

    With ``torch.distributed`` initialised, this is a collective call that every rank of the process group makes. With
    NCCL, call ``torch.cuda.set_device`` first. Without ``torch.distributed`` there is one row.

    Args:
        stats: of a step whose backward has ended: of :meth:`offload.stats`, :meth:`Attached.stats`, or of a pipeline's
            stages. ``None`` on a rank without any.
        seconds: the time of that step. ``None``: there are no bandwidths.
        process_group: whose ranks; ``None``: all.

    Raises:
        UsageError: for a wrong argument; on a process that is not in the process group.

    Example:
        >>> summary = spillway.summary(context.stats(), seconds=step_seconds)  # doctest: +SKIP
        >>> summary.print()  # on the first rank  # doctest: +SKIP
    """
    if stats is not None and not isinstance(stats, StepStats):
        raise UsageError(f"stats: got {stats!r:.200}, expected a spillway.StepStats, as stats() gives it, or None")
    if seconds is not None and not (is_number(seconds) and 0 < seconds < math.inf):
        raise UsageError(f"seconds: got {seconds!r}, expected a number above 0, or None if it was not measured")
    if not (dist.is_available() and dist.is_initialized()):
        return Summary((SummaryRow(0, stats, seconds),))
    rank = dist.get_rank()
    if dist.get_rank(process_group) < 0:
        raise UsageError(
            f"process_group: got one that rank {rank} is not in, expected that only its ranks call summary()"
        )
    rows: list[SummaryRow | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(rows, SummaryRow(rank, stats, seconds), process_group)
    return Summary(tuple(row for row in rows if row is not None), rank)
