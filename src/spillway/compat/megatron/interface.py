"""What a model calls: groups begin, and are committed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from spillway.capture.groups import Group
from spillway.compat.megatron.graphs import (
    fine_grained_offloading_backward_record,
    fine_grained_offloading_forward_record,
)
from spillway.compat.megatron.manager import PipelineOffloadManager

_Value = TypeVar("_Value")


class FineGrainedActivationOffloadingInterface:
    """What is saved inside belongs to a group, which leaves when it is committed.

    On entering, the group begins, and hooks are pushed; on leaving, also by an exception, they are popped. It is not
    committed by that: call :meth:`group_commit`, or :meth:`group_offload` of the same object.

    Args:
        offload: whether to do anything at all.
        tensor: given back on entering, for use from here on.
        name: of the group.

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
            manager = PipelineOffloadManager.get_instance()
            group = manager._start(self.name)
            manager.__enter__()
            self._entered.append((manager, group))
        return self.tensor

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        if not self._entered:
            return
        manager, group = self._entered.pop()
        try:
            manager.__exit__(kind, error, trace)
        finally:
            if kind is not None:
                manager._fail(group)

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
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int,
        *newer: Any,
        **options: Any,
    ) -> None:
        """A micro-batch's forward through a virtual stage begins. With gradients off, nothing happens.

        By position these three, or the order of newer releases: ``pp_rank`` first, and after these three
        ``delta_offload_bytes_across_pp_ranks``, ``activation_offload_fraction`` and ``max_inflight_offloads``.

        Args:
            vp_size: how many virtual stages this rank has; ``None``: 1.
            vp_stage: which of them it is; ``None``: 0.
            min_offloaded_tensor_size: leave tensors of fewer elements where they are.
            newer: see above.
            options: by name: ``pp_rank``, the rank's place in the pipeline (``None``: 0);
                ``delta_offload_bytes_across_pp_ranks``, how many bytes more stay on each rank than on the one before;
                ``activation_offload_fraction``, the share of a chunk's eligible groups that is offloaded, from 0 to 1;
                ``max_inflight_offloads``, how many groups of a name may be on their way out at once (``None``: any);
                and, not there, ``tier``: ``"host"``, ``"disk"`` or ``"auto"``.

        Raises:
            UsageError: an argument that cannot be meant.
        """
        PipelineOffloadManager.get_instance().init_model_chunk_offload_handler(
            vp_size, vp_stage, min_offloaded_tensor_size, *newer, **options
        )

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[None]:
        """The manager, inside of which hooks see what is saved; or a context that does nothing."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    @staticmethod
    def group_commit(
        tensor: _Value,
        name: str,
        forced_released_tensors: Iterable[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> _Value:
        """The group ends, and leaves: see :func:`fine_grained_offloading_group_commit`."""
        return fine_grained_offloading_group_commit(tensor, name, forced_released_tensors, delay_offload)

    @staticmethod
    def mark_not_offloadable(tensor: torch.Tensor | None) -> None:
        """What is saved of the tensor's storage stays. ``None`` is passed over."""
        PipelineOffloadManager.get_instance().mark_not_offloadable(tensor)

    mark_not_offload = mark_not_offloadable

    @staticmethod
    def forward_record(event: Any = None) -> None:
        """See :func:`fine_grained_offloading_forward_record`. ``None``: the event of :meth:`cuda_graph_event`."""
        fine_grained_offloading_forward_record(PipelineOffloadManager.get_instance()._event_of(event))

    @staticmethod
    def backward_record(tensor: torch.Tensor, event: Any = None) -> torch.Tensor:
        """See :func:`fine_grained_offloading_backward_record`. ``None``: the event of :meth:`cuda_graph_event`."""
        return fine_grained_offloading_backward_record(tensor, PipelineOffloadManager.get_instance()._event_of(event))

    @staticmethod
    def cuda_graph_stream() -> Any:
        """The stream for captured graphs: see :attr:`PipelineOffloadManager.cuda_graph_stream`."""
        return PipelineOffloadManager.get_instance().cuda_graph_stream

    @staticmethod
    def cuda_graph_event() -> Any:
        """The event for captured graphs: see :attr:`PipelineOffloadManager.cuda_graph_event`."""
        return PipelineOffloadManager.get_instance().cuda_graph_event

    @staticmethod
    def enter_replay() -> None:
        """A replay of a captured graph begins: until :meth:`exit_replay`, :meth:`group_offload` may delay groups."""
        PipelineOffloadManager.get_instance().enter_replay()

    @staticmethod
    def exit_replay() -> None:
        """The replay is over. Delayed groups wait for :meth:`flush_delayed_groups`."""
        PipelineOffloadManager.get_instance().exit_replay()

    @staticmethod
    def reset(process_group: dist.ProcessGroup | None = None) -> None:
        """The iteration is over: call it between iterations.

        Args:
            process_group: accepted, and without effect: a reset gathers nothing from other ranks.
        """
        PipelineOffloadManager.get_instance().reset(process_group)

    @staticmethod
    def reset_instance() -> None:
        """Begin with a new manager, which knows nothing."""
        PipelineOffloadManager.reset_instance()

    @staticmethod
    def flush_delayed_groups() -> None:
        """Groups that were committed with ``delay_offload`` leave now."""
        fine_grained_offloading_group_flush_delayed_groups()

    @staticmethod
    def disable_offload() -> None:
        """Nothing leaves from now on. What has left comes back."""
        fine_grained_offloading_disable_offload()

    @staticmethod
    def enable_offload() -> None:
        """Groups that begin from now on leave again."""
        fine_grained_offloading_enable_offload()


