"""The simulated step against an oracle, and what must hold of it for every program."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from planner import oracle
from planner.programs import programs, rates, steps
from spillway.planner.tasks import Program, Rates
from spillway.planner.timeline import STREAMS, Timeline, simulate_program

SETTINGS = settings(derandomize=True, deadline=None, max_examples=300, database=None)

any_program = programs() | steps()


def by_stream(timeline: Timeline) -> list[tuple[str, str, float, float, str]]:
    spans = [(span.stream, span.name, span.start, span.end, span.reason) for span in timeline.spans]
    return sorted(spans, key=lambda span: span[0])


def check_every_figure_and_every_span_is_what_the_oracle_says(program: Program, rates: Rates) -> None:
    expected = oracle.simulate(program, rates)
    got = simulate_program(program, rates, spans=True)
    for reason in {span.reason for span in got.spans}:
        event(f"waits for {reason or 'nothing'}")
    figures = ("seconds", "stall_seconds", "host_wait_seconds", "peak_bytes", "peak_task", "host_bytes", "disk_bytes")
    assert [getattr(got, name) for name in figures] == [getattr(expected, name) for name in figures]
    assert by_stream(got) == expected.spans
    assert got.levels[-1].device == expected.end_bytes


@SETTINGS
@given(any_program, rates(exact=False))
def test_with_rates_of_any_kind_the_oracle_is_met_up_to_rounding(program: Program, rates: Rates) -> None:
    expected = oracle.simulate(program, rates)
    got = simulate_program(program, rates)
    assert got.seconds == pytest.approx(float(expected.seconds), rel=1e-9, abs=1e-12)
    for name in ("stall_seconds", "host_wait_seconds"):
        assert getattr(got, name) == pytest.approx(float(getattr(expected, name)), rel=1e-9, abs=1e-9 * got.seconds)
    for name in ("peak_bytes", "peak_task", "host_bytes", "disk_bytes"):
        assert getattr(got, name) == getattr(expected, name)


def check_spans_and_levels_are_told_only_where_asked_for_and_change_no_figure(program: Program, rates: Rates) -> None:
    short, long = simulate_program(program, rates), simulate_program(program, rates, spans=True)
    assert short.spans == short.levels == ()
    assert replace(long, spans=(), levels=()) == short


def check_spans_of_a_stream_never_overlap_and_compute_is_never_idle(program: Program, rates: Rates) -> None:
    timeline = simulate_program(program, rates, spans=True)
    starts = [span.start for span in timeline.spans]
    assert starts == sorted(starts)
    for stream in STREAMS:
        mine = [span for span in timeline.spans if span.stream == stream]
        assert all(span.start <= span.end for span in mine)
        assert all(one.end <= other.start for one, other in pairwise(mine))
        if stream == "compute":
            assert all(one.end == other.start for one, other in pairwise(mine))
            waits = [span.end - span.start for span in mine if span.reason]
            for_host = [span.end - span.start for span in mine if span.reason == "host"]
            assert 0 not in waits
            assert sum(for_host) == timeline.host_wait_seconds
            assert sum(waits) == timeline.stall_seconds + timeline.host_wait_seconds
    waited = timeline.stall_seconds + timeline.host_wait_seconds
    assert timeline.seconds == sum(task.seconds for task in program.tasks) + waited


def check_levels_follow_the_clock_and_show_the_most_of_each_tier(program: Program, rates: Rates) -> None:
    timeline = simulate_program(program, rates, spans=True)
    clock = [level.seconds for level in timeline.levels]
    assert clock == sorted(clock) and clock[0] == 0 and clock[-1] == timeline.seconds
    assert max(level.device for level in timeline.levels) == timeline.peak_bytes
    assert max(level.host for level in timeline.levels) == timeline.host_bytes
    assert max(level.disk for level in timeline.levels) == timeline.disk_bytes
    assert min(level.host for level in timeline.levels) == min(level.disk for level in timeline.levels) == 0


@SETTINGS
@given(steps(), rates())
def test_a_step_that_drops_all_it_sent_ends_with_what_its_tasks_left(program: Program, rates: Rates) -> None:
    end = simulate_program(program, rates, spans=True).levels[-1]
    sent = sum(sent.nbytes for task in program.tasks for sent in task.sends)
    assert end.device == program.static_bytes + sum(task.change_bytes for task in program.tasks) - sent
    assert end.host == end.disk == 0


@SETTINGS
@given(any_program, rates(), st.data())
def test_a_faster_stream_never_makes_a_step_longer_nor_changes_a_byte(
    program: Program, rates: Rates, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(("out", "back", "disk_write", "disk_read")))
    slow = simulate_program(program, rates)
    fast = simulate_program(program, replace(rates, **{name: 2 * getattr(rates, name)}))
    assert fast.seconds <= slow.seconds
    assert untimed(fast) == untimed(slow)


def check_a_faster_host_never_makes_a_step_longer_nor_changes_a_byte(program: Program, rates: Rates) -> None:
    slow = simulate_program(program, rates)
    fast = simulate_program(with_host(program, 0.5), rates)
    assert fast.seconds <= slow.seconds
    assert untimed(fast) == untimed(slow)
    assert simulate_program(with_host(program, 0), rates).host_wait_seconds == 0


def check_no_task_ends_before_the_host_has_queued_it_and_a_host_that_is_ahead_changes_nothing(
    program: Program, rates: Rates
) -> None:
    timeline = simulate_program(program, rates, spans=True)
    queued = list(accumulate(task.host_seconds for task in program.tasks))
    runs = [span for span in timeline.spans if span.stream == "compute" and not span.reason]
    assert all(span.end >= each for span, each in zip(runs, queued, strict=True))
    assert timeline.seconds >= max(queued, default=0.0)
    if not timeline.host_wait_seconds:
        assert timeline == simulate_program(with_host(program, 0), rates, spans=True)


def check_a_larger_window_never_sends_more_out(program: Program, rates: Rates, more: int) -> None:
    # What is LEAVING in the smaller window is LEAVING in the larger one, too: so no more is let go of, or copied.
    small = simulate_program(program, rates, spans=True)
    large = simulate_program(program, replace(rates, window=rates.window + more), spans=True)
    assert large.host_bytes <= small.host_bytes and large.disk_bytes <= small.disk_bytes
    assert busy(large, "out") <= busy(small, "out")
    assert busy(large, "back") <= busy(small, "back")


@SETTINGS
@given(steps(), rates(), st.integers(1, 12))
def test_a_larger_window_never_lowers_the_peak_of_a_step_that_sends_before_it_takes(
    program: Program, rates: Rates, more: int
) -> None:
    # Where a take comes before a send this is not so: what the larger window holds on to for longer, the smaller one
    # may have fetched already.
    small = simulate_program(program, rates)
    large = simulate_program(program, replace(rates, window=rates.window + more))
    assert large.peak_bytes >= small.peak_bytes


def check_with_room_for_everything_nothing_moves(program: Program, rates: Rates) -> None:
    timeline = simulate_program(program, replace(rates, window=1000), spans=True)
    assert timeline.stall_seconds == 0
    assert busy(timeline, "back") == 0


@SETTINGS
@given(any_program, rates())
def test_a_step_is_what_the_oracle_says_and_consistent(program: Program, rates: Rates) -> None:
    check_every_figure_and_every_span_is_what_the_oracle_says(program, rates)
    check_spans_and_levels_are_told_only_where_asked_for_and_change_no_figure(program, rates)
    check_spans_of_a_stream_never_overlap_and_compute_is_never_idle(program, rates)
    check_levels_follow_the_clock_and_show_the_most_of_each_tier(program, rates)
    check_a_faster_host_never_makes_a_step_longer_nor_changes_a_byte(program, rates)
    check_no_task_ends_before_the_host_has_queued_it_and_a_host_that_is_ahead_changes_nothing(program, rates)
    check_with_room_for_everything_nothing_moves(program, rates)


@SETTINGS
@given(any_program, rates(), st.integers(1, 12))
def test_a_larger_window_never_sends_more_out(program: Program, rates: Rates, more: int) -> None:
    check_a_larger_window_never_sends_more_out(program, rates, more)


def untimed(timeline: Timeline) -> Timeline:
    return replace(timeline, seconds=0, stall_seconds=0, host_wait_seconds=0)


def with_host(program: Program, factor: float) -> Program:
    """The same with a host that takes so many times as long."""
    return replace(
        program, tasks=tuple(replace(task, host_seconds=factor * task.host_seconds) for task in program.tasks)
    )


def busy(timeline: Timeline, stream: str) -> float:
    return sum(span.end - span.start for span in timeline.spans if span.stream == stream)
