"""What a block's treatment comes to, against the engine, against sums that must hold, and against figures by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spillway
from planner.blocks import (
    AGAIN,
    DISK,
    HOST,
    KEEP,
    MODULES,
    Replayed,
    decoded,
    profiled,
    random_blocks,
    told_apart,
    unsaved,
)
from spillway.attaching.blocks import how_of
from spillway.planner.block_tasks import ResolvedDecisions, make_option, offloaded_at
from spillway.planner.plan import planned_block
from spillway.planner.profile import BackwardPart, BlockProfile, HostTimes, OperatorProfile, ReplayRule, Value
from spillway.planner.tasks import Option, Part, Phase, Problem, Rates, Sent, Streamed
from spillway.types import Decision

SETTINGS = settings(derandomize=True, deadline=None, max_examples=200, database=None)
FEW = settings(SETTINGS, max_examples=40)

decisions = st.sampled_from((KEEP, HOST, DISK, AGAIN))


@pytest.fixture(scope="module")
def session() -> Iterator[spillway.Session]:
    with spillway.Session() as session:
        yield session


@cache
def module(name: str) -> torch.nn.Module:
    torch.manual_seed(7)
    return MODULES[name]()


_profiles: dict[str, BlockProfile] = {}


def profile_of_module(name: str, session: spillway.Session) -> BlockProfile:
    if name not in _profiles:
        _profiles[name] = told_apart(profiled(module(name), session))
    return _profiles[name]


@pytest.mark.parametrize("name", MODULES)
@FEW
@given(data=st.data())
def test_what_runs_again_is_given_and_is_held_is_what_the_engine_says(
    name: str, session: spillway.Session, data: st.DataObject
) -> None:
    block = profile_of_module(name, session)
    drawn = data.draw(st.lists(decisions, min_size=len(block.values), max_size=len(block.values)))
    if any(drawn[number] is AGAIN for number, value in enumerate(block.values) if value.saved_at is not None):
        # A menu has nothing else in it.
        drawn = [AGAIN if number in unsaved(block) else each for number, each in enumerate(drawn)]
    option = make_option(block, drawn, min_bytes=0)
    how = how_of(planned_block("block", block, option))
    if how is None or not how.policy.recomputes:
        assert not any(task.phase is Phase.RECOMPUTE for task in option.backward)
        assert how is not None or not any(task.takes for task in option.backward)
        return
    engine = Replayed.of(module(name), how, session)
    reruns = [task for task in option.backward if task.phase is Phase.RECOMPUTE]
    runs = decoded(sum(task.seconds for task in reruns))
    views = {place for place, each in enumerate(block.operators) if each.replay is ReplayRule.VIEW}
    reach = ResolvedDecisions.of(block, option.decisions, 0).reach
    assert engine.reach <= reach
    expected = tuple(block.operators[place].name for place in range(reach) if place in runs | views)
    if name == "Dropout":
        # On a CPU, all that draws runs again if anything does.
        assert set(expected) <= set(engine.ran)
        return
    assert engine.ran[: len(expected)] == expected
    # A replay ends when the next operator saves something. Views save nothing.
    assert set(engine.ran[len(expected) :]) <= {block.operators[place].name for place in views if place >= reach}
    assert decoded(sum(task.change_bytes for task in reruns)) == engine.again
    made = {number for number, value in enumerate(block.values) if value.maker is not None}
    saved = {number for number in made if block.values[number].saved_at is not None}
    held = decoded(held_bytes(block, option)) & made
    assert held == (saved - engine.again) | engine.given


def held_bytes(block: BlockProfile, option: Option) -> int:
    """What backward lets go of, and did not make itself."""
    change = sum(task.change_bytes for task in option.backward) - block.backward_change_bytes
    dropped = {key for task in option.backward for key in task.drops}
    return sum(block.values[key].nbytes for key in dropped) - change


@st.composite
def treated(draw: st.DrawFn) -> tuple[BlockProfile, Option, int]:
    """A random block, treated at random, and from how many bytes on something leaves."""
    block = draw(random_blocks())
    drawn = draw(st.lists(decisions, min_size=len(block.values), max_size=len(block.values)))
    min_bytes = draw(st.sampled_from((0, 16384, 1 << 30)))
    return block, make_option(block, drawn, min_bytes=min_bytes), min_bytes


def check_bytes_of_a_block_end_as_its_output_and_gradients_for_its_input(
    case: tuple[BlockProfile, Option, int],
) -> None:
    block, option, _ = case
    made = [value for value in block.values if value.maker is not None]
    outputs = sum(value.nbytes for value in made if value.dies_at > len(block.operators))
    taken = sum(value.nbytes for value in block.values if value.is_input)
    total = sum(task.change_bytes for task in (*option.forward, *option.backward)) - option.sent_bytes
    assert total == block.backward_change_bytes + outputs - taken


def check_a_peak_is_never_below_the_levels_around_it(case: tuple[BlockProfile, Option, int]) -> None:
    for task in (*case[1].forward, *case[1].backward):
        assert task.peak_bytes >= max(task.change_bytes, 0)


def check_what_is_sent_is_taken_after_it_and_dropped_once_after_it_was_taken_last(
    case: tuple[BlockProfile, Option, int],
) -> None:
    block, option, min_bytes = case
    sent = [each for task in option.forward for each in task.sends]
    assert all(count == 1 for count in Counter(each.key for each in sent).values())
    assert all(each.nbytes == block.values[each.key].nbytes >= min_bytes for each in sent)
    assert all(each.on_disk == (option.decisions[each.key] is DISK) for each in sent)
    there = {each.key for each in sent}
    assert not any(task.takes or task.drops for task in option.forward)
    assert not any(task.sends for task in option.backward)
    for task in option.backward:
        assert there.issuperset(task.takes)
        assert there.issuperset(task.drops)
        assert len(set(task.drops)) == len(task.drops)
        there.difference_update(task.drops)
    assert not there


def check_times_of_a_block_are_those_that_were_measured_and_what_runs_again(
    case: tuple[BlockProfile, Option, int],
) -> None:
    block, option, _ = case
    again = sum(task.seconds for task in option.backward if task.phase is Phase.BACKWARD)
    assert sum(task.seconds for task in option.forward) == pytest.approx(block.forward_seconds, abs=1e-6)
    assert again == pytest.approx(block.backward_seconds)
    assert 0 <= option.recompute_seconds <= block.recompute_factor * block.forward_seconds + 1e-9


def check_decisions_that_were_treated_once_are_treated_the_same_again(case: tuple[BlockProfile, Option, int]) -> None:
    block, option, min_bytes = case
    assert make_option(block, option.decisions, min_bytes=min_bytes) == option


@SETTINGS
@given(treated())
def test_tasks_of_random_blocks_and_decisions_are_consistent(case: tuple[BlockProfile, Option, int]) -> None:
    check_bytes_of_a_block_end_as_its_output_and_gradients_for_its_input(case)
    check_a_peak_is_never_below_the_levels_around_it(case)
    check_what_is_sent_is_taken_after_it_and_dropped_once_after_it_was_taken_last(case)
    check_times_of_a_block_are_those_that_were_measured_and_what_runs_again(case)
    check_decisions_that_were_treated_once_are_treated_the_same_again(case)


# By hand: x goes through a norm, a product and an activation, and is added to what comes of it.
X, WEIGHT, NORMED, PRODUCT, ACTIVE, SUM = range(6)
BY_HAND = BlockProfile(
    kind="by hand",
    operators=(
        OperatorProfile("norm", 1.0, (X,), (NORMED,)),
        OperatorProfile("mm", 4.0, (NORMED, WEIGHT), (PRODUCT,), workspace_bytes=10),
        OperatorProfile("act", 2.0, (PRODUCT,), (ACTIVE,)),
        OperatorProfile("add", 1.0, (ACTIVE, X), (SUM,)),
    ),
    values=(
        Value(100, None, is_input=True, saved_at=0, dies_at=5),
        Value(1000, None, dies_at=5),
        Value(40, 0, saved_at=1, dies_at=2),  # by the product, which is the last to read it
        Value(80, 1, saved_at=2, dies_at=3),  # by the activation
        Value(60, 2, saved_at=3, dies_at=4),  # by the sum
        Value(100, 3, dies_at=5),  # the output
    ),
    forward_seconds=8.0,
    backward_seconds=16.0,
    backward_peak_bytes=300,
    backward_change_bytes=7,
    recompute_factor=1.5,
)


def figures(option: Option) -> list[tuple[object, ...]]:
    return [
        (task.name, round(task.seconds, 9), task.peak_bytes, task.change_bytes, task.sends, task.takes, task.drops)
        for task in (*option.forward, *option.backward)
    ]


def test_a_block_that_keeps_all_by_hand() -> None:
    option = make_option(BY_HAND, [KEEP] * 6, min_bytes=0)
    assert figures(option) == [
        # 40 + 80 + 60 + 100 made, and all are there when the last is: 280. The product's 10 are gone by then.
        ("forward", 8.0, 280, 280, (), (), ()),
        # 40 + 80 + 60 saved and the input's 100 go, 7 of gradients come. The output is its taker's to let go of.
        ("backward", 16.0, 300, -273, (), (), ()),
    ]
    assert (option.kept_bytes, option.sent_bytes, option.recompute_seconds) == (280, 0, 0)


def test_an_input_that_nobody_saves_is_held_by_a_region_alone() -> None:
    values = (replace(BY_HAND.values[X], saved_at=None), *BY_HAND.values[1:])
    block = replace(BY_HAND, values=values)
    # Who called the block lets go of the input's 100, and nothing holds them.
    assert make_option(block, [KEEP] * 6, min_bytes=0).kept_bytes == 180
    assert make_option(block, [AGAIN] * 6, min_bytes=0).kept_bytes == 100
    leaves = [HOST if number == PRODUCT else KEEP for number in range(6)]
    assert make_option(block, leaves, min_bytes=0).kept_bytes == 100
    leaves[ACTIVE] = AGAIN
    assert make_option(block, leaves, min_bytes=0).kept_bytes == 100 + 40
    assert not any(task.takes for task in make_option(block, [HOST, *[KEEP] * 5], min_bytes=0).backward)


def test_a_block_that_computes_all_again_by_hand() -> None:
    option = make_option(BY_HAND, [AGAIN] * 6, min_bytes=0)
    assert figures(option) == [
        # norm: 40; mm: 40 + 80 + 10; act: 80 + 60, the norm's being dead; add: 60 + 100. 100 are left.
        ("forward", 8.0, 160, 100, (), (), ()),
        # It ends before the sum: 1.5 * (1 + 4 + 2) s. All three are there in the end.
        ("recomputation", 10.5, 180, 180, (), (), ()),
        ("backward", 16.0, 300, -273, (), (), ()),
    ]


def test_a_block_that_sends_and_computes_again_by_hand() -> None:
    option = make_option(BY_HAND, [HOST, KEEP, AGAIN, DISK, AGAIN, AGAIN], min_bytes=0)
    assert figures(option) == [
        # The input leaves after the first operator.
        ("forward", 1.0, 40, 40, (Sent(X, 100),), (), ()),
        # mm: 40 + 80 + 10 = 130; act: 80 + 60 = 140, of which 40 were there before. The input's 100 may be away, and
        # yet be held by who called the block. The product leaves after that.
        ("forward", 6.0, 200, 100, (Sent(PRODUCT, 80, on_disk=True),), (), ()),
        # add: 140 + 100 = 240, of which 140 were there before, and the input's 100. Then act's 60 die.
        ("forward", 1.0, 200, 40, (), (), ()),
        # For act's output act runs, on the product; for the norm's the norm runs, on the input: 1.5 * (2 + 1) s.
        ("recomputation", 4.5, 100, 100, (), (X, PRODUCT), ()),
        # Of 16 s, the sum's eighth: then act's output goes.
        ("backward", 2.0, 300, -60, (), (), ()),
        # Six eighths, with the product: then that and the norm's output go.
        ("backward", 12.0, 300, -40, (), (PRODUCT,), (PRODUCT,)),
        ("backward", 2.0, 300, 7, (), (X,), (X,)),
    ]
    # The output's 100 are there instead of the input's.
    assert (option.kept_bytes, option.sent_bytes, option.recompute_seconds) == (0, 180, 4.5)


def test_an_output_that_is_saved_is_there_until_backward_though_its_taker_lets_go_of_it() -> None:
    values = (*BY_HAND.values[:SUM], replace(BY_HAND.values[SUM], saved_at=4))
    block = replace(BY_HAND, values=values)
    plain, saved = (make_option(each, [KEEP] * 6, min_bytes=0) for each in (BY_HAND, block))
    assert saved.kept_bytes == plain.kept_bytes + 100
    assert saved.backward[0].change_bytes == plain.backward[0].change_bytes - 100


def test_an_output_that_two_blocks_keep_is_there_once_and_one_that_leaves_is_counted_for_both() -> None:
    values = (*BY_HAND.values[:SUM], replace(BY_HAND.values[SUM], saved_at=4))
    block = replace(BY_HAND, values=values)
    keeps = make_option(block, [KEEP] * 6, min_bytes=0)
    gives = make_option(block, [KEEP] * 5 + [HOST], min_bytes=0)
    sends = make_option(block, [HOST] + [KEEP] * 5, min_bytes=0)
    assert [option.output_bytes for option in (keeps, gives, sends)] == [100, 0, 100]
    assert [option.input_bytes for option in (keeps, gives, sends)] == [100, 100, 0]

    def levels(*options: Option) -> list[int]:
        """At the ends of the blocks' tasks, before copies."""
        rates = Rates(1e9, 1e9, 1e9, 1e9, 1 << 20)
        ways = tuple((each,) for each in options)
        problem = Problem(1000, (Part(2),), ("a", "b"), ways, rates, 1, (0, 0), (Streamed(), Streamed()))
        changes = [task.change_bytes for task in problem.program((0, 0)).tasks]
        return list(accumulate(changes, initial=1000))

    alone = sum(task.change_bytes for task in keeps.forward)
    gradient = block.backward_change_bytes
    twice, once = levels(gives, keeps), levels(keeps, keeps)
    assert twice[2] == once[2] + 100 == 1000 + 2 * alone
    # The second block has done with it, and the first has not.
    assert once[3] == 1000 + alone + gradient
    assert levels(keeps, sends)[3] == 1000 + 2 * alone


