"""What a pass has cost so far, counted while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


class Stall(Protocol):
    """A wait of compute for a lane, on a clock of the device's that may still be running."""

    def seconds(self) -> float | None:
        """How long it was; ``None`` if it is not over. Never blocks."""
        ...


@dataclass(slots=True, eq=False)
class Stalls:
    """The waits of compute for one lane."""

    known_seconds: float = 0.0
    """The sum of those that are over and counted."""
    pending: list[Stall] = field(default_factory=list)
    """Those that may not be."""

    def seconds(self) -> float:
        """The sum of those that are over."""
        unknown = []
        for stall in self.pending:
            seconds = stall.seconds()
            if seconds is None:
                unknown.append(stall)
            else:
                self.known_seconds += seconds
        self.pending = unknown
        return self.known_seconds


@dataclass(slots=True, eq=False)
class Ledger:
    """The counters behind :class:`~spillway.records.StepStats`, of one pass. The mover and capture add to them."""

    saved_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    reused_bytes: int = 0
    recomputed_bytes: int = 0
    out: Stalls = field(default_factory=Stalls)
    back: Stalls = field(default_factory=Stalls)
    notes: list[str] = field(default_factory=list)
    groups: dict[str, Ledger] = field(default_factory=dict)
    """Of groups by their names: what is counted there is not counted here."""

    def of_group(self, name: str) -> Ledger:
        """The ledger of what is saved in groups of a name. Its notes are here."""
        ledger = self.groups.get(name)
        if ledger is None:
            ledger = self.groups[name] = Ledger(notes=self.notes)
        return ledger

    def total(self) -> Ledger:
        """This and the groups together."""
        parts = (self, *self.groups.values())
        total = Ledger(notes=self.notes)
        for part in parts:
            total.saved_bytes += part.saved_bytes
            total.kept_bytes += part.kept_bytes
            total.offloaded_bytes += part.offloaded_bytes
            total.reloaded_bytes += part.reloaded_bytes
            total.reused_bytes += part.reused_bytes
            total.recomputed_bytes += part.recomputed_bytes
            total.out.known_seconds += part.out.seconds()
            total.back.known_seconds += part.back.seconds()
        return total

    def note(self, text: str) -> None:
        """Say once what was done otherwise than asked."""
        if text not in self.notes:
            self.notes.append(text)

    def note_unused(self, selectors: Iterable[object]) -> None:
        """Say of selectors of a region that they decided nothing."""
        for selector in selectors:
            self.note(f"{selector!r} decided nothing: it names no operator that ran, or others do, too")
