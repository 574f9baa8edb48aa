"""How the spill file grows, what its cap and a full disk refuse, and that nothing is given out twice."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disk_support import (
    MiB,
    Plain,
    StrictDirect,
    broken,
    get,
    make,
    opened,
    put,
    store,
    system_error,
)
from spillway.errors import SizeError, TierFullError, TransferError
from spillway.runtime.spill_file import ALIGNMENT, Extent, SystemCalls


def test_the_file_is_made_by_the_first_allocate_and_not_before(tmp_path: Path) -> None:
    class Watch(SystemCalls):
        open_now = 0

        def open(self, path: str, flags: int, mode: int) -> int:
            self.open_now += 1
            return super().open(path, flags, mode)

        def close(self, fd: int) -> None:
            self.open_now -= 1
            super().close(fd)

    calls = Watch()
    file = make(tmp_path, calls=calls)
    assert (calls.open_now, file.reserved_bytes, file.used_bytes) == (0, 0, 0)
    file.allocate(1)
    assert (calls.open_now, file.used_bytes) == (1, ALIGNMENT)
    file.close()
    assert calls.open_now == 0


def test_the_cap_is_exact_and_what_is_freed_can_be_had_again(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=8 * ALIGNMENT + 4095) as file:
        assert file.capacity == 8 * ALIGNMENT + 4095
        first, _ = file.allocate(3 * ALIGNMENT), file.allocate(5 * ALIGNMENT - 9)
        assert file.used_bytes == file.reserved_bytes == 8 * ALIGNMENT
        with pytest.raises(TierFullError, match=r"4\.0 KiB to place.*capacity of 36\.0 KiB.*raise"):
            file.allocate(1)
        file.free(first)
        assert file.used_bytes == 5 * ALIGNMENT
        assert file.allocate(3 * ALIGNMENT).offset == first.offset


def test_a_capacity_of_nothing_takes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=0) as file, pytest.raises(TierFullError):
        file.allocate(1)


def test_the_message_of_a_full_file_says_how_large_a_piece_is_free(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=6 * ALIGNMENT) as file:
        pieces = [file.allocate(ALIGNMENT) for _ in range(6)]
        for piece in pieces[::2]:
            file.free(piece)
        with pytest.raises(TierFullError, match=r"pieces of at most 4\.0 KiB"):
            file.allocate(2 * ALIGNMENT)


def test_the_best_fit_is_taken(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=8 * ALIGNMENT) as file:
        wide, _, narrow, _ = (file.allocate(pages * ALIGNMENT) for pages in (3, 1, 1, 3))
        file.free(wide)
        file.free(narrow)
        assert file.allocate(ALIGNMENT).offset == narrow.offset
        assert file.allocate(3 * ALIGNMENT).offset == wide.offset


def test_the_file_grows_in_steps_and_no_further_than_the_cap(tmp_path: Path) -> None:
    class Watch(SystemCalls):
        def __init__(self) -> None:
            self.reserved: list[tuple[int, int]] = []

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            self.reserved.append((offset, length))  # and no real space: nothing is written here

    calls = Watch()
    with opened(tmp_path, capacity=300 * MiB, calls=calls) as file:
        for size in (1, 63 * MiB, 2 * MiB, 180 * MiB, 30 * MiB):
            file.allocate(size)
    used = (ALIGNMENT + 63 * MiB, 2 * MiB, 180 * MiB)
    third = 180 * MiB - (128 * MiB - sum(used[:2]))  # what the free tail lacks
    assert calls.reserved == [
        (0, 64 * MiB),
        (64 * MiB, 64 * MiB),
        (128 * MiB, third),
        (128 * MiB + third, 300 * MiB - 128 * MiB - third),
    ]


operations = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "free"]), st.integers(1, 9 * ALIGNMENT), st.integers(0, 99)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(operations=operations)
def test_extents_never_overlap_and_only_a_lack_of_a_gap_is_full(operations: list[tuple[str, int, int]]) -> None:
    capacity = 32 * ALIGNMENT
    live: list[tuple[Extent, bytes]] = []
    with tempfile.TemporaryDirectory() as directory, opened(Path(directory), capacity=capacity, calls=Plain()) as file:
        for operation, nbytes, number in operations:
            if operation == "free" and live:
                file.free(live.pop(number % len(live))[0])
            elif operation == "allocate":
                ends = sorted((e.offset, e.offset + e.reserved) for e, _ in live)
                gaps = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), capacity], strict=True)
                fits = max(end - start for start, end in gaps) >= nbytes
                content = bytes([number]) * nbytes
                try:
                    live.append((put(file, content), content))
                except TierFullError:
                    assert not fits, "there was a gap that is large enough"
                else:
                    assert fits
            assert file.used_bytes == sum(extent.reserved for extent, _ in live)
        for extent, content in live:
            assert get(file, extent) == content
            file.free(extent)
        assert file.allocate(capacity).offset == 0


def test_sizes_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        for nbytes in (0, -5):
            with pytest.raises(SizeError, match=f"got {nbytes} bytes"):
                file.allocate(nbytes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_h49_disk_full_is_an_error_of_allocate_and_passes(tmp_path: Path, code: int) -> None:
    class Full(SystemCalls):
        room = 10 * ALIGNMENT
        truncated: int | None = None

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            if offset + length > self.room:
                raise system_error(code)

        def ftruncate(self, fd: int, length: int) -> None:
            self.truncated = length
            super().ftruncate(fd, length)

    calls = Full()
    with opened(tmp_path, calls=calls) as file:
        extent = put(file, b"x" * 10 * ALIGNMENT)  # not a whole step fits, but what is needed does
        with pytest.raises(TierFullError, match=os.strerror(code)) as caught:
            file.allocate(1)
        assert isinstance(caught.value.__cause__, OSError)
        assert calls.truncated == 10 * ALIGNMENT, "what a refused growth took is given back"
        assert get(file, extent) == b"x" * 10 * ALIGNMENT
        file.free(extent)
        put(file, b"y" * 10 * ALIGNMENT)


@pytest.mark.parametrize("room", [0, 1, 4096, 5000, 8192, 12287])
@pytest.mark.parametrize("direct", [False, True])
def test_h49_disk_full_at_a_byte_of_a_write_where_space_cannot_be_reserved(
    tmp_path: Path, room: int, direct: bool
) -> None:
    class Sparse(StrictDirect if direct else Plain):  # type: ignore[misc]
        room: int | None = None

        def fallocate(self, fd: int, offset: int, length: int) -> None:
            raise system_error(errno.EOPNOTSUPP)

        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            if direct:
                self.check(view, offset)
            if self.room is not None:
                left = self.room - offset
                if left < (ALIGNMENT if direct else 1):
                    raise system_error(errno.ENOSPC)
                view = view[:left]
            return os.pwrite(fd, view, offset)

    calls = Sparse()
    with opened(tmp_path, calls=calls) as file:
        extent = file.allocate(12288)
        calls.room = room
        with pytest.raises(TierFullError, match="12288 bytes at offset 0"):
            store(file, extent, b"x" * 12288)
        with pytest.raises(TransferError, match="is empty"):
            get(file, extent)
        calls.room = None
        store(file, extent, b"x" * 12288)
        assert get(file, extent) == b"x" * 12288


def test_a_full_disk_does_not_prevent_a_session(tmp_path: Path) -> None:
    calls = StrictDirect()
    with broken(calls, "pwrite", system_error(errno.ENOSPC)):
        file = make(tmp_path, calls=calls)
        with pytest.raises(TierFullError, match="No space left"):
            file.allocate(1)
    assert get(file, put(file, b"later")) == b"later"
    file.close()


class Clock(SystemCalls):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_the_hours_limit_refuses_and_passes(tmp_path: Path) -> None:
    calls = Clock()
    with opened(tmp_path, bytes_per_hour=10 * ALIGNMENT, calls=calls) as file:
        for _ in range(2):
            file.free(put(file, b"x" * 4 * ALIGNMENT))
            calls.now += 1000
        with pytest.raises(TierFullError, match=r"12\.0 KiB to write after 32\.0 KiB in this hour.*raise the limit"):
            file.allocate(3 * ALIGNMENT)
        put(file, b"x" * 2 * ALIGNMENT)
        calls.now += 1609
        with pytest.raises(TierFullError):
            file.allocate(1)
        calls.now += 1
        put(file, b"x" * 4 * ALIGNMENT)
        with pytest.raises(TierFullError, match=r"bytes_per_hour=40\.0 KiB"):
            file.allocate(11 * ALIGNMENT)


def test_writing_again_counts_and_what_was_never_written_does_not(tmp_path: Path) -> None:
    with opened(tmp_path, bytes_per_hour=4 * ALIGNMENT, calls=Clock()) as file:
        for _ in range(9):
            file.free(file.allocate(4 * ALIGNMENT))
        extent = put(file, b"x" * ALIGNMENT)
        for _ in range(2):
            store(file, extent, b"y")
        file.allocate(ALIGNMENT)
        with pytest.raises(TierFullError):
            file.allocate(ALIGNMENT)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0, 1500), st.integers(1, 5)), max_size=40))
def test_no_hour_has_more_than_its_budget(steps: list[tuple[float, int]]) -> None:
    calls = Clock()
    writes: list[tuple[float, int]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        opened(Path(directory), bytes_per_hour=6 * ALIGNMENT, calls=calls) as file,
    ):
        for wait, pages in steps:
            calls.now += wait
            try:
                file.free(put(file, b"x" * pages * ALIGNMENT))
            except TierFullError:
                continue
            writes.append((calls.now, pages))
            assert sum(n for when, n in writes if when > calls.now - 3600) <= 6