def test_what_is_written_after_it_was_made_is_computed_again_with_its_writers_but_where_a_block_is_left_alone() -> None:
    writer = OperatorProfile("relu_", 2.0, (PRODUCT,), (), (PRODUCT,))
    values = list(BY_HAND.values)
    values[PRODUCT] = replace(values[PRODUCT], saved_at=3, dies_at=4)
    values[ACTIVE] = replace(values[ACTIVE], maker=3, saved_at=None, dies_at=4)
    block = replace(
        BY_HAND, operators=(*BY_HAND.operators[:2], writer, *BY_HAND.operators[2:3]), values=tuple(values[:SUM])
    )
    assert not make_option(block, [KEEP] * 5, min_bytes=0).recompute_seconds
    # The norm's output is kept, so that the product and its writer run.
    again = [HOST, KEEP, KEEP, AGAIN, KEEP]
    assert make_option(block, again, min_bytes=0).recompute_seconds == pytest.approx(1.5 * 8 * (4 + 2) / 9)
    assert not make_option(block, [HOST, *[KEEP] * 4], min_bytes=0).recompute_seconds


def test_a_re_run_goes_on_to_where_the_last_was_saved_last() -> None:
    once = make_option(BY_HAND, [KEEP, KEEP, AGAIN, KEEP, KEEP, AGAIN], min_bytes=0)
    values = list(BY_HAND.values)
    values[NORMED] = replace(values[NORMED], saved_last_at=3, dies_at=4)
    twice = make_option(replace(BY_HAND, values=tuple(values)), [KEEP, KEEP, AGAIN, KEEP, KEEP, AGAIN], min_bytes=0)
    (first,), (last,) = (
        [task for task in option.backward if task.phase is Phase.RECOMPUTE] for option in (once, twice)
    )
    # The norm's 40; then, unwritten, the product's 80 and the activation's 60 are there.
    assert (first.peak_bytes, first.change_bytes, first.seconds) == (40, 40, 1.5)
    assert (last.peak_bytes, last.change_bytes, last.seconds) == (180, 40, 1.5)


