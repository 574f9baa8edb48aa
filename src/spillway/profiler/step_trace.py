"""Traces one step of a model: when each block begins and ends, in forward and backward, and what is allocated then.

A block's backward begins when the gradient of its output is there, which a hook tells. It ends where the next one's
begins. For the first block, the gradient of its input tells, if it needs one. Within a block's backward, operators are
told apart by when each is given what it saved.

NOTE [ Bytes in flight ]

Streams carry bytes that are on the device and no part of what the program holds. How many changes only while the mover
works, and there is an instant before that and one after it. Between any two other instants the number is constant, so
it can be subtracted. Peaks while the mover works are the mover's, and do not count.

Copies of streamed parameters are no bytes of the program either. In backward, autograd frees each of them somewhere in
its block. So in the step whose bytes are counted they are held until the block's backward has ended.

The program may still hold bytes that streams have released, as the model holds the input of its stack of blocks. These
are subtracted, too: they go when the program releases them, and a plan that offloads nothing would not see them.

NOTE [ Held tensors ]

Autograd releases a tensor that a replay made when the operator's backward has run, and one that forward kept a little
later: NOTE [ The end of an operator ] in ``profile.py``. To measure both, the tracer holds the former in one call of
each kind, the last one, until the next node of the graph begins, or the next tensor is asked for. Hooks of the nodes
that may be next hold them, so that they go with the graph if a backward fails.

NOTE [ The CPU's clock ]

The CPU queues work ahead of the device, and may be the slower of the two. It is timed without the time of this tracer.
A CPU whose queue is full waits for the device, and is timed too long. So a step in which it is timed begins on an idle
device, and of several calls in two steps the shortest counts: in that call, the queue was not full. A queue of an H100
holds 1024 kernels, which a CPU queues in some 40 ms. So the device lags less than that in one of the two steps.

NOTE [ The device's clock ]

If the CPU is the slower of the two, the time between two instants on the device is the CPU's. To be timed, the device
is made to lag at the start of the first block, in forward and in backward, so that it has a queue to work off. A call
counts if the device was behind the CPU at its begin and its end. Before the first block nothing lags: a model that
reads a number from the device there makes the CPU wait, and would be timed too long.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from spillway._torch import current_node, node_number, tree_leaves
from spillway.checkpointing.tensors import is_plain
from spillway.planner.tasks import AFTER, BEFORE, MIDDLE, TaskBytes
from spillway.profiler.meter import Meter, Reading, meter_of

Place = tuple[str, int]
"""An instant: what happens, and to which call of a block."""
_BEHIND = 2e-4
"""Seconds by which the clocks of CPU and device may be apart."""


@dataclass(slots=True)
class CallTrace:
    """One call of a block."""

    name: str
    kind: Hashable
    shared: set[int] = field(default_factory=set)
    """Places of its tensors that an earlier call was given too."""
    given: dict[int, int] = field(default_factory=dict)
    """Bytes of its other tensors, by place."""
    released: set[int] = field(default_factory=set)
    """Places of those that were released before its backward had ended."""
    own_seconds: float = math.inf
    """CPU seconds of the block's own code, without the code that checkpoints it."""
    cached_bytes: int = 0
    """Bytes of casts of leaves that were made in it, and were alive when it returned."""
    streamed: tuple[int, ...] = ()
    """Bytes of each of its streamed parameters."""


