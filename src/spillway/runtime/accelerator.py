"""The accelerator's backend: streams, events and registered CPU memory through ``torch.accelerator``.

It uses ``torch.Stream`` and ``torch.Event``, which CUDA, XPU and others share, and was tried on CUDA only. On CUDA,
slabs are the process's own pages, touched by several threads at once and then registered (``cudaHostRegister``), in
exact sizes. On an H200's host this pins 4 GiB in a quarter of a second, where torch's pinned allocator takes two. On
other devices slabs come from that allocator.

NOTE [ Copies past torch ]

``Tensor.copy_`` of bytes between a device and registered CPU memory costs several times the CPU time of the driver
call: torch dispatches it, enters and leaves a stream, and looks up whose memory it is. A CPU-bound training pays that
for each offloaded tensor. A stream's copies are plain ranges of bytes, and the mover keeps their order and lifetimes.
So they are given to the driver as they are. Profilers see them on the device, without a torch operator. If the calling
thread is on another device, if the driver refuses, or if this torch lacks a name, torch makes the copy.

NOTE [ Copies of other code ]

A device has one engine for copies from CPU memory. A small copy on the compute stream waits for every copy that is
ready before it, and compute waits with it. FSDP2 makes such copies with each layer. Smaller copies alone change
nothing: a stream keeps the engine while it has more for it. The engine becomes free when the stream has to wait for
another one. So where several processes train together, two streams take turns copying parts, each waiting for the
other. Parts of 16 MiB reach 0.98 of the bandwidth of the whole (one H100).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, closing
from functools import cache, partial
from typing import Any

import torch

from spillway._torch import current_device, stream_handle
from spillway.errors import BackendError, TierFullError, UnsupportedError
from spillway.runtime.arena import PAGE, anonymous_pages
from spillway.runtime.backend import (
    Backend,
    Event,
    HostQueue,
    HostTasks,
    Several,
    Stalls,
    Stream,
    Task,
    TaskEvent,
)
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.system import many_processes, memory_info, near_cpus, pci_address

_MOST_THREADS = 16
_CAPTURE_ACTIVE = 1
_PART = 16 << 20
"""Bytes of a part: see NOTE [ Copies of other code ]."""


@cache
def library() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


class CudaDriver:
    """Copies by the driver. See NOTE [ Copies past torch ]."""

    def __init__(self, current: Callable[[int], int], device: Callable[[], int]) -> None:
        self.current = current
        """The handle of the calling thread's current stream on a device, by its number."""
        self._device = device
        self._copy = library().cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    @classmethod
    def of(cls, device: torch.device) -> CudaDriver | None:
        """``None`` on another device than CUDA, or with a torch that has other names for this."""
        if device.type != "cuda" or torch.version.hip is not None or stream_handle is None or current_device is None:
            return None
        return cls(stream_handle, current_device)

    def copy(self, device: int, stream: int, destination: int, source: int, nbytes: int) -> bool:
        """Queue a copy between two addresses; says whether it was queued."""
        return self._device() == device and not self._copy(destination, source, nbytes, stream)


