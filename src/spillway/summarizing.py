"""The public call that gathers what every rank has counted."""

from __future__ import annotations

import math

import torch.distributed as dist

from spillway.errors import UsageError
from spillway.records import StepStats
from spillway.report.table import Summary, SummaryRow


def summary(
    stats: StepStats | None, *, seconds: float | None = None, process_group: dist.ProcessGroup | None = None
) -> Summary:
    """What a step did, by groups, on every rank: the same value on each.

    With ``torch.distributed`` initialised this is a collective call: every rank of the process group makes it. Without,
    there is one row. (Over NCCL, as with every object that is gathered so, ``torch.cuda.set_device`` comes first.)

    Args:
        stats: of a step of this rank, when its backward has ended: of :meth:`offload.stats`, :meth:`Attached.stats`,
            or of a pipeline's stages; ``None`` on a rank that has none.
        seconds: what that step took here. Rates are means over it; ``None``: rates are left out.
        process_group: whose ranks; ``None``: all.

    Raises:
        UsageError: for arguments that cannot be meant; on a process that is not in the process group.

    Example:
        >>> summary = spillway.summary(context.stats(), seconds=step_seconds)  # doctest: +SKIP
        >>> summary.print()  # on the first rank  # doctest: +SKIP
    """
    if stats is not None and not isinstance(stats, StepStats):
        raise UsageError(f"stats: got {stats!r:.200}, expected a spillway.StepStats, as stats() gives it, or None")
    if seconds is not None and not _is_duration(seconds):
        raise UsageError(f"seconds: got {seconds!r}, expected a number above 0, or None if nobody has measured")
    if not (dist.is_available() and dist.is_initialized()):
        return Summary((SummaryRow(0, stats, seconds),))
    rank = dist.get_rank()
    if dist.get_rank(process_group) < 0:
        raise UsageError(f"process_group: got one that rank {rank} is not in, expected that only its ranks call this")
    rows: list[SummaryRow | None] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(rows, SummaryRow(rank, stats, seconds), process_group)
    return Summary(tuple(row for row in rows if row is not None), rank)


def _is_duration(seconds: object) -> bool:
    return (
        isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0 and math.isfinite(seconds)
    )
