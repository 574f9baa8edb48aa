"""Which operators of a program a replay needs: ``needed`` in ``checkpointing/program.py``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import pytest
import torch

from spillway.checkpointing.program import Operator, Program, RecordedTensor, lies_within
from spillway.checkpointing.schema import facts_of
from spillway.planner.needed import Act, needed
from spillway.saved_tensors.identity import ViewRecipe

aten = torch.ops.aten
RUN, GIVE, SKIP = Act.RUN, Act.GIVE, Act.SKIP


def operator(
    reads: Sequence[int],
    makes: Sequence[int] = (),
    *,
    writes: Sequence[int] = (),
    func: Any = aten.sin.default,
    depends: bool = True,
    is_plain: bool = True,
    draws: int | None = 0,
) -> Operator:
    """One that reads, makes and writes these values."""
    made = Operator(func, facts_of(func), tuple(reads), tuple(writes), tuple(makes))
    made.is_plain, made.depends, made.draws = is_plain, depends, draws
    return made


def view(of: int) -> Operator:
    """A view has no value of its own."""
    made = operator([of], func=aten.view.default, is_plain=False)
    made.is_view = True
    return made


CHAIN = [operator([0], [1]), operator([1], [2]), operator([2], [3])]


@pytest.mark.parametrize(
    ("wanted", "preserved", "acts"),
    [
        ([], [], [SKIP, SKIP, SKIP]),
        ([3], [], [RUN, RUN, RUN]),
        ([1], [], [RUN, SKIP, SKIP]),
        ([3], [2], [SKIP, GIVE, RUN]),
        ([3], [1], [GIVE, RUN, RUN]),
        ([3], [1, 2], [SKIP, GIVE, RUN]),
        ([1, 3], [2], [RUN, GIVE, RUN]),
        ([], [1, 2, 3], [SKIP, SKIP, SKIP]),
    ],
)
def test_a_chain_is_run_from_what_is_preserved(wanted: list[int], preserved: list[int], acts: list[Act]) -> None:
    assert needed(CHAIN, [(value, len(CHAIN)) for value in wanted], preserved) == acts


@pytest.mark.parametrize(
    ("wanted", "preserved", "act"),
    [
        ([1, 2], [], RUN),
        ([1, 2], [1], RUN),
        ([1, 2], [1, 2], GIVE),
        ([2], [2], GIVE),
        ([2], [1], RUN),
        ([], [1, 2], SKIP),
    ],
)
def test_of_several_outputs_all_that_are_wanted_must_be_preserved(
    wanted: list[int], preserved: list[int], act: Act
) -> None:
    operators = [operator([0], [1, 2]), *(operator([value], [value + 2]) for value in wanted)]
    assert needed(operators, [(value + 2, len(operators)) for value in wanted], preserved)[0] is act


def test_a_write_runs_if_what_it_writes_was_computed() -> None:
    operators = [operator([0], [1]), operator([0], [2]), operator([1, 2], writes=[1], func=aten.add_.Tensor)]
    # The written tensor is saved before the write. But somebody may hold it.
    assert needed(operators, [(1, 2)], ()) == [RUN, RUN, RUN]
    # What it writes is read by it, and so is the other operand.
    assert needed(operators, [(1, 3)], ()) == [RUN, RUN, RUN]
    assert needed(operators, [(1, 3)], [2]) == [RUN, GIVE, RUN]
    assert needed(operators, [(2, 3)], ()) == [SKIP, RUN, SKIP]


def test_a_write_before_the_last_read_is_needed_by_it() -> None:
    write = operator([1], writes=[1], func=aten.relu_.default)
    operators = [operator([0], [1]), operator([1], [2]), write, operator([1], [3])]
    assert needed(operators, [(2, 4)], ()) == [RUN, RUN, RUN, SKIP]
    assert needed(operators, [(3, 4)], ()) == [RUN, SKIP, RUN, RUN]


def test_views_always_run_and_ask_for_nothing() -> None:
    operators = [operator([0], [1]), view(1), operator([1], [2]), view(2)]
    assert needed(operators, [], ()) == [SKIP, RUN, SKIP, RUN]
    assert needed(operators, [(2, 4)], [1]) == [GIVE, RUN, RUN, RUN]


@pytest.mark.parametrize(
    "always",
    [
        {"is_plain": False},
        {"depends": False},
        {"func": aten.nonzero.default},
        {"func": aten.topk.default},
        {"func": aten.unsqueeze_.default},
    ],
    ids=["outputs that cannot be replaced", "a constant", "a shape", "a choice", "another shape in place"],
)
def test_some_operators_always_run_and_have_what_they_read(always: dict[str, Any]) -> None:
    operators = [operator([0], [1]), operator([1], [2], **always), operator([2], [3])]
    assert needed(operators, [], ()) == [RUN, RUN, SKIP]
    # It runs itself even where its output is preserved.
    assert needed(operators, [(3, 3)], [2]) == [RUN, RUN, RUN]
    assert needed(operators, [], [1]) == [GIVE, RUN, SKIP]


def test_operators_of_a_generator_that_cannot_be_advanced_run_together_or_not_at_all() -> None:
    operators = [operator([0], [1], draws=None), operator([1], [2]), operator([0], [3], draws=None), operator([3], [4])]
    assert needed(operators, [], ()) == [SKIP] * 4
    assert needed(operators, [(4, 4)], [3]) == [SKIP, SKIP, GIVE, RUN]
    # One of them has to draw. The first one draws before it, and what was preserved is drawn again.
    assert needed(operators, [(4, 4)], ()) == [RUN, SKIP, RUN, RUN]
    assert needed(operators, [(2, 4)], ()) == [RUN, RUN, RUN, SKIP]
    assert needed(operators, [(2, 4), (4, 4)], [1]) == [RUN, RUN, RUN, RUN]


def test_what_such_an_operator_reads_is_computed_when_it_has_to_draw() -> None:
    operators = [operator([0], [1]), operator([1], [2], draws=None), operator([0], [3], draws=None)]
    assert needed(operators, [(3, 3)], ()) == [RUN, RUN, RUN]
    assert needed(operators, [(3, 3)], [1]) == [GIVE, RUN, RUN]


def test_operators_of_a_generator_that_can_be_advanced_are_left_out_one_by_one() -> None:
    operators = [operator([0], [1], draws=4), operator([0], [2], draws=4), operator([1, 2], [3])]
    assert needed(operators, [(3, 3)], [1]) == [GIVE, RUN, RUN]
    assert needed(operators, [(2, 3)], ()) == [SKIP, RUN, SKIP]


# Any program, computed with words in place of numbers.


def program(random: Random, *, draws: bool) -> list[Operator]:
    """Any operators, some of which write, give several outputs, or are views."""
    operators: list[Operator] = []
    count = 2
    for _ in range(random.randint(1, 12)):
        reads = random.sample(range(count), random.randint(1, min(3, count)))
        kind = random.choice(["one", "one", "one", "two", "write", "view", "always"])
        if kind == "write" and reads[0] > 1:
            operators.append(operator(reads, writes=reads[:1], func=aten.add_.Tensor))
        elif kind == "view":
            operators.append(view(reads[0]))
        else:
            made = [count, count + 1] if kind == "two" else [count]
            none = None if draws and random.random() < 0.3 else 0
            operators.append(operator(reads, made, is_plain=kind != "always", draws=none))
            count += len(made)
    return operators


Wanted = list[tuple[int, int]]


def computed(
    operators: list[Operator], acts: list[Act], wanted: Wanted, preserved: dict[int, str]
) -> list[str | None] | None:
    """What is saved, and what operators compute that always run, where these acts are done.

    ``None`` in it has no content. ``None`` in its place: an operator reads what has none.
    """
    values: dict[int, str | None] = {0: "a", 1: "b"}
    found: list[str | None] = [None] * len(wanted)
    always: list[str | None] = []
    draws = 0
    for place in range(len(operators) + 1):
        for number, (value, at) in enumerate(wanted):
            if at == place:
                found[number] = values[value]
        if place == len(operators):
            return found + always
        each, act = operators[place], acts[place]
        if each.is_view:
            continue
        if act is not RUN:
            values |= {value: preserved.get(value) for value in each.makes}
            continue
        read = [values[value] for value in each.reads]
        if None in read:
            return None
        draws += each.draws is None
        word = f"{place}:{draws if each.draws is None else ''}({','.join(map(str, read))})"
        if each.always_runs:
            always.append(word)
        values |= {value: f"{word}.{index}" for index, value in enumerate(each.makes)}
        values |= dict.fromkeys(each.writes, word)
    raise AssertionError


def drawn(random: Random, *, draws: bool) -> tuple[list[Operator], Wanted, dict[int, str]]:
    """A program, what is saved and is to be recomputed, and what is preserved."""
    operators = program(random, draws=draws)
    written = {value for each in operators for value in each.writes}
    made = [(value, place) for place, each in enumerate(operators) for value in each.makes]
    kept = {value for value, _ in made if value not in written and random.random() < 0.4}
    whole: Wanted = [(value, len(operators)) for value, _ in made]
    contents = computed(operators, [RUN] * len(operators), whole, {})
    assert contents is not None
    preserved = {value: str(word) for (value, _), word in zip(whole, contents, strict=False) if value in kept}
    wanted = [
        (value, random.randint(place + 1, len(operators)))
        for value, place in made
        if value not in kept and random.random() < 0.4
    ]
    return operators, wanted, preserved


@pytest.mark.parametrize("draws", [False, True], ids=["nothing drawn", "some drawn"])
def test_what_is_wanted_is_computed_in_any_program(draws: bool) -> None:
    for seed in range(2000):
        operators, wanted, preserved = drawn(Random(seed), draws=draws)
        acts = needed(operators, wanted, preserved)
        expected = computed(operators, [RUN] * len(operators), wanted, {})
        assert computed(operators, acts, wanted, preserved) == expected, seed


def feeds_a_write(operators: Sequence[Operator], acts: Sequence[Act], place: int) -> bool:
    """Whether something that runs in place is computed from what an operator makes or writes."""
    hangs_on = {*operators[place].makes, *operators[place].writes}
    for later in range(place + 1, len(operators)):
        each = operators[later]
        if acts[later] is RUN and not hangs_on.isdisjoint((*each.reads, *each.writes)):
            if each.writes:
                return True
            hangs_on.update(each.makes)
    return False


def test_nothing_runs_that_need_not() -> None:
    left_out = 0
    for seed in range(2000):
        operators, wanted, preserved = drawn(Random(seed), draws=False)
        acts = needed(operators, wanted, preserved)
        expected = computed(operators, acts, wanted, preserved)
        for place, each in enumerate(operators):
            if acts[place] is not RUN:
                left_out += 1
            elif not (each.is_view or each.always_runs or each.writes or feeds_a_write(operators, acts, place)):
                fewer = [*acts[:place], SKIP, *acts[place + 1 :]]
                assert computed(operators, fewer, wanted, preserved) != expected, (seed, place)
    assert left_out > 2000


# What can be preserved.


def recipe(tensor: torch.Tensor) -> ViewRecipe:
    return ViewRecipe.of(tensor)


def saving(operators: Sequence[Operator], saved: Collection[int], written: Collection[int] = ()) -> Program:
    """A program of vectors that saves these values at its end."""
    one = recipe(torch.ones(4))
    made = [value for each in operators for value in each.makes]
    return Program(
        operators,
        [RecordedTensor(value, len(operators), one, is_parameter=False) for value in saved],
        {value: place for place, each in enumerate(operators) for value in each.makes},
        frozenset({0}),
        frozenset(written),
        dict.fromkeys(made, one),
    )


def test_a_value_that_is_saved_stands_for_itself() -> None:
    assert saving(CHAIN, [1, 2, 3]).standing_for(2) == {2}


def test_for_a_value_that_is_not_saved_stand_the_nearest_saved_ones_that_are_computed_from_it() -> None:
    operators = [operator([0], [1]), operator([1], [2]), operator([1], [3]), operator([3], [4]), operator([4], [5])]
    program = saving(operators, [2, 4, 5])
    assert program.standing_for(1) == {2, 4}
    assert program.standing_for(3) == {4}
    assert saving(operators, [2]).standing_for(3) == set()


def test_what_is_written_in_place_is_not_preserved() -> None:
    assert saving(CHAIN, [1, 2, 3], written=[2]).standing_for(2) == {3}


def test_what_is_saved_by_more_memory_than_its_operator_gave_is_not_preserved() -> None:
    program = saving(CHAIN, [2])
    program.recipes[2] = recipe(torch.ones(8)[:4])
    assert program.can_be_preserved(2)
    program.saved = [each._replace(recipe=recipe(torch.ones(8))) for each in program.saved]
    assert not program.can_be_preserved(2)


def test_a_part_lies_within_the_whole() -> None:
    base = torch.empty(4, 6)
    whole = recipe(base[:, 1:5])
    for part in (base[:, 1:5], base[1, 2:4], base[:, 1:5].t(), base[2:, 1:3], base[0, 1].expand(3)):
        assert lies_within(recipe(part), whole)
    assert not lies_within(recipe(base), whole)
    assert not lies_within(recipe(base[:1]), whole)
    assert not lies_within(recipe(base[3:, 5:]), whole)
    assert not lies_within(recipe(base.view(torch.int32)[:, 1:5]), whole)
    assert not lies_within(recipe(torch._neg_view(base[:, 1:5])), whole)