def test_no_plan_names_what_nobody_needs() -> None:
    """What only the kept one read, say: a region would hold it until the block has ended."""
    values = list(BY_HAND.values)
    values[NORMED] = replace(values[NORMED], saved_at=None)
    block = replace(BY_HAND, values=tuple(values))
    named = make_option(block, [KEEP, KEEP, KEEP, KEEP, AGAIN, AGAIN], min_bytes=0)
    assert named.decisions[NORMED] is AGAIN
    assert named == make_option(block, [KEEP, KEEP, AGAIN, KEEP, AGAIN, AGAIN], min_bytes=0)
    # It is needed where the product is not kept, and where nothing runs again it is as it is.
    assert make_option(block, [KEEP, KEEP, KEEP, AGAIN, AGAIN, AGAIN], min_bytes=0).decisions[NORMED] is KEEP
    assert make_option(block, [KEEP] * 6, min_bytes=0).decisions[NORMED] is KEEP


def test_what_runs_in_any_case_is_kept_where_nothing_is_computed_again_and_never_leaves() -> None:
    operators = (replace(BY_HAND.operators[0], replay=ReplayRule.ALWAYS), *BY_HAND.operators[1:])
    block = replace(BY_HAND, operators=operators)
    option = make_option(block, [HOST] * 6, min_bytes=0)
    assert NORMED not in {each.key for task in option.forward for each in task.sends}
    assert option.decisions[NORMED] is KEEP
    # A replay makes it anyway: 1.5 * (1 + 2) s for it and the activation.
    option = make_option(block, [KEEP, KEEP, KEEP, KEEP, AGAIN, KEEP], min_bytes=0)
    assert option.decisions[NORMED] is AGAIN
    assert option.recompute_seconds == 4.5
    # Of what is held, only the input and the product are left.
    assert option.kept_bytes == 100 + 80


