"""The hour's budget of writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disk_support import opened, put, store
from spillway.errors import TierFullError
from spillway.runtime.spill_file import ALIGNMENT, SystemCalls


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
