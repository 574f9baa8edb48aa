"""What follows from the facts: what was found, what it means, and what to do. Functions over records."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spillway.doctor.facts import TRIED_BYTES, Facts
from spillway.errors import UnsupportedError
from spillway.planning.hardware import Hardware
from spillway.requirements import OLDEST_TORCH, require_torch
from spillway.session import HOST_SHARE
from spillway.units import format_bytes

_LITTLE_MEMORY = 2 << 30
_LITTLE_DISK = 8 << 30
_SLOW_LINK = 10e9
"""Bytes in a second: PCIe 3 x16 reaches a little more, and every later one far more."""
_SLOW_DISK = 0.3e9
"""Bytes in a second: below, it is a disk that turns, or one behind a network."""
_OTHERS = 0.1
"""Of the device's memory, what the driver and this process may take themselves."""
_ROUNDING = 0.99
"""A limit that is nearly all of the machine's memory is none."""


class Severity(enum.Enum):
    """How bad it is, the worst first."""

    STOPS = "stops"
    """Spillway does not work so, or not in the way that it works by default here."""
    COSTS = "costs"
    """It works, and takes longer or frees less than it could."""
    NOTE = "note"
    """Good to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found."""

    code: str
    """A short name that stays the same, for programs."""
    severity: Severity
    found: str
    means: str
    do: str
    """What to do about it."""


def findings(facts: Facts, hardware: Hardware | None = None) -> tuple[Finding, ...]:
    """All that follows, the worst first.

    Args:
        facts: what the machine says.
        hardware: what was measured, if it was.
    """
    found = [finding for check in _CHECKS for finding in check(facts)]
    if hardware is not None:
        found += _rates(facts, hardware)
    order = list(Severity)
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


def _torch(facts: Facts) -> Iterator[Finding]:
    try:
        require_torch(facts.torch)
    except UnsupportedError:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Finding(
            code="old-torch",
            severity=Severity.STOPS,
            found=f"torch {facts.torch}, expected {oldest} or later.",
            means="Spillway refuses to be imported: its hooks and streams stand on what came with that version.",
            do="pip install --upgrade torch",
        )


def _accelerator(facts: Facts) -> Iterator[Finding]:
    if facts.device.type != "cpu":
        return
    if facts.seen is None:
        yield Finding(
            code="no-accelerator",
            severity=Severity.NOTE,
            found="No accelerator is used.",
            means="What autograd saves goes from host memory to a file on the disk, which is far slower than a link.",
            do="Nothing, if the CPU is meant; else run this where the accelerator is.",
        )
    elif facts.built_for is None:
        yield Finding(
            code="cpu-torch",
            severity=Severity.COSTS,
            found=f"{facts.seen} is here, and torch {facts.torch} is a build for the CPU.",
            means="Training runs on the CPU, and so does Spillway.",
            do="Install the build of torch for this accelerator (pytorch.org says which), unless the CPU is meant.",
        )
    else:
        yield Finding(
            code="accelerator-not-used",
            severity=Severity.COSTS,
            found=f"{facts.seen} is here, torch is built for {facts.built_for}, and the CPU is used.",
            means="The CPU was asked for; or the driver is too old for this torch; or the device is hidden.",
            do="Unless the CPU is meant, look at CUDA_VISIBLE_DEVICES, and at what torch.cuda.init() says.",
        )


def _device(facts: Facts) -> Iterator[Finding]:
    device = facts.device
    if device.error is not None:
        yield Finding(
            code="device-fails",
            severity=Severity.STOPS,
            found=f"{device.type} says: {device.error}",
            means="Nothing can be put on the device, by Spillway or by anybody else.",
            do="See that no other process holds it alone, and that the driver works (nvidia-smi).",
        )
    elif device.unified:
        yield Finding(
            code="unified-memory",
            severity=Severity.COSTS,
            found=f"The memory of {device.name} is the host's own.",
            means="Moving to host memory would free nothing, so that what autograd saves stays.",
            do='Use spillway.recompute(), or offload(tier="disk").',
        )
    elif device.free < (1 - _OTHERS) * device.nbytes:
        yield Finding(
            code="device-in-use",
            severity=Severity.NOTE,
            found=f"{format_bytes(device.nbytes - device.free)} of {format_bytes(device.nbytes)} on the device are "
            f"taken.",
            means="Another process holds them, and uses the link and the device as well.",
            do="End it, or give this training a budget that leaves room for it.",
        )


def _pinned(facts: Facts) -> Iterator[Finding]:
    device, lockable = facts.device, facts.memory.lockable
    if device.type == "cpu" or device.error is not None or device.unified:
        return
    limit = "" if lockable is None else f" The limit on locked memory is {format_bytes(lockable)}."
    if device.pinned_error is not None:
        yield Finding(
            code="no-pinned-memory",
            severity=Severity.STOPS,
            found=f"{format_bytes(TRIED_BYTES)} of host memory could not be pinned: {device.pinned_error}.{limit}",
            means="Nothing can be moved to host memory, which has to be pinned for copies beside the computation.",
            do="Raise the limit: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity.",
        )
    elif lockable is not None and TRIED_BYTES <= lockable < _budget(facts):
        # A driver that pinned more than the limit does not ask for it.
        yield Finding(
            code="locked-memory",
            severity=Severity.COSTS,
            found=f"This process may lock {format_bytes(lockable)} of memory (ulimit -l).",
            means=f"Pinning may fail before the host budget of {format_bytes(_budget(facts))} is used, if the driver "
            f"goes by that limit; what then has no place stays on the device.",
            do="Raise the limit: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK=infinity.",
        )


