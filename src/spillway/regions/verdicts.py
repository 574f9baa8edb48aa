"""Comparisons whose outcome the device has yet to tell.

To ask a device for a number means to wait until it is through with all that was queued before. So whether a re-run gave
what the first run had is asked for by a copy to the host, and read when that has come: in a later call, a later
backward, or when the session is closed.

NOTE [ When to ask ]

A device has one engine for what goes to host memory, whose copies follow one another. A copy of some bytes on the
stream that computes waits for all that lanes have queued before it, and all that is computed after waits with it: in a
forward, behind a block of which 640 MiB left, 9.5 ms (one H100). So it is queued at the end of the backward that made
the comparisons, when nothing leaves any more, and by the next call only where there is no such end: it has raised.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
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
        self._asks_after = _NONE
        """The latest backward at whose end it will be asked for what waits."""

    def add(self, label: str, differs: torch.Tensor) -> None:
        """Two runs of a function were compared. See NOTE [ When to ask ].

        Args:
            label: names the function.
            differs: a bool, without dimensions, on the device.

        Raises:
            RecomputeError: if it is known that this one, or an earlier one, failed.
        """
        if differs.device.type == "cpu":
            if differs:
                raise differed([label])
            return
        with self._lock:
            waiting = self._waiting.setdefault(differs.device, [])
            waiting.append((label, differs))
            is_full = len(waiting) >= _MANY
            task, asks_after = _graph_task(), self._asks_after
            self._asks_after = task
        if task not in (_NONE, asks_after):
            engine: Any = Variable._execution_engine
            engine.queue_callback(self.send)
        if is_full:
            self.send()
        self.read()

    def send(self) -> None:
        """Ask for what waits. Nothing is waited for."""
        if not self._waiting:
            return
        # It is no operator of the user's, whose modes may be in force.
        with self._lock, torch._C._DisableTorchDispatch():
            waiting, self._waiting = self._waiting, {}
            for device, several in waiting.items():
                told = torch.empty(len(several), dtype=torch.bool, device="cpu", pin_memory=True)
                told.copy_(torch.stack([differs for _, differs in several]), non_blocking=True)
                event = torch.Event(device)
                event.record(torch.accelerator.current_stream(device))
                # They are held until then: the stream that made them may be another one.
                self._sent.append((several, told, event))

    def end(self) -> None:
        """Ask for all, and wait for it.

        Raises:
            RecomputeError: if a comparison failed.
        """
        # A forked child has no device of its parent's.
        if self._process == os.getpid():
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
