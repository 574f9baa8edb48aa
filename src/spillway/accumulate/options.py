"""Checks of what a user passes to an accumulator: arguments, losses, weights."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spillway.errors import UsageError

Weight = float | Tensor
"""Tokens or samples of a micro-batch. A tensor has one element and stays on its device."""

WEIGHTED = ("tokens", "samples")
"""Values of ``normalize`` for which each micro-batch has a weight."""

_OPTIONS = {
    "normalize": (*WEIGHTED, "steps", "sum"),
    "partial": ("scale", "drop", "carry"),
    "sync": ("last", "every"),
}
_SCALER = ("scale", "unscale_", "step", "update", "is_enabled", "get_scale")


def check_arguments(
    model: object,
    optimizer: object,
    steps: object,
    max_norm: Any,
    scaler: object,
    scheduler: object,
    grad_dtype: object,
    **options: object,
) -> None:
    """Raise :class:`~spillway.errors.UsageError` for invalid arguments of an accumulator."""
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer: got {optimizer!r:.200}, expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("optimizer: LBFGS recomputes the loss within its step; use an optimizer that takes gradients")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps: got {steps!r}, expected the number of micro-batches: an integer of at least 1")
    if max_norm is not None and not (_is_number(max_norm) and max_norm > 0):
        raise UsageError(f"max_norm: got {max_norm!r}, expected a number above 0, math.inf to only measure, or None")
    if scaler is not None and not all(hasattr(scaler, name) for name in _SCALER):
        raise UsageError(f"scaler: got {scaler!r:.200}, expected a torch.amp.GradScaler or None")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "scheduler: a ReduceLROnPlateau steps with a metric, which the accumulator does not have; leave it out "
            "and step it yourself"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"scheduler: got {scheduler!r:.200}, expected one of torch.optim.lr_scheduler, or None")
    if grad_dtype not in (None, torch.float32):
        raise UsageError(f"grad_dtype: got {grad_dtype!r}, expected torch.float32, or None for each parameter's own")
    for name, value in options.items():
        if value not in _OPTIONS[name]:
            raise UsageError(f"{name}: got {value!r}, expected {' or '.join(map(repr, _OPTIONS[name]))}")


def check_loss(loss: object) -> None:
    """Raise :class:`~spillway.errors.UsageError` for a loss without a backward."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:200]
        raise UsageError(f"loss: got {got}, expected a tensor of one element")
    if not loss.requires_grad:
        raise UsageError(
            "loss: this one depends on no parameter, so it has no backward; for a micro-batch without tokens multiply "
            "the model's output by 0, so that every rank has a backward"
        )


def checked_weight(weight: Any) -> Weight:
    """A weight as a number; a tensor on an accelerator is returned unread, since reading it would stall.

    Raises:
        UsageError: if it is no number, or negative, infinite or not a number.
    """
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise UsageError(
                f"weight: got a tensor of shape {tuple(weight.shape)} and {weight.dtype}, expected a number"
            )
        if weight.device.type != "cpu":
            return weight
        weight = weight.item()
    if not _is_number(weight) or not 0 <= weight < math.inf:
        raise UsageError(f"weight: got {weight!r}, expected the tokens or samples of the loss: a number of at least 0")
    return float(weight)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
