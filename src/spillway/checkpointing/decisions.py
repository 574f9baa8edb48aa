"""What is done with each tensor that a checkpointed function saves, and with each operator when it is replayed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from spillway.capture.identity import ViewRecipe
from spillway.checkpointing.program import Act, Program, SavedTensor, needed
from spillway.errors import RecomputeError
from spillway.operators import Choices
from spillway.records import Decision


class Selection(NamedTuple):
    """What is to be preserved of a function's calls."""

    choices: Choices
    key: Hashable
    """Tells these choices from others."""
    root: torch.nn.Module | None
    """The module that the function belongs to: paths of submodules begin below it."""


class Preserved(NamedTuple):
    """A saved tensor that is kept or offloaded."""

    value: int
    decision: Decision
    recipe: ViewRecipe
    """Where it lies in the memory of the value."""
    whole: ViewRecipe
    """The tensor that the operator gave, which is preserved."""


class PreservedParts(NamedTuple):
    """A saved wrapper whose parts are kept or offloaded."""

    parts: tuple[Preserved, ...]


class Input(NamedTuple):
    """A saved tensor that is one of the function's own, or a view of one."""

    place: int
    recipe: ViewRecipe
    start: int
    """How many elements after the function's tensor it begins."""


class Decisions:
    """Decisions about the calls of a function that do what a program says.

    Args:
        program: what the function does.
        preserved: the values that are kept or offloaded.
    """

    def __init__(self, program: Program, preserved: Mapping[int, Decision]) -> None:
        self.program = program
        self.saved: list[Preserved | PreservedParts | Input | bool] = []
        """Of each saved tensor: how it is preserved, which input it is, ``True`` for a parameter, which is held as it
        is, or ``False``: it is dropped."""
        self._recomputed: set[int] = set()
        wanted: list[tuple[int, int]] = []
        last = -1
        first_of: dict[int, int] = {}
        for number, each in enumerate(program.saved):
            value, recipe = each.value, each.recipe
            if each.is_parameter:
                self.saved.append(True)
                continue
            parts = [part for part, _ in each.parts if program.is_computed(part)]
            if parts and all(part in preserved for part in parts):
                self.saved.append(
                    PreservedParts(
                        tuple(
                            [
                                Preserved(part, preserved[part], recipe, program.recipes[part])
                                for part, recipe in each.parts
                                if part in preserved
                            ]
                        )
                    )
                )
                for part in parts:
                    first_of.setdefault(part, number)
                continue
            if value is None or recipe is None:
                self.saved.append(False)
            elif value in preserved:
                first_of.setdefault(value, number)
                self.saved.append(Preserved(value, preserved[value], recipe, program.recipes[value]))
                continue
            elif value in program.inputs and value not in program.written:
                place, start = program.inputs[value]
                self.saved.append(Input(place, recipe, recipe.offset - start))
                continue
            else:
                self.saved.append(False)
            last = number
            for made in parts if value is None else (value,):
                if program.is_computed(made) and not _is_statistic(program, each):
                    self._recomputed.add(number)
                    place = each.place
                    if place < len(program.operators) and made in program.operators[place].writes:
                        # The operator that saved it writes it (rrelu its noise).
                        place += 1
                    wanted.append((made, place))
        self.acts: list[Act] = needed(program.operators, wanted, preserved.keys())
        """What a replay does with each operator."""
        self.handed: set[int] = {
            value
            for operator, act in zip(program.operators, self.acts, strict=True)
            if act is Act.GIVE
            for value in operator.makes
            if value in preserved
        }
        """Values that a replay is handed."""
        self.until: int = max([last, *(first_of[value] for value in self.handed)])
        """The saved tensor with which a replay may end."""
        reach = program.saved[self.until].place if self.until >= 0 else 0
        self.leaves_out = bool(preserved) and any(act is not Act.RUN for act in self.acts[:reach])
        """Whether a replay leaves out anything before it ends."""
        self.is_validated = False
        """Whether a replay was compared in full, and was right."""
        self.unused: list[Any] = []
        """Selectors that chose nothing."""
        self.kept_bytes: dict[int, int] = {}
        """Bytes that were counted of what is kept, by values."""

    def is_recomputed(self, number: int) -> bool:
        """Whether a replay computes a saved tensor, so that it can be compared."""
        return number in self._recomputed

    @classmethod
    def of(cls, program: Program, choices: Choices, chosen: Mapping[int, tuple[Decision, bool]] | None) -> Decisions:
        """By a plan, selectors or a policy.

        Args:
            program: what the function does.
            choices: the plan, selectors or policy.
            chosen: what these said when the program was recorded; ``None``: it was recorded for others.

        Raises:
            RecomputeError: if a policy says that an output must be saved, and that output is written in place.
        """
        if program.opaque is not None:
            return cls(program, {})
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
                        f"into it in place. Answer with a PREFER value, which allows to recompute it, or write out of "
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
        decisions = cls(program, found)
        decisions.unused = choices.unused()
        return decisions


def _is_statistic(program: Program, saved: SavedTensor) -> bool:
    """Whether a batch norm saved and wrote its running statistics, which its backward does not read in training."""
    if saved.saved_by is None or saved.value in program.makers:
        return False
    operator = program.operators[saved.saved_by]
    return saved.value in operator.writes and "batch_norm" in str(operator.func)
