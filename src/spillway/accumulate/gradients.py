"""The gradients of a window: normalised, clipped, and nothing else.

NOTE [ How gradients are multiplied ]

Gradients are touched in place, one at a time, by ``mul_``, as a plainly written loop does it: a subclass of tensors
whose bytes are elsewhere can follow, and storages are nobody's business here.

A factor that lies on a device has no dimensions, and torch would round it to the gradient's own type before it
multiplies: to three digits, for bfloat16. So a plain gradient is multiplied by a float32 tensor of as many dimensions
as its own, each of one element: that multiplies in float32, and rounds once. The bits are those of ``mul_`` with a
number of Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from spillway.accumulate.states import Weight
from spillway.accumulate.totals import whole

_DOUBLE = {torch.float64, torch.complex128}


class Factors:
    """What gradients are multiplied by: ``divisor / total``, for each divisor that a parameter has.

    Args:
        total: what a window weighs; a window that weighs nothing has gradients of nothing, and they stay 0.
        divisor: by parameter, what its wrapper has divided its gradient by.
    """

    def __init__(self, total: Weight, divisor: Callable[[Parameter], float]) -> None:
        self._total = total
        self._divisor = divisor
        self._made: dict[tuple[object, ...], Any] = {}

    def are_one(self, parameters: Iterable[Parameter]) -> bool:
        """Whether it is known, without asking a device, that nothing would change."""
        return not isinstance(self._total, Tensor) and all(self._divisor(each) == self._total for each in parameters)

    @torch.no_grad()
    def apply(self, parameters: Iterable[Parameter]) -> None:
        """Multiply the gradients in place. See NOTE [ How gradients are multiplied ]."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            divisor = self._divisor(parameter)
            gradient = _part(gradient)
            if isinstance(self._total, Tensor):
                factor = self._on_device(divisor, self._total, gradient)
                # Of other classes than torch's own it is not known what they make of dimensions.
                plain = type(gradient) in (Tensor, Parameter)
                gradient.mul_(factor.reshape((1,) * gradient.dim()) if plain else factor)
            else:
                gradient.mul_(divisor / self._total if self._total else 0.0)

    def _on_device(self, divisor: float, total: Tensor, gradient: Tensor) -> Tensor:
        dtype = torch.float64 if gradient.dtype in _DOUBLE else torch.float32
        exact: Tensor | None = self._made.get((divisor,))
        if exact is None:
            exact = self._made[divisor,] = (divisor / total).masked_fill(total == 0, 0)
        key = divisor, gradient.device, dtype
        if key not in self._made:
            self._made[key] = exact.to(dtype).to(gradient.device, non_blocking=gradient.device.type != "cpu")
        factor: Tensor = self._made[key]
        return factor


def _part(gradient: Tensor) -> Tensor:
    """What is multiplied for it: this rank's part, or the values that are not zero. Both are the gradient's own."""
    if hasattr(gradient, "to_local"):
        local: Tensor = gradient.to_local()
        return local
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


def clip(parameters: Sequence[Parameter], max_norm: float) -> Tensor:
    """Clip all gradients by their common norm, as ``torch.nn.utils.clip_grad_norm_`` does.

    Gradients on several meshes, which torch does not clip together, have their norms put together.

    Returns:
        The norm before, the same on every rank that has a part in it.
    """
    meshes: dict[object, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    if len(meshes) <= 1:
        return whole(clip_grad_norm_(list(parameters), max_norm))
    norms = [whole(get_total_norm([each.grad for each in some if each.grad is not None])) for some in meshes.values()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    parts: Any = [_Part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    clip_grads_with_norm_(parts, max_norm, norm)
    return norm


class _Part:
    """Stands for a parameter, with what is multiplied of its gradient."""

    def __init__(self, gradient: Tensor) -> None:
        self.grad = _part(gradient)
