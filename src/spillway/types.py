"""Values that packages pass to each other: decisions, statistics and runtime events.

They hold no tensor, no stream and no file, and are immutable. A session's ``recorder`` is any callable from
:class:`Event` to nothing. It is called in the thread in which the event happened, under the runtime's lock: it must be
short and must not call Spillway.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch


class Decision(enum.Enum):
    """What becomes of one saved tensor, or of one operator's output."""

    KEEP = "keep"
    """It stays where it is."""
    OFFLOAD = "offload"
    """It leaves for the tier that the context was given."""
    OFFLOAD_HOST = "offload-host"
    """It leaves for host memory."""
    OFFLOAD_DISK = "offload-disk"
    """It leaves for the disk."""
    RECOMPUTE = "recompute"
    """It is dropped and computed again in backward. Only for what a recomputed region computes."""


class SavedTensor(NamedTuple):
    """What is known of a tensor at the moment autograd saves it: all that a policy decides from.

    A named tuple rather than a frozen dataclass, because one is made for every saved tensor and a tuple is made four
    times faster.
    """

    nbytes: int
    """Bytes that would leave: of the whole storage, or of the part of it that the tensor reaches."""
    shape: torch.Size
    """Its shape."""
    dtype: torch.dtype
    """Its dtype."""
    device: torch.device
    """Where it is."""
    position: int
    """Its place among the distinct storages saved in this pass, from 0."""
    tag: str | None
    """The tag of the ``offload`` context."""
    offloaded_bytes: int
    """Bytes that left in this pass so far."""
    total_bytes: int | None
    """Bytes that the last pass like this one saved, or ``None`` in the first."""
    module: str | None = None
    """Dotted path of the module whose forward saved it, if the policy asked for locations (else ``None``)."""
    operator: str | None = None
    """Name of the torch function that saved it, if the policy asked for operators (else ``None``)."""
    part_of: type[torch.Tensor] | None = None
    """The wrapper subclass (``DTensor``, a quantised one) that it is a part of; ``None`` for a plain tensor."""
    group: str | None = None
    """Name of the group that it is saved in, if in one."""


@dataclass(frozen=True, slots=True)
class SavedTensorReport:
    """One line of :func:`spillway.saved_tensors`: what autograd would save, and what would become of it."""

    nbytes: int
    """Bytes that would leave. 0 for an alias of bytes that are listed already."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    module: str
    """Dotted path of the module whose forward saved it; ``""`` is the model itself."""
    operator: str
    """The torch function that saved it, as ``torch.nn.functional.linear``."""
    moves: bool
    """Whether Spillway would move it."""
    reason: str
    """Why, or why not."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Bytes and seconds of the groups of one name in a finished pass. As in :class:`StepStats`, and counted there."""

    name: str
    """Of the groups."""
    saved_bytes: int = 0
    """Distinct bytes that autograd saved in them first."""
    kept_bytes: int = 0
    """Of these, what stayed."""
    offloaded_bytes: int = 0
    """Of these, what left."""
    reloaded_bytes: int = 0
    """What came back."""
    reused_bytes: int = 0
    """What had not left yet when backward asked for it."""
    stall_seconds: float = 0.0
    """Time that compute waited for them, out and back."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Bytes and seconds of one finished pass through an ``offload`` context, forward and backward.

    A storage counts once, however many saved tensors share it.
    """

    saved_bytes: int = 0
    """Distinct bytes that autograd saved, parameters left out."""
    kept_bytes: int = 0
    """Of these, what stayed by decision, or because no tier could take it."""
    offloaded_bytes: int = 0
    """Of these, what left."""
    reloaded_bytes: int = 0
    """What came back."""
    reused_bytes: int = 0
    """What had not left yet, or was still alive for another reason, when backward asked for it."""
    recomputed_bytes: int = 0
    """What was computed again in backward."""
    host_bytes: int = 0
    """Host memory reserved by the session, in use or free for use."""
    disk_bytes: int = 0
    """Disk space reserved by the session, in use or free for use."""
    stall_seconds: float = 0.0
    """Time that compute waited for a stream: the two below together."""
    out_stall_seconds: float = 0.0
    """Time that compute waited for room in the window out, by the device's own clock where it has one."""
    back_stall_seconds: float = 0.0
    """Time that compute waited for what it had asked for."""
    peak_bytes: int = 0
    """Peak of the device's allocated bytes, or of the process's resident bytes on the CPU, since the process began or
    since the peak was last reset."""
    notes: tuple[str, ...] = ()
    """What was done otherwise than asked, and why: a tier that was full, a device where nothing is to be gained."""
    malloc: str = ""
    """How the C library's ``malloc`` is set, where the session works in CPU memory; empty elsewhere."""
    groups: tuple[GroupStats, ...] = ()
    """What was saved in groups, by their names, in the order in which they came."""

    @classmethod
    def together(cls, passes: Iterable[StepStats]) -> StepStats:
        """Those of several passes as of one: of a step's micro-batches, say. What the session has counts once.

        Example:
            >>> StepStats.together([StepStats(saved_bytes=1), StepStats(saved_bytes=2)]).saved_bytes
            3
        """
        found = list(passes)
        total: dict[str, Any] = {}
        for item in fields(cls):
            values = [getattr(each, item.name) for each in found]
            if item.name == "notes":
                total["notes"] = tuple(dict.fromkeys(note for notes in values for note in notes))
            elif item.name == "groups":
                total["groups"] = _groups_together(group for groups in values for group in groups)
            else:
                total[item.name] = max(values, default=item.default) if item.name in _OF_SESSION else sum(values)
        return cls(**total)


