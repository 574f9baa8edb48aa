"""The compute lanes that saved tensors are used on.

NOTE [ Whose stream ]

The bytes of a storage go back to the stream on which they were allocated. The mover cannot know it, so it remembers
every compute lane that something was saved or asked for on (nearly always one). The ``out`` lane waits for all of them
before it reads, and all of them wait before the mover lets go of bytes that a copy reads or writes. A stream on which
nothing was ever saved (a data loader's) may own the bytes all the same, so the backend is told of the lanes that used
them (``hand_back``). A destination that was fetched ahead on one compute lane and is asked for on another is
dropped, and fetched again for the lane that asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from spillway.runtime.backend import Backend, Event, Lane
from spillway.runtime.entry import Entry
from spillway.runtime.ledger import Stalls


class ComputeLanes:
    """Every compute lane that something was saved or asked for on. Used with the mover's lock held."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._seen: dict[Lane, None] = {}
        self._awaited: Event | None = None

    def now(self) -> Lane:
        """The calling thread's."""
        lane = self._backend.compute()
        if lane not in self._seen:
            # A new dictionary, since `knows` is called without the lock.
            self._seen = {**self._seen, lane: None}
            self._awaited = None
        return lane

    def knows(self) -> bool:
        """Whether the calling thread's has been seen. May be called without the mover's lock."""
        return self._backend.compute() in self._seen

    def go_before(self, lane: Lane) -> None:
        """What is queued on ``lane`` from now on starts after all that is queued here by now."""
        for seen in self._seen:
            self._backend.wait(lane, self._backend.record(seen))

    def let_go(self, entry: Entry, stalls: Stalls) -> None:
        """Let go of an entry's bytes once the copy under way is done."""
        copied = entry.copied
        assert copied is not None
        # What left together has one event, and needs to be waited for once.
        if copied is not self._awaited:
            self._wait(tuple(self._seen), copied, stalls)
            self._awaited = copied
        entry.copied = None
        if entry.source is not None and entry.round == 0:
            self._backend.hand_back(entry.source, self._seen)
        entry.let_go()

    def _wait(self, lanes: Sequence[Lane], event: Event, stalls: Stalls) -> None:
        """All of them, also those behind one that hears of an error."""
        try:
            self._backend.timed_wait(lanes[0], event, stalls)
        finally:
            if len(lanes) > 1:
                self._wait(lanes[1:], event, stalls)

    def __len__(self) -> int:
        return len(self._seen)
