"""The classes that a session makes the runtime of a device from. The package's ``__init__.py`` chooses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from spillway.runtime.backend import Backend
    from spillway.runtime.cuda_graphs import CapturedRuntime
    from spillway.runtime.device import DeviceRuntime
    from spillway.runtime.spill_file import SpillFile
    from spillway.runtime.tiers import Tier


@dataclass(frozen=True)
class Parts:
    """The parts that know a device, a disk or a machine, and the runtime that holds them together."""

    runtime: type[DeviceRuntime]
    backend_for: Callable[..., Backend]
    captured: type[CapturedRuntime]
    disk_tier: Callable[..., Tier]
    direct_disk_tier: Callable[..., Tier]
    disk: type[SpillFile]
    host_budget: Callable[[], int]


parts = cast("Parts", None)
