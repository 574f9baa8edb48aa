"""What autograd would save of a model, tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.handles import KeptHandle, pack_kept, unpack
from spillway.capture.identity import is_parameter, reach, storage_parts, why_unmovable
from spillway.capture.location import Locator
from spillway.records import SavedTensorReport


def saved_tensors(model: torch.nn.Module, *args: Any, **kwargs: Any) -> list[SavedTensorReport]:
    """Run one forward and list what autograd saves, in order. Nothing moves.

    The operator is the outermost torch function that ran; ``""`` for a custom ``autograd.Function``. Small tensors are
    listed as movable: what ``min_bytes`` makes of them is the context's affair.

    Args:
        model: called as ``model(*args, **kwargs)`` with gradients on. Its buffers may change (batch norm), as in any
            forward.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        A record for each saved tensor: bytes, module path, operator, whether Spillway would move it, and why not.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [(line.operator, line.moves) for line in saved_tensors(layer, torch.ones(2, 4))]
        [('torch.nn.functional.linear', True)]
    """
    lines: list[SavedTensorReport] = []
    # The storages are held while it runs, so that an address is one storage's throughout.
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
        return pack_kept(tensor)

    with torch.enable_grad(), locator, saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return lines


def _judge(
    whole: torch.Tensor, part: torch.Tensor, locator: Locator, seen: dict[int, torch.UntypedStorage]
) -> tuple[int, bool, str]:
    """Bytes that would leave for a part of a saved tensor, whether it would, and why (not)."""
    if is_parameter(whole):
        return 0, False, "a parameter or buffer, or a view of one"
    reason = why_unmovable(part)
    if reason is not None:
        return part.numel() * part.element_size(), False, reason
    storage = part.untyped_storage()
    if locator.is_parameter_storage(storage):
        return 0, False, "an alias of a parameter or buffer"
    if storage._cdata in seen:
        return 0, True, "shares its bytes with one above"
    seen[storage._cdata] = storage
    return reach(part, storage.nbytes())[1], True, "saved for the first time"
