"""Peak memory as the operating system or the device's allocator counts it, and a fingerprint of exact bytes.

On Linux the kernel keeps a high-water mark of a process's resident bytes (``VmHWM``), and lets a process reset its own
(writing ``5`` to ``/proc/self/clear_refs``): no peak escapes it, however short. Elsewhere a thread asks every few
milliseconds.
"""

from __future__ import annotations

import abc
import hashlib
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch import Tensor

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class Meter(abc.ABC):
    """Measures how many bytes are held at most, from :meth:`start` on."""

    source: str
    """Who counts, for people."""

    @abc.abstractmethod
    def start(self) -> int:
        """Forget what was before. Returns the bytes held now."""

    @abc.abstractmethod
    def peak(self) -> int:
        """The most bytes held since :meth:`start`."""


class HighWaterMeter(Meter):
    """Resident bytes by the kernel's high-water mark (Linux)."""

    source = "resident bytes of the process, by the kernel's high-water mark"

    @staticmethod
    def works() -> bool:
        """Whether this kernel keeps the mark and lets it be reset."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            return False
        return _STATUS.exists()

    def start(self) -> int:
        """Reset the mark."""
        _CLEAR.write_text(_RESET_PEAK)
        return _status_bytes("VmRSS")

    def peak(self) -> int:
        """The mark."""
        return _status_bytes("VmHWM")


class SamplingMeter(Meter):
    """Resident bytes as a thread sees them every few milliseconds: a shorter peak escapes it."""

    source = "resident bytes of the process, sampled"
    interval = 0.003

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak = 0

    def start(self) -> int:
        """Start the thread, which ends with the process."""
        self._peak = before = self._process.memory_info().rss
        threading.Thread(target=self._watch, name="spillway-demo-memory", daemon=True).start()
        return before

    def peak(self) -> int:
        """The highest sample."""
        return max(self._peak, self._process.memory_info().rss)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(self.interval):
            self._peak = max(self._peak, self._process.memory_info().rss)


class AllocatorMeter(Meter):
    """Bytes allocated on an accelerator, by torch's allocator."""

    source = "bytes allocated on the device, by torch's allocator"

    def start(self) -> int:
        """Reset the allocator's peak."""
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()

    def peak(self) -> int:
        """The allocator's peak."""
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated()


def meter_for(device: torch.device) -> Meter:
    """The most exact meter that there is for ``device`` on this machine."""
    if device.type != "cpu":
        return AllocatorMeter()
    return HighWaterMeter() if HighWaterMeter.works() else SamplingMeter()


class Fingerprint:
    """A hash of the exact bytes of tensors, in the order in which they are added."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add the bytes of each, as they would lie in memory if contiguous."""
        for tensor in tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._hash.update(flat.numpy().data)

    def text(self) -> str:
        """The hash of all so far, in hexadecimal."""
        return self._hash.hexdigest()


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # "123456 kB", where kB means 1024 bytes
    raise OSError(f"{_STATUS} has no field {field}")
