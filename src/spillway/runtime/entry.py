r"""One storage's life in Spillway, and the byte counters of a pass.

NOTE [ One storage's life ]

An :class:`Entry` is a storage that autograd saved, or the part of one that the saved tensors reach. ::

    RESIDENT --put--> LEAVING --release--> AWAY --fetch--> RETURNING --take--> RESIDENT
        \________________________ drop, from anywhere _________________________/

While it is RESIDENT or LEAVING, the entry holds the storage, so taking it costs nothing. The oldest LEAVING entry is
*released* when the in-flight limit is reached. The compute stream waits for its copy, and only then the storage is
let go: the next owner of those bytes gets them after the copy has read them. Entries are released in program order,
never by what happens to be done, so the peak of a step does not depend on timing.

Three verbs free something. To *release* an entry is to stop holding its bytes on the device, once no copy uses them. To
*drop* it is to forget it with its last handle. To *free* a slot, a block or an extent is to give its place back.

After RETURNING the entry holds the storage until each live handle has asked for it once. So a storage is offloaded once
and reloaded at most once per backward, with ``retain_graph`` too. After that the entry keeps a weak reference and the
slot. If the storage dies and a handle asks again, it is fetched again. A storage that is still alive is used as it is.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from spillway.runtime.backend import Event, Stalls, Stream
from spillway.runtime.bytes import Bytes

if TYPE_CHECKING:
    from spillway.runtime.mover import Mover
    from spillway.runtime.tiers import Slot, Tier

GROUP_BYTES = ("saved_bytes", "kept_bytes", "offloaded_bytes", "reloaded_bytes", "reused_bytes")
STEP_BYTES = (*GROUP_BYTES, "recomputed_bytes")


@dataclass(slots=True, eq=False)
class ByteCounters:
    """The counters of one pass, behind :class:`~spillway.types.StepStats`."""

    saved_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    reused_bytes: int = 0
    recomputed_bytes: int = 0
    out: Stalls = field(default_factory=Stalls)
    back: Stalls = field(default_factory=Stalls)
    notes: list[str] = field(default_factory=list)
    groups: dict[str, ByteCounters] = field(default_factory=dict)
    """Counters of groups, by name. Bytes counted there are not counted here."""

    def of_group(self, name: str) -> ByteCounters:
        """The counters of the groups of one name. They share the notes."""
        return self.groups.setdefault(name, ByteCounters(notes=self.notes))

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        return {name: getattr(self, name) for name in names}

    def total(self) -> ByteCounters:
        parts = (self, *self.groups.values())
        total = ByteCounters(**{name: sum(getattr(part, name) for part in parts) for name in STEP_BYTES})
        total.notes = self.notes
        total.out.known_seconds = sum(part.out.seconds() for part in parts)
        total.back.known_seconds = sum(part.back.seconds() for part in parts)
        return total

    def note(self, text: str) -> None:
        """Add a note, once, about a difference from what was asked."""
        if text not in self.notes:
            self.notes.append(text)

    def note_unused(self, selectors: Iterable[object]) -> None:
        """Note selectors that matched no operator of a checkpointed block."""
        for selector in selectors:
            self.note(f"{selector!r} decided nothing: it names no operator that ran, or others do, too")


class State(enum.Enum):
    """The place of an entry's bytes. See NOTE [ One storage's life ]."""

    RESIDENT = enum.auto()
    """On the device, and no copy is under way."""
    LEAVING = enum.auto()
    """On the device. The copy out is queued, or will be when later entries would exceed the limit."""
    AWAY = enum.auto()
    """In a slot of a tier only. The program may still hold the storage."""
    RETURNING = enum.auto()
    """In the slot, and a copy back is queued."""


class Entry:
    """``nbytes`` bytes of a storage from byte ``start``. Changed by the mover alone.

    ``number`` names it within its mover. ``ledger`` counts its bytes.
    """

    __slots__ = (
        "__weakref__",
        *("number", "storage", "start", "nbytes", "ledger", "state", "alive", "source", "mover"),
        *("tier", "slot", "copied", "stream", "counted", "handles", "asked", "round"),
    )

    def __init__(
        self, number: int, storage: torch.UntypedStorage, start: int, nbytes: int, ledger: ByteCounters
    ) -> None:
        self.number = number
        self.nbytes = nbytes
        self.start = start
        self.state = State.RESIDENT
        self.storage: torch.UntypedStorage | None = storage
        """Held while the bytes must not die."""
        self.alive: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        """Gives the storage that last had the bytes on the device, while it lives."""
        self.source: Bytes | None = None
        """The bytes that a copy out reads, while it is under way."""
        self.mover: Mover
        """The only one that may move it, once it has seen it."""
        self.tier: Tier | None = None
        self.slot: Slot | None = None
        self.copied: Event | None = None
        """The end of the copy under way."""
        self.stream: Stream | None = None
        """The compute stream that the destination was allocated on."""
        self.ledger = ledger
        self.counted = False
        """Whether it was counted as reused or refused."""
        self.handles = 1
        """Live handles."""
        self.asked = 0
        """Live handles that asked since the storage was last reloaded."""
        self.round = 0
        """How often it was reloaded."""

    def is_on_device(self) -> bool:
        """Whether its bytes are on the device since they were saved, or since they were asked for."""
        return self.state in (State.RESIDENT, State.LEAVING)

    def release(self) -> None:
        self.storage = self.source = None

    def __repr__(self) -> str:
        return f"Entry {self.number} ({self.nbytes} bytes, {self.state.name})"
