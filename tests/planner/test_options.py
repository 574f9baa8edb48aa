"""The ways to treat a block, against all the ways there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.blocks import AGAIN, KEEP, profile_of, random_blocks, unsaved
from spillway import UsageError
from spillway.planner.block_tasks import make_option
from spillway.planner.options import block_options, preserved_sets
from spillway.planner.plan import ALL, plan_of, planned_block, program_of
from spillway.planner.planner import problem_of
from spillway.planner.profile import BlockProfile, OperatorProfile, ReplayRule, Value
from spillway.planner.solve import solve
from spillway.planner.tasks import Option, Phase, Rates
from spillway.types import Decision

SETTINGS = settings(derandomize=True, deadline=None, max_examples=60, database=None)
RATES = Rates(1e9, 1e9, 1e9, 1e9, 1 << 20)

allows = st.sets(st.sampled_from(sorted(ALL)), min_size=1)
min_bytes = st.sampled_from((0, 16384, 1 << 30))


def preserving(block: BlockProfile, preserved: Iterable[int]) -> tuple[float, int]:
    """Seconds to compute the rest again, and bytes that are on the device for that."""
    kept = set(preserved)
    decisions = [KEEP if number in kept else AGAIN for number in range(len(block.values))]
    option = make_option(block, decisions, min_bytes=0)
    return option.recompute_seconds, option.kept_bytes


def hull(points: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Corners of the lower hull, from the least bytes to the least seconds."""
    found: list[tuple[float, int]] = []
    for seconds, nbytes in sorted(set(points), key=lambda point: (point[1], point[0])):
        if found and seconds >= found[-1][0] - 1e-12:
            continue
        while len(found) > 1:
            (s0, b0), (s1, b1) = found[-2:]
            if (s0 - s1) * (nbytes - b0) > (s0 - seconds) * (b1 - b0) + 1e-9:
                break
            found.pop()
        found.append((seconds, nbytes))
    return found


@SETTINGS
@given(random_blocks(kinds=(ReplayRule.FREE, ReplayRule.FREE, ReplayRule.FREE, ReplayRule.VIEW), outputs=1))
def test_every_corner_of_the_hull_over_all_sets_is_found(block: BlockProfile) -> None:
    # Of two outputs one of which is saved, the cut counts both, and the treatment one: here one each.
    sets = [each.makes for each in block.operators if each.makes and set(each.makes).isdisjoint(unsaved(block))]
    every = [
        preserving(block, itertools.chain(*some))
        for size in range(len(sets) + 1)
        for some in itertools.combinations(sets, size)
    ]
    found = [preserving(block, each) for each in preserved_sets(block)]
    for seconds, nbytes in hull(every):
        assert any(nbytes == other and seconds == pytest.approx(each, abs=1e-9) for each, other in found), (
            f"{seconds} s with {nbytes} bytes are not among {sorted(found)}"
        )


def check_no_option_is_as_good_as_another_in_everything(block: BlockProfile, least: int, allow: set[str]) -> None:
    options = block_options(block, min_bytes=least, allow=allow)
    assert options
    for one, other in itertools.permutations(options, 2):
        assert not all(a <= b for a, b in zip(counted(one), counted(other), strict=True))