@dataclass(slots=True)
class StepTrace:
    """The measurements of a step."""

    calls: list[CallTrace] = field(default_factory=list)
    readings: dict[Place, Reading] = field(default_factory=dict)
    carried: dict[Place, int] = field(default_factory=dict)
    """Bytes in flight."""
    host: dict[Place, float] = field(default_factory=dict)
    """Seconds on the CPU's clock, without the tracer's own."""
    order: list[Place] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    """Numbers of the calls that were replayed between the instants ``("again", n)`` and ``("ran", n)``."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """At ``("asked", n)``, the number of a call, and how many of its operators had run when it saved what is given."""
    held: set[int] = field(default_factory=set)
    """Numbers of calls in whose backward tensors were held: see NOTE [ Held tensors ]."""
    uncast: list[int] = field(default_factory=list)
    """Bytes of a block's cast that was released at the instant ``("uncast", n)``. They are still counted there."""
    queued: dict[Place, float] = field(default_factory=dict)
    """Seconds since the first instant on the CPU's clock."""
    has_host: bool = True
    """Whether the CPU's time is told apart from the device's."""

    def replays_of(self, number: int) -> list[tuple[Place, Place]]:
        """Begins and ends of the replays of a call, in order."""
        return [(("again", n), ("ran", n)) for n, whose in enumerate(self.replays) if whose == number]

    def level(self, place: Place) -> int:
        """Bytes allocated at an instant, without those in flight."""
        return self.readings[place].level - self.carried[place]

    def peak(self, since: Place, until: Place) -> int:
        """Most bytes between two instants, without those in flight. See NOTE [ Bytes in flight ]."""
        start, end = self.order.index(since), self.order.index(until)
        between = [place for place in self.order[start + 1 : end + 1] if place[0] != "moved"]
        return max((self.readings[place].peak - self.carried[place] for place in between), default=self.level(since))

    def first_move(self, since: Place, until: Place) -> Place:
        """When the bytes in flight first change between two instants; the second instant, if they do not."""
        start, end = self.order.index(since), self.order.index(until)
        return next((place for place in self.order[start + 1 : end] if place[0] == "moving"), until)

    def seconds(self, since: Place, until: Place) -> float:
        return self.readings[until].seconds - self.readings[since].seconds

    def work_seconds(self, since: Place, until: Place) -> float:
        """As :meth:`seconds`, without the time in which compute waited for copies of streamed parameters."""
        start, end = self.order.index(since), self.order.index(until)
        ends = [place for place in self.order[start : end + 1] if place[0] == "waited"]
        return self.seconds(since, until) - sum(
            self.seconds(("waiting", number), (what, number)) for what, number in ends
        )

    @property
    def step_peak(self) -> int:
        """Most bytes in the step. The peaks at its begin were before it."""
        return max(reading.peak for place, reading in self.readings.items() if place[0] != "begin")

    def tasks(self) -> tuple[TaskBytes, ...]:
        """The bytes in each task, in order, with those in flight."""
        names, replayed = [call.name for call in self.calls], [self.calls[number].name for number in self.replays]
        following = {("first", 0): AFTER, ("done", 0): ""}
        for number, name in enumerate(names):
            following |= {("forward", number): f"{name} forward", ("back", number): f"{name} backward"}
            following["end", number] = f"{names[number + 1]} forward" if number + 1 < len(names) else MIDDLE
        for number, name in enumerate(replayed):
            following |= {("again", number): f"{name} recomputation", ("ran", number): f"{name} backward"}
        found: list[TaskBytes] = []
        task, peak = BEFORE, 0
        for place in self.order[self.order.index(("begin", 0)) + 1 :]:
            reading = self.readings[place]
            peak = max(peak, reading.peak)
            if place in following:
                found.append(TaskBytes(task, peak, reading.level))
                task, peak = following[place], reading.level
        if ("first", 0) not in self.readings:
            # The first block's backward lasts to the end.
            found.append(TaskBytes(AFTER, peak, peak))
        return tuple(found)

    def is_behind(self, *places: Place) -> bool:
        """Whether the device was behind the CPU at these instants. See NOTE [ The device's clock ]."""
        return self.has_host and all(
            place in self.queued and self.readings[place].seconds - self.queued[place] > _BEHIND for place in places
        )

    def host_seconds(self, since: Place, until: Place) -> float:
        """The CPU's time between two instants. See NOTE [ The CPU's clock ]."""
        return self.host[until] - self.host[since] if self.has_host else 0.0


class _Used(list[torch.UntypedStorage]):
    """A list that can be referenced weakly."""


def queues(device: torch.device) -> bool:
    """Whether the CPU queues work there, and goes on."""
    return device.type not in ("cpu", "meta")


