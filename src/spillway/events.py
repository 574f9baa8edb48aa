"""What the runtime tells whoever listens.

A session takes a ``recorder``: any callable from :class:`Event` to nothing. It is called from the thread in which the
thing happened, with the runtime's lock held, so it must be short and must not call Spillway. :class:`EventList` keeps
everything; tests of schedules are written against it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class EventKind(enum.Enum):
    """What happened to a storage."""

    LEAVE = "leave"
    """Its copy out was queued."""
    RELEASE = "release"
    """Its bytes on the device were let go: it is away."""
    RETURN = "return"
    """Its copy back was queued."""
    TAKE = "take"
    """It was handed to backward after its copy back."""
    REUSE = "reuse"
    """It was handed to backward without a copy back: it had not left, or was still alive."""
    DROP = "drop"
    """Its last handle died, and all that it held was given back."""
    REFUSE = "refuse"
    """No tier could take it: it stays."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one storage."""

    kind: EventKind
    entry: int
    """A number that names the storage, unique within its session."""
    nbytes: int
    seconds: float = field(default_factory=time.perf_counter, compare=False)
    """When, on the clock of ``time.perf_counter``."""


Recorder = Callable[[Event], None]


@dataclass(slots=True)
class EventList:
    """A recorder that keeps all it hears, in order.

    Example:
        >>> events = EventList()
        >>> session = spillway.Session(recorder=events)  # doctest: +SKIP
    """

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def schedule(self) -> list[tuple[str, int]]:
        """Kinds and storages alone: what tests compare."""
        return [(event.kind.value, event.entry) for event in self.events]
