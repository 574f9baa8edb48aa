"""What state an optimizer class will make for a parameter: seen on a tiny one, before anything is stepped."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.inner import Inner
from spillway.optim.kinds import on_host
from spillway.optim.layout import State

_SIZES = (3, 5, 7, 11, 13, 17)
"""Of the tiny parameter's dimensions: none is another's, so that what a state has of which of them can be told."""


class Forecast:
    """Tells states from shapes.

    A tensor of a state that has the parameter's shape, or some of its dimensions, is taken to do so for every
    parameter of as many dimensions. Whatever else it has is taken to be always the same.

    Args:
        optimizer_class: the class.
        given: what the user gave for it, as it is for the host.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: Mapping[str, Any]) -> None:
        self._inner = Inner(optimizer_class, given)
        self._seen: dict[Hashable, tuple[tuple[int, ...], State]] = {}

    def state(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, settings: Mapping[str, Any]
    ) -> State:
        """The state of a parameter after its first step, in tensors without memory.

        Args:
            shape: the parameter's.
            strides: the parameter's, and of what has its shape.
            dtype: that it is stepped in.
            settings: of its group.
        """
        sizes, seen = self._seen_of(len(shape), dtype, settings)
        found: State = {}
        for name, value in seen.items():
            found[name] = value
            if isinstance(value, torch.Tensor):
                if tuple(value.shape) == sizes:
                    found[name] = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
                else:
                    actual = [_actual(size, sizes, shape) for size in value.shape]
                    found[name] = torch.empty(actual, dtype=value.dtype, device="meta")
        return found

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, settings: Mapping[str, Any]) -> int:
        """Bytes of that state."""
        strides = torch.empty(shape, device="meta").stride()
        state = self.state(shape, strides, dtype, settings)
        return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

    def _seen_of(
        self, dimensions: int, dtype: torch.dtype, settings: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], State]:
        # A state depends on which settings there are, hardly on what they are: a learning rate changes all the time.
        switches = tuple(
            (name, bool(value)) for name, value in settings.items() if isinstance(value, (bool, int, float))
        )
        key = (dimensions, dtype, switches)
        if key not in self._seen:
            sizes = (*_SIZES[:dimensions], *(2 for _ in range(dimensions - len(_SIZES))))
            tiny = torch.nn.Parameter(torch.ones(sizes, dtype=dtype, device="cpu"), requires_grad=False)
            tiny.grad = torch.full(sizes, 1e-3, dtype=dtype, device="cpu")
            plain = on_host(dict(settings), fused=False)
            with torch.no_grad():
                (state,) = self._inner.step([tiny], [None], plain)
            self._seen[key] = (sizes, state)
        return self._seen[key]


def _actual(size: int, sizes: Sequence[int], shape: Sequence[int]) -> int:
    """A dimension of a state, where the tiny parameter's state has ``size``."""
    if size in sizes:
        return shape[sizes.index(size)]
    return math.prod(shape) if size == math.prod(sizes) and size > 1 else size
