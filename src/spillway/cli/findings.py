"""Facts about a machine, which are read, and findings, which follow from them: what will go wrong on it."""

from __future__ import annotations

import enum
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from spillway.errors import SpillPathError, TierError, UsageError
from spillway.planner.hardware import Hardware
from spillway.runtime.accelerator import backend_for
from spillway.runtime.process_memory import malloc_setting
from spillway.runtime.spill_file import SpillFile
from spillway.runtime.system import HOST_SHARE, device_name, local_ranks, memory_limit, mount_of, mounts
from spillway.units import format_bytes

TRIED_BYTES = 64 << 20
"""Pinned to see whether pinning works."""
_LITTLE_MEMORY = 2 << 30
_LITTLE_DISK = 8 << 30
_SLOW_LINK = 10e9
"""Bytes per second. PCIe 3 x16 is a little faster."""
_SLOW_DISK = 0.3e9
"""Bytes per second. A slower disk is a hard disk, or behind a network."""
_FREE_SHARE = 0.9
"""Share of a GPU's memory that is free if only the driver and this process use it."""
_NO_LIMIT = 0.99
"""A limit above this share of the machine's memory is not a limit."""


class Severity(enum.StrEnum):
    """How bad a finding is, the worst first."""

    STOPS = "stops"
    """Spillway does not work, or not in its default way."""
    COSTS = "costs"
    """It works, but is slower or frees less memory than it could."""
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    code: str
    """A short stable name, for programs."""
    severity: Severity
    found: str
    means: str
    """The consequence."""
    do: str
    """The remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """CPU memory, in bytes."""

    machine: int
    limit: int
    """Available to this process at most, by the machine or by a control group."""
    available: int
    """Free memory of the machine."""
    lockable: int | None = None
    """The limit on locked memory (``ulimit -l``); ``None``: there is none."""
    ranks: int = 1
    """Processes of this training on the machine, according to the launcher."""
    ranks_error: str | None = None

    @property
    def host_budget(self) -> int:
        """CPU memory that a session takes at most by default."""
        return int(HOST_SHARE * self.limit) // self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device that Spillway works for. Sizes are 0 for the CPU."""

    type: str
    """Torch's name: ``"cpu"``, ``"cuda"``."""
    name: str
    count: int = 0
    """Accelerators of this type."""
    nbytes: int = 0
    free: int = 0
    unified: bool = False
    """Whether it shares the CPU's memory."""
    error: str | None = None
    """The driver's error, if it cannot be used."""
    pinned_error: str | None = None
    """The error, if :data:`TRIED_BYTES` of CPU memory could not be pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """The place of the spill file."""

    directory: str | None = None
    """``None``: there is no usable directory."""
    error: str | None = None
    """Why there is none."""
    in_memory: bool = False
    """Whether there is none because the file system is in CPU memory."""
    named: bool = False
    """Whether the user named the directory."""
    kind: str = ""
    """Type of the file system, as ``"ext4"``."""
    free: int = 0
    direct: bool = False
    """Whether it has direct I/O (``O_DIRECT``), without the page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the machine. Nothing is measured for them."""

    torch: str
    """Its version."""
    built_for: str | None = None
    """As ``"CUDA 13.0"``; ``None``: torch was built for the CPU alone."""
    system: str
    """As ``"Linux"``."""
    wsl: bool = False
    """Whether Linux runs inside of Windows."""
    seen: str | None = None
    """The device file of an accelerator, whether torch can use it or not."""
    device: Device
    memory: Memory
    spill: Spill
    malloc: str = ""
    """How the C library's ``malloc`` is set for training on the CPU."""


def read_facts(
    device: torch.device, spill_directory: str | os.PathLike[str] | None = None, root: Path = Path("/")
) -> Facts:
    """Read the facts for a device and a directory to spill to, by default a session's. ``root`` has ``/dev``."""
    built_for = None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    seen = [*sorted((root / "dev").glob("nvidia[0-9]*")), *(root / "dev").glob("kfd")]
    return Facts(
        torch=str(torch.__version__),
        built_for=built_for if torch.version.hip is None else f"ROCm {torch.version.hip}",
        system=platform.system(),
        wsl="microsoft" in platform.uname().release.lower(),
        seen=str(seen[0]) if seen else None,
        device=_read_device(device),
        memory=_read_memory(),
        spill=_read_spill(spill_directory),
        malloc=malloc_setting(),
    )


def _read_device(device: torch.device) -> Device:
    if device.type == "cpu":
        return Device(type="cpu", name=device_name(device))
    count, pinned_error = torch.accelerator.device_count(), None
    # Torch raises RuntimeError for every error of a driver.
    try:
        with closing(backend_for(device)) as backend:
            free, nbytes = backend.memory_info() or (0, 0)
            try:
                backend.host_slab(TRIED_BYTES)
            except RuntimeError as error:
                pinned_error = str(error).partition("\n")[0]
            return Device(
                type=device.type,
                name=device_name(device),
                count=count,
                nbytes=nbytes,
                free=free,
                unified=backend.unified,
                pinned_error=pinned_error,
            )
    except RuntimeError as error:
        return Device(type=device.type, name=device.type, count=count, error=str(error).partition("\n")[0])


