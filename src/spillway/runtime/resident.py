"""Resident bytes of this process: now, and at most since an instant.

NOTE [ The kernel's high-water mark ]

Linux keeps a mark of a process's most resident bytes (``VmHWM``), which the process may reset by writing ``5`` to
``/proc/self/clear_refs``. No peak escapes it, however short. A process has one mark, and several objects here
want to know it: so a reset first tells the peak to all of them. Elsewhere a thread reads the resident bytes every few
milliseconds, and a shorter peak may escape it.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import NamedTuple

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
    """The most resident bytes of this process: since :meth:`restart` was called, or as far back as the kernel knows.

    Example:
        >>> peak = ResidentPeak()
        >>> peak.restart().now <= peak.most()
        True
    """

    def __init__(self) -> None:
        with _lock:
            self._most = _read().most
            _peaks.add(self)
        if not has_mark():
            _sampler.run()

    def restart(self) -> Resident:
        """Forget the peak; gives the resident bytes now, and the peak until now."""
        with _lock:
            found = _read()
            for each in _peaks:
                each._most = max(each._most, found.most)
            _reset()
            most, self._most = self._most, found.now
        return Resident(found.now, most)

    def most(self) -> int:
        """The peak."""
        with _lock:
            return max(self._most, _read().most)


def resident_bytes() -> int:
    """Resident bytes now."""
    return _read().now


@functools.cache
def has_mark() -> bool:
    """Whether the kernel keeps a mark that can be reset."""
    return os.path.exists(_STATUS) and os.access(_CLEAR, os.W_OK)


class _Sampler:
    """A thread that samples for as long as there is a peak to find. A forked child starts its own."""

    def __init__(self) -> None:
        self._process = 0
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """See that it runs."""
        if self._thread is None or not self._thread.is_alive() or self._process != os.getpid():
            self._process = os.getpid()
            self._thread = threading.Thread(target=_keep_sampling, name="spillway-resident", daemon=True)
            self._thread.start()


_lock = threading.RLock()
_peaks: weakref.WeakSet[ResidentPeak] = weakref.WeakSet()
_sampler = _Sampler()


def _reset() -> None:
    if not has_mark():
        _sampler.run()
        return
    with open(_CLEAR, "wb", buffering=0) as clear:
        clear.write(_RESET_PEAK)


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
