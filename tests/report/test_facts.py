"""The numbers that page, trace and terminal share: that they are those of the simulation, and add up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import pytest

from report.conftest import with_tasks
from spillway import UsageError
from spillway.planner.block_tasks import ResolvedDecisions
from spillway.planner.hardware import Hardware
from spillway.planner.plan import Plan, options_of, program_of, uniform_program
from spillway.planner.planner import Point, divided, planning_rates
from spillway.planner.profile import OptimizerProfile, Profile
from spillway.planner.report.facts import Facts, Row, facts_of
from spillway.planner.report.text import grouped, names_of
from spillway.planner.tasks import measured_groups
from spillway.planner.timeline import simulate_program
from spillway.types import Decision
from spillway.units import format_bytes, format_seconds

Made = Callable[..., Facts]
GIB = 1 << 30


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("slow", [False, True])
def test_layers_add_up_to_what_the_simulation_has_and_none_is_below_zero(facts: Made, slow: bool, told: bool) -> None:
    found = facts(slow=slow, told=told)
    totals = [sum(each) for each in zip(*(layer.nbytes for layer in found.layers), strict=True)]
    # Of the levels at one moment the last one is shown, and before it the highest one, if that is higher.
    expected = []
    for _, levels in groupby(found.timeline.levels, key=lambda level: level.seconds):
        there = [level.device for level in levels]
        expected += [max(there), there[-1]] if max(there) > there[-1] else there[-1:]
    assert totals == expected
    assert max(totals) == found.timeline.peak_bytes
    assert all(nbytes >= 0 for layer in found.layers for nbytes in layer.nbytes)
    assert all(one < other for one, other in pairwise(found.instants))
    assert found.instants[-1] == pytest.approx(found.timeline.seconds, rel=1e-3)
    assert len(found.host_bytes) == len(found.disk_bytes) == len(found.instants)
    assert max(found.host_bytes) == found.timeline.host_bytes


def test_static_bytes_are_told_apart_where_the_profile_tells_them(facts: Made) -> None:
    layers = {layer.key: layer for layer in facts().layers}
    static = facts().profile.static
    assert static is not None
    assert set(layers["weights"].nbytes) == {static.weights} and set(layers["optimizer"].nbytes) == {static.optimizer}
    gradients = layers["gradients"].nbytes
    # There from the begin on, more of them in backward, and next to none in the end.
    assert gradients[0] == static.gradients and gradients[-1] < 1 << 20
    assert max(gradients) == static.gradients + (6 * 64 << 20)
    assert facts(told=False).layers[0].key == "static"
    assert not {"weights", "optimizer", "other"} & {layer.key for layer in facts(told=False).layers}


def test_state_of_an_unknown_optimizer_is_said_to_be_among_the_rest(facts: Made) -> None:
    found = facts()
    assert found.profile.static is not None
    static = replace(found.profile.static, optimizer=0, other=found.profile.static.other + (1 << 30))
    again = facts_of(replace(found.profile, static=static), found.plan, Hardware.named("h200"))
    names = [layer.name for layer in again.layers]
    assert "optimizer state and other" in names and "optimizer state" not in names
    assert "other static memory" in [layer.name for layer in found.layers]


def test_the_peak_is_told_in_words_that_add_up(facts: Made) -> None:
    found = facts()
    assert sum(nbytes for _, nbytes in found.peak_shares) == found.timeline.peak_bytes
    first, second, third = found.peak_sentences
    room = format_bytes(found.plan.budget - found.timeline.peak_bytes)
    assert first == f"The peak is {format_bytes(found.timeline.peak_bytes)}, {room} below the budget."
    assert repr(found.timeline.peak_task) in second
    assert all(name in third and format_bytes(nbytes) in third for name, nbytes in found.peak_shares)
    over = replace(found, plan=replace(found.plan, budget=0))
    assert "above the budget" in over.peak_sentences[0]


@pytest.mark.parametrize("gib", [15, 200])
def test_the_plan_stands_between_keeping_everything_and_full_checkpointing(facts: Made, gib: int) -> None:
    found = facts(gib=gib)
    rates = planning_rates(Hardware.named("h200"), found.plan.window)
    steps = [
        simulate_program(uniform_program(found.profile, Decision.KEEP), rates),
        found.timeline,
        simulate_program(uniform_program(found.profile, Decision.RECOMPUTE), rates),
    ]
    assert [(way.point.peak_bytes, way.point.seconds) for way in found.ways] == [
        (step.peak_bytes, step.seconds) for step in steps
    ]
    assert [way.is_plan for way in found.ways] == [False, True, False]
    over = [step.peak_bytes > found.plan.budget for step in steps]
    assert [way.distance.endswith("over budget") for way in found.ways] == over == [gib == 15, False, gib == 15]
    assert [way.distance == "within the budget" for way in found.ways] == [not each for each in over]


def test_gain_and_price_are_told_in_one_sentence(facts: Made) -> None:
    found = replace(facts(), keep=Point(20 * GIB, 1.0), checkpoint=Point(10 * GIB, 2.0))

    def told(peak: int, seconds: float) -> str:
        return replace(found, timeline=replace(found.timeline, peak_bytes=peak, seconds=seconds)).in_short

    assert told(15 * GIB, 1.5) == (
        "Against keeping everything, this plan saves 5.0 GiB (25%) at the peak and takes 500.0 ms (50%) longer; "
        "against full checkpointing, it takes 5.0 GiB (50%) more at the peak and is 500.0 ms (25%) faster."
    )
    assert told(20 * GIB - 1, 1.0) == (
        "Against keeping everything, this plan has the same peak and takes the same time; "
        "against full checkpointing, it takes 10.0 GiB (100%) more at the peak and is 1.00 s (50%) faster."
    )
    nothing = replace(found, keep=Point(0, 0.0), checkpoint=Point(0, 0.0))
    assert (
        "takes 15.0 GiB (-) more at the peak"
        in replace(nothing, timeline=replace(found.timeline, peak_bytes=15 * GIB)).in_short
    )


def test_all_steps_have_the_part_of_the_optimizer_that_the_plan_has(facts: Made) -> None:
    found, h200 = facts(), Hardware.named("h200")
    optimizer = OptimizerProfile(4 * GIB, GIB, GIB, host_seconds=0.1, stall_seconds=0.0)
    profile = replace(found.profile, optimizer=optimizer)
    plans = {fraction: replace(found.plan, optimizer_fraction=fraction) for fraction in (0.0, 0.5, 1.0)}
    peaks = {fraction: facts_of(profile, plan, h200).keep.peak_bytes for fraction, plan in plans.items()}
    assert peaks[0.0] > peaks[0.5] > peaks[1.0] == found.keep.peak_bytes
    half = facts_of(profile, plans[0.5], h200)
    expected = simulate_program(
        program_of(divided(profile, 0.5, h200), found.plan), planning_rates(h200, found.plan.window)
    )
    assert half.timeline.peak_bytes == expected.peak_bytes > found.timeline.peak_bytes


def test_rows_say_what_becomes_of_what_a_block_saves(facts: Made) -> None:
    found = facts()
    options = options_of(found.profile, found.plan)
    kind = found.profile.kinds[0]
    for row, block, option in zip(found.rows, found.plan.blocks, options, strict=True):
        assert (row.name, row.sent_bytes, row.recompute_seconds) == (
            block.name,
            block.sent_bytes,
            block.recompute_seconds,
        )
        resolved = ResolvedDecisions.of(kind, option.decisions, found.profile.min_bytes)
        assert row.recomputed_bytes == sum(kind.values[number].nbytes for number in resolved.recomputed)
        assert row.kept_bytes == sum(kind.values[number].nbytes for number in resolved.kept)
        planned = {each.place: each for each in block.operators}
        told = {each.place: each for each in row.operators}
        assert planned.keys() <= told.keys() == {place for place, each in enumerate(kind.operators) if each.makes}
        for place, each in planned.items():
            assert told[place].reason == each.reason and told[place].nbytes == each.nbytes
            assert told[place].decision.startswith("keep" if each.decision is Decision.KEEP else "offload")
        assert {place for place in told if told[place].decision == "recompute"} <= resolved.runs
        assert ("recompute" in row.decision) == bool(resolved.recomputed)
        assert ("offload" in row.decision) == bool(resolved.offloaded)
    assert any("recompute" in row.decision for row in found.rows)


def test_a_block_that_is_left_alone_keeps_all(facts: Made) -> None:
    found = facts(gib=200)
    assert {row.decision for row in found.rows} == {"keep"}
    assert {each.decision for row in found.rows for each in row.operators} == {"keep"}
    assert found.rows[0].reason == "The budget is large enough to keep the whole block."
    assert found.stalls == () and found.plan.sent_bytes == 0


def test_stalls_are_added_up_by_reason(facts: Made) -> None:
    found = facts(slow=True)
    assert sum(seconds for _, seconds in found.stalls) == pytest.approx(found.timeline.stall_seconds)
    assert {why.split()[1] for why, _ in found.stalls} == {"offloading:", "reloading"}
    assert found.stalls[0][1] >= found.stalls[-1][1] > 0


def test_stalls_for_the_cpu_are_told_beside_those_for_copies(facts: Made) -> None:
    found = facts(slow=True, hosted=True)
    timeline = found.timeline
    assert min(timeline.stall_seconds, timeline.host_wait_seconds) > 0
    assert dict(found.stalls)["for the CPU, which has not queued the kernel yet"] == pytest.approx(
        timeline.host_wait_seconds
    )
    assert sum(seconds for _, seconds in found.stalls) == pytest.approx(timeline.wait_seconds)
    assert dict(found.figures)["stalls"].startswith(f"{format_seconds(timeline.wait_seconds)}, ")


def test_what_was_measured_stands_beside_what_was_predicted(facts: Made) -> None:
    found = facts()
    (peak, *peaks), (step, *steps) = found.compared
    assert (peak, step) == ("peak", "step")
    assert found.measured is not None
    assert peaks[:2] == [format_bytes(found.timeline.peak_bytes), format_bytes(found.measured.peak_bytes)]
    assert steps[2] == "+50.0%"
    first, second = found.measured_sentences
    assert first == f"The measured step had a peak of {peaks[1]}, 1.0 GiB above the predicted one."
    assert "its peak and its time only" in second
    assert found.measured_tasks == () and found.worst_task is None
    alone = replace(found, measured=None)
    assert alone.compared == alone.measured_sentences == ()


def test_the_measured_tasks_are_those_of_the_plan_at_their_times(facts: Made) -> None:
    found = with_tasks(facts(), head_and_loss=-GIB)
    tasks = found.measured_tasks
    assert {task.name for task in tasks} <= {task.name for task in found.program.tasks}
    assert max(task.predicted_peak for task in tasks) == found.timeline.peak_bytes
    assert [task.difference for task in tasks] == [-GIB if task.name == "head and loss" else 0 for task in tasks]
    assert [task.level for task in tasks] == [task.difference for task in tasks]
    for before, after in pairwise(tasks):
        assert before.start <= before.end <= after.start <= after.end <= found.timeline.seconds
    work = sum(task.seconds for task in found.program.tasks)
    assert sum(task.end - task.start for task in tasks) == pytest.approx(work + found.timeline.wait_seconds, rel=0.05)
    assert found.compared[1][0] == "most apart: head and loss" and found.compared[1][3].startswith("-")
    assert "in the task 'head and loss'" in found.measured_sentences[2]
    assert "1.0 GiB below the predicted one" in found.measured_sentences[2]


@pytest.mark.parametrize(
    "change",
    [
        lambda tasks: tasks[:-1],
        lambda tasks: (*tasks, tasks[-1]._replace(name="layers.5 recomputation")),
        lambda tasks: tuple(task._replace(name=task.name.replace("layers.3", "layers.9")) for task in tasks),
        lambda tasks: (*tasks[1::-1], *tasks[2:]),
    ],
    ids=["one less", "a second replay", "another block", "another order"],
)
def test_tasks_that_are_not_those_of_the_plan_are_not_shown(facts: Made, change: Callable[..., Any]) -> None:
    found = with_tasks(facts())
    assert found.measured is not None and found.measured_tasks
    found = replace(found, measured=replace(found.measured, tasks=change(found.measured.tasks)))
    assert found.measured_tasks == () and len(found.compared) == 2
    assert "had other tasks than the plan" in found.measured_sentences[1]


def test_a_measured_step_does_not_tell_some_tasks_apart() -> None:
    planned = "a before it|a forward|b before it|b forward|head and loss|casts of the forward|head and loss"
    backward = "b backward|b recomputation|b backward|a backward|after the blocks"
    groups = measured_groups(f"before the blocks|{planned}|{backward}".split("|"))
    assert groups == [
        ("before the blocks", [0]),
        ("a forward", [1, 2]),
        ("b forward", [3, 4]),
        ("head and loss", [5, 6, 7]),
        ("b recomputation", [8, 9]),
        ("b backward", [10]),
        ("a backward", [11]),
        ("after the blocks", [12]),
    ]


def test_another_machine_is_said_to_be_one(facts: Made) -> None:
    assert "machine that it was made for" not in dict(facts().figures)["step"]
    slow = dict(facts(slow=True).figures)
    assert "on a slow link; " in slow["step"] and "machine that it was made for" in slow["step"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers.0"], "layers.0"),
        (["layers.0", "layers.1", "layers.2"], "layers.0 to 2"),
        (["layers.0", "layers.1", "layers.3"], "layers.0, 1, 3"),
        (["h.8", "h.9", "h.10", "g.11", "g.13", "h.11"], "h.8 to 10, g.11, 13, h.11"),
        (["stem", "h.0", "h.1", "head"], "stem, h.0, 1, head"),
        (["0", "1", "2", "3"], "0 to 3"),
        (["a.0", "a.0"], "a.0, 0"),
        ([], ""),
    ],
)
def test_names_are_told_in_short(names: list[str], expected: str) -> None:
    assert names_of(names) == expected


def test_equal_blocks_are_one_group_wherever_they_stand(facts: Made) -> None:
    rows = facts().rows
    kinds: tuple[Row, ...] = (rows[0], replace(rows[0], name="layers.9"), replace(rows[0], sent_bytes=1, name="x"))
    assert [(names, count) for names, _, count in grouped(kinds)] == [("layers.0, 9", 2), ("x", 1)]
    assert sum(count for *_, count in grouped(rows)) == len(rows)


def test_a_plan_of_another_model_is_refused(facts: Made) -> None:
    found = facts()
    with pytest.raises(UsageError, match="the profile has the 5 blocks of Stack"):
        facts_of(replace(found.profile, calls=found.profile.calls[1:]), found.plan, Hardware.named("h200"))


def test_a_step_of_no_time_is_shown_too(facts: Made) -> None:
    profile: Profile = facts().profile
    still = replace(
        profile,
        kinds=tuple(replace(kind, forward_seconds=0.0, backward_seconds=0.0) for kind in profile.kinds),
        before=replace(profile.before, seconds=0.0),
        middle=replace(profile.middle, seconds=0.0),
        after=replace(profile.after, seconds=0.0),
    )
    plan: Plan = facts(gib=200).plan
    found = facts_of(still, plan, Hardware.named("h200"))
    assert found.timeline.seconds == 0
    assert dict(found.figures)["stalls"] == "0.00 s, - of the step"
