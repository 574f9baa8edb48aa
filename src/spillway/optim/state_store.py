"""Stores of states and fp32 master weights between steps, which also step them.

NOTE [ State stores ]

* :class:`MemoryStore`: CPU memory. The CPU steps them in place.
* :class:`~spillway.optim.gpu_store.GpuStore`: pinned memory. They are streamed to the GPU and stepped there.
* :class:`~spillway.optim.disk_store.DiskStore`: the session's spill file. They are streamed to CPU memory and stepped
  there.

The last two are a :class:`~spillway.optim.chunked_store.ChunkedStore`. Its unit is a *chunk*: a piece of a large
parameter or several small parameters, with master weights and states side by side. A transfer takes one chunk to its
step and back. A pipeline prefetches the chunks of the next steps, and stores those of earlier steps.

A state is stored once. While it is stored, its tensors are ``Slot``s. Numbers, like a count of steps, are not moved. If
a chunk cannot be written back, for example to a full disk, it stays where it was stepped. The user gets the error, and
the next step uses the chunk from there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter, HostPiece, ParameterRead, Piece, upload
from spillway.optim.optimizer_class import BorrowingOptimizer, ClassTraits, State, for_cpu, written_by_step
from spillway.optim.options import StepTimes
from spillway.optim.states import MASTER, follow_first, host_copy, part_of
from spillway.optim.tensors import CHUNK, batches, flat, scratch_of
from spillway.runtime.backend import Event, Stalls, TaskEnd
from spillway.types import OptimizerStats

_WITHOUT_SCRATCH = 4
"""How many times as many elements share a call that reads gradients in place: calls keep Python busy."""
_READ_TOGETHER = 8
"""How many times as many elements are read from the GPU at once."""

_TOGETHER = 1 << 20
"""Least elements that are stepped at once in backward. Small parameters wait for each other, or for ``step``."""

Settings = dict[str, Any]

SettingsOf = Callable[[HostParameter], Settings]
"""Gives the settings of a parameter's group, for the place of its step."""


