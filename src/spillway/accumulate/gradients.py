"""Gradients of an accumulation step: normalised, clipped, and summed in float32.

NOTE [ How gradients are multiplied ]

Gradients are multiplied in place, one at a time, by ``mul_``, as in a plain training loop. So tensor subclasses whose
bytes are elsewhere can follow.

Torch rounds a factor without dimensions to the gradient's dtype before it multiplies: bfloat16 keeps three digits. So a
plain gradient is multiplied by a float32 tensor of one element that has as many dimensions. That multiplies in float32
and rounds once. The bits equal those of ``mul_`` with a Python number.

NOTE [ Location of the float32 sum ]

Six hundred ones summed in bfloat16 are 256: from there on, adding 1 is less than half of the last digit. So gradients
of bfloat16 and float16 parameters can be summed in float32. Between two backwards the sum is ``parameter.grad``. Torch
allows its dtype while ``parameter.grad_dtype`` is float32, and autograd adds to it. No hook is set on any parameter.

DDP's buckets and FSDP2's shards have the parameter's dtype. So during a backward that reduces over ranks,
``grad_dtype`` is the parameter's own, and the sum goes one of two ways:

* DDP, with an unreduced part in the sum: the sum is cast to the parameter's dtype, and DDP reduces it together with the
  gradient of this micro-batch. It is rounded once, as DDP rounds it anyway. So it reaches the other ranks even if this
  micro-batch does not use the parameter.
* Otherwise the sum is set aside, and the gradient of this micro-batch is added to it afterwards.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from spillway._torch import sparse_values
from spillway.errors import UsageError
from spillway.units import is_number

Weight = float | Tensor
"""Tokens or samples of a micro-batch. A tensor has one element and stays on its device."""

WEIGHTED = ("tokens", "samples")
"""Values of ``normalize`` for which each micro-batch has a weight."""

HALF = (torch.bfloat16, torch.float16)
_DOUBLE = {torch.float64, torch.complex128}


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
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise UsageError(f"weight: got {weight!r}, expected the tokens or samples of the loss: a number of at least 0")
    return float(weight)


class Factors:
    """The numbers that gradients are multiplied by: ``divisor / total``.

    ``divisor`` gives the number that DDP or FSDP2 has divided a gradient by. With a ``total`` of 0, gradients are 0.
    """

    def __init__(self, total: Weight, divisor: Callable[[Parameter], float]) -> None:
        self._total = total
        self._divisor = divisor
        self._made: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}

    def are_one(self, parameters: Iterable[Parameter]) -> bool:
        """Whether all factors are 1, as far as the CPU knows without a stall."""
        return not isinstance(self._total, Tensor) and all(self._divisor(each) == self._total for each in parameters)

    @torch.no_grad()
    def apply(self, parameters: Iterable[Parameter]) -> None:
        """Multiply the gradients in place. See NOTE [ How gradients are multiplied ]."""
        for parameter in parameters:
            if parameter.grad is None:
                continue
            divisor = self._divisor(parameter)
            gradient = _own_part(parameter.grad)
            if isinstance(self._total, Tensor):
                factor = self._on_device(divisor, self._total, gradient)
                # Other tensor classes may treat the extra dimensions differently.
                plain = type(gradient) in (Tensor, Parameter)
                gradient.mul_(factor.reshape((1,) * gradient.dim()) if plain else factor)
            else:
                gradient.mul_(divisor / self._total if self._total else 0.0)

    def _on_device(self, divisor: float, total: Tensor, gradient: Tensor) -> Tensor:
        dtype = torch.float64 if gradient.dtype in _DOUBLE else torch.float32
        key = divisor, gradient.device, dtype
        if key not in self._made:
            exact = (divisor / total).masked_fill(total == 0, 0).to(dtype)
            self._made[key] = exact.to(gradient.device, non_blocking=gradient.device.type != "cpu")
        return self._made[key]


def clip(parameters: Sequence[Parameter], max_norm: float) -> Tensor:
    """Clip all gradients by their total norm, which is returned, like ``clip_grad_norm_``, also over several meshes."""
    meshes: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    if len(meshes) <= 1:
        return whole(clip_grad_norm_(list(parameters), max_norm))
    norms = [whole(get_total_norm(gradients)) for gradients in meshes.values()]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))
    # torch takes anything with a grad; here it is this rank's part.
    parts: Any = [SimpleNamespace(grad=_own_part(each)) for gradients in meshes.values() for each in gradients]
    clip_grads_with_norm_(parts, max_norm, norm)
    return norm


def _own_part(gradient: Tensor) -> Tensor:
    """This rank's part of a sharded gradient, or the values of a sparse one, sharing its memory."""
    if hasattr(gradient, "to_local"):
        local: Tensor = gradient.to_local()
        return local
    return sparse_values(gradient) if gradient.layout is torch.sparse_coo else gradient


def whole(tensor: Tensor) -> Tensor:
    """The tensor, or the full tensor of a ``DTensor``: a collective if it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


class Writer(enum.Enum):
    """Who writes a parameter's ``grad``."""

    AUTOGRAD = "autograd"
    DDP = "ddp"
    """Autograd, and DDP in a backward that reduces."""
    FSDP = "fsdp"
    """FSDP2 in a backward that reduces. Otherwise FSDP2 holds the gradient itself."""


class Float32Sums:
    """Sums of bfloat16 and float16 gradients in float32. See NOTE [ Location of the float32 sum ]."""

    def __init__(self, parameters: Iterable[tuple[Parameter, Writer]]) -> None:
        self._parameters = [(parameter, writer) for parameter, writer in parameters if parameter.dtype in HALF]
        self.parameters = [parameter for parameter, _ in self._parameters]
        self._aside: dict[int, Tensor] = {}
        self._unreduced = False

    def before_backward(self, *, reduces: bool) -> None:
        for parameter, writer in self._parameters:
            if writer is Writer.AUTOGRAD or (writer is Writer.DDP and not reduces):
                if parameter.grad_dtype != torch.float32:
                    _set_gradient(parameter, parameter.grad, torch.float32)
            elif reduces:
                total = parameter.grad
                joins = writer is Writer.DDP and self._unreduced
                if total is not None and not joins:
                    self._aside[id(parameter)] = total
                _set_gradient(parameter, total if joins else None, parameter.dtype)
        self._unreduced = not reduces

    def after_backward(self, *, reduces: bool) -> None:
        """Make ``grad`` the float32 sum again."""
        for parameter, writer in self._parameters if reduces else ():
            if writer is not Writer.AUTOGRAD:
                total, gradient = self._aside.pop(id(parameter), None), parameter.grad
                if total is not None and gradient is not None:
                    gradient = total.add_(gradient)
                _set_gradient(parameter, total if gradient is None else gradient, torch.float32)

    def narrow(self) -> None:
        """Cast every gradient to its parameter's dtype, as optimizers expect it."""
        narrow(self.parameters)
        self._aside.clear()
        self._unreduced = False


def narrow(parameters: Iterable[Parameter]) -> None:
    """Cast gradients, present and future, to each parameter's own dtype."""
    for parameter in parameters:
        if parameter.grad_dtype != parameter.dtype:
            _set_gradient(parameter, parameter.grad, parameter.dtype)


@torch.no_grad()
def _set_gradient(parameter: Parameter, gradient: Tensor | None, dtype: torch.dtype) -> None:
    # In this order: torch refuses a grad whose dtype differs from grad_dtype.
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
