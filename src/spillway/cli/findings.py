"""Facts about a machine, which are read, and findings, which follow from them: what will go wrong on it."""

from __future__ import annotations

import enum
import functools
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from spillway.errors import SpillPathError, TierError, UsageError
from spillway.planner.hardware import Hardware
from spillway.runtime.cpu import malloc_setting
from spillway.runtime.device import backend_for
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

    severity: Severity
    code: str
    """A short stable name, for programs."""
    found: str
    means: str
    """The consequence."""
    do: str
    """The remedy."""


_stops, _costs, _note = (functools.partial(Finding, severity) for severity in Severity)


@dataclass(slots=True, kw_only=True)
class Facts:
    """Facts about the machine. Nothing is measured for them. Sizes are bytes."""

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
    malloc: str = ""
    """How the C library's ``malloc`` is set for training on the CPU."""

    measuring_error: str | None = None
    """The error, if the machine could not be measured."""

    device: str
    """Torch's name for the kind of device that Spillway works for: ``"cpu"``, ``"cuda"``."""
    device_name: str
    device_count: int = 0
    """Accelerators of this kind."""
    device_bytes: int = 0
    """Its memory, 0 for the CPU."""
    device_free: int = 0
    unified: bool = False
    """Whether it shares the CPU's memory."""
    device_error: str | None = None
    """The driver's error, if it cannot be used."""
    pinned_error: str | None = None
    """The error, if :data:`TRIED_BYTES` of CPU memory could not be pinned."""

    machine_bytes: int
    """CPU memory of the machine."""
    limit: int
    """CPU memory that this process may use at most, by the machine or by a control group."""
    available: int
    """Free CPU memory of the machine."""
    lockable: int | None = None
    """The limit on locked memory (``ulimit -l``); ``None``: there is none."""
    ranks: int = 1
    """Processes of this training on the machine, according to the launcher."""
    ranks_error: str | None = None

    spill_directory: str | None = None
    """The place of the spill file; ``None``: there is no usable directory."""
    spill_error: str | None = None
    """Why there is none."""
    spill_in_memory: bool = False
    """Whether there is none because the file system is in CPU memory."""
    spill_named: bool = False
    """Whether the user named the directory."""
    spill_kind: str = ""
    """Type of the file system, as ``"ext4"``."""
    spill_free: int = 0
    spill_direct: bool = False
    """Whether it has direct I/O (``O_DIRECT``), without the page cache."""

    @property
    def host_budget(self) -> int:
        """CPU memory that a session takes at most by default."""
        return int(HOST_SHARE * self.limit) // self.ranks


