"""The offloaded storages of a simulated step: the operator that makes each, and the spans of its copies.

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

from spillway.planner.profile import Profile
from spillway.planner.tasks import Program
from spillway.planner.timeline import Span, storages_of


@dataclass(frozen=True, slots=True)
class Copied:
    """A storage that is offloaded."""

    block: str
    """The module's name, dotted."""
    operator: str
    """The operator that makes it; ``"input"``: it is an input of the block."""
    nbytes: int
    spans: tuple[int, ...]
    """Numbers of the spans of its copies: out, to disk, from disk, back."""


def copies_of(profile: Profile, program: Program, window: int, spans: Sequence[Span]) -> tuple[Copied, ...]:
    """All storages that are copied in a step, in the order in which they are offloaded."""
    waiting: dict[tuple[str, str], deque[int]] = {}
    for number, span in enumerate(spans):
        if span.stream != "compute":
            waiting.setdefault((span.stream, span.name), deque()).append(number)
    copied = [storage for storage in storages_of(program, window)[0] if not storage.is_reused]
    found: dict[int, list[int]] = {id(storage): [] for storage in copied}
    for storage in copied:
        for stream in ("out", "disk") if storage.sent.on_disk else ("out",):
            found[id(storage)].append(waiting[stream, storage.sender].popleft())
    taken = [storage for storage in copied if storage.turn is not None]
    for storage in sorted(taken, key=attrgetter("turn")):
        for stream in ("disk", "back") if storage.sent.on_disk else ("back",):
            found[id(storage)].append(waiting[stream, storage.sender].popleft())
    # Keys number the values of all blocks.
    first = list(accumulate((len(profile.kinds[call.kind].values) for call in profile.calls), initial=0))
    made = []
    for storage in copied:
        place = bisect_right(first, storage.sent.key) - 1
        call = profile.calls[place]
        kind = profile.kinds[call.kind]
        maker = kind.values[storage.sent.key - first[place]].maker
        operator = "input" if maker is None else kind.operators[maker].name
        made.append(Copied(call.name, operator, storage.sent.nbytes, tuple(found[id(storage)])))
    return tuple(made)
