"""Where states and masters are between steps, and how they are stepped from there.

NOTE [ State stores ]

* :class:`~spillway.optim.memory_store.MemoryStore`: CPU memory, where the CPU steps them as they are.
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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import State
from spillway.optim.options import StepTimes
from spillway.records import OptimizerStats
from spillway.runtime.backend import Event, Stalls

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
    _waits: list[Stalls] = field(default_factory=list)
    _sent: int = 0
    _received: int = 0
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
            waits, sent, received = context.transfers.take_counts()
            self._waits.append(waits)
            self._sent += sent
            self._received += received
            self._reserved += context.transfers.arena.reserved_bytes

    def stats(self) -> OptimizerStats:
        """Bytes and seconds, as users see them."""
        return OptimizerStats(
            stepped_on_host=self.on_host,
            streamed=self.streamed,
            host_seconds=self.host_seconds,
            stall_seconds=sum(waits.seconds() for waits in self._waits),
            sent_bytes=self._sent,
            received_bytes=self._received,
            host_bytes=self._reserved,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
        )

    def times(self) -> StepTimes:
        """Seconds, for the choice of a fraction."""
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
