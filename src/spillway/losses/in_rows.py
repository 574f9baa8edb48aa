"""The loss functions of a library of models, with their cross entropy in rows.

NOTE [ Casts that wait ]

Such functions cast the logits to float32 first, which is as much memory as all logarithms. So while one runs, a mode
sees its operators: it puts such a cast off, with views and slices of its result, and where that comes to
``cross_entropy``, the rows are cast one step at a time. The gradient goes to the logits themselves, where the cast
would have cast it back: the same number.

That would not be so if the cast logits were used in a second way, too, whose gradient would be added before that. So
where anything else is done with them, or they are used twice, or given back, the function is run anew, as it is.

What stands for the result of a cast is no such result, for whoever looks at it past torch's functions: a scripted
function, a kernel of another library. So it is done to functions that are known, by name, to compute from their
arguments alone, by torch's functions alone. What a user has put in their place is his own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

from spillway.losses.cross_entropy import REDUCTIONS, cross_entropy, gains

_KNOWN = {("transformers.loss.loss_utils", name) for name in ("ForCausalLMLoss", "ForMaskedLMLoss")}
"""See NOTE [ Casts that wait ]. By name, since nothing here imports a trainer."""
_CASTS = {torch.Tensor.float: torch.float32}
_VIEWS = {
    torch.Tensor.contiguous,
    torch.Tensor.flatten,
    torch.Tensor.reshape,
    torch.Tensor.squeeze,
    torch.Tensor.unsqueeze,
    torch.Tensor.view,
}
_LOOKS = {
    torch.Tensor.device.__get__,
    torch.Tensor.dim,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.numel,
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
}
"""What asks for nothing that the cast would change."""
_ARGUMENTS = inspect.signature(functional.cross_entropy)
_PLAIN = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
"""What the arguments must be that :func:`cross_entropy` has not."""


class InRows:
    """Stands for a loss function. See NOTE [ Casts that wait ].

    Args:
        find: gives the loss function.
        spare: bytes that there are for it beyond what it needs in rows: it is run as it is where it needs no more.
    """

    def __init__(self, find: Callable[[], Callable[..., Any]], spare: int) -> None:
        self._find = find
        self._spare = spare
        self.is_used = False
        """Whether the last loss was computed in rows."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._find()
        self.is_used = False
        if not _is_known(function) or not torch.is_grad_enabled() or _is_looked_at():
            return function(*args, **kwargs)
        try:
            with _Waiting(self._spare) as waiting:
                loss = function(*args, **kwargs)
            waiting.check(loss)
        except _OtherUse:
            return function(*args, **kwargs)
        self.is_used = waiting.is_used
        return loss


def _is_known(function: Callable[..., Any]) -> bool:
    return (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) in _KNOWN


def _is_looked_at() -> bool:
    """Whether a mode of somebody's, but for the one that says where tensors are made, is to see torch's functions."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
    return bool(others) or torch.compiler.is_compiling()


class _OtherUse(BaseException):
    """What was put off is used in another way. Not an error: nobody who catches these is to see it."""


@dataclass(eq=False, slots=True)
class _Cast:
    """One that was put off."""

    dtype: torch.dtype
    is_used: bool = False


class _Waiting(TorchFunctionMode):
    """Puts casts off while a loss function runs."""

    def __init__(self, spare: int) -> None:
        super().__init__()
        self._spare = spare
        self._casts: dict[int, tuple[torch.Tensor, _Cast]] = {}
        """What stands for the result of a cast, or a view of it, by its number."""
        self.is_used = False
        """Whether something was computed in rows."""

    def check(self, output: Any) -> None:
        """That nothing of what was put off is given back."""
        if any(id(leaf) in self._casts for leaf in tree_leaves(output)):
            raise _OtherUse

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        dtype = _CASTS.get(func)
        if dtype is not None and len(args) == 1 and not kwargs and self._is_to_wait(args[0], dtype):
            return self._stands_for(args[0].view_as(args[0]), _Cast(dtype))
        known = self._casts.get(id(args[0])) if args else None
        others = tree_leaves((args[1:] if known is not None else args, kwargs))
        if any(id(each) in self._casts for each in others):
            raise _OtherUse
        if known is None and func is functional.cross_entropy and self._gains(args[0], args[0].dtype):
            self.is_used = True
            return _in_rows(None, _ARGUMENTS.bind(*args, **kwargs))
        if known is None or func in _LOOKS:
            return func(*args, **kwargs)
        cast = known[1]
        if cast.is_used:
            raise _OtherUse
        if func in _VIEWS or (func is torch.Tensor.__getitem__ and _slices(args[1])):
            return self._stands_for(func(*args, **kwargs), cast)
        if func is functional.cross_entropy:
            cast.is_used = self.is_used = True
            return _in_rows(cast.dtype, _ARGUMENTS.bind(*args, **kwargs))
        raise _OtherUse

    def _is_to_wait(self, logits: torch.Tensor, dtype: torch.dtype) -> bool:
        is_known = id(logits) in self._casts
        return not is_known and self._gains(logits, dtype) and logits.dtype.itemsize < dtype.itemsize

    def _gains(self, logits: torch.Tensor, dtype: torch.dtype) -> bool:
        if type(logits) is not torch.Tensor or not logits.requires_grad or logits.dim() < 2:
            return False
        # A cast lays out anew what is not dense, and views of it may be none of this one.
        # As it is, the function has the cast logits, the logarithms, and the gradients of both.
        return (
            logits.is_contiguous()
            and 4 * logits.numel() * dtype.itemsize > self._spare
            and gains(logits.numel() // max(logits.shape[-1], 1), logits.shape[-1], dtype)
        )

    def _stands_for(self, tensor: torch.Tensor, cast: _Cast) -> torch.Tensor:
        self._casts[id(tensor)] = tensor, cast
        return tensor


def _slices(index: object) -> bool:
    """Whether no element is taken twice, so that no gradients are added."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (int, slice, type(None), type(Ellipsis))) for part in parts)


def _in_rows(dtype: torch.dtype | None, bound: inspect.BoundArguments) -> torch.Tensor:
    bound.apply_defaults()
    given = bound.arguments
    logits, target = given["input"], given["target"]
    plain = all(given[name] is value or given[name] == value for name, value in _PLAIN.items())
    is_ours = logits.dim() == 2 and target.shape == logits.shape[:1] and given["reduction"] in REDUCTIONS
    if not plain or not is_ours or target.is_floating_point():
        raise _OtherUse
    return cross_entropy(logits, target, ignore_index=given["ignore_index"], reduction=given["reduction"], dtype=dtype)
