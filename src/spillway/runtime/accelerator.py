"""The accelerator's backend: streams, events and registered host memory through ``torch.accelerator``.

Written against ``torch.Stream`` and ``torch.Event``, which CUDA, XPU and others share. Host memory is the exception:
on CUDA slabs are plain pages, touched by several threads at once and then registered (``cudaHostRegister``), which on
an H200's host pins 4 GiB in a quarter of the time that the caching host allocator needs, in exact sizes. Elsewhere
slabs come from torch's pinned allocator.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from spillway.errors import BackendError
from spillway.runtime.backend import Backend, Event, HostTasks, Lane, Task, TaskEvent, anonymous_pages, be_in_task
from spillway.runtime.bytes import Bytes, Form

_TOUCHING_THREADS = 8


class AcceleratorBackend(Backend):
    """Lanes are streams of the device.

    Args:
        device: with an index: ``torch.device("cuda", 0)``.
        threads: how many threads read and write the spill file.
    """

    # The caching allocator cuts at multiples of 512 bytes.
    alignment = 512

    def __init__(self, device: torch.device, *, threads: int = 8) -> None:
        super().__init__(device)
        self._tasks = HostTasks(threads)
        self._lanes: list[torch.Stream] = []

    def compute(self) -> Lane:
        return torch.accelerator.current_stream(self.device)

    def lane(self, name: str) -> Lane:
        self._lanes.append(torch.Stream(device=self.device))
        return self._lanes[-1]

    def record(self, lane: Lane) -> Event:
        event = torch.Event(device=self.device)
        event.record(lane)  # type: ignore[arg-type]
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        inner = event.resolve() if isinstance(event, TaskEvent) else event
        if inner is not None:
            lane.wait_event(inner)  # type: ignore[attr-defined]

    def copy(self, lane: Lane, destination: Bytes, source: Bytes) -> None:
        with lane:  # type: ignore[attr-defined]
            destination.tensor().copy_(source.tensor(), non_blocking=True)

    def run(self, task: Task) -> Event:
        return self._tasks.run(task)

    def empty(self, form: Form) -> torch.Tensor:
        return torch.empty_strided(form.size, form.stride, dtype=form.dtype, device=self.device)

    def hand_back(self, storage: torch.UntypedStorage, lanes: Iterable[Lane]) -> None:
        # The allocator ignores the stream that it allocated the storage on, so this does nothing, and the peak goes by
        # program order, unless the storage comes from a stream that the mover has never seen: a data loader's, say.
        memory = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        for lane in lanes:
            memory.record_stream(lane)  # type: ignore[arg-type]

    def host_slab(self, nbytes: int) -> torch.Tensor:
        if self.device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        slab = anonymous_pages(nbytes)
        _touch(slab)
        return _registered(slab)

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def close(self) -> None:
        self._tasks.close()
        for lane in self._lanes:
            lane.synchronize()


def _touch(slab: torch.Tensor) -> None:
    """Write every page once, in several threads: the kernel clears pages faster so than one by one while pinning."""
    step = -(-slab.numel() // _TOUCHING_THREADS)

    def touch(start: int) -> None:
        ctypes.memset(slab.data_ptr() + start, 0, min(step, slab.numel() - start))

    with ThreadPoolExecutor(_TOUCHING_THREADS, initializer=be_in_task) as pool:
        list(pool.map(touch, range(0, slab.numel(), step)))


def _registered(slab: torch.Tensor) -> torch.Tensor:
    """Register the pages with CUDA until the memory dies."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
    if error:
        raise BackendError(
            f"cudaHostRegister: got error {error} for {slab.numel()} bytes, expected pinned host memory; raise the "
            f"limit on locked memory (ulimit -l), or lower host_budget"
        )
    # The registration has to end before the pages are unmapped: the storage's finaliser runs first, since the tensor
    # that it is made of still holds them.
    weakref.finalize(slab.untyped_storage(), runtime.cudaHostUnregister, slab.data_ptr())
    return slab
