"""The arguments of a region's call, apart from its tensors: these are saved, or sent away, until it runs again."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from spillway.regions.tensors import PLAIN, is_strided

_NUMBERS = frozenset((int, float, bool, str, torch.dtype, torch.device))


class Arguments:
    """The arguments of a call, which can be put together again with other tensors in them.

    Args:
        args: by place.
        kwargs: by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves: list[Any] = []
        self._count = len(args)
        self._names = tuple(kwargs)
        self._specs: list[tuple[int, TreeSpec] | None] = []
        """Of each argument that is no leaf itself, how many it has, and what it is made of them by."""
        for value in (*args, *kwargs.values()):
            if value is None or type(value) in PLAIN or type(value) in _NUMBERS:
                self._leaves.append(value)
                self._specs.append(None)
            else:
                leaves, spec = tree_flatten(value)
                self._leaves += leaves
                self._specs.append((len(leaves), spec))
        self._places = [place for place, leaf in enumerate(self._leaves) if _is_tensor(leaf)]
        self._numbers: list[int] = []
        """Of each tensor, which of those that are taken it is: one may be given several times."""

    def take(self) -> list[torch.Tensor]:
        """The tensors, each once, which are not held here any more."""
        taken: dict[int, torch.Tensor] = {}
        numbers: dict[int, int] = {}
        for place in self._places:
            tensor = self._leaves[place]
            self._leaves[place] = None
            taken[id(tensor)] = tensor
            self._numbers.append(numbers.setdefault(id(tensor), len(numbers)))
        return list(taken.values())

    def callables(self) -> list[Any]:
        """The functions and modules among them."""
        return [leaf for leaf in self._leaves if callable(leaf) and not isinstance(leaf, torch.Tensor)]

    def kinds(self, tensors: Sequence[torch.Tensor]) -> Hashable:
        """What tells calls apart that do other things: forms of tensors, and numbers. ``None``: it cannot be said."""
        if any(type(tensor) not in PLAIN or not is_strided(tensor) for tensor in tensors):
            return None
        forms = [
            (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad)
            for tensor in tensors
        ]
        others = [leaf if type(leaf) in _NUMBERS else type(leaf) for leaf in self._leaves if leaf is not None]
        devices = {"cpu", *(tensor.device.type for tensor in tensors)}
        cast = [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]
        return (tuple(forms), tuple(self._numbers), tuple(others), tuple(map(type, others)), tuple(cast))

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in them."""
        leaves = list(self._leaves)
        for place, number in zip(self._places, self._numbers, strict=True):
            leaves[place] = tensors[number]
        left = iter(leaves)
        values = [
            next(left) if each is None else tree_unflatten(list(islice(left, each[0])), each[1]) for each in self._specs
        ]
        return tuple(values[: self._count]), dict(zip(self._names, values[self._count :], strict=True))


def _is_tensor(leaf: Any) -> bool:
    # To ask whether something is a tensor is to ask a metaclass, in Python.
    return type(leaf) in PLAIN or (leaf is not None and type(leaf) not in _NUMBERS and isinstance(leaf, torch.Tensor))