class StepTracer:
    """Marks the instants of a step. Once it is closed, it ignores the rest of the step's graph.

    Args:
        device: where the model computes.
        carried: gives the bytes that are in flight now.
        meter: that reads the instants. ``None``: the device's.
        times_host: whether the CPU is timed: see NOTE [ The CPU's clock ].
        lag: seconds by which the device is made to lag at the blocks: see NOTE [ The device's clock ].
        weighs: whether bytes are counted, so that copies of streamed parameters are held in backward.
    """

    def __init__(
        self,
        device: torch.device,
        carried: Callable[[], int],
        meter: Meter | None = None,
        *,
        times_host: bool = False,
        lag: float = 0.0,
        weighs: bool = False,
    ) -> None:
        self._meter = meter_of(device) if meter is None else meter
        if times_host:
            self._meter.wait()
        self._lag = lag
        self._times_host, self._weighs = times_host, weighs
        self._carried = carried
        self._held: list[torch.UntypedStorage] = []
        """Copies of the streamed parameters of the block whose backward runs."""
        self._used: Callable[[], _Used | None] = lambda: None
        self._node: int | None = None
        """Memory of tensors that a node was given, and the node's number: see NOTE [ Held tensors ]."""
        self._node_hooks: list[torch.utils.hooks.RemovableHandle] = []
        """Tell that the next node begins."""
        self._trace = StepTrace(has_host=queues(device))
        self._spent = 0.0
        self._begun: float | None = None
        self._running: list[int] = []
        """Replays that have not ended."""
        self._counts: Counter[str] = Counter()
        self._casts: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Casts of leaves that are alive."""
        self._cast_now: dict[int, int] = {}
        """Bytes of those that the running block has made."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Storages that blocks were given."""
        self._closed = False
        self.thread = threading.current_thread()
        """The thread whose steps are traced."""
        self._mark("begin", 0)

    @property
    def has_backward(self) -> bool:
        """Whether a backward has come through all the blocks."""
        return ("back", 0) in self._trace.carried

    def block_begins(
        self, name: str, kind: Hashable, inputs: tuple[object, ...], streamed: tuple[int, ...] = ()
    ) -> int:
        """A block is called, with streamed parameters of so many bytes each; gives the number of the call."""
        number = len(self._trace.calls)
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._trace.calls.append(CallTrace(name, kind, streamed=streamed))
        self._note_inputs(tensors, number)
        self._fall_behind("started")
        self._mark("forward", number)
        if number == 0:
            self._mark_at_gradient(tensors, "first", 0)
        return number

    def block_ended(self, number: int, output: object) -> None:
        if self._closed:
            return
        self._mark("end", number)
        calls = self._trace.calls
        calls[number].cached_bytes = sum(self._cast_now.values())
        self._cast_now.clear()
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if number == len(calls) - 1 and not any(tensor.requires_grad for tensor in tensors):
            # A frozen block saves nothing, and has no backward: it is a part of what comes before the others.
            self._forget(number)
        else:
            self._mark_at_gradient(tensors, "back", number)

    def block_ran(self, number: int, seconds: float) -> None:
        """Its own code has run, and took the CPU so many seconds."""
        if not self._closed:
            self._trace.calls[number].own_seconds = seconds

    def replay_begins(self, number: int) -> None:
        """A call is replayed, or a part of it."""
        if self._closed:
            return
        self._mark("again", len(self._trace.replays))
        self._trace.replays.append(number)
        self._running.append(len(self._trace.replays) - 1)

    def replay_ended(self, number: int) -> None:
        if not self._closed:
            self._mark("ran", self._running.pop())

    def leave(self) -> None:
        """The forward is over, and other passes come before its backward."""
        self._mark("left", 0)

    def come_back(self) -> None:
        self._mark("back again", 0)

    def asked(self, number: int, place: int, tensor: torch.Tensor | None = None) -> None:
        """A block's backward is given what it saved after so many operators: a tensor, if a replay made it."""
        if self._closed:
            return
        node = current_node()
        if (None if node is None else node_number(node)) != self._node:
            self._let_go(self._used())
        self._trace.asked.append((number, place))
        self._mark("asked", len(self._trace.asked) - 1)
        if self._weighs and tensor is not None:
            self._hold(number, tensor)

    def _hold(self, number: int, tensor: torch.Tensor) -> None:
        """See NOTE [ Held tensors ]."""
        trace, node = self._trace, current_node()
        kind, before, after = trace.calls[number].kind, trace.calls[:number], trace.calls[number + 1 :]
        is_last = not any(call.kind == kind for call in after) and any(call.kind == kind for call in before)
        if not is_last or node is None or not is_plain(tensor):
            return
        trace.held.add(number)
        used, own = self._used(), node_number(node)
        if used is None or own != self._node:
            used, self._node = _Used(), own
            self._used, following = weakref.ref(used), [each for each, _ in node.next_functions if each is not None]
            self._node_hooks += [each.register_prehook(lambda _, it=used: self._let_go(it)) for each in following]
        used.append(tensor.untyped_storage())

    def casts(self, storage: torch.UntypedStorage) -> None:
        """A block has cast a leaf to this."""
        key = id(storage)
        self._cast_now[key] = storage.nbytes()
        self._casts[key] = weakref.ref(storage, partial(self._is_uncast, key, storage.nbytes()))

    def moves(self, begins: bool) -> None:
        """The mover begins its work, or has ended it. See NOTE [ Bytes in flight ]."""
        if not self._closed:
            self._mark("moving" if begins else "moved", self._counts["moves"])
            self._counts["moves"] += not begins

    def waits(self, *, begins: bool) -> None:
        """Compute waits for copies of streamed parameters."""
        if self._times_host and not self._closed:
            self._mark("waiting" if begins else "waited", self._counts["waits"])
            self._counts["waits"] += not begins

    def rests(self, *, begins: bool) -> None:
        """Copies of streamed parameters are about to be freed, or have been."""
        if self._weighs:
            self.moves(begins)

    def holds(self, copies: Sequence[torch.UntypedStorage]) -> None:
        """A replay is over, and autograd has these copies of streamed parameters."""
        if self._weighs and not self._closed:
            self._held += copies

    def _let_go(self, *held: list[torch.UntypedStorage] | None) -> None:
        """Free what is held only to be counted."""
        if any(held):
            self.moves(True)
            for each in held:
                if each is not None:
                    each.clear()
            self.moves(False)
        self._leave_node()

    def _leave_node(self) -> None:
        self._node = None
        for hook in self._node_hooks:
            hook.remove()
        self._node_hooks.clear()

    def finish(self) -> StepTrace:
        """The step has ended. Waits for the device."""
        self._let_go(self._held, self._used())
        self._mark("done", 0)
        trace = self._trace
        trace.readings = dict(zip(trace.order, self._meter.finish(), strict=True))
        self.close()
        # If an instant came twice, the last one counts, and the peak is that of both.
        trace.order = list(dict.fromkeys(reversed(trace.order)))[::-1]
        return trace

    def close(self) -> None:
        """Remove all hooks, and measure nothing any more."""
        self._closed = True
        self._held.clear()
        self._meter.close()
        self._leave_node()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._inputs.clear()

    def _is_uncast(self, key: int, nbytes: int, _: weakref.ref[torch.UntypedStorage]) -> None:
        del self._casts[key]
        is_within_block = self._cast_now.pop(key, None) is not None
        if not self._closed and not is_within_block:
            self._mark("uncast", len(self._trace.uncast))
            self._trace.uncast.append(nbytes)

    def _forget(self, number: int) -> None:
        """The last call was of a frozen block: its instants get another name."""
        trace = self._trace
        trace.calls.pop()
        for what in ("forward", "end"):
            place = ("frozen", self._counts["frozen"])
            self._counts["frozen"] += 1
            trace.order[trace.order.index((what, number))] = place
            trace.carried[place] = trace.carried.pop((what, number))
            trace.host[place] = trace.host.pop((what, number))
            trace.queued[place] = trace.queued.pop((what, number))

    def _note_inputs(self, tensors: list[torch.Tensor], number: int) -> None:
        call, end = self._trace.calls[number], ("back", number - 1) if number else ("first", 0)

        def released(key: int, place: int, died: weakref.ref[torch.UntypedStorage]) -> None:
            # There may be another object of the same number.
            if self._inputs.get(key) is died:
                del self._inputs[key]
            if not self._closed and end not in self._trace.carried:
                call.released.add(place)

        for place, tensor in enumerate(tensors):
            storage = tensor.untyped_storage()
            key = id(storage)
            known = self._inputs.get(key)
            if known is not None and known() is storage:
                call.shared.add(place)
            else:
                call.given[place] = storage.nbytes()
                self._inputs[key] = weakref.ref(storage, partial(released, key, place))

    def _mark_at_gradient(self, tensors: list[torch.Tensor], what: str, number: int) -> None:
        tensor = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if tensor is not None:
            hook = tensor.register_hook(lambda _: self._on_gradient(what, number))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _on_gradient(self, what: str, number: int) -> None:
        if self._closed or (what, number) in self._trace.carried:
            return
        self._let_go(self._held, self._used())
        if what == "back":
            self._fall_behind("turned")
        self._mark(what, number)

    def _fall_behind(self, what: str) -> None:
        """Have the device lag from here on, if it does not yet: the instant before that is marked, too."""
        if self._lag and (what, 0) not in self._trace.carried:
            self._mark(what, 0)
            self._meter.lag(self._lag)

    def _mark(self, what: str, number: int) -> None:
        now = time.perf_counter()
        self._meter.mark()
        trace, place = self._trace, (what, number)
        trace.order.append(place)
        trace.carried[place] = self._carried() + sum(each.nbytes() for each in self._held)
        trace.host[place] = now - self._spent
        self._begun = now if self._begun is None else self._begun
        trace.queued[place] = now - self._begun
        self._spent += time.perf_counter() - now
