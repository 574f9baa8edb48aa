"""CUDA's driver, for what torch's way to it takes the host several times as long.

NOTE [ Copies past torch ]

``Tensor.copy_`` of some bytes between a device and registered host memory takes the host several times as long as the
driver needs for it: it is dispatched, goes in and out of a stream, and looks up whose memory it is. A training in which
the host is the slower of the two waits for that with each tensor that leaves. The lanes' copies are plain ranges of
bytes whose order and lifetimes are the mover's to keep, so they are given to the driver as they are. Profilers see them
on the device as ever, and no operator of torch's that queued them.

The calling thread must be on the device: where it is not, or the driver refuses for any reason, torch does it. So it
does where this torch lacks what is asked of it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch


@functools.cache
def library() -> ctypes.CDLL:
    """The driver's own."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class CudaDriver:
    """See NOTE [ Copies past torch ]."""

    def __init__(self, current: Callable[[int], int], device: Callable[[], int]) -> None:
        self.current = current
        """The handle of the calling thread's current stream on a device, by its number."""
        self._device = device
        self._copy = library().cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    @classmethod
    def of(cls, device: torch.device) -> CudaDriver | None:
        """``None`` where there is none: elsewhere than on CUDA, or with a torch that has other names for this."""
        names = ("_cuda_getCurrentRawStream", "_cuda_getDevice")
        current, its_device = (getattr(torch._C, name, None) for name in names)
        if device.type != "cuda" or torch.version.hip is not None or current is None or its_device is None:
            return None
        return cls(current, its_device)

    def copy(self, device: int, stream: int, destination: int, source: int, nbytes: int) -> bool:
        """Queue a copy between two addresses; ``False`` if it is not queued."""
        if self._device() != device:
            return False
        return not self._copy(destination, source, nbytes, stream)
