"""The checksum sees what disks do."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.runtime.spill_file import checksum


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
