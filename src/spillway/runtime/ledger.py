"""What a pass has cost so far, counted while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Ledger:
    """The counters behind :class:`~spillway.records.StepStats`, of one pass. The mover and capture add to them."""

    saved_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    reused_bytes: int = 0
    stall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    _reused: set[int] = field(default_factory=set)

    def reuse(self, entry: int, nbytes: int) -> None:
        """Backward used an entry as it was; it counts once."""
        if entry not in self._reused:
            self._reused.add(entry)
            self.reused_bytes += nbytes

    def refuse(self, entry: int, nbytes: int, why: str) -> None:
        """An entry stays, since no tier could take it. It is kept, and using it is no reuse."""
        self.kept_bytes += nbytes
        self._reused.add(entry)
        self.note(f"kept on the device, since no tier could take it: {why}")

    def note(self, text: str) -> None:
        """Say once what was done otherwise than asked."""
        if text not in self.notes:
            self.notes.append(text)
