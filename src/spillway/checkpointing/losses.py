"""Memory-efficient cross-entropy, and its use in the models of transformers.

NOTE [ Memory of a loss ]

``torch.nn.functional.cross_entropy`` makes the log-probabilities of all classes, which autograd saves. Backward makes
their gradient and that of the logits: three times the size of the logits, and four times if the logits are cast first.

So the loss is computed in chunks of rows. Forward keeps one number per row and saves only the logits. Backward
recomputes the log-probabilities of a chunk.

The gradient of the log-probabilities is zero except for one class per row. One zero-filled buffer serves all chunks:
these elements are set, and then cleared. Their values come from torch's own kernel, called with one class.

NOTE [ Rows of a chunk ]

A kernel adds up the exponentials of a row in an order that depends on the row's address modulo 16 bytes. The rows of a
chunk are a multiple of 16, so each row keeps its alignment. The reduction over rows is done by torch's own kernel with
one class: it adds the same numbers in the same order.

NOTE [ Deferred casts ]

The loss functions of transformers cast the logits to float32 first. While one of them runs, a ``TorchFunctionMode``
defers this cast and passes views of the logits on. ``cross_entropy`` then casts each chunk. The gradient goes to the
logits themselves, with the same bits, since the cast would have cast it back.

If the cast logits have another use, its gradient would be added before it is cast back. Then, or if they are returned,
the function is called once more without the mode. A scripted function or another library's kernel would see the
stand-in. So the mode is only for functions that are known, by name, to call only torch's functions. If what they call
was replaced (``functional.cross_entropy = mine``), they run unchanged.

NOTE [ Only during a call ]

A model of transformers looks up its loss function in an attribute, if the user has set it. The replacement is set there
only while the model is called in training. So copies and saved models do not have it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import Module, functional
from torch.overrides import TorchFunctionMode

from spillway._torch import TorchDispatchMode, has_function_modes, is_batched, is_transformed, tree_leaves
from spillway.errors import UsageError

_LEAST_BYTES = 64 << 20
"""Smaller log-probabilities are not worth it."""
_CHUNKS = 16
"""On an H200, chunks of 512 rows of 32,000 or 128,256 classes keep the GPU busy, chunks of 128 do not. On an H100, 256
rows do. But with twice as many chunks of 8192 rows and 32,000 classes, the CPU launches kernels too slowly."""
_ALIGNMENT = 16
"""Rows of a chunk are a multiple of it. See NOTE [ Rows of a chunk ]."""
_NO_CLASS = -1
"""The ignored class where there is one class."""
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_aten = torch.ops.aten


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.cross_entropy``, bit for bit, in little more memory than the logits.

    Args:
        logits: floating point, of shape ``(rows, classes)``.
        target: class of each row, of shape ``(rows,)``.
        ignore_index: rows of this class do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        dtype: compute as if the logits were cast to it first, as in ``cross_entropy(logits.float(), ...)``; gradients
            are cast back. ``None``: the dtype of the logits or of autocast.

    Returns:
        The loss: a number, or of shape ``(rows,)`` for ``"none"``.

    Raises:
        UsageError: for other shapes, or another reduction.

    Example:
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 2, -100, 3])
        >>> torch.equal(cross_entropy(logits, target), functional.cross_entropy(logits, target))
        True
    """
    for name, given in (("logits", logits), ("target", target)):
        if not isinstance(given, torch.Tensor):
            raise UsageError(f"{name}: got {given!r:.200}, expected a tensor")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"dtype: got {dtype!r}, expected a floating point type of torch's, or None")
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise UsageError(
            f"got logits of shape {tuple(logits.shape)} and a target of {tuple(target.shape)}, expected (rows, "
            f"classes) and (rows,); flatten them: logits.flatten(0, 1), target.flatten()"
        )
    if reduction not in _REDUCTIONS:
        raise UsageError(f"reduction: got {reduction!r}, expected one of {', '.join(map(repr, _REDUCTIONS))}")
    dtypes = None
    rows, classes = logits.shape
    if _is_worth_it(rows, classes, logits.dtype if dtype is None else dtype) and _is_plain(logits, target):
        dtypes = _dtypes_of(logits, target, dtype)
    if dtypes is None:
        cast = logits if dtype is None else logits.to(dtype)
        return functional.cross_entropy(cast, target, ignore_index=ignore_index, reduction=reduction)
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, dtypes, ignore_index, reduction)  # type: ignore[no-untyped-call]
    return loss


