"""The free ranges of a slab or a file, beside a list of all its units that says of each whether it is free."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from spillway.runtime.arena import FreeRanges

SIZE = 40

operations = st.lists(st.tuples(st.sampled_from(["take", "take", "give"]), st.integers(1, 9), st.integers(0, 99)))


def runs(free: list[bool]) -> list[tuple[int, int]]:
    """(size, offset) of each free range, the smallest first, and of equals the first."""
    grouped = groupby(enumerate(free), key=lambda unit: unit[1])
    units = [[offset for offset, _ in group] for is_free, group in grouped if is_free]
    return sorted((len(group), group[0]) for group in units)


@given(operations=operations)
def test_the_smallest_range_that_fits_is_cut_and_neighbours_become_one(operations: list[tuple[str, int, int]]) -> None:
    ranges, free = FreeRanges(), [True] * SIZE
    ranges.give(0, SIZE)
    taken: list[tuple[int, int]] = []
    for operation, nbytes, number in operations:
        if operation == "take":
            expected = next((offset for size, offset in runs(free) if size >= nbytes), None)
            found = ranges.take(nbytes)
            offset = None if found is None else found[0]
            assert offset == expected
            if offset is not None:
                taken.append((offset, nbytes))
                free[offset : offset + nbytes] = [False] * nbytes
        elif taken:
            offset, nbytes = taken.pop(number % len(taken))
            ranges.give(offset, nbytes)
            free[offset : offset + nbytes] = [True] * nbytes
        tail = next((size for size, offset in runs(free) if offset + size == SIZE), 0)
        assert ranges.tail(SIZE) == tail
        assert ranges.largest(SIZE, 3) == max([tail + 3, *(size for size, _ in runs(free))])


def test_where_nothing_was_given_there_is_nothing() -> None:
    ranges = FreeRanges()
    assert (ranges.take(1), ranges.tail(0), ranges.largest(0, 5)) == (None, 0, 5)
