"""What the last region of a function did: most often the next one does the same.

NOTE [ What is remembered ]

A trace is made of calls, and where two regions of a function say the same of an operator, they have one object for it
(:meth:`~spillway.regions.calls.Call.share`). So whether a region did what the last one did is seen by identity, and
what follows from that alone (what runs again, and that it was seen to be right) need not be worked out anew. It is
remembered with all that it follows from, and is worked out anew if any of that is otherwise: a function that takes
another branch, or is given another shape, makes other calls.

What is remembered is only ever replaced as a whole, so that threads may share it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence, Set

from torch import Tensor
from torch.nn import Module

from spillway.records import Decision
from spillway.regions.calls import Call
from spillway.regions.packs import Packs
from spillway.regions.replay import Act, acts_of
from spillway.regions.tape import Tape
from spillway.regions.trace import Trace

_Values = list[tuple[int, ...]]
TapeKey = tuple[Hashable, Hashable]
"""By what calls of a function are told apart: what was decided about its values, and what its arguments are like."""
_MOST_TAPES = 16
_MOST_KINDS = 256
_MOST_LOSSES = 3
_EACH = 64
_numbers = itertools.count()


class Script:
    """What the last region of a function did. See NOTE [ What is remembered ]."""

    def __init__(self) -> None:
        self.calls: Sequence[Call | None] = ()
        """Of each operator, the shared call, if there is one."""
        self._acts: tuple[Sequence[Call | None], list[Decision], list[tuple[int, int]], list[Act]] | None = None
        self._trusted: tuple[Sequence[Call | None], list[Act], _Values] | None = None
        self._tapes: dict[TapeKey, Tape | None] = {}
        self._kinds: Set[Hashable] = frozenset()
        """Of arguments that came."""
        self._lately: Set[Hashable] = frozenset()
        """Of these, those that came since :meth:`came` was last asked."""
        self._losses = 0
        self._calls = 0
        self._offset = next(_numbers)
        """Not all functions are compared in the same step."""
        self._buffers: list[dict[str, Tensor | None]] | None = None
        """Of the modules that have some."""

    def learn(self, trace: Trace) -> None:
        """A region has ended, and its trace is shared."""
        if trace.shared == self.calls:
            # One list for all of them.
            trace.shared = self.calls
        else:
            self.calls = trace.shared

    def acts(self, trace: Trace, wanted: list[tuple[int, int]]) -> list[Act]:
        """:func:`~spillway.regions.replay.acts_of` a trace that is shared."""
        if trace.values.opaque is not None or None in trace.shared:
            return acts_of(trace, wanted)
        decisions = [call.decision for call in trace.calls]
        known = self._acts
        if known is not None and known[:3] == (trace.shared, decisions, wanted):
            return known[3]
        acts = acts_of(trace, wanted)
        self._acts = trace.shared, decisions, wanted, acts
        return acts

    def is_trusted(self, trace: Trace, acts: list[Act], packs: Packs) -> bool:
        """Whether the last re-run that was trusted was this one."""
        return self._trusted == (trace.shared, acts, _wanted(packs))

    def trust(self, trace: Trace, acts: list[Act], packs: Packs) -> None:
        """This re-run is trusted."""
        if None not in trace.shared:
            self._trusted = trace.shared, acts, _wanted(packs)

    def tape(self, key: TapeKey) -> Tape | None:
        """What calls that are told apart in this way do, if there is a tape of it."""
        return self._tapes.get(key)

    def like(self, key: TapeKey) -> list[Tape]:
        """Tapes of calls with such arguments about which something else was decided, if none is known of these."""
        if key in self._tapes:
            return []
        _, kinds = key
        return [tape for (_, other), tape in self._tapes.items() if tape is not None and other == kinds]

    @property
    def is_known(self) -> bool:
        """Whether it was seen if there is a tape of some kind of call."""
        return bool(self._tapes) or self._losses >= _MOST_LOSSES

    def called(self, kinds: Hashable) -> None:
        """There is a call with arguments like these."""
        if kinds not in self._lately:
            self._lately = {*(() if len(self._lately) >= _MOST_KINDS else self._lately), kinds}

    def came(self) -> Set[Hashable]:
        """What arguments were like that came since this was last asked."""
        lately, self._lately = self._lately, frozenset()
        return lately

    def tells(self, kinds: Set[Hashable]) -> bool:
        """Whether there is a tape of each of these kinds of calls, and of each that one was wanted of."""
        told = {other for (_, other), tape in self._tapes.items() if tape is not None}
        return bool(kinds) and kinds <= told and None not in self._tapes.values()

    def distrust(self) -> None:
        """No tape tells what the function does, nor ever will."""
        self._tapes, self._losses = {}, _MOST_LOSSES

    def wants_tape(self, key: TapeKey, at_once: bool | None) -> bool:
        """Whether one is to be written, which costs two re-runs.

        Args:
            key: of the call.
            at_once: whether even if no arguments like these came before; ``None``: only if some did.
        """
        _, kinds = key
        came = kinds in self._kinds
        if not came:
            self._kinds = {*(() if len(self._kinds) >= _MOST_KINDS else self._kinds), kinds}
        wanted = came if at_once is None else at_once
        return wanted and key not in self._tapes and self._losses < _MOST_LOSSES

    def is_compared(self) -> bool:
        """Whether all that a call computes again is compared, where nobody looks at it: each so many calls."""
        self._calls += 1
        return (self._calls + self._offset) % _EACH == 0

    def buffers(self, module: Module | None) -> list[Tensor]:
        """Those of the function's module, which modules have been looked for in once."""
        if self._buffers is None:
            self._buffers = [] if module is None else [each._buffers for each in module.modules() if each._buffers]
        return [buffer for each in self._buffers for buffer in each.values() if buffer is not None]

    def write(self, key: TapeKey, tape: Tape | None) -> None:
        """There is this tape, or none."""
        tapes = {} if len(self._tapes) >= _MOST_TAPES else self._tapes
        self._tapes = {**tapes, key: tape}

    def lose(self, key: TapeKey) -> None:
        """A call did something else than is on its tape. Where that happens often, tapes are no use."""
        self._losses += 1
        kept = {} if self._losses >= _MOST_LOSSES else self._tapes
        # Those of other decisions about such calls say the same of what the function does.
        self._tapes = {other: tape for other, tape in kept.items() if other[1] != key[1]}


def _wanted(packs: Packs) -> _Values:
    return [pack.values for pack in packs.all if pack.wanted]
