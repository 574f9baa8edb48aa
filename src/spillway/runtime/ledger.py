"""What a pass has cost so far, counted while it runs."""

from __future__ import annotations

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

    def note(self, text: str) -> None:
        """Say once what was done otherwise than asked."""
        if text not in self.notes:
            self.notes.append(text)
