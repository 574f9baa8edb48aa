"""The runtime of one device: its backend, arena, mover and tiers. Work that is captured into a graph has another.

NOTE [ Captured work ]

Work queued during a capture is recorded, and runs at each replay of the graph, without any of this code. So

* it waits only for events of its own capture. Other waits are left out. Work queued before is over: torch waits for the
  device before a capture. Work of an earlier capture has been replayed: graphs that share tensors are replayed in the
  order of their capture;
* no event can be queried, and no time measured;
* handles of an earlier step may die during a capture. They are processed later (NOTE [ Handles die anywhere ]);
* no memory can be registered. Slots come from slabs that the steps before the capture have left, and belong to their
  graph until ``Session.release_graphs``;
* a captured copy is shared only within the capture. A copy of an earlier step is freed when that step has ended, and a
  captured one is empty before the first replay;
* a capture must end on one stream: when a pass ends, compute waits for all copies out;
* host work cannot be captured, so there is no disk tier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from spillway.errors import BackendError, TierFullError, UnsupportedError
from spillway.runtime.arena import Arena, Block
from spillway.runtime.backend import Backend, Event, HostQueue, Several, Stalls, Stream, Task, quiet
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.mover import Mover
from spillway.runtime.tiers import DirectDiskTier, DiskTier, HostTier, Tier
from spillway.types import Recorder

if TYPE_CHECKING:
    from spillway.runtime.spill_file import SpillFile

# The other backend is imported where it is needed.

Runtime: TypeAlias = "DeviceRuntime | CapturedRuntime"


class DeviceRuntime:
    """The runtime of one device. ``window`` limits the bytes that may be LEAVING, and RETURNING, at once."""

    def __init__(
        self,
        backend: Backend,
        file: Callable[[], SpillFile],
        *,
        window: int,
        host_budget: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.backend = backend
        self.arena = Arena(backend.host_slab, capacity=host_budget)
        self.mover = Mover(backend, window=window, recorder=recorder)
        self.nothing = torch.empty(0, device=backend.device)
        """An empty tensor on the device: the data of every tracker."""
        self.spill_file = file
        """Gives the session's spill file, made on first use. Raises ``SpillPathError`` if none can be made."""
        self.recorder = recorder
        self._tiers: dict[str, Tier] = {}
        self._captured: CapturedRuntime | None = None

    def tier(self, name: str) -> Tier:
        """The tier ``"host"`` or ``"disk"``; ``"auto"`` is CPU memory for an accelerator, and disk for the CPU."""
        tier = self._tiers.get(name)
        if tier is None:
            out, back = self.mover.streams
            if name == "auto":
                tier = self.tier("disk" if self.backend.device.type == "cpu" else "host")
            elif name == "host":
                tier = HostTier(self.backend, self.arena, out=out, back=back)
            else:
                limit, file = self.mover.window, self.spill_file()
                make = DirectDiskTier if self.backend.direct_disk else DiskTier
                tier = make(self.backend, self.arena, file, out=out, back=back, staging=limit)
            self._tiers[name] = tier
        return tier

    def join(self) -> None:
        """Nothing has to be waited for."""

    def captured(self) -> Runtime:
        if self._captured is None:
            self._captured = CapturedRuntime(self)
        return self._captured

    def release_graphs(self) -> int:
        return 0 if self._captured is None else self._captured.release()

    def used_host_bytes(self) -> int:
        self.mover.read_notes()
        with quiet():
            return self.arena.used_bytes

    def synchronize(self) -> None:
        with self.mover.exclusive():
            for tier in set(self._tiers.values()):
                tier.synchronize()

    def trim(self) -> int:
        with self.mover.exclusive():
            return self.arena.trim() + sum(tier.trim() for tier in set(self._tiers.values()))

    def close(self) -> None:
        """Stop. Offloaded bytes are lost."""
        if self._captured is not None:
            self._captured.close()
        self.mover.close()
        self.backend.close()
        self._tiers.clear()
        self.arena.close()