def fine_grained_offloading_group_start(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """A group begins: what hooks see from now on belongs to it. Gives the very tensor.

    Example:
        >>> x = torch.ones(1)
        >>> fine_grained_offloading_group_start(x, "attn_norm") is x
        True
    """
    PipelineOffloadManager.get_instance()._start(name)
    return tensor


def fine_grained_offloading_group_commit(
    tensor: _Value,
    name: str,
    forced_released_tensors: Iterable[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> _Value:
    """The first open group of that name ends, and leaves; if there is none, nothing happens.

    Args:
        tensor: given back as it is: a tensor, a tuple or a list.
        name: of the group.
        forced_released_tensors: those of them that leave with the group lose their memory now, whoever holds them: see
            :class:`~spillway.group`.
        delay_offload: the group leaves when delayed groups are flushed.

    Raises:
        UsageError: for a tensor to release whose memory another one sees.

    Example:
        >>> fine_grained_offloading_group_commit((), "qkv_linear")
        ()
    """
    if not isinstance(tensor, tuple | list) or tensor:
        PipelineOffloadManager.get_instance()._commit(name, forced_released_tensors or (), delay_offload)
    return tensor


def fine_grained_offloading_group_offload(
    tensor: _Value,
    name: str,
    forced_released_tensors: Iterable[torch.Tensor] | None = None,
    delay_offload: bool = False,
) -> _Value:
    """:func:`fine_grained_offloading_group_commit`, with the newer releases' meaning of ``delay_offload``.

    Args:
        tensor: given back as it is: a tensor, a tuple or a list.
        name: of the group.
        forced_released_tensors: see there.
        delay_offload: between ``enter_replay`` and ``exit_replay``, the group is offloaded when delayed groups are
            flushed. Elsewhere it has no effect.

    Raises:
        UsageError: for a tensor to release whose memory another one sees.

    Example:
        >>> fine_grained_offloading_group_offload((), "gdp_qkv")
        ()
    """
    delay = delay_offload and PipelineOffloadManager.get_instance().in_replay
    return fine_grained_offloading_group_commit(tensor, name, forced_released_tensors, delay)


def fine_grained_offloading_group_flush_delayed_groups() -> None:
    """Groups that were committed with ``delay_offload`` leave now, the oldest first."""
    PipelineOffloadManager.get_instance().flush_delayed_groups()


def fine_grained_offloading_disable_offload() -> None:
    """Nothing leaves from now on, of any chunk. What has left comes back."""
    PipelineOffloadManager.get_instance().disable_offload()


def fine_grained_offloading_enable_offload() -> None:
    """Groups that begin from now on leave again."""
    PipelineOffloadManager.get_instance().enable_offload()
