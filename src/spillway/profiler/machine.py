"""The speeds of this machine: measured, and saved in the user's cache.

On a fast machine, measuring takes a second or two. Nothing else should run meanwhile: the bandwidth that other work
uses is missing from the rates. Each rate is the median of several samples. Copies and the disk are measured with
offloading's own streams, pinned memory, spill file and threads.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from spillway.errors import BackendError, TierError, TierFullError, UsageError
from spillway.planner.hardware import Bandwidth, Hardware
from spillway.runtime.arena import anonymous_pages
from spillway.runtime.backend import Backend, Event, Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.device import backend_for
from spillway.runtime.spill_file import ALIGNMENT, Extent, SpillFile
from spillway.runtime.system import device_name, memory_limit, which_device
from spillway.runtime.tiers import PIECE_BYTES
from spillway.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LINK_SHARE, _PRODUCT_SHARE, _MEMORY_SHARE, _DRIVE_SHARE = 0.3, 0.15, 0.1, 0.35
"""Shares of the time. Starting up takes the rest."""
_ACCELERATOR_COPY, _CPU_COPY = 256 << 20, 64 << 20
_FREE_SHARE = 32
"""One copy takes no more than one in so many of the free bytes, on the device and on the CPU."""
MOST_SAMPLES = 9
LONG_ENOUGH = 0.02
"""Seconds of a sample: some hundred times the overhead of one."""
_SHORTEST = 1e-9
"""Seconds. A clock may say 0."""

_SMALLEST_WIDTH, _LARGEST_WIDTH = 512, 8192

_MOST_PIECES = 64
"""More than any disk has in flight at once, and a GiB."""
_PIECES_IN_MEMORY = 4
"""More than a processor's caches hold."""
_DISK_SHARE = 20
"""At most one in so many of the free bytes is written."""
_LEAST_DISK_BYTES = 1 << 20
_DISK_LONG_ENOUGH = 0.25
"""Seconds of a sample: a piece of a slow disk takes long by itself, and many at once no longer."""


def measure_hardware(
    device: torch.device | str | None = None,
    *,
    spill_directory: str | os.PathLike[str] | None = None,
    seconds: float = 20,
    on_part: Callable[[str], None] | None = None,
) -> Hardware:
    """Measure the machine's speeds.

    It writes to the disk for a third of the time at most, and no more than a twentieth of the free bytes at once. The
    bandwidth of several devices at a time is not measured: :attr:`Hardware.bandwidths` has one device. On the CPU, it
    is that of copies within CPU memory.

    Args:
        device: with an index, or the current one of its type; ``None``: the current accelerator, or else the CPU.
        spill_directory: where to write; ``None``: where a session would spill to, or nowhere if it could not.
        seconds: that it may take, about. A longer measurement is made once all the same.
        on_part: called with the name of each part as it begins.

    Raises:
        UsageError: for a device that does not exist, or a time that is not above 0.
        SpillPathError: for a ``spill_directory`` in which no file can be made.
        TierError: if there is no pinned memory; if the disk of a ``spill_directory`` is full, or fails.
        BackendError: if the device has no memory left to measure with.

    Example:
        >>> hardware = measure_hardware("cuda:0")  # doctest: +SKIP
        >>> hardware.save("machine.json")  # doctest: +SKIP
    """
    device = which_device(device)
    if not 0 < seconds < float("inf"):
        raise UsageError(f"seconds: got {seconds}, expected a time above 0")
    tell = on_part or (lambda part: None)
    with closing(backend_for(device)) as backend:
        try:
            tell("copies")
            link = measure_link(backend, _copy_bytes(backend), seconds * _LINK_SHARE)
            tell("matrix products")
            flops = measure_products(backend, seconds * _PRODUCT_SHARE)
            tell("memory")
            memory = measure_memory(backend, 2 * _copy_bytes(backend), seconds * _MEMORY_SHARE)
        except torch.OutOfMemoryError as error:
            raise BackendError(
                f"{device} has no few hundred MiB left to measure with ({error}). End the other work on it"
            ) from error
        tell("disk")
        drive, disk = None, "there is no disk to spill to"
        try:
            drive = measure_drive(backend, spill_directory, seconds * _DRIVE_SHARE)
        except TierError:
            # Nothing may ever be offloaded to disk: a session would only fail when it is.
            if spill_directory is not None:
                raise
        if drive is not None:
            disk = f"disk at {drive.directory}, {'direct' if drive.direct else 'through the page cache'}"
        return Hardware(
            name=device_name(device),
            bandwidths=(link,),
            disk_write=None if drive is None else drive.write,
            disk_read=None if drive is None else drive.read,
            flops=flops,
            memory_bandwidth=memory,
            device_bytes=_memory(backend)[1],
            host_bytes=memory_limit(),
            disk_bytes=None if drive is None else drive.free_bytes,
            date=datetime.datetime.now(datetime.UTC).date(),
            source=f"measured on {device} with torch {torch.__version__}; {disk}",
        )


