"""The operators of a checkpointed function, and which of them a replay needs.

NOTE [ What a replay needs ]

Some of what autograd saves is preserved: kept on the device or offloaded. The rest must be recomputed. Going through
the operators from the last to the first, an operator is needed if it makes or writes a value that is wanted. Then the
values that it reads are wanted, too. An operator whose wanted outputs are all preserved does not run: they are handed
in. Operators that nothing is wanted of do not run either. Their outputs get memory, but no content, since the
function's own code still holds and reshapes them. Views always run: they compute nothing.

An operator that is left out must leave its random generator where it would have left it. A generator that cannot be
advanced without drawing is left alone, if all operators that draw from such generators are left out. Otherwise all of
these run. An operator that writes in place runs if what it writes was computed: somebody may hold that.

NOTE [ Values ]

A value is the memory of one tensor that an operator made. Views of it are the same value. So two tensors that autograd
saves may be one value, and a value is preserved once.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spillway.capture.identity import ViewRecipe
from spillway.regions.schema import Facts


class Act(enum.IntEnum):
    """What a replay does with an operator. An integer, since the hash of any other enum is a Python function."""

    RUN = 0
    """It runs."""
    GIVE = 1
    """Its outputs were preserved, and are handed in."""
    SKIP = 2
    """Its outputs get memory without content."""


@dataclass(slots=True, eq=False)
class Operator:
    """One operator that a function ran."""

    func: Any
    facts: Facts
    reads: tuple[int, ...]
    """Values of the tensors among its arguments."""
    writes: tuple[int, ...] = ()
    """Values that it writes in place."""
    makes: tuple[int, ...] = ()
    """Values of its new outputs."""
    outputs: tuple[Any, ...] = ()
    """Of each output: the :class:`ViewRecipe` of a new tensor, the :class:`Argument` that it is, or the number."""
    single: bool = True
    """Whether it gave one thing, and not a sequence."""
    is_plain: bool = False
    """Whether all outputs can be made without running it."""
    is_view: bool = False
    """Whether its outputs are views of its arguments, and it writes nothing."""
    depends: bool = False
    """Whether it computes with inputs of the function, or with what requires grad. Others may be cached constants."""
    draws: int | None = 0
    """By how much it advances the generator of its device; ``None``: a generator that cannot be advanced."""

    @property
    def always_runs(self) -> bool:
        """Whether every replay runs it: shapes or Python code may depend on it, or its outputs cannot be replaced."""
        facts = self.facts
        return not (self.is_plain and self.depends) or facts.is_settled or facts.reshapes


@dataclass(frozen=True, slots=True)
class Argument:
    """An output that is one of the arguments."""

    key: int | str


class SavedTensor(NamedTuple):
    """One tensor that autograd saved, in the order of saving."""

    value: int | None
    """``None``: of a wrapper, or of a parameter that no operator had read."""
    place: int
    """How many operators had run."""
    recipe: ViewRecipe | None
    """Where it lies in the memory of the value."""
    is_parameter: bool
    requires_grad: bool = False
    parts: tuple[tuple[int, ViewRecipe], ...] = ()
    """Of a wrapper's parts, their values, and where they lie in the memory of these."""
    saved_by: int | None = None
    """The operator that saved it."""