def _is_worth_it(rows: int, classes: int, dtype: torch.dtype) -> bool:
    return rows * classes * dtype.itemsize >= _LEAST_BYTES and rows >= 4 * _ALIGNMENT


def _is_plain(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether only autograd records what is done with them: no subclass, transform, tracing or compilation."""
    return (
        all(type(each) is torch.Tensor for each in (logits, target))
        and target.dtype is torch.int64
        and not is_transformed()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


class _Dtypes(NamedTuple):
    logarithms: torch.dtype
    losses: torch.dtype
    """Autocast may cast the log-probabilities to another one."""


def _dtypes_of(logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype | None) -> _Dtypes | None:
    """The dtypes that torch would use; ``None`` if they cannot be told."""
    device = logits.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        own = logits.dtype if dtype is None else dtype
        return _Dtypes(own, own)
    with torch.no_grad(), _AutocastProbe() as probe:
        functional.cross_entropy(logits[:1] if dtype is None else logits[:1].to(dtype), torch.zeros_like(target[:1]))
    known = len(probe.logarithms) == len(probe.losses) == 1 and not probe.is_fused
    return _Dtypes(*probe.logarithms, *probe.losses) if known and dtype in (None, *probe.logarithms) else None


class _AutocastProbe(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the dtypes of a loss under autocast, whose lists of operators depend on the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logarithms: list[torch.dtype] = []
        self.losses: list[torch.dtype] = []
        self.is_fused = False
        """Whether a kernel casts the logits, and adds in another order."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._log_softmax.default:
            self.logarithms.append(args[0].dtype)
            self.is_fused |= bool(args[2])
        elif func is _aten.nll_loss_forward.default:
            self.losses.append(args[0].dtype)
        return func(*args, **kwargs or {})


def _rows_of_a_chunk(logits: torch.Tensor) -> int:
    return -(-len(logits) // (_CHUNKS * _ALIGNMENT)) * _ALIGNMENT


def _in_chunks(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Chunks of rows. Those of the logits have the layout that the kernels would give all of them."""
    parts = (torch.split(each, _rows_of_a_chunk(logits)) for each in (logits, *others))
    # Torch calls a single row dense wherever it lies.
    is_dense = logits.is_contiguous()
    for chunk, *rest in zip(*parts, strict=True):
        yield chunk if is_dense else chunk.clone(memory_format=torch.contiguous_format), *rest


class _CrossEntropy(torch.autograd.Function):
    """See NOTE [ Memory of a loss ]."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, dtypes: _Dtypes, ignore_index: int, reduction: str
    ) -> torch.Tensor:
        one_class = torch.empty(logits.shape[0], 1, dtype=dtypes.losses, device=logits.device)
        for chunk, its_target, losses in _in_chunks(logits, target, one_class.squeeze(1)):
            logarithms = _log_softmax(chunk, dtypes.logarithms).to(dtypes.losses)
            losses.copy_(_aten.nll_loss_forward(logarithms, its_target, None, 0, ignore_index)[0])
        one_class.neg_()  # since nll_loss negates its input
        first = _as_one_class(target, ignore_index)
        loss, weight = _aten.nll_loss_forward(one_class, first, None, _REDUCTIONS[reduction], _NO_CLASS)
        ctx.save_for_backward(logits, target, weight)
        ctx.how = dtypes, ignore_index, reduction
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight = ctx.saved_tensors
        dtypes, ignore_index, reduction = ctx.how
        if torch.is_grad_enabled() or is_batched(gradient):
            # This gradient is to have a gradient itself; or vmap cannot write a batch of gradients into one buffer.
            keeps_graph = torch.is_grad_enabled()
            with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
                # Not of the logits themselves, whose hooks would be called once more.
                alias = logits.view_as(logits)
                logarithms = functional.log_softmax(alias.to(dtypes.logarithms), 1).to(dtypes.losses)
                loss = functional.nll_loss(logarithms, target, ignore_index=ignore_index, reduction=reduction)
                (found,) = torch.autograd.grad(loss, alias, gradient, create_graph=keeps_graph)
            return found, None, None, None, None

        first = _as_one_class(target, ignore_index)
        one_class = torch.empty(logits.shape[0], 1, dtype=dtypes.losses, device=logits.device)
        # The gradient of each row's log-probability of its class.
        of_class = _aten.nll_loss_backward(
            gradient, one_class, first, None, _REDUCTIONS[reduction], _NO_CLASS, weight
        ).to(dtypes.logarithms)
        classes = target.masked_fill(first == _NO_CLASS, 0).unsqueeze(1)

        found = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        zeros = torch.zeros(_rows_of_a_chunk(logits), logits.shape[1], dtype=dtypes.logarithms, device=logits.device)
        for chunk, its_classes, its_gradient, into in _in_chunks(logits, classes, of_class, found):
            of_logarithms = zeros[: len(chunk)]
            of_logarithms.scatter_(1, its_classes, its_gradient)
            logarithms = _log_softmax(chunk, dtypes.logarithms)
            into.copy_(_aten._log_softmax_backward_data(of_logarithms, logarithms, 1, dtypes.logarithms))
            of_logarithms.scatter_(1, its_classes, 0.0)
        return found, None, None, None, None


def _as_one_class(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The targets of the same rows if there were one class."""
    return torch.zeros_like(target).masked_fill_(target == ignore_index, _NO_CLASS)


def _log_softmax(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The operator below autocast, which must not cast again.
    logarithms: torch.Tensor = _aten._log_softmax(logits.to(dtype), 1, False)
    return logarithms


# The loss functions of transformers.

_LIBRARY = "transformers.modeling_utils"
_KNOWN = {("transformers.loss.loss_utils", name) for name in ("ForCausalLMLoss", "ForMaskedLMLoss")}
"""See NOTE [ Deferred casts ]. By name, since only integrations import a trainer."""
_NAME, _PLACE = "loss_function", "_loss_function"
_VIEWS = {getattr(torch.Tensor, name) for name in ("contiguous", "flatten", "reshape", "squeeze", "unsqueeze", "view")}
_METADATA = {getattr(torch.Tensor, name) for name in ("dim", "numel", "size")}
_METADATA |= {getattr(torch.Tensor, name).__get__ for name in ("device", "ndim", "requires_grad", "shape")}
"""Functions of a tensor whose result does not depend on the cast."""
_SIGNATURE = inspect.signature(functional.cross_entropy)
_DEFAULTS = {name: each.default for name, each in _SIGNATURE.parameters.items() if each.default is not each.empty}


def own_losses(model: Module) -> list[OwnLoss]:
    """Loss functions of the outermost modules of a model that have transformers' ``loss_function``."""
    found = [each for each in model.modules() if _has_own(each)]
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    return [OwnLoss(each) for each in found if id(each) not in inner]


def _has_own(module: Module) -> bool:
    found = getattr(type(module), _NAME, None)
    return isinstance(found, property) and getattr(found.fget, "__module__", None) == _LIBRARY


class OwnLoss:
    """The ``loss_function`` of a module of transformers. See NOTE [ Only during a call ]."""

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)
        self.kind = type(module).__name__
        """Class of the module, for reports."""
        self.is_in_rows = False
        """Whether the last loss was computed in chunks of rows."""

    @contextmanager
    def in_rows(self, spare: int) -> Iterator[None]:
        """Inside, compute the loss in chunks of rows, unless the user has set a loss function, or torch's own fits.

        ``spare`` is the number of bytes that are free for it.
        """
        module = self._module()
        if module is None or hasattr(module, _PLACE):
            yield
            return

        def replacement(*args: Any, **kwargs: Any) -> Any:
            # The library's choice. Asked for only when it is called, since transformers may warn.
            set_here = {name: vars(module).pop(name) for name in (_PLACE,) if name in vars(module)}
            try:
                function = getattr(module, _NAME)
            finally:
                vars(module).update(set_here)
            loss, self.is_in_rows = loss_in_rows(function, spare, *args, **kwargs)
            return loss

        self.is_in_rows = False
        vars(module)[_PLACE] = replacement
        try:
            yield
        finally:
            if vars(module).get(_PLACE) is replacement:
                del vars(module)[_PLACE]


def loss_in_rows(function: Callable[..., Any], spare: int, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """The result of a loss function, and whether its cross-entropy was computed in chunks of rows.

    If it needs no more than ``spare`` bytes, it runs unchanged. See NOTE [ Deferred casts ].
    """
    name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name not in _KNOWN or not torch.is_grad_enabled() or has_function_modes() or torch.compiler.is_compiling():
        return function(*args, **kwargs), False
    if _is_replaced(function):
        return function(*args, **kwargs), False
    try:
        with _DeferredCast(spare) as deferred:
            loss = function(*args, **kwargs)
        if deferred.has_any(loss):
            raise _OtherUse
    except _OtherUse:
        return function(*args, **kwargs), False
    return loss, deferred.is_used


def _is_replaced(function: Any) -> bool:
    """Whether it only has the library's name, or calls what was put in the place of the library's or torch's."""
    library, torchs = vars(sys.modules[function.__module__]), vars(functional)
    helper = library.get("fixed_cross_entropy", function)
    expected = ((function, library), (helper, library), (functional.cross_entropy, torchs))
    return any(getattr(each, "__globals__", None) is not home for each, home in expected)


class _OtherUse(BaseException):
    """The deferred cast is needed. A ``BaseException``, so that the loss function does not catch it."""


class _DeferredCast(TorchFunctionMode):
    """Defers the cast of the logits while a loss function runs."""

    def __init__(self, spare: int) -> None:
        super().__init__()
        self._spare = spare
        self._stand_ins: dict[int, torch.Tensor] = {}
        """Tensors in place of the cast logits and of views of them, by ``id``."""
        self.is_used = False
        """Whether a cross-entropy was computed in chunks."""

    def has_any(self, values: Any) -> bool:
        """Whether the cast logits are among the values."""
        return any(id(leaf) in self._stand_ins for leaf in tree_leaves(values))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_cast = bool(args) and id(args[0]) in self._stand_ins
        if self.has_any((args[1:] if is_cast else args, kwargs)):
            raise _OtherUse
        is_first_cast = func is torch.Tensor.float and len(args) == 1 and not kwargs and not self._stand_ins
        if is_first_cast and self._is_worth_it(args[0], torch.float32, cast=True):
            return self._stand_in(args[0].view_as(args[0]))
        if not is_cast and func is functional.cross_entropy and args and self._is_worth_it(args[0], args[0].dtype):
            return self._in_chunks(None, args, kwargs)
        if not is_cast or func in _METADATA:
            return func(*args, **kwargs)
        if not self.is_used and func is functional.cross_entropy:
            return self._in_chunks(torch.float32, args, kwargs)
        if not self.is_used and func in _VIEWS:
            return self._stand_in(func(*args, **kwargs))
        raise _OtherUse

    def _in_chunks(self, dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        self.is_used = True
        given = {**_DEFAULTS, **_SIGNATURE.bind(*args, **kwargs).arguments}
        logits, target = given.pop("input"), given.pop("target")
        taken = {name: given.pop(name) for name in ("ignore_index", "reduction")}
        fits = logits.dim() == 2 and target.shape == logits.shape[:1] and taken["reduction"] in _REDUCTIONS
        if not fits or target.is_floating_point() or any(value != _DEFAULTS[name] for name, value in given.items()):
            raise _OtherUse
        return cross_entropy(logits, target, dtype=dtype, **taken)

    def _is_worth_it(self, logits: torch.Tensor, dtype: torch.dtype, *, cast: bool = False) -> bool:
        if type(logits) is not torch.Tensor or not logits.requires_grad or logits.dim() < 2:
            return False
        rows, classes = logits.numel() // max(logits.shape[-1], 1), logits.shape[-1]
        return (
            # A cast makes other logits dense, which their views are not.
            logits.is_contiguous()
            and (not cast or logits.dtype.itemsize < dtype.itemsize)
            # Torch holds the cast logits, the log-probabilities, and the gradients of both.
            and 4 * logits.numel() * dtype.itemsize > self._spare
            and _is_worth_it(rows, classes, dtype)
        )

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        self._stand_ins[id(tensor)] = tensor
        return tensor
