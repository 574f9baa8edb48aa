"""Which of two plans that were checked takes less: the one in hand, or one that knows more of the host.

NOTE [ Of two plans the faster one ]

A plan that knows more of the host is a guess all the same: hosts are not the same from one moment to the next. So both
plans are timed, each in the faster one of two checked steps, and the faster plan is held.

Steps count that are of the same work: of the same kinds of calls of blocks, none of them learned from, and no host
memory pinned meanwhile. Their time ends where the last block's backward begins or ends, so that what the user's loop
does between two steps is in none of them. Where too few come, the plan that knows more is held.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from spillway.attaching.peers import Peers
from spillway.planning.plan import OperatorPlan, Plan
from spillway.profiling.watch import Watched

_CHECKS = 2
"""Steps of each of two plans that are compared."""
_MOST_OTHERS = 4
"""Steps that do not count."""
_BEGIN, _ENDS = ("begin", 0), (("first", 0), ("back", 0))


@dataclass(frozen=True, slots=True)
class Timed:
    """What steps of a plan took that were of the same work."""

    kinds: tuple[Hashable, ...] | None
    """Of calls of blocks; ``None``: no step was counted."""
    seconds: float


class Contest:
    """Times checked steps of a plan, against those of a rival.

    Args:
        rival: the plan before. ``None``: there is none yet.
    """

    def __init__(self, rival: Timed | None = None) -> None:
        self._rival = rival
        self._kinds = None if rival is None else rival.kinds
        self._seconds: list[float] = []
        self._others = 0

    def saw(self, watched: Watched, peers: Peers, *, is_odd: bool) -> bool:
        """A step was checked: whether it counts. All ranks have to tell of it.

        Args:
            watched: what was measured of it here.
            peers: the ranks; the slowest one counts.
            is_odd: whether it took longer here than others would.
        """
        kinds, seconds = tuple(call.kind for call in watched.calls), _seconds_of(watched)
        is_other = is_odd or self._kinds not in (None, kinds)
        if any(peers.share("other", lambda: is_other)):
            self._others += 1
            return False
        self._kinds = kinds
        self._seconds.append(max(peers.share("seconds", lambda: seconds)))
        return True

    @property
    def timed(self) -> Timed:
        """The steps so far."""
        return Timed(self._kinds if self._seconds else None, min(self._seconds, default=0.0))

    @property
    def is_over(self) -> bool:
        """Whether no further step is waited for."""
        return len(self._seconds) >= _CHECKS or self._others > _MOST_OTHERS

    @property
    def is_lost(self) -> bool:
        """Whether the rival was faster."""
        if self._rival is None or self._rival.kinds is None or not self._seconds:
            return False
        return min(self._seconds) > self._rival.seconds


def _seconds_of(watched: Watched) -> float:
    end = next(place for place in _ENDS if place in watched.readings)
    return watched.seconds(_BEGIN, end)


def decisions(plan: Plan) -> Hashable:
    """What a plan does, without what is foreseen of it."""
    blocks = tuple(
        (block.name, block.plain, block.recomputes, block.inputs, _operators(block.operators)) for block in plan.blocks
    )
    return blocks, plan.window, plan.ahead, plan.optimizer_fraction


def _operators(operators: tuple[OperatorPlan, ...]) -> Hashable:
    return tuple((each.place, each.decision) for each in operators)