def read_facts(
    device: torch.device, spill_directory: str | os.PathLike[str] | None = None, root: Path = Path("/")
) -> Facts:
    """Read the facts for a device and a directory to spill to, by default a session's. ``root`` has ``/dev``."""
    built_for = None if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    seen = [*sorted((root / "dev").glob("nvidia[0-9]*")), *(root / "dev").glob("kfd")]
    memory = psutil.virtual_memory()
    facts = Facts(
        torch=str(torch.__version__),
        built_for=built_for if torch.version.hip is None else f"ROCm {torch.version.hip}",
        system=platform.system(),
        wsl="microsoft" in platform.uname().release.lower(),
        seen=str(seen[0]) if seen else None,
        malloc=malloc_setting(),
        device=device.type,
        device_name=device.type,
        machine_bytes=memory.total,
        limit=memory_limit(),
        available=memory.available,
        spill_named=spill_directory is not None or bool(os.environ.get("SPILLWAY_DIR")),
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    facts.lockable = None if soft == resource.RLIM_INFINITY else soft
    try:
        facts.ranks = local_ranks()
    except UsageError as error:
        facts.ranks_error = str(error)
    # Torch raises RuntimeError for every error of a driver.
    try:
        if device.type != "cpu":
            _read_device(facts, device)
        facts.device_name = device_name(device)
    except RuntimeError as error:
        facts.device_error = _first_line(error)
    _read_spill(facts, spill_directory)
    return facts


def _read_device(facts: Facts, device: torch.device) -> None:
    facts.device_count = torch.accelerator.device_count()
    with closing(backend_for(device)) as backend:
        facts.unified = backend.unified
        facts.device_free, facts.device_bytes = backend.memory_info() or (0, 0)
        try:
            backend.host_slab(TRIED_BYTES)
        except RuntimeError as error:
            facts.pinned_error = _first_line(error)


def _read_spill(facts: Facts, directory: str | os.PathLike[str] | None) -> None:
    try:
        with closing(SpillFile(directory)) as file:
            facts.spill_directory, facts.spill_direct = str(file.directory), file.direct
            facts.spill_kind = mount_of(file.directory, mounts()).kind
            facts.spill_free = shutil.disk_usage(file.directory).free
    except TierError as error:
        facts.spill_error = str(error)
        # Whether it was refused only because its file system is in CPU memory.
        with suppress(SpillPathError):
            SpillFile(directory, allow_memory_filesystem=True).close()
            facts.spill_in_memory = True


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def findings(facts: Facts, hardware: Hardware | None = None) -> tuple[Finding, ...]:
    """All findings, the worst first, also about what was measured, if anything was."""
    checks = (_device, _accelerator, _pinned, _memory, _spill)
    found = [finding for check in checks for finding in check(facts)]
    if hardware is not None:
        found += _bandwidths(facts, hardware)
    return tuple(sorted(found, key=lambda finding: list(Severity).index(finding.severity)))


def _accelerator(facts: Facts) -> Iterator[Finding]:
    if facts.device != "cpu":
        return
    if facts.seen is None:
        yield _note(
            "no-accelerator",
            "No GPU is used.",
            "Activations are offloaded from CPU memory to a file on disk, which is far slower than PCIe.",
            "No action needed for CPU training. Otherwise run this on the GPU machine.",
        )
    elif facts.built_for is None:
        yield _costs(
            "cpu-torch",
            f"The machine has {facts.seen}, but torch {facts.torch} is a build for the CPU.",
            "Training runs on the CPU, and so does Spillway.",
            "Install the build of torch for this GPU (see pytorch.org), unless you mean to train on the CPU.",
        )
    else:
        yield _costs(
            "accelerator-not-used",
            f"The machine has {facts.seen}, and torch is built for {facts.built_for}, but the CPU is used.",
            "You asked for the CPU; or the driver is too old for this torch; or the GPU is hidden.",
            "Look at CUDA_VISIBLE_DEVICES, and at the error of torch.cuda.init(), unless you mean to train on the CPU.",
        )


def _device(facts: Facts) -> Iterator[Finding]:
    if facts.measuring_error is not None:
        yield _costs(
            "not-measured",
            f"The machine could not be measured: {facts.measuring_error}",
            "Its bandwidths are unknown.",
            "Correct that first, and measure again.",
        )
    if facts.device_error is not None:
        yield _stops(
            "device-fails",
            f"The driver of {facts.device} reports: {facts.device_error}",
            "No process can use the GPU.",
            "Check that no other process has exclusive use of it, and that the driver works (nvidia-smi).",
        )
    elif facts.unified:
        yield _costs(
            "unified-memory",
            f"{facts.device_name} shares the CPU's memory.",
            "Offloading to CPU memory would free nothing, so Spillway keeps the activations.",
            'Use spillway.recompute(), or offload(tier="disk").',
        )
    elif facts.device_free < _FREE_SHARE * facts.device_bytes:
        yield _note(
            "device-in-use",
            f"{format_bytes(facts.device_bytes - facts.device_free)} of {format_bytes(facts.device_bytes)} on the GPU "
            "are in use.",
            "Another process uses the memory, and also PCIe and the GPU.",
            "End that process, or give this training a budget that leaves that much free.",
        )


def _pinned(facts: Facts) -> Iterator[Finding]:
    lockable = facts.lockable
    if facts.device == "cpu" or facts.device_error is not None or facts.unified:
        return
    limit = "" if lockable is None else f" The limit on locked memory is {format_bytes(lockable)}."
    remedy = "Raise the limit: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity."
    if facts.pinned_error is not None:
        yield _stops(
            "no-pinned-memory",
            f"{format_bytes(TRIED_BYTES)} of CPU memory could not be pinned: {facts.pinned_error}.{limit}",
            "Nothing can be offloaded to CPU memory: copies that overlap with compute need pinned memory.",
            remedy,
        )
    elif lockable is not None and TRIED_BYTES <= lockable < facts.host_budget:
        # A driver that pinned more than the limit does not obey it.
        yield _costs(
            "locked-memory",
            f"This process may lock {format_bytes(lockable)} of memory (ulimit -l).",
            f"If the driver obeys that limit, pinning fails before the host budget of "
            f"{format_bytes(facts.host_budget)} is used. Spillway then keeps the rest on the GPU.",
            remedy,
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts.ranks_error is not None:
        yield _stops(
            "ranks",
            facts.ranks_error,
            "A session cannot compute this process's share of CPU memory.",
            "Correct or unset the variable, or give Session a host_budget.",
        )
    if facts.limit < _NO_LIMIT * facts.machine_bytes:
        yield _note(
            "memory-limit",
            f"A control group limits this process to {format_bytes(facts.limit)} of the machine's "
            f"{format_bytes(facts.machine_bytes)}.",
            f"Spillway takes at most {format_bytes(facts.host_budget)}. Data loaders and page cache count as well; "
            f"above the limit, the kernel ends a process.",
            "Raise the container's limit, or set host_budget to what the others leave.",
        )
    # A control group's limit does not promise that the machine has so much memory free.
    available = min(facts.available, facts.limit)
    if available < _LITTLE_MEMORY:
        yield _costs(
            "little-memory",
            f"{format_bytes(available)} of CPU memory are free.",
            "Offloading will make the machine swap, or the kernel end a process.",
            "End other processes, or set host_budget to less than that.",
        )
    elif not facts.unified and facts.host_budget < facts.device_bytes:
        ranks = f" for each of {facts.ranks} processes" if facts.ranks > 1 else ""
        yield _note(
            "host-smaller-than-device",
            f"The host budget is {format_bytes(facts.host_budget)}{ranks}, less than the GPU's "
            f"{format_bytes(facts.device_bytes)}.",
            "A step that saves more than the budget keeps the rest on the GPU.",
            'Raise host_budget if CPU memory is free; use tier="disk" or recompute() for the rest.',
        )


def _spill(facts: Facts) -> Iterator[Finding]:
    is_cpu = facts.device == "cpu"
    severity = Severity.COSTS if is_cpu else Severity.NOTE
    if facts.spill_error is not None:
        yield Finding(
            Severity.STOPS if is_cpu else Severity.COSTS if facts.spill_named else Severity.NOTE,
            "spill-in-memory" if facts.spill_in_memory else "no-spill-directory",
            facts.spill_error,
            "Nothing can be offloaded: on the CPU, the disk is the default."
            if is_cpu
            else 'tier="disk" does not work. CPU memory does.',
            "Set SPILLWAY_DIR to a directory on a disk, not on tmpfs.",
        )
    else:
        if not facts.spill_direct:
            yield Finding(
                severity,
                "page-cache",
                f"{facts.spill_directory} ({facts.spill_kind or 'unknown'}) has no direct I/O.",
                "Offloading to disk goes through the page cache, which takes CPU memory and time.",
                "Set SPILLWAY_DIR to a directory on a local disk (ext4, xfs), mounted into the container.",
            )
        if facts.spill_free < _LITTLE_DISK:
            yield Finding(
                severity,
                "little-disk",
                f"{format_bytes(facts.spill_free)} are free at {facts.spill_directory}.",
                "No more than that can be offloaded to disk; Spillway keeps the rest.",
                "Free some space, or set SPILLWAY_DIR to a larger disk.",
            )
    if facts.wsl:
        yield Finding(
            Severity.NOTE if is_cpu else Severity.COSTS,
            "wsl",
            "This is Linux inside of Windows (WSL).",
            "It gets a part of the memory, and Windows allows little of that to be pinned; Windows' disks are slow.",
            "Raise memory= in .wslconfig, set a small host_budget, and spill to the Linux file system.",
        )


def _bandwidths(facts: Facts, hardware: Hardware) -> Iterator[Finding]:
    link, is_cpu = hardware.bandwidth(), facts.device == "cpu"
    if not is_cpu and not facts.unified and min(link.out, link.back) < _SLOW_LINK:
        yield _costs(
            "slow-link",
            f"Copies to CPU memory reach {link.out / 1e9:.1f} GB/s, and back {link.back / 1e9:.1f} GB/s.",
            "PCIe 3 x16 is faster. The slot may be narrower, the NUMA node far, or PCIe in use.",
            "Try spillway.bind_to_device(); check the link width (nvidia-smi -q); measure alone with --fresh.",
        )
    disk = [rate for rate in (hardware.disk_write, hardware.disk_read) if rate is not None]
    if disk and min(disk) < _SLOW_DISK:
        yield Finding(
            Severity.COSTS if is_cpu else Severity.NOTE,
            "slow-disk",
            f"The disk reaches {min(disk) / 1e6:.0f} MB/s.",
            "Local flash is faster. A step that offloads to this disk stalls most of the time.",
            "Set SPILLWAY_DIR to a directory on a local SSD.",
        )