def known_hardware(
    device: torch.device | str | None = None,
    *,
    spill_directory: str | os.PathLike[str] | None = None,
    seconds: float = 20,
    fresh: bool = False,
    on_part: Callable[[str], None] | None = None,
) -> Hardware:
    """The machine's speeds, measured once and saved in the user's cache.

    The file is ``hardware-*.json`` in ``$SPILLWAY_CACHE``, or else in ``spillway`` in the user's cache directory
    (``$XDG_CACHE_HOME``, ``~/.cache``). It is of one kind of device, one machine, one torch and one directory to spill
    to. If it does not exist or does not validate, the machine is measured and the file written. Sizes are read each
    time. Processes that all find no file all measure, and disturb each other: call it in one first.

    Arguments and errors are those of :func:`measure_hardware`. For ``spill_directory``, ``None`` is also
    ``$SPILLWAY_DIR``, if it is set. ``fresh`` measures, and writes the file, even if there is one.

    Warns:
        UserWarning: if the file cannot be written. The result is returned all the same.
    """
    device = which_device(device)
    directory = os.environ.get("SPILLWAY_DIR") or None if spill_directory is None else os.fspath(spill_directory)
    file = cache_file(device_name(device), platform.node(), torch.__version__, directory)
    present = None if fresh or file is None else _at_present(file, device, spill_directory)
    if present is not None:
        return present
    measured = measure_hardware(device, spill_directory=spill_directory, seconds=seconds, on_part=on_part)
    keep(measured, file)
    return measured


def _at_present(file: Path, device: torch.device, directory: str | os.PathLike[str] | None) -> Hardware | None:
    """The saved speeds with the current sizes; ``None`` if no file validates, or a disk was added or removed since."""
    try:
        kept = Hardware.load(file)
    except UsageError:
        return None
    disk_bytes = None
    try:
        with closing(SpillFile(directory)) as spill:
            disk_bytes = shutil.disk_usage(spill.directory).free
    except TierError:
        if directory is not None:
            raise
    if (disk_bytes is None) != (kept.disk_write is None):
        return None
    with closing(backend_for(device)) as backend:
        # A container may have less than the one before.
        return replace(kept, device_bytes=_memory(backend)[1], host_bytes=memory_limit(), disk_bytes=disk_bytes)


def _memory(backend: Backend) -> tuple[int, int]:
    """Free bytes and all bytes of the device."""
    limit = memory_limit()
    return backend.memory_info() or (min(limit, psutil.virtual_memory().available), limit)


