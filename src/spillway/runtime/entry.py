r"""One storage's life in Spillway.

NOTE [ One storage's life ]

An :class:`Entry` is a storage that autograd saved, or the part of one that the saved tensors reach. ::

    RESIDENT --put--> LEAVING --settle--> AWAY --fetch--> RETURNING --take--> RESIDENT
        \________________________ drop, from anywhere ________________________/

While it is RESIDENT or LEAVING the entry holds the storage, so taking it costs nothing. It is *settled* when the
window is full and it is the oldest: the compute lane waits for its copy, and only then is the storage let go, so that
whoever gets those bytes next, gets them after the copy has read them. Settling goes by program order alone, never by
what happens to be done: the peak of a step does not depend on timing.

After RETURNING the entry holds the storage until each of its live handles has asked for it once: out once, back at
most once per backward, with ``retain_graph`` too. Then it keeps only a weak reference, and the slot: should the
storage die and be asked for again, it is fetched again. A storage that is still alive is simply used again.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable

import torch

from spillway.runtime.backend import Event, Lane
from spillway.runtime.bytes import Bytes, Form
from spillway.runtime.ledger import Ledger
from spillway.runtime.tiers import Slot, Tier


class State(enum.Enum):
    """Where the bytes of an entry are. See NOTE [ One storage's life ]."""

    RESIDENT = enum.auto()
    """On the device, and nothing is under way."""
    LEAVING = enum.auto()
    """On the device; the copy out is queued, or will be when the window wants the room."""
    AWAY = enum.auto()
    """In a slot of a tier only, as far as the entry knows."""
    RETURNING = enum.auto()
    """In the slot, and a copy back is queued."""


class Entry:
    """One storage's life. Changed by the mover alone.

    Args:
        number: names the storage, unique within its session.
        storage: where the bytes are.
        start: first byte of the storage that belongs to the entry.
        nbytes: how many do.
        ledger: counts what becomes of it.
    """

    __slots__ = (
        "__weakref__",
        "alive",
        "asked",
        "copied",
        "counted",
        "form",
        "handles",
        "lane",
        "ledger",
        "low",
        "made",
        "mover",
        "nbytes",
        "number",
        "round",
        "slot",
        "source",
        "start",
        "state",
        "storage",
        "tier",
    )

    def __init__(self, number: int, storage: torch.UntypedStorage, start: int, nbytes: int, ledger: Ledger) -> None:
        self.number = number
        self.nbytes = nbytes
        self.start = start
        self.form: Form | None = None
        """What a tensor looks like that covers the storage from end to end, if such a tensor was saved."""
        self.state = State.RESIDENT
        self.storage: torch.UntypedStorage | None = storage
        """Held while the bytes must not die."""
        self.alive: Callable[[], torch.UntypedStorage | None] = weakref.ref(storage)
        """Where the bytes were last seen on the device."""
        self.source: Bytes | None = None
        """What a copy out reads, while it is under way."""
        self.low = 0
        """Bytes of the original storage that come before the first byte of ``alive``: ``start`` once it came back."""
        self.made: torch.Tensor | None = None
        """The tensor in ``form`` that ``storage`` came back as."""
        self.mover: object = None
        """The mover that has seen it, and the only one that may move it."""
        self.tier: Tier | None = None
        self.slot: Slot | None = None
        self.copied: Event | None = None
        """The end of the copy under way."""
        self.lane: Lane | None = None
        """The compute lane that the destination was allocated on."""
        self.ledger = ledger
        self.counted = False
        """Whether the ledger has it among what was reused or refused."""
        self.handles = 1
        """Handles alive."""
        self.asked = 0
        """Handles alive that asked since the storage last came back."""
        self.round = 0
        """How often it came back."""

    def has_not_left(self) -> bool:
        """Whether its bytes are on the device since they were saved, or since they were asked for."""
        return self.state in (State.RESIDENT, State.LEAVING)

    def let_go(self) -> None:
        """Hold the bytes no longer."""
        self.storage = self.made = self.source = None

    def __repr__(self) -> str:
        return f"Entry {self.number} ({self.nbytes} bytes, {self.state.name})"
