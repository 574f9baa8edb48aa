"""Where states and masters are between steps, and how they are stepped from there.

NOTE [ State stores ]

* :class:`MemoryStore`: CPU memory, where the CPU steps them as they are.
* :class:`~spillway.optim.gpu_store.GpuStore`: pinned memory, from which they are streamed to the GPU to be stepped.
* :class:`~spillway.optim.disk_store.DiskStore`: the session's spill file, from which they are streamed to CPU memory.

The last two are a :class:`~spillway.optim.streaming.ChunkedStore`: what moves at once is a *chunk*, a piece of a large
parameter or several small ones, with masters and states side by side. A transfer is one chunk's way to the step and
back. A pipeline has some transfers arrive ahead of the one that is stepped, and some go back behind it.

A state is stored once. While it is stored, its tensors are ``Slot``s. Numbers, like a count of steps, stay where they
are. A chunk that cannot be written back, for example to a full disk, stays where it was stepped. The user gets the
error, and the next step uses the chunk from there.
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
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter, HostPiece, ParameterRead, Piece, upload
from spillway.optim.optimizer_class import BorrowingOptimizer, ClassTraits, State, for_cpu, written_by_step
from spillway.optim.options import StepTimes
from spillway.optim.states import MASTER, follow_first, host_copy, part_of
from spillway.optim.tensors import CHUNK, batches, flat, scratch_of
from spillway.runtime.backend import Event, HostQueue, Stalls, TaskEnd
from spillway.types import OptimizerStats

_WITHOUT_SCRATCH = 4
"""How many times as many elements share a call that reads gradients as they are: calls keep Python busy."""
_READ_TOGETHER = 8
"""How many times as many elements are read from the device at once."""

Settings = dict[str, Any]

SettingsOf = Callable[[HostParameter], Settings]
"""Gives the settings of a parameter's group, for where it is stepped."""


class ParamStep(NamedTuple):
    """A parameter that is stepped, and its gradient."""

    held: HostParameter
    gradient: Snapshot