def _read_memory() -> Memory:
    memory, lockable, ranks, ranks_error = psutil.virtual_memory(), None, 1, None
    if sys.platform != "win32":
        import resource  # not at the top: Windows has none

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        lockable = None if soft == resource.RLIM_INFINITY else soft
    try:
        ranks = local_ranks()
    except UsageError as error:
        ranks_error = str(error)
    return Memory(
        machine=memory.total,
        limit=memory_limit(),
        available=memory.available,
        lockable=lockable,
        ranks=ranks,
        ranks_error=ranks_error,
    )


def _read_spill(directory: str | os.PathLike[str] | None) -> Spill:
    named = directory is not None or bool(os.environ.get("SPILLWAY_DIR"))
    try:
        with closing(SpillFile(directory)) as file:
            return Spill(
                directory=str(file.directory),
                named=named,
                kind=mount_of(file.directory, mounts()).kind,
                free=shutil.disk_usage(file.directory).free,
                direct=file.direct,
            )
    except TierError as error:
        refused = str(error)
    # Whether it was refused only because its file system is in CPU memory.
    in_memory = False
    with suppress(SpillPathError):
        SpillFile(directory, allow_memory_filesystem=True).close()
        in_memory = True
    return Spill(error=refused, named=named, in_memory=in_memory)


def findings(facts: Facts, hardware: Hardware | None = None) -> tuple[Finding, ...]:
    """All findings, the worst first, also about what was measured, if anything was."""
    checks = (_device, _accelerator, _pinned, _memory, _spill)
    found = [finding for check in checks for finding in check(facts)]
    if hardware is not None:
        found += _bandwidths(facts, hardware)
    order = list(Severity)
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _accelerator(facts: Facts) -> Iterator[Finding]:
    if facts.device.type != "cpu":
        return
    if facts.seen is None:
        yield Finding(
            "no-accelerator",
            Severity.NOTE,
            "No GPU is used.",
            "Activations are offloaded from CPU memory to a file on disk, which is far slower than PCIe.",
            "No action needed for CPU training. Otherwise run this on the GPU machine.",
        )
    elif facts.built_for is None:
        yield Finding(
            "cpu-torch",
            Severity.COSTS,
            f"The machine has {facts.seen}, but torch {facts.torch} is a build for the CPU.",
            "Training runs on the CPU, and so does Spillway.",
            "Install the build of torch for this GPU (see pytorch.org), unless you mean to train on the CPU.",
        )
    else:
        yield Finding(
            "accelerator-not-used",
            Severity.COSTS,
            f"The machine has {facts.seen}, and torch is built for {facts.built_for}, but the CPU is used.",
            "You asked for the CPU; or the driver is too old for this torch; or the GPU is hidden.",
            "Look at CUDA_VISIBLE_DEVICES, and at the error of torch.cuda.init(), unless you mean to train on the CPU.",
        )


def _device(facts: Facts) -> Iterator[Finding]:
    device = facts.device
    if device.error is not None:
        yield Finding(
            "device-fails",
            Severity.STOPS,
            f"The driver of {device.type} reports: {device.error}",
            "No process can use the GPU.",
            "Check that no other process has exclusive use of it, and that the driver works (nvidia-smi).",
        )
    elif device.unified:
        yield Finding(
            "unified-memory",
            Severity.COSTS,
            f"{device.name} shares the CPU's memory.",
            "Offloading to CPU memory would free nothing, so Spillway keeps the activations.",
            'Use spillway.recompute(), or offload(tier="disk").',
        )
    elif device.free < _FREE_SHARE * device.nbytes:
        yield Finding(
            "device-in-use",
            Severity.NOTE,
            f"{format_bytes(device.nbytes - device.free)} of {format_bytes(device.nbytes)} on the GPU are in use.",
            "Another process uses the memory, and also PCIe and the GPU.",
            "End that process, or give this training a budget that leaves that much free.",
        )


