"""The tensors that stand for gradients that are offloaded, or that a step still reads.

``p.grad`` is an :class:`OffloadedGradient`. Its shape, type and device are those of the parameter, and its bytes are on
the CPU. The operators of training loops become operations on the CPU: autograd adds to it, ``clip_grad_norm_`` takes
its norm and scales it, ``GradScaler`` searches it for infinities and unscales it, ``zero_grad`` clears it. Any other
operator reloads the gradient, and offloads it again after a write. Views are refused: writes to them would be lost.

A :class:`GradientInUse` stands for a gradient on the GPU that a step reads on another stream.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spillway._torch import (
    base_of,
    foreach_norm,
    holders_of,
    make_wrapper,
    schema_of,
    set_local_part,
    tree_leaves,
    tree_map_only,
    version_of,
)
from spillway.errors import UnsupportedError, UsageError
from spillway.optim.tensors import is_distributed, local_of

if TYPE_CHECKING:
    from spillway.optim.gradient import DeviceContext, Gradient
    from spillway.optim.host_parameter import HostParameter

_aten = torch.ops.aten
_SCALE = {
    overload: f"{name}_"
    for name in ("mul", "div")
    for packet in (getattr(_aten, f"{name}_"), getattr(_aten, f"_foreach_{name}_"))
    for overload in (packet.Tensor, packet.Scalar)
}
_ZERO = {_aten.zero_.default, _aten._foreach_zero_.default}
_CHECK = _aten._amp_foreach_non_finite_check_and_unscale_.default


class OffloadedGradient(torch.Tensor):
    """A gradient whose bytes are on the CPU. It looks like a tensor on the GPU."""

    _home: weakref.ref[Gradient]
    kept: Gradient | None = None
    """Its bytes, if the user keeps it past its parameter's next gradient."""

    @property
    def home(self) -> Gradient:
        home = self._home()
        if home is None:
            raise UsageError(
                "The OffloadedOptimizer of this gradient is gone, and the gradient's bytes with it. Keep the "
                "optimizer, or close() it first."
            )
        return home

    @property
    def data(self) -> Tensor:
        """The gradient itself."""
        return self

    @data.setter
    def data(self, content: Tensor) -> None:
        if content is self:
            return
        if (content.shape, content.device) != (self.shape, self.device):
            raise UsageError(
                f"got data of shape {tuple(content.shape)} on {content.device} for an offloaded gradient, which has "
                f"shape {tuple(self.shape)} and is of a parameter on {self.device}. Give it data of that kind, or set "
                f"p.grad itself."
            )
        self.home.begin(content.detach().clone())
        if content.dtype != self.dtype:
            # As when a model is cast. Only the look: the content would stay on the GPU.
            look = make_wrapper(
                OffloadedGradient, self.shape, dtype=content.dtype, device=self.device, strides=self.stride()
            )
            Tensor.data.__set__(self, look)  # type: ignore[attr-defined]

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        raise UnsupportedError(
            "An offloaded gradient has no memory on the device for DLPack to share. Give it p.grad.clone(), or make "
            "the OffloadedOptimizer with offload_gradients=False."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedGradient(size={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

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
        if isinstance(first, OffloadedGradient):
            if function in (_aten.detach.default, _aten.alias.default):
                return first
            if function is _aten.add_.Tensor and not kwargs and _is_gradient(args[1], first):
                first.home.arrive(args[1] if _is_unheld(args) else args[1].clone())
                return first
            if function is _aten.linalg_vector_norm.default and len(args) <= 2 and not kwargs:
                return first.home.norm(float(args[1]) if len(args) == 2 else 2.0)
        if function is _aten._foreach_norm.Scalar and not kwargs:
            return _norms(*args)
        if (function in _SCALE and _is_factor(args[1])) or function in _ZERO or function is _CHECK:
            return _apply_to_each(function, args)
        return _run_on_reloaded(function, args, kwargs)


def _apply_to_each(function: Any, args: tuple[Any, ...]) -> Any:
    """Run an operator on gradients of which some may be on the GPU."""
    listed = isinstance(args[0], (list, tuple))
    gradients = list(args[0]) if listed else [args[0]]
    offloaded = [gradient for gradient in gradients if isinstance(gradient, OffloadedGradient)]
    on_device = [gradient for gradient in gradients if not isinstance(gradient, OffloadedGradient)]
    if on_device:
        function(on_device, *args[1:])
    for gradient in offloaded:
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
    """Norms of gradients of which some may be on the GPU."""
    on_device = [gradient for gradient in gradients if not isinstance(gradient, OffloadedGradient)]
    found = iter(foreach_norm(on_device, order) if on_device else ())
    return [one.home.norm(float(order)) if isinstance(one, OffloadedGradient) else next(found) for one in gradients]


def _run_on_reloaded(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on reloaded gradients: in the type that they show, or in that of the step if it writes one."""
    if function.namespace == "c10d":
        # The schemas of collectives do not say what they write.
        raise UnsupportedError(
            f"{function} got a gradient whose bytes are on the CPU, and what it writes would be lost. Make the "
            f"optimizer with offload_gradients=False, or give a clone, and copy it back with p.grad.copy_(clone)."
        )
    written = _written(function, args, kwargs)
    work = {one.dtype: one.home.dtype for one in written if isinstance(one, OffloadedGradient)}
    reloaded: dict[int, tuple[OffloadedGradient, torch.Tensor]] = {}

    def reload(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, OffloadedGradient):
            if id(tensor) not in reloaded:
                reloaded[id(tensor)] = (tensor, tensor.home.restore(exact=bool(work)))
            return reloaded[id(tensor)][1]
        # Some operators need all their arguments in one type.
        is_read = type(tensor) is torch.Tensor and not any(tensor is one for one in written)
        return tensor.to(work[tensor.dtype]) if is_read and tensor.dtype in work else tensor

    result = function(*tree_map_only(torch.Tensor, reload, args), **tree_map_only(torch.Tensor, reload, kwargs))
    for offloaded, tensor in reloaded.values():
        if any(offloaded is one for one in written):
            offloaded.home.begin(tensor)
    of_tensor = {id(tensor): offloaded for offloaded, tensor in reloaded.values()}
    return tree_map_only(torch.Tensor, lambda tensor: of_tensor.get(id(tensor), tensor), result)


def _written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to. Operators that give views of an offloaded gradient are refused."""
    written = []
    for index, argument in enumerate(schema_of(function).arguments):
        given = args[index] if index < len(args) else kwargs.get(argument.name)
        found = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += found
        elif argument.alias_info is not None and any(isinstance(one, OffloadedGradient) for one in found):
            raise UnsupportedError(
                f"{function} would make a view of a gradient whose bytes are on the CPU, and writes to the view would "
                f"be lost. Clone the gradient first, or make the optimizer with offload_gradients=False."
            )
    return written


def _is_gradient(other: Any, gradient: OffloadedGradient) -> bool:
    return (
        type(other) is torch.Tensor
        and other.shape == gradient.shape
        and other.dtype == gradient.dtype
        and other.layout == torch.strided
    )


def _is_unheld(args: tuple[Any, ...]) -> bool:
    """Whether autograd alone has the gradient that it adds. Other code may write its own tensor before it is read.

    The counts are those of ``AccumulateGrad`` in this torch. If a later one has higher counts, gradients are cloned.
    """
    # No names: each would be one reference more.
    base = 0 if base_of(args[1]) is None else sys.getrefcount(base_of(args[1]))
    of_storage, of_tensor = holders_of(args[1])
    return sys.getrefcount(args[1]) <= 3 and base <= 2 and of_storage <= 2 + (base > 0) and of_tensor <= 4


def _is_factor(other: Any) -> bool:
    return isinstance(other, (int, float)) or (
        isinstance(other, torch.Tensor) and other.ndim == 0 and not isinstance(other, OffloadedGradient)
    )


class GradientInUse(torch.Tensor):
    """Stands in ``p.grad`` for a gradient that a step reads.

    The first operator on it lets compute wait for the step. Code that writes to the gradient by another reference is
    found by the gradient's version.
    """

    gradient: Tensor
    _wait: Callable[[], object] | None
    _before: int

    @staticmethod
    def of(gradient: Tensor, wait: Callable[[], object]) -> GradientInUse:
        """Stands for a plain tensor. ``wait`` lets compute wait for the step."""
        made: GradientInUse = make_wrapper(
            GradientInUse, gradient.shape, dtype=gradient.dtype, device=gradient.device, strides=gradient.stride()
        )
        made.gradient, made._wait, made._before = gradient, wait, version_of(gradient)
        return made

    def plain(self) -> Tensor:
        """The gradient, after compute was made to wait."""
        self.check()
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        return self.gradient

    def check(self) -> None:
        """Raise a ``UsageError`` if the gradient was written while the step read it."""
        if self._wait is not None and version_of(self.gradient) != self._before:
            self._wait = None
            raise UsageError(
                "A gradient was written between step() and the next forward of its block, by a reference to the tensor "
                "that p.grad was before step(). The step may have read either value. Write to p.grad itself, or call "
                "synchronize() before."
            )

    @property
    def data(self) -> Tensor:
        """The gradient's own."""
        return self.plain().data

    @data.setter
    def data(self, content: Tensor) -> None:
        self.plain().data = content

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        standing: dict[int, GradientInUse] = {}

        def plain(one: GradientInUse) -> Tensor:
            standing[id(one.gradient)] = one
            return one.plain()

        # detach() and alias() wait, too: their results can be written.
        args, kwargs = tree_map_only(GradientInUse, plain, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda one: standing.get(id(one), one), function(*args, **kwargs))


class LentGradients:
    """The gradients that steps read, in the order in which they were lent. Each is held until compute has waited."""

    def __init__(self) -> None:
        self._read: dict[HostParameter, Tensor] = {}
        self._in_use: dict[HostParameter, GradientInUse] = {}
        self.nbytes: defaultdict[DeviceContext, int] = defaultdict(int)
        """Bytes of those on each GPU."""

    def __iter__(self) -> Iterator[HostParameter]:
        return iter(list(self._read))

    def get(self, held: HostParameter) -> Tensor | None:
        return self._read.get(held)

    def lend(self, held: HostParameter, gradient: Tensor) -> None:
        self.take_back(held)
        self._read[held] = gradient
        self.nbytes[held.context] += gradient.nbytes

    def lend_in_place(self, held: HostParameter, read: Tensor) -> None:
        """The same for a plain gradient that stays in ``p.grad``: its users wait for the step, which is queued."""
        assert held.parameter.grad is not None and held.updated is not None
        self.lend(held, read)
        wait = partial(held.context.transfers.wait, held.updated)
        self._in_use[held] = GradientInUse.of(local_of(held.parameter.grad), wait)
        put_gradient(held, self._in_use[held])

    def take_back(self, held: HostParameter) -> None:
        """Compute has waited for the step. Raises ``UsageError`` if the gradient was written before."""
        read, in_use = self._read.pop(held, None), self._in_use.pop(held, None)
        if read is not None:
            self.nbytes[held.context] -= read.nbytes
        if in_use is not None:
            gradient = held.parameter.grad
            if gradient is not None and local_of(gradient) is in_use:
                put_gradient(held, in_use.gradient)
            in_use.check()


def put_gradient(held: HostParameter, local: Tensor | None) -> None:
    """Set a parameter's gradient, or this process's part of it."""
    gradient = held.parameter.grad
    if local is not None and gradient is not None and is_distributed(gradient):
        set_local_part(gradient, local)
    else:
        held.parameter.grad = local
