"""What an hour of writes may cost a drive: flash wears out with the bytes written to it.

Bytes are counted in buckets of some seconds. A bucket is forgotten an hour after its *last* moment, so that no hour,
wherever it begins, has more than the limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from spillway.errors import TierFullError
from spillway.units import format_bytes, format_seconds

_HOUR = 3600.0
_BUCKET = 10.0  # Seconds. A busy hour of writes is remembered in 360 numbers.


@dataclass(slots=True)
class Bucket:
    """Bytes that were promised or written in some seconds. A promise that is withdrawn is taken out of its bucket."""

    start: float
    nbytes: int

    @property
    def forgotten(self) -> float:
        """When it no longer counts."""
        return self.start + _BUCKET + _HOUR


class Wear:
    """Bytes promised and written in the last hour. Not safe for several threads at once: the owner has a lock.

    Args:
        limit: the most bytes in any hour; ``None`` for no limit.
        now: the time in seconds.
    """

    def __init__(self, limit: int | None, now: Callable[[], float]) -> None:
        self._limit = limit
        self._now = now
        self._buckets: deque[Bucket] = deque()

    def check(self, nbytes: int) -> None:
        """Raise ``TierFullError`` if ``nbytes`` more would be too many."""
        now = self._now()
        while self._buckets and self._buckets[0].forgotten <= now:
            self._buckets.popleft()
        if self._limit is None:
            return
        spent = sum(bucket.nbytes for bucket in self._buckets)
        over = spent + nbytes - self._limit
        if over <= 0:
            return
        again = "never, as it is more than a whole hour's"
        for bucket in self._buckets if nbytes <= self._limit else ():
            over -= bucket.nbytes
            if over <= 0:
                again = f"in {format_seconds(bucket.forgotten - now)}"
                break
        raise TierFullError(
            f"spill file: got {format_bytes(nbytes)} to write after {format_bytes(spent)} in this hour, expected no "
            f"more than bytes_per_hour={format_bytes(self._limit)}; it may go on {again}, or raise the limit"
        )

    def charge(self, nbytes: int) -> Bucket:
        """Count ``nbytes`` now; the bucket they are in."""
        now = self._now()
        if not self._buckets or self._buckets[-1].start + _BUCKET <= now:
            self._buckets.append(Bucket(now, 0))
        self._buckets[-1].nbytes += nbytes
        return self._buckets[-1]
