"""What a window's step gives: numbers that stay on their device until somebody reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class DeviceNumber:
    """A number that may still be under way on a device. Reading it waits for the device, once.

    ``float(number)``, ``number.item()``, ``bool(number)`` and ``f"{number:.3f}"`` read it; ``number.tensor`` does not.

    Args:
        value: a number, or a tensor of one element that nobody writes any more.

    Example:
        >>> number = DeviceNumber(torch.tensor(2.5))
        >>> number
        DeviceNumber(<not read>)
        >>> f"{number:.2f}", number
        ('2.50', DeviceNumber(2.5))
    """

    __slots__ = ("_tensor", "_value")

    def __init__(self, value: float | Tensor) -> None:
        self._tensor = value.detach() if isinstance(value, Tensor) else None
        self._value = None if isinstance(value, Tensor) else float(value)

    @property
    def tensor(self) -> Tensor:
        """The number where it is, as a tensor without dimensions, and without waiting."""
        if self._tensor is None:
            return torch.tensor(self._value, dtype=torch.float64)
        return self._tensor.reshape(())

    def item(self) -> float:
        """The number. The host waits for the device, the first time."""
        if self._value is None:
            self._value = float(self.tensor.item())
        return self._value

    def __float__(self) -> float:
        return self.item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"DeviceNumber({'<not read>' if self._value is None else self._value})"


@dataclass(frozen=True, slots=True)
class WindowStep:
    """What one window did. Its numbers are read when you ask for them (:class:`DeviceNumber`)."""

    index: int
    """Number of the window, from 0; windows that were skipped count, dropped ones do not."""
    loss: DeviceNumber
    """Of the window, over all ranks, normalised as its gradients are; not scaled by a ``GradScaler``. Not a number if
    nothing in the window weighs anything."""
    weight: DeviceNumber
    """Tokens or samples of the window over all ranks: what its gradients were divided by. With ``"steps"`` and
    ``"sum"``: the weights that were given, or the micro-batches of all ranks where none was."""
    gradient_norm: DeviceNumber | None
    """Norm of all normalised gradients, before clipping; ``None`` without ``max_norm``."""
    learning_rates: tuple[float | DeviceNumber, ...]
    """Of each parameter group, as the step took them. Where the optimizer keeps one on a device, it stays there."""
    skipped: DeviceNumber
    """Whether the ``GradScaler`` found gradients that are not finite: then nothing was changed but its scale."""
    micro_batches: int
    """How many there were, on this rank."""