class AcceleratorBackend(Backend):
    """Streams are streams of the device.

    Args:
        device: with an index: ``torch.device("cuda", 0)``.
        streams: the user's streams ``"out"`` and ``"back"``, if they are of this device.
    """

    # The caching allocator cuts at multiples of 512 bytes.
    alignment = 512

    def __init__(self, device: torch.device, *, streams: Mapping[str, torch.Stream] | None = None) -> None:
        super().__init__(device)
        self._given = {name: stream for name, stream in (streams or {}).items() if stream.device == device}
        self._tasks = HostTasks(_threads(), self._use_device)
        """They read and write the spill file."""
        self._streams: list[torch.Stream] = []
        self._entering = threading.Lock()
        self.unified = _is_unified(device)
        self._driver = CudaDriver.of(device)
        self._computes: dict[int, Stream] = {}
        """Compute streams by their handles."""
        self._handles: dict[Stream, int] = {}
        """The handles of streams that copies are queued on."""
        self._beside: dict[Stream, Stream] = {}
        """The stream that takes turns with another: see NOTE [ Copies of other code ]."""

    def compute(self) -> Stream:
        # Called for each saved tensor. An index takes torch a third of a device's time.
        index = self.device.index
        if self._driver is None:
            return torch.accelerator.current_stream(index)
        # Making a stream object takes ten times as long as its handle.
        handle = self._driver.current(index)
        stream = self._computes.get(handle)
        if stream is None:
            stream = self._computes[handle] = torch.accelerator.current_stream(index)
        return stream

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        given = self._given.get(name)
        self._streams.append(
            given if given is not None else torch.Stream(device=self.device, priority=-1 if first else 0)
        )
        if self._driver is not None:
            self._handles[self._streams[-1]] = _as_cuda(self._streams[-1]).cuda_stream
        return self._streams[-1]

    def compute_on(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.Stream)
        return stream

    def record(self, stream: Stream) -> Event:
        # Timing costs a microsecond, and tells a stall without waiting for it.
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(stream)  # type: ignore[arg-type]
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._wait(stream, event, [])

    def timed_wait(self, stream: Stream, event: Event, stalls: Stalls) -> None:
        if isinstance(event, torch.Event) and event.query():
            # It was reached while the CPU came here.
            return
        arrived = self.record(stream)
        waited: list[torch.Event] = []
        self._wait(stream, event, waited)
        if waited:
            stalls.pending.append(partial(_stall_seconds, arrived, waited))

    def _wait(self, stream: Stream, event: Event, waited: list[torch.Event]) -> None:
        if isinstance(event, Several):
            event.each(lambda one: self._wait(stream, one, waited))
            return
        if isinstance(event, TaskEvent):
            # Blocks until the host work before it is done.
            inner = event.resolve()
            if inner is not None:
                self._wait(stream, inner, waited)
            return
        reached: Any = event
        stream.wait_event(reached)  # type: ignore[attr-defined]
        waited.append(reached)

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        if self._driver is not None and self._by_driver(self._driver, stream, destination, source):
            return
        written, read = destination.tensor(), source.tensor()
        # A stream object remembers which stream it replaced, so two threads must not be inside of one.
        with self._entering, stream:  # type: ignore[attr-defined]
            written.copy_(read, non_blocking=True)

    def _by_driver(self, driver: CudaDriver, stream: Stream, destination: Bytes, source: Bytes) -> bool:
        handle = self._handles.get(stream)
        is_whole = destination.nbytes == source.nbytes and destination.is_there() and source.is_there()
        if handle is None or not is_whole:
            # Torch reports the error.
            return False
        if source.nbytes > _PART and source.storage.device.type == "cpu" and many_processes():
            return self._in_parts(driver, stream, destination, source)
        return driver.copy(self.device.index, handle, destination.address, source.address, source.nbytes)

    def _in_parts(self, driver: CudaDriver, stream: Stream, destination: Bytes, source: Bytes) -> bool:
        """See NOTE [ Copies of other code ]. The stream continues when all parts are done."""
        if stream not in self._beside:
            self._beside[stream] = self.new_stream("beside")
        turns = itertools.cycle((stream, self._beside[stream]))
        here, to, since = next(turns), destination.address, source.address
        for start in range(0, source.nbytes, _PART):
            part = min(_PART, source.nbytes - start)
            if not driver.copy(self.device.index, self._handles[here], to + start, since + start, part):
                # The queued parts end before torch copies everything once more.
                self._hand_on(here, stream)
                return False
            if start + part < source.nbytes:
                before, here = here, next(turns)
                self._hand_on(before, here)
        self._hand_on(here, stream)
        return True

    def _hand_on(self, before: Stream, after: Stream) -> None:
        if before is not after:
            self.wait(after, self.record_untimed(before))

    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        written, read = destination.tensor(), source.tensor()
        with self._entering, stream:  # type: ignore[attr-defined]
            # Through memory of the stream's own, which the next call reuses: torch would convert on the CPU.
            written.copy_(read.to(self.device, non_blocking=True))

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        return HostTasks(threads, self._use_device, begin, name=name)

    def hand_back(self, memory: Bytes, streams: Iterable[Stream]) -> None:
        # The allocator ignores the stream on which it allocated the storage. So this only matters for a storage from a
        # stream that the mover has never seen, such as a data loader's.
        tensor = memory.tensor()
        for stream in streams:
            tensor.record_stream(stream)  # type: ignore[arg-type]

    def host_slab(self, nbytes: int) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # At the first write a forked child would get its own copies of pinned pages.
        slab = anonymous_pages(nbytes, huge=True, for_children=False)
        address = pci_address(self.device)
        _touch(slab, set() if address is None else near_cpus(address))
        # A thread of the arena has the first device as its current one.
        with torch.cuda.device(self.device):
            return _registered(slab)

    def mapped(self, memory: Bytes, owner: object) -> torch.Tensor:
        if self.device.type != "cuda":
            raise UnsupportedError(f"got pinned memory to be read by {self.device}, expected a CUDA device")
        # Registered memory has the same address on the device: see "unified addressing" in CUDA's guide.
        with torch.cuda.device(self.device):
            mapped = torch.as_tensor(_CudaArray(memory, owner), device=self.device)
        if mapped.data_ptr() != memory.address or mapped.device != self.device:
            raise UnsupportedError(
                f"got pinned memory that {self.device} has at another address, expected one address for the CPU and "
                f"the GPU: stream= needs CUDA's unified addressing"
            )
        return mapped

    def is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def capture_of(self, stream: Stream) -> int | None:
        # Torch says whether there is a capture, and not which.
        if torch.version.hip is not None:
            raise UnsupportedError("got a graph that is captured on ROCm, expected CUDA, which is all that was tried")
        status, number = ctypes.c_int(), ctypes.c_uint64()
        handle = ctypes.c_void_p(_as_cuda(stream).cuda_stream)
        error = library().cuStreamGetCaptureInfo_v2(
            handle, ctypes.byref(status), ctypes.byref(number), None, None, None
        )
        if error:
            raise BackendError(f"cuStreamGetCaptureInfo_v2: got error {error} for {stream}, expected none")
        return number.value if status.value == _CAPTURE_ACTIVE else None

    def record_untimed(self, stream: Stream) -> Event:
        event = torch.Event(device=self.device)
        event.record(stream)  # type: ignore[arg-type]
        return event

    def memory_info(self) -> tuple[int, int] | None:
        return memory_info(self.device)

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def close(self) -> None:
        self._tasks.close()
        for stream in self._streams:
            stream.synchronize()

    def _use_device(self) -> None:
        # A new thread's current device is the first one. Entering a stream there would create a context of half a
        # gigabyte on a device that belongs to another rank.
        torch.accelerator.set_device_index(self.device)


