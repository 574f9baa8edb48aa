"""Stands for a tensor that was written since forward: a replay must not read it.

NOTE [ What was written since forward ]

To see what operators read takes a dispatch mode, and under a mode torch takes other kernels for some operators. So for
as long as the replay runs, containers of Python state have stand-ins in the place of such tensors. A stand-in tells its
shape and type, and raises where its content is asked for. Who does not touch it runs as before.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from spillway.errors import RecomputeError
from spillway.regions.tensors import below_modes

_TOLD = frozenset(
    ("__get__", "size", "dim", "ndimension", "numel", "stride", "is_contiguous", "__len__", "element_size")
)
"""Functions of tensors that give a tensor only where they give its content."""


class RefusedTensor(torch.Tensor):
    """See NOTE [ What was written since forward ]."""

    _stands_for: tuple[torch.Tensor, int]
    _asked: list[RefusedTensor]

    @classmethod
    def of(cls, tensor: torch.Tensor, version: int, asked: list[RefusedTensor]) -> RefusedTensor:
        """Stand for a tensor.

        Args:
            tensor: the tensor.
            version: its version when forward had ended.
            asked: gets it when its content is asked for, since the function may catch the error.
        """
        with below_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            memory = torch.empty((), dtype=tensor.dtype, device=tensor.device)
            stand_in: RefusedTensor = memory.expand(tensor.shape).as_subclass(cls)
            if tensor.requires_grad:
                stand_in.requires_grad_()
        stand_in._stands_for, stand_in._asked = (tensor, version), asked
        return stand_in

    def refuse(self) -> None:
        """Raise the error.

        Raises:
            RecomputeError: always.
        """
        refuse_written(*self._stands_for)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if not isinstance(result, torch.Tensor):
                return result
        found = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, RefusedTensor))
        found._asked.append(found)
        return found.refuse()


def refuse_written(tensor: torch.Tensor, version: int) -> NoReturn:
    """What a region has read was written since."""
    raise RecomputeError(
        f"got a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} that was written in place (version "
        f"{tensor._version}, expected {version}) after a checkpointed function had read it, expected it unchanged "
        f"until backward; write a copy, or save or offload what the function computes from it"
    )
