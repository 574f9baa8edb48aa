"""Moves entries: sends them away, and brings them back.

What an entry is, and what states it goes through, is told in ``entry.py``; whose streams are waited for, in
``compute_lanes.py``. The mover holds the lock, and knows who wants what; ``departures.py`` and ``returns.py`` are the
two windows.

NOTE [ Handles die anywhere ]

A handle may die in any thread, and inside any allocation, since the collector runs there: also while this thread
holds the mover's lock, or, in a task, a lock of the arena or of the spill file. So ``forget`` never blocks, and does
nothing inside of a task: it leaves a note, which whoever holds the lock reads. Where the entry holds bytes of the
device, the note is read at once, or by him who has the lock when he lets go of it. Where it holds none, the next caller
is early enough. Nor is a note read where compute must not wait, in a capture: the next caller outside of it is the
first who can. For the same reason tiers and arena are used with the mover's lock held, or in a task, and nowhere else
(:meth:`Mover.exclusive`).
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from spillway.errors import SessionError
from spillway.events import Event as Happening
from spillway.events import EventKind, Recorder
from spillway.runtime.backend import Backend, Lane
from spillway.runtime.compute_lanes import ComputeLanes
from spillway.runtime.departures import Departures
from spillway.runtime.entry import Entry, State
from spillway.runtime.returns import Order, Returns
from spillway.runtime.tasks import in_task
from spillway.runtime.tiers import Tier

MOST_BATCH_BYTES = 4 << 20


def batch_bytes(window: int) -> int:
    """How many bytes go together, with one wait and one event: few enough to leave most of the window to others.

    A copy of 4 MiB runs at a link's full rate; what is larger goes alone.
    """
    return min(window // 8, MOST_BATCH_BYTES)


class Mover:
    """Moves the entries of one device. All methods may be called from any thread.

    Args:
        backend: the device.
        window: bytes that may be LEAVING at once, and bytes that may be fetched ahead.
        recorder: told of everything that happens.
    """

    def __init__(self, backend: Backend, *, window: int, recorder: Recorder | None = None) -> None:
        self.window = window
        self._own_window = window
        self._claims: weakref.WeakKeyDictionary[object, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Windows, and how much of each may be fetched ahead."""
        self.batch = batch_bytes(window)
        self._backend = backend
        self._recorder = recorder
        self.lanes: tuple[Lane, Lane] = backend.lane("out"), backend.lane("back")
        """The lanes ``out`` and ``back``, which the tiers queue their copies on."""
        out, back = self.lanes
        tell = None if recorder is None else self._tell
        self.numbers = itertools.count()
        """Names for entries."""
        self._compute = ComputeLanes(backend)
        self._departures = Departures(out, self._compute, tell)
        self._returns = Returns(backend, back, self._compute, window=window, batch=self.batch, tell=tell)
        # Not reentrant: a finaliser that finds it taken, by its own thread too, leaves a note.
        self._lock = threading.Lock()
        self._forgotten: deque[tuple[Entry, int]] = deque()
        self._process = os.getpid()
        self._closed = False
        self._listeners: list[weakref.WeakMethod[Callable[[bool], object]]] = []

    def see(self, entry: Entry) -> None:
        """The calling thread's compute lane writes what the entry holds, which this mover will be given to put.

        See NOTE [ Whose stream ].
        """
        entry.mover = self
        if not self._compute.knows():
            with self._lock:
                self._compute.now()

    def adopt(self, entry: Entry, *, same_content: bool) -> bool:
        """One more handle for the entry, if it may have one here: then True. An entry of another mover's may not.

        Args:
            entry: the entry.
            same_content: whether what the new handle saved is known to be what the entry's copy holds, if there is one
                already. Where there is none yet, a copy taken later holds what both of them see.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            # Whoever saves it uses it, and may do so on a lane of his own.
            self._compute.now()
            self._discount_all()
            has_content = same_content or (entry.slot is None and entry.round == 0)
            # One of another mover is under another lock, and in slots that are given back in another way: a graph's.
            shared = entry.mover is self and entry.handles > 0 and has_content
            entry.handles += shared
        if self._forgotten:
            self.read_notes()
        return shared

    def put(self, entries: Sequence[Entry], tier: Tier, *, window: int | None = None, hold: bool = False) -> None:
        """Send entries away, in order, small ones together.

        What they hold must have been written by work that is queued on the compute lane by now. Entries that no tier
        can take stay RESIDENT, and the ledger says so.

        Args:
            entries: entries; those that are not RESIDENT any more, or that nobody has a handle of, are passed over.
            tier: where to.
            window: bytes that may be LEAVING at once, instead of the mover's own.
            hold: queue no copy yet. They take their place in the window, and are only copied if later ones need it:
                for the tail of a forward, which backward asks for first.
        """
        self._check_process()
        self._tell_of_move(begins=True)
        try:
            with self._lock:
                self._check_open()
                self._compute.now()
                self._discount_all()
                window = self.window if window is None else window
                departures = self._departures
                move = departures.hold if hold else departures.start
                if not hold:
                    departures.follow()
                for together in self._batches(entries, min(self.batch, batch_bytes(window))):
                    departures.make_room(sum([entry.nbytes for entry in together]), window)
                    move(together, tier)
        finally:
            self._tell_of_move(begins=False)
            self.read_notes()

    def resize(self, window: int, ahead: int | None = None) -> None:
        """From now on, so many bytes may be LEAVING at once, and be fetched ahead; ``None``: as many."""
        ahead = window if ahead is None else ahead
        with self._lock:
            self.window = window
            self.batch = batch_bytes(window)
            self._returns.resize(ahead, batch_bytes(ahead))

    def claim(self, owner: object, window: int | None, ahead: int | None = None) -> None:
        """Somebody needs a window, as plans do; ``None``: no more. The smallest that is claimed is in force.

        With no claim it is the one that the mover was made with.

        Args:
            owner: who needs it, as long as he lives.
            window: bytes that may be LEAVING at once.
            ahead: bytes that may be fetched ahead; ``None``: as many.
        """
        if window is None:
            self._claims.pop(owner, None)
        else:
            self._claims[owner] = window, window if ahead is None else ahead
        own = self._own_window, self._own_window
        windows, aheads = zip(*(list(self._claims.values()) or [own]), strict=True)
        self.resize(min(windows), min(aheads))

    def listen(self, listener: Callable[[bool], object]) -> None:
        """Call a method before (with ``True``) and after anything that may change how many bytes are on their way.

        Its object is not kept alive. :meth:`forsake` ends it.
        """
        self._listeners.append(weakref.WeakMethod(listener))

    def forsake(self, listener: Callable[[bool], object]) -> None:
        """Tell it no more, nor those whose objects are gone."""
        self._listeners = [each for each in self._listeners if each() not in (None, listener)]

    def settle(self, entries: Sequence[Entry]) -> None:
        """Let go of the entries that are on their way out: compute waits for their copies."""
        with self._in_use():
            self._departures.settle(entries)

    def fetch(self, entries: Sequence[Entry]) -> None:
        """Bring back the entries that are away, ahead of need and whatever the window."""
        with self._in_use() as compute:
            self._returns.fetch(entries, compute)

    def take(
        self, entry: Entry, asked_round: int, order: Order | None = None
    ) -> tuple[torch.UntypedStorage, torch.Tensor | None, int, int]:
        """The entry's bytes, on the device, ready for the calling thread's compute lane.

        Args:
            entry: the entry.
            asked_round: what this gave to the same handle the last time, or -1.
            order: knows what will be asked for next. It is fetched now, as far as the window goes.

        Returns:
            A storage; a tensor over it in the entry's form, if there is one; how many bytes of the original storage
            come before its first; and the entry's round.
        """
        self._check_process()
        self._tell_of_move(begins=True)
        try:
            with self._lock:
                self._check_open()
                compute = self._compute.now()
                self._discount_all()
                storage = _usable(entry, compute)
                if storage is None:
                    storage = self._returns.take(entry, compute)
                else:
                    self._count_reuse(entry)
                made = entry.made
                if asked_round != entry.round:
                    entry.asked += 1
                    _let_go_if_asked_by_all(entry)
                if order is not None:
                    self._returns.prefetch(order, compute)
                low, asked_round = entry.low, entry.round
        finally:
            self._tell_of_move(begins=False)
            if self._forgotten:
                self.read_notes()
        return storage, made, low, asked_round

    def forget(self, entry: Entry, asked_round: int) -> None:
        """A handle of the entry died. Never blocks: see NOTE [ Handles die anywhere ]."""
        self._forgotten.append((entry, asked_round))
        if entry.storage is not None and not in_task():
            self.read_notes()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, no entry changes, and nothing that has died is given back: for using the tiers from elsewhere."""
        self._check_process()
        self.read_notes()
        try:
            with self._lock:
                self._check_open()
                yield
        finally:
            self.read_notes()

    @contextmanager
    def _in_use(self) -> Iterator[Lane]:
        """The lock is held, and the compute lane known. ``put`` and ``take``, called for every tensor, write it out."""
        self._check_process()
        self._tell_of_move(begins=True)
        try:
            with self._lock:
                self._check_open()
                compute = self._compute.now()
                self._discount_all()
                yield compute
        finally:
            self._tell_of_move(begins=False)
            self.read_notes()

    def close(self) -> None:
        """Give everything up: what is away is lost, and every later call but ``forget`` raises."""
        self.read_notes()
        with self._lock:
            self._closed = True
            self._departures.clear()
            self._forgotten.clear()

    def counts(self) -> dict[str, int]:
        """What the mover has in hand: entries and bytes on their way, compute lanes seen, notes not read.

        Bytes that are held are on the device though the mover has let go of them.
        """
        return {
            "leaving": len(self._departures),
            "leaving bytes": self._departures.nbytes,
            "held bytes": self._departures.held_bytes(),
            "returning bytes": self._returns.nbytes,
            "compute lanes": len(self._compute),
            "forgotten": len(self._forgotten),
        }

    def _check_process(self) -> None:
        # Before the lock is touched, which a thread of the parent may have held at the moment of the fork.
        if os.getpid() != self._process:
            raise SessionError(
                f"got a call in process {os.getpid()}, expected process {self._process}, which made this session; "
                f"lanes and spill files do not survive a fork: make a new Session in the child"
            )

    def read_notes(self) -> None:
        """Give back what handles stood for that have died."""
        # Whoever holds the lock comes by here after letting go of it: so a note is read by its writer or by the holder.
        while (
            self._forgotten
            and os.getpid() == self._process
            and self._backend.may_wait()
            and self._lock.acquire(blocking=False)
        ):
            try:
                self._tell_of_move(begins=True)
                self._discount_all()
                self._tell_of_move(begins=False)
            finally:
                self._lock.release()

    def _tell_of_move(self, *, begins: bool) -> None:
        for reference in self._listeners:
            listener = reference()
            if listener is not None:
                listener(begins)

    # All below is called with the lock held.

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("got a call on a closed session, expected an open one; make a new Session")

    def _batches(self, entries: Sequence[Entry], most: int) -> Iterator[list[Entry]]:
        """Those that can leave, in runs of at most so many bytes, or of one."""
        together: list[Entry] = []
        nbytes = 0
        for entry in entries:
            if entry.state is not State.RESIDENT or entry.handles == 0 or entry.tier is not None:
                continue
            if together and nbytes + entry.nbytes > most:
                yield together
                together, nbytes = [], 0
            together.append(entry)
            nbytes += entry.nbytes
        if together:
            yield together

    def _count_reuse(self, entry: Entry) -> None:
        if entry.round == 0 and not entry.counted:
            entry.counted = True
            entry.ledger.reused_bytes += entry.nbytes
        if self._recorder is not None:
            self._tell(EventKind.REUSE, entry)

    def _discount_all(self) -> None:
        forgotten = self._forgotten
        while forgotten:
            entry, asked_round = forgotten.popleft()
            if self._closed:
                continue
            entry.handles -= 1
            if asked_round == entry.round:
                entry.asked -= 1
            if entry.handles == 0:
                self._drop(entry)
            else:
                _let_go_if_asked_by_all(entry)

    def _drop(self, entry: Entry) -> None:
        """Give back all that the entry holds."""
        if entry.state is State.LEAVING:
            self._departures.drop(entry)
        elif entry.state is State.RETURNING:
            self._returns.give_up(entry)
        entry.let_go()
        if entry.slot is not None and entry.tier is not None:
            slot, entry.slot = entry.slot, None
            entry.tier.release(slot)
        entry.state = State.AWAY
        if self._recorder is not None:
            self._tell(EventKind.DROP, entry)

    def _tell(self, kind: EventKind, entry: Entry) -> None:
        assert self._recorder is not None
        self._recorder(Happening(kind, entry.number, entry.nbytes))


def _usable(entry: Entry, compute: Lane) -> torch.UntypedStorage | None:
    """The storage, if it is on the device and the calling thread may use it as it is."""
    if entry.state is State.RETURNING or (entry.round > 0 and entry.lane != compute):
        return None
    if entry.storage is not None:
        return entry.storage
    storage = entry.alive()
    # The user may have taken the memory from under it.
    whole = storage is not None and storage.nbytes() >= entry.start - entry.low + entry.nbytes
    return storage if whole else None


def _let_go_if_asked_by_all(entry: Entry) -> None:
    if entry.state is State.RESIDENT and entry.slot is not None and entry.asked >= entry.handles:
        entry.state = State.AWAY
        entry.let_go()
