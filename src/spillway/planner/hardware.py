"""What a machine can do: rates of its links, its disk, its compute and its memory, as they were measured or promised.

NOTE [ One device among several ]

Devices of one node share the host's memory and often a switch, so that each has less the more of them copy. A
:class:`Link` says what *each* device has while ``active`` of them copy. Not every number is measured: a plan for three
devices takes the figures of four, which promise less, and a plan for more than were ever measured takes the last.

NOTE [ Roofline ]

An operator takes as long as its arithmetic at the rate that such operators reach, or as its bytes at the memory's rate,
whichever is longer, and no less than a launch (Williams, Waterman and Patterson 2009). ``_SHARES`` are of the rate of a
large product of matrices as :class:`Hardware` has it. They come from measurements of an H200, whose figures the tests
hold: the operators of a block of Llama-8B, plain steps of such blocks with 8192 and 32768 tokens, and ResNet-50. Other
devices are taken to reach the same shares. A data sheet's rates are first cut down to what an H200 reaches of its own.
"""

from __future__ import annotations

import datetime
import enum
import math
import os
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from spillway.errors import UsageError
from spillway.planner.files import read_file, write_file
from spillway.planner.tasks import Rates

_NO_DISK = 1.0
"""Bytes in a second: a plan that used a disk that is not there would take for ever, and nobody divides by nothing."""

