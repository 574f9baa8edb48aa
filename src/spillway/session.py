"""The session: one object that owns the runtimes, the spill file, and the state of every part of Spillway.

All learned state and all storage belong to a session. Several sessions may live on one device without sharing
anything. One default session exists for convenience, made on first use.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from spillway.errors import SessionError, SpillPathError, UsageError
from spillway.runtime.device import DeviceRuntime, Runtime, backend_for
from spillway.runtime.entry import GROUP_BYTES, STEP_BYTES, ByteCounters
from spillway.runtime.system import host_budget as default_host_budget
from spillway.types import GroupStats, Recorder, StepStats
from spillway.units import parse_bytes

if TYPE_CHECKING:
    from spillway.runtime.backend import Backend
    from spillway.runtime.spill_file import SpillFile

_Kind = TypeVar("_Kind")

MIN_BYTES = 1 << 20
"""A copy of fewer bytes does not reach the PCIe bandwidth."""
_CPU_WINDOW = 64 << 20
_ACCELERATOR_WINDOW = 512 << 20


class Session:
    """Owns runtimes, tiers and learned orders. Use it as a context manager, or close it.

    Args:
        window: the in-flight limit: bytes that may be on their way out of a device at once, and bytes that may be
            prefetched. The device needs this memory in addition. ``None``: 64 MiB on the CPU, 512 MiB on an
            accelerator.
        host_budget: most bytes of CPU memory per device, of this process. ``None``: 70 % of the memory that the process
            may use (control groups are read), divided by the ranks on the machine (as torchrun, MPI or Slurm count
            them; see :func:`spillway.integrations.fsdp.local_share`).
        disk_budget: most bytes in the spill file of this process. ``None``: as much as the file system has.
        disk_bytes_per_hour: most bytes written to the spill file in an hour, for the sake of the drive. ``None``: any.
        spill_directory: the directory of the spill file. ``None``: ``$SPILLWAY_DIR``, or the first of the system's
            temporary directory, ``/var/tmp`` and the working directory that is not held in memory.
        allow_memory_filesystem: accept a ``spill_directory`` on tmpfs, which is CPU memory and saves none.
        streams: streams of an accelerator to copy on: ``{"out": stream, "back": stream}``, or one of them. Your own
            work on them is waited for, too. Other devices get their own streams.
        recorder: called with every :class:`~spillway.types.Event`.
        backend: makes the backend of a device, instead of Spillway's own.

    Raises:
        SizeError: an invalid size.
        SpillPathError: a ``spill_directory`` in which no spill file can be made.

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
        backend: Callable[[torch.device], Backend] | None = None,
    ) -> None:
        for name, value in (("recorder", recorder), ("backend", backend)):
            if value is not None and not callable(value):
                raise UsageError(f"{name}: got {value!r}, expected a callable")
        _check_streams(streams, backend)
        self.enabled = True
        """Whether tensors may be offloaded. You may set it at any time; offloaded tensors are reloaded all the same."""
        self.unscoped = threading.local()
        """Its ``scope``, if there is one, is the pass of what the calling thread saves outside of any other."""
        self.window = _size(window, "window")
        """The in-flight limit that was given; ``None``: the default of each device."""
        given = _size(host_budget, "host_budget")
        self._host_budget = default_host_budget() if given is None else given
        self._make_file = functools.partial(
            _make_file,
            spill_directory,
            capacity=_size(disk_budget, "disk_budget"),
            bytes_per_hour=_size(disk_bytes_per_hour, "disk_bytes_per_hour"),
            allow_memory_filesystem=allow_memory_filesystem,
        )
        self._file: SpillFile | None = None if spill_directory is None else self._make_file()
        self._recorder = recorder
        self._make_backend = backend or functools.partial(backend_for, streams=streams)
        self._state: dict[type[Any], Any] = {}
        self._delayed: deque[tuple[Callable[[], None], Callable[[], bool]]] = deque()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._runtimes: dict[torch.device, DeviceRuntime] = {}
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._closed = False

    @classmethod
    def default(cls) -> Session:
        """The session used where no other is given. A forked child gets its own."""
        with cls._default_lock:
            if cls._default is None or cls._default.closed:
                cls._default = cls()
            return cls._default

    def use_as_default(self) -> None:
        """Make this the session used where no other is given."""
        self.check_open()
        with Session._default_lock:
            Session._default = self

    def runtime(self, device: torch.device) -> Runtime:
        """The runtime of a device, made on first use; inside a capture, the one for captured work.

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

    def of(self, kind: type[_Kind]) -> _Kind:
        """The session's state of a kind: the one ``kind()``, made on first use.

        Every part of Spillway keeps its state of a session in a class of its own, and finds it by this class.

        Example:
            >>> with Session() as session:
            ...     session.of(dict) is session.of(dict)
            True
        """
        if kind not in self._state:
            with self._lock:
                if kind not in self._state:
                    self._state[kind] = kind()
        return cast("_Kind", self._state[kind])

    def unused_host_bytes(self, device: torch.device) -> int:
        """Bytes of CPU memory that are left of a device's budget."""
        self.runtime(device)
        runtime = self._runtimes[device]
        return max(runtime.arena.capacity - runtime.used_host_bytes(), 0)

    @property
    def host_bytes(self) -> int:
        """CPU memory reserved, in use or free."""
        return sum(runtime.arena.reserved_bytes for runtime in self._runtimes.values())

    @property
    def disk_bytes(self) -> int:
        """Disk space reserved, in use or free."""
        return 0 if self._file is None else self._file.reserved_bytes

    @property
    def peak_bytes(self) -> int:
        """Sum over the session's devices of the peak of allocated bytes (CPU: resident bytes)."""
        return sum(runtime.backend.peak_bytes() for runtime in self._runtimes.values())

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Bytes in use in CPU memory and on disk.

        Both are 0 when no offloaded graph is alive, and no write is under way (:meth:`synchronize`).
        """
        host = sum(runtime.used_host_bytes() for runtime in self._runtimes.values())
        return host, 0 if self._file is None else self._file.used_bytes

    def stats(self) -> StepStats:
        """Bytes and seconds of checkpointed functions that this thread ran outside of any ``offload`` context.

        They count the last forward and its backward so far. Tensors saved after a backward began belong to the next.
        """
        scope = getattr(self.unscoped, "scope", None)
        return StepStats() if scope is None else self.stats_of(scope.ledger)

    def stats_of(self, ledger: ByteCounters) -> StepStats:
        """The counters of a pass, and the bytes that the session has reserved by now."""
        groups = tuple(
            GroupStats(name, **part.sizes(GROUP_BYTES), stall_seconds=part.out.seconds() + part.back.seconds())
            for name, part in ledger.groups.items()
        )
        ledger = ledger.total()
        out, back = ledger.out.seconds(), ledger.back.seconds()
        return StepStats(
            **ledger.sizes(STEP_BYTES),
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

    def delay(self, send: Callable[[], None], is_done: Callable[[], bool]) -> None:
        """Call ``send`` at the next :meth:`flush_groups`, which may never come. If ``is_done``, it is dropped."""
        with self._lock:
            while self._delayed and self._delayed[0][1]():
                self._delayed.popleft()
            self._delayed.append((send, is_done))

    def finish_at_close(self, user: Any) -> None:
        """:meth:`close` lets an object, if it still lives, finish what it has queued, by its ``synchronize()``."""
        self._users.add(user)

    def finish_users(self) -> None:
        """Let all objects of :meth:`finish_at_close` finish what they have queued, for compute."""
        for user in list(self._users):
            user.synchronize()

    def flush_groups(self) -> None:
        """Offload the delayed groups now, the oldest first."""
        while True:
            with self._lock:
                if not self._delayed:
                    return
                send, _ = self._delayed.popleft()
            send()

    def forget_groups(self) -> None:
        """Keep the delayed groups on the device."""
        self._delayed.clear()

    def synchronize(self) -> None:
        """Wait for every write that is under way; raises the error of one that failed."""
        for runtime in self._runtimes.values():
            runtime.synchronize()

    def trim(self, device: torch.device | None = None) -> int:
        """Give unused CPU memory of all tiers, or of one device's, back to the system; returns its bytes."""
        runtimes = self._runtimes if device is None else {device: self._runtimes.get(device)}
        return sum(runtime.trim() for runtime in runtimes.values() if runtime is not None)

    def release_graphs(self) -> int:
        """Free the CPU memory of CUDA graphs that were captured with offloading inside; returns its bytes.

        Call it when they are gone: a graph replayed after this reads and writes other tensors' bytes.
        """
        return sum(runtime.release_graphs() for runtime in self._runtimes.values())

    def close(self) -> None:
        """Stop the threads, and free memory and disk. Offloaded bytes are lost: close after the last backward.

        Steps of an optimizer that are still queued are finished, and their errors are raised.
        """
        if self._process != os.getpid():
            # A forked child has neither the threads nor a lock that it could trust. The file checks its owner itself.
            if self._file is not None:
                self._file.close()
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            # Not under the lock, which their threads may need.
            for user in [] if self._closed else list(self._users):
                stack.callback(user.synchronize)

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.forget_groups()
            for runtime in self._runtimes.values():
                runtime.close()
            if self._file is not None:
                self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it cannot be used here: closed, or made by the process that this one was forked from."""
        return self._closed or self._process != os.getpid()

    def check_open(self) -> None:
        """Raise :class:`~spillway.errors.SessionError` if the session cannot be used here."""
        if self._closed:
            raise SessionError("got a closed session, expected an open one; make a new Session")
        if self._process != os.getpid():
            raise SessionError(
                f"got the session of process {self._process} in process {os.getpid()}, expected one made here. Copy "
                f"streams and spill files do not survive a fork. Make a new Session in the child."
            )

    def __enter__(self) -> Session:
        self.check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_runtime(self, device: torch.device) -> DeviceRuntime:
        window = self.window
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


def _make_file(directory: str | os.PathLike[str] | None, **options: Any) -> SpillFile:
    from spillway.runtime.spill_file import SpillFile  # not at the top: only a session that spills to disk needs it

    if not (directory is None or isinstance(directory, str | os.PathLike)):
        raise SpillPathError(f"spill_directory: got {directory!r:.200}, expected the path of a directory, or None")
    return SpillFile(directory, **options)


def _size(size: int | str | None, what: str) -> int | None:
    return None if size is None else parse_bytes(size, what=what)


def _check_streams(streams: object, backend: object) -> None:
    if streams is None:
        return
    if backend is not None:
        raise UsageError("got both streams and a backend, expected one of them; the backend can use the streams")
    given = streams.items() if isinstance(streams, Mapping) else [(None, None)]
    if not all(name in ("out", "back") and isinstance(stream, torch.Stream) for name, stream in given):
        raise UsageError(f"streams: got {streams!r}, expected torch streams by the names 'out' and 'back'")
