"""The copied storages of a simulated step: the operator that makes each, and the spans of its copies.

Spans do not name their storages. But copies of one stream are queued in a known order: out of the device in the order
of the sends, and back, for the storages of one task, in the order of their first takes. The disk writes all storages of
a task before it reads any of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from spillway.planner.plan import Plan
from spillway.planner.profile import Profile
from spillway.planner.tasks import Program
from spillway.planner.timeline import Span, storages_of


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

    Copies of all streamed parameters of a block have a name of their own, and are not among them.
    """
    waiting: dict[tuple[str, str], deque[int]] = {}
    for number, span in enumerate(spans):
        if span.stream != "compute":
            waiting.setdefault((span.stream, span.name), deque()).append(number)
    copied = [storage for storage in storages_of(program, plan.window)[0] if not storage.is_reused]
    found: dict[int, list[int]] = {id(storage): [] for storage in copied}
    for storage in (each for each in copied if not each.sent.is_weight):
        for stream in ("out", "disk") if storage.sent.on_disk else ("out",):
            found[id(storage)].append(waiting[stream, storage.sender].popleft())
    taken = [storage for storage in copied if storage.turn is not None]
    for storage in sorted(taken, key=attrgetter("turn")):
        for stream in ("disk", "back") if storage.sent.on_disk else ("back",):
            found[id(storage)].append(waiting[stream, storage.sender].popleft())
    # Keys number the values of all blocks. Those of saved parameters follow, if nothing is recomputed.
    kinds = [profile.kinds[call.kind] for call in profile.calls]
    numbers = (
        len(kind.values) + (0 if block.recomputes else len(kind.parameters))
        for kind, block in zip(kinds, plan.blocks, strict=True)
    )
    first = list(accumulate(numbers, initial=0))
    made = []
    for storage in copied:
        place = bisect_right(first, storage.sent.key) - 1
        kind, number = kinds[place], storage.sent.key - first[place]
        maker = None if storage.sent.is_weight else kind.values[number].maker
        operator = "parameter" if storage.sent.is_weight else "input" if maker is None else kind.operators[maker].name
        made.append(Copied(profile.calls[place].name, operator, storage.sent.nbytes, tuple(found[id(storage)])))
    return tuple(made)
