"""Moves entries: the queue of those that leave, and of those that come back.

What an entry is, and what states it goes through, is told in ``entry.py``.

NOTE [ Whose stream ]

The bytes of a storage go back to the stream on which they were allocated. The mover cannot know it, so it remembers
every compute lane that something was saved or asked for on (nearly always one). The ``out`` lane waits for all of them
before it reads, and all of them wait before the mover lets go of bytes that a copy reads or writes. A stream on which
nothing was ever saved (a data loader's) may own the bytes all the same, so the backend is told of the lanes that used
them (``hand_back``). A destination that was fetched ahead on one compute lane and is asked for on another is
dropped, and fetched again for the lane that asks.

NOTE [ Handles die anywhere ]

A handle may die in any thread, and inside any allocation, since the collector runs there: also while this thread
holds the mover's lock, or, in a task, a lock of the arena or of the spill file. So ``forget`` never blocks, and does
nothing inside of a task: it leaves a note, which whoever holds the lock reads when he lets go of it, or else the next
caller. For the same reason tiers and arena are used with the mover's lock held, or in a task, and nowhere else
(:meth:`Mover.exclusive`).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from spillway.errors import SessionError, TierError, TierFullError
from spillway.events import Event as Happening
from spillway.events import EventKind, Recorder
from spillway.runtime.backend import Backend, Lane, in_task
from spillway.runtime.entry import Entry, State
from spillway.runtime.ledger import Ledger
from spillway.runtime.tiers import Tier


class Mover:
    """Moves the entries of one device. All methods may be called from any thread.

    Args:
        backend: the device.
        window: bytes that may be LEAVING at once, and bytes that may be fetched ahead.
        recorder: told of everything that happens.
    """

    def __init__(self, backend: Backend, *, window: int, recorder: Recorder | None = None) -> None:
        self.window = window
        self._backend = backend
        self._recorder = recorder
        self._out = backend.lane("out")
        self._back = backend.lane("back")
        # Not reentrant: a finaliser that finds it taken, by its own thread too, leaves a note.
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._leaving: deque[Entry] = deque()
        self._leaving_bytes = 0
        self._ahead_bytes = 0
        self._compute_lanes: dict[Lane, None] = {}
        self._forgotten: deque[tuple[Entry, int]] = deque()
        self._process = os.getpid()
        self._closed = False

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """The lanes ``out`` and ``back``, which the tiers queue their copies on."""
        return self._out, self._back

    def enter(self, storage: torch.UntypedStorage, start: int, nbytes: int, ledger: Ledger) -> Entry:
        """An entry for ``nbytes`` of a storage, from byte ``start``: RESIDENT, with one handle, the caller's."""
        return Entry(next(self._numbers), storage, start, nbytes, ledger)

    def see(self) -> None:
        """The calling thread's compute lane writes something that will be put. See NOTE [ Whose stream ]."""
        self._compute()

    def adopt(self, entry: Entry, *, same_content: bool) -> bool:
        """One more handle for the entry, if it may have one: then True.

        Args:
            entry: the entry.
            same_content: whether what the new handle saved is known to be what the entry's copy holds, if there is one
                already. Where there is none yet, a copy taken later holds what both of them see.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            if entry.handles == 0 or not (same_content or (entry.slot is None and entry.round == 0)):
                return False
            entry.handles += 1
            return True

    def put(self, entries: Iterable[Entry], tier: Tier, *, window: int | None = None, hold: bool = False) -> None:
        """Send entries away, in order.

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
        with self._lock:
            self._check_open()
            window = self.window if window is None else window
            self._compute()
            ready = False
            for entry in entries:
                if entry.state is not State.RESIDENT or entry.handles == 0 or entry.tier is not None:
                    continue
                while self._leaving and self._leaving_bytes + entry.nbytes > window:
                    self._settle()
                if not hold and not ready:
                    self._out_waits_for_compute()
                    ready = True
                entry.tier = tier
                if hold or self._start(entry):
                    entry.state = State.LEAVING
                    self._leaving.append(entry)
                    self._leaving_bytes += entry.nbytes
                    if not hold and self._recorder is not None:
                        self._tell(EventKind.LEAVE, entry)
        if self._forgotten:
            self._read_notes()

    def take(
        self, entry: Entry, asked_round: int, ahead: Iterable[Entry | None] = ()
    ) -> tuple[torch.UntypedStorage, int, int, int]:
        """The entry's bytes, on the device, ready for the calling thread's compute lane.

        Args:
            entry: the entry.
            asked_round: what this gave to the same handle the last time, or -1.
            ahead: what will be asked for next. It is fetched now, in order, as far as the window goes. What is not
                AWAY, or is alive for another reason, and ``None``, is passed over.

        Returns:
            A storage, how many bytes of the original storage come before its first, the entry's round, and how many
            of ``ahead`` were fetched or passed over.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            compute = self._compute()
            storage = self._usable(entry, compute)
            if storage is not None:
                if self._recorder is not None:
                    self._tell(EventKind.REUSE, entry)
                if entry.round == 0:
                    entry.ledger.reuse(entry.number, entry.nbytes)
            else:
                storage = self._return(entry, compute)
            if asked_round != entry.round:
                entry.asked += 1
                self._let_go_if_asked_by_all(entry)
            fetched = self._prefetch(ahead, compute)
            low, asked_round = entry.low, entry.round
        if self._forgotten:
            self._read_notes()
        return storage, low, asked_round, fetched

    def forget(self, entry: Entry, asked_round: int) -> None:
        """A handle of the entry died. Never blocks: see NOTE [ Handles die anywhere ]."""
        if os.getpid() != self._process:
            return
        self._forgotten.append((entry, asked_round))
        if not in_task():
            self._read_notes()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, no entry changes, and nothing that has died is given back: for using the tiers from elsewhere."""
        self._check_process()
        with self._lock:
            self._check_open()
            yield
        self._read_notes()

    def close(self) -> None:
        """Give everything up: what is away is lost, and every later call but ``forget`` raises."""
        self._read_notes()
        with self._lock:
            self._closed = True
            self._leaving.clear()
            self._leaving_bytes = 0

    # All below is called with the lock held, but for the first three.

    def _check_process(self) -> None:
        # Before the lock is touched, which a thread of the parent may have held at the moment of the fork.
        if os.getpid() != self._process:
            raise SessionError(
                f"got a call in process {os.getpid()}, expected process {self._process}, which made this session; "
                f"lanes and spill files do not survive a fork: make a new Session in the child"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("got a call on a closed session, expected an open one; make a new Session")

    def _read_notes(self) -> None:
        # Whoever holds the lock comes by here after letting go of it: so a note is read by its writer or by the holder.
        while self._forgotten and self._lock.acquire(blocking=False):
            try:
                while self._forgotten:
                    self._discount(*self._forgotten.popleft())
            finally:
                self._lock.release()

    def _discount(self, entry: Entry, asked_round: int) -> None:
        if self._closed:
            return
        entry.handles -= 1
        if asked_round == entry.round:
            entry.asked -= 1
        if entry.handles == 0:
            self._drop(entry)
        else:
            self._let_go_if_asked_by_all(entry)

    def _let_go_if_asked_by_all(self, entry: Entry) -> None:
        if entry.state is State.RESIDENT and entry.slot is not None and entry.asked >= entry.handles:
            entry.state = State.AWAY
            entry.storage = None

    def _compute(self) -> Lane:
        lane = self._backend.compute()
        if lane not in self._compute_lanes:
            self._compute_lanes[lane] = None
        return lane

    def _out_waits_for_compute(self) -> None:
        """What is copied out from now on has been written, on whatever compute lane it was saved."""
        for lane in self._compute_lanes:
            self._backend.wait(self._out, self._backend.record(lane))

    def _usable(self, entry: Entry, compute: Lane) -> torch.UntypedStorage | None:
        """The storage, if it is on the device and the calling thread may use it as it is."""
        if entry.state is State.RETURNING or (entry.round > 0 and entry.lane != compute):
            return None
        if entry.storage is not None:
            return entry.storage
        storage = entry.alive()
        # The user may have taken the memory from under it.
        whole = storage is not None and storage.nbytes() >= entry.start - entry.low + entry.nbytes
        return storage if whole else None

    def _start(self, entry: Entry) -> bool:
        """Queue the copy out; False if the tier has no room."""
        assert entry.tier is not None
        assert entry.storage is not None
        if entry.storage.nbytes() < entry.start + entry.nbytes:
            entry.ledger.refuse(entry.number, entry.nbytes, "its owner has taken the memory from under it")
            return False
        source = flat(entry.storage, entry.start, entry.nbytes)
        try:
            entry.slot = entry.tier.reserve(source)
        except TierFullError as error:
            self._refuse(entry, error)
            return False
        stored = False
        try:
            entry.copied = entry.tier.store(entry.slot, source)
            stored = True
        finally:
            if not stored:
                entry.tier.release(entry.slot)
                entry.slot = entry.tier = None
        entry.ledger.offloaded_bytes += entry.nbytes
        return True

    def _refuse(self, entry: Entry, error: TierFullError) -> None:
        entry.state = State.RESIDENT
        entry.ledger.refuse(entry.number, entry.nbytes, str(error))
        if self._recorder is not None:
            self._tell(EventKind.REFUSE, entry)

    def _settle(self) -> None:
        """Let go of the oldest entry that is leaving."""
        entry = self._leaving.popleft()
        self._leaving_bytes -= entry.nbytes
        held = entry.copied is None
        entry.state = State.RESIDENT
        if held:
            # It was held back in the hope that backward comes first.
            self._out_waits_for_compute()
            if not self._start(entry):
                return
        try:
            self._release_after(entry)
        except TierError:
            # It was not stored, but it is still here: it stays, and whoever filled the window hears of it.
            self._give_back_slot(entry)
            raise
        entry.state = State.AWAY
        if self._recorder is not None:
            if held:
                self._tell(EventKind.LEAVE, entry)
            self._tell(EventKind.RELEASE, entry)

    def _release_after(self, entry: Entry) -> None:
        """Let go of the bytes once the copy under way is done. See NOTE [ Whose stream ]."""
        assert entry.copied is not None
        copied, entry.copied = entry.copied, None
        before = time.perf_counter()
        for lane in self._compute_lanes:
            self._backend.wait(lane, copied)
        entry.ledger.stall_seconds += time.perf_counter() - before
        if entry.storage is not None and entry.round == 0:
            self._backend.hand_back(entry.storage, list(self._compute_lanes))
        entry.storage = None

    def _abandon(self, entry: Entry) -> None:
        """Let go of the bytes once the copy under way is done, which nobody wants any more, well or badly."""
        try:
            self._release_after(entry)
        except TierError:
            # The write or read has failed, so it is over, and nobody asks for these bytes.
            entry.storage = None

    def _give_up_return(self, entry: Entry) -> None:
        self._ahead_bytes -= entry.nbytes
        entry.state = State.AWAY
        self._abandon(entry)

    def _give_back_slot(self, entry: Entry) -> None:
        if entry.slot is not None and entry.tier is not None:
            entry.tier.release(entry.slot)
            entry.slot = None

    def _prefetch(self, entries: Iterable[Entry | None], compute: Lane) -> int:
        count = 0
        for entry in entries:
            if entry is not None and entry.state is State.AWAY and entry.handles > 0 and entry.alive() is None:
                if self._ahead_bytes + entry.nbytes > self.window:
                    break
                try:
                    self._fetch(entry, compute)
                except (TierError, torch.OutOfMemoryError):
                    # Nobody has asked for it yet. Who does, fetches it, and hears of it.
                    break
            count += 1
        return count

    def _fetch(self, entry: Entry, compute: Lane) -> None:
        assert entry.tier is not None
        assert entry.slot is not None
        destination = entry.tier.destination(entry.slot)
        # The allocator may have handed out bytes that queued work on the compute lane still uses.
        self._backend.wait(self._back, self._backend.record(compute))
        entry.copied = entry.tier.load(entry.slot, destination)
        entry.storage = destination.untyped_storage()
        # Not before the bytes are there: a failed read may leave the destination alive, in a traceback.
        entry.alive = _nowhere
        entry.lane = compute
        entry.state = State.RETURNING
        self._ahead_bytes += entry.nbytes
        if self._recorder is not None:
            self._tell(EventKind.RETURN, entry)

    def _return(self, entry: Entry, compute: Lane) -> torch.UntypedStorage:
        if entry.state is State.RETURNING and entry.lane != compute:
            self._give_up_return(entry)
        if entry.state is not State.RETURNING:
            self._fetch(entry, compute)
        storage, copied, entry.copied = entry.storage, entry.copied, None
        assert storage is not None
        assert copied is not None
        self._ahead_bytes -= entry.nbytes
        entry.state = State.AWAY
        before = time.perf_counter()
        try:
            self._backend.wait(compute, copied)
            entry.state = State.RESIDENT
        finally:
            if entry.state is State.AWAY:
                # The read failed, so no copy was queued: whoever asks again, tries again.
                entry.storage = None
        entry.ledger.stall_seconds += time.perf_counter() - before
        entry.ledger.reloaded_bytes += entry.nbytes
        entry.alive = weakref.ref(storage)
        entry.low = entry.start
        entry.round += 1
        entry.asked = 0
        if self._recorder is not None:
            self._tell(EventKind.TAKE, entry)
        return storage

    def _drop(self, entry: Entry) -> None:
        """Give back all that the entry holds."""
        if entry.state is State.LEAVING:
            self._leaving.remove(entry)
            self._leaving_bytes -= entry.nbytes
            if entry.copied is not None:
                if entry.tier is not None and entry.slot is not None:
                    entry.tier.cancel(entry.slot)
                self._abandon(entry)
        elif entry.state is State.RETURNING:
            self._give_up_return(entry)
        entry.storage = None
        self._give_back_slot(entry)
        entry.state = State.AWAY
        if self._recorder is not None:
            self._tell(EventKind.DROP, entry)

    def _tell(self, kind: EventKind, entry: Entry) -> None:
        assert self._recorder is not None
        self._recorder(Happening(kind, entry.number, entry.nbytes))


def _nowhere() -> None:
    return None


def flat(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Some bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))
