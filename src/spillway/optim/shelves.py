"""Which shelf an optimizer gets."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.disk_shelf import DiskShelf
from spillway.optim.forecast import Forecast
from spillway.optim.kinds import Kind, for_host
from spillway.optim.memory_shelf import MemoryShelf
from spillway.optim.shelf import Settings, Shelf
from spillway.optim.streamed_shelf import StreamedShelf


def make_shelf(
    optimizer_class: type[Optimizer],
    given: dict[str, Any],
    *,
    tier: str,
    step_on: str,
    hands: int,
    for_the_host: Settings,
    for_the_device: Settings,
) -> Shelf:
    """The shelf for masters and states.

    Args:
        optimizer_class: the user's.
        given: what the user gave for it.
        tier: ``"host"`` or ``"disk"``.
        step_on: ``"host"`` or ``"device"``.
        hands: how many the host has.
        for_the_host: the settings of a parameter's group, if the host steps it.
        for_the_device: likewise, if the device does.

    Raises:
        UsageError: another tier, or place for the step.
        UnsupportedError: disk and device together; a class that is not known to step each parameter by itself.
    """
    for name, value, known in (("tier", tier, ("host", "disk")), ("step_on", step_on, ("host", "device"))):
        if value not in known:
            raise UsageError(f"{name}: got {value!r}, expected {known[0]!r} or {known[1]!r}")
    kind = Kind.of(optimizer_class)
    if tier == step_on == "host":
        return MemoryShelf(kind, optimizer_class, given, for_the_host, hands=hands)
    if tier == "disk" and step_on == "device":
        raise UnsupportedError(
            'got tier="disk" with step_on="device", expected one of them: what lies on disk comes to host memory, and '
            "is stepped there"
        )
    if not kind.alone:
        raise UnsupportedError(
            f"got {optimizer_class.__name__} with tier={tier!r} and step_on={step_on!r}, expected a class of "
            f"torch.optim: another may step all parameters in one call, with all of their state there at once; leave "
            f'both at "host"'
        )
    forecast = Forecast(optimizer_class, for_host(given))
    if tier == "disk":
        return DiskShelf(optimizer_class, for_host(given), for_the_host, forecast)
    return StreamedShelf(optimizer_class, given, for_the_device, forecast)
