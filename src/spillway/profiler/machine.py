"""What this machine can do: measured (``rates.py``), and kept in the user's cache.

On a fast machine, measuring takes a second or two. Nothing else should run meanwhile: the bandwidth that others use is
missing from the rates.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from spillway.errors import BackendError, TierError, UsageError
from spillway.planner.hardware import Hardware
from spillway.profiler.rates import Drive, measure_drive, measure_link, measure_memory, measure_products
from spillway.runtime.accelerator import backend_for
from spillway.runtime.anonymous_file import ALIGNMENT
from spillway.runtime.backend import Backend
from spillway.runtime.spill_file import SpillFile
from spillway.runtime.system import device_name, memory_limit, which_device

_LINK_SHARE, _PRODUCT_SHARE, _MEMORY_SHARE, _DISK_SHARE = 0.3, 0.15, 0.1, 0.35
"""Of the time, together less than all: starting up takes the rest."""

_ACCELERATOR_COPY, _CPU_COPY = 256 << 20, 64 << 20
_FREE_SHARE = 32
"""One copy takes no more than one in so many of the free bytes, on the device and on the CPU."""
_LETTERS = 12
"""Letters of a hash: enough to tell the machines of one user apart."""


def measure_hardware(
    device: torch.device | str | None = None,
    *,
    spill_directory: str | os.PathLike[str] | None = None,
    seconds: float = 20,
    on_part: Callable[[str], None] | None = None,
) -> Hardware:
    """Measure what the machine can do.

    It writes to the disk for a third of the time at most, and no more than a twentieth of what is free at once. The
    links of several devices at a time are not measured: :attr:`Hardware.links` has one device. On the CPU, the link is
    copies within CPU memory.

    Args:
        device: with an index, or the current one of its type; ``None``: the current accelerator, or else the CPU.
        spill_directory: where to write; ``None``: where a session would spill to, or nowhere if it could not.
        seconds: that it may take, about. Something that takes longer is done once all the same.
        on_part: told of each part as it begins, in a word or three.

    Raises:
        UsageError: for something that is no device or is not there, or a time that is none.
        SpillPathError: for a ``spill_directory`` in which no file can be made.
        TierError: if pinned memory cannot be had; if the disk of a ``spill_directory`` is full, or fails.
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
                f"{device}: got {error}, expected a few hundred MiB to measure with; end what else runs there"
            ) from error
        tell("disk")
        drive = _drive(backend, spill_directory, seconds * _DISK_SHARE)
        disk = "there is no disk to spill to"
        if drive is not None:
            disk = f"disk at {drive.directory}, {'direct' if drive.direct else 'through the page cache'}"
        return Hardware(
            name=device_name(device),
            links=(link,),
            disk_write=None if drive is None else drive.write,
            disk_read=None if drive is None else drive.read,
            flops=flops,
            memory_rate=memory,
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
    """What the machine can do, as it was measured once and kept in the user's cache.

    The file is ``hardware-*.json`` in ``$SPILLWAY_CACHE``, or else in ``spillway`` in the user's cache directory
    (``$XDG_CACHE_HOME``, ``~/.cache``). It is of one kind of device, one machine, one torch and one directory to spill
    to. One that is not there, or that does not validate, is measured and written. Sizes are asked for each time.
    Processes that all find no file all measure, and disturb each other: call it in one first.

    Args:
        device: as for :func:`measure_hardware`.
        spill_directory: as for :func:`measure_hardware`; ``None`` is also ``$SPILLWAY_DIR``, if it is set.
        seconds: that measuring may take.
        fresh: measure anew, and write that.
        on_part: told of each part that is measured. Never called: the file was there.

    Warns:
        UserWarning: if the file cannot be written. What was measured is returned all the same.

    Raises:
        UsageError, SpillPathError, TierError, BackendError: as :func:`measure_hardware` does.
    """
    device = which_device(device)
    directory = os.environ.get("SPILLWAY_DIR") or None if spill_directory is None else os.fspath(spill_directory)
    file = cache_file(device_name(device), platform.node(), torch.__version__, directory)
    kept = None if fresh or file is None else read_kept(file)
    present = None if kept is None else _at_present(kept, device, spill_directory)
    if present is not None:
        return present
    measured = measure_hardware(device, spill_directory=spill_directory, seconds=seconds, on_part=on_part)
    keep(measured, file)
    return measured


def _at_present(kept: Hardware, device: torch.device, directory: str | os.PathLike[str] | None) -> Hardware | None:
    """The same with as many bytes as there are now; ``None`` if the disk has come or gone since."""
    disk_bytes = None
    try:
        with closing(SpillFile(directory)) as file:
            disk_bytes = shutil.disk_usage(file.directory).free
    except TierError:
        if directory is not None:
            raise
    if (disk_bytes is None) != (kept.disk_write is None):
        return None
    with closing(backend_for(device)) as backend:
        # A container may be given less than the one before.
        return replace(kept, device_bytes=_memory(backend)[1], host_bytes=memory_limit(), disk_bytes=disk_bytes)


def _memory(backend: Backend) -> tuple[int, int]:
    """Bytes of the device that are free, and all of them."""
    return backend.memory_info() or (_free_host_memory(), memory_limit())


def _free_host_memory() -> int:
    return min(memory_limit(), psutil.virtual_memory().available)


def _copy_bytes(backend: Backend) -> int:
    """Bytes of one copy: many for the link, and few beside the memory that is free."""
    wanted = _CPU_COPY if backend.device.type == "cpu" else _ACCELERATOR_COPY
    free = min(_memory(backend)[0], _free_host_memory()) // _FREE_SHARE
    return max(ALIGNMENT, min(wanted, free // ALIGNMENT * ALIGNMENT))


def _drive(backend: Backend, directory: str | os.PathLike[str] | None, seconds: float) -> Drive | None:
    try:
        return measure_drive(backend, directory, seconds)
    except TierError:
        if directory is not None:
            raise
        # Who named no directory may never spill to disk: a session would only fail when it does.
        return None


# The cache


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The user's directory for what can be had again; ``None`` for a user without a home.

    ``$SPILLWAY_CACHE`` says which, or else ``$XDG_CACHE_HOME`` and ``$HOME`` above which.
    """
    named = environment.get("SPILLWAY_CACHE")
    if named:
        return Path(named).absolute()
    above = Path(environment.get("XDG_CACHE_HOME", ""))
    # The standard has it that a relative one is none.
    if above.is_absolute():
        return above / "spillway"
    home = Path(environment.get("HOME", ""))
    return home / ".cache" / "spillway" if home.is_absolute() else None


def cache_file(
    device: str, host: str, torch_version: str, directory: str | None, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """The file of one kind of device, on one machine, with one torch and one directory to spill to.

    It has the machine's name (``host``) as a hash only, since files get shown to others.
    """
    folder = cache_directory(environment)
    if folder is None:
        return None
    machine = hashlib.sha256("\0".join([host, *([] if directory is None else [directory])]).encode()).hexdigest()
    return folder / f"hardware-{_plain(device)}-{_plain(torch_version)}-{machine[:_LETTERS]}.json"


def read_kept(file: Path) -> Hardware | None:
    """What was kept; ``None`` if the file is not there, or does not validate."""
    try:
        return Hardware.load(file)
    except UsageError:
        return None


def keep(hardware: Hardware, file: Path | None) -> None:
    """Write it for the next time, for nobody else to read. Whoever reads it meanwhile has the old one or the new one.

    Warns:
        UserWarning: if it cannot be written.
    """
    if file is None:
        _warn("there is no home directory")
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Made with mode 0600, and beside the file: only within a file system a name can be taken over at once.
        handle, draft = tempfile.mkstemp(prefix=".hardware-", dir=file.parent)
        try:
            with open(handle, "w", encoding="utf-8") as writing:
                writing.write(hardware.to_json())
            os.replace(draft, file)
        except OSError:
            with suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        _warn(str(error))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _warn(why: str) -> None:
    warnings.warn(
        f"spillway: what was measured of this machine could not be kept ({why}), so that it will be measured again; "
        f"set SPILLWAY_CACHE to a directory that can be written",
        stacklevel=4,
    )
