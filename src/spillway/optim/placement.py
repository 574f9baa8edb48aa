"""Which parameters are held on the host: a pure choice."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def counted(devices: Sequence[torch.device]) -> list[bool]:
    """Which of some parameters a fraction counts: those on a device, or all where all are on the CPU.

    Args:
        devices: of each.

    Example:
        >>> counted([torch.device("cuda"), torch.device("cpu")])
        [True, False]
    """
    on_device = [device.type != "cpu" for device in devices]
    return on_device if any(on_device) else [True] * len(devices)


def held_of(sizes: Sequence[int], fraction: float, *, last_first: bool = True) -> list[bool]:
    """Which of some parameters are held, so that they are at least a fraction of all elements.

    Args:
        sizes: elements of each, in the order of the model.
        fraction: from 0 to 1.
        last_first: hold the last ones. Their gradients come first in backward, so that those that come last, and are
            wanted first in the next forward, step on the device.

    Example:
        >>> held_of([4, 4, 2], 0.5)
        [False, True, True]
    """
    wanted = fraction * sum(sizes)
    held = [False] * len(sizes)
    taken = 0
    order = range(len(sizes))
    for index in reversed(order) if last_first else order:
        if taken >= wanted:
            break
        held[index] = True
        taken += sizes[index]
    return held


def held_beyond(nbytes: Sequence[int], budget: int) -> list[bool]:
    """Which of some parameters are held, so that the state of the others is within a budget.

    The first parameters stay on the device, whose gradients come last in backward: each that the budget still has room
    for. One that is too large is held, and smaller ones behind it may stay all the same.

    Args:
        nbytes: bytes of state of each, masters included, in the order of the model.
        budget: most bytes of those that are not held.

    Example:
        >>> held_beyond([4, 8, 2, 4], 7)
        [False, True, False, True]
    """
    held = []
    left = budget
    for size in nbytes:
        held.append(size > left)
        left -= 0 if size > left else size
    return held
