"""The bandwidths, compute rates and memory sizes of a machine, measured or from a data sheet.

NOTE [ One GPU among several ]

GPUs of one node share CPU memory and often a switch. So the bandwidth of each falls with the number of GPUs that copy.
A :class:`Bandwidth` is that of *each* GPU while ``active`` of them copy. Not every number is measured: a plan for three
GPUs uses the bandwidth of four, which is lower, and a plan for more than were measured uses the last one.

NOTE [ Roofline ]

An operator takes as long as its arithmetic or as its memory traffic, whichever is longer, and no less than a launch
(Williams, Waterman and Patterson 2009). The rates that operators reach (:class:`Work`) come from measurements of an
H200, which the tests repeat: the operators of a block of Llama-8B, plain steps of such blocks with 8192 and 32768
tokens, and ResNet-50. Other GPUs are assumed to reach the same shares of the rate of a large matrix product, which
:class:`Hardware` has. The rates of a data sheet are first reduced to the part that an H200 reaches of its own.
"""

from __future__ import annotations

import datetime
import enum
import math
import os
from dataclasses import dataclass, replace
from typing import ClassVar

from spillway.errors import UsageError
from spillway.planner.files import FileRecord, Record
from spillway.planner.tasks import Rates

_NO_DISK = 1.0
"""Bytes a second: a plan that used a missing disk would take for ever, and no division by zero occurs."""
_DATA_SHEET = "data sheet"
"""The source of unmeasured hardware begins so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(Record):
    """PCIe or NVLink bandwidth of one GPU to CPU memory, in bytes a second. See NOTE [ One GPU among several ].

    Raises:
        UsageError: for a number of GPUs below 1, or a bandwidth that is not above 0.
    """

    active: int
    """How many GPUs of the node copy at the same time."""
    out: float
    """From a GPU to CPU memory, without copies back."""
    back: float
    """From CPU memory to a GPU, without copies out."""
    both: float
    """The sum of both ways, when both are busy."""

    def __post_init__(self) -> None:
        if self.active < 1:
            raise UsageError(f"active: got {self.active}, expected at least 1 GPU that copies")
        _check_positive(self, "out", "back", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(FileRecord):
    """A machine. Its device is one of its GPUs, or its CPU.

    Raises:
        UsageError: for rates that are not above 0, a negative size, or bandwidths that do not begin with one GPU.

    Example:
        >>> rates = Hardware.named("h200").rates(window=512 << 20)
        >>> rates.out
        55400000000.0
    """

    _remedy: ClassVar[str] = "Measure the machine again (spillway doctor --fresh)."

    name: str
    """The name that the device's driver gives."""
    bandwidths: tuple[Bandwidth, ...]
    """By the number of GPUs that copy, from 1 upward. On the CPU: copies within CPU memory."""
    disk_write: float | None
    """Bytes a second to the disk; ``None``: there is no disk to spill to."""
    disk_read: float | None
    """Bytes a second from the disk; ``None``: there is no disk to spill to."""
    flops: float
    """Floating-point operations a second in a bfloat16 matrix product, counting an addition as one."""
    memory_bandwidth: float
    """Bytes a second that the device reads and writes in its own memory, both counted."""
    device_bytes: int
    """Memory of the device."""
    host_bytes: int | None
    """CPU memory that the process may use; ``None``: not known, as for a GPU without its machine."""
    disk_bytes: int | None
    """Free bytes in the spill directory; ``None``: not known."""
    date: datetime.date
    """When this was measured or written down."""
    source: str
    """The origin of these numbers: a measurement and its machine, or a data sheet."""
    schema: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidths", tuple(sorted(self.bandwidths, key=lambda each: each.active)))
        counts = [each.active for each in self.bandwidths]
        if counts[:1] != [1] or len(set(counts)) < len(counts):
            raise UsageError(f"bandwidths: got those of {counts} GPUs, expected each number once, beginning with 1")
        _check_positive(self, "flops", "memory_bandwidth", "disk_write", "disk_read")
        if (self.disk_write is None) != (self.disk_read is None):
            raise UsageError(
                f"disk_write, disk_read: got {self.disk_write} and {self.disk_read}, expected both or None for both"
            )
        for name in ("device_bytes", "host_bytes", "disk_bytes"):
            size = getattr(self, name)
            if size is not None and size < 0:
                raise UsageError(f"{name}: got {size}, expected at least 0 bytes")

    @property
    def is_promised(self) -> bool:
        """Whether compute and memory are those of a data sheet, which are higher than the rates that are reached."""
        return self.source.startswith(_DATA_SHEET)

    @classmethod
    def named(cls, name: str) -> Hardware:
        """A kind of GPU by its name in :data:`PRESETS`.

        Raises:
            UsageError: for an unknown name.
        """
        if not isinstance(name, str) or name.lower() not in PRESETS:
            raise UsageError(
                f"hardware: {name!r:.200} is not one of {', '.join(PRESETS)}. Measure another machine with "
                f"spillway.profiler.machine.measure_hardware()."
            )
        return PRESETS[name.lower()]

    @classmethod
    def of(cls, hardware: object) -> Hardware:
        """The hardware of a ``hardware=`` option: a record, the name of a GPU, or a file of :meth:`save`.

        Raises:
            UsageError: for anything else.
        """
        if isinstance(hardware, Hardware):
            return hardware
        if isinstance(hardware, str) and hardware.lower() in PRESETS:
            return cls.named(hardware)
        if isinstance(hardware, (str, os.PathLike)) and os.path.lexists(hardware):
            return cls.load(hardware)
        raise UsageError(
            f"hardware: got {hardware!r:.200}, expected one of {', '.join(PRESETS)}, a file that Hardware.save() "
            f"wrote, a spillway.Hardware, or None for this machine"
        )

    def bandwidth(self, active: int = 1) -> Bandwidth:
        """The bandwidth of each GPU while ``active`` of them copy: of as many or the next more, else the last.

        Raises:
            UsageError: if ``active`` is below 1.
        """
        if active < 1:
            raise UsageError(f"active: got {active}, expected at least 1 GPU that copies")
        return next((each for each in self.bandwidths if each.active >= active), self.bandwidths[-1])

    def shared_by(self, active: int) -> Hardware:
        """The hardware of each GPU while ``active`` of them copy: its only bandwidth is that of :meth:`bandwidth`."""
        return replace(self, bandwidths=(replace(self.bandwidth(active), active=1),))

    def rates(self, window: int) -> Rates:
        """Bandwidths of one GPU that copies alone, and an in-flight limit in bytes, for a simulation.

        Raises:
            UsageError: if that is below 1.
        """
        if window < 1:
            raise UsageError(f"window: got {window}, expected at least 1 byte, as for spillway.Session(window=...)")
        found = self.bandwidth()
        return Rates(found.out, found.back, self.disk_write or _NO_DISK, self.disk_read or _NO_DISK, window)