@SETTINGS
@given(random_blocks(), min_bytes, allows, st.randoms(use_true_random=False))
def test_what_is_left_out_is_in_nothing_better_than_what_is_there_also_not_for_the_host(
    block: BlockProfile, least: int, allow: set[str], random: Random
) -> None:
    looked_at: list[Option] = []

    def hosted(*args: Any, **more: Any) -> Option:
        option = make_option(*args, **more)
        forward, backward = (
            tuple(replace(task, host_seconds=random.randint(0, 3) / 8) for task in tasks)
            for tasks in (option.forward, option.backward)
        )
        looked_at.append(replace(option, forward=forward, backward=backward))
        return looked_at[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spillway.planner.options.make_option", hosted)
        options = block_options(block, min_bytes=least, allow=allow)
    for one in looked_at:
        assert any(all(a <= b for a, b in zip(counted(other), counted(one), strict=True)) for other in options)


def counted(option: Option) -> tuple[float, ...]:
    """What an option takes of each thing that there may be too little of."""
    disk = sum(each.nbytes for task in option.forward for each in task.sends if each.on_disk)
    reruns = [task for task in option.backward if task.phase is Phase.RECOMPUTE]
    return (
        option.recompute_seconds,
        option.kept_bytes,
        -option.output_bytes,
        option.sent_bytes - disk,
        disk,
        max((task.peak_bytes for task in option.forward), default=0),
        max((task.peak_bytes for task in reruns), default=0),
        sum(task.host_seconds for task in option.forward),
        sum(task.host_seconds for task in option.backward),
    )


def check_nothing_is_done_that_is_not_allowed(block: BlockProfile, least: int, allow: set[str]) -> None:
    forced = {
        number
        for each in block.operators
        if each.replay is ReplayRule.ALWAYS
        or not {number for other in block.operators for number in other.writes}.isdisjoint(each.makes)
        for number in each.makes
    }
    for option in block_options(block, min_bytes=least, allow=allow):
        tiers = {each.on_disk for task in option.forward for each in task.sends}
        assert tiers <= {on_disk for name, on_disk in (("host", False), ("disk", True)) if name in allow}
        again = {
            number
            for number, value in enumerate(block.values)
            if value.saved_at is not None and value.maker is not None and option.decisions[number] is AGAIN
        }
        if allow == {"recompute"}:
            assert not {
                number
                for number, value in enumerate(block.values)
                if number not in again and value.saved_at is not None and value.maker is not None
            }
        # A region recomputes what it cannot keep; anything else only where that is allowed.
        assert "recompute" in allow or again <= forced
        assert not any(0 < each.nbytes < least for task in option.forward for each in task.sends)


def check_a_menu_is_the_same_each_time(block: BlockProfile, least: int, allow: set[str]) -> None:
    again = replace(block, operators=tuple(map(replace, block.operators)), values=tuple(map(replace, block.values)))
    assert block_options(block, min_bytes=least, allow=allow) == block_options(
        again, min_bytes=least, allow=frozenset(sorted(allow))
    )


@SETTINGS
@given(random_blocks(), min_bytes, allows)
def test_options_are_allowed_different_and_the_same_each_time(block: BlockProfile, least: int, allow: set[str]) -> None:
    check_no_option_is_as_good_as_another_in_everything(block, least, allow)
    check_nothing_is_done_that_is_not_allowed(block, least, allow)
    check_a_menu_is_the_same_each_time(block, least, allow)


@SETTINGS
@given(random_blocks(), min_bytes)
def test_what_a_plan_says_of_an_option_is_that_option_again(block: BlockProfile, least: int) -> None:
    profile = replace(profile_of(block, 1), min_bytes=least)
    problem = problem_of(profile, RATES, budget=1 << 40)
    plan = plan_of(profile, solve(problem))
    for number, option in enumerate(problem.options[0]):
        said = replace(plan, blocks=(planned_block("layers.0", block, option),))
        assert program_of(profile, said) == problem.program([number])


@SETTINGS
@given(random_blocks())
def test_steps_of_the_same_block_share_options_and_others_have_their_own(block: BlockProfile) -> None:
    profile = profile_of(block, 1)
    for least, allow in itertools.product((0, 16384, 1 << 30), (ALL, {"keep", "host"}, {"recompute"})):
        step = replace(profile, min_bytes=least)
        problem = problem_of(step, RATES, budget=1 << 40, allow=allow)
        assert problem.options == (block_options(block, min_bytes=least, allow=allow),)
        again = problem_of(replace(step, static_bytes=1), RATES, budget=1 << 30, allow=set(allow))
        assert again.options[0] is problem.options[0]


def test_a_name_that_is_none_is_refused() -> None:
    block = BlockProfile("block", (), (), 1.0, 1.0, 0, 1.0, 0)
    for allow in ({"keep", "gone"}, set()):
        with pytest.raises(UsageError, match="allow: got"):
            problem_of(profile_of(block, 1), RATES, budget=1, allow=allow)


def test_keeping_all_is_among_the_ways_where_it_is_allowed() -> None:
    value = Value(1 << 20, 0, saved_at=1, dies_at=2)
    block = BlockProfile("block", (OperatorProfile("exp", 1.0, (), (0,)),), (value,), 1.0, 1.0, 0, 1.0, 0)
    assert {option.decisions[0] for option in block_options(block, min_bytes=0, allow={"keep"})} == {Decision.KEEP}
    assert {option.decisions[0] for option in block_options(block, min_bytes=0)} == set(Decision) - {Decision.OFFLOAD}


def test_of_two_outputs_one_of_which_is_saved_both_have_one_fate() -> None:
    # As dropout has it, whose mask is saved, and not its output.
    operator = OperatorProfile("dropout", 1.0, (0,), (1, 2))
    values = (
        Value(4096, None, is_input=True, saved_at=0, dies_at=2),
        Value(4096, 0, dies_at=2),
        Value(1024, 0, saved_at=1, dies_at=2),
    )
    block = BlockProfile("block", (operator,), values, 1.0, 1.0, 0, 1.0, 0)
    options = block_options(block, min_bytes=2048, allow={"keep", "host"})
    assert [option.recompute_seconds for option in options] == [0.0] * len(options)
    assert any(option.sent_bytes == 4096 for option in options)
