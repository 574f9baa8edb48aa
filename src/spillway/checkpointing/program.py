"""The operators of a checkpointed function, and decisions about its saved tensors.

NOTE [ Values ]

A *value* is a number for the memory of one tensor that an operator made. Views of it are the same value, and in-place
operators write it. So two saved tensors may be one value, and a value is preserved once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from spillway.checkpointing.collector import meta_of
from spillway.checkpointing.schema import OperatorFacts
from spillway.checkpointing.selectors import Choices
from spillway.errors import RecomputeError
from spillway.planner.needed import Act, needed
from spillway.saved_tensors.identity import ViewRecipe
from spillway.types import Decision

_NUMBERS = (int, float, complex)


@dataclass(slots=True, eq=False)
class Operator:
    """One operator that a function ran."""

    func: Any
    facts: OperatorFacts
    reads: tuple[int, ...]
    writes: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    outputs: tuple[Any, ...] = ()
    """For each output: the :class:`ViewRecipe` of a new tensor, the :class:`Argument` that it is, or the number."""
    single: bool = True
    """Whether it returned one object, and not a sequence."""
    is_plain: bool = False
    """Whether all its outputs can be replaced."""
    is_view: bool = False
    """Whether its outputs are views of its arguments, and it writes nothing."""
    depends: bool = False
    """Whether it depends on inputs of the function, or on tensors that require grad. Others may be cached constants."""
    draws: int | None = 0
    """How far it advances the generator of its device; ``None``: the generator cannot be advanced."""
    form: tuple[Any, ...] = ()
    """Its arguments: see :func:`form_of`."""

    @property
    def always_runs(self) -> bool:
        """Whether every replay runs it: shapes or Python code may depend on it, or its outputs cannot be replaced."""
        facts = self.facts
        return not (self.is_plain and self.depends) or facts.is_data_dependent or facts.reshapes


def form_of(facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of an operator, as far as shapes, strides and dtypes of its outputs may depend on them."""
    # Outputs depend on the type of a number that is computed with, and not on its value.
    return tuple(
        [
            type(each) if key in facts.numbers and isinstance(each, _NUMBERS) else _form_of(each)
            for key, each in (*enumerate(args), *kwargs.items())
        ]
    )


def _form_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return meta_of(value)
    if isinstance(value, list | tuple):
        return tuple([_form_of(each) for each in value])
    # With a probability of zero, attention draws nothing.
    return (float, value == 0) if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Argument:
    """An output that is one of the arguments."""

    key: int | str


class RecordedTensor(NamedTuple):
    """One tensor that autograd saved, as the recorder saw it. They are in the order of saving."""

    value: int | None
    """``None`` for a wrapper, or for a parameter that no operator had read."""
    place: int
    """Number of operators that had run."""
    recipe: ViewRecipe | None
    """Its place in the memory of the value."""
    is_parameter: bool
    requires_grad: bool = False
    parts: tuple[tuple[int, ViewRecipe], ...] = ()
    """Values of a wrapper's parts, and where the parts lie in their memory."""
    saved_by: int | None = None


@dataclass(slots=True, eq=False)
class Program:
    """One call of a function: its operators, and the tensors that autograd saved."""

    operators: Sequence[Operator] = ()
    saved: Sequence[RecordedTensor] = ()
    makers: dict[int, int] = field(default_factory=dict)
    """The operator that made each value."""
    inputs: frozenset[int] = frozenset()
    """Values of the function's tensors."""
    written: frozenset[int] = frozenset()
    recipes: dict[int, ViewRecipe] = field(default_factory=dict)
    """The tensor that the operator returned, for each value."""
    chosen: dict[Any, dict[int, tuple[Any, bool]]] = field(default_factory=dict)
    """Choices of selectors and policies: for each operator its decision, and whether it is a command."""
    opaque: str | None = None
    """Why operators cannot be left out, if they cannot."""
    collectives: frozenset[Any] = frozenset()
    """Collectives that it runs: NOTE [ Collectives ] in ``recorder.py``."""
    gathers: bool = False
    """Whether modules inside of it gather their own parameters."""

    def is_computed(self, value: int) -> bool:
        """Whether an operator made or wrote it."""
        return value in self.makers or value in self.written

    def can_be_preserved(self, value: int) -> bool:
        """Whether autograd saves it, and nothing but parts of what its operator gave: so it can be handed in."""
        whole = self.recipes.get(value)
        if whole is None or value in self.written:
            return False
        saves = [
            recipe for each in self.saved for part, recipe in (*each.parts, (each.value, each.recipe)) if part == value
        ]
        return bool(saves) and all(recipe is not None and lies_within(recipe, whole) for recipe in saves)

    def standing_for(self, value: int) -> set[int]:
        """The value itself, if autograd saves it. Otherwise the nearest saved values that are computed from it."""
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


def lies_within(part: ViewRecipe, whole: ViewRecipe) -> bool:
    """Whether a tensor lies within the span of another tensor over the same memory."""
    if (part.dtype, part.device, part.conj, part.neg) != (whole.dtype, whole.device, whole.conj, whole.neg):
        return False
    return whole.offset <= part.offset and _last(part) <= _last(whole)


def _last(recipe: ViewRecipe) -> int:
    return recipe.offset + sum((size - 1) * stride for size, stride in zip(recipe.size, recipe.stride, strict=True))


class Preserved(NamedTuple):
    """A saved tensor that is kept or offloaded."""

    value: int
    decision: Decision
    recipe: ViewRecipe
    """Its place in the memory of the value."""
    whole: ViewRecipe
    """The tensor that the operator returned, which is preserved."""


