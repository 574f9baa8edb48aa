"""What cannot be meant, said at once: arguments, losses, weights."""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spillway.accumulate.states import Weight
from spillway.errors import UsageError

_SCALER = ("scale", "unscale_", "step", "update", "is_enabled", "get_scale")


def check_arguments(
    model: object, optimizer: object, steps: object, max_norm: Any, scaler: object, scheduler: object, dtype: object
) -> None:
    """Raise :class:`~spillway.errors.UsageError` for arguments of an accumulator that cannot be meant."""
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer: got {optimizer!r:.200}, expected a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("optimizer: got LBFGS, whose step computes losses anew, expected one that takes gradients")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(
            f"steps: got {steps!r}, expected a whole number from 1 on: how many micro-batches a window has"
        )
    if max_norm is not None and not (_is_number(max_norm) and max_norm > 0):
        raise UsageError(f"max_norm: got {max_norm!r}, expected a number above 0, math.inf to measure only, or None")
    if scaler is not None and not all(hasattr(scaler, name) for name in _SCALER):
        raise UsageError(f"scaler: got {scaler!r:.200}, expected a torch.amp.GradScaler or None")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "scheduler: got a ReduceLROnPlateau, whose step wants a metric that a window does not have, expected one "
            "without; leave it out here, and call it where you know the metric"
        )
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise UsageError(f"scheduler: got {scheduler!r:.200}, expected one of torch.optim.lr_scheduler, or None")
    if dtype not in (None, torch.float32):
        raise UsageError(f"grad_dtype: got {dtype!r}, expected torch.float32, or None for each parameter's own type")


def check_loss(loss: object) -> None:
    """Raise :class:`~spillway.errors.UsageError` for what has no backward of its own."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)[:200]
        raise UsageError(f"loss: got {got}, expected a tensor of one element")
    if not loss.requires_grad:
        raise UsageError(
            "loss: got one that hangs on no parameter, expected one that does; of a micro-batch without tokens take "
            "the model's output times 0, so that all ranks have a backward"
        )


def checked_weight(weight: Any) -> Weight:
    """A weight as it is added up: a number where the host has it, else the tensor as it is, which nobody waits for.

    Raises:
        UsageError: for what is no number, and for a number that no weight can be.
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
        raise UsageError(f"weight: got {weight!r}, expected a number from 0 on: of how much the loss is a sum")
    return float(weight)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
