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

from spillway.units import format_bytes, format_html, format_seconds


class Decision(enum.Enum):
    """The decision about one saved tensor, or about one operator's output."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """To the tier that the context was given."""
    OFFLOAD_HOST = "offload-host"
    """To CPU memory."""
    OFFLOAD_DISK = "offload-disk"
    RECOMPUTE = "recompute"
    """Dropped, and recomputed in backward. Only for outputs inside a checkpointed block or function."""


class SavedTensor(NamedTuple):
    """The facts about a tensor at the moment autograd saves it: a policy's only input.

    A named tuple rather than a frozen dataclass, because one is made for every saved tensor and a tuple is made four
    times faster.
    """

    nbytes: int
    """Bytes that would be offloaded: of the whole storage, or of the part of it that the tensor reaches."""
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    position: int
    """Its place among the distinct storages saved in this forward pass, from 0."""
    tag: str | None
    """The tag of the ``offload`` context."""
    offloaded_bytes: int
    """Bytes that this pass has chosen to offload so far."""
    total_bytes: int | None
    """Bytes that the last pass like this one saved, or ``None`` in the first."""
    module: str | None = None
    """Dotted path of the module whose forward saved it, if the policy asked for modules (else ``None``)."""
    operator: str | None = None
    """Name of the torch function that saved it, if the policy asked for operators (else ``None``)."""
    part_of: type[torch.Tensor] | None = None
    """The wrapper subclass (``DTensor``, a quantised one) that it is a part of; ``None`` for a plain tensor."""
    group: str | None = None
    """Name of the group that it is saved in, if in one."""


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Bytes and seconds of the groups of one name in a finished pass. :class:`StepStats` explains and includes them."""

    name: str
    saved_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    reused_bytes: int = 0
    stall_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepStats:
    """Bytes and seconds of one finished pass through an ``offload`` context, forward and backward.

    A storage counts once, however many saved tensors share it.
    """

    saved_bytes: int = 0
    """Distinct bytes that autograd saved in forward, and that can be offloaded: no parameters."""
    kept_bytes: int = 0
    """Saved bytes that were kept: by decision, as too small, or because a tier was full."""
    offloaded_bytes: int = 0
    """Saved bytes that were offloaded."""
    reloaded_bytes: int = 0
    """Bytes that were copied back for backward."""
    reused_bytes: int = 0
    """Bytes that backward used without a copy back: still on their way out, or alive for another reason."""
    recomputed_bytes: int = 0
    """Bytes that were recomputed in backward."""
    host_bytes: int = 0
    """CPU memory that the session has reserved, in use or free."""
    disk_bytes: int = 0
    """Disk space that the session has reserved, in use or free."""
    stall_seconds: float = 0.0
    """Time that compute stalled for copies: the two below together."""
    out_stall_seconds: float = 0.0
    """Time that compute stalled at the in-flight limit, by the device's own clock if it has one."""
    back_stall_seconds: float = 0.0
    """Time that compute stalled for a tensor that backward asked for."""
    peak_bytes: int = 0
    """Peak of the device's allocated bytes, or of the process's resident bytes on the CPU, since the process began or
    since the peak was last reset."""
    notes: tuple[str, ...] = ()
    """Differences from the options, and why: a tier that was full, a device where offloading gains nothing."""
    malloc: str = ""
    """How the C library's ``malloc`` is set, if the session works in CPU memory."""
    groups: tuple[GroupStats, ...] = ()
    """Statistics of groups, in the order in which their names came."""

    def _repr_html_(self) -> str:
        shown = ("saved_bytes", "kept_bytes", "offloaded_bytes", "recomputed_bytes", "stall_seconds")
        names = [each.name for each in fields(self) if each.name not in (*shown, "notes", "malloc", "groups")]
        first = ", ".join(f"{name.partition('_')[0]} {_shown(getattr(self, name), name)}" for name in shown)
        others = [f"{name:<20} {_shown(getattr(self, name), name):>12}" for name in names]
        return format_html("\n".join([first, *others, *self.notes]))

    @classmethod
    def together(cls, passes: Iterable[StepStats]) -> StepStats:
        """The statistics of several passes as of one, such as a step's micro-batches. Session-wide values count once.

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


def _shown(value: float, name: str) -> str:
    return format_seconds(value) if name.endswith("_seconds") else format_bytes(value)


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


@dataclass(frozen=True, slots=True)
class OptimizerStats:
    """Bytes and seconds of one step of an :class:`~spillway.OffloadedOptimizer`."""

    stepped_on_host: int = 0
    """Elements of the parameters that the CPU stepped."""
    streamed: int = 0
    """Elements that the GPU stepped with state that was copied in for the step."""
    host_seconds: float = 0.0
    """Time of the CPU's work, without its stalls for gradients."""
    stall_seconds: float = 0.0
    """Time that the GPU stalled for copies of gradients and parameters."""
    sent_bytes: int = 0
    """Bytes copied from the GPU between the ends of the last step and of this one."""
    received_bytes: int = 0
    """Bytes copied to the GPU."""
    host_bytes: int = 0
    """Pinned CPU memory that the session has reserved, in use or free."""
    read_bytes: int = 0
    """Bytes of state read from the spill file."""
    written_bytes: int = 0
    """Bytes of state written to the spill file."""


class EventKind(enum.Enum):
    """An event of one storage."""

    LEAVE = "leave"
    """Its copy out was queued."""
    RELEASE = "release"
    """Its bytes on the device were released."""
    RETURN = "return"
    """Its copy back was queued."""
    TAKE = "take"
    """Backward got it after its copy back."""
    REUSE = "reuse"
    """Backward got it without a copy back."""
    DROP = "drop"
    """Its last handle died, and all that it held was released."""
    REFUSE = "refuse"
    """No tier could take it: it is kept."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of one storage."""

    kind: EventKind
    entry: int
    """A number that names the storage, unique for its device (and captured graph) in its session."""
    nbytes: int
    seconds: float = field(default_factory=time.perf_counter, compare=False)
    """The time, on the clock of ``time.perf_counter``."""


Recorder = Callable[[Event], None]


@dataclass(slots=True)
class EventList:
    """A recorder that keeps all events, in order.

    Example:
        >>> events = EventList()
        >>> session = spillway.Session(recorder=events)  # doctest: +SKIP
    """

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def schedule(self) -> list[tuple[str, int]]:
        """Kinds and storages alone."""
        return [(event.kind.value, event.entry) for event in self.events]
