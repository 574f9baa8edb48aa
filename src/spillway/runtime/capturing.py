"""The runtime while a device's work is captured into a graph.

NOTE [ Captured work ]

What is queued while a graph is captured is not done. It is noted, and done each time that the graph is replayed,
without any of this code. So

* it may wait only for events of its own capture. What was queued before is over: torch waits for the device before a
  capture begins. And what an earlier capture noted has been replayed by then, since graphs that share tensors are
  replayed in the order in which they were captured. Such waits are left out;
* nobody may ask whether an event has been reached, and no time can be taken;
* what an earlier step left behind may die meanwhile. It is given back later (NOTE [ Handles die anywhere ]);
* memory cannot be registered meanwhile: slots come from slabs that are there, which the steps before the capture have
  left (torch asks for some of these, too). What does not fit stays on the device, and a note says so;
* its slots are its own for as long as the graph may be replayed. They are never handed out again, until
  ``Session.release_graphs`` says that the graphs are gone;
* so it shares no copy with what is not captured. That of an earlier step is given back when that step has ended, and a
  captured one holds nothing before the first replay. What both save of one tensor is copied by each;
* a capture must end with one stream: when a pass ends, compute waits for all copies out;
* host work cannot be part of it, so there is no disk.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spillway.errors import TierFullError, UnsupportedError
from spillway.events import Recorder
from spillway.runtime.arena import Arena, Block
from spillway.runtime.backend import Backend, Event, HostLane, Lane, Several, Task
from spillway.runtime.bytes import Bytes, Cells, Form
from spillway.runtime.ledger import Stalls
from spillway.runtime.mover import Mover
from spillway.runtime.tiers import HostTier, Tier


class CapturedEvent:
    """An event, and the capture that it is part of; ``None`` for what is over."""

    __slots__ = ("capture", "inner")

    def __init__(self, inner: Event | None, capture: int | None) -> None:
        self.inner = inner
        self.capture = capture

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is over, or no host can wait for it."""


class CapturingBackend(Backend):
    """A device as it is while its work is captured. See NOTE [ Captured work ].

    Args:
        inner: the device as it is otherwise.
        lanes: its lanes for copies, by their names.
    """

    def __init__(self, inner: Backend, lanes: dict[str, Lane]) -> None:
        super().__init__(inner.device)
        self._inner = inner
        self._lanes = lanes
        self.alignment = inner.alignment
        self.poisons = inner.poisons
        self.unified = inner.unified

    def is_capturing(self) -> bool:
        return self._inner.is_capturing()

    def may_wait(self) -> bool:
        """Waits that a capture does not allow are left out."""
        return True

    def compute(self) -> Lane:
        return self._inner.compute()

    def lane(self, name: str) -> Lane:
        return self._lanes[name]

    def record(self, lane: Lane) -> Event:
        capture = self._inner.capture_of(lane)
        return CapturedEvent(None if capture is None else self._inner.record_captured(lane), capture)

    def wait(self, lane: Lane, event: Event) -> None:
        if isinstance(event, Several):
            event.each(lambda one: self.wait(lane, one))
            return
        assert isinstance(event, CapturedEvent)
        now = self._inner.capture()
        if event.inner is None or now is None or event.capture != now:
            return
        # A lane for copies becomes part of the capture by waiting; another stream of compute's must not.
        if lane in self._lanes.values() or self._inner.capture_of(lane) == now:
            self._inner.wait(lane, event.inner)

    def timed_wait(self, lane: Lane, event: Event, stalls: Stalls) -> None:
        self.wait(lane, event)

    def copy(self, lane: Lane, destination: Bytes, source: Bytes) -> None:
        self._inner.copy(lane, destination, source)

    def convert(self, lane: Lane, destination: Cells, source: Cells) -> None:
        self._inner.convert(lane, destination, source)

    def host_lane(self, name: str, *, threads: int = 1, begin: Callable[[], None] | None = None) -> HostLane:
        raise UnsupportedError("got host work in a capture, expected it outside: a graph replays the device alone")

    def run(self, task: Task) -> Event:
        raise UnsupportedError(
            "got work for the host (the disk tier) while a graph is captured, expected copies alone, which a graph can "
            "repeat; use tier='host' inside of what is captured"
        )

    def empty(self, form: Form) -> torch.Tensor:
        return self._inner.empty(form)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        raise TierFullError("host memory: got a request for more while a graph is captured, expected none")

    def peak_bytes(self) -> int:
        return self._inner.peak_bytes()

    def close(self) -> None:
        """The device is closed by itself."""


class CapturedSlots:
    """Blocks of an arena that captured work has, for good. What a tier takes for an arena.

    Args:
        arena: where they come from.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._blocks: list[Block] = []

    def allocate(self, nbytes: int) -> Block:
        block = self._arena.allocate(nbytes, grows=False)
        # What was queued for these bytes before is over.
        block.after = ()
        self._blocks.append(block)
        return block

    def free(self, block: Block, after: tuple[Event, ...] = ()) -> None:
        """Replays will write there again."""

    def release(self) -> int:
        """Give all of them back; returns their bytes."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            self._arena.free(block)
        return sum(block.nbytes for block in blocks)


class CapturedRuntime:
    """The runtime of one device for what is captured.

    Args:
        inner: the device.
        lanes: its lanes for copies, by their names.
        arena: its host memory.
        nothing: what a tracker's data is.
        window: bytes that may be LEAVING, and bytes that may be RETURNING, at once.
        recorder: told of everything that happens.
    """

    def __init__(
        self,
        inner: Backend,
        lanes: dict[str, Lane],
        arena: Arena,
        nothing: torch.Tensor,
        *,
        window: int,
        recorder: Recorder | None,
    ) -> None:
        self.backend: Backend = CapturingBackend(inner, lanes)
        self.window = window
        self.nothing = nothing
        self.mover = Mover(self.backend, window=window, recorder=recorder)
        self._slots = CapturedSlots(arena)
        out, back = self.mover.lanes
        self._host = HostTier(self.backend, self._slots, out=out, back=back)

    def tier(self, name: str) -> Tier:
        """The host tier, for ``"host"`` and ``"auto"``."""
        if name == "disk":
            self.backend.run(lambda: None)
        return self._host

    def join(self) -> None:
        """Compute waits for all that is queued on the lanes: see NOTE [ Captured work ]."""
        compute = self.backend.compute()
        for lane in self.mover.lanes:
            self.backend.wait(compute, self.backend.record(lane))

    def release(self) -> int:
        """Give all slots back, of graphs that are gone; returns their bytes."""
        return self._slots.release()

    def close(self) -> None:
        """Stop."""
        self.mover.close()
