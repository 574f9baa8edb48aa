"""Rates of the disk, as the engine spills: checksummed pieces of its own spill file, by the threads of its backend."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spillway.errors import TierFullError
from spillway.profiling.rate import rate_of
from spillway.runtime.backend import Backend, Event
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import anonymous_pages
from spillway.runtime.disk import Extent, SpillFile
from spillway.runtime.disk_tiers import PIECE_BYTES
from spillway.runtime.system_calls import ALIGNMENT
from spillway.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOST_PIECES = 64
"""More than any disk wants to have on its way at once, and a GiB of it."""
_IN_MEMORY = 4
"""Pieces of memory that they are written from and read into: more than a processor's caches hold."""
_SHARE = 20
"""No more than one in so many of the free bytes is written."""
_SMALLEST = 1 << 20
_LONG_ENOUGH = 0.25
"""Seconds of a sample: a piece of a slow disk takes long by itself, and many at once no longer."""


@dataclass(frozen=True, slots=True)
class Drive:
    """What the disk under a spill file does."""

    write: float
    """Bytes in a second."""
    read: float
    """Bytes in a second."""
    free_bytes: int
    """Of the file system, before anything was written."""
    directory: Path
    """Where it was written to."""
    direct: bool
    """Whether the page cache was out of it. Through it, rates may be those of host memory."""


def measure_drive(backend: Backend, directory: str | os.PathLike[str] | None, seconds: float) -> Drive:
    """Write to the disk and read it again.

    Args:
        backend: whose threads do it.
        directory: where; ``None``: where a session would spill to.
        seconds: that this may take. A disk on which one piece takes longer has this one piece written and read.

    Raises:
        SpillPathError: if no spill file can be made there.
        TierFullError: if the disk is as good as full.
        TransferError: if the disk failed.
    """
    with closing(SpillFile(directory)) as file:
        free = shutil.disk_usage(file.directory).free
        most = free // _SHARE
        if most < _SMALLEST:
            raise TierFullError(
                f"spill file in {file.directory}: got {format_bytes(free)} of free space, expected "
                f"{format_bytes(_SHARE * _SMALLEST)} to measure the disk with; free some, or give another directory"
            )
        nbytes = min(PIECE_BYTES, most // ALIGNMENT * ALIGNMENT)
        pieces = _Pieces(backend, file, nbytes, most=min(_MOST_PIECES, most // nbytes))
        write = pieces.write_rate(seconds / 2)
        return Drive(write, pieces.read_rate(seconds / 2), free, file.directory, file.direct)


class _Pieces:
    """What is written and read: the same random bytes in each piece, so that two may be read into one memory at once.

    Args:
        backend: whose threads do it.
        file: where to.
        nbytes: of a piece; whole blocks.
        most: how many pieces there may be in the file.
    """

    def __init__(self, backend: Backend, file: SpillFile, nbytes: int, *, most: int) -> None:
        self._backend = backend
        self._file = file
        self._nbytes = nbytes
        self._most = most
        # Random: a disk that compresses would be too quick with anything else.
        memory = [anonymous_pages(nbytes) for _ in range(min(_IN_MEMORY, most))]
        memory[0].random_(generator=torch.Generator().manual_seed(0))
        for other in memory[1:]:
            other.copy_(memory[0])
        self._memory = memory
        self._extents: list[Extent] = []
        self._events: list[Event] = []

    def write_rate(self, seconds: float) -> float:
        """Bytes in a second."""
        turns = itertools.cycle(range(self._most))

        def queue() -> None:
            turn = next(turns)
            if turn == len(self._extents):
                self._extents.append(self._file.allocate(self._nbytes))
            self._run(self._file.write, turn)

        return self._rate(queue, seconds)

    def read_rate(self, seconds: float) -> float:
        """Bytes in a second, of what was written."""
        turns = itertools.cycle(range(len(self._extents)))
        return self._rate(lambda: self._run(self._file.read, next(turns)), seconds)

    def _rate(self, queue: Callable[[], None], seconds: float) -> float:
        return rate_of(queue, self._wait, self._nbytes, seconds, enough=_LONG_ENOUGH, most_repeats=self._most)

    def _run(self, move: Callable[[Extent, Buffer], None], turn: int) -> None:
        extent, memory = self._extents[turn], self._memory[turn % len(self._memory)]
        self._events.append(self._backend.run(lambda: move(extent, Bytes.of(memory).buffer())))

    def _wait(self) -> None:
        while self._events:
            self._events.pop().synchronize()
