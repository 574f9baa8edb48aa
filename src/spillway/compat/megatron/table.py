"""The table of what leaves on every rank."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

_MIB = 2**20


def print_offload_summary_table(total_offload_bytes: dict[str, int]) -> None:
    """Print what leaves on every rank, by groups, on rank 0. In a process group, all of its ranks have to call it.

    Args:
        total_offload_bytes: bytes by the names of groups, as ``PipelineOffloadManager.offload_summary_bytes``.

    Example:
        >>> print_offload_summary_table({"moe_act": 3 << 20})
        rank   moe_act  total
        0         3.00   3.00
        total     3.00   3.00
        MiB
    """
    rows: list[Any] = [total_offload_bytes]
    if dist.is_available() and dist.is_initialized():
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, total_offload_bytes)
    if rank() == 0:
        sys.stdout.write(f"{offload_summary_table(rows)}\n")


def offload_summary_table(rows: Sequence[Mapping[str, int]]) -> str:
    """The table as text: a row for each rank, a column for each name, totals of both, in MiB.

    Args:
        rows: bytes by names, rank by rank. A name that a rank lacks is 0 there.

    Example:
        >>> print(offload_summary_table([{"mlp": 1 << 20}, {}]).splitlines()[1])
        0      1.00   1.00
    """
    names = sorted(set().union(*rows))
    columns = [*names, None]
    total = Counter[str]()
    for row in rows:
        total.update(row)
    lines = [["rank", *names, "total"]]
    for title, row in [*((str(rank), row) for rank, row in enumerate(rows)), ("total", total)]:
        sizes = [sum(row.values()) if name is None else row.get(name, 0) for name in columns]
        lines.append([title, *(f"{size / _MIB:.2f}" for size in sizes)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.rjust(width + 1) for cell, width in zip(line, widths, strict=True)]
        text.append(" ".join([line[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join([*text, "MiB"])


def rank() -> int:
    """This process's among all; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
