"""What ``p.grad`` is when its bytes are on the host.

A tensor in all that can be asked of it without reading bytes. What training loops do to gradients is noted and done on
the host: autograd adds to it, ``clip_grad_norm_`` asks for its norm and scales it, ``GradScaler`` looks for infinities
and unscales, ``zero_grad`` fills it with zeros or drops it. For any other operator the gradient is brought back for as
long as that takes, and what was written goes out again: right, if not fast. Only views are refused: what somebody
writes to one later would be lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from spillway.errors import UnsupportedError, UsageError

aten = torch.ops.aten
_SAME = {aten.detach.default, aten.alias.default}
_SCALE = {
    aten.mul_.Tensor: "mul_",
    aten.mul_.Scalar: "mul_",
    aten.div_.Tensor: "div_",
    aten.div_.Scalar: "div_",
    aten._foreach_mul_.Scalar: "mul_",
    aten._foreach_mul_.Tensor: "mul_",
    aten._foreach_div_.Scalar: "div_",
    aten._foreach_div_.Tensor: "div_",
}
_ZERO = {aten.zero_.default, aten._foreach_zero_.default}
_CHECK = aten._amp_foreach_non_finite_check_and_unscale_.default


class Home(Protocol):
    """A gradient on the host: what is done to that which stands for it is done there."""

    @property
    def work_dtype(self) -> torch.dtype: ...

    def arrive(self, tensor: torch.Tensor) -> None: ...

    def replace(self, tensor: torch.Tensor) -> None: ...

    def scale(self, operation: str, value: torch.Tensor | float) -> None: ...

    def fill_with_zeros(self) -> None: ...

    def norm(self, order: float) -> torch.Tensor: ...

    def has_nonfinite(self) -> torch.Tensor: ...

    def restore(self, *, exact: bool = False) -> torch.Tensor: ...


class AwayGradient(torch.Tensor):
    """A gradient on the host; it looks like one on the device. See the text of its module."""

    _home: weakref.ref[Home]
    _kept: Home | None

    @staticmethod
    def __new__(cls: type[AwayGradient], home: Home, like: torch.Tensor, dtype: torch.dtype) -> AwayGradient:
        away: AwayGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype, device=like.device, strides=like.stride()
        )
        # Weak: the optimizer holds the parameter, which holds this, in a way that the collector does not see.
        away._home = weakref.ref(home)
        away._kept = None
        return away

    def __init__(self, home: Home, like: torch.Tensor, dtype: torch.dtype) -> None:
        pass

    @property
    def home(self) -> Home:
        """What it stands for."""
        home = self._home()
        if home is None:
            raise UsageError(
                "got a gradient whose optimizer is gone, expected it to live as long as its gradients are used; keep "
                "the OffloadedOptimizer, or close() it first"
            )
        return home

    def stands_for(self, gradient: Home) -> bool:
        """Whether it is in the place of that one, and of no other optimizer's."""
        return self._home() is gradient

    def part(self) -> None:
        """It is no parameter's gradient any more, but somebody's who kept it: its bytes live as long as it does."""
        self._kept = self.home

    def join(self) -> None:
        """It is its parameter's gradient again."""
        self._kept = None

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AwayGradient(size={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.home.restore()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.home.restore().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, AwayGradient):
            if function in _SAME:
                return first
            if function is aten.add_.Tensor and not kwargs and _is_gradient(args[1], first):
                first.home.arrive(args[1])
                return first
            if function is aten.linalg_vector_norm.default and len(args) <= 2 and not kwargs:
                return first.home.norm(float(args[1]) if len(args) == 2 else 2.0)
        if function is aten._foreach_norm.Scalar and not kwargs:
            return _norms(*args)
        if (function in _SCALE and _is_factor(args[1])) or function in _ZERO or function is _CHECK:
            return _to_each(function, args)
        return _brought_back(function, args, kwargs)


def _to_each(function: Any, args: tuple[Any, ...]) -> Any:
    """An operator on gradients of which some may be on the device."""
    listed = isinstance(args[0], (list, tuple))
    gradients = list(args[0]) if listed else [args[0]]
    away = [gradient for gradient in gradients if isinstance(gradient, AwayGradient)]
    here = [gradient for gradient in gradients if not isinstance(gradient, AwayGradient)]
    if here:
        function(here, *args[1:])
    for gradient in away:
        if function is _CHECK:
            found, inverse = args[1:]
            found.copy_(torch.maximum(found, gradient.home.has_nonfinite().to(found.device, found.dtype)))
            gradient.home.scale("mul_", inverse)
        elif function in _ZERO:
            gradient.home.fill_with_zeros()
        else:
            gradient.home.scale(_SCALE[function], args[1])
    return None if listed else args[0]


def _norms(gradients: list[torch.Tensor], order: float = 2.0) -> list[torch.Tensor]:
    """Of gradients of which some may be on the device."""
    here = [gradient for gradient in gradients if not isinstance(gradient, AwayGradient)]
    found = iter(torch._foreach_norm(here, order) if here else ())
    return [one.home.norm(float(order)) if isinstance(one, AwayGradient) else next(found) for one in gradients]


def _brought_back(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run it on gradients that come back for that.

    In the type in which they look, if they are read; in the type of the step, which they are added up in, if one of
    them is written.
    """
    written = _written(function, args, kwargs)
    work = {one.dtype: one.home.work_dtype for one in written if isinstance(one, AwayGradient)}
    back: dict[int, tuple[AwayGradient, torch.Tensor]] = {}

    def bring(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, AwayGradient):
            if id(tensor) not in back:
                back[id(tensor)] = (tensor, tensor.home.restore(exact=bool(work)))
            return back[id(tensor)][1]
        # Some operators want all their arguments to be of one type.
        is_read = type(tensor) is torch.Tensor and not any(tensor is one for one in written)
        return tensor.to(work[tensor.dtype]) if is_read and tensor.dtype in work else tensor

    result = function(*tree_map_only(torch.Tensor, bring, args), **tree_map_only(torch.Tensor, bring, kwargs))
    for away, tensor in back.values():
        if any(away is one for one in written):
            away.home.replace(tensor)
    of_tensor = {id(tensor): away for away, tensor in back.values()}
    return tree_map_only(torch.Tensor, lambda tensor: of_tensor.get(id(tensor), tensor), result)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to.

    Raises:
        UnsupportedError: if it gives views of a gradient that is on the host.
    """
    written = []
    for index, argument in enumerate(function._schema.arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        found = [one for one in tree_flatten(given)[0] if isinstance(one, torch.Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += found
        elif argument.alias_info is not None and any(isinstance(one, AwayGradient) for one in found):
            raise UnsupportedError(
                f"got {function} of a gradient that is on the host, expected no view of it: what is written to a "
                f"view would be lost; clone the gradient first, or make the optimizer with offload_gradients=False"
            )
    return written


def _is_gradient(other: Any, away: AwayGradient) -> bool:
    plain: Callable[[Any], bool] = lambda tensor: type(tensor) is torch.Tensor  # noqa: E731
    return plain(other) and other.shape == away.shape and other.dtype == away.dtype and other.layout == torch.strided


def _is_factor(other: Any) -> bool:
    return isinstance(other, (int, float)) or (
        isinstance(other, torch.Tensor) and other.ndim == 0 and not isinstance(other, AwayGradient)
    )
