"""The list of the tensors that a model would save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway._torch import storage_key, storage_parts
from spillway.saved_tensors.handles import KeptHandle, unpack
from spillway.saved_tensors.identity import is_parameter, reach, why_unmovable
from spillway.saved_tensors.locator import Locator


@dataclass(frozen=True, slots=True)
class SavedTensorReport:
    """One line of :func:`spillway.list_saved_tensors`: a tensor that autograd would save."""

    nbytes: int
    """Bytes that would be offloaded. 0 for an alias of bytes that are listed already."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    module: str
    """Dotted path of the module whose forward saved it; ``""`` is the model itself."""
    operator: str
    """The torch function that saved it, as ``torch.nn.functional.linear``."""
    moves: bool
    """Whether Spillway would offload it."""
    reason: str
    """Why, or why not."""


def list_saved_tensors(model: torch.nn.Module, *args: Any, **kwargs: Any) -> list[SavedTensorReport]:
    """Run one forward and list the tensors that autograd saves, in order. Nothing is offloaded.

    The operator is the outermost torch function that ran; ``""`` for a custom ``autograd.Function``. Small tensors are
    listed as movable: ``min_bytes`` belongs to the context.

    Args:
        model: called as ``model(*args, **kwargs)`` with gradients on. Its buffers may change (batch norm), as in any
            forward.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        A record for each saved tensor: bytes, module path, operator, whether it is worth offloading, and why not.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [(line.operator, line.moves) for line in list_saved_tensors(layer, torch.ones(2, 4))]
        [('torch.nn.functional.linear', True)]
    """
    lines: list[SavedTensorReport] = []
    # Holding the storages keeps each address unique.
    seen: dict[int, torch.UntypedStorage] = {}
    locator = Locator(modules=True, operators=True)

    def pack(tensor: torch.Tensor) -> KeptHandle:
        module, operator = locator.here()
        for part in storage_parts(tensor):
            nbytes, moves, reason = _judge(tensor, part, locator, seen)
            lines.append(
                SavedTensorReport(
                    nbytes, tuple(part.shape), part.dtype, part.device, module or "", operator or "", moves, reason
                )
            )
        return KeptHandle(tensor)

    with torch.enable_grad(), locator, saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return lines


def _judge(
    whole: torch.Tensor, part: torch.Tensor, locator: Locator, seen: dict[int, torch.UntypedStorage]
) -> tuple[int, bool, str]:
    """Bytes to offload for a part of a saved tensor, whether it would be offloaded, and why (not)."""
    if is_parameter(whole):
        return 0, False, "a parameter or buffer, or a view of one"
    reason = why_unmovable(part)
    if reason is not None:
        return part.numel() * part.element_size(), False, reason
    storage = part.untyped_storage()
    if locator.is_parameter_storage(storage):
        return 0, False, "an alias of a parameter or buffer"
    if storage_key(storage) in seen:
        return 0, True, "shares its bytes with one above"
    seen[storage_key(storage)] = storage
    return reach(part, storage.nbytes())[1], True, "saved for the first time"