def _wsl(facts: Facts) -> Iterator[Finding]:
    if facts.wsl:
        yield Finding(
            code="wsl",
            severity=Severity.NOTE if facts.device.type == "cpu" else Severity.COSTS,
            found="This is Linux inside of Windows (WSL).",
            means="It has a part of the memory only, of which Windows lets little be pinned; its own disk is slower.",
            do="Raise memory= in .wslconfig, set a small host_budget, and spill to the Linux file system.",
        )


def _ranks(facts: Facts) -> Iterator[Finding]:
    if facts.memory.ranks_error is not None:
        yield Finding(
            code="ranks",
            severity=Severity.STOPS,
            found=facts.memory.ranks_error,
            means="No session can be made, as it does not know its share of the host's memory.",
            do="Set the variable right, unset it, or give Session a host_budget.",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory, device = facts.memory, facts.device
    if memory.limit < _ROUNDING * memory.machine:
        yield Finding(
            code="memory-limit",
            severity=Severity.NOTE,
            found=f"A control group gives this process {format_bytes(memory.limit)} of the machine's "
            f"{format_bytes(memory.machine)}.",
            means=f"Spillway takes {format_bytes(_budget(facts))} at most. Everything in the group counts, loaders and "
            f"page cache too; beyond its limit the kernel ends a process.",
            do="Raise the container's limit, or set host_budget to what the others leave.",
        )
    # The limit of a group is no promise that there is so much.
    available = min(memory.available, memory.limit)
    if available < _LITTLE_MEMORY:
        yield Finding(
            code="little-memory",
            severity=Severity.COSTS,
            found=f"{format_bytes(available)} of host memory are free.",
            means="The machine will swap, or the kernel will end a process, when something is moved there.",
            do="End what else runs, or set host_budget to less than that.",
        )
    elif not device.unified and _budget(facts) < device.nbytes:
        ranks = f" for each of {memory.ranks} processes" if memory.ranks > 1 else ""
        yield Finding(
            code="host-smaller-than-device",
            severity=Severity.NOTE,
            found=f"The host budget is {format_bytes(_budget(facts))}{ranks}, the device has "
            f"{format_bytes(device.nbytes)}.",
            means="A step that saves more than the budget keeps the rest on the device.",
            do='Raise host_budget if nothing else needs the memory; use tier="disk" or recompute() for the rest.',
        )


def _spill(facts: Facts) -> Iterator[Finding]:
    spill = facts.spill
    default = facts.device.type == "cpu"
    to = "To the disk" if default else 'To tier="disk"'
    if spill.error is not None:
        yield Finding(
            code="spill-in-memory" if spill.in_memory else "no-spill-directory",
            severity=Severity.STOPS if default else Severity.COSTS if spill.named else Severity.NOTE,
            found=spill.error,
            means=f"{to} nothing can go, {'which is where the CPU sends all' if default else 'and host memory works'}.",
            do="Set SPILLWAY_DIR to a directory on a disk, and not on tmpfs.",
        )
        return
    if not spill.direct:
        yield Finding(
            code="page-cache",
            severity=Severity.COSTS if default else Severity.NOTE,
            found=f"{spill.directory} ({spill.kind or 'unknown'}) has no direct I/O.",
            means=f"{to} bytes go by way of the page cache, which takes host memory and time.",
            do="Set SPILLWAY_DIR to a directory on a local disk (ext4, xfs), mounted into the container.",
        )
    if spill.free < _LITTLE_DISK:
        yield Finding(
            code="little-disk",
            severity=Severity.COSTS if default else Severity.NOTE,
            found=f"{format_bytes(spill.free)} are free at {spill.directory}.",
            means=f"{to} no more can go; the rest stays where it is.",
            do="Free some, or set SPILLWAY_DIR to a larger disk.",
        )


def _rates(facts: Facts, hardware: Hardware) -> Iterator[Finding]:
    link = hardware.link()
    if facts.device.type != "cpu" and not facts.device.unified and min(link.out, link.back) < _SLOW_LINK:
        yield Finding(
            code="slow-link",
            severity=Severity.COSTS,
            found=f"The link carries {link.out / 1e9:.1f} GB/s out and {link.back / 1e9:.1f} GB/s back.",
            means="That is less than PCIe 3 with 16 lanes has: a slot with fewer, a far NUMA node, or company.",
            do="Try spillway.bind_to_device(); look at the link's width (nvidia-smi -q); measure alone with --fresh.",
        )
    rates = [rate for rate in (hardware.disk_write, hardware.disk_read) if rate is not None]
    if rates and min(rates) < _SLOW_DISK:
        yield Finding(
            code="slow-disk",
            severity=Severity.COSTS if facts.device.type == "cpu" else Severity.NOTE,
            found=f"The disk does {min(rates) / 1e6:.0f} MB/s.",
            means="That is no local flash: a step that spills waits for it most of the time.",
            do="Set SPILLWAY_DIR to a directory on a local SSD.",
        )


def _budget(facts: Facts) -> int:
    """Host memory that a session takes at most, if nobody says otherwise."""
    return int(HOST_SHARE * facts.memory.limit) // facts.memory.ranks


_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _torch,
    _device,
    _accelerator,
    _pinned,
    _ranks,
    _memory,
    _spill,
    _wsl,
)
