"""The accelerator's backend: streams, events and registered host memory through ``torch.accelerator``.

Written against ``torch.Stream`` and ``torch.Event``, which CUDA, XPU and others share. Host memory is the exception:
on CUDA slabs are the process's own pages, touched by several threads at once and then registered
(``cudaHostRegister``), in exact sizes. On an H200's host 4 GiB are pinned so in a quarter of a second, where torch's
pinned allocator takes two. Elsewhere slabs come from that allocator.

Tried on CUDA only.

NOTE [ Copies of others ]

A device has one engine for what comes from host memory, whose copies follow one another. A copy of a few bytes on the
stream that computes waits for all copies that are ready before it, and with it whatever comes after. FSDP2 makes such
with each layer: on two H100s its steps waited 14 of 384 ms for what a lane brought back, in storages of 235 MB. Smaller
copies alone change nothing: a stream keeps the engine for as long as it has more for it. Where the stream has to wait
for another one, the engine is free: so where several processes train together, what comes back is copied in parts by
two streams in turn, each of which waits for the other. A copy of 0.8 MB then waits for 0.05 ms, 0.3 at most, where it
waited for all that was queued, and parts of 16 MiB come at 0.98 of the rate of the whole (one H100).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from spillway.errors import BackendError, TierFullError, UnsupportedError
from spillway.runtime.backend import Backend, Event, HostLane, Lane, Several, Task
from spillway.runtime.bytes import Bytes, Cells, Form
from spillway.runtime.cpu import anonymous_pages
from spillway.runtime.cuda_driver import CudaDriver, library
from spillway.runtime.host_memory import near_cpus
from spillway.runtime.ledger import Stalls
from spillway.runtime.tasks import HostTasks, TaskEvent, be_in_task, chained

_MOST_THREADS = 16
_CAPTURE_ACTIVE = 1
_PAGE = 4096
_PART = 16 << 20
"""Bytes of a part: see NOTE [ Copies of others ]."""


class AcceleratorBackend(Backend):
    """Lanes are streams of the device.

    Args:
        device: with an index: ``torch.device("cuda", 0)``.
        threads: how many threads read and write the spill file. ``None``: one a CPU, up to 16.
        streams: the user's own, for the lanes ``"out"`` and ``"back"``, as far as they are of this device.
    """

    # The caching allocator cuts at multiples of 512 bytes.
    alignment = 512

    def __init__(
        self, device: torch.device, *, threads: int | None = None, streams: Mapping[str, torch.Stream] | None = None
    ) -> None:
        super().__init__(device)
        self._streams = {name: stream for name, stream in (streams or {}).items() if stream.device == device}
        most = threads if threads is not None else min(_MOST_THREADS, os.cpu_count() or 1)
        self._tasks = HostTasks(most, self._begin_tasks)
        self._lanes: list[torch.Stream] = []
        self._entering = threading.Lock()
        self.unified = _is_unified(device)
        self._driver = CudaDriver.of(device)
        self._computes: dict[int, Lane] = {}
        """Compute lanes by their handles."""
        self._handles: dict[Lane, int] = {}
        """The handles of lanes that copies are queued on."""
        self._beside: dict[Lane, Lane] = {}
        """Of a lane, the stream that takes turns with it: see NOTE [ Copies of others ]."""

    def compute(self) -> Lane:
        index = self.device.index
        if self._driver is None:
            # By its number, which takes torch a third of the time.
            return torch.accelerator.current_stream(index)
        # It is asked for with each tensor that is saved, and to make a stream takes ten times as long as its handle.
        handle = self._driver.current(index)
        lane = self._computes.get(handle)
        if lane is None:
            lane = self._computes[handle] = torch.accelerator.current_stream(index)
        return lane

    def lane(self, name: str) -> Lane:
        given = self._streams.get(name)
        self._lanes.append(given if given is not None else torch.Stream(device=self.device))
        if self._driver is not None:
            self._handles[self._lanes[-1]] = _as_cuda(self._lanes[-1]).cuda_stream
        return self._lanes[-1]

    def record(self, lane: Lane) -> Event:
        # With timing, which costs a microsecond, so that a stall can be told without anybody waiting.
        event = torch.Event(device=self.device, enable_timing=True)
        event.record(lane)  # type: ignore[arg-type]
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        self._wait(lane, event, [])

    def timed_wait(self, lane: Lane, event: Event, stalls: Stalls) -> None:
        if isinstance(event, torch.Event) and event.query():
            # It was reached while the host was on its way here.
            return
        arrived = self.record(lane)
        waited: list[torch.Event] = []
        self._wait(lane, event, waited)
        if waited:
            stalls.pending.append(_Stall(arrived, waited))

    def _wait(self, lane: Lane, event: Event, waited: list[torch.Event]) -> None:
        if isinstance(event, Several):
            event.each(lambda one: self._wait(lane, one, waited))
            return
        if isinstance(event, TaskEvent):
            # Blocks until host work that comes before it is done.
            inner = event.resolve()
            if inner is not None:
                self._wait(lane, inner, waited)
            return
        reached: Any = event
        lane.wait_event(reached)  # type: ignore[attr-defined]
        waited.append(reached)

    def copy(self, lane: Lane, destination: Bytes, source: Bytes) -> None:
        if self._driver is not None and self._by_driver(self._driver, lane, destination, source):
            return
        written, read = destination.tensor(), source.tensor()
        # A stream object remembers which stream it has taken the place of: two threads must not be inside of one.
        with self._entering, lane:  # type: ignore[attr-defined]
            written.copy_(read, non_blocking=True)

    def _by_driver(self, driver: CudaDriver, lane: Lane, destination: Bytes, source: Bytes) -> bool:
        handle = self._handles.get(lane)
        is_whole = destination.nbytes == source.nbytes and destination.is_there() and source.is_there()
        if handle is None or not is_whole:
            # Torch says what is wrong.
            return False
        if source.nbytes > _PART and source.storage.device.type == "cpu" and _trains_with_others():
            return self._in_parts(driver, lane, destination, source)
        return driver.copy(self.device.index, handle, destination.address, source.address, source.nbytes)

    def _in_parts(self, driver: CudaDriver, lane: Lane, destination: Bytes, source: Bytes) -> bool:
        """See NOTE [ Copies of others ]. All of it is done when the lane goes on."""
        if lane not in self._beside:
            self._beside[lane] = self.lane("beside")
        turns = itertools.cycle((lane, self._beside[lane]))
        here, to, since = next(turns), destination.address, source.address
        for start in range(0, source.nbytes, _PART):
            part = min(_PART, source.nbytes - start)
            if not driver.copy(self.device.index, self._handles[here], to + start, since + start, part):
                # What is queued is done before all of it is copied once more.
                self._hand_on(here, lane)
                return False
            if start + part < source.nbytes:
                before, here = here, next(turns)
                self._hand_on(before, here)
        self._hand_on(here, lane)
        return True

    def _hand_on(self, before: Lane, after: Lane) -> None:
        """The one goes on when the other is done."""
        if before is not after:
            event: Any = torch.Event(device=self.device)
            event.record(before)
            after.wait_event(event)  # type: ignore[attr-defined]

    def convert(self, lane: Lane, destination: Cells, source: Cells) -> None:
        written, read = destination.tensor(), source.tensor()
        with self._entering, lane:  # type: ignore[attr-defined]
            # By way of memory of the lane's own, which the next one has again: torch would convert on the host.
            written.copy_(read.to(self.device, non_blocking=True))

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def host_lane(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostLane:
        return HostTasks(threads, chained(self._begin_tasks, begin), name=name)

    def empty(self, form: Form) -> torch.Tensor:
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self.device)

    def hand_back(self, memory: Bytes, lanes: Iterable[Lane]) -> None:
        # The allocator ignores the stream that it allocated the storage on, so this does nothing, and the peak goes by
        # program order, unless the storage comes from a stream that the mover has never seen: a data loader's, say.
        tensor = memory.tensor()
        for lane in lanes:
            tensor.record_stream(lane)  # type: ignore[arg-type]

    def host_slab(self, nbytes: int) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # A child would get its own copies of pinned pages, at the first write to them.
        slab = anonymous_pages(nbytes, huge=True, for_children=False)
        _touch(slab, self._near_cpus())
        # Also in a thread of the arena's, whose current device would be the first.
        with torch.cuda.device(self.device):
            return _registered(slab)

    def is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def capture(self) -> int | None:
        return self.capture_of(self.compute()) if self.is_capturing() else None

    def capture_of(self, lane: Lane) -> int | None:
        return _capture_of(_as_cuda(lane))

    def record_captured(self, lane: Lane) -> Event:
        # Nobody may ask it for a time.
        event = torch.Event(device=self.device)
        event.record(lane)  # type: ignore[arg-type]
        return event

    def memory_info(self) -> tuple[int, int] | None:
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)
        return torch.accelerator.get_memory_info(self.device)

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def close(self) -> None:
        self._tasks.close()
        for lane in self._lanes:
            lane.synchronize()

    def _begin_tasks(self) -> None:
        be_in_task()
        # A thread's current device is the first, until it is told otherwise: entering a lane would put a context of
        # this process, half a gigabyte, on a device that belongs to another rank.
        torch.accelerator.set_device_index(self.device)

    def _near_cpus(self) -> set[int]:
        address = pci_address(self.device)
        return set() if address is None else near_cpus(address)


def pci_address(device: torch.device) -> str | None:
    """Where a device is, as ``"0000:3b:00.0"``; ``None`` where torch does not say."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