def in_order(steps: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Steps in the order in which their gradients arrive, unless a factor needs all of them."""
    return steps if any(step.factors for step in steps) else sorted(steps, key=lambda step: step.number)


@dataclass(eq=False)
class StepCost:
    """The cost of one step, counted from the end of the step before."""

    on_host: int = 0
    """Elements that the CPU steps."""
    streamed: int = 0
    """Elements that the GPU steps with streamed state."""
    host_seconds: float = 0.0
    """How long the CPU computes."""
    read_bytes: int = 0
    """Bytes read from the spill file."""
    written_bytes: int = 0
    """Bytes written there."""
    closing: list[Event] = field(default_factory=list)
    """When all state is back in its place."""
    kept: list[object] = field(default_factory=list)
    """Owners of memory that the step reads on another stream. Compute waits for it before they are dropped."""
    _began: float = field(default_factory=time.perf_counter)
    _seconds: float = 0.0
    _counts: list[tuple[Stalls, int, int]] = field(default_factory=list)
    _reserved: int = 0

    def finish(self) -> None:
        """Wait until all state is back in its place. Raises what went wrong with that."""
        closing, self.closing = self.closing, []
        with contextlib.ExitStack() as stack:
            for event in closing:
                stack.callback(event.synchronize)

    def end(self, contexts: Iterable[DeviceContext]) -> None:
        """The compute streams wait for all that was queued: the step ends."""
        self._seconds = time.perf_counter() - self._began
        self.kept.clear()
        for context in contexts:
            context.transfers.settle()
            context.forget_factor()
            self._counts.append(context.transfers.take_counts())
            self._reserved += context.transfers.arena.reserved_bytes

    def stats(self) -> OptimizerStats:
        return OptimizerStats(
            stepped_on_host=self.on_host,
            streamed=self.streamed,
            host_seconds=self.host_seconds,
            stall_seconds=sum(stalls.seconds() for stalls, _, _ in self._counts),
            sent_bytes=sum(sent for _, sent, _ in self._counts),
            received_bytes=sum(received for _, _, received in self._counts),
            host_bytes=self._reserved,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
        )

    def times(self) -> StepTimes:
        stats = self.stats()
        return StepTimes(self._seconds, stats.stall_seconds, stats.host_seconds)


class StateStore(ABC):
    """Stores states and fp32 master weights between steps, and steps parameters. See NOTE [ State stores ]."""

    steps_on_device: bool = False
    """Whether the GPU steps the parameters. Gradients that are on the GPU then stay there."""

    @abstractmethod
    def add(self, held: HostParameter) -> None:
        """Add a parameter."""

    def prepare(self, held: Iterable[HostParameter]) -> None:  # noqa: B027
        """Reserve memory for what the next step of these parameters makes.

        Raises:
            TierFullError: if there is none. Nothing was stepped then, and no gradient changed.
            UsageError: if a parameter was moved, cast or resized.
        """

    @abstractmethod
    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        """Step parameters by their gradients, or queue that. ``overlapped``: blocks wait in the next forward."""

    def settle(self, cost: StepCost) -> None:  # noqa: B027
        """All parameters of a step are queued: complete it, or queue that."""

    def complete(self, waiting: Sequence[HostParameter]) -> list[HostParameter]:
        """Those parameters that may be stepped during backward, of some whose gradients have arrived."""
        # Small parameters wait for each other.
        return list(waiting) if sum(one.numel for one in waiting) >= _TOGETHER else []

    @abstractmethod
    def state_of(self, held: HostParameter) -> State:
        """A parameter's state, with slots for tensors that are elsewhere."""

    @abstractmethod
    def open(self, held: HostParameter) -> State:
        """All of a parameter's state, on the CPU. The next step begins with what is written there."""

    @abstractmethod
    def load_all(self, held: Sequence[HostParameter]) -> list[State]:
        """All of the parameters' states with their master weights, on the CPU."""

    @abstractmethod
    def put(self, states: Sequence[tuple[HostParameter, State]]) -> None:
        """Set parameters' states, as they were saved, with their master weights if they have some."""

    @abstractmethod
    def begin(self, held: Sequence[HostParameter]) -> None:
        """Give new parameters the states that the class's constructor makes."""

    @abstractmethod
    def forget_master(self, held: HostParameter) -> None:
        """The next step takes a parameter's master weight from the parameter."""

    def end_step(self, cost: StepCost) -> dict[int, Settings]:
        """A step has ended: complete its cost. Gives the group entries that the class changed, by group."""
        return {}

    @abstractmethod
    def discard(self, held: HostParameter) -> None:
        """Remove a parameter and its state."""

    def close(self) -> None:  # noqa: B027
        """Free everything that parameters do not free themselves."""


class _PerThread(threading.local):
    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any]) -> None:
        self.optimizer = BorrowingOptimizer(optimizer_class, given)


