"""A profile of a third size, from those of two others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from spillway.planner.profile import BackwardPart, HostTimes, Profile, Static
from spillway.planner.scaling import risen, scaled

PROFILE = Profile.load(Path(__file__).parent / "llama_8b_block.json")


def of_size(size: int, by: int = 512) -> Profile:
    """With values, and what is there when a step begins, of so many bytes for each element more."""
    (kind,) = PROFILE.kinds
    values = tuple(replace(value, nbytes=value.nbytes + by * size) for value in kind.values)
    host = None if size % 2 else HostTimes(1e-3, 3e-3, 2e-3, 1e-3 + 1e-9 * size)
    parts = tuple(BackwardPart(place, by * size, 0) for place in range(1 + size % 3))
    kinds = (
        replace(
            kind,
            values=values,
            backward_seconds=kind.backward_seconds + 1e-6 * size,
            host=host,
            backward_parts=parts,
        ),
    )
    after = replace(PROFILE.after, change_bytes=PROFILE.after.change_bytes - by * size)
    batch = by * size
    static = Static(weights=PROFILE.static_bytes, gradients=0, optimizer=0, other=batch)
    return replace(PROFILE, kinds=kinds, after=after, static=static, static_bytes=static.total)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 100_000))
def test_bytes_are_those_of_the_third_size(first: int, more: int, size: int) -> None:
    found = scaled(of_size(first), of_size(first + more), (first, first + more), size)
    wanted = of_size(size)
    assert found is not None
    assert [value.nbytes for value in found.kinds[0].values] == [value.nbytes for value in wanted.kinds[0].values]
    assert found.after.change_bytes == wanted.after.change_bytes
    assert found.min_bytes == PROFILE.min_bytes
    assert found.static == wanted.static
    assert found.static_bytes == wanted.static_bytes
    is_known = first % 2 == (first + more) % 2 == 0
    assert (found.kinds[0].host is not None) is is_known
    alike = first % 3 == (first + more) % 3
    assert len(found.kinds[0].backward_parts) == (1 + first % 3 if alike else 0)
    assert abs(found.kinds[0].backward_seconds - wanted.kinds[0].backward_seconds) < 1e-9


def test_nothing_is_told_of_two_structures() -> None:
    other = of_size(2)
    fewer = replace(other, calls=other.calls[:-1])
    assert scaled(of_size(1), fewer, (1, 2), 3) is None
    (kind,) = other.kinds
    renamed = replace(kind, operators=(replace(kind.operators[0], name="aten::other"), *kind.operators[1:]))
    assert scaled(of_size(1), replace(other, kinds=(renamed,)), (1, 2), 3) is None


def test_what_would_be_below_nothing_is_nothing() -> None:
    found = scaled(of_size(10), of_size(5), (5, 10), 10_000)
    assert found is not None
    assert min(value.nbytes for value in found.kinds[0].values) == 0
    assert found.kinds[0].recompute_factor == PROFILE.kinds[0].recompute_factor


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
