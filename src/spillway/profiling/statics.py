"""What of the bytes that are there when a step begins can be told: a model's parameters, their gradients, state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import Module

from spillway.capture.identity import storage_parts
from spillway.planning.profile import Static


@dataclass(frozen=True, slots=True)
class Known:
    """Bytes on a device that were told apart."""

    weights: int
    gradients: int
    optimizer: int

    def within(self, static_bytes: int) -> Static | None:
        """All static bytes by what they are; ``None`` if more is known of than is there.

        That happens on the CPU, where static bytes are the resident ones: weights that a file maps need not be.
        """
        other = static_bytes - self.weights - self.gradients - self.optimizer
        return None if other < 0 else Static(self.weights, self.gradients, self.optimizer, other)


def known_bytes(model: Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None) -> Known:
    """What is known of a device's bytes, now. Each storage is counted once, and whole.

    Args:
        model: whose parameters are weights.
        device: where.
        optimizer: whose state is counted apart. ``None``: nobody told of one.
    """
    seen: set[int] = set()
    parameters = list(model.parameters())
    states = () if optimizer is None else optimizer.state.values()
    return Known(
        weights=_nbytes(parameters, device, seen),
        gradients=_nbytes((each.grad for each in parameters if each.grad is not None), device, seen),
        optimizer=_nbytes((value for state in states for value in _tensors(state)), device, seen),
    )


def _tensors(state: object) -> Iterator[torch.Tensor]:
    # Not by its own values(): an optimizer's state that lies elsewhere would come for that.
    values = dict.values(state) if isinstance(state, dict) else ()
    yield from (value for value in values if isinstance(value, torch.Tensor))


def _nbytes(tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int]) -> int:
    """Bytes of the plain tensors' storages that were not seen before. What is not plain is not told apart."""
    total = 0
    for tensor in tensors:
        for part in storage_parts(tensor):
            if part.device != device or part.layout is not torch.strided:
                continue
            if type(part) not in (torch.Tensor, torch.nn.Parameter):
                continue
            storage = part.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
    return total
