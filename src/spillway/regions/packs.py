"""What autograd saved in the first run of a region, in order, and what a re-run has given of it so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spillway.records import Decision
from spillway.regions.calls import Call
from spillway.regions.tensors import storage_bytes, tensors_in
from spillway.runtime.ledger import Ledger


class Pack:
    """One tensor that autograd saved in the first run."""

    __slots__ = ("decision", "place", "prints", "told", "values", "wanted")

    def __init__(self, place: int, values: tuple[int, ...]) -> None:
        self.place = place
        """How many operators had run."""
        self.values = values
        self.decision: Decision | None = None
        """What became of it, if that was decided when torch had been told of it."""
        self.told = False
        """Whether torch was told of it."""
        self.wanted = False
        """Whether it is to be computed again."""
        self.prints: list[torch.Tensor | None] | None = None
        """Its fingerprints, if they were taken."""


NOT_WANTED = Pack(0, ())
"""Any tensor that torch was not told of: kept, offloaded, or from outside."""


class Packs:
    """All that autograd saved in a first run.

    Args:
        stops_early: whether a re-run may end with the last tensor that is wanted.
    """

    def __init__(self, *, stops_early: bool) -> None:
        self.all: list[Pack] = []
        self.stops_early = stops_early
        self.outside: dict[int, int] = {}
        """Values from outside that autograd saved, and that are alive anyway: how many operators had run at last."""
        self.saves_at: list[int] = []
        """After how many operators autograd saved something for another operator than before: then what it saved for
        the earlier ones can leave. Only where somebody watches."""
        self.output_leaves: list[int] = []
        """Which of the tensors in the function's output are saved after it has returned, by our own doing."""

    def add(self, pack: Pack) -> None:
        self.all.append(pack)

    def is_last_written(self, calls: Sequence[Call]) -> bool:
        """Whether the last operator that saves something wanted writes it after it was saved (rrelu its noise)."""
        last = max((pack.place for pack in self.all if pack.wanted), default=len(calls))
        if last == len(calls):
            return False
        writes = calls[last].writes
        return any(not set(pack.values).isdisjoint(writes) for pack in self.all if pack.wanted and pack.place == last)

    def prints(self) -> list[torch.Tensor | None] | None:
        """The first run's fingerprints, ``None`` for each that could not be taken; ``None`` if none was."""
        prints: list[torch.Tensor | None] = []
        for pack in self.all:
            if pack.told:
                prints.extend([None] if pack.prints is None or not pack.wanted else pack.prints)
        return prints if any(each is not None for each in prints) else None


class Enough(BaseException):
    """A second run has made all that is wanted. No error of anybody's: what catches those in a function lets it go."""


class Collected:
    """What a re-run has given so far.

    Args:
        packs: what autograd saved in the first run.
        tell: takes the tensors, in order, when all are there.
        ends: whether the run is ended then, by :class:`Enough` (torch's own hook raises, if it ends it).
        stops_early: whether the run ends with the last tensor that is wanted, whatever the region's options say.
        ledger: counts the bytes.
    """

    def __init__(
        self,
        packs: Packs,
        tell: Callable[[torch.Tensor], Any],
        *,
        ends: bool = False,
        stops_early: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self._packs = packs.all
        self._output_leaves = packs.output_leaves
        self._stops_early = packs.stops_early or stops_early
        self._tell = tell
        self._ends = ends
        self._last = max((place for place, pack in enumerate(packs.all) if pack.wanted), default=-1)
        self._place = 0
        self._tensors: list[torch.Tensor | None] = []
        self.is_told = False
        """Whether all was told: then the run has ended, or is about to end by an error of ours."""
        self.is_full = False
        """Whether the last tensor that is wanted is there, and has yet to be told of."""
        self._ledger = ledger
        self.final: Callable[[torch.Tensor], torch.Tensor] | None = None
        """What a tensor is told as, once the operator that saves it has been seen."""

    def start_anew(self) -> None:
        """The run starts anew, and is to go to its end."""
        self._place = 0
        self._tensors.clear()
        self._stops_early = self.is_full = False

    def add(self, tensor: torch.Tensor) -> None:
        """The run saves a tensor."""
        place, self._place = self._place, self._place + 1
        if self.is_told or place >= len(self._packs):
            return
        pack = self._packs[place]
        if pack.wanted:
            self._tensors.append(tensor)
        elif pack.told:
            self._tensors.append(None)
        self.is_full = place == self._last and self._stops_early

    def next_place(self) -> int | None:
        """How many operators had run in the first run when it saved what comes next; ``None``: that is not wanted."""
        return self._packs[self._place].place if self.wants() else None

    def wants(self) -> bool:
        """Whether the next one is wanted."""
        return self._place < len(self._packs) and self._packs[self._place].wanted

    def end(self, output: Any) -> None:
        """The function has returned."""
        leaves = list(tensors_in(tree_leaves(output))) if self._output_leaves else []
        for index in self._output_leaves:
            self.add(leaves[index])
        if not self.is_told:
            self.tell_all()

    def tell_all(self) -> None:
        """Tell all that is wanted, which ends the run."""
        self.is_told = True
        tensors, self._tensors = self._tensors, []
        if self.final is not None:
            tensors = [None if tensor is None else self.final(tensor) for tensor in tensors]
        if self._ledger is not None:
            self._ledger.recomputed_bytes += storage_bytes(tensor for tensor in tensors if tensor is not None)
        # Of what was kept after all, torch counts that it came by; what comes after the last that is wanted is such.
        tensors.extend(None for pack in self._packs[self._place :] if pack.told)
        for tensor in tensors:
            self._tell(tensor if tensor is not None else torch.empty(0))
        if self._ends:
            raise Enough
