"""A CPU whose memory is counted to the byte: what the calling thread allocates and frees, in the order of its program.

Plans are made for an accelerator's bytes, and tests of them need none: they count the CPU's in the same way.

NOTE [ The recorder of a thread ]

Torch's newer profiler has one session in a process: a second one ends the first without a word, and one that is ended
by another thread than began it brings the process down. So allocations are written down by the older one, which each
thread has its own of. Those who listen in one thread share it. Beside a profiler of the user's there can be none.

Marks are ranges with a name of their own among the allocations, so that no clock says which comes first.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.profiler import record_function

from spillway.attaching.pipeline import PipelinePlanController
from spillway.profiler.meter import Meter, Reading

# Torch tells type checkers of some of these, and of some otherwise than they are.
_torch: Any = torch.autograd
_PREFIX = "spillway.mark."
_numbers = itertools.count()


class Listener:
    """Has what its thread allocates, from when it is made until it is closed."""

    def __init__(self) -> None:
        self.changes: list[int] = []
        """Bytes allocated, or freed where they are negative, in order."""
        self.marks: dict[int, int] = {}
        """Of each mark, how many changes there were before."""
        self._thread = threading.get_ident()
        self._is_open = False
        _recorder.add(self)
        self._is_open = True

    def __del__(self) -> None:
        self.close()

    def mark(self) -> int:
        """This is an instant; gives its number. In another thread than the listener's, it is in no :attr:`marks`."""
        number = next(_numbers)
        with record_function(f"{_PREFIX}{number}"):
            return number

    def hears(self) -> bool:
        """Whether this is its thread."""
        return threading.get_ident() == self._thread

    def close(self) -> None:
        """Listen no more. A second time, and in another thread, it does nothing."""
        # It may die in a backward, where nobody may stop.
        if self._is_open and self.hears():
            self._is_open = False
            _recorder.discard(self)


class _Recorder(threading.local):
    """See NOTE [ The recorder of a thread ]."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self._runs = False

    def add(self, listener: Listener) -> None:
        """It hears what comes."""
        self._collect()
        if _torch._profiler_enabled():
            raise RuntimeError("got a profiler of torch's, expected none: there can be only one in a thread")
        self._listeners.add(listener)
        self._start()

    def discard(self, listener: Listener) -> None:
        """It has heard enough."""
        self._collect()
        self._listeners.discard(listener)
        if self._listeners:
            self._start()

    def _start(self) -> None:
        options = torch._C._profiler._ExperimentalConfig()
        # Memory, and neither shapes nor stacks nor modules.
        config = _torch.ProfilerConfig(_torch.ProfilerState.CPU, False, True, False, False, False, options)
        _torch._enable_profiler_legacy(config)
        self._runs = True

    def _collect(self) -> None:
        """Stop, and tell the listeners what there was."""
        if not self._runs:
            return
        self._runs = False
        if not _torch._profiler_enabled():
            # The user has ended it, with one of their own. Marks are missing then.
            return
        for events in _torch._disable_profiler_legacy():
            for event in events:
                if event.kind() == "memory_alloc":
                    for listener in self._listeners:
                        listener.changes.append(event.cpu_memory_usage())
                elif event.kind() == "push" and event.name().startswith(_PREFIX):
                    for listener in self._listeners:
                        listener.marks[int(event.name()[len(_PREFIX) :])] = len(listener.changes)


_recorder = _Recorder()


class ExactMeter(Meter):
    """Counts as an accelerator's allocator does.

    Args:
        resident: bytes that are there when it begins.
    """

    def __init__(self, resident: int) -> None:
        self._resident = resident
        self._instants: list[tuple[int, float]] = []
        self._listener = Listener()

    def mark(self) -> None:
        # Of another thread nothing is heard: that is no change since the instant before.
        number = self._listener.mark() if self._listener.hears() else self._instants[-1][0]
        self._instants.append((number, time.perf_counter()))

    def finish(self) -> list[Reading]:
        self._listener.close()
        changes, places = self._listener.changes, self._listener.marks
        readings: list[Reading] = []
        level, place = self._resident, 0
        for number, seconds in self._instants:
            end, peak = places[number], level
            for nbytes in changes[place:end]:
                level += nbytes
                peak = max(peak, level)
            place = end
            readings.append(Reading(seconds - self._instants[0][1], level, peak))
        return readings

    def close(self) -> None:
        self._listener.close()


class ExactMemory:
    """A :class:`~spillway.profiler.meter.DeviceMemory`, whose peak is that from a reset to when it is asked for."""

    def __init__(self, resident: Callable[[], int]) -> None:
        self._resident = resident
        self._meter: ExactMeter | None = None
        self._most = 0

    def level(self) -> int:
        return self._resident()

    def peak(self) -> int:
        if self._meter is not None:
            self._meter.mark()
            self._most = max(reading.peak for reading in self._meter.finish())
            self._meter = None
        return self._most

    def reset_peak(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = ExactMeter(self._resident())
        self._meter.mark()

    def total(self) -> int | None:
        return None

    def free_cached(self) -> bool:
        return False


class NoMemory:
    """A :class:`~spillway.profiler.meter.DeviceMemory` that finds nothing: steps that hold a plan go unchecked."""

    def level(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def total(self) -> int | None:
        return None

    def free_cached(self) -> bool:
        return False

    def reset_peak(self) -> None:
        return None


def count_exactly(patch: pytest.MonkeyPatch, resident: Callable[[], int]) -> None:
    """Have the CPU's memory counted to the byte.

    Args:
        patch: takes it back.
        resident: gives the bytes that are there when a step begins.
    """
    # A compared replay takes some KiB more. Which replays are samples depends on the tests before this one.
    patch.setattr("spillway.checkpointing.learned._EVERY", 1 << 60)
    patch.setattr("spillway.profiler.meter.meter_of", lambda device: ExactMeter(resident()))
    patch.setattr("spillway.profiler.step_trace.meter_of", lambda device: ExactMeter(resident()))
    patch.setattr("spillway.attaching.search.DeviceMemory", lambda device: NoMemory())
    init = PipelinePlanController.__init__

    def counted(self: PipelinePlanController, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.search.memory = ExactMemory(resident)

    patch.setattr(PipelinePlanController, "__init__", counted)
