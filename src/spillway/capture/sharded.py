"""Parameters that are split over processes, where a tensor does not show that it is one.

Most do: what FSDP2 gathers is a ``Parameter`` for as long as it is there, and views of one have it as their base. Two
kinds of aliases do not, and an operator may save them:

* ``weight.detach()`` under ``fully_shard``. Its storage shrinks to nothing when the parameters are resharded, at the
  end of the module's forward, and is filled again before backward: bytes that a copy under way must not lose, and that
  must never come back as a copy.
* ``weight.to_local()`` of a ``DTensor``: a view of the local shard, which is a plain tensor.

Torch says nothing of the first that is public, so FSDP2's own records are read: each parameter's gathered storages.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from spillway.capture.identity import storage_parts
from spillway.errors import UnsupportedError

_STATES = "torch.distributed._composable_state"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"
_DTENSOR = "torch.distributed.tensor"

_RECORDS = ("all_gather_outputs", "_unsharded_inner_tensors")
_MOST_NODES = 8


class Gathered:
    """The storages that FSDP2 gathers parameters into, as one pass meets them.

    They are made when a module is first gathered, so those that are not there yet are looked for again. After the first
    step all are there, and asking is one search in a set.
    """

    def __init__(self) -> None:
        self._waiting = [weakref.ref(parameter) for parameter in _parameters()]
        first = self._waiting[0]() if self._waiting else None
        missing = [name for name in _RECORDS if first is not None and not hasattr(first, name)]
        if missing:
            raise UnsupportedError(
                f"got a torch {torch.__version__} whose FSDP2 keeps no {' and no '.join(missing)}, expected one that "
                f"does, since a gathered parameter that moves would be lost; use a torch that Spillway was tested with"
            )
        # By number. Should a model die within the pass and another storage get its number, that one stays where it is.
        self._storages: set[int] = set()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a gathered parameter lives there."""
        if self._waiting:
            self._waiting = [reference for reference in self._waiting if not self._note(reference())]
        return storage._cdata in self._storages

    def _note(self, parameter: Any) -> bool:
        """Whether the parameter's storages are known by now."""
        if parameter is None:
            return True
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
            self._storages.add(tensor.untyped_storage()._cdata)
        return hasattr(parameter, "_unsharded_param")


def _parameters() -> Iterator[Any]:
    """FSDP2's records of all parameters that it splits in this process."""
    states = sys.modules.get(_STATES)
    if states is None or _FSDP not in sys.modules:
        return
    seen = set()
    for reference in list(states._module_state_mapping.values()):
        state = reference()
        if state is None or id(state) in seen:
            continue
        # Several modules that are wrapped as one share their state.
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            yield from () if group is None else group.fsdp_params


def is_local_part(tensor: torch.Tensor) -> bool:
    """Whether it is a view of the local part of a parameter that is a ``DTensor``, as ``to_local()`` gives."""
    if tensor._base is None or _DTENSOR not in sys.modules:
        return False
    node: Any = tensor.grad_fn
    for _ in range(_MOST_NODES):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            storage = tensor.untyped_storage()
            parts = storage_parts(leaf) if isinstance(leaf, torch.nn.Parameter) else []
            return any(part.untyped_storage() is storage for part in parts)
        following: tuple[Any, ...] = () if node is None else node.next_functions
        if len(following) != 1:
            return False
        node = following[0][0]
    return False
