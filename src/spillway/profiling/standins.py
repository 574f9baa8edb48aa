"""Tensors on ``meta`` that stand for others: the same shapes over storages that are shared alike, and no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_map

from spillway.errors import UnsupportedError
from spillway.regions.tensors import is_strided
from spillway.runtime.bytes import over

OptimizerOf = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class StandIns:
    """Of each tensor, one that stands for it."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one that stands for a tensor: always the same.

        Raises:
            UnsupportedError: for what is made of several tensors, or is not strided.
        """
        known = self._tensors.get(id(tensor))
        if known is None:
            known = self._tensors[id(tensor)] = tensor, self._make(tensor)
        return known[1]

    def batch(self, batch: Any) -> Any:
        """A batch, all of whose tensors are stood for."""
        return tree_map(lambda leaf: self.of(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)

    def state(self, module: Module) -> dict[str, torch.Tensor]:
        """Parameters and buffers of a module by name, under all names that each has."""
        tensors = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        return {name: self.of(tensor) for name, tensor in tensors}

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is stood for so far, and by what."""
        yield from self._tensors.values()

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_strided(tensor) or hasattr(tensor, "__tensor_flatten__"):
            raise UnsupportedError(
                f"profile: got a {type(tensor).__name__} of layout {tensor.layout}, expected plain dense tensors where "
                f"there is no hardware; profile a plain model (one rank's part of it), or on the device itself"
            )
        source = tensor.untyped_storage()
        storage = self._storages.get(source._cdata)
        if storage is None:
            storage = torch.empty(source.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[source._cdata] = storage
        made = over(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        if isinstance(tensor, Parameter):
            return Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def state_sizes(parameters: list[torch.Tensor], optimizer: OptimizerOf) -> list[int]:
    """Bytes of each tensor of an optimizer's state on the device: its step is made on ``meta``.

    Args:
        parameters: on ``meta``.
        optimizer: makes one of parameters: a class, or a ``functools.partial`` of one.

    Raises:
        UnsupportedError: if its step asks for the content of tensors.
    """
    copies: list[torch.Tensor] = [Parameter(torch.empty_like(each), requires_grad=True) for each in parameters]
    for each in copies:
        each.grad = torch.empty_like(each)
    made = optimizer(copies)
    try:
        made.step()
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise UnsupportedError(
            f"optimizer: got {type(made).__name__}, whose step asks for the content of tensors ({error}), expected one "
            f"whose step hangs on shapes alone; give bytes for each element of a parameter instead: optimizer=4"
        ) from error
    found = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for state in made.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
    }
    return list(found.values())
