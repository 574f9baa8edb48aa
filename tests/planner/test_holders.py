"""What holds a device's bytes in a simulated step: by hand, and for programs of every kind."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.programs import SLOW, programs, rates, steps, task
from spillway.planner.hardware import Hardware
from spillway.planner.planner import planning_rates, problem_of
from spillway.planner.profile import Profile
from spillway.planner.tasks import Phase, Problem, Program, Rates, Sent, Task
from spillway.planner.timeline import Holders, settled, simulate_program

SETTINGS = settings(derandomize=True, deadline=None, max_examples=100, database=None)
NOTHING = Holders(static=10)
LLAMA = Profile.load(Path(__file__).with_name("llama_8b_block.json"))


def test_each_byte_is_told_by_what_holds_it_at_every_place_of_a_step() -> None:
    tasks = (
        # It makes 9, of which 3 and 3 leave, and 1 is kept.
        Task("f", Phase.FORWARD, 1, 9, 7, (Sent(0, 3), Sent(1, 3))),
        Task("middle", Phase.OUTSIDE, 1, 4, 2),
        # 5 are computed again.
        Task("again", Phase.RECOMPUTE, 1, 6, 5, recomputed_bytes=5),
        # What was kept and computed again goes, and 2 of gradients come.
        Task("b", Phase.BACKWARD, 1, 8, -4, takes=(1, 0), drops=(1, 0), gradient_bytes=2, recomputed_bytes=-5),
    )
    timeline = simulate_program(Program(10, tasks), SLOW, spans=True)
    assert tuple(level.holders for level in timeline.levels) == (
        NOTHING,
        Holders(10, working=9),
        Holders(10, kept=7),
        # 0 is queued, and let go of for 1, which is taken in time and was never copied: it is kept.
        Holders(10, kept=4, leaving=3),
        Holders(10, kept=4),
        Holders(10, kept=4, working=4),
        Holders(10, outside=2, kept=4),
        Holders(10, outside=2, kept=4, working=6),
        Holders(10, outside=2, kept=4, recomputed=5),
        # 0 is fetched when 1 has been taken, and asked for.
        Holders(10, outside=2, kept=4, returning=3, recomputed=5),
        Holders(10, outside=2, kept=4, returned=3, recomputed=5, working=8),
        Holders(10, gradients=2, outside=2, kept=3, returned=3),
        Holders(10, gradients=2, outside=2, returned=3),
        Holders(10, gradients=2, outside=2),
    )


def test_what_is_dropped_on_its_way_out_is_held_by_nobody() -> None:
    timeline = simulate_program(Program(10, (task("f", 1, Sent(0, 3)), task("g", 1, drops=(0,)))), SLOW, spans=True)
    held = [level.holders for level in timeline.levels]
    assert Holders(10, leaving=3) in held and held[-1] == NOTHING


@SETTINGS
@given(st.one_of(programs(), steps()), rates())
def test_holders_add_up_to_what_the_device_has_at_every_level(program: Program, rates: Rates) -> None:
    timeline = simulate_program(program, rates, spans=True)
    sizes = [sent.nbytes for each in program.tasks for sent in each.sends]
    # The peak is counted without holders, and in tasks alone.
    assert max(level.device for level in timeline.levels) >= timeline.peak_bytes
    for held in (level.holders for level in timeline.levels):
        assert min(held.leaving, held.returning, held.returned, held.working) >= 0
        assert held.returning <= max(rates.window, *sizes, 0)


@cache
def problem(window: int) -> Problem:
    """Four blocks as they were measured."""
    profile = replace(LLAMA, calls=LLAMA.calls[:4])
    return problem_of(profile, planning_rates(Hardware.named("h200"), window), budget=1 << 40)


@SETTINGS
@given(st.data(), st.sampled_from((32 << 20, 512 << 20)))
def test_a_step_of_blocks_ends_with_its_gradients_and_what_is_outside_of_blocks(
    data: st.DataObject, window: int
) -> None:
    given_problem = problem(window)
    chosen = [data.draw(st.integers(0, len(options) - 1)) for options in given_problem.options]
    timeline = simulate_program(given_problem.program(chosen), given_problem.rates, spans=True)
    assert max(level.device for level in timeline.levels) == timeline.peak_bytes
    end = timeline.levels[-1].holders
    assert end.leaving == end.returning == end.returned == end.recomputed == end.working == 0
    assert end.gradients == 4 * LLAMA.kinds[0].backward_change_bytes
    assert end.outside == sum(part.change_bytes for part in (LLAMA.before, LLAMA.middle, LLAMA.after))


@SETTINGS
@given(st.lists(st.integers(-9, 20), min_size=1, max_size=9))
def test_what_one_lacks_is_taken_off_the_one_before(shares: list[int]) -> None:
    found = settled(shares)
    assert sum(found) == sum(shares) and len(found) == len(shares)
    assert all(share >= 0 for share in found[1:])
    if min(shares) >= 0:
        assert found == shares
    # What is lacking is taken off those before, so those from any place on never have less together than they had.
    assert all(sum(found[place:]) >= sum(shares[place:]) for place in range(1, len(shares)))


def test_a_share_below_zero_is_taken_off_the_nearest_one_first() -> None:
    assert settled([10, 3, 4, -6, 2]) == [10, 1, 0, 0, 2]
    assert settled([1, -3]) == [-2, 0]
