"""The table of what leaves on every rank."""

from __future__ import annotations

import torch.distributed as dist

from spillway.records import GroupStats, StepStats
from spillway.summarizing import summary


def print_offload_summary_table(total_offload_bytes: dict[str, int]) -> None:
    """Print what leaves on every rank, by groups, on rank 0. In a process group, all of its ranks have to call it.

    Args:
        total_offload_bytes: bytes by the names of groups, as ``PipelineOffloadManager.offload_summary_bytes``.

    Example:
        >>> print_offload_summary_table({"moe_act": 3 << 20})
        offloaded, MiB:
        rank  moe_act total
        0        3.00  3.00
        total    3.00  3.00
    """
    groups = tuple(GroupStats(name, offloaded_bytes=nbytes) for name, nbytes in total_offload_bytes.items())
    found = summary(StepStats(offloaded_bytes=sum(total_offload_bytes.values()), groups=groups))
    if found.rank == 0:
        print(found.groups_to_text())  # noqa: T201  (what it is for)


def rank() -> int:
    """This process's among all; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
