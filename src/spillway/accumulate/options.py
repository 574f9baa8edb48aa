"""The arguments of an accumulator, and their checks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from spillway.accumulate.gradients import WEIGHTED
from spillway.errors import UsageError
from spillway.units import is_number

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
    if max_norm is not None and not (is_number(max_norm) and max_norm > 0):
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
    # They change all gradients after backward.
    for name, value in (("max_norm", max_norm), ("scaler", scaler), ("grad_dtype", grad_dtype)):
        if value is not None and steps_in_backward(optimizer):
            raise UsageError(
                f"{name}: got {value!r:.200}, but step_in_backward=True steps parameters before all gradients are "
                f"there; leave {name} or step_in_backward out"
            )


def steps_in_backward(optimizer: Optimizer) -> bool:
    """Whether it is an ``OffloadedOptimizer`` with ``step_in_backward=True``."""
    return getattr(optimizer, "steps_in_backward", False) is True
