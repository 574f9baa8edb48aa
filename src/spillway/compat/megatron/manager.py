"""The chunks of an iteration, and what is known of their order.

NOTE [ Iterations ]

A chunk is named by its virtual stage and its number among that stage's micro-batches since the last reset, and what is
learned of it is learned by this name. At a reset, the order in which backward came to the chunks says which of their
groups stay (:meth:`~spillway.Groups.over`).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from spillway.capture.groups import Group
from spillway.chunks import Chunk, aside
from spillway.compat.megatron.chunk import AtLeast, ChunkOffloadHandler, is_marked
from spillway.compat.megatron.graphs import current_device, make_event, make_stream
from spillway.compat.megatron.pool import OffloadTensorPool
from spillway.errors import UsageError
from spillway.groups import Groups
from spillway.offloading import keep_tensor
from spillway.runtime.backend import Lane
from spillway.session import Session

_MIN_ELEMENTS = 1024 * 1024
_NEWER_POSITIONAL = (
    "delta_offload_bytes_across_pp_ranks",
    "activation_offload_fraction",
    "max_inflight_offloads",
)


class _Entered(threading.local):
    """The contexts that the calling thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class PipelineOffloadManager:
    """The chunks of the default session, and what is known of their order. A context manager: see ``get_context``.

    Get it by :meth:`get_instance`. All but reading is for the thread that runs forward.

    Example:
        >>> manager = PipelineOffloadManager.get_instance()
        >>> manager.offload_summary_total_bytes
        0
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        self._session = Session.default()
        self._name = f"megatron {next(self._numbers)}"
        self._pool: OffloadTensorPool | None = None
        self._graph_stream: torch.Stream | None = None
        self._graph_event: torch.Event | None = None
        self._in_replay = False
        self._entered = _Entered()
        self._rules = Groups(margin=1)
        self._summary: dict[str, int] = {}
        # By tags: see NOTE [ Iterations ].
        self._rules_of: dict[str, Groups] = {}
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._chunks: dict[str, ChunkOffloadHandler] = {}
        self._micro_batches: Counter[int] = Counter()
        self._asked: dict[str, None] = {}
        self._forward: ChunkOffloadHandler | None = None
        self._backward: ChunkOffloadHandler | None = None

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """That of the default session."""
        adapters = Session.default().adapters
        manager = adapters.get("megatron")
        if manager is None:
            manager = adapters["megatron"] = cls()
        assert isinstance(manager, PipelineOffloadManager)
        return manager

    @classmethod
    def reset_instance(cls) -> None:
        """Begin with a new one, which knows nothing. Graphs that are alive still have what left."""
        Session.default().adapters["megatron"] = cls()

    @property
    def d2h_stream(self) -> Lane:
        """The session's stream of copies out of the current accelerator, or the CPU's lane."""
        return self._session.runtime(current_device()).mover.lanes[0]

    @property
    def h2d_stream(self) -> Lane:
        """The session's stream of copies back to it."""
        return self._session.runtime(current_device()).mover.lanes[1]

    @property
    def cpu_tensor_pool(self) -> OffloadTensorPool:
        """A pool of host memory, pinned where there is an accelerator, for your own tensors: chunks need none."""
        if self._pool is None:
            self._pool = OffloadTensorPool("cpu", pin_memory=torch.accelerator.is_available())
        return self._pool

    @property
    def cuda_graph_stream(self) -> torch.Stream | None:
        """A stream of its own, on which graphs may be captured and replayed. Without an accelerator, ``None``."""
        if self._graph_stream is None:
            self._graph_stream = make_stream(current_device())
        return self._graph_stream

    @property
    def cuda_graph_event(self) -> torch.Event | None:
        """An event for graphs, which ``forward_record`` and ``backward_record`` then record.

        Without an accelerator, ``None``.
        """
        if self._graph_event is None:
            self._graph_event = make_event(current_device())
        return self._graph_event

    @property
    def in_replay(self) -> bool:
        """Whether a captured graph is being replayed."""
        return self._in_replay

    def enter_replay(self) -> None:
        """A replay of a captured graph begins: see ``FineGrainedActivationOffloadingInterface.enter_replay``."""
        self._in_replay = True

    def exit_replay(self) -> None:
        """The replay is over."""
        self._in_replay = False

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """Bytes that leave, by groups, in all chunks up to the first one that backward comes to: what is away then.

        Of the last iteration, by the rules of the next; empty until one has ended.
        """
        return dict(self._summary)

    @property
    def offload_summary_total_bytes(self) -> int:
        """The sum of :attr:`offload_summary_bytes`."""
        return sum(self._summary.values())

    def init_model_chunk_offload_handler(
        self,
        vp_size: int | None,
        vp_stage: int | None,
        min_offloaded_tensor_size: int = _MIN_ELEMENTS,
        *newer: Any,
        **options: Any,
    ) -> None:
        """A chunk begins, with these options: see ``FineGrainedActivationOffloadingInterface.init_chunk_handler``."""
        if newer:
            names = ("min_offloaded_tensor_size", *_NEWER_POSITIONAL)
            if len(newer) > len(names) or "pp_rank" in options:
                raise UsageError(
                    f"init_chunk_handler: got {3 + len(newer)} arguments by position, expected vp_size, vp_stage and "
                    f"min_offloaded_tensor_size, or pp_rank before these and {', '.join(_NEWER_POSITIONAL)} after; "
                    f"give them by name"
                )
            options = {**options, **dict(zip(names, newer, strict=False)), "pp_rank": vp_size}
            vp_size, vp_stage = vp_stage, min_offloaded_tensor_size
        else:
            options["min_offloaded_tensor_size"] = min_offloaded_tensor_size
        self._begin_chunk(1 if vp_size is None else vp_size, 0 if vp_stage is None else vp_stage, **options)

    def _begin_chunk(
        self,
        vp_size: int,
        vp_stage: int,
        min_offloaded_tensor_size: int = _MIN_ELEMENTS,
        *,
        pp_rank: int | None = None,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: int | None = None,
        tier: str = "auto",
    ) -> None:
        if vp_stage not in range(vp_size):
            raise UsageError(
                f"vp_stage: got {vp_stage!r} of {vp_size!r} stages, expected a number from 0 on below that"
            )
        if type(min_offloaded_tensor_size) is not int or min_offloaded_tensor_size < 0:
            raise UsageError(
                f"min_offloaded_tensor_size: got {min_offloaded_tensor_size!r}, expected a whole number of elements"
            )
        rules = Groups(
            margin=1,
            fraction=activation_offload_fraction,
            fewer_bytes=(pp_rank or 0) * delta_offload_bytes_across_pp_ranks,
            in_flight=None if max_inflight_offloads is None else max(max_inflight_offloads, 1),
        )
        if not torch.is_grad_enabled():
            return
        self._rules = rules
        self._end_forward()
        tag = f"{self._name}, stage {vp_stage}, micro-batch {self._micro_batches[vp_stage]}"
        self._micro_batches[vp_stage] += 1
        chunk = Chunk(
            tag=tag,
            # Of a chunk that no iteration has had yet, all groups leave.
            groups=self._rules_of.get(tag, Groups(in_flight=rules.in_flight)),
            policy=AtLeast(min_offloaded_tensor_size),
            tier=tier,
            spares=is_marked,
            on_backward=lambda: self._on_backward(tag),
            session=self._session,
        )
        self._forward = self._chunks[tag] = ChunkOffloadHandler(chunk, min_offloaded_tensor_size)

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk that began last in this iteration, if one has."""
        return self._forward

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk whose backward began last, of those that had something leave."""
        return self._backward

    def mark_not_offloadable(self, tensor: torch.Tensor | None) -> None:
        """What is saved of the tensor's storage stays, also of views. ``None`` is passed over."""
        if tensor is not None:
            tensor.offloading_activation = False  # type: ignore[attr-defined]
            keep_tensor(tensor, session=self._session)

    def flush_delayed_groups(self) -> None:
        """Groups that were committed with ``delay_offload`` leave now."""
        self._session.flush_groups()

    def disable_offload(self) -> None:
        """Nothing leaves from now on, of any chunk. What has left comes back."""
        self._session.enabled = False

    def enable_offload(self) -> None:
        """Groups that begin from now on leave again."""
        self._session.enabled = True

    def reset(self, process_group: dist.ProcessGroup | None = None) -> None:
        """The iteration is over: its groups say which ones stay in the next. What was never flushed stays.

        Args:
            process_group: accepted, and without effect: a reset gathers nothing from other ranks.
        """
        self._session.forget_groups()
        self._end_forward()
        if self._pool is not None:
            self._pool.reset()
        self._learn()
        self._begin_iteration()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            chunk = self._live_chunk()
            if chunk is None:
                stack.enter_context(aside())
            else:
                stack.enter_context(_transformer_engine())
                stack.enter_context(chunk.inside())
            self._entered.stacks.append(stack.pop_all())

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._entered.stacks.pop().__exit__(kind, error, trace)

    def _event_of(self, event: Any) -> Any:
        """The event, or the one for graphs if it was asked for."""
        return self._graph_event if event is None else event

    def _live_chunk(self) -> Chunk | None:
        chunk = None if self._forward is None else self._forward._chunk
        return chunk if chunk is not None and chunk.is_live else None

    def _start(self, name: str | None) -> Group | None:
        chunk = self._live_chunk()
        return None if chunk is None or name is None else chunk.start(name)

    def _commit(self, name: str, release: Iterable[torch.Tensor], delay: bool) -> None:
        if self._forward is not None:
            self._forward._chunk.commit(name, release=release, delay=delay)

    def _fail(self, group: Group | None) -> None:
        if self._forward is not None and group is not None:
            self._forward._chunk.fail(group)

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._forward._chunk.end()
            self._forward = None

    def _on_backward(self, tag: str) -> None:
        chunk = self._chunks.get(tag)
        if chunk is not None:
            self._asked.setdefault(tag)
            self._backward = chunk

    def _learn(self) -> None:
        """See NOTE [ Iterations ]."""
        asked = {tag: place for place, tag in enumerate(self._asked)}
        # An evaluation with gradients on is no iteration. What nobody asked for later has all stayed: it comes first.
        known = [tag for tag in self._chunks if tag in asked or tag in self._rules_of]
        order = sorted(known, key=lambda tag: asked.get(tag, -1))
        if not order:
            return
        past = [self._chunks[tag]._chunk.past() for tag in order]
        self._rules_of = dict(zip(order, self._rules.over(past), strict=True))
        leaving: Counter[str] = Counter()
        for tag in known[: known.index(order[0]) + 1]:
            groups = past[order.index(tag)]
            staying = self._rules_of[tag].staying(groups)
            for place, group in enumerate(groups):
                if place not in staying:
                    leaving[group.name] += group.nbytes
        self._summary = {name: nbytes for name, nbytes in leaving.items() if nbytes}


@contextmanager
def _transformer_engine() -> Iterator[None]:
    """Inside, Transformer Engine knows that what it saves is offloaded, if it is there."""
    engine: Any = sys.modules.get("transformer_engine.pytorch.cpu_offload")
    if engine is None:
        yield
        return
    before = getattr(engine, "CPUOffloadEnabled", False)
    engine.CPUOffloadEnabled = True
    try:
        yield
    finally:
        engine.CPUOffloadEnabled = before
