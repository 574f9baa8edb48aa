"""Moves entries between the device and the tiers.

``entry.py`` has an entry's states, ``queues.py`` the two queues. The mover holds the lock and makes every call atomic.

NOTE [ Handles die anywhere ]

A handle may die in any thread, and inside any allocation, since the garbage collector runs there. This thread may then
hold the mover's lock or, in a task of a copy thread, a lock of the arena or of the spill file. So ``forget`` only
leaves a note. If the entry holds bytes of the device and no task runs in this thread, the note is read at once, or by
the holder of the lock when it releases it. Otherwise the next caller reads it. Inside a capture compute must not wait,
so notes stay until the first call outside. For the same reason tiers and arena are used only with the mover's lock
held, or in a task (:meth:`Mover.exclusive`).
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
from spillway.runtime.backend import Backend, Stream, in_task, label
from spillway.runtime.entry import Entry, State
from spillway.runtime.queues import ComputeStreams, OffloadQueue, Order, PrefetchQueue, Tell, batches
from spillway.runtime.tiers import Tier
from spillway.types import Event as RuntimeEvent
from spillway.types import EventKind, Recorder

MOST_BATCH_BYTES = 4 << 20


def batch_bytes(window: int) -> int:
    """How many bytes of small entries share one wait and one event, for an in-flight limit of ``window`` bytes.

    A copy of 4 MiB reaches the full PCIe bandwidth, so larger entries are copied alone.
    """
    return min(window // 8, MOST_BATCH_BYTES)


class Mover:
    """Moves the entries of one device. All methods may be called from any thread.

    ``window`` limits the bytes that may be LEAVING at once, and the bytes that may be prefetched.
    """

    def __init__(self, backend: Backend, *, window: int, recorder: Recorder | None = None) -> None:
        self.window = window
        self._own_window = window
        self._claims: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        """The limits of each claimant: bytes LEAVING, and bytes prefetched."""
        self.batch = batch_bytes(window)
        self._backend = backend
        self.streams: tuple[Stream, Stream] = backend.new_stream("out"), backend.new_stream("back")
        """The streams ``out`` and ``back``, on which the tiers queue their copies."""
        self.numbers = itertools.count()
        """Numbers for new entries."""
        out, back = self.streams
        self._tell = tell = _teller(recorder)
        self._compute = ComputeStreams(backend)
        self._offloads = OffloadQueue(out, self._compute, tell)
        self._prefetches = PrefetchQueue(backend, back, self._compute, tell)
        # Not reentrant: a finaliser that finds it taken, even by its own thread, leaves a note.
        self._lock = threading.Lock()
        self._forgotten: deque[tuple[Entry, int]] = deque()
        self._process = os.getpid()
        self._closed = False
        self._listeners: list[weakref.WeakMethod[Callable[[bool], object]]] = []

    def see(self, entry: Entry) -> None:
        """Register an entry, and the thread's compute stream, which writes it. See NOTE [ Streams of compute ]."""
        entry.mover = self
        if not self._compute.knows():
            with self._lock:
                self._compute.now()

    def adopt(self, entry: Entry, *, same_content: bool) -> bool:
        """Add a handle to the entry, if that is right; says whether. An entry of another mover cannot be shared.

        ``same_content``: the new handle's tensor is known to have the content of the entry's copy. Without a copy it
        does not matter: a copy taken later holds what both handles see.
        """
        # The caller uses the storage, perhaps on another stream.
        with self._in_use():
            has_content = same_content or (entry.slot is None and entry.round == 0)
            # An entry of another mover has another lock, and the slots of a graph, which are never reused.
            shared = entry.mover is self and entry.handles > 0 and has_content
            entry.handles += shared
        return shared

    def put(self, entries: Sequence[Entry], tier: Tier, *, window: float | None = None, defer: bool = False) -> None:
        """Offload entries, in order, small ones in batches.

        The kernels that write them must already be queued on the compute stream. Entries that do not fit into the tier
        stay RESIDENT, and the ledger notes it.

        Args:
            entries: in order. Skipped are those that were offloaded before, are not RESIDENT, or have no handle.
            tier: where to.
            window: bytes that may be LEAVING at once, as :meth:`limit` takes it.
            defer: queue no copy yet. The entries count towards the limit, and are copied only if later ones exceed it:
                for the tail of a forward, which backward asks for first.
        """
        with self._in_use():
            most, queue = self.limit(window), self._offloads
            move = queue.defer if defer else queue.start
            if not defer:
                queue.follow()
            # Asked one by one: an entry may leave, or change, with the batch before.
            leaving = (
                entry for entry in entries if entry.state is State.RESIDENT and entry.handles > 0 and entry.tier is None
            )
            for together in batches(leaving, min(self.batch, batch_bytes(most))):
                queue.release_until_fits(sum([entry.nbytes for entry in together]), most)
                move(together, tier)

    def limit(self, window: float | None) -> int:
        """An in-flight limit in bytes. A float is a share of the mover's own limit, ``None`` all of it."""
        if window is None:
            return self.window
        return window if isinstance(window, int) else int(window * self.window)

    def claim(self, owner: object, window: int | None) -> None:
        """Claim a limit, as plans do; ``None`` ends the claim. The smallest claim applies, or else the mover's own.

        Args:
            owner: the claim ends when it dies.
            window: bytes that may be LEAVING at once, and be prefetched.
        """
        with self._lock:
            if window is None:
                self._claims.pop(owner, None)
            else:
                self._claims[owner] = window
            self.window = min(self._claims.values(), default=self._own_window)
            self.batch = batch_bytes(self.window)

    def listen(self, listener: Callable[[bool], object]) -> None:
        """Call a method before (with ``True``) and after each call that may change how many bytes are in flight.

        Its object is not kept alive. :meth:`stop_listening` ends it.
        """
        self._listeners.append(weakref.WeakMethod(listener))

    def stop_listening(self, listener: Callable[[bool], object]) -> None:
        self._listeners = [each for each in self._listeners if each() not in (None, listener)]

    def release(self, entries: Sequence[Entry]) -> None:
        """Release the entries whose copies out are under way: compute waits for these."""
        with self._in_use():
            self._offloads.release(entries)

    def fetch(self, entries: Sequence[Entry]) -> None:
        """Reload entries in the state AWAY, whatever the limit."""
        with self._in_use() as compute:
            self._prefetches.fetch(entries, compute, self.batch)

    def take(self, entry: Entry, asked_round: int, order: Order | None = None) -> tuple[torch.UntypedStorage, int]:
        """The entry's bytes on the device, ready for the calling thread's compute stream.

        Args:
            entry: the entry.
            asked_round: the round that the same handle got the last time, or -1.
            order: predicts which entries backward asks for next. They are prefetched now, within the limit.

        Returns:
            A storage, and the entry's round. In round 0 it is the original storage, later one that begins with the
            entry's bytes.
        """
        with self._in_use() as compute:
            storage = _usable(entry, compute)
            if storage is None:
                with label("take"):
                    storage = self._prefetches.take(entry, compute)
            else:
                if entry.round == 0 and not entry.counted:
                    entry.counted = True
                    entry.ledger.reused_bytes += entry.nbytes
                self._tell(EventKind.REUSE, entry)
            if asked_round != entry.round:
                entry.asked += 1
                _release_if_asked_by_all(entry)
            if order is not None:
                self._prefetches.prefetch(order, compute, self.window, self.batch)
            return storage, entry.round

    def forget(self, entry: Entry, asked_round: int) -> None:
        """A handle of the entry died. Never blocks: see NOTE [ Handles die anywhere ]."""
        self._forgotten.append((entry, asked_round))
        if entry.storage is not None and not in_task():
            self.read_notes()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside, no entry changes, and no dead handle is processed: for using the tiers from elsewhere."""
        self._check_process()
        self.read_notes()
        try:
            with self._lock:
                self._check_open()
                yield
        finally:
            self.read_notes()

    @contextmanager
    def _in_use(self) -> Iterator[Stream]:
        """The lock is held; gives the compute stream."""
        self._check_process()
        self._tell_of_move(begins=True)
        try:
            with self._lock:
                self._check_open()
                compute = self._compute.now()
                self._drop_dead()
                yield compute
        finally:
            self._tell_of_move(begins=False)
            self.read_notes()

    def close(self) -> None:
        """Drop everything: offloaded bytes are lost, and every later call but ``forget`` raises."""
        self.read_notes()
        with self._lock:
            self._closed = True
            self._offloads.clear()
            self._forgotten.clear()

    def counts(self) -> dict[str, int]:
        """Entries and bytes in flight, compute streams seen, and notes not read.

        Shared bytes are those that the mover has released and the program still uses on the device.
        """
        return {
            "leaving": len(self._offloads),
            "leaving bytes": self._offloads.nbytes,
            "shared bytes": self._offloads.shared_bytes(),
            "returning bytes": self._prefetches.nbytes,
            "compute streams": len(self._compute),
            "forgotten": len(self._forgotten),
        }

    def _check_process(self) -> None:
        # Before the lock is touched, which a thread of the parent may have held at the moment of the fork.
        if os.getpid() != self._process:
            raise SessionError(
                f"The session of process {self._process} was used in process {os.getpid()}. Copy streams and spill "
                f"files do not survive a fork. Make a new Session in the child."
            )

    def read_notes(self) -> None:
        # The holder of the lock comes here after releasing it. So a note is read by its writer or by the holder.
        while (
            self._forgotten
            and os.getpid() == self._process
            and self._backend.may_wait()
            and self._lock.acquire(blocking=False)
        ):
            try:
                self._tell_of_move(begins=True)
                self._drop_dead()
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

    def _drop_dead(self) -> None:
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
                _release_if_asked_by_all(entry)

    def _drop(self, entry: Entry) -> None:
        if entry.slot is not None and entry.tier is not None:
            # First, so that a write that is still queued is skipped.
            slot, entry.slot = entry.slot, None
            entry.tier.free(slot)
        if entry.state is State.LEAVING:
            self._offloads.drop(entry)
        elif entry.state is State.RETURNING:
            self._prefetches.drop(entry)
        entry.release()
        entry.state = State.AWAY
        self._tell(EventKind.DROP, entry)


def _teller(recorder: Recorder | None) -> Tell:
    def tell(kind: EventKind, *entries: Entry) -> None:
        if recorder is not None:
            for entry in entries:
                recorder(RuntimeEvent(kind, entry.number, entry.nbytes))

    return tell


def _usable(entry: Entry, compute: Stream) -> torch.UntypedStorage | None:
    """The storage, if it is on the device and usable by the calling thread without a copy."""
    if entry.state is State.RETURNING or (entry.round > 0 and entry.stream != compute):
        return None
    if entry.storage is not None:
        return entry.storage
    storage = entry.alive()
    # The user may have resized it.
    end = entry.nbytes + (0 if entry.round else entry.start)
    return storage if storage is not None and storage.nbytes() >= end else None


def _release_if_asked_by_all(entry: Entry) -> None:
    if entry.state is State.RESIDENT and entry.slot is not None and entry.asked >= entry.handles:
        entry.state = State.AWAY
        entry.release()
