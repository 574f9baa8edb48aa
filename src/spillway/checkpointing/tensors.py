"""Plain tensors among values, their aliases, and the base of modes that see operators."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from spillway._torch import (
    FakeTensor,
    TorchDispatchMode,
    disable_dispatch,
    disable_modes,
    dispatch_modes,
    is_wrapper,
    is_zero_tensor,
    sharing_versions,
    storage_parts,
)

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes of tensors that are views of one storage, and nothing else."""

_MOST_SEEDS = 4
"""Elements of a saved seed and offset: one or two words each."""

_NOTHING = nullcontext()

# By class: isinstance() with torch.Tensor calls a metaclass, in Python.
_NUMBERS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def below_modes(tensor: torch.Tensor | None = None) -> AbstractContextManager[object]:
    """A context without dispatch modes, for operators of our own on this tensor, or on plain tensors."""
    if tensor is None or type(tensor) in PLAIN:
        # To enter a context takes as long as to call an operator.
        return disable_dispatch() if dispatch_modes() > 0 else _NOTHING
    # The code of a wrapper may have to run.
    return disable_modes()


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether it has sizes and strides over one storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is of no subclass, and has sizes and strides over one storage."""
    return type(tensor) in PLAIN and is_strided(tensor)


def has_bits(tensor: torch.Tensor) -> bool:
    """Whether it has content to compare. Meta and fake tensors, and subclasses without memory, have none."""
    if type(tensor) in PLAIN:
        return tensor.device.type != "meta" and not is_zero_tensor(tensor)
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return False
    try:
        return not tensor.numel() or bool(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return False


def is_distributed_class(kind: type) -> bool:
    """Whether tensors of a class are ``DTensor``s, as FSDP2 and tensor parallel make them."""
    # Code that has a DTensor has imported the module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The plain tensors among arguments or outputs, also in lists, and the parts of wrappers."""
    found: list[torch.Tensor] = []
    for value in values:
        kind = type(value)
        if kind in PLAIN:
            found.append(value)
        elif kind in _NUMBERS:
            continue
        elif isinstance(value, torch.Tensor):
            found.extend(storage_parts(value) if is_wrapper(value) else (value,))
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors with strides that a wrapper is made of."""
    return [part for part in tensors_in((tensor,)) if type(part) in PLAIN and is_strided(part)]


def tensor_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of a plain tensor that shares the version counter, and holds no memory."""
    # Below autograd, where a mode is called, an alias does not share the counter unless told to.
    with disable_dispatch(), sharing_versions():
        alias = tensor.detach()
        alias.data = _nothing_of(tensor.dtype, tensor.device)
        return alias


@lru_cache(maxsize=64)
def _nothing_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def may_be_seed(tensor: torch.Tensor) -> bool:
    """Whether it may hold the seed of a random operator. Fused attention without dropout leaves it unwritten."""
    is_number = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return is_number and tensor.numel() <= _MOST_SEEDS


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill one range of memory, each once, in any order of its dimensions."""
    return tensor.is_contiguous() or _fills(tensor.shape, tensor.stride())


@lru_cache(maxsize=1024)
def _fills(size: torch.Size, stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count > 1):
        if step != expected:
            return False
        expected *= count
    return True


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sees every operator, also those of higher order. A compiled function is one operator."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells torch to put no wrapper against Dynamo around each operator: see NOTE [ Dynamo ]."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells Dynamo that it may run compiled functions under this mode."""
        return True
