"""Peak memory as the operating system or the device's allocator counts it, and a fingerprint of exact bytes."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from spillway.runtime.resident import ResidentPeak, has_mark


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


class ResidentMeter(Meter):
    """Resident bytes, by the kernel's high-water mark where there is one."""

    def __init__(self) -> None:
        how = "by the kernel's high-water mark" if has_mark() else "sampled"
        self.source = f"resident bytes of the process, {how}"
        self._peak = ResidentPeak()

    def start(self) -> int:
        """Forget the peak."""
        return self._peak.restart().now

    def peak(self) -> int:
        """The peak."""
        return self._peak.most()


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
    return ResidentMeter()


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
