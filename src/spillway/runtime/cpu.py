"""The CPU's backend: a stream is a thread with a queue, and compute is the calling thread.

Its memory is that of this process: resident bytes, and the setting of glibc's ``malloc``.

NOTE [ The kernel's high-water mark ]

Linux keeps a high-water mark of a process's resident bytes (``VmHWM``). The process may reset it by writing ``5`` to
``/proc/self/clear_refs``. No peak escapes it, however short. A process has one mark, and several objects here use it:
a reset first reports the peak to all of them. On other systems a thread reads the resident bytes every few
milliseconds, and may miss a shorter peak.

NOTE [ malloc on a CPU ]

Torch allocates aligned memory. glibc's aligned ``malloc`` does not reuse a freed block of the same size, and its
threshold for blocks with a mapping of their own rises to 32 MiB. Small tensors that live on then keep large holes
resident. ``docs/planning.md`` has what Spillway sets, and when it leaves ``malloc`` alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from spillway.runtime.arena import anonymous_pages
from spillway.runtime.backend import Backend, Event, HostQueue, HostTasks, Stream, Task
from spillway.runtime.bytes import Bytes, Cells


class _Compute:
    """The calling thread as a stream. As an event, it is always reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


_DONE = _Compute()


class _CpuStream(HostTasks):
    """A thread that runs queued copies in order."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name=name)
        self.end: Event = _DONE
        """Reached when everything queued by now is done."""

    def submit(self, work: Callable[[], None]) -> None:
        self.end = self.run(work)


class CpuBackend(Backend):
    """Streams are threads, and compute is the caller. ``threads`` read and write the spill file."""

    alignment = 64
    direct_disk = True

    def __init__(self, device: torch.device, *, threads: int = 2) -> None:
        super().__init__(device)
        self._streams: list[_CpuStream] = []
        self._tasks = HostTasks(threads)
        self._peak = ResidentPeak()
        self.malloc = set_malloc()

    def compute(self) -> Stream:
        return _DONE

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        self._streams.append(_CpuStream(name))
        return self._streams[-1]

    def record(self, stream: Stream) -> Event:
        return stream.end if isinstance(stream, _CpuStream) else _DONE

    def wait(self, stream: Stream, event: Event) -> None:
        if not isinstance(stream, _CpuStream):
            event.synchronize()
        elif not event.query():
            stream.submit(event.synchronize)

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        assert isinstance(stream, _CpuStream)

        def work() -> None:
            # memmove needs no OpenMP threads, and releases the interpreter's lock.
            ctypes.memmove(destination.address, source.address, source.nbytes)

        stream.submit(work)

    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        assert isinstance(stream, _CpuStream)

        def work() -> None:
            destination.tensor().copy_(source.tensor())

        stream.submit(work)

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        return HostTasks(threads, begin, name=name)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        return anonymous_pages(nbytes)

    def peak_bytes(self) -> int:
        return self._peak.most()

    def close(self) -> None:
        self._tasks.close()
        for stream in self._streams:
            stream.close()


_STATUS, _CLEAR = "/proc/self/status", "/proc/self/clear_refs"
_RESET_PEAK = b"5"
_INTERVAL = 0.003
"""Seconds between two samples."""


class Resident(NamedTuple):
    """Bytes."""

    now: int
    most: int
    """Since the peak was restarted."""


class ResidentPeak:
    """The most resident bytes of this process: since :meth:`restart` was called, or as far back as the kernel knows."""

    def __init__(self) -> None:
        with _lock:
            self._most = _read().most
            _peaks.add(self)
        if not has_mark():
            _sample()

    def restart(self) -> Resident:
        """Forget the peak; gives the resident bytes now, and the peak until now."""
        with _lock:
            found = _read()
            for each in _peaks:
                each._most = max(each._most, found.most)
            if has_mark():
                with open(_CLEAR, "wb", buffering=0) as clear:
                    clear.write(_RESET_PEAK)
            else:
                _sample()
            most, self._most = self._most, found.now
        return Resident(found.now, most)

    def most(self) -> int:
        with _lock:
            return max(self._most, _read().most)


def resident_bytes() -> int:
    """Resident bytes now."""
    return _read().now


@functools.cache
def has_mark() -> bool:
    """Whether the kernel keeps a mark that can be reset."""
    return os.path.exists(_STATUS) and os.access(_CLEAR, os.W_OK)


_lock = threading.RLock()
_peaks: weakref.WeakSet[ResidentPeak] = weakref.WeakSet()
_sampler: dict[int, threading.Thread] = {}
"""The thread that samples, by process: a forked child starts its own."""


def _sample() -> None:
    """See that a thread samples for as long as there is a peak to find."""
    thread = _sampler.get(os.getpid())
    if thread is None or not thread.is_alive():
        thread = _sampler[os.getpid()] = threading.Thread(target=_keep_sampling, name="spillway-resident", daemon=True)
        thread.start()


def _read() -> Resident:
    if not has_mark():
        import psutil  # not at the top: it takes long, and is needed without the mark only

        now = int(psutil.Process().memory_info().rss)
        return Resident(now, now)
    with open(_STATUS, "rb", buffering=0) as status:
        fields = dict(line.split(b":", 1) for line in status.read(8192).splitlines() if line.startswith(b"Vm"))
    now, most = (int(fields[name].split()[0]) * 1024 for name in (b"VmRSS", b"VmHWM"))
    return Resident(now, most)


def _keep_sampling() -> None:
    pause = threading.Event()
    while not pause.wait(_INTERVAL):
        most = _read().most
        with _lock:
            if not _peaks:
                return
            for each in _peaks:
                each._most = max(each._most, most)


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD`` of glibc's ``malloc.h``."""
MAPPED_BYTES = 1 << 16
"""Blocks of at least this size have a mapping of their own."""
_SET = f"Spillway sets glibc's mmap threshold to {MAPPED_BYTES >> 10} KiB"
_MOST_KEPT = 1 << 20
"""Free bytes at the end of the heap that glibc keeps."""
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
_OTHERS = ("jemalloc", "mimalloc", "tcmalloc")


@functools.cache
def set_malloc() -> str:
    """Set it, once in the process; says in a sentence how ``malloc`` is set."""
    return _left_alone() or _set()


def malloc_setting() -> str:
    """How ``malloc`` is set where Spillway works in CPU memory; sets nothing."""
    return set_malloc() if set_malloc.cache_info().currsize else _left_alone() or _SET


def _left_alone() -> str:
    """Why it is left alone; empty: it is not."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "left alone: the C library is not glibc"
    preloaded = os.environ.get("LD_PRELOAD", "")
    other = next((name for name in _OTHERS if name in preloaded), None)
    if other is not None:
        return f"left alone: LD_PRELOAD names {other}"
    variable = next((name for name in _VARIABLES if name in os.environ), None)
    if variable is None and "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        variable = "GLIBC_TUNABLES"
    return "" if variable is None else f"left alone: {variable} is set"


def _set() -> str:
    library = ctypes.CDLL(None)
    for option, value in ((_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, _MOST_KEPT)):
        if not library.mallopt(option, value):
            return f"left alone: mallopt({option}, {value}) failed"
    # The heap may have holes already.
    library.malloc_trim(0)
    return _SET
