"""Dense tensors, local parts of distributed tensors, and fp32 master weights that follow their parameters."""

from __future__ import annotations

import threading

import torch

from spillway._torch import local_part
from spillway.checkpointing.tensors import is_dense, is_distributed_class
from spillway.errors import UnsupportedError

CHUNK = 1 << 22
"""Elements that the CPU works on at a time, so that they stay in its caches between two passes."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a ``DTensor``."""
    return is_distributed_class(type(tensor))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor. It is the very object: writes to it are seen."""
    if not is_distributed(tensor):
        return tensor
    local: torch.Tensor = local_part(tensor)
    # A collective may be under way.
    return local.wait() if hasattr(local, "wait") else local


def flat(tensor: torch.Tensor, start: int = 0, numel: int | None = None) -> torch.Tensor:
    """A dense tensor's elements in memory order, or some of them."""
    size = tensor.numel() if numel is None else numel
    return tensor.as_strided((size,), (1,), int(tensor.storage_offset()) + start)


def with_strides_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's memory layout, without a conjugate or negative bit. Sparse ones are refused."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"got a gradient of layout {tensor.layout}, expected a dense one. Give the parameter to an optimizer of "
            f"its own, or make the embedding with sparse=False."
        )
    if tensor.stride() == like.stride() and is_dense(tensor):
        return tensor.detach().resolve_conj().resolve_neg()
    with torch.no_grad():
        return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def follow(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Update a master weight in place from its parameter. It keeps elements whose rounded value is the parameter's.

    Example:
        >>> master = torch.tensor([1.001, 2.0])
        >>> follow(master, torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
        >>> master
        tensor([1.0010, 3.0000])
    """
    parts = [(master, parameter)]
    if (master.device.type == "cpu" or master.numel() > CHUNK) and (
        master.stride() == parameter.stride() and is_dense(master)
    ):
        parts = list(zip(torch.split(flat(master), CHUNK), torch.split(flat(parameter), CHUNK), strict=True))
    for part, new in parts:
        if part.device.type == "cpu" and part.ndim == 1 and _rounds_to(part, new):
            continue
        bits = _BITS[new.dtype.itemsize]
        same = part.to(new.dtype).view(bits) == new.view(bits)
        torch.where(same, part, new, out=part)


_per_thread = threading.local()


def scratch_of(dtype: torch.dtype) -> torch.Tensor:
    """The calling thread's scratch memory on the CPU: ``CHUNK`` elements, valid until the next call in the thread."""
    scratch: torch.Tensor | None = getattr(_per_thread, str(dtype), None)
    if scratch is None:
        scratch = torch.empty(CHUNK, dtype=dtype, device="cpu")
        setattr(_per_thread, str(dtype), scratch)
    return scratch


def _rounds_to(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a flat master weight on the CPU, rounded, equals its parameter. Few calls: they need Python's lock."""
    numel, size = master.numel(), parameter.itemsize
    rounded = scratch_of(parameter.dtype)
    if numel != rounded.numel():
        rounded = rounded[:numel]
    rounded.copy_(master)
    bits = torch.int64 if numel * size % 8 == 0 and parameter.storage_offset() * size % 8 == 0 else torch.uint8
    return torch.equal(rounded.view(bits), parameter.view(bits))
