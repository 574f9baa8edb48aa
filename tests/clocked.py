"""Lanes that have clocks: the engine as it is, on a CPU, in the time that a device would take.

Each lane, compute among them, is a clock. What is queued is done at once, and moves its lane's clock on by what it
would take: an operator by the roofline of some hardware, a copy by its bytes at what is planned with of a link's rate.
A wait sets the one clock to the other, if that is later. So a step of the real engine, with its hooks, its orders and
windows, says how long it would be, and what compute would wait for: to be held against the simulated step, which knows
nothing of the engine.

The host takes no time. Models and rates are scaled down together, so that a small model has the times of a large one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway import Hardware
from spillway.checkpointing.schema import facts_of
from spillway.planner.hardware import seconds_of
from spillway.planner.planner import USABLE
from spillway.profiler.target_kernels import effort_of
from spillway.runtime.arena import anonymous_pages
from spillway.runtime.backend import Backend, Event, HostQueue, Several, Stalls, Stream, Task
from spillway.runtime.bytes import Bytes, Cells


def scaled(hardware: Hardware, *, nbytes: float, flops: float) -> Hardware:
    """That moves so many times fewer bytes in a second, and computes so many times fewer operations."""
    links = tuple(
        dataclasses.replace(link, out=link.out / nbytes, back=link.back / nbytes, both=link.both / nbytes)
        for link in hardware.bandwidths
    )
    return dataclasses.replace(
        hardware, bandwidths=links, flops=hardware.flops / flops, memory_bandwidth=hardware.memory_bandwidth / nbytes
    )


class Clock:
    """A lane."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 0.0


@dataclasses.dataclass(slots=True)
class Instant:
    """An event."""

    at: float
    compute: Clock

    def query(self) -> bool:
        return self.at <= self.compute.now

    def synchronize(self) -> None:
        self.compute.now = max(self.compute.now, self.at)


class ClockedBackend(Backend):
    """See this file's own text.

    Args:
        hardware: whose link the lanes are.
    """

    alignment = 64

    def __init__(self, hardware: Hardware) -> None:
        super().__init__(torch.device("cpu"))
        self.clock = Clock("compute")
        self.is_now(hardware)

    def is_now(self, hardware: Hardware) -> None:
        """It is of other hardware."""
        link = hardware.bandwidths[0]
        self._rates = {"out": link.out * USABLE, "back": link.back * USABLE}
        self._hardware = hardware

    def serve(self, device: torch.device) -> Backend:
        """This backend, for ``Session(backend=...)``."""
        return self

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, operators take their time."""
        clock, hardware = self.clock, self._hardware

        class Costs(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                output = func(*args, **(kwargs or {}))
                if isinstance(func, torch._ops.OpOverload):
                    effort = effort_of(func, facts_of(func), args, kwargs or {}, output)
                    clock.now += 0.0 if effort is None else seconds_of(effort, hardware)
                return output

        with Costs():  # type: ignore[no-untyped-call]
            yield

    def compute(self) -> Stream:
        return self.clock

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        return Clock(name)

    def record(self, lane: Stream) -> Event:
        assert isinstance(lane, Clock)
        return Instant(lane.now, self.clock)

    def wait(self, lane: Stream, event: Event) -> None:
        assert isinstance(lane, Clock)
        for each in event.events if isinstance(event, Several) else (event,):
            assert isinstance(each, Instant)
            lane.now = max(lane.now, each.at)

    def timed_wait(self, lane: Stream, event: Event, stalls: Stalls) -> None:
        before = self.clock.now
        self.wait(lane, event)
        stalls.known_seconds += self.clock.now - before

    def copy(self, lane: Stream, destination: Bytes, source: Bytes) -> None:
        assert isinstance(lane, Clock)
        lane.now += source.nbytes / self._rates[lane.name]
        ctypes.memmove(destination.address, source.address, source.nbytes)

    def convert(self, lane: Stream, destination: Cells, source: Cells) -> None:
        raise NotImplementedError

    def run(self, task: Task) -> Event:
        raise NotImplementedError

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        raise NotImplementedError

    def host_slab(self, nbytes: int) -> torch.Tensor:
        return anonymous_pages(nbytes)

    def peak_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """There is nothing to stop."""
