"""The chunks of an iteration, their groups, and a pool of tensors.

NOTE [ Iterations ]

A chunk's tag is its virtual stage and its number among the stage's micro-batches since the last reset. The engine
learns by this tag. At a reset, the order in which backward has reached the chunks decides which groups stay
(:meth:`~spillway.Groups.over`).
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from spillway.compat.megatron.chunk import ChunkOffloadHandler
from spillway.errors import UsageError
from spillway.offloading import keep_if_counted, keep_tensor
from spillway.runtime.backend import Stream
from spillway.runtime.system import which_device
from spillway.saved_tensors.groups import Group, Groups
from spillway.session import Session

_MIN_ELEMENTS = 1024 * 1024
_ENGINES_FLAG = "CPUOffloadEnabled"
_Key = tuple[tuple[int, ...], torch.dtype]


class _Instance:
    """The manager of a session."""

    manager: PipelineOffloadManager | None = None


class PipelineOffloadManager:
    """The chunks of the default session. Get it by :meth:`get_instance`. Also a context manager: see ``get_context``.

    Call it in the thread that runs forward; other threads may only read.

    Example:
        >>> manager = PipelineOffloadManager.get_instance()
        >>> manager.offload_summary_total_bytes
        0
    """

    in_replay = False
    """Whether a captured graph is being replayed."""
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        self._session = Session.default()
        self._name = f"megatron {next(self._numbers)}"
        self._pool: OffloadTensorPool | None = None
        self._graph_stream: torch.Stream | None = None
        self._graph_event: torch.Event | None = None
        self._of_thread = threading.local()
        self._rules = Groups(margin=1)
        self._summary: dict[str, int] = {}
        self._rules_of: dict[str, Groups] = {}
        """By tags: see NOTE [ Iterations ]."""
        self._begin()

    def _begin(self) -> None:
        """Start an iteration. See NOTE [ Iterations ]."""
        self._chunks: dict[str, ChunkOffloadHandler] = {}
        """By tags, in the order of their forward."""
        self._micro_batches: Counter[int] = Counter()
        """By virtual stage."""
        self._reached: dict[str, None] = {}
        """Tags of chunks, in the order in which backward has reached them."""
        self._forward: ChunkOffloadHandler | None = None
        self._backward: ChunkOffloadHandler | None = None

    @classmethod
    def get_instance(cls) -> PipelineOffloadManager:
        """The manager of the default session."""
        instance = Session.default().of(_Instance)
        if instance.manager is None:
            instance.manager = cls()
        return instance.manager

    @classmethod
    def reset_instance(cls) -> None:
        """Replace the manager by a new one, which has learned nothing. Live graphs are still reloaded."""
        Session.default().of(_Instance).manager = cls()

    @property
    def d2h_stream(self) -> Stream:
        """The session's offload stream of the current accelerator, or of the CPU."""
        return self._session.runtime(which_device()).mover.streams[0]

    @property
    def h2d_stream(self) -> Stream:
        """The session's reload stream of the current accelerator, or of the CPU."""
        return self._session.runtime(which_device()).mover.streams[1]

    @property
    def cpu_tensor_pool(self) -> OffloadTensorPool:
        """A pool of CPU memory for your own tensors, pinned if there is an accelerator. Chunks do not use it."""
        self._pool = self._pool or OffloadTensorPool("cpu", pin_memory=torch.accelerator.is_available())
        return self._pool

    @property
    def cuda_graph_stream(self) -> torch.Stream | None:
        """A stream to capture and replay graphs on; ``None`` without an accelerator."""
        self._graph_stream = self._graph_stream or _make_stream(which_device())
        return self._graph_stream

    @property
    def cuda_graph_event(self) -> torch.Event | None:
        """The default event of ``forward_record`` and ``backward_record``; ``None`` without an accelerator."""
        self._graph_event = self._graph_event or _make_event(which_device())
        return self._graph_event

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """Bytes that are offloaded when backward starts, by groups. Empty in the first iteration.

        They are from the last iteration, up to the first chunk that backward reaches, with the next one's groups.
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
        *,
        pp_rank: int | None = None,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: int | None = None,
        tier: str = "auto",
    ) -> None:
        """Start a chunk: see ``FineGrainedActivationOffloadingInterface.init_chunk_handler``."""
        vp_size, vp_stage = 1 if vp_size is None else vp_size, 0 if vp_stage is None else vp_stage
        if vp_stage not in range(vp_size):
            raise UsageError(f"vp_stage: got {vp_stage!r}, expected a number from 0 to {vp_size - 1}, by vp_size")
        least = min_offloaded_tensor_size
        if type(least) is not int or least < 0:
            raise UsageError(f"min_offloaded_tensor_size: got {least!r}, expected an integer of at least 0")
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
        self._forward = self._chunks[tag] = ChunkOffloadHandler(
            self._session,
            tag,
            least,
            # A chunk that no iteration has had yet offloads all its groups.
            groups=self._rules_of.get(tag, Groups(in_flight=rules.in_flight)),
            tier=tier,
            on_backward=lambda: self._on_backward(tag),
        )

    def cur_forward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk of this iteration that began last; ``None`` before the first."""
        return self._forward

    def cur_backward_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk whose backward began last, among those with offloaded tensors."""
        return self._backward

    def mark_not_offloadable(self, tensor: torch.Tensor | None) -> None:
        """Keep the tensor's storage, also if a view of it is saved. ``None`` is ignored."""
        if tensor is not None:
            tensor.offloading_activation = False  # type: ignore[attr-defined]
            keep_tensor(tensor, session=self._session)

    def flush_delayed_groups(self) -> None:
        """Offload the groups that were committed with ``delay_offload``."""
        self._session.flush_groups()

    def disable_offload(self) -> None:
        """Offload nothing from now on, in any chunk. Offloaded tensors are still reloaded."""
        self._session.enabled = False

    def enable_offload(self) -> None:
        """Offload groups again that start from now on."""
        self._session.enabled = True

    def reset(self, process_group: dist.ProcessGroup | None = None) -> None:
        """End the iteration. Its groups decide what stays in the next one. Groups that were never flushed stay.

        ``process_group`` has no effect: a reset gathers nothing from other ranks.
        """
        self._session.forget_groups()
        self._end_forward()
        if self._pool is not None:
            self._pool.reset()
        self._learn()
        self._begin()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            chunk = self._forward
            if chunk is None or not chunk._is_live():
                stack.enter_context(keep_if_counted())
            else:
                # Transformer Engine, if it is imported, is to know that its saved tensors are offloaded.
                engine: Any = sys.modules.get("transformer_engine.pytorch.cpu_offload")
                if engine is not None:
                    stack.callback(setattr, engine, _ENGINES_FLAG, getattr(engine, _ENGINES_FLAG, False))
                    setattr(engine, _ENGINES_FLAG, True)
                stack.enter_context(chunk._inside())
            self._entered().append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered().pop().__exit__(*(error or (None, None, None)))

    def _entered(self) -> list[ExitStack]:
        """Contexts that the calling thread has entered, the innermost last."""
        return vars(self._of_thread).setdefault("stacks", [])  # type: ignore[no-any-return]

    def _start(self, name: str | None) -> Group | None:
        """Start a group of the chunk whose forward runs, if there are both."""
        return None if self._forward is None or name is None else self._forward._start(name)

    def _commit(self, name: str, release: Iterable[torch.Tensor], delay: bool) -> None:
        if self._forward is not None:
            self._forward._commit(name, release=release, delay=delay)

    def _end_forward(self) -> None:
        if self._forward is not None:
            self._forward._end()
            self._forward = None

    def _on_backward(self, tag: str) -> None:
        if tag in self._chunks:
            self._reached.setdefault(tag)
            self._backward = self._chunks[tag]

    def _record(self, event: Any, number: int) -> None:
        """Record the event, or that for graphs, on the current stream, which then waits for a stream of the mover."""
        device = which_device()
        if device.type == "cpu":
            return
        event = self._graph_event if event is None else event
        if event is not None:
            event.record()
        runtime = self._session.runtime(device)
        # The mover's stream joins a capture only if it was used within the capture; the backend knows.
        runtime.backend.wait(runtime.backend.compute(), runtime.backend.record(runtime.mover.streams[number]))

    def _learn(self) -> None:
        """See NOTE [ Iterations ]."""
        chunks = self._chunks
        reached = {tag: place for place, tag in enumerate(self._reached)}
        # An evaluation with gradients enabled is no iteration. A known chunk that backward has not reached comes first.
        known = [tag for tag in chunks if tag in reached or tag in self._rules_of]
        order = sorted(known, key=lambda tag: reached.get(tag, -1))
        if not order:
            return
        past = [chunks[tag]._scope.groups.past() for tag in order]
        self._rules_of = dict(zip(order, self._rules.over(past), strict=True))
        offloaded: Counter[str] = Counter()
        for tag in known[: known.index(order[0]) + 1]:
            groups = past[order.index(tag)]
            staying = self._rules_of[tag].staying(groups)
            for place, group in enumerate(groups):
                if place not in staying:
                    offloaded[group.name] += group.nbytes
        self._summary = {name: nbytes for name, nbytes in offloaded.items() if nbytes}


