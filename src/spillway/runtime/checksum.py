"""A checksum at the speed of memory.

The 64-bit words of each 4 KiB block are added, each sum is mixed with the number of its block (the finaliser of
SplitMix64, a bijection), and the mixed sums and the length are added.

It finds any change of one word, of one block whose sum changes, and blocks that were lost, doubled, shifted or swapped,
in one extent or between two. It does not find words that changed places inside one block, nor errors in one block that
cancel out in the sum. It is against faults of hardware and software, not against an adversary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK = 4096


def checksum(data: NDArray[np.uint8]) -> int:
    """64 bits that tell whether the bytes are still the same; the top of this file says what they see."""
    whole = len(data) - len(data) % _BLOCK
    sums: NDArray[np.uint64] = np.add.reduce(data[:whole].view(np.uint64).reshape(-1, _BLOCK // 8), axis=1)
    if whole < len(data):
        tail = np.zeros(_BLOCK, dtype=np.uint8)
        tail[: len(data) - whole] = data[whole:]
        sums = np.append(sums, np.add.reduce(tail.view(np.uint64)))
    sums += np.arange(1, len(sums) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    sums = (sums ^ (sums >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = (sums ^ (sums >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    sums ^= sums >> np.uint64(31)
    return (int(np.add.reduce(sums)) + len(data) * 0x9E3779B97F4A7C15) % 2**64