def test_a_block_without_operators_or_without_times_takes_what_was_measured() -> None:
    empty = replace(BY_HAND, operators=(), values=BY_HAND.values[:1])
    unknown = replace(BY_HAND, operators=tuple(replace(each, seconds=0.0) for each in BY_HAND.operators))
    for block in (empty, unknown):
        option = make_option(block, [HOST] * len(block.values), min_bytes=0)
        assert sum(task.seconds for task in option.forward) == pytest.approx(8.0)
        assert sum(task.seconds for task in option.backward) == pytest.approx(16.0)
        assert X in {each.key for task in option.forward for each in task.sends}


PARTS = (BackwardPart(4, 30, 0), BackwardPart(4, 150, 10), BackwardPart(3, 120, 60), BackwardPart(2, 90, 20))


def test_what_a_backward_needs_is_that_of_the_part_in_which_it_is_by_hand() -> None:
    block = replace(BY_HAND, backward_parts=PARTS)
    (_, plain) = figures(make_option(block, [KEEP] * 6, min_bytes=0))
    # Of its parts the second: in the third the 60 of act's output are gone, in the fourth the product's 80, too.
    assert plain[2] == 150
    option = make_option(block, [HOST, KEEP, AGAIN, DISK, AGAIN, AGAIN], min_bytes=0)
    peaks = [(task.name, task.peak_bytes) for task in option.backward]
    # The 10 of the second part are there when act and the norm run again. In the third the product's 80 are there; and
    # for the norm's backward nothing more is known than for the product's.
    assert peaks == [("recomputation", 110), ("backward", 150), ("backward", 120), ("backward", 90)]


