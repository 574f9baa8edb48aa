"""A profile of steps that begin with more bytes, and of larger inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spillway.planner.profile import Profile, Static, enlarged, risen

PROFILE = Profile.load(Path(__file__).parent / "llama_8b_block.json")


def test_more_that_is_there_when_a_step_begins_is_not_made_in_it_again() -> None:
    more = risen(PROFILE, 10 << 20)
    assert more.static_bytes == PROFILE.static_bytes + (10 << 20)
    assert more.after == PROFILE.after
    state = replace(PROFILE, after=replace(PROFILE.after, peak_bytes=50, change_bytes=30))
    assert [risen(state, nbytes).after.peak_bytes for nbytes in (10, 60)] == [40, 20]
    assert more.kinds == PROFILE.kinds
    told = replace(PROFILE, static=Static(PROFILE.static_bytes, 0, 0, 0))
    assert risen(told, 5).static == Static(PROFILE.static_bytes, 0, 0, 5)
    (kind,) = PROFILE.kinds
    making = replace(PROFILE, kinds=(replace(kind, backward_change_bytes=100),))
    assert making.gradient_bytes == 100 * len(PROFILE.calls)
    assert risen(making, 10 << 20).gradient_bytes == making.gradient_bytes
    assert risen(making, 10 << 20, has_gradients=True).gradient_bytes == 0
    assert Profile.from_json(risen(told, 5).to_json()) == risen(told, 5)


def test_bytes_of_a_calls_own_backward_grow_with_its_inputs() -> None:
    first, *others = PROFILE.calls
    profile = replace(PROFILE, calls=(replace(first, backward_extra_bytes=-1000), *others))
    calls = enlarged(profile, 1.5).calls
    assert [call.backward_extra_bytes for call in calls] == [-1500] + [0] * len(others)
    assert [(call.name, call.kind) for call in calls] == [(call.name, call.kind) for call in PROFILE.calls]