@dataclass(frozen=True, slots=True)
class OptimizerStats:
    """Bytes and seconds of one step of an :class:`~spillway.OffloadedOptimizer`."""

    stepped_on_host: int = 0
    """Elements of the parameters that the host stepped."""
    streamed: int = 0
    """Elements that the device stepped with state that came for that."""
    host_seconds: float = 0.0
    """How long the host worked at it, waits for gradients not counted."""
    stall_seconds: float = 0.0
    """Time that the device waited, for gradients to leave and for parameters to come."""
    sent_bytes: int = 0
    """What left the device from the end of the step before to the end of this one."""
    received_bytes: int = 0
    """What came back."""
    host_bytes: int = 0
    """Pinned host memory reserved by the session, in use or free for use."""
    read_bytes: int = 0
    """Bytes of state read from the spill file."""
    written_bytes: int = 0
    """Bytes of state written there."""


_OF_SESSION = {"host_bytes", "disk_bytes", "peak_bytes", "malloc"}


def _groups_together(groups: Iterable[GroupStats]) -> tuple[GroupStats, ...]:
    by_name: dict[str, list[GroupStats]] = {}
    for group in groups:
        by_name.setdefault(group.name, []).append(group)
    names = [field.name for field in fields(GroupStats) if field.name != "name"]
    return tuple(
        GroupStats(name, **{each: sum(getattr(group, each) for group in alike) for each in names})
        for name, alike in by_name.items()
    )


class EventKind(enum.Enum):
    """What happened to a storage."""

    LEAVE = "leave"
    """Its copy out was queued."""
    RELEASE = "release"
    """Its bytes on the device were let go: it is away."""
    RETURN = "return"
    """Its copy back was queued."""
    TAKE = "take"
    """It was handed to backward after its copy back."""
    REUSE = "reuse"
    """It was handed to backward without a copy back: it had not left, or was still alive."""
    DROP = "drop"
    """Its last handle died, and all that it held was given back."""
    REFUSE = "refuse"
    """No tier could take it: it stays."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one storage."""

    kind: EventKind
    entry: int
    """A number that names the storage, unique within its session."""
    nbytes: int
    seconds: float = field(default_factory=time.perf_counter, compare=False)
    """When, on the clock of ``time.perf_counter``."""


Recorder = Callable[[Event], None]


@dataclass(slots=True)
class EventList:
    """A recorder that keeps all it hears, in order.

    Example:
        >>> events = EventList()
        >>> session = spillway.Session(recorder=events)  # doctest: +SKIP
    """

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def schedule(self) -> list[tuple[str, int]]:
        """Kinds and storages alone: what tests compare."""
        return [(event.kind.value, event.entry) for event in self.events]
