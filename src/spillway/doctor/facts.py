"""What the machine says about itself, asked once and without measuring. What follows is in ``findings.py``."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from spillway.errors import SpillPathError, TierError, UsageError
from spillway.runtime.backend import Backend
from spillway.runtime.device import backend_for
from spillway.runtime.device_name import device_name
from spillway.runtime.disk import SpillFile
from spillway.runtime.host_memory import local_ranks, memory_limit
from spillway.runtime.malloc import malloc_setting
from spillway.runtime.spill_directory import mount_of
from spillway.runtime.system_calls import SystemCalls

TRIED_BYTES = 64 << 20
"""Pinned to see whether it can be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of the host, in bytes."""

    machine: int
    """All that the machine has."""
    limit: int
    """What this process may use: less where a control group says so."""
    available: int
    """What nobody uses now, of all that the machine has."""
    lockable: int | None = None
    """What the process may lock (``ulimit -l``); ``None``: as much as it likes, or the system has no such limit."""
    ranks: int = 1
    """Processes of this training on the machine, as the launcher says."""
    ranks_error: str | None = None
    """What is wrong with that, if something is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What Spillway works for."""

    type: str
    """As torch has it: ``"cpu"``, ``"cuda"``."""
    name: str
    count: int = 0
    """Accelerators of this type."""
    nbytes: int = 0
    """Memory of it; 0 where it is the host's."""
    free: int = 0
    """Bytes of it that nobody uses."""
    unified: bool = False
    """Whether its memory is the host's own."""
    error: str | None = None
    """What it said when it was asked for its memory, if it cannot be used."""
    pinned_error: str | None = None
    """What was said when :data:`TRIED_BYTES` of host memory were to be pinned, if they could not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """Where the spill file would be."""

    directory: str | None = None
    """``None``: nowhere."""
    error: str | None = None
    """Why nowhere."""
    in_memory: bool = False
    """Whether that is because it is on a file system in host memory."""
    named: bool = False
    """Whether somebody said where, and not the defaults."""
    kind: str = ""
    """Type of the file system, as ``"ext4"``."""
    free: int = 0
    """Bytes."""
    direct: bool = False
    """Whether the page cache is left out (``O_DIRECT``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the machine says about itself."""

    torch: str
    """Version."""
    built_for: str | None = None
    """What this build of torch knows beside the CPU: ``"CUDA 13.0"``. ``None``: nothing, or not said."""
    system: str
    """As ``"Linux"``."""
    wsl: bool = False
    """Whether Linux runs inside of Windows."""
    seen: str | None = None
    """A device file that tells of an accelerator, whether torch can use it or not."""
    device: Device
    memory: Memory
    spill: Spill
    malloc: str = ""
    """How the C library's ``malloc`` is set where Spillway works in CPU memory."""


def read_facts(
    device: torch.device, spill_directory: str | os.PathLike[str] | None = None, root: Path = Path("/")
) -> Facts:
    """Ask the machine.

    Args:
        device: to work for.
        spill_directory: to spill to; ``None``: where a session would.
        root: where ``/dev`` is.
    """
    release = platform.uname().release
    return Facts(
        torch=str(torch.__version__),
        built_for=_built_for(),
        system=platform.system(),
        wsl="microsoft" in release.lower(),
        seen=_seen(root),
        device=_device(device),
        memory=_memory(),
        spill=_spill(spill_directory),
        malloc=malloc_setting(),
    )


def _built_for() -> str | None:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"


def _seen(root: Path) -> str | None:
    found = [*sorted((root / "dev").glob("nvidia[0-9]*")), *(root / "dev").glob("kfd")]
    return str(found[0]) if found else None


def _device(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device(type="cpu", name=device_name(device))
    count = torch.accelerator.device_count()
    try:
        with closing(backend_for(device)) as backend:
            free, nbytes = backend.memory_info() or (0, 0)
            return Device(
                type=device.type,
                name=device_name(device),
                count=count,
                nbytes=nbytes,
                free=free,
                unified=backend.unified,
                pinned_error=_pinning_error(backend),
            )
    except RuntimeError as error:  # what torch makes of every error of a driver
        return Device(type=device.type, name=device.type, count=count, error=_first_line(error))


def _pinning_error(backend: Backend) -> str | None:
    try:
        backend.host_slab(TRIED_BYTES)
    except RuntimeError as error:  # of the engine, and of torch where that pins
        return _first_line(error)
    return None


def _memory() -> Memory:
    memory = psutil.virtual_memory()
    ranks, ranks_error = 1, None
    try:
        ranks = local_ranks()
    except UsageError as error:
        ranks_error = str(error)
    return Memory(
        machine=memory.total,
        limit=memory_limit(),
        available=memory.available,
        lockable=_lockable(),
        ranks=ranks,
        ranks_error=ranks_error,
    )


def _lockable() -> int | None:
    if sys.platform == "win32":
        return None
    import resource  # not at the top: Windows has none

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _spill(directory: str | os.PathLike[str] | None) -> Spill:
    named = directory is not None or bool(os.environ.get("SPILLWAY_DIR"))
    try:
        with closing(SpillFile(directory)) as file:
            return Spill(
                directory=str(file.directory),
                named=named,
                kind=mount_of(file.directory, SystemCalls().mounts()).kind,
                free=shutil.disk_usage(file.directory).free,
                direct=file.direct,
            )
    except TierError as error:
        return Spill(error=str(error), named=named, in_memory=_could_be_in_memory(directory))


def _could_be_in_memory(directory: str | os.PathLike[str] | None) -> bool:
    """Whether a file that was refused could be made where host memory is allowed."""
    with suppress(SpillPathError):
        SpillFile(directory, allow_memory_filesystem=True).close()
        return True
    return False


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
