"""Steps worked out by hand. Rates are ``SLOW``, one byte in a second, unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace

from planner.programs import SLOW, task
from spillway.planner.tasks import Program, Rates, Sent, Task, Weights
from spillway.planner.timeline import Timeline, simulate_program


def simulated(*tasks: Task, rates: Rates = SLOW, static: int = 0) -> Timeline:
    return simulate_program(Program(static, tasks), rates, spans=True)


def copies(timeline: Timeline, name: str) -> list[tuple[str, float, float]]:
    return [(span.name, span.start, span.end) for span in timeline.spans if span.stream == name and not span.reason]


def waits(timeline: Timeline) -> list[tuple[str, float, float, str]]:
    return [(span.name, span.start, span.end, span.reason) for span in timeline.spans if span.reason]


def test_a_copy_that_compute_hides_costs_nothing() -> None:
    timeline = simulated(
        # 0 to 4. Its 4 bytes go out from 4 to 6, at 2 bytes in a second.
        task("f0", 4, Sent(0, 4)),
        # 4 to 8. Its 4 bytes need the whole window: the first ones are let go of, and were out at 6. They go out from
        # 8 on, or would: b1 takes them before anybody wants their room.
        task("f1", 4, Sent(1, 4)),
        # 8 to 11. With its take the copy back of 0 is queued, which takes from 8 to 10.
        task("b1", 3, takes=(1,), drops=(1,)),
        # 11 to 12.
        task("b0", 1, takes=(0,), drops=(0,)),
        rates=replace(SLOW, out=2, back=2),
        static=100,
    )
    assert waits(timeline) == []
    assert copies(timeline, "compute") == [("f0", 0, 4), ("f1", 4, 8), ("b1", 8, 11), ("b0", 11, 12)]
    assert copies(timeline, "out") == [("f0", 4, 6)]
    assert copies(timeline, "back") == [("f0", 8, 10)]
    # 4 + 4 after f1, before it lets go of 4; and 4 + 4 while b1 runs. The first is it.
    assert (timeline.seconds, timeline.stall_seconds, timeline.host_wait_seconds) == (12, 0, 0)
    assert (timeline.peak_bytes, timeline.peak_task) == (108, "f1")
    assert (timeline.host_bytes, timeline.disk_bytes) == (4, 0)


def test_compute_waits_where_the_window_is_full_and_where_a_copy_back_is_late() -> None:
    timeline = simulated(
        # 0 to 1, out from 1 to 5.
        task("f0", 1, Sent(0, 4)),
        # 1 to 2, then until 5 for the window. Out from 5 to 9: the stream is free no sooner.
        task("f1", 1, Sent(1, 4)),
        # 5 to 6, then until 9.
        task("f2", 1, Sent(2, 4)),
        # 9 to 10. Its own bytes are here. Back comes 1, from 9 to 13.
        task("b2", 1, takes=(2,), drops=(2,)),
        # From 10 until 13 it waits, then 13 to 14. Back comes 0, from 13 to 17.
        task("b1", 1, takes=(1,), drops=(1,)),
        # Until 17, then 17 to 18.
        task("b0", 1, takes=(0,), drops=(0,)),
    )
    assert waits(timeline) == [
        ("f1", 2, 5, "out"),
        ("f2", 6, 9, "out"),
        ("b1", 10, 13, "back"),
        ("b0", 14, 17, "back"),
    ]
    assert copies(timeline, "out") == [("f0", 1, 5), ("f1", 5, 9)]
    assert copies(timeline, "back") == [("f1", 9, 13), ("f0", 13, 17)]
    assert (timeline.seconds, timeline.stall_seconds) == (18, 12)
    assert timeline.host_bytes == 8


def test_a_storage_that_is_taken_in_time_is_never_copied_and_holds_up_nobody() -> None:
    timeline = simulated(
        # 0 to 1. f1 takes it, so it does not go.
        task("f0", 1, Sent(0, 4)),
        # 1 to 2. The window is empty again. Out from 2 to 6, and not behind the first, from 5 to 9.
        task("f1", 1, Sent(1, 4), takes=(0,)),
        # 2 to 3, and until 6 for the window. Nobody takes it: out from 6 to 9.
        task("f2", 1, Sent(2, 3)),
        # 6 to 7. Its second take means nothing, but that what is AWAY can be fetched: 1, from 6 to 10.
        task("b0", 1, takes=(0,), drops=(0,)),
        # Until 10, then 10 to 11.
        task("b1", 1, takes=(1,), drops=(1,)),
    )
    assert copies(timeline, "out") == [("f1", 2, 6), ("f2", 6, 9)]
    assert waits(timeline) == [("f2", 3, 6, "out"), ("b1", 7, 10, "back")]
    # 4, and 4 + 3 with what f2 sends. What was never copied was never there.
    assert timeline.host_bytes == 7
    # 4 of f0, 4 of f1 and 3 of f2, before 4 are let go of.
    assert (timeline.peak_bytes, timeline.peak_task) == (11, "f2")


def test_one_larger_than_the_window_leaves_alone_and_is_fetched_when_it_is_asked_for() -> None:
    timeline = simulated(
        # 0 to 1, out from 1 to 3.
        task("f0", 1, Sent(0, 2)),
        # 1 to 2, until 3 for the window to be empty, then out from 3 to 13.
        task("f1", 1, Sent(1, 10)),
        # 3 to 4, until 13. Not copied.
        task("f2", 1, Sent(2, 1)),
        # 13 to 14. The next is 1, which has no room in the window, and 0 comes after it.
        task("b2", 1, takes=(2,), drops=(2,)),
        # Fetched now: from 14 to 24, then 24 to 25. While it runs, 0 is fetched, from 24 to 26.
        task("b1", 1, takes=(1,), drops=(1,)),
        # Until 26, and to 27.
        task("b0", 1, takes=(0,), drops=(0,)),
    )
    assert copies(timeline, "out") == [("f0", 1, 3), ("f1", 3, 13)]
    assert copies(timeline, "back") == [("f1", 14, 24), ("f0", 24, 26)]
    assert waits(timeline) == [
        ("f1", 2, 3, "out"),
        ("f2", 4, 13, "out"),
        ("b1", 14, 24, "back"),
        ("b0", 25, 26, "back"),
    ]
    assert timeline.seconds == 27
    # 2 and 10 after f1.
    assert timeline.peak_bytes == 12


def test_what_is_fetched_ahead_comes_in_the_order_of_takes_as_far_as_the_window_goes() -> None:
    timeline = simulated(
        # All of 2 bytes: they are out at 2, 4, 6 and 8. The first two are let go of for the others, at 4 ...
        task("f", 0, *(Sent(key, 2) for key in range(4))),
        # ... and these, after 4 to 10, for what is larger than the window, and taken first: 10 bytes, never copied.
        task("g", 6, Sent(4, 10)),
        # 10 to 11. Two have room, those that are taken first: 2 from 10 to 12, and 0 from 12 to 14.
        task("b4", 1, takes=(4,)),
        # Until 12, and to 13. There is room for one more: 3, from 14 to 16.
        task("b2", 1, takes=(2,)),
        # Until 14, where 1 is queued, from 16 to 18; then for 3, until 16. From 16 to 26.
        task("b03", 10, takes=(0, 3)),
        # 26 to 27: it was hidden.
        task("b1", 1, takes=(1,)),
    )
    assert copies(timeline, "back") == [("f", 10, 12), ("f", 12, 14), ("f", 14, 16), ("f", 16, 18)]
    back = [span for span in waits(timeline) if span[-1] == "back"]
    assert back == [("b2", 11, 12, "back"), ("b03", 13, 14, "back"), ("b03", 14, 16, "back")]
    assert timeline.seconds == 27
    # On the device, when each task begins, with what is on its way: 10 + 4, 10 + 6, and from then on all.
    runs = {level.seconds: level.device for level in timeline.levels}
    assert [runs[seconds] for seconds in (10, 12, 16, 26)] == [14, 16, 18, 18]
    assert (timeline.peak_bytes, timeline.peak_task) == (18, "b03")


def test_a_copy_back_does_not_begin_before_compute_has_got_to_where_it_was_asked_for() -> None:
    timeline = simulated(
        # Out at 1 and 2: 0 is let go of for 2, which goes nowhere.
        task("f", 0, Sent(0, 1), Sent(1, 1), Sent(2, 4)),
        # From 2 to 9. The stream back is free all the time, but the window is not asked for anything.
        task("head", 7),
        # 9 to 10. Both come: from 9 to 11.
        task("b2", 1, takes=(2,)),
        task("b", 1, takes=(1, 0)),
    )
    assert copies(timeline, "back") == [("f", 9, 10), ("f", 10, 11)]
    assert waits(timeline) == [("f", 0, 1, "out"), ("f", 1, 2, "out"), ("b", 10, 11, "back")]


def test_the_disk_writes_what_was_copied_and_reads_before_it_is_copied_back() -> None:
    rates = Rates(out=4, back=2, disk_write=1, disk_read=2, window=4)
    timeline = simulated(
        # 0 to 1. Copied from 1 to 2, written from 2 to 6.
        task("f0", 1, Sent(0, 4, on_disk=True)),
        # 1 to 2, until 6. Its copy follows the task, not the wait: from 2 to 2.5. The disk is free at 6: until 8.
        task("f1", 1, Sent(1, 2, on_disk=True)),
        # 6 to 7, and until 8. From 7 to 8 to the host ...
        task("f2", 1, Sent(2, 4)),
        # ... which is what this one waits for no more: 8 to 9, and 2 is let go of. Never copied.
        task("f3", 1, Sent(3, 1)),
        # 9 to 10. 2 of f2 comes back from 9 to 11. No room for f1's 2 bytes beside its 4.
        task("b3", 1, takes=(3,), drops=(3,)),
        # Until 11, to 12. f1's are read from 11 to 12, and copied to 13.
        task("b2", 1, takes=(2,), drops=(2,)),
        # Until 13, to 14. Read from 13 to 15, copied to 17.
        task("b1", 1, takes=(1,), drops=(1,)),
        # Until 17, to 18.
        task("b0", 1, takes=(0,), drops=(0,)),
        rates=rates,
    )
    assert copies(timeline, "out") == [("f0", 1, 2), ("f1", 2, 2.5), ("f2", 7, 8)]
    assert copies(timeline, "disk") == [("f0", 2, 6), ("f1", 6, 8), ("f1", 11, 12), ("f0", 13, 15)]
    assert copies(timeline, "back") == [("f2", 9, 11), ("f1", 12, 13), ("f0", 15, 17)]
    assert waits(timeline) == [
        ("f1", 2, 6, "out"),
        ("f2", 7, 8, "out"),
        ("b2", 10, 11, "back"),
        ("b1", 12, 13, "disk"),
        ("b0", 14, 17, "disk"),
    ]
    assert (timeline.host_bytes, timeline.disk_bytes, timeline.seconds) == (4, 6, 18)


def test_a_peak_may_be_inside_of_a_task_beside_what_is_fetched_while_it_runs() -> None:
    tasks = (
        task("f", 1, Sent(0, 3), Sent(1, 3)),
        task("b1", 1, takes=(1,), drops=(1,), peak=5, change=2),
        task("b0", 1, takes=(0,), drops=(0,), peak=4, change=-2),
    )
    # f leaves 3 and 3, of which the first is let go of, and comes back with b1's take: 10 + 6 + 5. b0 begins with 3
    # bytes and the 2 that b1 left.
    timeline = simulated(*tasks, static=10)
    assert (timeline.peak_bytes, timeline.peak_task) == (21, "b1")
    # With a greater peak of b0: 10 + 5 + 7.
    timeline = simulated(*tasks[:2], replace(tasks[2], peak_bytes=7), static=10)
    assert (timeline.peak_bytes, timeline.peak_task) == (22, "b0")


def test_levels_tell_every_change_in_program_order() -> None:
    timeline = simulated(
        task("f", 1, Sent(0, 3), Sent(1, 3, on_disk=True), Sent(2, 2), peak=9), task("b", 1, takes=(0, 2)), static=10
    )
    assert [(level.seconds, level.device, level.host, level.disk) for level in timeline.levels] == [
        (0, 10, 0, 0),
        # While f runs, and when it has ended.
        (0, 19, 0, 0),
        (1, 18, 0, 0),
        # A copy is queued; its bytes are let go of for the next one, which is queued, written at 10, and let go of.
        (1, 18, 3, 0),
        (4, 15, 3, 0),
        (4, 15, 3, 3),
        (10, 12, 3, 3),
        # b takes 0 first: so 2 is in time, and was never copied. The copy back of 0 is from 10 to 13.
        (10, 15, 3, 3),
        (13, 15, 3, 3),
        (14, 15, 3, 3),
    ]


def test_what_is_dropped_makes_room_in_the_window_and_on_every_tier() -> None:
    timeline = simulated(
        # 0 to 1. Its copies are queued all the same: 1 to 3, and 3 to 5 and to 7 on the disk.
        task("f0", 1, Sent(0, 2), Sent(1, 2, on_disk=True), drops=(0, 1)),
        # 1 to 2, and no wait for the window: 5 to 9.
        task("f1", 1, Sent(2, 4)),
    )
    assert copies(timeline, "out") == [("f0", 1, 3), ("f0", 3, 5), ("f1", 5, 9)]
    assert copies(timeline, "disk") == [("f0", 5, 7)]
    assert timeline.stall_seconds == 0
    assert (timeline.host_bytes, timeline.disk_bytes) == (4, 2)
    end = timeline.levels[-1]
    assert (end.device, end.host, end.disk) == (4, 4, 0)


def test_a_key_that_was_dropped_is_another_storage_when_it_is_sent_again() -> None:
    timeline = simulated(
        # 0 to 1; out from 1 to 4.
        task("f0", 1, Sent(0, 3), Sent(1, 2)),
        # For 1, at 4, the first is let go of. 1 is in time. 0 comes back from 4 to 7, until 8.
        task("b0", 1, takes=(1, 0), drops=(0, 1)),
        # 8 to 9. Another 0, which nobody takes: out from 9 to 10.
        task("f1", 1, Sent(0, 1)),
        # And 3, which is let go of for 4 at 13.
        task("g1", 1, Sent(3, 3), Sent(4, 3)),
        # Back at 16.
        task("b1", 1, takes=(4, 3)),
    )
    assert copies(timeline, "out") == [("f0", 1, 4), ("f1", 9, 10), ("g1", 10, 13)]
    assert copies(timeline, "back") == [("f0", 4, 7), ("g1", 13, 16)]


def test_a_key_that_no_task_sends_is_on_the_device_and_asks_for_nothing() -> None:
    timeline = simulated(
        task("f", 1, Sent(0, 4), Sent(1, 4)),
        # Were its take one, 0 would be fetched here, from 5 on.
        task("g", 10, takes=(7,), drops=(7,)),
        task("b", 1, takes=(1, 0, 7)),
    )
    assert copies(timeline, "back") == [("f", 15, 19)]


def test_a_program_of_no_tasks_holds_what_it_began_with() -> None:
    assert simulate_program(Program(5, ()), SLOW) == Timeline(0, 0, 0, 5, "", 0, 0)


def test_a_task_ends_no_earlier_than_the_host_has_queued_it() -> None:
    tasks = (
        # The host has it at 1, when it has run for 1 of its 3 seconds: 0 to 3. Out from 3 to 7.
        task("f0", 3, Sent(0, 4), host_seconds=1),
        # The host has it at 6: 4 to 6, a second late. Then until 7 for the window. Out from 6, or would.
        task("f1", 2, Sent(1, 4), host_seconds=5),
        # The host has it at 10, and it takes no time. It is from 7 to 10 that nothing is done.
        task("head", 0, host_seconds=4),
        # The host has it at 12: 11 to 12. The copy back of 0 does not wait for the host: 10 to 14.
        task("b1", 1, takes=(1,), drops=(1,), host_seconds=2),
        # At 12.5, when compute waits for the copy until 14: the host is ahead. 14 to 15.
        task("b0", 1, takes=(0,), drops=(0,), host_seconds=0.5),
    )
    timeline = simulated(*tasks)
    assert waits(timeline) == [
        ("f1", 3, 4, "host"),
        ("f1", 6, 7, "out"),
        ("head", 7, 10, "host"),
        ("b1", 10, 11, "host"),
        ("b0", 12, 14, "back"),
    ]
    assert [(name, end) for name, _, end in copies(timeline, "compute")] == [
        ("f0", 3),
        ("f1", 6),
        ("head", 10),
        ("b1", 12),
        ("b0", 15),
    ]
    assert copies(timeline, "out") == [("f0", 3, 7)]
    assert copies(timeline, "back") == [("f0", 10, 14)]
    assert (timeline.seconds, timeline.stall_seconds, timeline.host_wait_seconds) == (15, 3, 5)


def test_a_host_that_is_ahead_of_every_task_changes_nothing() -> None:
    tasks = (
        task("f0", 1, Sent(0, 4)),
        task("f1", 1, Sent(1, 4)),
        task("b1", 1, takes=(1,), drops=(1,)),
        task("b0", 1, takes=(0,), drops=(0,)),
    )
    # Each is queued in the second in which it runs at the earliest.
    assert simulated(*(replace(each, host_seconds=1) for each in tasks)) == simulated(*tasks)


def test_streamed_parameters_are_fetched_a_block_ahead() -> None:
    """Each block has two bytes of them, which take two seconds."""
    first, second = Weights(0, 2), Weights(1, 2)
    timeline = simulated(
        task("before", 1),
        # From 1 to 3 its parameters come. Then it runs to 4, and those of the next one come meanwhile, from 3 to 5.
        task("f0", 1, weights=first, peak=7),
        # Between the blocks the first ones are gone: 2 bytes are there. To 5, and so the next ones wait for nothing.
        task("gap", 1, peak=1),
        # 5 to 6, and 6 to 7: two tasks of one block. None follow in this direction.
        task("f1", 1, weights=second),
        task("f1", 1, weights=second),
        # 7 to 8, with nothing on the device.
        task("head", 1, peak=8),
        # From 8 to 10 they come once more; 10 to 11 and 11 to 12. The others come from 10 to 12.
        task("again 1", 1, weights=Weights(1, 2, True)),
        task("b1", 1, weights=Weights(1, 2, True), peak=6),
        # 12 to 13.
        task("b0", 1, weights=Weights(0, 2, True)),
        task("after", 1),
        static=100,
    )
    weights = [("f0", 1, 3), ("f0", 3, 5), ("again 1", 8, 10), ("again 1", 10, 12)]
    assert copies(timeline, "back") == weights
    assert waits(timeline) == [("f0", 1, 3, "back"), ("again 1", 8, 10, "back")]
    assert (timeline.seconds, timeline.stall_seconds) == (14, 4)
    # 2 in use, 2 ahead, and 7 of its own.
    assert (timeline.peak_bytes, timeline.peak_task) == (111, "f0")
    resting = {level.seconds: level for level in timeline.levels if not level.holders.working}
    assert [resting[at].device for at in (1, 3, 4, 6, 7, 10, 12, 14)] == [102, 104, 102, 102, 100, 104, 102, 100]
    assert (resting[10].holders.returned, resting[10].holders.returning) == (2, 2)
    assert timeline.host_bytes == 0


def test_parameters_in_files_are_there_when_they_are_read() -> None:
    """Two bytes take two seconds on the link, and longer or shorter to read."""
    slow, fast = Weights(0, 2, False, 5.0), Weights(1, 2, False, 1.0)
    saved = Sent(0, 3, is_weight=True, read_seconds=6.0)
    timeline = simulated(
        task("f0", 1, weights=slow),
        task("f1", 1, saved, weights=fast, change=0),
        task("b1", 1, takes=(0,), drops=(0,)),
    )
    assert copies(timeline, "back") == [("f0", 0, 5), ("f0", 5, 7), ("f1", 8, 14)]
    assert waits(timeline) == [("f0", 0, 5, "back"), ("f1", 6, 7, "back"), ("b1", 8, 14, "back")]


def test_saved_parameters_that_are_streamed_come_back_within_the_window() -> None:
    """Nothing is copied out, and they are no bytes of the step until they are prefetched."""
    weights = [Sent(key, 3, is_weight=True) for key in range(3)]
    timeline = simulated(
        task("f", 1, *weights, change=0),
        # 1 to 4 the first comes, and then a second one: a window of 4 has no room for the third.
        task("b2", 1, takes=(2,), drops=(2,), peak=1),
        # It came from 4 to 7. The last one comes from 7 to 10.
        task("b1", 1, takes=(1,), drops=(1,)),
        task("b0", 1, takes=(0,), drops=(0,)),
        static=100,
    )
    assert copies(timeline, "out") == []
    assert copies(timeline, "back") == [("f", 1, 4), ("f", 4, 7), ("f", 7, 10)]
    assert (timeline.seconds, timeline.stall_seconds) == (11, 3 + 2 + 2)
    assert timeline.peak_bytes == 100 + 3 + 3 + 1
    assert [level.device for level in timeline.levels][-1] == 100
    assert timeline.host_bytes == 0


def test_parameters_fetched_ahead_take_room_in_the_window() -> None:
    """Those of a replay come whatever the limit. Until they are in use, other storages wait."""
    timeline = simulated(
        task("f", 0, Sent(0, 2, is_weight=True), Sent(1, 2, is_weight=True), change=0),
        # Parameters of the next replay are under way when it takes its storage: 4 of 4 bytes.
        task("b3", 1, weights=Weights(3, 1, True)),
        task("b2", 1, takes=(1,), drops=(1,)),
        task("b1", 1, weights=Weights(1, 4, True)),
        task("b0", 1, takes=(0,), drops=(0,)),
    )
    # 0 to 1, then the next parameters from 1 to 5. The storage of b2 comes after them, and the last only when asked.
    assert copies(timeline, "back") == [("b3", 0, 1), ("b3", 1, 5), ("f", 5, 7), ("f", 9, 11)]
    assert timeline.seconds == 12
