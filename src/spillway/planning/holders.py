"""What holds the bytes that a device has in a simulated step.

NOTE [ Who holds what ]

A byte is counted for one holder at a time, and the holders of an instant add up to what the device has. A task's
``change_bytes`` are kept, but for what it says of gradients and of what was computed again; those of a task that is no
block's are counted apart. What a block sends is kept until its copy is queued, and so is what turns out never to be
copied. While a task runs, all that it allocates is being worked on, also what it will leave behind.

Who frees something need not be who allocated it: a block lets go of its input, which the block before it has counted.
So the count of one holder may fall below zero while the sum is right: see :func:`settled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from spillway.planning.tasks import Phase, Task


@dataclass(frozen=True, slots=True)
class Holders:
    """Bytes on the device at an instant, by what holds them. See NOTE [ Who holds what ]."""

    static: int
    """There when the step begins."""
    gradients: int = 0
    """Of parameters, made in this step."""
    outside: int = 0
    """Of what is no block's."""
    kept: int = 0
    """Held by blocks from their forward to their backward."""
    leaving: int = 0
    """Queued to be copied out, and not let go of."""
    returning: int = 0
    """Fetched, and not yet asked for."""
    returned: int = 0
    """Fetched and asked for, and not yet let go of."""
    recomputed: int = 0
    """Computed again, and not yet let go of."""
    working: int = 0
    """What the task that runs has allocated at most, beyond what was there when it began."""

    @property
    def total(self) -> int:
        """What the device has."""
        return sum(astuple(self))


def settled(shares: Sequence[int]) -> list[int]:
    """The same sum with no share below zero: what one lacks is taken off the one before it.

    Args:
        shares: bytes of holders, in an order in which each may take from those before. The first takes what is left
            over, and may stay below zero.

    Example:
        >>> settled([10, 4, -1, 2])
        [10, 3, 0, 2]
    """
    found = list(shares)
    for place in range(len(found) - 1, 0, -1):
        if found[place] < 0:
            found[place - 1] += found[place]
            found[place] = 0
    return found


class Tally:
    """The holders at this place of a program.

    Args:
        static_bytes: there when the step begins.
    """

    def __init__(self, static_bytes: int) -> None:
        self._static = static_bytes
        self._gradients = self._outside = self._kept = 0
        self._leaving = self._returning = self._returned = self._recomputed = 0

    def now(self, working: int = 0) -> Holders:
        """As they are.

        Args:
            working: bytes that a running task has beyond those.
        """
        return Holders(
            static=self._static,
            gradients=self._gradients,
            outside=self._outside,
            kept=self._kept,
            leaving=self._leaving,
            returning=self._returning,
            returned=self._returned,
            recomputed=self._recomputed,
            working=working,
        )

    def end(self, task: Task) -> None:
        """A task has ended. Of what it sends, nothing has been queued."""
        self._gradients += task.gradient_bytes
        self._recomputed += task.recomputed_bytes
        rest = task.change_bytes - task.gradient_bytes - task.recomputed_bytes
        if task.phase is Phase.OUTSIDE:
            # What it sends is kept like anything that is sent.
            sent = sum(each.nbytes for each in task.sends)
            self._outside += rest - sent
            self._kept += sent
        else:
            self._kept += rest

    def queue(self, nbytes: int) -> None:
        """A copy out is queued."""
        self._kept -= nbytes
        self._leaving += nbytes

    def let_go(self, nbytes: int) -> None:
        """A copy out has made room."""
        self._leaving -= nbytes

    def fetch(self, nbytes: int) -> None:
        """A copy back is queued."""
        self._returning += nbytes

    def take(self, nbytes: int) -> None:
        """What was fetched is asked for."""
        self._returning -= nbytes
        self._returned += nbytes

    def drop(self, nbytes: int, *, reused: bool, returned: bool) -> None:
        """What is on the device is wanted no more.

        Args:
            nbytes: of it.
            reused: whether it was never copied.
            returned: whether it has come back.
        """
        if reused:
            self._kept -= nbytes
        elif returned:
            self._returned -= nbytes
        else:
            self._leaving -= nbytes