class _Stall:
    """Compute came to ``arrived`` and went on when the events were reached."""

    __slots__ = ("_arrived", "_events")

    def __init__(self, arrived: Event, events: list[torch.Event]) -> None:
        self._arrived = arrived
        self._events = events

    def seconds(self) -> float | None:
        if not self._arrived.query() or not all(event.query() for event in self._events):
            return None
        arrived: Any = self._arrived
        # Negative where the copy was done first.
        return max(0.0, *(float(arrived.elapsed_time(event)) for event in self._events)) / 1e3


def _trains_with_others() -> bool:
    """Whether this process is one of several that train together."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())


def _as_cuda(lane: Lane) -> torch.cuda.Stream:
    stream: Any = lane
    known = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    return torch.cuda.Stream(**known)  # type: ignore[no-untyped-call]


def _capture_of(stream: torch.cuda.Stream) -> int | None:
    """What the driver numbers the stream's capture with. Torch says whether there is one, and not which."""
    if torch.version.hip is not None:
        raise UnsupportedError("got a graph that is captured on ROCm, expected CUDA, which is all that was tried")
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    if error:
        raise BackendError(f"cuStreamGetCaptureInfo_v2: got error {error} for {stream}, expected none")
    return number.value if status.value == _CAPTURE_ACTIVE else None


