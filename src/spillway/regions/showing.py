"""What the tensors that a function saves show of what is computed again.

Where nobody looks at operators, nothing else is seen of a call: see NOTE [ Unwatched calls ] in ``unwatched.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from itertools import pairwise

import torch

from spillway.records import Decision
from spillway.regions.steps import Saved, Spot, Step, spots_in
from spillway.regions.tensors import is_dense

_RECOMPUTE = Decision.RECOMPUTE
_SHOW = frozenset(
    (
        *(
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addmv",
            "mv",
            "linear",
            "matmul",
            "convolution",
            "addbmm",
            "embedding_dense",
        ),
        *("add", "sub", "rsub", "mul", "div", "neg", "exp", "expm1", "log", "log1p", "sigmoid", "log_sigmoid_forward"),
        *("tanh", "silu", "gelu", "softplus", "erf", "sqrt", "rsqrt", "reciprocal", "sinh", "asinh", "atan"),
        *("_to_copy", "clone", "cat", "stack", "native_dropout", "addcmul", "addcdiv", "copy"),
    )
)
"""Operators whose output differs if an operand does, but for rounding. Even functions, comparisons, norms and whatever
else may hide a sign, a scale or an order are none of them."""


def _operands(step: Step) -> list[int]:
    return [spot.value for spot in spots_in(step.args)]


def _is_state(step: Step, spot: Spot) -> bool:
    """Whether kernels may leave it unwritten: states of generators, of which they do not need all, and workspaces.

    They give such besides what they are asked for.
    """
    is_number = not (spot.dtype.is_floating_point or spot.dtype is torch.bool)
    is_from_kernel = spot.dtype is torch.uint8 or step.is_random or step.numerics is not None
    return is_number and is_from_kernel and not step.single


def _covers(spots: Set[Spot], made: Spot) -> bool:
    """Whether tensors show all of what an operator made: one of them does, or equal parts at equal distances do."""
    total = math.prod(made.size)
    alike: dict[tuple[tuple[int, int], ...], set[int]] = {}
    """Where tensors begin, by steps and sizes of their dimensions, in whatever order."""
    for spot in spots:
        if spot.dtype is made.dtype:
            dimensions = zip(spot.stride, spot.size, strict=True)
            key = tuple(sorted((step, size) for step, size in dimensions if size > 1 and step > 0))
            alike.setdefault(key, set()).add(spot.offset)
    for lay, starts in alike.items():
        apart = {after - before for before, after in pairwise(sorted(starts))}
        # They are one tensor with a dimension more.
        steps, sizes = (*(step for step, _ in lay), *apart), (*(size for _, size in lay), *(len(starts) for _ in apart))
        if len(apart) < 2 and math.prod(sizes) == total and is_dense(torch.Size(sizes), steps):
            return True
    return False


class Showing:
    """That of what is on a tape.

    Args:
        steps: on the tape.
        saved: on the tape.
        again: places of the steps that run again.
        given: preserved values that are handed in to them.
        is_whole: whether all that is on the tape runs again.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        saved: Sequence[Saved],
        again: Set[int],
        given: Set[int],
        *,
        is_whole: bool,
    ) -> None:
        self._steps = steps
        self._saved = saved
        self._again = again
        self._given = given
        self._is_whole = is_whole

    @cached_property
    def shown(self) -> Mapping[int, int]:
        """Values that are handed in, by the place of what first shows all of their bytes."""
        made = {spot.value: spot for step in self._steps for _, spot in step.makes if spot.value in self._given}
        shown: dict[int, int] = {}
        for place, (spot, decision, _) in enumerate(self._saved):
            if spot is None or decision is _RECOMPUTE or spot.value not in made:
                continue
            if spot.start <= made[spot.value].start and spot.end >= made[spot.value].end:
                shown.setdefault(spot.value, place)
        return shown

    @cached_property
    def is_all(self) -> bool:
        """Whether it shows all that a re-run needs, and what draws again has all draws before it."""
        again, given = self._again, self._given
        draws = [place for place, step in enumerate(self._steps) if step.is_random]
        last = max(again & set(draws), default=-1)
        is_drawn = all(place in again for place in draws if place < last)
        return given <= self.shown.keys() and (is_drawn or self._is_whole)

    @cached_property
    def _makers(self) -> dict[int, Step]:
        """Of values that are computed again."""
        steps = (step for place, step in enumerate(self._steps) if place in self._again)
        return {spot.value: step for step in steps for _, spot in step.makes}

    @cached_property
    def _sources(self) -> Mapping[int, frozenset[int]]:
        """Of values that are computed again, those of them that they hang on, and themselves."""
        sources: dict[int, frozenset[int]] = {}
        for place, step in enumerate(self._steps):
            if place in self._again:
                found = frozenset[int]().union(*(sources.get(value, frozenset()) for value in _operands(step)))
                for made in step.made:
                    sources[made] = found | {made}
        return sources

    def _shows(self, step: Step) -> bool:
        """Whether what a step makes differs if any operand of it does.

        Not so where two operands hang on the same value: ``h * h``, or ``h.exp() + (-h).exp()``, hide a sign.
        """
        if step.func._schema.name.removeprefix("aten::") not in _SHOW:
            return False
        seen: set[int] = set()
        for value in _operands(step):
            sources = self._sources.get(value, frozenset((value,)))
            if not seen.isdisjoint(sources):
                return False
            seen |= sources
        return True

    @cached_property
    def compared(self) -> frozenset[int]:
        """Places of what is computed again and must have the same bits."""
        found = set()
        for place, (spot, decision, _) in enumerate(self._saved):
            if spot is not None and decision is _RECOMPUTE:
                maker = self._makers.get(spot.value)
                if maker is None or not _is_state(maker, spot):
                    found.add(place)
        return frozenset(found)

    @cached_property
    def last(self) -> frozenset[int]:
        """Those of :attr:`compared` that come at last: all the rest of it goes into them."""
        makers = self._makers
        written = {step.writes for step in self._steps}
        made = {spot.value: spot for step in makers.values() for _, spot in step.makes}
        last = set()
        seen: dict[int, set[Spot]] = {}
        """Of values, what of them is compared, or goes into what is."""
        passed = set[int]()

        def is_shown(value: int) -> bool:
            return value in seen and (value not in made or _covers(seen[value], made[value]))

        for place in sorted(self.compared, reverse=True):
            spot = self._saved[place].spot
            if spot is None or is_shown(spot.value):
                continue
            last.add(place)
            seen.setdefault(spot.value, set()).add(spot)
            values = [spot.value]
            while values:
                value = values.pop()
                step = makers.get(value)
                if step is None or value in passed or not is_shown(value):
                    continue
                # What goes into a value by a write in place is not followed.
                if value in written or not self._shows(step):
                    continue
                passed.add(value)
                for each in spots_in(step.args):
                    # Of what is written, what was read may have been another content than what is saved.
                    if each.value not in written:
                        seen.setdefault(each.value, set()).add(each)
                        values.append(each.value)
        return frozenset(last)
