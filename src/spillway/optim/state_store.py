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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from spillway.optim.gradient import DeviceContext
from spillway.optim.host_parameter import HostParameter
from spillway.optim.host_step import HostStep, ParamStep, Settings, StepCost, StepGroup
from spillway.optim.optimizer_class import ClassTraits, State
from spillway.optim.states import MASTER, host_copy
from spillway.optim.tensors import CHUNK, batches
from spillway.runtime.backend import Event

SettingsOf = Callable[[HostParameter], Settings]
"""Gives the settings of a parameter's group, for where it is stepped."""


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


class MemoryStore(StateStore):
    """Keeps states in CPU memory, where the CPU steps them."""

    def __init__(
        self, optimizer_class: type[Optimizer], given: dict[str, Any], settings: SettingsOf, *, workers: int
    ) -> None:
        self._steps_alone = ClassTraits.of(optimizer_class).steps_alone
        self._step = HostStep(optimizer_class, given, workers=workers)
        self._settings = settings

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
                self._step.put_state(held, fresh, self._settings(held))
            else:
                self._step.drop_state(held)

    def begin(self, held: Sequence[HostParameter]) -> None:
        for one in held:
            one.make_master()
            self._step.begin_state(one, self._settings(one))

    def forget_master(self, held: HostParameter) -> None:
        held.context.lane.run(held.forget_master)

    def end_step(self, cost: StepCost) -> dict[int, Settings]:
        cost.host_seconds = self._step.take_seconds()
        written, self._step.written = self._step.written, {}
        return written

    def discard(self, held: HostParameter) -> None:
        self._step.drop_state(held)

    def close(self) -> None:
        self._step.close()

    def _queue(self, groups: Sequence[StepGroup], ready: dict[DeviceContext, Event], cost: StepCost) -> None:
        """Queue a step in one call for a class that steps all parameters together, else of a single group."""
        held = [step.held for group in groups for step in group.steps]
        for one in held:
            one.check()
        context = held[0].context

        def work() -> Event:
            for one in held:
                one.begin_step()
            if self._steps_alone:
                return self._step.step(groups[0], ready[context])
            return self._step.step_together(groups, ready)

        end = context.lane.run(work)
        for one in held:
            one.mark_written()
            one.gradient.reader = one.updated = end
        cost.on_host += sum(one.numel for one in held)