class MemoryStore(StateStore):
    """Keeps states in CPU memory, where the CPU steps them. See NOTE [ A step ] in ``__init__.py``.

    A worker has one or two CPUs. So a piece's cast, step and upload stay in one core's caches, no team of threads has
    to be woken, and a parameter that is waited for keeps no worker from another. The worker thread itself steps
    parameters that are not cut (NOTE [ Pieces ]), by all CPUs together.
    """

    def __init__(
        self, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf, *, workers: int
    ) -> None:
        self._steps_alone = ClassTraits.of(optimizer_class).steps_alone
        self._of_thread = _PerThread(optimizer_class, for_cpu(given))
        self._settings = settings
        self._written: dict[int, Settings] = {}
        """Group entries that the class changed, by group; complete when the step is done."""
        self._workers = workers
        self._given_out: deque[TaskEnd] = deque()
        self._seconds = 0.0
        """How long the CPU computed since the last step: the mean of the workers."""
        self._lock = threading.Lock()

    def add(self, held: HostParameter) -> None:
        """Add a parameter. Its memory is made at its first step. On the CPU it may be the parameter's own."""
        held.in_place = held.context.transfers.backend.direct_disk and not held.has_master

    def step(self, steps: Sequence[Snapshot], cost: StepCost, *, overlapped: bool) -> None:
        # Compute may have read and written parameters since the last step.
        ready = {
            context: context.transfers.ready(step.held.local() for step in steps if step.held.context is context)
            for context in {step.held.context for step in steps}
        }
        if not self._steps_alone:
            groups: dict[int, list[Snapshot]] = {}
            for step in steps:
                groups.setdefault(step.held.group, []).append(step)
            settings = {group: self._settings(some[0].held) for group, some in groups.items()}
            if steps:
                self._queue(steps, partial(self._step_together, groups, settings, ready), cost)
            return
        for some in batches(
            # The next forward needs the first parameters first.
            steps if overlapped else in_order(steps),
            CHUNK,
            size=lambda step: step.held.numel,
            key=lambda step: step.held.kind,
        ):
            held = some[0].held
            work = partial(self._step_each, some, self._settings(held), ready[held.context])
            self._queue(some, work, cost)

    def state_of(self, held: HostParameter) -> State:
        state = dict(held.state)
        if held.has_master and held.pieces and all(piece.known for piece in held.pieces):
            state[MASTER] = held.master
        return state

    def open(self, held: HostParameter) -> State:
        return self.state_of(held)

    def load_all(self, held: Sequence[HostParameter]) -> list[State]:
        return [self.state_of(one) for one in held]

    def put(self, states: Sequence[tuple[HostParameter, State]]) -> None:
        for held, state in states:
            fresh = {key: host_copy(key, value, held) for key, value in state.items()}
            master = fresh.pop(MASTER, None)
            if fresh or master is not None:
                held.make_master()
            if held.has_master and master is not None:
                held.put_master(master)
            elif held.has_master:
                held.forget_master()
            if fresh:
                self._put_state(held, fresh)
            else:
                self.discard(held)

    def begin(self, held: Sequence[HostParameter]) -> None:
        for one in held:
            one.make_master()
            self._begin_state(one, self._settings(one))

    def forget_master(self, held: HostParameter) -> None:
        held.context.lane.run(held.forget_master)

    def end_step(self, cost: StepCost) -> dict[int, Settings]:
        with self._lock:
            cost.host_seconds, self._seconds = self._seconds, 0.0
        self._given_out.clear()
        written, self._written = self._written, {}
        return written

    def discard(self, held: HostParameter) -> None:
        for piece in held.pieces:
            piece.begun, piece.state, piece.parts = False, {}, {}
        held.state = {}

    def _queue(self, steps: Sequence[Snapshot], work: Callable[[], Event], cost: StepCost) -> None:
        """Queue a step of some parameters."""
        for step in steps:
            step.held.check()

        def begin() -> Event:
            for step in steps:
                step.held.begin_step()
            return work()

        end = steps[0].held.context.lane.run(begin)
        for step in steps:
            held = step.held
            held.mark_written()
            held.gradient.reader = held.updated = end
            cost.on_host += held.numel

    def _put_state(self, held: HostParameter, state: State) -> None:
        """Set a parameter's state. Its tensors are taken over, not copied."""
        self._begin_state(held, self._settings(held))
        for piece in held.pieces:
            piece.state = {name: part_of(value, held, piece.start, piece.numel) for name, value in state.items()}
            piece.parts = dict(piece.state)
        first = held.pieces[0].state
        held.state = {
            # Every piece has a number of its own, like a count of steps.
            name: first[name] if isinstance(value, torch.Tensor) and value.ndim == 0 else value
            for name, value in state.items()
        }

    def _begin_state(self, held: HostParameter, settings: Settings) -> None:
        """Let the class's constructor make what it makes for a new parameter."""
        missing = [piece for piece in held.pieces if not piece.begun]
        if missing:
            made = self._of_thread.optimizer.begin([piece.tensor for piece in missing], settings)
            for piece in missing:
                piece.begun, piece.state = True, piece.state or made.get(piece.tensor, {})
                self._gather(held, piece)

    # All below is for the CPU worker thread.

    def _step_each(self, steps: Sequence[Snapshot], settings: Settings, ready: Event) -> Event:
        """Step parameters of one group and GPU, and queue their uploads; gives the end of those."""
        first = steps[0].held
        context, backend = first.context, first.context.transfers.backend
        for step in steps:
            step.wait()
            self._begin_state(step.held, settings)
            follow_first([piece.state for piece in step.held.pieces])
        gradients = {step.held: step for step in steps}

        def size(part: HostPiece) -> int:
            return part[1].numel * (_WITHOUT_SCRATCH if gradients[part[0]].needs_scratch else 1)

        pieces = ((held, piece) for held in gradients for piece in held.pieces)
        # Pieces that share a call: as many as fit the scratch memory, and a few times more that need none.
        all_calls = batches(pieces, _WITHOUT_SCRATCH * CHUNK, size)
        # Calls whose parameters are read at once: few copies, because this thread waits for Python's lock.
        reads = batches(all_calls, _READ_TOGETHER * CHUNK, lambda parts: sum(piece.numel for _, piece in parts))
        ends: list[Event] = []
        for calls in reads:
            # Calls that are unfinished hold the memory of parameters that were read.
            while len(self._given_out) >= 2 * self._workers:
                self._given_out.popleft().finish()
            read = ParameterRead([part for parts in calls for part in parts], ready)
            for parts in calls:
                step_parts = partial(self._step_parts, parts, gradients, settings, read, ready)
                if first.cut:
                    self._given_out.append(context.workers.run(step_parts))
                ends.append(self._given_out[-1] if first.cut else step_parts())
        return backend.all_of(ends)

    def _step_together(
        self, groups: dict[int, list[Snapshot]], settings: dict[int, Settings], ready: dict[DeviceContext, Event]
    ) -> Event:
        """Step parameters of any group and GPU in one call, for a class that steps all together."""
        lent: list[Settings] = []
        of_context: dict[DeviceContext, list[HostPiece]] = {}
        for step in (step for some in groups.values() for step in some):
            part = step.held, step.held.pieces[0]
            of_context.setdefault(step.held.context, []).append(part)
            ParameterRead([part], ready[step.held.context]).finish([part])
        for group, some in groups.items():
            for step in some:
                self._begin_state(step.held, settings[group])
                step.held.pieces[0].tensor.grad = step.whole()
            lent.append({**settings[group], "params": [step.held.pieces[0].tensor for step in some]})
        before = [dict(group) for group in lent]
        began = time.perf_counter()
        states = _lent(part for parts in of_context.values() for part in parts)
        self._of_thread.optimizer.step(lent, states)
        self._count(time.perf_counter() - began, alone=True)
        for group, after, old in zip(groups, lent, before, strict=True):
            self._written.setdefault(group, {}).update(written_by_step(after, old))
        for held, piece in (part for parts in of_context.values() for part in parts):
            piece.tensor.grad = None
            held.state = piece.state = states[piece.tensor]
        ends = [upload(parts, ready[context]) for context, parts in of_context.items()]
        return next(iter(of_context)).transfers.backend.all_of(ends)

    def _step_parts(
        self,
        parts: Sequence[HostPiece],
        gradients: Mapping[HostParameter, Snapshot],
        settings: Settings,
        read: ParameterRead,
        ready: Event,
    ) -> Event:
        """Step some pieces, and queue their uploads; in any thread."""
        read.finish(parts)
        began = time.perf_counter()
        used = 0
        for held, piece in parts:
            scratch = scratch_of(held.work_dtype)[used:] if used + piece.numel <= CHUNK else None
            gradient = gradients[held].part(piece.start, piece.numel, scratch)
            if piece.tensor.ndim != 1:
                gradient = gradient.as_strided(piece.tensor.shape, piece.tensor.stride())
            piece.tensor.grad = gradient
            used += piece.numel if gradients[held].needs_scratch else 0
        states = _lent(parts)
        self._of_thread.optimizer.step_each([piece.tensor for _, piece in parts], settings, states)
        for held, piece in parts:
            piece.tensor.grad, piece.state = None, states[piece.tensor]
            self._gather(held, piece)
        end = upload(parts, ready)
        self._count(time.perf_counter() - began, alone=not held.cut)
        return end

    def _count(self, seconds: float, *, alone: bool) -> None:
        with self._lock:
            self._seconds += seconds if alone else seconds / self._workers

    def _gather(self, held: HostParameter, piece: Piece) -> None:
        """Let ``held.state`` be what the plain optimizer has: whole tensors, of which the pieces have parts."""
        if len(held.pieces) == 1:
            held.state = piece.state
            return
        for name, value in piece.state.items():
            if value is piece.parts.get(name):
                continue
            if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == piece.numel:
                with self._lock:
                    if name not in held.state:
                        held.state[name] = held.new_host_tensor(value.dtype)
                piece.state[name] = flat(held.state[name], piece.start, piece.numel).copy_(value)
            else:
                held.state.setdefault(name, value)
            piece.parts[name] = piece.state[name]


def _lent(parts: Iterable[HostPiece]) -> defaultdict[torch.Tensor, State]:
    return defaultdict(dict, {piece.tensor: piece.state for _, piece in parts})
