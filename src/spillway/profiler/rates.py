"""What the parts of a machine do in a second: copies, matrix products, memory and disk.

Each rate is the median of several samples. Copies and the disk are measured with what offloading uses: its streams, its
pinned memory, its spill file and its threads.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spillway.errors import TierFullError
from spillway.planner.hardware import Link
from spillway.runtime.anonymous_file import ALIGNMENT
from spillway.runtime.backend import Backend, Event, Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import anonymous_pages
from spillway.runtime.disk import PIECE_BYTES
from spillway.runtime.spill_file import Extent, SpillFile
from spillway.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_SAMPLES = 9
LONG_ENOUGH = 0.02
"""Seconds of a sample: some hundred times what it takes to begin one and to be told of its end."""
_SHORTEST = 1e-9
"""Seconds. No clock is so fine that it could say 0 and be right."""

_SMALLEST_WIDTH, _LARGEST_WIDTH = 512, 8192
_TRIES = 4
_HARDER = 8
"""Time of a product of twice the width, over that of one."""

_MOST_PIECES = 64
"""More than any disk wants to have in flight at once, and a GiB of it."""
_PIECES_IN_MEMORY = 4
"""More than a processor's caches hold."""
_DISK_SHARE = 20
"""One in so many of the free bytes is written at most."""
_LEAST_DISK_BYTES = 1 << 20
_DISK_LONG_ENOUGH = 0.25
"""Seconds of a sample: a piece of a slow disk takes long by itself, and many at once no longer."""


