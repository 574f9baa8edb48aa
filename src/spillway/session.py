"""The session: one object that owns what moves bytes in a process, and all that was learned.

Nothing of Spillway's is global. A session owns lanes, tiers, the spill file, the orders learned per tag; several may
live on one device and never meet. One default session exists for convenience, made on first use.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import torch

from spillway.capture.hooks import Pass
from spillway.capture.identity import Identity, Marks
from spillway.capture.order import Course, Memory
from spillway.capture.passes import Passes
from spillway.capture.succession import Succession
from spillway.errors import RecomputeError, SessionError, UsageError
from spillway.events import Recorder
from spillway.records import GroupStats, StepStats
from spillway.regions.outputs import DroppedOutputs
from spillway.regions.proofs import Proofs
from spillway.regions.verdicts import Verdicts
from spillway.runtime.device import DeviceRuntime, MakeBackend, Runtime, backend_for
from spillway.runtime.disk import SpillFile
from spillway.runtime.host_memory import local_ranks, memory_limit
from spillway.runtime.ledger import Ledger
from spillway.runtime.tasks import quiet
from spillway.units import parse_bytes

MIN_BYTES = 1 << 20
"""A copy of fewer bytes does not reach a link's rate."""

HOST_SHARE = 0.7
"""Of the host memory that a process may use, what goes into its default budget: the program needs some itself."""
_CPU_WINDOW = 64 << 20
_ACCELERATOR_WINDOW = 512 << 20


