"""Tensors that are one process's part of a tensor of many: ``DTensor``, which FSDP2 and tensor parallel make."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor``."""
    # Who has one has imported the module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part; the very object, so that what is written there is seen."""
    if not is_distributed(tensor):
        return tensor
    local = tensor._local_tensor  # type: ignore[attr-defined]
    # What a collective under way will give.
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]


def put_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Let a ``DTensor`` have another part."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A part, as a tensor that is distributed as a parameter is, wherever the part lies."""
    if not is_distributed(parameter):
        return local
    make: Any = sys.modules["torch.distributed.tensor"].DTensor
    return make(local, parameter._spec, requires_grad=False)  # type: ignore[no-any-return, attr-defined]


def many_processes() -> bool:
    """Whether this process trains with others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
