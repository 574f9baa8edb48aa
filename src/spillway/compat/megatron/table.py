"""The table of what leaves on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from spillway.records import GroupStats, StepStats
from spillway.summarizing import summary
from spillway.units import format_bytes

_Duplicates = Mapping[str, tuple[int, int]]


def print_offload_summary_table(
    total_offload_bytes: dict[str, int],
    duplicates: _Duplicates | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Print the bytes that every rank offloads, by groups, on the first rank. All ranks of the process group call it.

    Args:
        total_offload_bytes: bytes by the names of groups, as ``PipelineOffloadManager.offload_summary_bytes``.
        duplicates: of each group, how many copies were redundant, and their bytes. Spillway's own offloading makes
            none.
        process_group: the ranks; ``None``: all. Without ``torch.distributed``, this process alone.

    Example:
        >>> print_offload_summary_table({"moe_act": 3 << 20}, {"moe_act": (1, 1 << 20)})
        offloaded, MiB:
        rank  moe_act total
        0        3.00  3.00
        total    3.00  3.00
        redundant copies:
        rank 0, moe_act: 1, 1.0 MiB
    """
    groups = tuple(GroupStats(name, offloaded_bytes=nbytes) for name, nbytes in total_offload_bytes.items())
    found = summary(
        StepStats(offloaded_bytes=sum(total_offload_bytes.values()), groups=groups), process_group=process_group
    )
    redundant = [dict(duplicates or {})] * len(found.rows)
    if len(found.rows) > 1:
        dist.all_gather_object(redundant, redundant[0], process_group)
    if found.rank != found.rows[0].rank:
        return
    lines = [
        f"rank {row.rank}, {name}: {count}, {format_bytes(nbytes)}"
        for row, by_name in zip(found.rows, redundant, strict=True)
        for name, (count, nbytes) in by_name.items()
        if count
    ]
    print(found.groups_to_text(), *(["redundant copies:", *lines] if lines else []), sep="\n")  # noqa: T201


def rank() -> int:
    """This process's among all; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
