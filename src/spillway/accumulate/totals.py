"""What a window's micro-batches add up to: weights and losses, of this rank and of all.

Nothing here waits for a device. A weight that is a number is added on the host; one that is a tensor stays where it is.
Sums go in float64, in which counts are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spillway.accumulate.states import Weight


@dataclass(frozen=True)
class WindowTotals:
    """Sums over a window, and over its ranks."""

    weight: Weight
    loss: Tensor
    micro_batches: Weight


class Totals:
    """The sums of one window as it grows.

    Args:
        groups: process groups over which the ranks' data differ, to be summed over one after the other.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._count = 0
        self._known = 0.0
        self._unknown: Tensor | None = None
        self._loss: Tensor | None = None
        self._reduced: Tensor | None = None
        self._work: Any = None

    def add(self, loss: Tensor, weight: Weight) -> None:
        """One more micro-batch."""
        self._count += 1
        if isinstance(weight, Tensor):
            weight = _wide(weight)
            # What cannot be meant is found out when somebody looks, without waiting for it here.
            self._unknown = _sum(self._unknown, torch.where(weight >= 0, weight, torch.nan))
        else:
            self._known += weight
        self._loss = _sum(self._loss, _wide(loss))

    def reduce(self) -> None:
        """Begin to sum over ranks: a collective of three numbers, under way while backward runs."""
        if not self._groups or self._loss is None:
            return
        numbers = [self._weight_on(self._loss), self._loss, torch.full_like(self._loss, self._count)]
        self._reduced = torch.stack(numbers)
        for group in self._groups:
            self._wait()
            self._work = torch.distributed.all_reduce(self._reduced, group=group, async_op=True)

    def finish(self) -> WindowTotals:
        """The sums. What follows on the device waits for them; the host does so only where gloo makes it."""
        if self._loss is None:
            raise RuntimeError("a window without micro-batches has no totals")
        if self._groups and self._reduced is None:
            self.reduce()
        self._wait()
        if self._reduced is not None:
            weight, loss, count = self._reduced.unbind()
            return WindowTotals(weight, loss, count)
        return WindowTotals(
            self._known if self._unknown is None else self._weight_on(self._loss), self._loss, self._count
        )

    def _weight_on(self, like: Tensor) -> Tensor:
        # Filled by a kernel: a copy from the host's memory would be waited for.
        known = torch.full_like(like, self._known)
        return known if self._unknown is None else known + self._unknown.to(like.device, non_blocking=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


def _sum(total: Tensor | None, number: Tensor) -> Tensor:
    return number if total is None else total + number.to(total.device, non_blocking=True)


def _wide(number: Tensor) -> Tensor:
    """A copy without dimensions or history, in the widest type that the device has."""
    number = whole(number.detach()).reshape(())
    return number.to(torch.float32 if number.device.type == "mps" else torch.float64, copy=True)


def whole(tensor: Tensor) -> Tensor:
    """The tensor, or of a ``DTensor`` all of it: a collective where its ranks have parts."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full
