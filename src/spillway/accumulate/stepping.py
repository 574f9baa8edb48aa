"""From a window's added-up gradients to the optimizer's step.

NOTE [ The order of operations ]

Of every window, in this order, and nothing else:

1. for each micro-batch ``loss.backward()``, of the loss as it was given; with ``"steps"``, of ``loss / steps``; with a
   ``GradScaler``, of that times its scale. Weights are added up.
2. in the last backward, weights are summed over ranks, and gradients by the wrapper (DDP, FSDP2), which averages.
3. ``scaler.unscale_(optimizer)``
4. each gradient ``mul_(divisor / total)``: *total* is what the window weighs over all ranks, *divisor* what the wrapper
   has divided by: its ranks. With ``"steps"``, total is the micro-batches of all ranks, and divisor is multiplied by
   the steps that each loss was divided by. With ``"sum"``, total is 1. Where the two are known to be equal without
   asking a device, nothing is multiplied.
5. ``clip_grad_norm_``
6. gradients that were summed in float32 get their parameter's own type
7. ``scaler.step(optimizer)`` and ``scaler.update()``, or ``optimizer.step()``
8. ``scheduler.step()``, if the optimizer has stepped
9. ``optimizer.zero_grad()``

Gradients are normalised at the end, so that a window whose counts are known last has the bits of one whose counts are
known first. ``"steps"`` divides first, since that is the loop that everybody writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from spillway.accumulate.gradients import Factors, clip
from spillway.accumulate.options import Normalize
from spillway.accumulate.record import DeviceNumber, WindowStep
from spillway.accumulate.states import Weight
from spillway.accumulate.totals import WindowTotals
from spillway.accumulate.widening import Float32Sums
from spillway.accumulate.wrappers import Wrappers


class Stepper:
    """Steps an optimizer with what windows have added up. See NOTE [ The order of operations ].

    Args:
        optimizer: the optimizer.
        wrappers: who averages gradients over ranks.
        sums: gradients that are summed in float32, if any are.
        steps: micro-batches of a full window.
        normalize: what gradients are divided by.
        max_norm: their greatest norm; ``None``: any.
        scaler: of losses; ``None``: none, or one that is switched off.
        scheduler: of learning rates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        wrappers: Wrappers,
        sums: Float32Sums | None,
        *,
        steps: int,
        normalize: Normalize,
        max_norm: float | None,
        scaler: Any,
        scheduler: Any,
    ) -> None:
        self._optimizer = optimizer
        self._wrappers = wrappers
        self._sums = sums
        self._steps = steps
        self._normalize = normalize
        self._max_norm = max_norm
        self._scaler = scaler
        self._scheduler = scheduler
        self._unscaled = False

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss whose backward is run."""
        if self._normalize is Normalize.STEPS:
            loss = loss / self._steps
        scaled: Tensor = loss if self._scaler is None else self._scaler.scale(loss)
        return scaled

    def step(self, parameters: Sequence[Parameter], totals: WindowTotals, *, index: int, count: int) -> WindowStep:
        """Normalise, clip, and step.

        Args:
            parameters: the optimizer's, in the order in which they are clipped.
            totals: what the window adds up to.
            index: its number.
            count: its micro-batches on this rank.

        Returns:
            What was done.
        """
        factors = self._factors(totals.weight, count)
        multiplies = not factors.are_one(parameters)
        if self._scaler is not None:
            self._unscaled = True
            if multiplies or self._max_norm is not None or self._sums is not None:
                self._scaler.unscale_(self._optimizer)
        if multiplies:
            factors.apply(parameters)
        norm = None if self._max_norm is None else DeviceNumber(clip(parameters, self._max_norm))
        if self._sums is not None:
            self._sums.narrow()
        # Before the scheduler changes them.
        rates = tuple(_rate(group.get("lr", math.nan)) for group in self._optimizer.param_groups)
        skipped = self._step_optimizer()
        if self._scheduler is not None and not skipped:
            self._scheduler.step()
        return WindowStep(
            index=index,
            loss=DeviceNumber(totals.loss / self._divisor_of_loss(totals)),
            weight=DeviceNumber(totals.weight),
            gradient_norm=norm,
            learning_rates=rates,
            skipped=skipped,
            micro_batches=count,
        )

    def discard(self) -> None:
        """After a step that failed: be ready for the next."""
        if self._unscaled:
            # The scaler remembers to have unscaled, until it is updated. To the scale that it has, nothing changes.
            self._scaler.update(self._scaler.get_scale())
            self._unscaled = False

    def _factors(self, weight: Weight, count: int) -> Factors:
        divisors = self._wrappers.divisors()
        total: Weight = 1.0
        divided = 1
        if self._normalize.weighs:
            total = weight
        elif self._normalize is Normalize.STEPS:
            total = float(self._wrappers.ranks * count)
            divided = self._steps
        return Factors(total, lambda parameter: divisors.get(id(parameter), 1.0) * divided)

    def _divisor_of_loss(self, totals: WindowTotals) -> Weight:
        if self._normalize.weighs:
            return totals.weight
        return totals.micro_batches if self._normalize is Normalize.STEPS else 1.0

    def _step_optimizer(self) -> DeviceNumber:
        """Step, if the scaler lets it.

        Returns:
            Whether it was skipped.
        """
        if self._scaler is None:
            self._optimizer.step()
            return DeviceNumber(False)
        found: list[Tensor | None] = []
        # Called if the optimizer steps. One that looks for infinities itself does so always, and is told of them.
        hook = self._optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: found.append(getattr(optimizer, "found_inf", None))
        )
        try:
            self._scaler.step(self._optimizer)
        finally:
            hook.remove()
        self._scaler.update()
        self._unscaled = False
        if not found:
            return DeviceNumber(True)
        return DeviceNumber(False if found[0] is None else found[0] != 0)


def _rate(rate: float | Tensor) -> float | DeviceNumber:
    if not isinstance(rate, Tensor):
        return float(rate)
    # The scheduler writes into it.
    return float(rate) if rate.device.type == "cpu" else DeviceNumber(rate.detach().clone())