@pytest.mark.parametrize(("decision", "most"), [(KEEP, 170), (HOST, 150), (AGAIN, 150)])
def test_kept_storages_are_there_at_the_end_of_their_operators_backward(decision: Decision, most: int) -> None:
    # At the end of the third part 230 are there beside the product's 80, of which the activation's 60 are gone.
    block = replace(BY_HAND, backward_parts=(*PARTS[:2], replace(PARTS[2], held_peak_bytes=230), PARTS[3]))
    option = make_option(block, [KEEP, KEEP, KEEP, decision, KEEP, KEEP], min_bytes=0)
    assert max(task.peak_bytes for task in option.backward if task.name == "backward") == most


def test_what_is_saved_twice_is_asked_for_where_it_was_saved_last_and_is_gone_where_it_was_saved_first() -> None:
    values = list(BY_HAND.values)
    values[NORMED] = replace(values[NORMED], saved_last_at=3)
    block = replace(BY_HAND, values=tuple(values))
    sent = make_option(block, [KEEP, KEEP, HOST, KEEP, KEEP, KEEP], min_bytes=0)
    tasks = [(task.takes, task.drops) for task in sent.backward]
    assert tasks == [((NORMED,), ()), ((), (NORMED,))]
    once = make_option(BY_HAND, [KEEP, KEEP, HOST, KEEP, KEEP, KEEP], min_bytes=0)
    assert [(task.takes, task.drops) for task in once.backward] == [((), ()), ((NORMED,), (NORMED,))]
    # What runs again for it runs earlier.
    again = make_option(block, [KEEP, KEEP, AGAIN, KEEP, KEEP, KEEP], min_bytes=0)
    assert again.backward[0].phase is Phase.RECOMPUTE
    assert make_option(BY_HAND, [KEEP, KEEP, AGAIN, KEEP, KEEP, KEEP], min_bytes=0).backward[1].phase is Phase.RECOMPUTE