@dataclass(eq=False, slots=True)
class CapturedEvent:
    """An event and its capture; ``None`` for an event that is over."""

    inner: Event | None
    capture: int | None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is over, or the CPU cannot wait for it."""


class CapturingBackend(Backend):
    """A device's backend during a capture. See NOTE [ Captured work ]."""

    def __init__(self, inner: Backend, streams: dict[str, Stream]) -> None:
        super().__init__(inner.device)
        self._inner = inner
        self._streams = streams
        self.alignment = inner.alignment
        self.poisons = inner.poisons
        self.unified = inner.unified

    def is_capturing(self) -> bool:
        return self._inner.is_capturing()

    def may_wait(self) -> bool:
        """Always: `wait` leaves out the waits that a capture does not allow."""
        return True

    def compute(self) -> Stream:
        return self._inner.compute()

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        return self._streams[name]

    def record(self, stream: Stream) -> Event:
        capture = self._inner.capture_of(stream)
        return CapturedEvent(None if capture is None else self._inner.record_untimed(stream), capture)

    def wait(self, stream: Stream, event: Event) -> None:
        if isinstance(event, Several):
            event.each(lambda one: self.wait(stream, one))
            return
        assert isinstance(event, CapturedEvent)
        now = self._inner.capture()
        if event.inner is None or now is None or event.capture != now:
            return
        # A stream for copies joins the capture by waiting. Another compute stream must not.
        if stream in self._streams.values() or self._inner.capture_of(stream) == now:
            self._inner.wait(stream, event.inner)

    def timed_wait(self, stream: Stream, event: Event, stalls: Stalls) -> None:
        self.wait(stream, event)

    def copy(self, stream: Stream, destination: Bytes, source: Bytes) -> None:
        self._inner.copy(stream, destination, source)

    def convert(self, stream: Stream, destination: Cells, source: Cells) -> None:
        self._inner.convert(stream, destination, source)

    def host_queue(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostQueue:
        raise UnsupportedError("got host work in a capture, expected it outside: a graph replays the device alone")

    def run(self, task: Task) -> Event:
        raise UnsupportedError(
            "got work for the host (the disk tier) while a graph is captured, expected copies alone, which a graph can "
            "repeat; use tier='host' inside of what is captured"
        )

    def empty(self, nbytes: int) -> Bytes:
        return self._inner.empty(nbytes)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        raise TierFullError("host memory: got a request for more while a graph is captured, expected none")

    def peak_bytes(self) -> int:
        return self._inner.peak_bytes()

    def close(self) -> None:
        """The device closes its own backend."""


class CapturedTier(HostTier):
    """Blocks of CPU memory that belong to captured graphs."""

    def __init__(self, backend: Backend, arena: Arena, *, out: Stream, back: Stream) -> None:
        super().__init__(backend, arena, out=out, back=back)
        self._blocks: list[Block] = []

    def reserve(self, source: Bytes) -> Block:
        block = self._arena.allocate(source.nbytes, grows=False)
        # Work queued before for these bytes is over.
        block.after = ()
        self._blocks.append(block)
        return block

    def free(self, slot: Block) -> None:
        """Keep it: replays will write there again."""

    def release(self) -> int:
        """Free all blocks, of graphs that are gone; returns their bytes."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            self._arena.free(block)
        return sum(block.nbytes for block in blocks)


class CapturedRuntime:
    """The runtime of one device for captured work, beside its other runtime."""

    def __init__(self, outside: DeviceRuntime) -> None:
        out, back = outside.mover.streams
        self.backend: Backend = CapturingBackend(outside.backend, {"out": out, "back": back})
        self.nothing = outside.nothing
        self.mover = Mover(self.backend, window=outside.mover.window, recorder=outside.recorder)
        self._host = CapturedTier(self.backend, outside.arena, out=out, back=back)

    def tier(self, name: str) -> Tier:
        """The host tier, for ``"host"`` and ``"auto"``."""
        if name == "disk":
            self.backend.run(lambda: None)
        return self._host

    def join(self) -> None:
        """Compute waits for everything queued on the streams: see NOTE [ Captured work ]."""
        compute = self.backend.compute()
        for stream in self.mover.streams:
            self.backend.wait(compute, self.backend.record(stream))

    def release(self) -> int:
        return self._host.release()

    def close(self) -> None:
        self.mover.close()


def backend_for(device: torch.device, *, streams: Mapping[str, torch.Stream] | None = None) -> Backend:
    """The backend of a device, on the user's ``streams`` if there are any. Raises ``BackendError`` if there is none."""
    if device.type == "cpu":
        from spillway.runtime.cpu import CpuBackend

        return CpuBackend(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        from spillway.runtime.accelerator import AcceleratorBackend

        return AcceleratorBackend(device, streams=streams)
    raise BackendError(
        f"A saved tensor is on {device}, and no backend serves that device here. Spillway serves the CPU"
        f"{f' and {accelerator}' if accelerator else ''}. Keep the tensor with spillway.keep(), or give Session a "
        "backend."
    )
