"""Whether there is anything to be gained from moving what a tag's passes save.

A context that was told nothing stands aside, hooks and all, where a pass saves so little that the device would not
notice: under a :data:`SHARE` of its memory, with many times as much unreserved. What is unreserved is looked at again
before each pass, in one call of the driver: a workload that grows takes memory from it, and then the next pass is moved
and judged anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from spillway.runtime.backend import Backend
from spillway.units import format_bytes

SHARE = 64
"""What is less than one in so many bytes of the device is little."""
_ROOM = 8
"""So many times as much has to be unreserved."""


class Verdict(NamedTuple):
    """What is to be gained from a pass."""

    why_none: str | None = None
    """Why nothing is, if so."""
    unreserved: tuple[tuple[Backend, int], ...] = ()
    """How much of each device has to be unreserved for this to hold."""


def judge(saved_bytes: int, backends: Iterable[Backend]) -> Verdict:
    """Of a pass that has ended, which saved so much on the devices of these backends."""
    unreserved = []
    for backend in backends:
        info = backend.memory_info()
        if info is None or saved_bytes * SHARE >= info[1] or saved_bytes * _ROOM > info[0]:
            return Verdict()
        unreserved.append((backend, info[0] - info[1] // SHARE))
    if not unreserved:
        return Verdict()
    return Verdict(
        f"stood aside: a pass saves {format_bytes(saved_bytes)}, less than a {SHARE}th of the device's memory, and "
        f"there is room; say ratio=1.0 to offload all the same",
        tuple(unreserved),
    )


class Gain:
    """What was learned of a tag's last pass that was told nothing."""

    def __init__(self) -> None:
        self._verdict = Verdict()

    @property
    def why_none(self) -> str | None:
        """Why nothing is to be gained, if so."""
        return self._verdict.why_none

    def learn(self, verdict: Verdict) -> None:
        """The next passes are like this one."""
        self._verdict = verdict

    def is_none(self) -> bool:
        """Whether the next pass can be left alone."""
        for backend, least in self._verdict.unreserved:
            info = backend.memory_info()
            if info is None or info[0] < least:
                self._verdict = Verdict()
        return self.why_none is not None