class Session:
    """Owns lanes, tiers and learned orders. Use it as a context manager, or close it.

    Args:
        window: bytes that may be on their way out of a device at once, and that may be on their way back ahead of
            need: what the device holds beyond what compute itself needs. ``None``: 64 MiB on the CPU, 512 MiB on an
            accelerator.
        host_budget: most bytes of host memory per device, of this process. ``None``: 70 % of what the process may use
            (control groups are read), divided by the ranks on the machine (as torchrun, MPI or Slurm count them; see
            :func:`spillway.integrations.fsdp.local_share`).
        disk_budget: most bytes in the spill file of this process. ``None``: as much as the file system has.
        disk_bytes_per_hour: most bytes written to the spill file in an hour, for the sake of the drive. ``None``: any.
        spill_directory: where the spill file is. ``None``: ``$SPILLWAY_DIR``, or the first of the system's temporary
            directory, ``/var/tmp`` and the working directory that is not held in memory.
        allow_memory_filesystem: accept a ``spill_directory`` on tmpfs, which is host memory and saves none.
        streams: streams of an accelerator to copy on, for the lanes ``"out"`` and ``"back"``: ``{"out": stream}``. What
            else is queued there is waited for, too. Devices that they are not of get their own.
        recorder: called with every :class:`~spillway.events.Event`.
        backend: makes the backend of a device, instead of the ones that come with Spillway.

    Raises:
        SizeError: a size that is none.
        SpillPathError: a ``spill_directory`` where no spill file can be made.

    Example:
        >>> with spillway.Session(host_budget="64GiB") as session:  # doctest: +SKIP
        ...     with spillway.offload(session=session):
        ...         loss = model(batch)
        ...     loss.backward()
    """

    _default: ClassVar[Session | None] = None
    _default_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        *,
        window: int | str | None = None,
        host_budget: int | str | None = None,
        disk_budget: int | str | None = None,
        disk_bytes_per_hour: int | str | None = None,
        spill_directory: str | os.PathLike[str] | None = None,
        allow_memory_filesystem: bool = False,
        streams: Mapping[str, torch.Stream] | None = None,
        recorder: Recorder | None = None,
        backend: MakeBackend | None = None,
    ) -> None:
        for name, value in (("recorder", recorder), ("backend", backend)):
            if value is not None and not callable(value):
                raise UsageError(f"{name}: got {value!r}, expected a callable")
        _check_streams(streams, backend)
        self.identity = Identity()
        self.marks = Marks()
        self.outputs = DroppedOutputs()
        self.verdicts = Verdicts()
        self.passes = Passes()
        self.enabled = True
        """Whether anything may leave. What has left comes back all the same. Set it as you like, for all passes."""
        self.adapters: dict[str, Any] = {}
        """What adapters of other systems' names keep, for as long as the session lives, by their own names."""
        self._delayed: deque[Callable[[], None]] = deque()
        self._proofs: dict[Hashable, Proofs] = {}
        self._window = None if window is None else parse_bytes(window, what="window")
        self._host_budget = _host_budget() if host_budget is None else parse_bytes(host_budget, what="host_budget")
        capacity = None if disk_budget is None else parse_bytes(disk_budget, what="disk_budget")
        per_hour = None if disk_bytes_per_hour is None else parse_bytes(disk_bytes_per_hour, what="disk_bytes_per_hour")
        self._file_options = (spill_directory, capacity, per_hour, allow_memory_filesystem)
        self._file: SpillFile | None = None if spill_directory is None else self._make_file()
        self._recorder = recorder
        self._make_backend = backend if backend is not None else functools.partial(backend_for, streams=streams)
        self._runtimes: dict[torch.device, DeviceRuntime] = {}
        self._memories: dict[str | None, Memory] = {}
        self._successions: dict[torch.device, Succession[Course]] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False

    @classmethod
    def default(cls) -> Session:
        """The session that is used where none is given. A forked child gets one of its own."""
        with cls._default_lock:
            if cls._default is None or cls._default._closed or cls._default._process != os.getpid():
                cls._default = cls()
                # Most often nobody closes it.
                atexit.register(cls._default.verdicts.end)
            return cls._default

    def use_as_default(self) -> None:
        """Make this the session that is used where none is given."""
        self.check_open()
        with Session._default_lock:
            Session._default = self

    def runtime(self, device: torch.device) -> Runtime:
        """What moves the bytes of ``device``, now; made when first asked for.

        Raises:
            BackendError: if no backend serves the device.
            SessionError: if the session is closed, or belongs to the parent of this process.
        """
        runtime = self._runtimes.get(device)
        if runtime is None:
            self.check_open()
            with self._lock:
                runtime = self._runtimes.get(device)
                if runtime is None:
                    runtime = self._runtimes[device] = self._make_runtime(device)
        return runtime.captured() if runtime.backend.is_capturing() else runtime

    def memory(self, tag: str | None) -> Memory:
        """What was learned under a tag."""
        with self._lock:
            return self._memories.setdefault(tag, Memory())

    def succession(self, device: torch.device) -> Succession[Course]:
        """Whose backward comes next on a device, whose mover fetches nothing of another's."""
        with self._lock:
            return self._successions.setdefault(device, Succession())

    def proofs(self, function: Hashable) -> Proofs:
        """Which re-runs of a function were seen to be right; by what tells it from others."""
        with self._lock:
            found = self._proofs.get(function)
            if found is None:
                # Of modules that are gone nobody asks again.
                self._proofs = {known: each for known, each in self._proofs.items() if not _is_gone(known)}
                found = self._proofs[function] = Proofs()
            return found

    def current_pass(self) -> Pass:
        """The innermost pass that the calling thread is inside of, or one for what is saved outside of any."""
        return self.passes.current(self._open_pass)

    def _open_pass(self) -> Pass:
        memory = self.memory(None)
        return Pass(self, None, memory, min_bytes=MIN_BYTES, tag=None, tier="auto", window=None, locator=None)

    @property
    def window(self) -> int | None:
        """The window that was given; ``None``: that of each device is chosen."""
        return self._window

    def host_room(self, device: torch.device) -> int:
        """Bytes of host memory that may still be used for a device: its budget, without what is in use."""
        self.runtime(device)
        runtime = self._runtimes[device]
        return max(runtime.arena.capacity - runtime.used_host_bytes(), 0)

    @property
    def host_bytes(self) -> int:
        """Host memory reserved, in use or free for use."""
        return sum(runtime.arena.reserved_bytes for runtime in self._runtimes.values())

    @property
    def is_growing(self) -> bool:
        """Whether host memory is being reserved in the background, which takes the host's own time, too."""
        return any(runtime.arena.is_growing for runtime in self._runtimes.values())

    @property
    def disk_bytes(self) -> int:
        """Disk space reserved, in use or free for use."""
        return 0 if self._file is None else self._file.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """Sum over the session's devices of the peak of what is allocated there (on the CPU: resident)."""
        return sum(runtime.backend.peak_bytes() for runtime in self._runtimes.values())

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes in use on host and disk.

        Both are 0 when no graph that was offloaded is alive, and no write is under way (:meth:`synchronize`).
        """
        host = sum(runtime.used_host_bytes() for runtime in self._runtimes.values())
        with quiet():
            return host, 0 if self._file is None else self._file.used_bytes

    def stats(self) -> StepStats:
        """Bytes and seconds of what the calling thread saved outside of any ``offload`` context, in regions, that is.

        Of the last forward, as far as its backward has come: what is saved after a backward began belongs to the next.
        """
        current = self.passes.open
        return StepStats() if current is None else self.stats_of(current.ledger)

    def stats_of(self, ledger: Ledger) -> StepStats:
        """What a ledger says, and what the session has reserved by now."""
        groups = tuple(
            GroupStats(
                name,
                saved_bytes=part.saved_bytes,
                kept_bytes=part.kept_bytes,
                offloaded_bytes=part.offloaded_bytes,
                reloaded_bytes=part.reloaded_bytes,
                reused_bytes=part.reused_bytes,
                stall_seconds=part.out.seconds() + part.back.seconds(),
            )
            for name, part in ledger.groups.items()
        )
        ledger = ledger.total()
        out, back = ledger.out.seconds(), ledger.back.seconds()
        return StepStats(
            saved_bytes=ledger.saved_bytes,
            kept_bytes=ledger.kept_bytes,
            offloaded_bytes=ledger.offloaded_bytes,
            reloaded_bytes=ledger.reloaded_bytes,
            reused_bytes=ledger.reused_bytes,
            recomputed_bytes=ledger.recomputed_bytes,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            stall_seconds=out + back,
            out_stall_seconds=out,
            back_stall_seconds=back,
            peak_bytes=self.peak_bytes,
            notes=tuple(ledger.notes),
            malloc=next((runtime.backend.malloc for runtime in self._runtimes.values() if runtime.backend.malloc), ""),
            groups=groups,
        )

    def delay(self, send: Callable[[], None]) -> None:
        """Call this when groups are flushed."""
        self._delayed.append(send)

    def flush_groups(self) -> None:
        """The groups that were delayed leave now, the oldest first."""
        while True:
            try:
                send = self._delayed.popleft()
            except IndexError:
                # Another thread may have taken the last one.
                return
            send()

    def forget_groups(self) -> None:
        """The groups that were delayed stay where they are."""
        self._delayed.clear()

    def synchronize(self) -> None:
        """Wait until every write that is under way has ended; raises what went wrong in one."""
        for runtime in self._runtimes.values():
            runtime.synchronize()

    def trim(self, device: torch.device | None = None) -> int:
        """Give host memory that nobody uses back to the system; returns its bytes.

        Args:
            device: whose bytes would lie there. ``None``: that of all.
        """
        runtimes = self._runtimes if device is None else {device: self._runtimes.get(device)}
        return sum(runtime.trim() for runtime in runtimes.values() if runtime is not None)

    def release_graphs(self) -> int:
        """Give back the host memory of CUDA graphs that were captured with offloading inside; returns its bytes.

        Call it when they are gone: a graph that is replayed after this reads and writes what belongs to others.
        """
        return sum(runtime.release_graphs() for runtime in self._runtimes.values())

    def close(self) -> None:
        """Stop the threads, give back memory and disk. What is away is lost: close after the last backward.

        Raises:
            RecomputeError: if what a backward computed again was not what the forward had, and nobody was told yet.
        """
        if self._process != os.getpid():
            # A forked child has neither the threads nor a lock that it could trust. The file knows its owner by itself.
            if self._file is not None:
                self._file.close()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.forget_groups()
            for runtime in self._runtimes.values():
                runtime.close()
            if self._file is not None:
                self._file.close()
            self.verdicts.end()

    @property
    def closed(self) -> bool:
        """Whether it cannot be used here any more: closed, or of the process that this one was forked from."""
        return self._closed or self._process != os.getpid()

    def check_open(self) -> None:
        """Raise :class:`~spillway.errors.SessionError` if the session cannot be used here."""
        if self._closed:
            raise SessionError("got a closed session, expected an open one; make a new Session")
        if self._process != os.getpid():
            raise SessionError(
                f"got the session of process {self._process} in process {os.getpid()}, expected one made here; lanes "
                f"and spill files do not survive a fork: make a new Session in the child"
            )

    def __enter__(self) -> Session:
        self.check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self.close()
        except RecomputeError as late:
            if error is None:
                raise
            # It is of an earlier backward, and what is on its way is not to be hidden by it.
            error.add_note(str(late))

    def _make_runtime(self, device: torch.device) -> DeviceRuntime:
        window = self._window
        if window is None:
            window = _CPU_WINDOW if device.type == "cpu" else _ACCELERATOR_WINDOW
        return DeviceRuntime(
            self._make_backend(device),
            self._spill_file,
            window=window,
            host_budget=self._host_budget,
            recorder=self._recorder,
        )

    def _spill_file(self) -> SpillFile:
        with self._lock:
            if self._file is None:
                self._file = self._make_file()
            return self._file

    def _make_file(self) -> SpillFile:
        directory, capacity, per_hour, allow = self._file_options
        return SpillFile(directory, capacity=capacity, bytes_per_hour=per_hour, allow_memory_filesystem=allow)


def _check_streams(streams: object, backend: object) -> None:
    if streams is None:
        return
    if backend is not None:
        raise UsageError("got both streams and a backend, expected one of them; the backend can use the streams")
    given = streams.items() if isinstance(streams, Mapping) else [(None, None)]
    if not all(name in ("out", "back") and isinstance(stream, torch.Stream) for name, stream in given):
        raise UsageError(f"streams: got {streams!r}, expected torch streams by the names 'out' and 'back'")


def _host_budget() -> int:
    """The default cap on host memory: what the process may use, shared by the ranks that run on the machine."""
    return int(memory_limit() * HOST_SHARE) // local_ranks()


def _is_gone(function: Hashable) -> bool:
    """Whether what tells a function from others names a module that is gone."""
    if isinstance(function, tuple):
        return any(map(_is_gone, function))
    return isinstance(function, weakref.ref) and function() is None