@dataclass(slots=True, eq=False)
class Program:
    """What a function did in one call: its operators, and what autograd saved."""

    operators: Sequence[Operator] = ()
    saved: Sequence[SavedTensor] = ()
    makers: dict[int, int] = field(default_factory=dict)
    """Of each value that an operator made, that operator."""
    inputs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of the values of the function's tensors, their places among these, and where they begin in their memory."""
    written: frozenset[int] = frozenset()
    """Values that were written in place."""
    recipes: dict[int, ViewRecipe] = field(default_factory=dict)
    """Of each value, the tensor that its operator gave."""
    chosen: dict[Any, dict[int, tuple[Any, bool]]] = field(default_factory=dict)
    """What selectors chose to preserve: decisions by operators, and whether each is a command."""
    opaque: str | None = None
    """Why operators cannot be left out, if they cannot."""

    def is_computed(self, value: int) -> bool:
        """Whether an operator made or wrote it."""
        return value in self.makers or value in self.written

    def can_be_preserved(self, value: int) -> bool:
        """Whether autograd saves it in a form that can be handed in."""
        return value in self.recipes and value not in self.written and self._is_saved(value)

    def standing_for(self, value: int) -> set[int]:
        """The value itself, if autograd saves it; otherwise the nearest saved values that are computed from it."""
        found: set[int] = set()
        seen, rest = set[int](), [value]
        while rest:
            each = rest.pop()
            if each in seen:
                continue
            seen.add(each)
            if self.can_be_preserved(each):
                found.add(each)
            else:
                rest += (made for operator in self.operators if each in operator.reads for made in operator.makes)
        return found

    def _is_saved(self, value: int) -> bool:
        """Whether autograd saves it, and nothing but parts of the tensor that its operator gave."""
        whole = self.recipes[value]
        saves = [
            recipe for each in self.saved for part, recipe in (*each.parts, (each.value, each.recipe)) if part == value
        ]
        return bool(saves) and all(recipe is not None and lies_within(recipe, whole) for recipe in saves)


def lies_within(part: ViewRecipe, whole: ViewRecipe) -> bool:
    """Whether one tensor over some memory reads only elements that another one spans."""
    if (part.dtype, part.device, part.conj, part.neg) != (whole.dtype, whole.device, whole.conj, whole.neg):
        return False
    return whole.offset <= part.offset and _last(part) <= _last(whole)


def _last(recipe: ViewRecipe) -> int:
    return recipe.offset + sum((size - 1) * stride for size, stride in zip(recipe.size, recipe.stride, strict=True))


def needed(operators: Sequence[Operator], wanted: Iterable[tuple[int, int]], preserved: Collection[int]) -> list[Act]:
    """What a replay does with each operator. See NOTE [ What a replay needs ].

    Args:
        operators: in the order in which they ran.
        wanted: values to be recomputed, each with the number of operators that had run when it was saved.
        preserved: values that can be handed in.
    """
    wanted = list(wanted)
    makers = {value: place for place, operator in enumerate(operators) for value in operator.makes}
    forced: set[int] = set()
    while True:
        acts = _acts(operators, wanted, preserved, forced)
        draws = {place for place, each in enumerate(operators) if each.draws is None}
        more = draws if any(acts[place] is Act.RUN for place in draws) else set[int]()
        for place, operator in enumerate(operators):
            # Somebody may still hold what it writes.
            if acts[place] is Act.SKIP and any(
                value in makers and acts[makers[value]] is Act.RUN for value in operator.writes
            ):
                more = more | {place}
        if more <= forced:
            return acts
        forced |= more


def _acts(
    operators: Sequence[Operator],
    wanted: Sequence[tuple[int, int]],
    preserved: Collection[int],
    forced: Collection[int],
) -> list[Act]:
    at: dict[int, list[int]] = {}
    for value, place in wanted:
        at.setdefault(place, []).append(value)
    want = set(at.get(len(operators), ()))
    acts: list[Act] = []
    for place in range(len(operators) - 1, -1, -1):
        operator = operators[place]
        act = Act.RUN if place in forced else _act_on(operator, want, preserved)
        want.difference_update(operator.makes)
        if act is Act.RUN and not operator.is_view:
            want.update(operator.reads)
            want.update(operator.writes)
        acts.append(act)
        want.update(at.get(place, ()))
    acts.reverse()
    return acts


def _act_on(operator: Operator, want: set[int], preserved: Collection[int]) -> Act:
    if operator.is_view or operator.always_runs or not want.isdisjoint(operator.writes):
        return Act.RUN
    wanted = want.intersection(operator.makes)
    if not wanted:
        return Act.SKIP
    return Act.GIVE if wanted.issubset(preserved) else Act.RUN
