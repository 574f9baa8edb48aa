"""Gradients of bfloat16 and float16 parameters, added up in float32.

Six hundred ones added up in bfloat16 are 256: from there on, one more is less than half of what the last digit counts.

NOTE [ Where the sum is ]

Between two backwards it is ``parameter.grad``, in float32, which torch allows while ``parameter.grad_dtype`` says so.
Then autograd itself adds up in float32, and whatever looks at gradients finds them where they always are.

A backward that reduces over ranks is another matter: DDP's buckets and FSDP2's shards have the parameter's own type.
For as long as it runs, ``grad_dtype`` is the parameter's own, and

* under DDP, if there is something in the sum that was not reduced yet, the sum goes into ``grad`` in the parameter's
  own type, to be reduced with the micro-batch's: rounded once, as DDP rounds it anyway. So it reaches the other ranks
  even where the parameter is not used in this micro-batch.
* else the sum is put aside, and the micro-batch's gradient is added to it afterwards.

No hook is set on any parameter.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

HALF = (torch.bfloat16, torch.float16)


class Home(enum.Enum):
    """Who puts a parameter's gradient into ``grad``."""

    AUTOGRAD = "autograd"
    """Autograd, in every backward."""
    DDP = "ddp"
    """Autograd, and then DDP in those that reduce."""
    FSDP = "fsdp"
    """FSDP2, in those that reduce. What the others leave, FSDP2 keeps to itself."""


class Float32Sums:
    """Sums of a window's gradients. See NOTE [ Where the sum is ].

    Args:
        parameters: those of a narrower type, each with who puts its gradient there.
    """

    def __init__(self, parameters: Iterable[tuple[Parameter, Home]]) -> None:
        self._parameters = [(parameter, home) for parameter, home in parameters if parameter.dtype in HALF]
        self._aside: dict[int, Tensor] = {}
        self._unreduced = False

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Whose gradients these are."""
        return [parameter for parameter, _ in self._parameters]

    def before_backward(self, *, reduces: bool) -> None:
        """Make gradients ready to be added to."""
        for parameter, home in self._parameters:
            if home is Home.AUTOGRAD or (home is Home.DDP and not reduces):
                if parameter.grad_dtype != torch.float32:
                    _give(parameter, parameter.grad, torch.float32)
            elif reduces:
                total = parameter.grad
                folds = home is Home.DDP and self._unreduced
                if total is not None and not folds:
                    self._aside[id(parameter)] = total
                _give(parameter, total if folds else None, parameter.dtype)
        self._unreduced = not reduces

    def after_backward(self, *, reduces: bool) -> None:
        """Bring the sums back to where they are looked for."""
        for parameter, home in self._parameters if reduces else ():
            if home is not Home.AUTOGRAD:
                total, gradient = self._aside.pop(id(parameter), None), parameter.grad
                if total is not None and gradient is not None:
                    gradient = total.add_(gradient)
                _give(parameter, total if gradient is None else gradient, torch.float32)

    def narrow(self) -> None:
        """Give every gradient its parameter's own type again: what optimizers take."""
        narrow(self.parameters)
        self._aside.clear()
        self._unreduced = False


def narrow(parameters: Iterable[Parameter]) -> None:
    """Gradients, and what may be one, in each parameter's own type."""
    for parameter in parameters:
        if parameter.grad_dtype != parameter.dtype:
            _give(parameter, parameter.grad, parameter.dtype)


@torch.no_grad()
def _give(parameter: Parameter, gradient: Tensor | None, dtype: torch.dtype) -> None:
    # In this order: torch lets neither of the two contradict the other.
    parameter.grad = None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
