"""The options of a block that are worth considering.

NOTE [ Preserved values ]

A saved value has a price: the seconds that it takes to recompute it alone, for each of its bytes. Values are left out
one after the other, the one with the lowest price first. So there are as many sets of preserved values as saved ones,
from all to none. Mixed blocks give what lies between two sets. Any number of the first values of a set may be
offloaded. A plan has one decision for all inputs, so they go together.

Prices ignore that two values may be recomputed by one operator that neither preserves. Minimum cuts, which do not, gave
no better plans for Llama, ViT and GPT.

A value that is written after it was made cannot be preserved: its maker and its writers run in each replay.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from spillway.planner.block_tasks import make_option
from spillway.planner.needed import Act, needed
from spillway.planner.plan import ALL
from spillway.planner.profile import BlockProfile, ReplayRule
from spillway.planner.tasks import Option, Phase
from spillway.types import Decision

_DIGITS = 9
"""Seconds are compared to a nanosecond."""
_MOST_SETS = 24
_PARTS = 5
"""Parts of a set that are offloaded or stay."""


def block_options(block: BlockProfile, *, min_bytes: int, allow: Collection[str] = ALL) -> tuple[Option, ...]:
    """The options of a block, none of which is worse than another in all that counts.

    Values below ``min_bytes`` are not offloaded. If nothing else is allowed, values are kept.
    """
    sets = preserved_sets(block) if "recompute" in allow else [_all_saved(block)]
    tiers = [
        decision
        for name, decision in (("host", Decision.OFFLOAD_HOST), ("disk", Decision.OFFLOAD_DISK))
        if name in allow
    ]
    if not tiers and "keep" not in allow and "recompute" in allow:
        sets = [frozenset()]
    found: dict[tuple[Decision, ...], Option] = {}
    for preserved in sets:
        for decisions in _spread(block, preserved, tiers, min_bytes, keeps="keep" in allow or not tiers):
            if decisions not in found:
                found[decisions] = make_option(block, decisions, min_bytes=min_bytes)
    return _worthwhile(found.values())


def _spread(
    block: BlockProfile,
    preserved: frozenset[int],
    tiers: Sequence[Decision],
    min_bytes: int,
    *,
    keeps: bool,
) -> Iterable[tuple[Decision, ...]]:
    """The set, with no value, the inputs, or ever more of the first values offloaded."""
    inputs = [number for number, value in enumerate(block.values) if value.is_input]
    stays = [
        Decision.KEEP if number in preserved or number in inputs else Decision.RECOMPUTE
        for number in range(len(block.values))
    ]
    candidates = sorted(preserved, key=lambda number: (block.values[number].saved_at or 0, number))
    offloadable = [_made_with(block, number) for number in candidates if block.values[number].nbytes >= min_bytes]
    if any(block.values[number].nbytes >= min_bytes for number in inputs):
        offloadable.insert(0, tuple(inputs))
    if keeps or not offloadable:
        yield tuple(stays)
    sizes = np.cumsum([block.nbytes(numbers) for numbers in offloadable])
    for tier in tiers:
        decisions = list(stays)
        offloaded = 0
        for place, numbers in enumerate(offloadable):
            for number in numbers:
                decisions[number] = tier
            is_last = place == len(offloadable) - 1
            if is_last or (keeps and (place == 0 or sizes[place] - offloaded >= sizes[-1] / _PARTS)):
                offloaded = sizes[place]
                yield tuple(decisions)


def _made_with(block: BlockProfile, number: int) -> tuple[int, ...]:
    maker = block.values[number].maker
    return () if maker is None else block.operators[maker].makes


def _all_saved(block: BlockProfile) -> frozenset[int]:
    saved = (number for number, value in enumerate(block.values) if value.saved_at is not None)
    return frozenset(other for number in saved for other in _made_with(block, number))


def preserved_sets(block: BlockProfile) -> list[frozenset[int]]:
    """Sets of preserved values, from all to none. See NOTE [ Preserved values ]."""
    every = _all_saved(block)
    written = {number for each in block.operators for number in each.writes}
    free = [each.makes for each in block.operators if each.replay is ReplayRule.FREE and block.nbytes(each.makes)]
    choices = [makes for makes in free if every.issuperset(makes) and written.isdisjoint(makes)]
    preservable = frozenset(number for makes in choices for number in makes)

    def replay_seconds(makes: tuple[int, ...]) -> float:
        """Seconds of a replay that recomputes these values alone."""
        wanted = [(number, place) for number in makes if (place := block.values[number].saved_at) is not None]
        acts = needed(block.operators, wanted, preservable.difference(makes))
        return sum(each.seconds for each, act in zip(block.operators, acts, strict=True) if act is Act.RUN)

    # Some operators run in any replay.
    always = replay_seconds(())
    prices = {makes: (replay_seconds(makes) - always) / block.nbytes(makes) for makes in choices}
    sets = [every]
    for makes in sorted(prices, key=lambda makes: (prices[makes], -block.nbytes(makes), makes)):
        sets.append(sets[-1].difference(makes))
    # Some of many, evenly.
    keep = sorted({round(place) for place in np.linspace(0, len(sets) - 1, min(len(sets), _MOST_SETS))})
    return list(dict.fromkeys((*(sets[place] for place in keep), frozenset[int]())))


def _worthwhile(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other one equals or beats in all figures, from the fastest on."""
    found = sorted(options, key=lambda option: (_figures(option), len(option.backward)))
    figures = np.array([_figures(option) for option in found])
    kept: list[int] = []
    for place in range(len(found)):
        if not any((figures[other] <= figures[place]).all() for other in kept):
            kept.append(place)
    return tuple(found[place] for place in kept)


def _figures(option: Option) -> tuple[float, ...]:
    """The figures that count: less is better."""
    # If CPU memory is full, the disk is better than nothing.
    on_disk = sum(sent.nbytes for task in option.forward for sent in task.sends if sent.on_disk)
    return (
        option.recompute_seconds,
        option.kept_bytes,
        # These may count once for it and the next block.
        -option.output_bytes,
        # These are freed before backward.
        -option.let_go_bytes,
        option.sent_bytes - on_disk,
        on_disk,
        max((task.peak_bytes for task in option.forward), default=0),
        max((task.peak_bytes for task in option.backward if task.phase is Phase.RECOMPUTE), default=0),
        # Sums in another order are equal.
        round(sum(task.host_seconds for task in option.forward), _DIGITS),
        round(sum(task.host_seconds for task in option.backward), _DIGITS),
    )
