"""How the tensors of some parameters' states lie side by side in a range of bytes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch

from spillway.optim.traffic import is_dense
from spillway.runtime.bytes import Bytes, over

State = dict[Hashable, Any]
"""A parameter's state: tensors, numbers, and a :class:`Place` for each tensor that is elsewhere."""

_LINE = 64
"""Every tensor begins at a multiple of this many bytes."""


class Place(NamedTuple):
    """Where a tensor lies."""

    part: int
    """Whose state it is of: a number among those that share the bytes."""
    name: Hashable
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    """Its first byte."""

    @property
    def nbytes(self) -> int:
        """How many it has."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Bytes) -> torch.Tensor:
        """The tensor, in memory that is laid out so."""
        start = (memory.start + self.start) // self.dtype.itemsize
        return over(memory.storage, self.dtype, start, self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Layout:
    """All places of some bytes."""

    places: tuple[Place, ...] = ()
    nbytes: int = 0

    @classmethod
    def of(cls, states: Sequence[Mapping[Hashable, Any]]) -> Layout:
        """Room for every tensor of these states that moves, in their order.

        Example:
            >>> Layout.of([{"step": torch.tensor(1.0), "sum": torch.zeros(2, 3)}, {"sum": torch.zeros(4)}]).nbytes
            80
        """
        places: list[Place] = []
        end = 0
        for part, state in enumerate(states):
            for name, value in state.items():
                if moves(value):
                    start = -(-end // _LINE) * _LINE
                    strides = value.stride() if is_dense(value) else value.new_empty(value.shape).stride()
                    places.append(Place(part, name, value.dtype, tuple(value.shape), tuple(strides), start))
                    end = start + places[-1].nbytes
        return cls(tuple(places), end)


def moves(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value of a state lies elsewhere between steps. Numbers do not, nor tensors without elements."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() > 0
