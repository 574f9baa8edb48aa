"""Parked tensors: each use from Python waits for their bytes, or is an error that names the tensor.

NOTE [ A tensor without memory ]

A parked tensor has a storage of no bytes. Torch checks that in some operators only. Others read address zero: a crash
on the CPU, an error that ends the process on CUDA. ``torch.save`` writes an empty file without an error. So there are
two guards:

* **The class.** A parked tensor gets a subclass of its class, made here. Each function of torch that Python code calls
  with the tensor asks its ``__torch_function__``. That raises an error if the tensor is parked, waits if it is being
  reloaded, and lets through all that reads no bytes: ``shape``, ``device``, ``grad``. The object stays the same one,
  and ``isinstance`` says the same. It has its own class again before the function runs.
* **The storage.** C++ code does not look at classes: a backward that waits, and views that have objects of their own.
  On CUDA, torch lets a storage refuse all access with a text of ours. It is refused until a stream has waited. New
  views of an empty storage are torch's own error.

A torch without the second guard is found by :data:`CAN_REFUSE`. There a device's tensors return in one go, since C++
code could read bytes that are under way. The CPU has no such guard either, and there nothing is freed.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from spillway._torch import allow_access, disable_function, refuse_access

if TYPE_CHECKING:
    from spillway.parking.storages import ParkedStorage

CAN_REFUSE = refuse_access is not None and allow_access is not None
"""Whether this torch can let a storage refuse access."""

_parked: Any = WeakIdKeyDictionary()
"""Tensors with a class of ours, each with its storages."""

_classes: dict[type[Tensor], type[Tensor]] = {}
"""The classes of parked tensors, each with the class that it stands for."""

_NO_BYTES = {
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad"),
            *("grad_fn", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "retains_grad"),
            *("_base", "_version", "_grad", "names"),
        )
        if hasattr(Tensor, name)
    ),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
    *(
        getattr(Tensor, name)
        for name in (
            *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"),
            *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "get_device", "requires_grad_"),
            *("register_hook", "register_post_accumulate_grad_hook", "__len__"),
        )
    ),
}
"""Functions of tensors that need no bytes."""


def guard(tensor: Tensor, storage: ParkedStorage) -> None:
    """From now on, uses of the tensor from Python ask this storage, too."""
    kind = type(tensor)
    if tensor not in _parked:
        try:
            tensor.__class__ = _guarded(kind)
        except TypeError:
            # Its class has a layout of its own in memory. The second guard is left.
            return
    others = (each for each in storages_of(tensor) if each is not storage)
    _parked[tensor] = (*others, storage)


def release(tensor: Tensor, storage: ParkedStorage) -> None:
    """The storage is on the device. With its last one, the tensor has its own class again."""
    if tensor in _parked:
        left = tuple(each for each in _parked[tensor] if each is not storage)
        _parked[tensor] = left
        if not left:
            tensor.__class__ = _classes.get(type(tensor), type(tensor))
            del _parked[tensor]


def storages_of(tensor: Tensor) -> Sequence[ParkedStorage]:
    """The parked storages of a tensor; empty for one that is not parked."""
    found: Sequence[ParkedStorage] = _parked.get(tensor, ()) if _parked.data else ()
    return found


def refuse(storage: torch.UntypedStorage, text: str) -> None:
    """Any access to the storage's bytes is an error from now on, if this torch can do that."""
    if refuse_access is not None and CAN_REFUSE and storage.device.type != "cpu":
        refuse_access(storage, text)


def allow(storage: torch.UntypedStorage) -> None:
    """Access to the storage's bytes is no error any more."""
    if allow_access is not None and CAN_REFUSE and storage.device.type != "cpu":
        allow_access(storage)


@functools.cache
def _guarded(kind: type[Tensor]) -> type[Tensor]:
    """A class for parked tensors of a class."""
    members = {"__torch_function__": classmethod(_use), "__repr__": _text, "__module__": __name__, "__slots__": ()}
    made: type[Tensor] = types.new_class(f"Parked{kind.__name__}", (kind,), {}, lambda body: body.update(members))
    _classes[made] = kind
    return made


def _use(
    cls: type[Tensor],
    function: Any,
    kinds: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    kwargs = kwargs or {}
    if function in _NO_BYTES:
        with disable_function():
            return function(*args, **kwargs)
    # If there is none, another thread has waited for it meanwhile.
    for tensor in list(_among(*args, kwargs)):
        for storage in storages_of(tensor):
            storage.use(_name(function))
        if type(tensor) in _classes and tensor not in _parked:
            # A copy, which `copy.deepcopy` has made with the class of the original.
            tensor.__class__ = _classes[type(tensor)]
    return function(*args, **kwargs)


def _among(*values: Any) -> Iterator[Tensor]:
    """The parked tensors in some values, also in containers of a class of one's own."""
    for value in values:
        if type(value) in _classes:
            yield value
        elif isinstance(value, list | tuple):
            yield from _among(*value)
        elif isinstance(value, Mapping):
            yield from _among(*value.values())


def _text(tensor: Tensor) -> str:
    with disable_function():
        names = ", ".join(storage.name for storage in storages_of(tensor))
        return f"<{type(tensor).__name__} {names} {tuple(tensor.shape)} {tensor.dtype}>"


def _name(function: Any) -> str:
    # A property is called by its descriptor.
    named = getattr(function, "__self__", None) if function.__name__ in ("__get__", "__set__") else function
    return str(getattr(named, "__name__", function))