def _copy_bytes(backend: Backend) -> int:
    """Bytes of one copy: many for the link, and few beside the free memory of device and CPU."""
    wanted = _CPU_COPY if backend.device.type == "cpu" else _ACCELERATOR_COPY
    free = min(_memory(backend)[0], memory_limit(), psutil.virtual_memory().available) // _FREE_SHARE
    return max(ALIGNMENT, min(wanted, free // ALIGNMENT * ALIGNMENT))


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """``$SPILLWAY_CACHE``, or a directory in ``$XDG_CACHE_HOME`` or ``$HOME``; ``None`` for a user without a home."""
    named = environment.get("SPILLWAY_CACHE")
    if named:
        return Path(named).absolute()
    above = Path(environment.get("XDG_CACHE_HOME", ""))
    # By the standard, a relative one is ignored.
    if above.is_absolute():
        return above / "spillway"
    home = Path(environment.get("HOME", ""))
    return home / ".cache" / "spillway" if home.is_absolute() else None


def cache_file(
    device: str, host: str, torch_version: str, directory: str | None, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """The file of one kind of device, on one machine, with one torch and one directory to spill to.

    The machine's name (``host``) is hashed, since users show files to others.
    """
    folder = cache_directory(environment)
    if folder is None:
        return None
    machine = hashlib.sha256("\0".join([host, *([] if directory is None else [directory])]).encode()).hexdigest()
    return folder / f"hardware-{_plain(device)}-{_plain(torch_version)}-{machine[:12]}.json"


def keep(hardware: Hardware, file: Path | None) -> None:
    """Write the file, readable for the user alone. A reader meanwhile gets the old file or the new one."""
    try:
        if file is None:
            raise FileNotFoundError("there is no home directory")
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Beside the file: only within a file system, replacing is atomic.
        with tempfile.TemporaryDirectory(prefix=".hardware-", dir=file.parent) as folder:
            draft = Path(folder, file.name)
            draft.touch(mode=0o600)
            draft.write_text(hardware.to_json(), encoding="utf-8")
            os.replace(draft, file)
    except OSError as error:
        warnings.warn(
            f"spillway: the measured speeds of this machine could not be saved ({error}), and will be measured again. "
            f"Set SPILLWAY_CACHE to a writable directory",
            stacklevel=3,
        )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


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
    """The amount of work in a second.

    Work is queued once, and then twice as often each time until a sample is long enough: those are the warm-up. It
    takes ``seconds`` at most, or as long as the work takes once.

    ``queue`` begins an ``amount`` of work in bytes or operations, and ``wait`` waits for its end. A sample takes
    ``enough`` seconds, or as many as ``most_repeats`` take.
    """
    end = clock() + seconds
    repeats, steady = 1, False

    def sample() -> float:
        start = clock()
        for _ in range(repeats):
            queue()
        wait()
        return max(clock() - start, _SHORTEST)

    # The first one allocates: it counts only if there is no time for another.
    took = sample()
    rates = [amount / took]
    while len(rates) < MOST_SAMPLES and clock() + took < end:
        took = sample()
        rates = [*rates, repeats * amount / took] if steady else [repeats * amount / took]
        steady = steady or took >= enough or 2 * repeats > most_repeats
        if not steady:
            repeats *= 2
    return statistics.median(rates)


def measure_link(backend: Backend, nbytes: int, seconds: float) -> Bandwidth:
    """Bandwidth between a device and CPU memory: each way alone, and both at once. The CPU copies within its memory.

    It takes so many seconds, and allocates the bytes of a copy four times: on the device and on the CPU, for each way.
    """
    out, back = backend.new_stream("out"), backend.new_stream("back")
    host = [Bytes.of(backend.host_slab(nbytes).fill_(1)) for _ in range(2)]
    device = [Bytes.of(_device_memory(backend, nbytes)) for _ in range(2)]
    _wait_for_compute(backend)
    ends = {out: (host[0], device[0]), back: (device[1], host[1])}

    def queue(*streams: Stream) -> None:
        for stream in streams:
            backend.copy(stream, *ends[stream])

    def wait() -> None:
        for event in [backend.record(stream) for stream in ends]:
            event.synchronize()

    def rate(*streams: Stream) -> float:
        return rate_of(partial(queue, *streams), wait, len(streams) * nbytes, seconds / 3)

    return Bandwidth(active=1, out=rate(out), back=rate(back), both=rate(out, back))


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

    # The first one of a shape loads its kernel, and any may have been disturbed.
    while width < _LARGEST_WIDTH and min(once() for _ in range(4)) < LONG_ENOUGH and time.perf_counter() < end:
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
    """Free on the file system, before anything was written."""
    directory: Path
    direct: bool
    """Whether the page cache was bypassed. Through it, rates may be those of memory."""


def measure_drive(backend: Backend, directory: str | os.PathLike[str] | None, seconds: float) -> Drive:
    """Write to the disk and read it again, by the backend's threads. ``None``: where a session's spill file is.

    On a disk that takes longer than ``seconds`` for one piece, this one piece is written and read.
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
    """Bytes of the device, written: pages that were never written do not exist yet, and read too fast."""
    return torch.empty(nbytes, dtype=torch.uint8, device=backend.device).fill_(1)


def _wait_for_compute(backend: Backend) -> None:
    backend.record(backend.compute()).synchronize()


def _matrices(backend: Backend, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A generator of its own leaves the user's random numbers unchanged.
    generator = torch.Generator(device=backend.device).manual_seed(0)
    made = partial(torch.randn, width, width, generator=generator, device=backend.device, dtype=torch.bfloat16)
    return made(), made()