def _pinned(facts: Facts) -> Iterator[Finding]:
    device, memory, lockable = facts.device, facts.memory, facts.memory.lockable
    if device.type == "cpu" or device.error is not None or device.unified:
        return
    limit = "" if lockable is None else f" The limit on locked memory is {format_bytes(lockable)}."
    remedy = "Raise the limit: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity."
    if device.pinned_error is not None:
        yield Finding(
            "no-pinned-memory",
            Severity.STOPS,
            f"{format_bytes(TRIED_BYTES)} of CPU memory could not be pinned: {device.pinned_error}.{limit}",
            "Nothing can be offloaded to CPU memory: copies that overlap with compute need pinned memory.",
            remedy,
        )
    elif lockable is not None and TRIED_BYTES <= lockable < memory.host_budget:
        # A driver that pinned more than the limit does not obey it.
        yield Finding(
            "locked-memory",
            Severity.COSTS,
            f"This process may lock {format_bytes(lockable)} of memory (ulimit -l).",
            f"If the driver obeys that limit, pinning fails before the host budget of "
            f"{format_bytes(memory.host_budget)} is used. Spillway then keeps the rest on the GPU.",
            remedy,
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory, device = facts.memory, facts.device
    if memory.ranks_error is not None:
        yield Finding(
            "ranks",
            Severity.STOPS,
            memory.ranks_error,
            "A session cannot compute this process's share of CPU memory.",
            "Correct or unset the variable, or give Session a host_budget.",
        )
    if memory.limit < _NO_LIMIT * memory.machine:
        yield Finding(
            "memory-limit",
            Severity.NOTE,
            f"A control group limits this process to {format_bytes(memory.limit)} of the machine's "
            f"{format_bytes(memory.machine)}.",
            f"Spillway takes at most {format_bytes(memory.host_budget)}. Data loaders and page cache count as well; "
            f"above the limit, the kernel ends a process.",
            "Raise the container's limit, or set host_budget to what the others leave.",
        )
    # A control group's limit does not promise that the machine has so much memory free.
    available = min(memory.available, memory.limit)
    if available < _LITTLE_MEMORY:
        yield Finding(
            "little-memory",
            Severity.COSTS,
            f"{format_bytes(available)} of CPU memory are free.",
            "Offloading will make the machine swap, or the kernel end a process.",
            "End other processes, or set host_budget to less than that.",
        )
    elif not device.unified and memory.host_budget < device.nbytes:
        ranks = f" for each of {memory.ranks} processes" if memory.ranks > 1 else ""
        yield Finding(
            "host-smaller-than-device",
            Severity.NOTE,
            f"The host budget is {format_bytes(memory.host_budget)}{ranks}, less than the GPU's "
            f"{format_bytes(device.nbytes)}.",
            "A step that saves more than the budget keeps the rest on the GPU.",
            'Raise host_budget if CPU memory is free; use tier="disk" or recompute() for the rest.',
        )


def _spill(facts: Facts) -> Iterator[Finding]:
    spill, is_cpu = facts.spill, facts.device.type == "cpu"
    severity = Severity.COSTS if is_cpu else Severity.NOTE
    if spill.error is not None:
        yield Finding(
            "spill-in-memory" if spill.in_memory else "no-spill-directory",
            Severity.STOPS if is_cpu else Severity.COSTS if spill.named else Severity.NOTE,
            spill.error,
            "Nothing can be offloaded: on the CPU, the disk is the default."
            if is_cpu
            else 'tier="disk" does not work. CPU memory does.',
            "Set SPILLWAY_DIR to a directory on a disk, not on tmpfs.",
        )
    else:
        if not spill.direct:
            yield Finding(
                "page-cache",
                severity,
                f"{spill.directory} ({spill.kind or 'unknown'}) has no direct I/O.",
                "Offloading to disk goes through the page cache, which takes CPU memory and time.",
                "Set SPILLWAY_DIR to a directory on a local disk (ext4, xfs), mounted into the container.",
            )
        if spill.free < _LITTLE_DISK:
            yield Finding(
                "little-disk",
                severity,
                f"{format_bytes(spill.free)} are free at {spill.directory}.",
                "No more than that can be offloaded to disk; Spillway keeps the rest.",
                "Free some space, or set SPILLWAY_DIR to a larger disk.",
            )
    if facts.wsl:
        yield Finding(
            "wsl",
            Severity.NOTE if is_cpu else Severity.COSTS,
            "This is Linux inside of Windows (WSL).",
            "It gets a part of the memory, and Windows allows little of that to be pinned; Windows' disks are slow.",
            "Raise memory= in .wslconfig, set a small host_budget, and spill to the Linux file system.",
        )


def _bandwidths(facts: Facts, hardware: Hardware) -> Iterator[Finding]:
    link, is_cpu = hardware.bandwidth(), facts.device.type == "cpu"
    if not is_cpu and not facts.device.unified and min(link.out, link.back) < _SLOW_LINK:
        yield Finding(
            "slow-link",
            Severity.COSTS,
            f"Copies to CPU memory reach {link.out / 1e9:.1f} GB/s, and back {link.back / 1e9:.1f} GB/s.",
            "PCIe 3 x16 is faster. The slot may be narrower, the NUMA node far, or PCIe in use.",
            "Try spillway.bind_to_device(); check the link width (nvidia-smi -q); measure alone with --fresh.",
        )
    disk = [rate for rate in (hardware.disk_write, hardware.disk_read) if rate is not None]
    if disk and min(disk) < _SLOW_DISK:
        yield Finding(
            "slow-disk",
            Severity.COSTS if is_cpu else Severity.NOTE,
            f"The disk reaches {min(disk) / 1e6:.0f} MB/s.",
            "Local flash is faster. A step that offloads to this disk stalls most of the time.",
            "Set SPILLWAY_DIR to a directory on a local SSD.",
        )
