"""Gradients on the GPU that a step reads on another stream, beside what compute runs meanwhile."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spillway._torch import make_wrapper, set_local_part, tree_map_only, version_of
from spillway.errors import UsageError
from spillway.optim.gradient import DeviceContext
from spillway.optim.host_parameter import HostParameter
from spillway.optim.tensors import is_distributed, local_of


class GradientInUse(torch.Tensor):
    """Stands in ``p.grad`` for a gradient that a step reads.

    The first operator on it lets compute wait for the step. Code that writes to the gradient by another reference is
    found by the gradient's version.
    """

    gradient: Tensor
    _wait: Callable[[], object] | None
    _before: int

    @staticmethod
    def of(gradient: Tensor, wait: Callable[[], object]) -> GradientInUse:
        """Stands for a plain tensor. ``wait`` lets compute wait for the step."""
        made: GradientInUse = make_wrapper(
            GradientInUse, gradient.shape, dtype=gradient.dtype, device=gradient.device, strides=gradient.stride()
        )
        made.gradient, made._wait, made._before = gradient, wait, version_of(gradient)
        return made

    def plain(self) -> Tensor:
        """The gradient, after compute was made to wait."""
        self.check()
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return self.gradient

    def check(self) -> None:
        """Raise a ``UsageError`` if the gradient was written while the step read it."""
        if self._wait is not None and version_of(self.gradient) != self._before:
            self._wait = None
            raise UsageError(
                "A gradient was written between step() and the next forward of its block, by a reference to the tensor "
                "that p.grad was before step(). The step may have read either value. Write to p.grad itself, or call "
                "synchronize() before."
            )

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        standing: dict[int, GradientInUse] = {}

        def plain(one: GradientInUse) -> Tensor:
            standing[id(one.gradient)] = one
            return one.plain()

        # detach() and alias() wait, too: their results can be written.
        args, kwargs = tree_map_only(GradientInUse, plain, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda one: standing.get(id(one), one), function(*args, **kwargs))


class LentGradients:
    """The gradients that steps read, in the order in which they were lent. Each is held until compute has waited."""

    def __init__(self) -> None:
        self._read: dict[HostParameter, Tensor] = {}
        self._in_use: dict[HostParameter, GradientInUse] = {}
        self.nbytes: defaultdict[DeviceContext, int] = defaultdict(int)
        """Bytes of those on each GPU."""

    def __iter__(self) -> Iterator[HostParameter]:
        return iter(list(self._read))

    def get(self, held: HostParameter) -> Tensor | None:
        return self._read.get(held)

    def lend(self, held: HostParameter, gradient: Tensor) -> None:
        """Hold a gradient."""
        self.take_back(held)
        self._read[held] = gradient
        self.nbytes[held.context] += gradient.nbytes

    def lend_in_place(self, held: HostParameter, read: Tensor) -> None:
        """The same for a plain gradient that stays in ``p.grad``: its users wait for the step, which is queued."""
        assert held.parameter.grad is not None and held.updated is not None
        self.lend(held, read)
        wait = partial(held.context.transfers.wait, held.updated)
        self._in_use[held] = GradientInUse.of(local_of(held.parameter.grad), wait)
        put_gradient(held, self._in_use[held])

    def take_back(self, held: HostParameter) -> None:
        """Compute has waited for the step.

        Raises:
            UsageError: if the gradient was written before.
        """
        read, in_use = self._read.pop(held, None), self._in_use.pop(held, None)
        if read is not None:
            self.nbytes[held.context] -= read.nbytes
        if in_use is not None:
            gradient = held.parameter.grad
            if gradient is not None and local_of(gradient) is in_use:
                put_gradient(held, in_use.gradient)
            in_use.check()


def put_gradient(held: HostParameter, local: Tensor | None) -> None:
    """Set a parameter's gradient, or this process's part of it."""
    gradient = held.parameter.grad
    if local is not None and gradient is not None and is_distributed(gradient):
        set_local_part(gradient, local)
    else:
        held.parameter.grad = local
