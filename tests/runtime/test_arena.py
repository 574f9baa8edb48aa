"""The arena: exact sizes, no overlap, reuse, cap; and what is given back is waited for."""

from __future__ import annotations

import gc
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.errors import TierFullError
from spillway.runtime.arena import PAGE, Arena, Block, FreeRanges, Pinned, anonymous_pages, pages
from spillway.runtime.bytes import Bytes
from spillway.runtime.tiers import HostTier
from spillway.testing import AdversaryBackend


class Never:
    """An event that is not reached."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise AssertionError("nobody should wait for this")


class Reached(Never):
    def query(self) -> bool:
        return True


def make(capacity: int = 1 << 20, slab_bytes: int = 64 * PAGE) -> Arena:
    return Arena(anonymous_pages, capacity=capacity, slab_bytes=slab_bytes)


def test_sizes_are_exact_to_a_page() -> None:
    arena = make()
    sizes = [arena.allocate(nbytes).nbytes for nbytes in (1, PAGE, PAGE + 1)]
    assert sizes == [PAGE, PAGE, 2 * PAGE]
    assert arena.used_bytes == 4 * PAGE
    assert arena.reserved_bytes == 64 * PAGE


def test_blocks_begin_at_pages() -> None:
    arena = make()
    assert all(arena.allocate(5000).address % PAGE == 0 for _ in range(5))


def test_steady_use_grows_nothing() -> None:
    arena, reserved = make(), set()
    for _ in range(50):
        blocks = [arena.allocate(nbytes) for nbytes in (3 * PAGE, 10 * PAGE, PAGE)]
        for block in blocks:
            arena.free(block)
        reserved.add(arena.reserved_bytes)
    # A whole number of the first size, 3 pages.
    assert reserved == {66 * PAGE}
    assert arena.used_bytes == 0


def test_neighbours_join() -> None:
    arena = make()
    blocks = [arena.allocate(16 * PAGE) for _ in range(4)]
    for index in (1, 3, 0, 2):
        arena.free(blocks[index])
    whole = arena.allocate(64 * PAGE)
    assert whole.start == 0
    assert arena.reserved_bytes == 64 * PAGE


def test_what_is_large_has_a_slab_of_its_size() -> None:
    arena = make()
    arena.allocate(100 * PAGE)
    assert arena.reserved_bytes == 100 * PAGE


def test_the_cap_holds_and_what_is_freed_can_be_had_again() -> None:
    arena = make(capacity=10 * PAGE)
    block = arena.allocate(10 * PAGE)
    with pytest.raises(TierFullError, match=r"got a request for 4\.0 KiB with 40\.0 KiB of 40\.0 KiB in use"):
        arena.allocate(1)
    arena.free(block)
    assert arena.allocate(10 * PAGE).nbytes == 10 * PAGE


def test_events_travel_with_the_bytes() -> None:
    arena = make()
    first, second = Never(), Never()
    low, high = arena.allocate(32 * PAGE), arena.allocate(32 * PAGE)
    arena.free(low, (first,))
    arena.free(high, (second, Reached()))
    # The joined range is cut across the old border: both parts must be waited for.
    assert arena.allocate(8 * PAGE).after == (first, second)
    assert arena.allocate(8 * PAGE).after == (first, second)


@pytest.mark.parametrize("read", [0, 1], ids=["the first is read", "the second is read"])
@pytest.mark.parametrize("last", [0, 1], ids=["the first is free last", "the second is free last"])
def test_a_block_of_two_ranges_waits_for_what_uses_either(read: int, last: int) -> None:
    adversary = AdversaryBackend()
    out, back = adversary.new_stream("out"), adversary.new_stream("back")
    arena = Arena(adversary.host_slab, capacity=2 * PAGE, slab_bytes=2 * PAGE)
    tier = HostTier(adversary, arena, out=out, back=back)
    sources = [Bytes.of(torch.full((PAGE,), number, dtype=torch.uint8)) for number in (1, 2)]
    slots = [tier.reserve(source) for source in sources]
    compute = adversary.compute()
    adversary.wait(out, adversary.record(compute))
    adversary.wait(compute, tier.store(slots, sources)[0])
    destination = tier.destination(slots[read], PAGE)
    adversary.wait(back, adversary.record(compute))
    (loaded,) = tier.load([slots[read]], [destination])
    tier.free(slots[1 - last])
    tier.free(slots[last])
    both = Bytes.of(torch.full((2 * PAGE,), 3, dtype=torch.uint8))
    slot = tier.reserve(both)
    compute = adversary.compute()
    adversary.wait(out, adversary.record(compute))
    adversary.wait(compute, tier.store([slot], [both])[0])
    adversary.wait(compute, loaded)
    assert torch.equal(destination.tensor(), sources[read].tensor())
    adversary.check()


def test_trim_gives_back_only_what_nobody_uses() -> None:
    arena = make()
    block = arena.allocate(PAGE)
    other = arena.allocate(100 * PAGE)
    arena.free(other)
    assert arena.trim() == 100 * PAGE
    assert arena.reserved_bytes == 64 * PAGE
    arena.free(block)
    assert arena.trim() == 64 * PAGE
    assert arena.reserved_bytes == 0


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE), st.integers(0, 100)), max_size=60))
def test_live_blocks_never_overlap_and_keep_their_bytes(actions: list[tuple[bool, int, int]]) -> None:
    arena = make(capacity=256 * PAGE)
    live: list[tuple[Block, int]] = []
    for number, (allocate, nbytes, choice) in enumerate(actions):
        if allocate:
            try:
                block = arena.allocate(nbytes)
            except TierFullError:
                assert arena.reserved_bytes + pages(nbytes) > arena.capacity
                continue
            block.tensor().fill_(number % 251)
            live.append((block, number % 251))
        elif live:
            arena.free(live.pop(choice % len(live))[0])
        assert all(bool((block.tensor() == value).all()) for block, value in live)
        assert arena.used_bytes == sum(block.nbytes for block, _ in live) <= arena.reserved_bytes
    for block, _ in live:
        arena.free(block)
    assert arena.trim() >= 0
    assert arena.reserved_bytes == 0


def test_a_slab_ends_with_its_last_block() -> None:
    arena = make()
    block = arena.allocate(PAGE)
    arena.close()
    assert torch.equal(block.tensor().fill_(1), torch.ones(PAGE, dtype=torch.uint8))


def test_a_large_arena_has_large_slabs_of_which_little_is_unused() -> None:
    made: list[int] = []

    def make_slab(nbytes: int) -> torch.Tensor:
        made.append(nbytes)
        return anonymous_pages(nbytes)

    arena = Arena(make_slab, capacity=1 << 30, slab_bytes=16 * PAGE)
    blocks = [arena.allocate(16 * PAGE) for _ in range(4000)]
    assert made == sorted(made) and made[-1] > made[0]
    assert len({block.address for block in blocks}) == 4000
    assert arena.used_bytes <= arena.reserved_bytes <= 1.05 * arena.used_bytes
    arena.close()
    assert arena.reserved_bytes == 0


def test_slabs_keep_to_the_cap() -> None:
    arena = Arena(anonymous_pages, capacity=300 * 16 * PAGE, slab_bytes=16 * PAGE)
    for _ in range(300):
        arena.allocate(16 * PAGE)
    assert arena.reserved_bytes <= arena.capacity
    with pytest.raises(TierFullError):
        arena.allocate(16 * PAGE)
    arena.close()


@pytest.mark.parametrize("error", [TierFullError("no memory here"), OSError(12, "no memory here")])
def test_a_slab_that_cannot_be_made_is_asked_for_once(error: Exception) -> None:
    calls = 0

    def refuse(nbytes: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        raise error

    arena = Arena(refuse, capacity=1 << 20)
    for _ in range(3):
        with pytest.raises(TierFullError, match="no memory here"):
            arena.allocate(PAGE)
    assert calls == 1


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


def test_a_range_has_one_tensor() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    some = Bytes(memory.untyped_storage(), 8, 16)
    assert torch.equal(some.tensor(), memory[8:24])
    assert some.tensor() is some.tensor()
    assert some.tensor().data_ptr() == memory.data_ptr() + 8


def test_what_was_made_in_inference_mode_is_written_outside_of_it() -> None:
    some = Bytes.of(torch.zeros(16))
    with torch.inference_mode():
        assert some.tensor().is_inference()
    some.tensor().fill_(1)
    assert not some.tensor().is_inference()


def test_memory_as_a_storage_of_its_own_keeps_its_owner_alive() -> None:
    arena = Arena(anonymous_pages, capacity=1 << 30)
    storage = Pinned(arena, 100).alias().untyped_storage()
    gc.collect()
    assert arena.used_bytes == PAGE
    del storage
    assert arena.used_bytes == 0
