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
import weakref
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
_MOST_TOLD = 24
"""Kinds of calls of which there are tapes."""
_MOST_EACH = 8
"""Tapes of one kind, about which other things were decided."""
_STALE = 8 * _MOST_TOLD
"""Calls after which tapes of a kind that did not come are given up for others."""
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
        self._tapes: dict[Hashable, dict[Hashable, Tape | None]] = {}
        """By what arguments are like, and by what was decided. ``None``: there can be none."""
        self._came_at: dict[Hashable, int] = {}
        """When such arguments came last, by the count of all calls."""
        self._all_calls = 0
        self._kinds: Set[Hashable] = frozenset()
        """Of arguments that came."""
        self._lately: Set[Hashable] = frozenset()
        """Of these, those that came since :meth:`came` was last asked."""
        self.tried = 0
        """How often such arguments came for the first time, or a tape was written: what costs more than a call does."""
        self._losses = 0
        self._calls = 0
        self._offset = next(_numbers)
        """Not all functions are compared in the same step."""
        self._buffered: list[weakref.ref[Module]] | None = None
        """Modules that have buffers."""

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
        said, kinds = key
        return self._tapes.get(kinds, {}).get(said)

    def like(self, key: TapeKey) -> list[Tape]:
        """Tapes of calls with such arguments about which something else was decided, if none is known of these."""
        said, kinds = key
        known = self._tapes.get(kinds, {})
        return [] if said in known else [tape for tape in known.values() if tape is not None]

    @property
    def is_known(self) -> bool:
        """Whether it was seen if there is a tape of some kind of call."""
        return bool(self._tapes) or self._losses >= _MOST_LOSSES

    def called(self, kinds: Hashable) -> None:
        """There is a call with arguments like these."""
        self._all_calls += 1
        if kinds in self._tapes:
            self._came_at[kinds] = self._all_calls
        if kinds not in self._lately:
            self._lately = {*(() if len(self._lately) >= _MOST_KINDS else self._lately), kinds}

    def came(self) -> Set[Hashable]:
        """What arguments were like that came since this was last asked."""
        lately, self._lately = self._lately, frozenset()
        return lately

    def tells(self, kinds: Set[Hashable]) -> bool:
        """Whether there is a tape of each of these kinds of calls, whatever was decided about them."""
        return bool(kinds) and all(self._tapes.get(each) and None not in self._tapes[each].values() for each in kinds)

    def distrust(self) -> None:
        """No tape tells what the function does, nor ever will."""
        self._tapes, self._losses = {}, _MOST_LOSSES

    def wants_tape(self, key: TapeKey, at_once: bool | None) -> bool:
        """Whether one is to be written, which costs two re-runs.

        Args:
            key: of the call.
            at_once: whether even if no arguments like these came before; ``None``: only if some did.
        """
        said, kinds = key
        came = kinds in self._kinds
        if not came:
            self.tried += 1
            self._kinds = {*(() if len(self._kinds) >= _MOST_KINDS else self._kinds), kinds}
        wanted = came if at_once is None else at_once
        if not wanted or said in self._tapes.get(kinds, {}) or self._losses >= _MOST_LOSSES:
            return False
        # One that is dropped before it is used costs two re-runs each time.
        wanted = bool(at_once) or kinds in self._tapes or self._has_room()
        self.tried += wanted
        return wanted

    def _has_room(self) -> bool:
        return len(self._tapes) < _MOST_TOLD or self._all_calls - self._came_at.get(self._oldest(), 0) > _STALE

    def _oldest(self) -> Hashable:
        return min(self._tapes, key=lambda kinds: self._came_at.get(kinds, 0))

    def is_compared(self) -> bool:
        """Whether all that a call computes again is compared, where nobody looks at it: each so many calls."""
        self._calls += 1
        return (self._calls + self._offset) % _EACH == 0

    def buffers(self, module: Module | None) -> list[Tensor]:
        """Those of the function's module, which modules have been looked for in once."""
        if self._buffered is None:
            modules = () if module is None else module.modules()
            self._buffered = [weakref.ref(each) for each in modules if each._buffers]
        alive = [each for reference in self._buffered if (each := reference()) is not None]
        return [buffer for each in alive for buffer in each._buffers.values() if buffer is not None]

    def write(self, key: TapeKey, tape: Tape | None) -> None:
        """There is this tape, or none."""
        said, kinds = key
        tapes = dict(self._tapes)
        if kinds not in tapes and len(tapes) >= _MOST_TOLD:
            oldest = self._oldest()
            del tapes[oldest]
            self._came_at.pop(oldest, None)
        known = list(tapes.get(kinds, {}).items())
        # Others are derived from the first.
        kept = known if len(known) < _MOST_EACH else [known[0], *known[2:]]
        self._tapes = {**tapes, kinds: {**dict(kept), said: tape}}
        self._came_at[kinds] = self._all_calls

    def lose(self, key: TapeKey) -> None:
        """A call did something else than is on its tape. Where that happens often, tapes are no use."""
        self._losses += 1
        kept = {} if self._losses >= _MOST_LOSSES else self._tapes
        # Those of other decisions about such calls say the same of what the function does.
        self._tapes = {kinds: tapes for kinds, tapes in kept.items() if kinds != key[1]}


def _wanted(packs: Packs) -> _Values:
    return [pack.values for pack in packs.all if pack.wanted]