Saved = Preserved | list[Preserved] | Literal["input"] | bool
"""A saved tensor of a call: how it is preserved (a wrapper by its parts), ``"input"`` for an argument or a view of one,
``True`` for a parameter, which is held as it is, or ``False``: it is dropped."""


class Decisions:
    """Decisions about the calls of a function that follow a program. ``preserved``: values to keep or offload."""

    def __init__(self, program: Program, preserved: Mapping[int, Decision]) -> None:
        self.program = program
        self.saved = [self._saved(each, preserved) for each in program.saved]
        self.preserves = any(isinstance(how, (Preserved, list)) for how in self.saved)
        """Whether a saved tensor is preserved besides the function's inputs."""
        self.recomputed: set[int] = set()
        """Numbers of saved tensors that a replay computes, so that they can be compared."""
        wanted: list[tuple[int, int]] = []
        last = -1
        first_of: dict[int, int] = {}
        for number, (each, how) in enumerate(zip(program.saved, self.saved, strict=True)):
            if isinstance(how, Preserved):
                first_of.setdefault(how.value, number)
            elif isinstance(how, list):
                for part in how:
                    first_of.setdefault(part.value, number)
            elif how is False:
                last = number
                values = [part for part, _ in each.parts] if each.value is None else [each.value]
                made = [] if _is_statistic(program, each) else [value for value in values if program.is_computed(value)]
                # The operator that saved a tensor may write it (rrelu its noise).
                writes = program.operators[each.place].writes if each.place < len(program.operators) else ()
                wanted += [(value, each.place + (value in writes)) for value in made]
                if made or (each.value is not None and not _is_statistic(program, each)):
                    # Also one that no operator made: the function may have computed it unseen.
                    self.recomputed.add(number)
        self.acts: list[Act] = needed(program.operators, wanted, preserved.keys())
        """Acts of a replay, by operators."""
        self.handed: set[int] = {
            value
            for operator, act in zip(program.operators, self.acts, strict=True)
            if act is Act.GIVE
            for value in operator.makes
            if value in preserved
        }
        """Values that are handed to a replay."""
        self.until: int = max([last, *(first_of[value] for value in self.handed)])
        """The saved tensor with which a replay may end."""
        reach = program.saved[self.until].place if self.until >= 0 else 0
        self.leaves_out = self.preserves and any(act is not Act.RUN for act in self.acts[:reach])
        """Whether a replay leaves out an operator before it ends."""
        self.is_new = self.leaves_out
        """Whether a replay must be compared in full before others are trusted."""
        self.is_whole = False
        """Whether nothing is preserved because of collectives or gathers."""
        self.unused: list[Any] = []
        """Selectors that matched no operator."""
        self.kept_bytes: dict[int, int] = {}
        """Counted bytes of kept tensors, by values."""

    def _saved(self, saved: RecordedTensor, preserved: Mapping[int, Decision]) -> Saved:
        program, value, recipe = self.program, saved.value, saved.recipe
        if saved.is_parameter:
            return True
        parts = [part for part, _ in saved.parts if program.is_computed(part)]
        if parts and all(part in preserved for part in parts):
            return [Preserved(v, preserved[v], r, program.recipes[v]) for v, r in saved.parts if v in preserved]
        if value is None or recipe is None:
            return False
        if value in preserved:
            return Preserved(value, preserved[value], recipe, program.recipes[value])
        return "input" if value in program.inputs and value not in program.written else False

    @classmethod
    def of(cls, program: Program, choices: Choices, chosen: Mapping[int, tuple[Decision, bool]] | None) -> Decisions:
        """Decisions by a plan, selectors or a policy.

        ``chosen`` are their choices when the program was recorded; ``None``: it was recorded for others.

        Raises:
            RecomputeError: if a policy says that an output must be saved, and that output is written in place.
        """
        found: dict[int, Decision] = {}

        def add(values: set[int], decision: Decision) -> None:
            for value in values:
                if found.get(value) is not Decision.KEEP:
                    found[value] = decision

        for place, operator in enumerate(program.operators):
            decision, must = (None, False) if chosen is None else chosen.get(place, (None, False))
            if choices.planned is not None:
                decision = choices.by_place(place, operator.func) if operator.makes else None
            elif chosen is None:
                decision = choices.by_name(operator.func)
            if decision is None or decision is Decision.RECOMPUTE:
                continue
            for value in operator.makes:
                if must and value in program.written:
                    raise RecomputeError(
                        f"The policy says that the output of {operator.func} must be saved, but the function writes "
                        f"into it in place. Answer with a PREFER value, so that it may be recomputed, or write out of "
                        f"place."
                    )
                if choices.planned is None:
                    add(program.standing_for(value), decision)
                elif program.can_be_preserved(value):
                    add({value}, decision)
        for saved in program.saved:
            if saved.value is None or saved.saved_by is None:
                continue
            saving = choices.by_saving(program.operators[saved.saved_by].func)
            if saving is not None and program.can_be_preserved(saved.value) and saved.value not in found:
                found[saved.value] = saving
        named = any(choices.by_name(each) is not None for each in program.collectives) or any(
            program.operators[place].facts.communicates for place in chosen or ()
        )
        is_whole = bool(found and (program.gathers or (program.collectives and not named)))
        decisions = cls(program, {} if is_whole else found)
        decisions.is_whole, decisions.unused = is_whole, choices.unused()
        return decisions


def _is_statistic(program: Program, saved: RecordedTensor) -> bool:
    """Whether a batch norm saved its running statistics, which it writes, and does not read in backward."""
    if saved.saved_by is None or saved.value in program.makers:
        return False
    operator = program.operators[saved.saved_by]
    return saved.value in operator.writes and "batch_norm" in str(operator.func)