@dataclass(eq=False)
class StepCost:
    """What one step costs, counted from the end of the step before."""

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
    """Where states and masters are between steps. See NOTE [ State stores ]."""

    steps_on_device: bool = False
    """Whether the device steps the parameters. Gradients that are on the device then stay there."""

    @abstractmethod
    def add(self, held: HostParameter) -> None:
        """Add a parameter."""

    @abstractmethod
    def prepare(self, held: Iterable[HostParameter]) -> None:
        """Reserve memory for what the next step of these parameters makes.

        Raises:
            TierFullError: if there is none. Nothing was stepped then, and no gradient changed.
            UsageError: if a parameter was moved, cast or resized.
        """

    @abstractmethod
    def step(self, steps: Sequence[ParamStep], cost: StepCost, *, overlapped: bool) -> None:
        """Step parameters, or queue that."""

    @abstractmethod
    def state_of(self, held: HostParameter) -> State:
        """A parameter's state, with slots for tensors that are elsewhere."""

    @abstractmethod
    def open(self, held: HostParameter) -> State:
        """All of a parameter's state, on the CPU. The next step begins with what is written there."""

    @abstractmethod
    def load_all(self, held: Sequence[HostParameter]) -> list[State]:
        """All of the parameters' states with their masters, on the CPU."""

    @abstractmethod
    def put(self, states: Sequence[tuple[HostParameter, State]]) -> None:
        """Set parameters' states, as they were saved, with their masters if they have some."""

    @abstractmethod
    def begin(self, held: Sequence[HostParameter]) -> None:
        """Give new parameters the states that the class's constructor makes."""

    @abstractmethod
    def forget_master(self, held: HostParameter) -> None:
        """The next step takes a parameter's master from the parameter."""

    def end_step(self, cost: StepCost) -> dict[int, Settings]:
        """A step has ended: complete its cost. Gives the group entries that the class changed, by group."""
        return {}

    @abstractmethod
    def discard(self, held: HostParameter) -> None:
        """Remove a parameter and its state."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""


class StepGroup(NamedTuple):
    """Parameters of one group that are stepped together, and the group's settings on the CPU."""

    steps: Sequence[ParamStep]
    settings: Settings


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
        self._states: defaultdict[torch.Tensor, State] = defaultdict(dict)
        """Of every piece; lent to the optimizers of all threads."""
        self._known: set[torch.Tensor] = set()
        """Pieces that the class's constructor has seen: some classes make their state there."""
        self._written: dict[int, Settings] = {}
        """Group entries that the class changed, by group; complete when the step is done."""
        self._workers = workers
        self._given_out: deque[TaskEnd] = deque()
        self._unfinished = 0
        self._seconds = 0.0
        """How long the CPU computed since the last step: the mean of the workers."""
        self._lock = threading.Lock()

    def add(self, held: HostParameter) -> None:
        """Add a parameter. Its memory is made at its first step. On the CPU it may be the parameter's own."""
        held.in_place = held.context.transfers.backend.direct_disk and not held.has_master

    def prepare(self, held: Iterable[HostParameter]) -> None:
        """Memory is made when a parameter is stepped."""

    def step(self, steps: Sequence[ParamStep], cost: StepCost, *, overlapped: bool) -> None:
        # Compute may have read and written parameters since the last step.
        ready = {
            context: context.transfers.ready(step.held.local() for step in steps if step.held.context is context)
            for context in {step.held.context for step in steps}
        }
        if not self._steps_alone:
            by_group: dict[int, list[ParamStep]] = {}
            for step in steps:
                by_group.setdefault(step.held.group, []).append(step)
            if steps:
                groups = [StepGroup(some, self._settings(some[0].held)) for some in by_group.values()]
                self._queue(groups, ready, cost)
            return
        if not overlapped and not any(step.gradient.factors for step in steps):
            # The first gradients are there first. A factor needs all of them, and the next forward the first.
            steps = sorted(steps, key=lambda step: step.gradient.number)
        for some in batches(steps, CHUNK, size=lambda step: step.held.numel, key=lambda step: step.held.kind):
            self._queue([StepGroup(some, self._settings(some[0].held))], ready, cost)

    def state_of(self, held: HostParameter) -> State:
        state = dict(held.state)
        if held.has_master and held.known:
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
        written, self._written = self._written, {}
        return written

    def discard(self, held: HostParameter) -> None:
        for piece in held.pieces:
            self._states.pop(piece.tensor, None)
            self._known.discard(piece.tensor)
            piece.parts = {}
        held.state = {}

    def close(self) -> None:
        self._states.clear()
        self._known.clear()

    def _queue(self, groups: Sequence[StepGroup], ready: dict[DeviceContext, Event], cost: StepCost) -> None:
        """Queue a step in one call for a class that steps all parameters together, else of a single group."""
        held = [step.held for group in groups for step in group.steps]
        for one in held:
            one.check()

        def work() -> Event:
            for one in held:
                one.begin_step()
            return self._step_each(groups[0], ready) if self._steps_alone else self._step_together(groups, ready)

        end = held[0].context.lane.run(work)
        for one in held:
            one.mark_written()
            one.gradient.reader = one.updated = end
        cost.on_host += sum(one.numel for one in held)

    def _put_state(self, held: HostParameter, state: State) -> None:
        """Set a parameter's state. Its tensors are taken over, not copied."""
        self._begin_state(held, self._settings(held))
        for piece in held.pieces:
            parts = {name: part_of(value, held, piece.start, piece.numel) for name, value in state.items()}
            self._states[piece.tensor] = parts
            piece.parts = dict(parts)
        first = self._states[held.pieces[0].tensor]
        held.state = {
            # Every piece has a number of its own, like a count of steps.
            name: first[name] if isinstance(value, torch.Tensor) and value.ndim == 0 else value
            for name, value in state.items()
        }

    def _begin_state(self, held: HostParameter, settings: Settings) -> None:
        """Let the class's constructor make what it makes for a new parameter."""
        missing = [piece.tensor for piece in held.pieces if piece.tensor not in self._known]
        if missing:
            for tensor, state in self._of_thread.optimizer.begin(missing, settings).items():
                self._states.setdefault(tensor, state)
            self._known.update(missing)
            for piece in held.pieces:
                self._gather(held, piece)

    # All below is for the CPU worker thread.

    def _step_each(self, group: StepGroup, after: Mapping[DeviceContext, Event]) -> Event:
        """Step parameters of one device, and queue their uploads; gives the end of those."""
        first = group.steps[0].held
        ready = after[first.context]
        for held, gradient in group.steps:
            gradient.wait(held.context.transfers)
            self._begin_state(held, group.settings)
            follow_first([self._states[piece.tensor] for piece in held.pieces])
        gradients = dict(group.steps)

        def size(part: HostPiece) -> int:
            held, piece = part
            return piece.numel * (1 if gradients[held].needs_no_scratch(held.work_dtype) else _WITHOUT_SCRATCH)

        pieces = ((held, piece) for held in gradients for piece in held.pieces)
        # Pieces that share a call: as many as fit the scratch memory, and a few times more that need none.
        all_calls = batches(pieces, _WITHOUT_SCRATCH * CHUNK, size)
        # Calls whose parameters are read at once: few copies, because this thread waits for Python's lock.
        reads = batches(all_calls, _READ_TOGETHER * CHUNK, lambda parts: sum(piece.numel for _, piece in parts))
        ends = []
        for calls in reads:
            # Calls that are unfinished hold the memory of parameters that were read.
            while first.cut and self._unfinished >= 2 * self._workers:
                self._given_out.popleft().finish()
            read = ParameterRead([part for parts in calls for part in parts], ready)
            for parts in calls:
                step = partial(self._step_parts, parts, gradients, group.settings, read, ready)
                ends.append(self._give_out(first.context.workers, step) if first.cut else step())
        return first.context.transfers.backend.all_of(ends)

    def _step_together(self, groups: Sequence[StepGroup], after: Mapping[DeviceContext, Event]) -> Event:
        """The same in one call for parameters of any device."""
        lent = []
        for held, _ in (step for group in groups for step in group.steps):
            whole = [(held, held.pieces[0])]
            ParameterRead(whole, after[held.context]).finish(whole)
        for steps, settings in groups:
            for held, gradient in steps:
                self._begin_state(held, settings)
                held.pieces[0].tensor.grad = held.whole(gradient)
            lent.append({**settings, "params": [step.held.pieces[0].tensor for step in steps]})
        began = time.perf_counter()
        before = [dict(group) for group in lent]
        self._of_thread.optimizer.step(lent, self._states)
        self._count(time.perf_counter() - began, alone=True)
        for (steps, _), group, settings in zip(groups, lent, before, strict=True):
            self._written.setdefault(steps[0].held.group, {}).update(written_by_step(group, settings))
        stepped: defaultdict[DeviceContext, list[HostPiece]] = defaultdict(list)
        for held, _ in (step for group in groups for step in group.steps):
            held.pieces[0].tensor.grad = None
            held.state = self._states[held.pieces[0].tensor]
            stepped[held.context].append((held, held.pieces[0]))
        ends = [upload(pieces, after[context]) for context, pieces in stepped.items()]
        return next(iter(stepped)).transfers.backend.all_of(ends)

    def _give_out(self, workers: HostQueue, step: Callable[[], Event]) -> Event:
        def work() -> Event:
            try:
                return step()
            finally:
                with self._lock:
                    self._unfinished -= 1

        end = workers.run(work)
        with self._lock:
            self._unfinished += 1
        while self._given_out and self._given_out[0].query():
            self._given_out.popleft()
        self._given_out.append(end)
        return end

    def _step_parts(
        self,
        parts: Sequence[HostPiece],
        gradients: Mapping[HostParameter, Snapshot],
        settings: Settings,
        read: ParameterRead,
        after: Event,
    ) -> Event:
        """Step some pieces, and queue their uploads; in any thread."""
        read.finish(parts)
        began = time.perf_counter()
        used = 0
        for held, piece in parts:
            values = gradients[held]
            scratch = scratch_of(held.work_dtype)[used:] if used + piece.numel <= CHUNK else None
            gradient = held.part(values, piece.start, piece.numel, scratch)
            if piece.tensor.ndim != 1:
                gradient = gradient.as_strided(piece.tensor.shape, piece.tensor.stride())
            piece.tensor.grad = gradient
            used += 0 if values.needs_no_scratch(held.work_dtype) else piece.numel
        self._of_thread.optimizer.step_each([piece.tensor for _, piece in parts], settings, self._states)
        for held, piece in parts:
            piece.tensor.grad = None
            self._gather(held, piece)
        end = upload(parts, after)
        self._count(time.perf_counter() - began, alone=not held.cut)
        return end

    def _count(self, seconds: float, *, alone: bool) -> None:
        with self._lock:
            self._seconds += seconds if alone else seconds / self._workers

    def _gather(self, held: HostParameter, piece: Piece) -> None:
        """Let ``held.state`` be what the plain optimizer has: whole tensors, of which the pieces have parts."""
        state = self._states[piece.tensor]
        if len(held.pieces) == 1:
            held.state = state
            return
        for name, value in state.items():
            if value is piece.parts.get(name):
                continue
            if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == piece.numel:
                with self._lock:
                    if name not in held.state:
                        held.state[name] = held.new_host_tensor(value.dtype)
                state[name] = flat(held.state[name], piece.start, piece.numel).copy_(value)
            else:
                held.state.setdefault(name, value)
            piece.parts[name] = state[name]
