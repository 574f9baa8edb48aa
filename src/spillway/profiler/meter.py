"""Times and bytes at instants of a step, in the order of the program.

NOTE [ Instants of a program ]

An accelerator's allocator gives and takes memory when the CPU asks, far ahead of the device. So its counters, read
between two operators, say what the program holds there, and no synchronisation is needed. Times are the device's, by
events. The CPU has no such counters. There, the resident bytes of the process are read, and the kernel's mark of their
peak (``runtime/cpu.py``): a budget on a CPU is of these. ``malloc`` is set so that a freed tensor's bytes are not
resident any more. Tensors below its threshold are seen in part.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import Module

from spillway._torch import device_stats, sleep_on_gpu, storage_key, storage_parts
from spillway.planner.profile import Static
from spillway.runtime.cpu import Resident, ResidentPeak, resident_bytes
from spillway.runtime.system import memory_info
from spillway.saved_tensors.identity import is_streamed

GRAIN = 512
"""Bytes to which torch's allocator for accelerators rounds up."""
_CYCLES = 1.5e9
"""Clock cycles of an accelerator in a second, about."""


class Reading(NamedTuple):
    """The measurements at an instant."""

    seconds: float
    """Since the first instant."""
    level: int
    """Bytes that are allocated."""
    peak: int
    """Most bytes that were allocated since the instant before."""


class Meter(ABC):
    """Marks instants, and reads them in the end."""

    @abstractmethod
    def mark(self) -> None:
        """This is an instant."""

    @abstractmethod
    def finish(self) -> list[Reading]:
        """The readings at the instants, in their order. Waits for the device."""

    def wait(self) -> None:  # noqa: B027
        """Wait until the device is idle."""

    def lag(self, seconds: float) -> None:  # noqa: B027
        """Have the device do nothing for about so long. Later work waits."""

    def close(self) -> None:  # noqa: B027
        """Measure nothing any more."""


def allocated(device: torch.device) -> tuple[int, int]:
    """Bytes allocated on an accelerator, and their peak since it was reset.

    ``torch.accelerator.memory_allocated`` reads the same, and sorts a hundred other counters for each answer.
    """
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    bytes_of_all = device_stats(index)["allocated_bytes"]["all"]
    return bytes_of_all["current"], bytes_of_all["peak"]


class DeviceMemory:
    """Bytes of a device that count for a budget: those allocated; on the CPU, the process's resident ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resident = ResidentPeak() if device.type == "cpu" else None

    def level(self) -> int:
        return allocated(self._device)[0] if self._resident is None else resident_bytes()

    def peak(self) -> int:
        return allocated(self._device)[1] if self._resident is None else self._resident.most()

    def total(self) -> int | None:
        """All bytes of a CUDA device. Other types of devices need not tell."""
        return memory_info(self._device)[1] if self._device.type == "cuda" else None

    def free_cached(self) -> bool:
        """Free the allocator's cached blocks, if it has some. Waits for the device."""
        if self._resident is None:
            torch.accelerator.empty_cache()
        return self._resident is None

    def reset_peak(self) -> Resident:
        """Forget the peak; gives the bytes now, and the peak until now."""
        if self._resident is not None:
            return self._resident.restart()
        until_now = Resident(*allocated(self._device))
        torch.accelerator.reset_peak_memory_stats(self._device)
        return until_now


def meter_of(device: torch.device) -> Meter:
    """A meter for a device, which begins now."""
    return ClockMeter(DeviceMemory(device)) if device.type == "cpu" else AcceleratorMeter(device)


class AcceleratorMeter(Meter):
    """See NOTE [ Instants of a program ]. Resets the device's peak at each instant."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, DeviceMemory(device)
        self._instants: list[tuple[torch.Event, Resident]] = []

    def mark(self) -> None:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        self._instants.append((event, self._memory.reset_peak()))

    def wait(self) -> None:
        torch.accelerator.synchronize(self._device)

    def lag(self, seconds: float) -> None:
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                sleep_on_gpu(int(seconds * _CYCLES))

    def finish(self) -> list[Reading]:
        self.wait()
        return [
            Reading(self._instants[0][0].elapsed_time(event) / 1e3 if number else 0.0, *found)
            for number, (event, found) in enumerate(self._instants)
        ]


class ClockMeter(Meter):
    """Reads a clock, in seconds, and memory, whose peak restarts at each instant. Without memory, bytes are 0."""

    def __init__(self, memory: DeviceMemory | None = None, clock: Callable[[], float] | None = None) -> None:
        self._memory, self._clock = memory, clock or time.perf_counter
        self._instants: list[tuple[float, Resident]] = []

    def mark(self) -> None:
        seconds = self._clock()
        self._instants.append((seconds, Resident(0, 0) if self._memory is None else self._memory.reset_peak()))

    def finish(self) -> list[Reading]:
        return [Reading(seconds - self._instants[0][0], *found) for seconds, found in self._instants]


def known_bytes(model: Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> Static:
    """The bytes on a device now of a model, and of an optimizer's state. Each storage is counted once, and whole."""
    seen: set[int] = set()
    # At rest, streamed parameters are in CPU memory.
    parameters = [each for each in model.parameters() if not is_streamed(each)]
    states = () if optimizer is None else optimizer.state.values()
    # Not by the state's own values(), which would reload an offloaded state.
    values = (value for state in states if isinstance(state, dict) for value in dict.values(state))
    return Static(
        weights=_nbytes(parameters, device, seen),
        gradients=_nbytes((each.grad for each in model.parameters() if each.grad is not None), device, seen),
        optimizer=_nbytes(values, device, seen),
        other=0,
    )


def static_within(known: Static, static_bytes: int) -> Static | None:
    """All static bytes by kind; ``None`` if more are known than there are.

    That happens on the CPU, whose static bytes are the resident ones: weights that a file maps need not be.
    """
    other = static_bytes - known.total
    return None if other < 0 else replace(known, other=other)


def _nbytes(tensors: Iterable[object], device: torch.device, seen: set[int]) -> int:
    """Bytes of the plain tensors' storages that were not seen before. Others are not told apart."""
    total = 0
    for part in (part for tensor in tensors if isinstance(tensor, torch.Tensor) for part in storage_parts(tensor)):
        is_plain = type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided
        if is_plain and part.device == device:
            storage = part.untyped_storage()
            if storage_key(storage) not in seen:
                seen.add(storage_key(storage))
                total += storage.nbytes()
    return total
