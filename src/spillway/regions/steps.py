"""What is on a tape: operators, and how the tensors that they are given lie in the memory of values."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

from spillway.capture.identity import ViewRecipe
from spillway.records import Decision
from spillway.regions.globals import Numerics

_ADDS_UP = ("mm", "mv", "dot", "conv", "attention", "linear", "matmul", "rnn", "lstm", "gru")
"""Words in the names of operators that hang on :class:`Numerics`."""


class Spot:
    """How a tensor lies in the memory of a value. Of equal ones a tape has one."""

    __slots__ = ("dtype", "end", "is_made", "offset", "size", "start", "stride", "value", "view")

    def __init__(self, value: int, view: ViewRecipe) -> None:
        self.value = value
        self.view = view
        self.dtype, self.size, self.stride, self.offset = view.dtype, view.size, view.stride, view.offset
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
        self.start = view.offset * view.dtype.itemsize
        """Its first byte."""
        self.end = self.start if 0 in view.size else (last + 1) * view.dtype.itemsize
        """The one after its last."""
        self.is_made = False
        """Whether the operator that made the value gave it so."""


class Step:
    """One operator."""

    __slots__ = (
        *("args", "constants", "decision", "func", "is_random", "kwargs", "lists", "makes", "numerics", "others"),
        *("reads", "renames", "single", "spots", "writes"),
    )

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_random: bool) -> None:
        self.func = func
        self.args = args
        """What it is given, with a :class:`Spot` in place of each tensor."""
        self.kwargs = kwargs
        """The same by keyword. None of them is a tensor."""
        self.spots = tuple((place, arg) for place, arg in enumerate(args) if type(arg) is Spot)
        self.lists = tuple((place, arg) for place, arg in enumerate(args) if type(arg) is list and any(spots_in(arg)))
        """Arguments with tensors in them."""
        others = (*dict(self.spots), *dict(self.lists))
        self.constants = tuple((place, arg) for place, arg in enumerate(args) if place not in others)
        self.is_random = is_random
        self.single = True
        """Whether it gives one tensor."""
        self.makes: tuple[tuple[int, Spot], ...] = ()
        """New values, by their places among the outputs. None: it is a view, and computes nothing."""
        self.others: tuple[Any, ...] | None = None
        """What it gives, with ``None`` in place of what it makes; ``None``: it may give other names for its arguments.
        """
        self.reads = tuple(dict.fromkeys(spot.value for spot in spots_in(args)))
        """Values."""
        self.decision = Decision.RECOMPUTE
        """What becomes of what it makes."""
        self.numerics = Numerics.now() if any(word in func._schema.name for word in _ADDS_UP) else None
        """The settings under which it ran, if it hangs on them."""
        self.renames = -1
        """A value of which it gives another name, though it is no view by its schema; -1: none."""
        self.writes = -1
        """The value of its first argument, which it writes and gives back; -1: it writes nothing."""

    @property
    def made(self) -> frozenset[int]:
        """The values that it makes."""
        return frozenset(spot.value for _, spot in self.makes)

    def is_wanted(self, want: Set[int]) -> bool:
        """Whether it makes or writes any of these values."""
        return self.writes in want or any(spot.value in want for _, spot in self.makes)

    def decided(self, decision: Decision) -> Step:
        """The same, with something else becoming of what it makes."""
        if self.decision is decision:
            return self
        other = copy.copy(self)
        other.decision = decision
        return other


def spots_in(values: Any) -> Iterator[Spot]:
    """Those among arguments, in lists too."""
    for value in values:
        if type(value) is Spot:
            yield value
        elif type(value) is list:
            yield from spots_in(value)


class Saved(NamedTuple):
    """What a function has autograd save."""

    spot: Spot | None
    """``None``: it comes from outside, and is alive anyway, or left with the function's tensors."""
    decision: Decision = Decision.RECOMPUTE
    is_parameter: bool = False
    """Whether it comes from outside, and nobody sends it away."""


class Fate(enum.Enum):
    """What becomes of a tensor that a function has autograd save."""

    AGAIN = "again"
    """It is computed again."""
    PRESERVED = "preserved"
    """It is kept, or leaves."""
    PARAMETER = "parameter"
    """It is there anyway, and nobody sends it away."""
    OUTSIDE = "outside"
    """It is there anyway, or left with the function's tensors."""


class Foreseen(NamedTuple):
    """A tensor that a function will have autograd save, shortly: it is read for each of them."""

    place: int
    """Among all of them."""
    fate: Fate
    spot: Spot
    decision: Decision
    is_shown: bool
    """Whether it is what first shows all of a value that is handed in."""

    @classmethod
    def of(cls, place: int, saved: Saved, shown: Mapping[int, int]) -> Foreseen:
        """That of what was saved at a place; of values that are handed in, it is known where they are shown."""
        spot, decision, is_parameter = saved
        if spot is None:
            return cls(place, Fate.PARAMETER if is_parameter else Fate.OUTSIDE, _NOWHERE, decision, False)
        fate = Fate.AGAIN if decision is Decision.RECOMPUTE else Fate.PRESERVED
        return cls(place, fate, spot, decision, shown.get(spot.value) == place)


_NOWHERE = Spot(-1, ViewRecipe.of(torch.empty(0)))
"""Of what comes from outside."""
