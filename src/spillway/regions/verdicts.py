"""Comparisons whose outcome the device has yet to tell.

To ask a device for a number means to wait until it is through with all that was queued before. So whether a re-run gave
what the first run had is asked for by a copy to the host, and read when that has come: in a later call, a later
backward, or when the session is closed.

NOTE [ When to ask ]

A device has one engine for what goes to host memory, whose copies follow one another. A copy of some bytes on the
stream that computes waits for all that lanes have queued before it, and all that is computed after waits with it: in a
forward, behind a block that sends 640 MiB away, for milliseconds. So it is queued at the end of the backward that made
the comparisons, when what its forward sent away is through, and before that where there are many. An optimizer's
gradients, or another micro-batch, may leave then all the same. Where there is no such end (it has raised, or autograd
itself is compiled), the next call of a checkpointed function asks.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.autograd import Variable

from spillway.errors import RecomputeError

_MANY = 32
_NONE = -1

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Verdicts:
    """Takes comparisons, and raises :class:`~spillway.errors.RecomputeError` of those that failed. See the top."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._waiting: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        self._sent: deque[tuple[list[tuple[str, torch.Tensor]], torch.Tensor, torch.Event]] = deque()
        self._streams: dict[torch.device, dict[torch.Stream, None]] = {}
        """Those on which what waits was compared."""
        self._asks_after = _NONE
        """The latest backward at whose end it will be asked for what waits."""
        self._has_ended = False

    def add(self, label: str, differs: torch.Tensor) -> None:
        """Two runs of a function were compared. See NOTE [ When to ask ].

        Args:
            label: names the function.
            differs: a bool, without dimensions, on the device.

        Raises:
            RecomputeError: if it is known that this one, or an earlier one, failed.
        """
        device = differs.device
        if device.type == "cpu" or self._has_ended:
            # Nobody would ask later.
            if differs:
                raise differed([label])
            return
        with self._lock:
            self._streams.setdefault(device, {})[self._stream(device)] = None
            waiting = self._waiting.setdefault(device, [])
            waiting.append((label, differs))
            is_full = len(waiting) >= _MANY
            task, asks_after = _graph_task(), self._asks_after
            self._asks_after = task
        if task not in (_NONE, asks_after):
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._send_at_end)
        if is_full:
            self.send()
        self.read()

    def send(self) -> None:
        """Ask for what waits. Nothing is waited for. What cannot be asked for waits on."""
        if not self._waiting:
            return
        # It is no operator of the user's, whose modes may be in force.
        with self._lock, torch._C._DisableTorchDispatch():
            for device in list(self._waiting):
                several, now = self._waiting[device], self._stream(device)
                for stream in self._streams.get(device, ()):
                    if stream != now:
                        # Of another thread's backward, or one that was begun within another.
                        now.wait_stream(stream)
                self._sent.append((several, *self._ask(several, now)))
                del self._waiting[device]
                self._streams.pop(device, None)

    def _send_at_end(self) -> None:
        """The same, when gradients are there: if there is no memory for it, the next call asks, and says so."""
        with suppress(RuntimeError):
            self.send()

    def _ask(self, several: list[tuple[str, torch.Tensor]], now: torch.Stream) -> tuple[torch.Tensor, torch.Event]:
        """A copy on the host that is under way, and when it has come."""
        told = torch.empty(len(several), dtype=torch.bool, device="cpu", pin_memory=True)
        told.copy_(torch.stack([differs for _, differs in several]), non_blocking=True)
        event = torch.Event(several[0][1].device)
        event.record(now)
        # They are held until then: the stream that made them may be another one.
        return told, event

    def _stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def end(self) -> None:
        """Ask for all, and wait for it.

        Raises:
            RecomputeError: if a comparison failed.
        """
        # A forked child has no device of its parent's.
        if self._process == os.getpid():
            self._has_ended = True
            self.send()
            self.read(wait=True)

    def read(self, *, wait: bool = False) -> None:
        """Look at what has come.

        Args:
            wait: for all of it.

        Raises:
            RecomputeError: if a comparison failed.
        """
        while True:
            with self._lock:
                if not self._sent or not (wait or self._sent[0][2].query()):
                    return
                several, told, event = self._sent.popleft()
            event.synchronize()
            wrong = [label for (label, _), differs in zip(several, told.tolist(), strict=True) if differs]
            if wrong:
                raise differed(wrong)


def differed(labels: list[str]) -> RecomputeError:
    """The error of functions of these names, whose runs were not the same."""
    names = ", ".join(dict.fromkeys(labels))
    return RecomputeError(
        f"got other values when {names} ran again for backward than in its first run, expected the same: the gradients "
        f"of that backward are wrong. It reads something besides its arguments and parameters that had changed by "
        f"then; give it that as an argument, or leave it outside of the region"
    )