class OffloadTensorPool:
    """A pool of tensors by shape and dtype, on any device.

    It is for your own tensors. The engine's CPU memory is elsewhere: see ``Session.host_bytes``.

    Example:
        >>> pool = OffloadTensorPool("cpu")
        >>> first = pool.allocate((2, 3))
        >>> pool.free(first)
        >>> pool.allocate((2, 3)) is first
        True
    """

    def __init__(self, device: torch.device | str = "cuda", pin_memory: bool = False) -> None:
        self.device = torch.device(device)
        self.pin_memory = pin_memory
        self._free: defaultdict[_Key, deque[torch.Tensor]] = defaultdict(deque)
        self._used: defaultdict[_Key, dict[int, torch.Tensor]] = defaultdict(dict)
        """By ``id``."""
        self._allocated = self._freed = self._hits = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor with undefined content: a freed one, or a new one."""
        key = tuple(shape), dtype
        self._allocated += 1
        self._hits += bool(self._free[key])
        if self._free[key]:
            tensor = self._free[key].popleft()
        else:
            tensor = torch.empty(key[0], dtype=dtype, device=self.device, pin_memory=self.pin_memory)
        self._used[key][id(tensor)] = tensor
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Return a tensor to the pool.

        Raises:
            UsageError: a ``ValueError``: the tensor is not from this pool, or was freed already.
        """
        key = tuple(tensor.shape), tensor.dtype
        if key not in self._used or self._used[key].pop(id(tensor), None) is None:
            raise UsageError(
                f"free: this tensor of shape {list(tensor.shape)} and {tensor.dtype} is not in use; free each tensor "
                f"that allocate() has returned once, and the same object"
            )
        self._freed += 1
        self._free[key].append(tensor)

    def get_pool_status(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Numbers of tensors of one shape and dtype: ``utilization`` is in per cent.

        Without arguments: of all, by ``(shape, dtype)`` under ``"pools"``, with ``"global_stats"``.

        Raises:
            UsageError: a ``ValueError``: a shape without a dtype, or an unknown one.
        """
        if shape is None:
            misses = self._allocated - self._hits
            stats = {"total_allocated": misses, "current_in_use": sum(map(len, self._used.values()))}
            stats |= {"allocation_requests": self._allocated, "free_requests": self._freed}
            stats |= {"pool_hits": self._hits, "pool_misses": misses}
            return {"global_stats": stats, "pools": {key: self.get_pool_status(*key) for key in self._used}}
        if dtype is None:
            raise UsageError(f"get_pool_status: got shape {tuple(shape)} without a dtype; say dtype=")
        key = tuple(shape), dtype
        if key not in self._used:
            raise UsageError(
                f"get_pool_status: nothing of shape {key[0]} and {dtype} was allocated; there are "
                f"{sorted(map(str, self._used))}"
            )
        used, free = len(self._used[key]), len(self._free[key])
        counts = {"total_count": used + free, "allocated_count": used, "free_count": free}
        return {"shape": key[0], "dtype": dtype, **counts, "utilization": 100 * used / max(used + free, 1)}

    def reset(self) -> None:
        """Count all tensors as free, also those in use."""
        for key, used in self._used.items():
            self._free[key].extend(used.values())
            used.clear()

    def clear(self) -> None:
        """Release all tensors."""
        self._free.clear()
        self._used.clear()


def _make_stream(device: torch.device) -> torch.Stream | None:
    # The device's own class: torch.cuda.graph() takes no other.
    return None if device.type == "cpu" else torch.get_device_module(device).Stream(device=device)


def _make_event(device: torch.device) -> torch.Event | None:
    if device.type == "cpu":
        return None
    # Graphs and other streams share an event only if it is external, which only CUDA has.
    return torch.cuda.Event(external=True) if device.type == "cuda" else torch.Event(device)  # type: ignore[no-untyped-call]