def _check_positive(record: Bandwidth | Hardware, *names: str) -> None:
    for name in names:
        rate = getattr(record, name)
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise UsageError(f"{name}: got {rate}, expected a positive number a second")


_H200 = Hardware(
    name="NVIDIA H200",
    bandwidths=(
        Bandwidth(active=1, out=55.4e9, back=55.5e9, both=101.8e9),
        Bandwidth(active=2, out=44e9, back=44e9, both=60e9),
        Bandwidth(active=4, out=30e9, back=37e9, both=38e9),
    ),
    disk_write=3.4e9,
    disk_read=3.7e9,
    flops=780e12,
    memory_bandwidth=4.1e12,  # of 4.8e12 by the data sheet
    device_bytes=141 * 10**9,
    host_bytes=None,
    disk_bytes=None,
    date=datetime.date(2026, 11, 22),
    source="measured on H200s with PCIe 5 x16; memory's size: data sheet",
)
_PCIE_5, _PCIE_4 = (Bandwidth(active=1, out=rate, back=rate, both=both) for rate, both in ((55e9, 100e9), (25e9, 45e9)))


def _from_data_sheet(
    name: str, bandwidth: Bandwidth, flops: float, memory_bandwidth: float, gigabytes: int
) -> Hardware:
    bus = "PCIe 5 x16" if bandwidth is _PCIE_5 else "PCIe 4 x16"
    return replace(
        _H200,
        name=name,
        bandwidths=(bandwidth,),
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        device_bytes=gigabytes * 10**9,
        source=f"{_DATA_SHEET}: peak compute and memory bandwidth; to CPU memory: an estimate for {bus}; disk: as h200",
    )


