"""What is known of the content of tensors on ``meta``: whole numbers and truths that no floating point went into.

NOTE [ Contents that are known ]

Models ask for the content of some tensors on their way: whether a mask leaves anything out, whether positions begin
anew within a row. Such tensors are whole numbers and truths, and often they come from nothing but numbers of the
program (``arange``), or from a batch that is there. So of each storage on ``meta`` whose content is known there is one
of the host's that has it, and each operator all of whose arguments are known is run on these, too. What reads floating
point, draws, or begins unwritten is not known, and what comes of it is not either.

It is by storage, so that views need nothing done, and a write is seen by all of them.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_map

from spillway.regions.schema import Facts, argument
from spillway.regions.tensors import PLAIN, split, tensors_in
from spillway.runtime.bytes import over

_META = torch.device("meta")
_HOST = torch.device("cpu")
_MOST_BYTES = 64 << 20
"""What is larger is not looked at."""
_UNWRITTEN = ("aten::empty", "aten::new_empty", "aten::resize")


class Contents:
    """See NOTE [ Contents that are known ]."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = weakref.WeakKeyDictionary()

    def know(self, stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
        """One on ``meta`` stands for this one, whose content is taken as it is now."""
        storage = stand_in.untyped_storage()
        is_there = type(tensor) in PLAIN and tensor.device != _META
        if is_there and _is_exact(tensor) and storage.nbytes() <= _MOST_BYTES:
            self._known[storage] = tensor.untyped_storage().cpu().clone()  # type: ignore[no-untyped-call]

    def knows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether all that an operator is given is known."""
        tensors, _ = split(args, kwargs)
        return all(map(self._is_known, tensors))

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives whose arguments are known; tensors are the host's."""
        args, kwargs = tree_map(self._on_host, (args, kwargs))
        return func(*args, **kwargs)

    def follow(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An operator was run on ``meta`` and gave this."""
        given = tensors_in(output if isinstance(output, (list, tuple)) else (output,))
        written = [argument(args, kwargs, key) for key in facts.writes]
        if not written and (facts.is_view or not all(map(_is_exact, given))):
            return
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        is_open = not name or facts.is_random or facts.reshapes or name.startswith(_UNWRITTEN)
        if is_open or not self.knows(args, kwargs):
            self._forget(written)
            return
        found = self.run(func, args, kwargs)
        if written:
            return
        found = tensors_in(found if isinstance(found, (list, tuple)) else (found,))
        for stand_in, tensor in zip(given, found, strict=True):
            self._take(stand_in, tensor)

    def stood_for(self, output: Any) -> Any:
        """What an operator gave on the host, with tensors on ``meta`` in the place of the host's."""
        return tree_map(lambda leaf: self._made(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        self._take(made, tensor)
        return made

    def _take(self, stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
        storage = stand_in.untyped_storage()
        if storage.nbytes() > _MOST_BYTES:
            return
        content = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        _of(content, stand_in).copy_(tensor)
        self._known[storage] = content

    def _forget(self, tensors: list[Any]) -> None:
        for tensor in tensors_in(tensors):
            if tensor.device == _META:
                self._known.pop(tensor.untyped_storage(), None)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        if not _is_exact(tensor):
            return False
        return tensor.device == _HOST or (tensor.device == _META and tensor.untyped_storage() in self._known)

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _HOST
        if not isinstance(leaf, torch.Tensor) or leaf.device != _META:
            return leaf
        return _of(self._known[leaf.untyped_storage()], leaf)


def _of(content: torch.UntypedStorage, stand_in: torch.Tensor) -> torch.Tensor:
    return over(content, stand_in.dtype, int(stand_in.storage_offset()), stand_in.shape, stand_in.stride())


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
