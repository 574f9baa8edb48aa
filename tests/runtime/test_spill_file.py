"""The spill file: what is stored comes back, for as long as the extent and the file live; what cannot be is refused."""

from __future__ import annotations

import errno
import gc
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disk_support import (
    MiB,
    NoTmpfile,
    Plain,
    StrictDirect,
    broken,
    descriptors,
    get,
    make,
    needs_proc,
    opened,
    page_aligned,
    put,
    store,
    system_error,
)
from spillway.errors import SessionError, SpillPathError, UsageError
from spillway.runtime.spill_file import ALIGNMENT, Extent, SystemCalls, checksum


@pytest.mark.parametrize("calls", [SystemCalls, Plain, StrictDirect, NoTmpfile])
@pytest.mark.parametrize("nbytes", [1, 7, 4095, 4096, 4097, 3 * MiB + 5])
def test_what_was_written_comes_back(tmp_path: Path, calls: type[SystemCalls], nbytes: int) -> None:
    content = random.randbytes(nbytes)
    with opened(tmp_path, calls=calls()) as file:
        extent = put(file, content)
        assert (extent.offset, extent.nbytes, extent.reserved) == (0, nbytes, -(-nbytes // 4096) * 4096)
        assert get(file, extent) == content
        assert get(file, extent) == content, "reading does not use it up"


def test_an_extent_can_be_written_again(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent = put(file, b"a" * 5000)
        store(file, extent, b"b" * 5000)
        assert get(file, extent) == b"b" * 5000


def test_arrays_of_any_type_are_buffers(tmp_path: Path) -> None:
    with opened(tmp_path, calls=Plain()) as file:
        extent = file.allocate(ALIGNMENT)
        array = np.arange(1024, dtype=np.float32).reshape(32, 32)
        file.write(extent, array.data)
        back = np.empty_like(array)
        file.read(extent, back.data)
        assert (back == array).all()


def test_a_buffer_that_is_too_short_is_refused_with_both_lengths(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent = file.allocate(5000)
        with pytest.raises(UsageError, match=r"4999 bytes.*at least 5000"):
            file.write(extent, page_aligned(b"", reserved=8192)[:4999])
        with pytest.raises(UsageError, match=r"4096 bytes.*at least 5000"):
            file.read(extent, page_aligned(b"", reserved=4096))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("phase", [0, 1, 64, 4032, 4095])
@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 4095, 4096, 4097, 8191, 8192, 12345, 40960])
def test_bytes_that_begin_anywhere_come_back(tmp_path: Path, phase: int, nbytes: int, direct: bool) -> None:
    """Whole pages move straight, the edges through a page of their own; nothing around them changes."""
    content = random.Random(nbytes).randbytes(nbytes)
    whole = page_aligned(b"", reserved=64 * 1024)
    with opened(tmp_path, calls=StrictDirect() if direct else Plain()) as file:
        before, extent, behind = put(file, b"b" * 4096), file.allocate(nbytes, phase=phase), put(file, b"a" * 4096)
        buffer = whole[phase : phase + nbytes]
        buffer[:] = content
        file.write(extent, buffer)
        whole[:] = bytes([7]) * len(whole)
        file.read(extent, buffer)
        assert bytes(buffer) == content
        assert bytes(whole[:phase]) == bytes([7]) * phase
        assert set(whole[phase + nbytes :]) == {7}
        assert get(file, before) == b"b" * 4096
        assert get(file, behind) == b"a" * 4096


def test_a_longer_buffer_is_used_only_as_far_as_the_extent_goes(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        extent, neighbour = file.allocate(4096), put(file, b"n" * 4096)
        file.write(extent, page_aligned(b"x" * 8192, reserved=8192))
        assert get(file, neighbour) == b"n" * 4096
        buffer = page_aligned(b"y" * 8192, reserved=8192)
        file.read(extent, buffer)
        assert bytes(buffer) == b"x" * 4096 + b"y" * 4096


def test_an_unaligned_buffer_is_refused_under_direct_io_and_taken_otherwise(tmp_path: Path) -> None:
    buffer = page_aligned(b"", reserved=8192)[1:4097]
    with opened(tmp_path, calls=StrictDirect()) as file:
        assert file.direct
        extent = file.allocate(4096)
        with pytest.raises(UsageError, match=r"address 0x\w+, expected one 0 bytes behind a multiple of 4096"):
            file.write(extent, buffer)
        with pytest.raises(UsageError, match=r"address 0x\w+, expected one 0 bytes behind a multiple of 4096"):
            file.read(extent, buffer)
    with opened(tmp_path, calls=Plain()) as file:
        assert not file.direct
        extent = file.allocate(4096)
        file.write(extent, buffer)
        assert get(file, extent) == bytes(buffer)


def test_freeing_twice_or_to_another_file_is_an_error_and_does_no_harm(tmp_path: Path) -> None:
    with opened(tmp_path) as file, opened(tmp_path) as other:
        extent = put(file, b"mine")
        stranger = put(other, b"mine")
        assert repr(extent) == repr(stranger)
        for wrong in (stranger, Extent(extent.offset, extent.nbytes, extent.reserved)):
            with pytest.raises(UsageError, match="free it once"):
                file.free(wrong)
        file.free(extent)
        with pytest.raises(UsageError, match="free it once"):
            file.free(extent)
        again = put(file, b"next")
        assert again.offset == extent.offset
        with pytest.raises(UsageError):
            file.free(extent)
        with pytest.raises(UsageError):
            get(file, extent)
        assert get(file, again) == b"next"


def test_after_close_every_call_is_refused_and_closing_again_is_not(tmp_path: Path) -> None:
    file = make(tmp_path)
    extent = put(file, b"x")
    file.close()
    file.close()
    page = page_aligned(b"", reserved=ALIGNMENT)
    calls: list[Callable[[], object]] = [
        lambda: file.allocate(1),
        lambda: file.free(extent),
        lambda: file.write(extent, page),
        lambda: file.read(extent, page),
    ]
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()
    assert (file.reserved_bytes, file.used_bytes) == (0, 0)
    make(tmp_path).close()  # one that never had a file


@needs_proc
def test_no_descriptor_is_left_after_close_or_garbage_collection(tmp_path: Path) -> None:
    gc.collect()
    before = descriptors()
    file = make(tmp_path)
    assert descriptors() == before
    put(file, b"x")
    assert descriptors() == before + 1
    file.close()
    assert descriptors() == before
    file = make(tmp_path)
    put(file, b"x")
    del file
    gc.collect()
    assert descriptors() == before
    calls = SystemCalls()
    for error, raised in ((system_error(errno.EIO), SpillPathError), (KeyboardInterrupt(), KeyboardInterrupt)):
        with broken(calls, "set_direct", error), pytest.raises(raised):
            make(tmp_path, calls=calls)
        assert descriptors() == before


def of(content: bytes) -> int:
    return checksum(np.frombuffer(content, np.uint8))


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), pages=st.integers(2, 9), tail=st.integers(0, 4095), data=st.data())
def test_the_checksum_sees_flips_swaps_shifts_and_lengths(
    seed: int, pages: int, tail: int, data: st.DataObject
) -> None:
    content = random.Random(seed).randbytes(pages * 4096 + tail)
    right = of(content)
    assert right == of(bytes(content))
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    one, two = data.draw(st.lists(st.integers(0, pages - 1), min_size=2, max_size=2, unique=True))
    blocks = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    blocks[one], blocks[two] = blocks[two], blocks[one]
    shifted = content[4096:] + content[:4096]
    for wrong in (bytes(flipped), b"".join(blocks), shifted, content + b"\0", content[:-1], b"\0" * len(content)):
        assert of(wrong) != right


def test_the_checksum_sees_swapped_blocks_that_differ_in_their_highest_bit_only() -> None:
    zero, high = bytes(4096), bytes(4095) + b"\x80"
    assert len({of(zero + high), of(high + zero), of(zero + zero), of(high + high)}) == 4
    assert len({of(bytes(nbytes)) for nbytes in range(1, 10_000, 7)}) == len(range(1, 10_000, 7))
