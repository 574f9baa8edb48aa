"""What the last region of a function did: most often the next one does the same.

NOTE [ What is remembered ]

A trace is made of calls, and where two regions of a function say the same of an operator, they have one object for it
(:meth:`~spillway.regions.calls.Call.share`). So whether a region did what the last one did is seen by identity, and
what follows from that alone (what runs again, and that it was seen to be right) need not be worked out anew. It is
remembered with all that it follows from, and is worked out anew if any of that is otherwise: a function that takes
another branch, or is given another shape, makes other calls.

A script is only ever replaced as a whole, so that threads may share it.
"""

from __future__ import annotations

from collections.abc import Sequence

from spillway.records import Decision
from spillway.regions.calls import Call
from spillway.regions.packs import Packs
from spillway.regions.replay import Act, acts_of
from spillway.regions.trace import Trace

_Values = list[tuple[int, ...]]


class Script:
    """What the last region of a function did. See NOTE [ What is remembered ]."""

    def __init__(self) -> None:
        self.calls: Sequence[Call | None] = ()
        """Of each operator, the shared call, if there is one."""
        self._acts: tuple[Sequence[Call | None], list[Decision], list[tuple[int, int]], list[Act]] | None = None
        self._trusted: tuple[Sequence[Call | None], list[Act], _Values] | None = None

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


def _wanted(packs: Packs) -> _Values:
    return [pack.values for pack in packs.all if pack.wanted]
