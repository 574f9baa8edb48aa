"""The passes that a thread is inside of: whose order and window a region's tensors go by."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spillway.capture.hooks import Pass


class Passes(threading.local):
    """The passes of one session that the calling thread has entered, the innermost last.

    Where there is none, a pass is opened that nobody has entered. It ends when backward has begun to ask for what was
    saved in it, or nobody can any more: what is saved after that belongs to another forward. So does what is captured
    into a graph, when what came before was not, and the other way round.
    """

    def __init__(self) -> None:
        self._entered: list[Pass] = []
        self.open: Pass | None = None
        """The one that nobody has entered, if there is one."""

    def enter(self, current: Pass) -> None:
        """The calling thread enters a pass."""
        self._entered.append(current)

    def leave(self) -> None:
        """And leaves it."""
        self._entered.pop()

    def under(self, tag: str | None) -> Pass | None:
        """The innermost that the calling thread has entered under a tag."""
        return next((entered for entered in reversed(self._entered) if entered.tag == tag), None)

    def current(self, make: Callable[[], Pass]) -> Pass:
        """The innermost, or one that is open to all."""
        if self._entered:
            return self._entered[-1]
        if self.open is not None and self.open.is_elsewhere:
            # What waits in it stays on the device.
            self.open.end(completed=False)
            self.open = None
        if self.open is None or self.open.was_asked or self.open.was_dropped:
            if self.open is not None:
                self.open.end(completed=True)
            self.open = make()
        return self.open
