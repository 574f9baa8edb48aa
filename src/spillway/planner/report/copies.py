"""The copied storages of a simulated step: the operator that makes each, and the spans of its copies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from spillway.planner.plan import Plan
from spillway.planner.profile import Profile
from spillway.planner.tasks import Program
from spillway.planner.timeline import Span


@dataclass(frozen=True, slots=True)
class Copied:
    """A storage that is offloaded, or a saved parameter that is streamed."""

    block: str
    """The module's name, dotted."""
    operator: str
    """The operator that makes it; ``"input"``: it is an input of the block; ``"parameter"``: a parameter."""
    nbytes: int
    spans: tuple[int, ...]
    """Numbers of the spans of its copies: out, to disk, from disk, back."""


def copies_of(profile: Profile, plan: Plan, program: Program, spans: Sequence[Span]) -> tuple[Copied, ...]:
    """All storages that are copied in a step, in the order in which they are offloaded.

    Copies of all streamed parameters of a block at once are not among them.
    """
    found: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        if span.key is not None:
            found.setdefault(span.key, []).append(number)
    # Keys number the values of all blocks. Those of saved parameters follow, if nothing is recomputed.
    kinds = [profile.kinds[call.kind] for call in profile.calls]
    numbers = (
        len(kind.values) + (0 if block.recomputes else len(kind.parameters))
        for kind, block in zip(kinds, plan.blocks, strict=True)
    )
    first = list(accumulate(numbers, initial=0))
    made = []
    for sent in (each for task in program.tasks for each in task.sends if each.key in found):
        place = bisect_right(first, sent.key) - 1
        kind, number = kinds[place], sent.key - first[place]
        maker = None if sent.is_weight else kind.values[number].maker
        operator = "parameter" if sent.is_weight else "input" if maker is None else kind.operators[maker].name
        made.append(Copied(profile.calls[place].name, operator, sent.nbytes, tuple(found[sent.key])))
    return tuple(made)