_DATA_SHEET = "data sheet"
"""How the source of a promise begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What each device has of the way to host memory. See NOTE [ One device among several ].

    Raises:
        UsageError: for a number of devices below 1, or a rate that is not above 0.
    """

    active: int
    """How many devices of the node copy at the same time."""
    out: float
    """Bytes in a second from a device to host memory, while nothing comes back."""
    back: float
    """Bytes in a second from host memory to a device, while nothing leaves."""
    both: float
    """Bytes in a second out and back together, while both go on."""

    def __post_init__(self) -> None:
        if self.active < 1:
            raise UsageError(f"active: got {self.active}, expected at least 1 device that copies")
        _check_rates(self, "out", "back", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a machine can do. The device is one of its accelerators, or its CPU.

    Raises:
        UsageError: for rates that are not above 0, a negative size, or links that do not begin with one device.

    Example:
        >>> rates = Hardware.named("h200").rates(window=512 << 20)
        >>> rates.out
        55400000000.0
    """

    name: str
    """Of the device, as its driver has it."""
    links: tuple[Link, ...]
    """By how many devices copy, from 1 upward. On the CPU: copies from host memory to host memory."""
    disk_write: float | None
    """Bytes in a second to the disk; ``None``: there is none to spill to."""
    disk_read: float | None
    """Bytes in a second from the disk; ``None``: there is none to spill to."""
    flops: float
    """Floating-point operations in a second of a matrix product in bfloat16, an addition being one."""
    memory_rate: float
    """Bytes in a second that the device reads and writes in its own memory, both counted."""
    device_bytes: int
    """Memory of the device."""
    host_bytes: int | None
    """Host memory that the process may use; ``None``: not known, as of a device without its machine."""
    disk_bytes: int | None
    """Free bytes where the spill file is; ``None``: not known."""
    date: datetime.date
    """When this was measured or written down."""
    source: str
    """How these figures were come by: what was measured, and on what; or the maker's data sheet."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(sorted(self.links, key=lambda link: link.active)))
        counts = [link.active for link in self.links]
        if counts[:1] != [1] or len(set(counts)) < len(counts):
            raise UsageError(f"links: got those of {counts} devices, expected each number once, beginning with 1")
        _check_rates(self, "flops", "memory_rate", "disk_write", "disk_read")
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
        """Whether compute and memory are a data sheet's, which promises more than is reached."""
        return self.source.startswith(_DATA_SHEET)

    @classmethod
    def named(cls, name: str) -> Hardware:
        """What is known of a kind of device without asking one: of :data:`PRESETS`.

        Raises:
            UsageError: for a name that is not known.
        """
        if name.lower() not in PRESETS:
            raise UsageError(
                f"hardware: got {name!r}, expected one of {', '.join(PRESETS)}; for another machine, measure it with "
                f"spillway.profiler.machine.measure_hardware()"
            )
        return PRESETS[name.lower()]

    @classmethod
    def of(cls, hardware: object) -> Hardware:
        """What a user means by ``hardware=``: a record, the name of a kind of device, or a file of :meth:`save`.

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

    def link(self, active: int = 1) -> Link:
        """What each device has while ``active`` of them copy: measured for as many or the next more, else the last.

        Raises:
            UsageError: if ``active`` is below 1.
        """
        if active < 1:
            raise UsageError(f"active: got {active}, expected at least 1 device that copies")
        return next((link for link in self.links if link.active >= active), self.links[-1])

    def rates(self, window: int, *, active: int = 1) -> Rates:
        """What the planner wants to know of the lanes.

        Args:
            window: bytes that may be leaving at once, and as many that may be fetched ahead.
            active: how many devices of the node copy at the same time.

        Raises:
            UsageError: if either is below 1.
        """
        if window < 1:
            raise UsageError(f"window: got {window}, expected at least 1 byte, as spillway.Session(window=...) has it")
        link = self.link(active)
        return Rates(
            out=link.out,
            back=link.back,
            disk_write=self.disk_write or _NO_DISK,
            disk_read=self.disk_read or _NO_DISK,
            window=window,
        )

    def to_json(self) -> str:
        """As text that :meth:`from_json` reads."""
        return _File(schema_version=1, hardware=self).model_dump_json(indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, what: str = "hardware") -> Hardware:
        """From text that :meth:`to_json` wrote.

        Args:
            text: JSON.
            what: what it is called in a message, as the name of its file.

        Raises:
            UsageError: if it is no such text, or of another version.
        """
        try:
            return _File.model_validate_json(text, strict=True).hardware
        except ValidationError as error:
            raise UsageError(
                f"{what}: got {_told(error)}, expected a file of schema version 1 as Hardware.save() writes it; "
                f"measure the machine anew (spillway doctor --fresh)"
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file.

        Raises:
            UsageError: if there can be no such file.
        """
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Hardware:
        """From a file of :meth:`save`.

        Raises:
            UsageError: if there is no such file, or something else is in it.
        """
        return cls.from_json(read_file(path, "Hardware"), what=os.fspath(path))


class _File(BaseModel, extra="forbid"):
    """What stands in a file. The version comes first, so that a file of another one is told by it."""

    schema_version: Literal[1]
    hardware: Hardware


def _check_rates(record: Link | Hardware, *names: str) -> None:
    for name in names:
        rate = getattr(record, name)
        if rate is not None and not (rate > 0 and math.isfinite(rate)):
            raise UsageError(f"{name}: got {rate}, expected a rate above 0 in a second")


def _told(error: ValidationError) -> str:
    """The first thing that is wrong, and how many more there are."""
    first, *others = error.errors(include_url=False, include_input=False)
    place = ".".join(map(str, first["loc"]))
    told = f"{place}: {first['msg']}" if place else first["msg"]
    return f"{told!r} and {len(others)} more errors" if others else repr(told)


_H200 = Hardware(
    name="NVIDIA H200",
    links=(
        Link(active=1, out=55.4e9, back=55.5e9, both=101.8e9),
        Link(active=2, out=44e9, back=44e9, both=60e9),
        Link(active=4, out=30e9, back=37e9, both=38e9),
    ),
    disk_write=3.4e9,
    disk_read=3.7e9,
    flops=780e12,
    memory_rate=4.1e12,  # of 4.8e12 by the data sheet
    device_bytes=141 * 10**9,
    host_bytes=None,
    disk_bytes=None,
    date=datetime.date(2026, 11, 22),
    source="measured on H200s with PCIe 5 x16; memory's size: data sheet",
)
_PCIE_5, _PCIE_4 = (Link(active=1, out=rate, back=rate, both=both) for rate, both in ((55e9, 100e9), (25e9, 45e9)))


def _from_data_sheet(name: str, link: Link, flops: float, memory_rate: float, gigabytes: int) -> Hardware:
    bus = "PCIe 5 x16" if link is _PCIE_5 else "PCIe 4 x16"
    return replace(
        _H200,
        name=name,
        links=(link,),
        flops=flops,
        memory_rate=memory_rate,
        device_bytes=gigabytes * 10**9,
        source=(
            f"{_DATA_SHEET}: compute and memory at their peaks; link: an estimate for {bus}; disk: as beside the h200"
        ),
    )


PRESETS: dict[str, Hardware] = {
    "h200": _H200,
    "h100": _from_data_sheet("NVIDIA H100 SXM", _PCIE_5, flops=989e12, memory_rate=3.35e12, gigabytes=80),
    "a100": _from_data_sheet("NVIDIA A100 80GB SXM", _PCIE_4, flops=312e12, memory_rate=2.039e12, gigabytes=80),
    "rtx4090": _from_data_sheet("NVIDIA GeForce RTX 4090", _PCIE_4, flops=165e12, memory_rate=1.008e12, gigabytes=24),
}
"""Machines that need not be asked, by their names in lower case. Data sheets promise more than is reached."""


class Work(enum.Enum):
    """What an operator mostly does."""

    PRODUCT = "product"
    """Products of matrices."""
    ATTENTION = "attention"
    """Fused attention. Of a causal one, half of the products count."""
    ATTENTION_BACKWARD = "attention backward"
    CONVOLUTION = "convolution"
    MEMORY = "memory"
    """All others. The arithmetic that they do is not counted."""


class Precision(enum.Enum):
    """In which arithmetic a product is computed."""

    HALF = "half"
    """16 bits."""
    TENSOR_FLOAT = "tensor-float"
    """32 bits in memory, 19 in the factors."""
    SINGLE = "single"
    DOUBLE = "double"


_SHARES = {
    # 5.34 ms in the block for 3.57e12 operations, where 780e12 a second would take 4.58.
    Work.PRODUCT: 0.86,
    # 0.61 in the block; what is left of the forward of longer ones, when all else is taken off, comes to 0.74.
    Work.ATTENTION: 0.67,
    # What is left of the two backwards, in between.
    Work.ATTENTION_BACKWARD: 0.62,
    # Of a step of ResNet-50 in float32, rounded for tensor cores, with channels first: a slow case, and the only one.
    Work.CONVOLUTION: 0.2,
    Work.MEMORY: 1.0,
}
"""Of the rate of products, what such operators reach."""
_REACHED_FLOPS = 780 / 989
_REACHED_MEMORY = 4.1 / 4.8
"""What an H200 was measured to reach, over its data sheet."""
_LAUNCH = 2e-6
"""Seconds of the shortest kernel."""
_TENSOR_FLOAT = 0.5
_SINGLE = 1 / 15
"""Of the rate in half precision: 67e12 of 989e12 on an H100, 19.5e12 of 312e12 on an A100."""
_SINGLE_GEFORCE = 0.5
"""82.6e12 of 165e12 on an RTX 4090."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What an operator computes and moves."""

    work: Work
    flops: float
    """Floating-point operations, an addition being one."""
    nbytes: int
    """Bytes that it reads and writes."""
    precision: Precision = Precision.HALF


def seconds_of(effort: Effort, hardware: Hardware) -> float:
    """How long it takes on some hardware. See NOTE [ Roofline ].

    Example:
        >>> copy = Effort(Work.MEMORY, 0, 2 << 30)
        >>> round(seconds_of(copy, Hardware.named("h200")) * 1e3, 2)
        0.52
    """
    promised = hardware.is_promised
    memory = hardware.memory_rate * (_REACHED_MEMORY if promised else 1.0)
    flops = hardware.flops * (_REACHED_FLOPS if promised else 1.0) * _share(effort.precision, hardware)
    return max(effort.flops / (flops * _SHARES[effort.work]), effort.nbytes / memory, _LAUNCH)


def _share(precision: Precision, hardware: Hardware) -> float:
    if precision is Precision.HALF:
        return 1.0
    if precision is Precision.TENSOR_FLOAT:
        return _TENSOR_FLOAT
    single = _SINGLE_GEFORCE if "GeForce" in hardware.name else _SINGLE
    return single if precision is Precision.SINGLE else single / 2
