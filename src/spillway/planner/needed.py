"""The operators that a replay runs. The engine asks for its own, and a plan for those of a profile.

NOTE [ Needed operators ]

An operator is needed if it makes or writes a wanted value. Then the values that it reads are wanted, too. So operators
are visited from the last to the first. If all wanted outputs of an operator are preserved, it does not run, and they
are handed in. If none of its outputs is wanted, it does not run either: its outputs get memory without content, since
the function's own code still holds and reshapes them. Views always run: they compute nothing.

A random operator that is left out must advance its generator. If a generator cannot be advanced without drawing, either
all operators that draw from such generators run, or none does. An operator that writes in place runs if the target was
computed: other code may hold it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class Act(enum.IntEnum):
    """The act of a replay for an operator. An integer: the hash of another enum is a Python function."""

    RUN = 0
    """It runs."""
    GIVE = 1
    """Its outputs were preserved, and are handed in."""
    SKIP = 2
    """Its outputs get memory without content."""


class ReplayedOperator(Protocol):
    """An operator that a function ran. Its values are numbers."""

    @property
    def reads(self) -> tuple[int, ...]: ...
    @property
    def writes(self) -> tuple[int, ...]: ...
    @property
    def makes(self) -> tuple[int, ...]: ...
    @property
    def is_view(self) -> bool:
        """Whether its outputs are views of its arguments, and it writes nothing."""

    @property
    def always_runs(self) -> bool:
        """Whether every replay runs it."""

    @property
    def draws(self) -> int | None:
        """How far it advances the generator of its device; ``None``: the generator cannot be advanced."""


def needed(
    operators: Sequence[ReplayedOperator], wanted: Iterable[tuple[int, int]], preserved: Collection[int]
) -> list[Act]:
    """The act of a replay for each operator. See NOTE [ Needed operators ].

    ``wanted`` are values to be recomputed, each with the number of operators that had run when it was saved.
    """
    wanted = list(wanted)
    makers = {value: place for place, operator in enumerate(operators) for value in operator.makes}
    forced: set[int] = set()
    while True:
        acts = _acts(operators, wanted, preserved, forced)
        draws = {place for place, each in enumerate(operators) if each.draws is None}
        more = draws if any(acts[place] is Act.RUN for place in draws) else set[int]()
        for place, operator in enumerate(operators):
            # Other code may still hold what it writes.
            if acts[place] is Act.SKIP and any(
                value in makers and acts[makers[value]] is Act.RUN for value in operator.writes
            ):
                more = more | {place}
        if more <= forced:
            return acts
        forced |= more


def _acts(
    operators: Sequence[ReplayedOperator],
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


def _act_on(operator: ReplayedOperator, want: set[int], preserved: Collection[int]) -> Act:
    if operator.is_view or operator.always_runs or not want.isdisjoint(operator.writes):
        return Act.RUN
    wanted = want.intersection(operator.makes)
    if not wanted:
        return Act.SKIP
    return Act.GIVE if wanted.issubset(preserved) else Act.RUN
