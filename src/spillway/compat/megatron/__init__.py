"""Megatron-Core's names: fine-grained activation offloading, and the hybrid optimizer.

A chunk is the forward of one micro-batch through one virtual stage: a
:class:`ChunkOffloadHandler`. A group is one of the chunk's groups. Start and commit add no nodes to
the graph: the engine learns in which order to reload. ``docs/compat/megatron.md`` maps each name and lists the
differences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spillway.compat.megatron.chunk import ChunkOffloadHandler, OffloadTensorGroup
from spillway.compat.megatron.manager import OffloadTensorPool, PipelineOffloadManager
from spillway.compat.megatron.optimizer import HybridDeviceOptimizer
from spillway.errors import UsageError
from spillway.planner.report.summary import summary
from spillway.runtime.system import which_device
from spillway.saved_tensors.groups import Group
from spillway.types import GroupStats, StepStats
from spillway.units import format_bytes

__all__ = [
    "DEBUG",
    "DEBUG_RANK",
    "ChunkOffloadHandler",
    "FineGrainedActivationOffloadingInterface",
    "GPUTensorPool",
    "HybridDeviceOptimizer",
    "OffloadTensorGroup",
    "OffloadTensorPool",
    "PipelineOffloadManager",
    "debug_rank",
    "fine_grained_offloading_backward_record",
    "fine_grained_offloading_disable_offload",
    "fine_grained_offloading_enable_offload",
    "fine_grained_offloading_forward_record",
    "fine_grained_offloading_group_commit",
    "fine_grained_offloading_group_flush_delayed_groups",
    "fine_grained_offloading_group_offload",
    "fine_grained_offloading_group_start",
    "print_offload_summary_table",
]

DEBUG = False
"""Whether :func:`debug_rank` prints."""
DEBUG_RANK = 0
"""The rank that :func:`debug_rank` prints on."""

GPUTensorPool = OffloadTensorPool
"""The name in older releases."""

_POSITIONAL = (
    *("pp_rank", "vp_size", "vp_stage", "min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks"),
    *("activation_offload_fraction", "max_inflight_offloads"),
)
"""Arguments of ``init_chunk_handler`` in newer releases."""
_Value = TypeVar("_Value")
_instance = PipelineOffloadManager.get_instance


def fine_grained_offloading_group_start(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Start a group of that name, unless it is ``None``. Returns the tensor itself.

    Example:
        >>> x = torch.ones(1)
        >>> fine_grained_offloading_group_start(x, "attn_norm") is x
        True
    """
    _instance()._start(name)
    return tensor


