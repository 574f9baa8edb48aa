"""The free ranges of a file: best fit, and neighbours become one."""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRanges:
    """Ranges of a file that nobody uses. At first there is none: the file's owner gives what it reserves.

    Not safe for several threads at once: the owner has a lock.

    Example:
        >>> ranges = FreeRanges()
        >>> ranges.give(0, 100)
        >>> ranges.take(40), ranges.take(60), ranges.take(1)
        (0, 40, None)
    """

    def __init__(self) -> None:
        self._by_offset: list[tuple[int, int]] = []  # (offset, size)
        self._by_size: list[tuple[int, int]] = []  # (size, offset)

    def take(self, nbytes: int) -> int | None:
        """The offset of ``nbytes`` cut from the smallest range that has them, or ``None``."""
        index = bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        size, offset = self._by_size[index]
        self._remove(offset, size)
        if size > nbytes:
            self._add(offset + nbytes, size - nbytes)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take a range back, or one that is new; it overlaps none that is here."""
        index = bisect_left(self._by_offset, (offset, 0))
        if index < len(self._by_offset) and self._by_offset[index][0] == offset + nbytes:
            nbytes += self._by_offset[index][1]
            self._remove(*self._by_offset[index])
        if index > 0 and sum(self._by_offset[index - 1]) == offset:
            offset, before = self._by_offset[index - 1]
            nbytes += before
            self._remove(offset, before)
        self._add(offset, nbytes)

    def tail(self, end: int) -> int:
        """Free bytes just before ``end``, the end of the file."""
        return self._by_offset[-1][1] if self._by_offset and sum(self._by_offset[-1]) == end else 0

    def largest(self, end: int, room: int) -> int:
        """The most bytes that one range could have, if the file may yet grow by ``room`` behind ``end``."""
        return max(self._by_size[-1][0] if self._by_size else 0, self.tail(end) + room)

    def _add(self, offset: int, size: int) -> None:
        insort(self._by_offset, (offset, size))
        insort(self._by_size, (size, offset))

    def _remove(self, offset: int, size: int) -> None:
        del self._by_offset[bisect_left(self._by_offset, (offset, size))]
        del self._by_size[bisect_left(self._by_size, (size, offset))]