@pytest.mark.parametrize(
    ("saves_at", "at"),
    [((), (1, 2, 3, 4)), ((0, 1, 2, 3), (1, 2, 3, 4)), ((0, 1, 3), (1, 3, 3, 4)), ((0,), (4, 4, 4, 4))],
    ids=["not known", "each by its own operator", "two by one", "all by one"],
)
def test_what_is_saved_leaves_when_something_is_saved_for_a_later_operator(
    saves_at: tuple[int, ...], at: tuple[int, ...]
) -> None:
    block = replace(BY_HAND, saves_at=saves_at)
    assert tuple(offloaded_at(block, number) for number in (X, NORMED, PRODUCT, ACTIVE)) == at


def host_seconds(*decisions: Decision) -> list[tuple[str, float]]:
    """Of a block whose forward takes the host 1 s where it is left alone: a quarter of a second for each operator."""
    block = replace(BY_HAND, host=HostTimes(plain=1.0, checkpointed=9.0, replay=6.0, backward=4.0))
    option = make_option(block, decisions, min_bytes=0)
    return [(task.name, task.host_seconds) for task in (*option.forward, *option.backward)]


def test_the_host_does_nothing_more_for_a_block_that_is_left_alone() -> None:
    assert host_seconds(*[KEEP] * 6) == [("forward", 1.0), ("backward", 4.0)]


def test_the_hosts_seconds_by_hand() -> None:
    # Twice as long as for an operator for the input that stays. The replay goes through three of four operators.
    assert host_seconds(*[AGAIN] * 6) == [("forward", 9.5), ("recomputation", 4.5), ("backward", 4.0)]
    sent = host_seconds(HOST, KEEP, AGAIN, DISK, AGAIN, AGAIN)
    # Ten times as long for each of two that leave, and 6.4 times to bring one back.
    assert sum(seconds for name, seconds in sent if name == "forward") == pytest.approx(9.0 + 2 * 2.5)
    assert sum(seconds for name, seconds in sent if name == "backward") == pytest.approx(4.0 + 2 * 1.6)
    # The replay is handed the product: each of the three operators that it goes through takes as long once more as in a
    # plain block.
    assert [seconds for name, seconds in sent if name == "recomputation"] == [4.5 + 3 * 0.25]
    # Where nothing is computed again, the block is not replayed: one leaves, three are kept, one comes back.
    sent = host_seconds(HOST, *[KEEP] * 5)
    assert sum(seconds for name, seconds in sent if name == "forward") == pytest.approx(1.0 + 2.5 + 3 * 0.5)
    assert sum(seconds for name, seconds in sent if name == "backward") == pytest.approx(4.0 + 1.6)