class _CudaArray:
    """Memory that torch makes a tensor of, by the CUDA array interface. The tensor keeps this object alive."""

    def __init__(self, memory: Bytes, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 2,
        }


def _stall_seconds(arrived: Any, events: list[torch.Event]) -> float | None:
    """The time from ``arrived`` until the events were reached; ``None``: they were not."""
    if not arrived.query() or not all(event.query() for event in events):
        return None
    # Negative where the copy was done first.
    return max(0.0, *(float(arrived.elapsed_time(event)) for event in events)) / 1e3


def _as_cuda(stream: Stream) -> torch.cuda.Stream:
    known: Any = stream
    numbers = {"stream_id": known.stream_id, "device_index": known.device_index, "device_type": known.device_type}
    return torch.cuda.Stream(**numbers)  # type: ignore[no-untyped-call]


def _is_unified(device: torch.device) -> bool:
    if device.type == "mps":
        return True
    properties = getattr(torch, device.type).get_device_properties(device)
    return bool(getattr(properties, "is_integrated", False))


def _threads() -> int:
    """How many threads work beside each other: one a CPU, up to a limit."""
    return min(_MOST_THREADS, os.cpu_count() or 1)


def _touch(slab: torch.Tensor, cpus: set[int]) -> None:
    """Write to every page, in several threads, which is faster than clearing them one by one while pinning.

    A page belongs to the NUMA node of the CPU that touches it first, so the threads run on CPUs near the device.
    """
    pages = slab[::PAGE]
    threads = _threads()
    step = -(-len(pages) // threads)
    memory = pages.numpy()

    def begin() -> None:
        # Known on Linux only, which has the calls.
        allowed = cpus & os.sched_getaffinity(0) if cpus else None
        if allowed:
            os.sched_setaffinity(threading.get_native_id(), allowed)

    with closing(HostTasks(threads, begin, name="touch")) as tasks:
        touched = [tasks.run(partial(memory[start : start + step].fill, 0)) for start in range(0, len(pages), step)]
        Several(touched).synchronize()


def _registered(slab: torch.Tensor) -> torch.Tensor:
    """Register the pages with CUDA until the memory dies."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
    if error:
        raise TierFullError(
            f"host memory: cudaHostRegister gave error {error} for {slab.numel()} bytes, expected pinned memory; raise "
            f"the limit on locked memory (ulimit -l), or lower host_budget"
        )
    # The registration must end before the pages are unmapped. The storage's finaliser runs first, since the tensor
    # under it still holds them.
    weakref.finalize(slab.untyped_storage(), runtime.cudaHostUnregister, slab.data_ptr())
    return slab