def _is_unified(device: torch.device) -> bool:
    if device.type == "mps":
        return True
    properties = getattr(torch, device.type).get_device_properties(device)
    return bool(getattr(properties, "is_integrated", False))


def _touch(slab: torch.Tensor, cpus: set[int]) -> None:
    """Write to every page, in several threads: the kernel clears pages faster so than one by one while pinning.

    A page comes from the node of the CPU that touches it first, so the threads run on those near to the device.
    """
    pages = slab[::_PAGE]
    threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
    step = -(-len(pages) // threads)
    memory = pages.numpy()

    def begin() -> None:
        be_in_task()
        # Known on Linux only, which has the calls.
        allowed = cpus & os.sched_getaffinity(0) if cpus else None
        if allowed:
            os.sched_setaffinity(threading.get_native_id(), allowed)

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        list(pool.map(lambda start: memory[start : start + step].fill(0), range(0, len(pages), step)))


def _registered(slab: torch.Tensor) -> torch.Tensor:
    """Register the pages with CUDA until the memory dies."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
    if error:
        raise TierFullError(
            f"host memory: cudaHostRegister gave error {error} for {slab.numel()} bytes, expected pinned memory; raise "
            f"the limit on locked memory (ulimit -l), or lower host_budget"
        )
    # The registration has to end before the pages are unmapped: the storage's finaliser runs first, since the tensor
    # that it is made of still holds them.
    weakref.finalize(slab.untyped_storage(), runtime.cudaHostUnregister, slab.data_ptr())
    return slab