PRESETS: dict[str, Hardware] = {
    "h200": _H200,
    "h100": _from_data_sheet("NVIDIA H100 SXM", _PCIE_5, 989e12, 3.35e12, gigabytes=80),
    "a100": _from_data_sheet("NVIDIA A100 80GB SXM", _PCIE_4, 312e12, 2.039e12, gigabytes=80),
    "rtx4090": _from_data_sheet("NVIDIA GeForce RTX 4090", _PCIE_4, 165e12, 1.008e12, gigabytes=24),
}
"""Machines that need not be measured, by their names in lower case."""


class Work(enum.Enum):
    """The kind of an operator's arithmetic, and the rate that it reaches, relative to a large matrix product."""

    PRODUCT = 0.86
    """Matrix products. 5.34 ms in the block for 3.57e12 operations, where 780e12 a second would take 4.58."""
    ATTENTION = 0.67
    """Fused attention. Half of the products of causal attention count. 0.61 in the block. The forward of longer blocks
    gives 0.74, after all else is subtracted."""
    ATTENTION_BACKWARD = 0.62
    """Between the values that remain of the two backwards."""
    CONVOLUTION = 0.2
    """A step of ResNet-50 in float32, rounded for tensor cores, channels first: a slow case, and the only one measured.
    """
    MEMORY = 1.0
    """All others. Their arithmetic is not counted."""


class Precision(enum.Enum):
    """The arithmetic of a product, and its rate, relative to half precision."""

    HALF = 1.0
    """16 bits."""
    TENSOR_FLOAT = 0.5
    """32 bits in memory, 19 in the factors."""
    SINGLE = 1 / 15
    """67e12 of 989e12 on an H100, 19.5e12 of 312e12 on an A100."""
    DOUBLE = 1 / 30


_GEFORCE = 7.5
"""Factor of the last two on a GeForce: 82.6e12 of 165e12 on an RTX 4090."""
_REACHED_FLOPS, _REACHED_MEMORY = 780 / 989, 4.1 / 4.8
"""Measured on an H200, over its data sheet."""
_LAUNCH = 2e-6
"""Seconds of the shortest kernel."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The arithmetic and the memory traffic of an operator."""

    work: Work
    flops: float
    """Floating-point operations, counting an addition as one."""
    nbytes: int
    """Bytes that it reads and writes."""
    precision: Precision = Precision.HALF


def seconds_of(effort: Effort, hardware: Hardware) -> float:
    """The time of an operator on some hardware. See NOTE [ Roofline ].

    Example:
        >>> copy = Effort(Work.MEMORY, 0, 2 << 30)
        >>> round(seconds_of(copy, Hardware.named("h200")) * 1e3, 2)
        0.52
    """
    promised = hardware.is_promised
    memory = hardware.memory_bandwidth * (_REACHED_MEMORY if promised else 1.0)
    is_wide = effort.precision in (Precision.SINGLE, Precision.DOUBLE)
    precision = effort.precision.value * (_GEFORCE if is_wide and "GeForce" in hardware.name else 1.0)
    flops = hardware.flops * (_REACHED_FLOPS if promised else 1.0) * precision
    return max(effort.flops / (flops * effort.work.value), effort.nbytes / memory, _LAUNCH)