def rate_of(
    queue: Callable[[], object],
    wait: Callable[[], None],
    amount: float,
    seconds: float,
    *,
    enough: float = LONG_ENOUGH,
    most_repeats: int = 1024,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """How much is done in a second.

    Work is queued once, and then twice as often each time until a sample is long enough: those are the warm-up. It
    takes ``seconds`` at most, or as long as the work takes once.

    Args:
        queue: begins the work, and need not wait for its end.
        wait: blocks until all that was begun is done.
        amount: how much one call of ``queue`` does: bytes, or operations.
        seconds: that the samples may take together.
        enough: seconds that a sample has to take.
        most_repeats: how often work may be queued before it is waited for.
        clock: in seconds.
    """
    end = clock() + seconds
    repeats, steady = 1, False

    def sample() -> float:
        start = clock()
        for _ in range(repeats):
            queue()
        wait()
        return max(clock() - start, _SHORTEST)

    # The first one makes what the work needs: it counts only where there is no time for another.
    took = sample()
    rates = [amount / took]
    while len(rates) < MOST_SAMPLES and clock() + took < end:
        took = sample()
        rates = [*rates, repeats * amount / took] if steady else [repeats * amount / took]
        steady = steady or took >= enough or 2 * repeats > most_repeats
        if not steady:
            repeats *= 2
    return statistics.median(rates)


def measure_link(backend: Backend, nbytes: int, seconds: float) -> Link:
    """Bandwidth between a device and CPU memory: each way alone, and both at once. The CPU copies within its memory.

    It takes so many seconds, and allocates the bytes of a copy four times: on the device and on the CPU, for each way.
    """
    out, back = backend.new_stream("out"), backend.new_stream("back")
    host = [Bytes.of(backend.host_slab(nbytes).fill_(1)) for _ in range(2)]
    device = [Bytes.of(_device_memory(backend, nbytes)) for _ in range(2)]
    _wait_for_compute(backend)
    ends = {out: (host[0], device[0]), back: (device[1], host[1])}

    def queue(*lanes: Stream) -> None:
        for lane in lanes:
            backend.copy(lane, *ends[lane])

    def wait() -> None:
        for event in [backend.record(lane) for lane in ends]:
            event.synchronize()

    def rate(*lanes: Stream) -> float:
        return rate_of(partial(queue, *lanes), wait, len(lanes) * nbytes, seconds / 3)

    return Link(active=1, out=rate(out), back=rate(back), both=rate(out, back))


def measure_memory(backend: Backend, nbytes: int, seconds: float) -> float:
    """Bytes in a second that the device reads and writes in its own memory, both counted.

    It takes so many seconds, and allocates the bytes of a copy twice.
    """
    source, destination = _device_memory(backend, nbytes), _device_memory(backend, nbytes)
    queue, wait = partial(destination.copy_, source), partial(_wait_for_compute, backend)
    return rate_of(queue, wait, 2 * nbytes, seconds)


def measure_products(backend: Backend, seconds: float) -> float:
    """Floating-point operations in a second of a matrix product in bfloat16, an addition being one.

    The matrices are square, and wide enough for a product to be long. They are random: zeros take less power, and so
    less time. It takes so many seconds.
    """
    end = time.perf_counter() + seconds
    width = _SMALLEST_WIDTH
    left, right = _matrices(backend, width)

    def once() -> float:
        start = time.perf_counter()
        torch.matmul(left, right)
        _wait_for_compute(backend)
        return time.perf_counter() - start

    while width < _LARGEST_WIDTH:
        # The first one of a shape loads its kernel, and any may have been disturbed.
        took = min(once() for _ in range(_TRIES))
        if took >= LONG_ENOUGH or took * _HARDER > (end - time.perf_counter()) / 2:
            break
        width *= 2
        left, right = _matrices(backend, width)
    queue, wait = partial(torch.matmul, left, right), partial(_wait_for_compute, backend)
    return rate_of(queue, wait, 2 * width**3, max(0.0, end - time.perf_counter()))


@dataclass(frozen=True, slots=True)
class Drive:
    """The disk under a spill file, with its bandwidths in bytes a second."""

    write: float
    read: float
    free_bytes: int
    """Of the file system, before anything was written."""
    directory: Path
    direct: bool
    """Whether the page cache was bypassed. Through it, rates may be those of memory."""


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
        share = free // _DISK_SHARE
        if share < _LEAST_DISK_BYTES:
            raise TierFullError(
                f"spill file in {file.directory}: got {format_bytes(free)} of free space, expected "
                f"{format_bytes(_DISK_SHARE * _LEAST_DISK_BYTES)} to measure the disk with; free some, or give another "
                f"directory"
            )
        nbytes = min(PIECE_BYTES, share // ALIGNMENT * ALIGNMENT)
        most = min(_MOST_PIECES, share // nbytes)
        # Random, since some disks compress. All alike, so that two may be read into one memory at once.
        memory = [anonymous_pages(nbytes) for _ in range(min(_PIECES_IN_MEMORY, most))]
        memory[0].random_(generator=torch.Generator().manual_seed(0))
        for other in memory[1:]:
            other.copy_(memory[0])
        extents: list[Extent] = []
        events: list[Event] = []

        def move(how: Callable[[Extent, Buffer], None], turns: itertools.cycle[int]) -> None:
            turn = next(turns)
            if turn == len(extents):
                extents.append(file.allocate(nbytes))
            extent, pages = extents[turn], memory[turn % len(memory)]
            events.append(backend.run(lambda: how(extent, Bytes.of(pages).buffer())))

        def wait() -> None:
            while events:
                events.pop().synchronize()

        def rate(how: Callable[[Extent, Buffer], None], pieces: int) -> float:
            queue = partial(move, how, itertools.cycle(range(pieces)))
            return rate_of(queue, wait, nbytes, seconds / 2, enough=_DISK_LONG_ENOUGH, most_repeats=most)

        return Drive(rate(file.write, most), rate(file.read, len(extents)), free, file.directory, file.direct)


def _device_memory(backend: Backend, nbytes: int) -> torch.Tensor:
    """Bytes of the device, written: pages that were never written are not there yet, and read too fast."""
    return torch.empty(nbytes, dtype=torch.uint8, device=backend.device).fill_(1)


def _wait_for_compute(backend: Backend) -> None:
    backend.record(backend.compute()).synchronize()


def _matrices(backend: Backend, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    # By a generator of its own: the user's random numbers stay what they are.
    generator = torch.Generator(device=backend.device).manual_seed(0)
    made = partial(torch.randn, width, width, generator=generator, device=backend.device, dtype=torch.bfloat16)
    return made(), made()
