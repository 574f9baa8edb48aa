"""From the losses of an accumulation step to the optimizer's step.

NOTE [ The order of operations ]

Each accumulation step runs these operations, in this order, and no others:

1. For each micro-batch ``loss.backward()``, with ``"steps"`` of the loss divided by ``steps``. Weights are summed.
2. In the last backward, weights are summed over ranks, and DDP or FSDP2 averages gradients over ranks.
3. ``scaler.unscale_(optimizer)``.
4. ``mul_(divisor / total)`` for each gradient, unless the CPU knows that the two are equal. *total* is the weight of
   all micro-batches on all ranks. *divisor* is what DDP or FSDP2 has divided by: its ranks. With ``"steps"``, total is
   the number of micro-batches on all ranks, and divisor also has the factor ``steps``. With ``"sum"``, total is 1.
5. ``clip_grad_norm_``.
6. Gradients that were summed in float32 are cast to their parameter's dtype.
7. ``scaler.step(optimizer)`` and ``scaler.update()``, or ``optimizer.step()``.
8. ``scheduler.step()``, if the optimizer has stepped, and ``optimizer.zero_grad()``.

Gradients are normalised at the end, so weights that are known last and weights that are known first give the same bits.
``"steps"`` divides first, like the usual training loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from spillway.accumulate.gradients import Factors, Float32Sums, Weight, clip, whole
from spillway.accumulate.wrappers import Wrappers


class DeviceNumber:
    """A number that may still be computed on a device. Reading it waits for the device, once.

    ``float(number)``, ``number.item()``, ``bool(number)`` and ``f"{number:.3f}"`` read it; ``number.tensor`` does not.

    Args:
        value: a number, or a tensor of one element that is no longer written.

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
        """The number as a tensor without dimensions, on its device. Does not wait."""
        if self._tensor is None:
            return torch.tensor(self._value, dtype=torch.float64)
        return self._tensor.reshape(())

    def item(self) -> float:
        """The number. The first call waits for the device."""
        if self._value is None:
            self._value = float(self.tensor.item())
        return self._value

    __float__ = item

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"DeviceNumber({'<not read>' if self._value is None else self._value})"


@dataclass(frozen=True, slots=True)
class AccumulationStep:
    """Results of one accumulation step. Numbers are :class:`DeviceNumber`, read on demand."""

    index: int
    """Number of the accumulation step, from 0. Skipped ones count, dropped ones do not."""
    loss: DeviceNumber
    """Loss over all ranks, normalised like the gradients and without the factor of a ``GradScaler``. Not a number if
    the total weight is 0."""
    weight: DeviceNumber
    """Tokens or samples over all ranks: the divisor of the gradients. With ``"steps"`` and ``"sum"``: the sum of the
    given weights, or the number of micro-batches of all ranks without weights."""
    gradient_norm: DeviceNumber | None
    """Norm of all normalised gradients, before clipping; ``None`` without ``max_norm``."""
    learning_rates: tuple[float | DeviceNumber, ...]
    """Learning rate of each parameter group in this step. If the optimizer keeps one on a device, it stays there."""
    skipped: DeviceNumber
    """Whether the ``GradScaler`` found gradients that are not finite. Then only its scale was changed."""
    micro_batches: int
    """Number of micro-batches on this rank."""