def fine_grained_offloading_group_commit(
    tensor: _Value,
    name: str,
    forced_released_tensors: Iterable[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> _Value:
    """End the first open group of that name, if there is one, and offload it. Returns the tensor itself.

    Args:
        tensor: a tensor, a tuple or a list. An empty one commits nothing.
        name: of the group.
        forced_released_tensors: tensors of the group whose memory is freed now, even if they are referenced elsewhere:
            see :class:`~spillway.group`.
        delay_offload: offload the group when delayed groups are flushed.

    Raises:
        UsageError: for a tensor to release that shares its memory with another one.

    Example:
        >>> fine_grained_offloading_group_commit((), "qkv_linear")
        ()
    """
    if not isinstance(tensor, tuple | list) or tensor:
        _instance()._commit(name, forced_released_tensors or (), delay_offload)
    return tensor


def fine_grained_offloading_group_offload(
    tensor: _Value,
    name: str,
    forced_released_tensors: Iterable[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> _Value:
    """:func:`fine_grained_offloading_group_commit`, but delays only between ``enter_replay`` and ``exit_replay``.

    Example:
        >>> fine_grained_offloading_group_offload((), "gdp_qkv")
        ()
    """
    delay = delay_offload and _instance().in_replay
    return fine_grained_offloading_group_commit(tensor, name, forced_released_tensors, delay)


def fine_grained_offloading_group_flush_delayed_groups() -> None:
    """Offload the groups that were committed with ``delay_offload``, the oldest first."""
    _instance().flush_delayed_groups()


def fine_grained_offloading_disable_offload() -> None:
    """Offload nothing from now on, in any chunk. Offloaded tensors are still reloaded."""
    _instance().disable_offload()


def fine_grained_offloading_enable_offload() -> None:
    """Offload groups again that start from now on."""
    _instance().enable_offload()


def fine_grained_offloading_forward_record(event: Any = None) -> None:
    """Record an event on the current stream, which then waits for offloading. Does nothing on the CPU.

    ``event`` is a ``torch.Event``, or the accelerator's own. ``None``: the event of ``cuda_graph_event``, if it exists.
    """
    _instance()._record(event, 0)


def fine_grained_offloading_backward_record(tensor: torch.Tensor, event: Any = None) -> torch.Tensor:
    """An identity whose backward records an event, as in forward, on a stream which then waits for reloading."""
    return tensor if which_device().type == "cpu" else _BackwardRecord.apply(tensor, event)  # type: ignore[no-untyped-call]


class _BackwardRecord(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Any) -> torch.Tensor:
        ctx.event = event
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _instance()._record(ctx.event, 1)
        return (*gradients, None)


class FineGrainedActivationOffloadingInterface:
    """A group: tensors that autograd saves inside are offloaded when the group is committed.

    Entering starts the group, if ``offload``, and returns the tensor. Leaving does not commit it: call
    :meth:`group_commit`, or :meth:`group_offload` of the same object.

    Example:
        >>> with FineGrainedActivationOffloadingInterface(True, hidden, "mlp_norm") as hidden:  # doctest: +SKIP
        ...     normed = norm(hidden)
        >>> out = FineGrainedActivationOffloadingInterface.group_commit(mlp(normed), "mlp_norm")  # doctest: +SKIP
    """

    def __init__(self, offload: bool, tensor: torch.Tensor, name: str) -> None:
        self.offload = offload
        self.tensor = tensor
        self.name = name
        self._entered: list[tuple[PipelineOffloadManager, Group | None]] = []

    def __enter__(self) -> torch.Tensor:
        if self.offload:
            manager = _instance()
            group = manager._start(self.name)
            manager.__enter__()
            self._entered.append((manager, group))
        return self.tensor

    def __exit__(self, kind: type[BaseException] | None = None, *error: Any) -> None:
        if not self._entered:
            return
        manager, group = self._entered.pop()
        try:
            manager.__exit__(kind, *(error or (None, None)))
        finally:
            if kind is not None and group is not None and manager._forward is not None:
                manager._forward._fail(group)

    def group_offload(
        self,
        tensor: _Value,
        forced_released_tensors: Iterable[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> _Value:
        """If ``offload``, :func:`fine_grained_offloading_group_offload` with the name of this object."""
        if not self.offload:
            return tensor
        return fine_grained_offloading_group_offload(tensor, self.name, forced_released_tensors, delay_offload)

    @staticmethod
    def init_chunk_handler(
        vp_size: int | None, vp_stage: int | None, min_offloaded_tensor_size: int, *newer: Any, **options: Any
    ) -> None:
        """Start a chunk: the forward of a micro-batch through a virtual stage. Without gradients, do nothing.

        Args:
            vp_size: number of virtual stages of this rank; ``None``: 1.
            vp_stage: which one of them; ``None``: 0.
            min_offloaded_tensor_size: do not offload tensors of fewer elements.
            newer: newer releases' positional arguments: ``pp_rank`` before those above, and the next three after them.
            options: by name: ``delta_offload_bytes_across_pp_ranks``, how many bytes more each rank keeps than the one
                before; ``activation_offload_fraction``, the share of a chunk's eligible groups that is offloaded, from
                0 to 1; ``max_inflight_offloads``, how many groups of a name may be offloading at once (``None``: any
                number); ``pp_rank``, the rank's place in the pipeline; only here, ``tier``: see ``spillway.offload``.

        Raises:
            UsageError: for an invalid argument.
        """
        given = (vp_size, vp_stage, min_offloaded_tensor_size, *newer)
        names = _POSITIONAL if newer else _POSITIONAL[1:4]
        if len(given) > len(names) or (newer and "pp_rank" in options):
            raise UsageError(
                f"init_chunk_handler: got {len(given)} positional arguments, expected {', '.join(_POSITIONAL[1:4])} "
                f"or all of {', '.join(_POSITIONAL)}; give them by name"
            )
        _instance().init_model_chunk_offload_handler(**options, **dict(zip(names, given, strict=False)))

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[None]:
        """The manager as a context with hooks, or a context that does nothing."""
        return _instance() if flag else nullcontext()

    @staticmethod
    def mark_not_offloadable(tensor: torch.Tensor | None) -> None:
        """Keep the tensor's storage. ``None`` is ignored."""
        _instance().mark_not_offloadable(tensor)

    mark_not_offload = mark_not_offloadable

    @staticmethod
    def cuda_graph_stream() -> Any:
        """:attr:`PipelineOffloadManager.cuda_graph_stream`."""
        return _instance().cuda_graph_stream

    @staticmethod
    def cuda_graph_event() -> Any:
        """:attr:`PipelineOffloadManager.cuda_graph_event`."""
        return _instance().cuda_graph_event

    @staticmethod
    def enter_replay() -> None:
        """Start the replay of a captured graph. Until :meth:`exit_replay`, :meth:`group_offload` may delay groups."""
        _instance().in_replay = True

    @staticmethod
    def exit_replay() -> None:
        """End the replay. Delayed groups wait for :meth:`flush_delayed_groups`."""
        _instance().in_replay = False

    @staticmethod
    def reset(process_group: dist.ProcessGroup | None = None) -> None:
        """End the iteration. Call it between iterations. ``process_group`` has no effect."""
        _instance().reset(process_group)

    @staticmethod
    def reset_instance() -> None:
        """Replace the manager by a new one, which has learned nothing."""
        PipelineOffloadManager.reset_instance()

    group_commit = staticmethod(fine_grained_offloading_group_commit)
    forward_record = staticmethod(fine_grained_offloading_forward_record)
    backward_record = staticmethod(fine_grained_offloading_backward_record)
    flush_delayed_groups = staticmethod(fine_grained_offloading_group_flush_delayed_groups)
    disable_offload = staticmethod(fine_grained_offloading_disable_offload)
    enable_offload = staticmethod(fine_grained_offloading_enable_offload)


def print_offload_summary_table(
    total_offload_bytes: dict[str, int],
    duplicates: Mapping[str, tuple[int, int]] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Print the offloaded bytes of all ranks, by groups, on the first rank. All ranks of the process group call it.

    Args:
        total_offload_bytes: by group name.
        duplicates: number and bytes of redundant copies, by group name. Spillway itself makes none.
        process_group: the ranks; ``None``: all, or this process.

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
    stats = StepStats(offloaded_bytes=sum(total_offload_bytes.values()), groups=groups)
    found = summary(stats, process_group=process_group)
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


def debug_rank(message: str) -> None:
    """Print a message on rank ``DEBUG_RANK`` while ``DEBUG`` is true. Without a process group the rank is 0.

    Example:
        >>> debug_rank("a micro-batch begins")
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if DEBUG and rank == DEBUG_RANK:
        sys.stdout.write(f"{message}\n")
