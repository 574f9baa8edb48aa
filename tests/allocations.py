"""What the calling thread allocates and frees in host memory, in the order of its program.

NOTE [ The recorder of a thread ]

Torch's newer profiler has one session in a process: a second one ends the first without a word, and one that is ended
by another thread than began it brings the process down. So allocations are written down by the older one, which each
thread has its own of. Those who listen in one thread share it. Beside a profiler of the user's there can be none.

Marks are ranges with a name of their own among the allocations, so that no clock says which comes first.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch
from torch.autograd.profiler import record_function

from spillway.errors import UsageError

# Torch tells type checkers of some of these, and of some otherwise than they are.
_torch: Any = torch.autograd
_PREFIX = "spillway.mark."
_numbers = itertools.count()


class Listener:
    """Has what its thread allocates, from when it is made until it is closed.

    Raises:
        UsageError: if the user's own profiler runs in this thread.
    """

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
            raise UsageError(
                "got a step that is to be measured on the CPU while a profiler of torch's runs in this thread, "
                "expected none, since there can be only one; begin to profile once attached.stage is 'holding'"
            )
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