class Totals:
    """Sums of weights and losses over an accumulation step, and then over process groups, without a stall.

    Weights that are numbers are added on the CPU. Tensors stay on their device. Sums are float64, so counts are exact.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.weight: Weight = 0.0
        """Sum of the weights, once :meth:`finish` was called."""
        self.count = 0
        """Micro-batches of this rank."""
        self.micro_batches: Weight = 0.0
        """Those of all ranks, once :meth:`finish` was called."""
        self.loss: Any = None
        """Sum of the losses; ``None`` without micro-batches."""
        self._groups = groups
        self._on_device: Tensor | None = None
        self._reduced: Tensor | None = None
        self._work: Any = None

    def add(self, loss: Tensor, weight: Weight) -> None:
        self.count += 1
        if isinstance(weight, Tensor):
            weight = _wide(weight)
            # An invalid weight makes the gradients not a number: a check here would stall.
            weight = torch.where(weight >= 0, weight, torch.nan)
            self._on_device = weight if self._on_device is None else self._on_device + _moved(weight, self._on_device)
        else:
            self.weight += weight
        loss = _wide(loss)
        self.loss = loss if self.loss is None else self.loss + _moved(loss, self.loss)

    def reduce(self) -> None:
        """Start to sum over ranks: one collective of three numbers, which overlaps the last backward."""
        if not self._groups or self.loss is None:
            return
        count = torch.full_like(self.loss, float(self.count))
        self._reduced = torch.stack([self._weight_on(self.loss), self.loss, count])
        for group in self._groups:
            self._wait()
            self._work = torch.distributed.all_reduce(self._reduced, group=group, async_op=True)

    def finish(self) -> None:
        """Complete the sums. Later kernels wait for them; the CPU stalls only with gloo."""
        if self._groups and self._reduced is None:
            self.reduce()
        self._wait()
        self.micro_batches = float(self.count)
        if self._reduced is not None:
            self.weight, self.loss, self.micro_batches = self._reduced.unbind()
        elif self._on_device is not None:
            self.weight, self._on_device = self._weight_on(self.loss), None

    def _weight_on(self, like: Tensor) -> Tensor:
        # Filled by a kernel, since a copy from unpinned CPU memory would stall.
        known = torch.full_like(like, float(self.weight))
        return known if self._on_device is None else known + _moved(self._on_device, like)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


@dataclass
class Stepper:
    """Steps an optimizer, with the arguments of an accumulator. See NOTE [ The order of operations ]."""

    optimizer: Optimizer
    wrappers: Wrappers
    sums: Float32Sums
    steps: int
    normalize: str
    max_norm: float | None
    scaler: Any
    """Enabled, or ``None``."""
    scheduler: Any
    _unscaled: bool = False
    _normalized: set[Parameter] = field(default_factory=set)
    """Parameters whose gradients were normalised during backward."""

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to run backward from."""
        if self.normalize == "steps":
            loss = loss / self.steps
        scaled: Tensor = loss if self.scaler is None else self.scaler.scale(loss)
        return scaled

    def normalize_each(self, parameters: Sequence[Parameter], totals: Totals) -> Callable[[Parameter], None]:
        """A function that normalises a gradient when it is complete; :meth:`step` does not do it again."""
        totals.finish()
        factors = self._factors(totals)
        multiplies = not factors.are_one(parameters)

        def normalize(parameter: Parameter) -> None:
            self._normalized.add(parameter)
            if multiplies and parameter.grad is not None:
                # Not in place: autograd may have taken over a gradient that the rest of backward reads.
                parameter.grad = parameter.grad.clone()
                factors.apply([parameter])

        return normalize

    def step(self, parameters: Sequence[Parameter], totals: Totals, index: int) -> AccumulationStep:
        """Normalise, clip and step. Parameters are clipped in this order."""
        totals.finish()
        factors = self._factors(totals)
        left = [parameter for parameter in parameters if parameter not in self._normalized]
        multiplies = not factors.are_one(left)
        self._normalized.clear()
        if self.scaler is not None:
            self._unscaled = True
            if multiplies or self.max_norm is not None or self.sums.parameters:
                self.scaler.unscale_(self.optimizer)
        if multiplies:
            factors.apply(left)
        norm = None if self.max_norm is None else DeviceNumber(clip(parameters, self.max_norm))
        self.sums.narrow()
        # Read them before the scheduler changes them.
        rates = tuple(_rate(group.get("lr", math.nan)) for group in self.optimizer.param_groups)
        skipped = self._step_optimizer()
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        divisors = {"steps": totals.micro_batches, "sum": 1.0}
        return AccumulationStep(
            index=index,
            loss=DeviceNumber(totals.loss / divisors.get(self.normalize, totals.weight)),
            weight=DeviceNumber(totals.weight),
            gradient_norm=norm,
            learning_rates=rates,
            skipped=skipped,
            micro_batches=totals.count,
        )

    def discard(self) -> None:
        """Prepare for the next accumulation step after one that failed."""
        self._normalized.clear()
        if self._unscaled:
            # The scaler refuses to unscale twice between updates. This update keeps its scale.
            self.scaler.update(self.scaler.get_scale())
            self._unscaled = False

    def _factors(self, totals: Totals) -> Factors:
        divisors = self.wrappers.divisors()
        known = {"steps": float(self.wrappers.ranks * totals.count), "sum": 1.0}
        factor = self.steps if self.normalize == "steps" else 1
        total = known.get(self.normalize, totals.weight)
        return Factors(total, lambda parameter: divisors.get(id(parameter), 1.0) * factor)

    def _step_optimizer(self) -> DeviceNumber:
        """Step, unless the scaler prevents it. Returns whether the step was skipped."""
        if self.scaler is None:
            self.optimizer.step()
            return DeviceNumber(False)
        found: list[Tensor | None] = []
        # The hook runs if the optimizer steps. A fused one always does, and reads found_inf itself.
        hook = self.optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: found.append(getattr(optimizer, "found_inf", None))
        )
        try:
            self.scaler.step(self.optimizer)
        finally:
            hook.remove()
        self.scaler.update()
        self._unscaled = False
        if not found:
            return DeviceNumber(True)
        return DeviceNumber(False if found[0] is None else found[0] != 0)


def _rate(rate: float | Tensor) -> float | DeviceNumber:
    if not isinstance(rate, Tensor):
        return float(rate)
    # The scheduler writes into this tensor.
    return float(rate) if rate.device.type == "cpu" else DeviceNumber(rate.detach().clone())


def _wide(number: Tensor) -> Tensor:
    """A detached copy without dimensions, in the widest floating type of the device."""
    number = whole(number.detach()).reshape(())
    return number.to(torch.float32 if number.device.type == "mps" else torch.float64, copy=True)


def _moved(number: Tensor, like: Tensor) -> Tensor:
    return number.to(like.device, non_blocking=True)
