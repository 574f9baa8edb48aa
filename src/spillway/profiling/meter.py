"""Times and bytes at instants of a step, in the order of the program.

NOTE [ Instants of a program ]

An accelerator's allocator gives and takes memory when the host asks, far ahead of the device: so its counters, read
between two operators, say what the program holds there, and no synchronisation is needed. Times are the device's, by
events. The CPU has no such counters: there, each allocation of the thread is written down (``allocations.py``), and
instants among them. What is allocated when a step begins is then told by the resident bytes of the process, once what
``malloc`` keeps of freed memory is given back: a step would take that first, and it can be as much as all the rest.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from typing import NamedTuple

import psutil
import torch

from spillway.profiling.allocations import Listener

_CYCLES = 1.5e9
"""Of an accelerator, in a second, about."""


class Reading(NamedTuple):
    """What was measured at an instant."""

    seconds: float
    """Since the first instant."""
    level: int
    """Bytes that are allocated."""
    peak: int
    """Most bytes that were since the instant before."""
    made: int
    """Bytes that were given out since the instant before, whatever was taken back."""


class Meter(ABC):
    """Marks instants, and reads them in the end."""

    @abstractmethod
    def mark(self) -> None:
        """This is an instant."""

    @abstractmethod
    def finish(self) -> list[Reading] | None:
        """What was measured at the instants, in their order; ``None`` if some cannot be told. Waits for the device."""

    def hears(self) -> bool:
        """Whether an instant of the calling thread can be told."""
        return True

    def wait(self) -> None:  # noqa: B027
        """Until the device has nothing to do."""

    def lag(self, seconds: float) -> None:  # noqa: B027
        """Have the device do nothing for about so long: what it is given then waits."""

    def close(self) -> None:  # noqa: B027
        """Nobody wants to know any more."""


def allocated(device: torch.device) -> tuple[int, int, int]:
    """Bytes allocated on an accelerator, the most since that was set back, and all that were ever given out.

    What ``torch.accelerator.memory_allocated`` is made of, which sorts a hundred other figures for each answer.
    """
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    bytes_of_all = torch._C._accelerator_getDeviceStats(index)["allocated_bytes"]["all"]
    return bytes_of_all["current"], bytes_of_all["peak"], bytes_of_all["allocated"]


def meter_of(device: torch.device) -> Meter:
    """A meter for a device, which begins now."""
    return CpuMeter() if device.type == "cpu" else AcceleratorMeter(device)


class AcceleratorMeter(Meter):
    """See NOTE [ Instants of a program ]. Sets the device's peak back at each instant."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._instants: list[tuple[torch.Event, int, int, int]] = []

    def mark(self) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        level, peak, made = allocated(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._instants.append((event, level, peak, made))

    def wait(self) -> None:
        torch.accelerator.synchronize(self._device)

    def lag(self, seconds: float) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda._sleep(int(seconds * _CYCLES))  # type: ignore[no-untyped-call]

    def finish(self) -> list[Reading]:
        self.wait()
        if not self._instants:
            return []
        first, *_, before = self._instants[0]
        readings: list[Reading] = []
        for event, level, peak, made in self._instants:
            seconds = first.elapsed_time(event) / 1e3 if event is not first else 0.0
            readings.append(Reading(seconds, level, peak, made - before))
            before = made
        return readings


class CpuMeter(Meter):
    """See NOTE [ Instants of a program ]."""

    def __init__(self) -> None:
        self._resident = _resident()
        self._instants: list[tuple[int, float]] = []
        self._listener = Listener()

    def mark(self) -> None:
        self._instants.append((self._listener.mark(), time.perf_counter()))

    def finish(self) -> list[Reading] | None:
        self._listener.close()
        changes, places = self._listener.changes, self._listener.marks
        if any(number not in places for number, _ in self._instants):
            return None
        readings: list[Reading] = []
        level, place = self._resident, 0
        for number, seconds in self._instants:
            end, peak, made = places[number], level, 0
            for nbytes in changes[place:end]:
                level += nbytes
                peak = max(peak, level)
                made += max(nbytes, 0)
            place = end
            readings.append(Reading(seconds - self._instants[0][1], level, peak, made))
        return readings

    def hears(self) -> bool:
        return self._listener.hears()

    def close(self) -> None:
        self._listener.close()


def _resident() -> int:
    """Bytes of the process that are in use."""
    # Of glibc. Others keep less.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return psutil.Process().memory_info().rss
