"""Cross entropy of many classes, some rows at a time.

NOTE [ What a loss holds ]

``torch.nn.functional.cross_entropy`` of logits ``(rows, classes)`` makes all their logarithms of probabilities, which
autograd saves, and in backward the gradient of these and of the logits: three times the logits, and a fourth time
where they are cast first. With a large vocabulary that is the most a step ever holds: 8192 rows of 128,256 classes are
4.2 GB in float32, each time.

But each row stands for itself, up to the one number that is made of all of them. So they are computed some rows at a
time: in forward only each row's loss is kept, and in backward the logarithms are computed again from the logits, which
are all that is saved. Beside the logits and their gradient, a few parts of the logarithms are there at a time.

The gradient of the logarithms is nothing but for one class of each row. So there is one piece of zeros for all parts,
in which these are set, and set back; what they are is told by the same kernel as ever, which is given one class.

NOTE [ Which rows go together ]

Kernels of a row add up its exponentials in an order that hangs on where it begins in memory, by the 16 bytes that they
read at once. Steps are of a multiple of 16 rows, so that each row begins at the same place among these as it would.

What is made of all rows is made of their losses by the same kernel as ever, which is given one class: it adds up the
same numbers in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.errors import UsageError

_LEAST_BYTES = 64 << 20
"""What all logarithms take where there is something to be gained."""
_STEPS = 16
"""How many there are. On an H200, 512 rows of 32,000 or 128,256 classes keep it busy, and 128 do not. On an H100 256
do, but twice as many steps take the host twice as long: with 8192 rows of 32,000, longer than the device."""
_TOGETHER = 16
"""Rows of a step are a multiple of it. See NOTE [ Which rows go together ]."""
_NOBODY = -1
"""A class that no row has, where there is one class."""
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_aten = torch.ops.aten


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What ``torch.nn.functional.cross_entropy`` gives, bit for bit, in little more memory than the logits take.

    See NOTE [ What a loss holds ] in the source. It takes a forward of the logarithms more, which is a small part of
    what the logits themselves take to compute.

    Args:
        logits: floating, of shape ``(rows, classes)``.
        target: class of each row, of shape ``(rows,)``.
        ignore_index: rows of this class do not count.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        dtype: computes as if the logits had been cast to it first, as ``cross_entropy(logits.float(), ...)`` does, in
            which case gradients are cast back. ``None``: in their own, or the one that autocast says.

    Returns:
        The loss: a number, or of shape ``(rows,)`` for ``"none"``.

    Raises:
        UsageError: if logits or target are of another shape, or the reduction is not one of these.

    Example:
        >>> logits, target = torch.randn(4, 10), torch.tensor([1, 2, -100, 3])
        >>> torch.equal(cross_entropy(logits, target), functional.cross_entropy(logits, target))
        True
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise UsageError(
            f"got logits of shape {tuple(logits.shape)} and a target of {tuple(target.shape)}, expected (rows, "
            f"classes) and (rows,); flatten them: logits.flatten(0, 1), target.flatten()"
        )
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction: got {reduction!r}, expected one of {', '.join(map(repr, REDUCTIONS))}")
    computed_in = None
    rows, classes = logits.shape
    if gains(rows, classes, logits.dtype if dtype is None else dtype) and _is_plain(logits, target):
        computed_in = _types_of(logits, target, dtype)
    if computed_in is None:
        cast = logits if dtype is None else logits.to(dtype)
        return functional.cross_entropy(cast, target, ignore_index=ignore_index, reduction=reduction)
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, computed_in, ignore_index, reduction)  # type: ignore[no-untyped-call]
    return loss


def gains(rows: int, classes: int, dtype: torch.dtype) -> bool:
    """Whether there are enough of them, which are computed in this type, for something to be gained."""
    return rows * classes * dtype.itemsize >= _LEAST_BYTES and rows >= 4 * _TOGETHER


def _is_plain(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether nobody but autograd looks at what is done with them."""
    return (
        all(type(each) is torch.Tensor for each in (logits, target))
        and target.dtype is torch.int64
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
    )


@dataclass(frozen=True, slots=True)
class _Types:
    """What things are computed in."""

    logarithms: torch.dtype
    losses: torch.dtype
    """To which the logarithms are cast: autocast may do that."""


def _types_of(logits: torch.Tensor, target: torch.Tensor, dtype: torch.dtype | None) -> _Types | None:
    """``None`` if they are not known."""
    kind = logits.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        own = logits.dtype if dtype is None else dtype
        return _Types(own, own)
    with torch.no_grad(), _Seeing() as seen:
        # Of any class that there is.
        functional.cross_entropy(logits[:1] if dtype is None else logits[:1].to(dtype), torch.zeros_like(target[:1]))
    first = dtype in (None, *seen.logarithms[:1])
    return _Types(*seen.logarithms, *seen.losses) if first and seen.is_as_ever else None


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a loss is computed in under autocast, which devices have lists of their own for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.logarithms: list[torch.dtype] = []
        self.losses: list[torch.dtype] = []
        self._is_fused = False
        """Whether logits are cast by the kernel, which adds in another order."""

    @property
    def is_as_ever(self) -> bool:
        """Whether there is one of each."""
        return len(self.logarithms) == len(self.losses) == 1 and not self._is_fused

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _aten._log_softmax.default:
            self.logarithms.append(args[0].dtype)
            self._is_fused |= bool(args[2])
        elif func is _aten.nll_loss_forward.default:
            self.losses.append(args[0].dtype)
        return func(*args, **kwargs or {})


def _rows_together(logits: torch.Tensor) -> int:
    return -(-len(logits) // (_STEPS * _TOGETHER)) * _TOGETHER


def _parts(logits: torch.Tensor, step: int) -> Iterator[torch.Tensor]:
    """Some rows at a time, laid out as the kernels would have all of them: a single row is dense wherever it lies."""
    is_dense = logits.is_contiguous()
    for some in torch.split(logits, step):
        yield some if is_dense else some.clone(memory_format=torch.contiguous_format)


class _CrossEntropy(torch.autograd.Function):
    """See NOTE [ What a loss holds ]."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, types: _Types, ignore_index: int, reduction: str
    ) -> torch.Tensor:
        step = _rows_together(logits)
        one_class = torch.empty(logits.shape[0], 1, dtype=types.losses, device=logits.device)
        for some, its_target, losses in zip(
            _parts(logits, step), torch.split(target, step), torch.split(one_class.squeeze(1), step), strict=True
        ):
            logarithms = _log_softmax(some, types.logarithms).to(types.losses)
            losses.copy_(_aten.nll_loss_forward(logarithms, its_target, None, 0, ignore_index)[0])
        # It takes them with their sign changed.
        one_class.neg_()
        first = _first(target, ignore_index)
        loss, weight = _aten.nll_loss_forward(one_class, first, None, REDUCTIONS[reduction], _NOBODY)
        ctx.save_for_backward(logits, target, weight)
        ctx.how = types, ignore_index, reduction
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, weight = ctx.saved_tensors
        types, ignore_index, reduction = ctx.how
        if torch.is_grad_enabled():
            # Of a gradient that has one itself.
            return _differentiable(logits, target, gradient, *ctx.how), None, None, None, None

        first = _first(target, ignore_index)
        one_class = torch.empty(logits.shape[0], 1, dtype=types.losses, device=logits.device)
        # The gradient of each row's logarithm of its class.
        theirs = _aten.nll_loss_backward(gradient, one_class, first, None, REDUCTIONS[reduction], _NOBODY, weight).to(
            types.logarithms
        )
        classes = target.masked_fill(first == _NOBODY, 0).unsqueeze(1)

        def of(some: torch.Tensor, of_logarithms: torch.Tensor) -> torch.Tensor:
            logarithms = _log_softmax(some, types.logarithms)
            found: torch.Tensor = _aten._log_softmax_backward_data(of_logarithms, logarithms, 1, types.logarithms)
            return found

        if _is_batched(gradient):
            # Several at once can be written into no memory of one.
            nothing = torch.zeros(logits.shape, dtype=types.logarithms, device=logits.device)
            return of(logits, nothing.scatter(1, classes, theirs)).to(logits.dtype), None, None, None, None
        step = _rows_together(logits)
        found = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        nothing = torch.zeros(min(step, logits.shape[0]), logits.shape[1], dtype=types.logarithms, device=logits.device)
        for some, its_classes, its_own, into in zip(
            _parts(logits, step), *(torch.split(each, step) for each in (classes, theirs, found)), strict=True
        ):
            of_logarithms = nothing[: len(some)]
            of_logarithms.scatter_(1, its_classes, its_own)
            into.copy_(of(some, of_logarithms))
            of_logarithms.scatter_(1, its_classes, 0.0)
        return found, None, None, None, None


def _first(target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The same rows, with one class."""
    return torch.zeros_like(target).masked_fill_(target == ignore_index, _NOBODY)


def _is_batched(gradient: torch.Tensor) -> bool:
    functorch: Any = torch._C._functorch
    return bool(functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient))


def _log_softmax(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # What is below autocast, which is not to have its say once more.
    logarithms: torch.Tensor = _aten._log_softmax(logits.to(dtype), 1, False)
    return logarithms


def _differentiable(
    logits: torch.Tensor,
    target: torch.Tensor,
    gradient: torch.Tensor,
    types: _Types,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    with torch.autocast(logits.device.type, enabled=False):
        logarithms = functional.log_softmax(logits.to(types.logarithms), 1).to(types.losses)
        loss = functional.nll_loss(logarithms, target, ignore_index=ignore_index, reduction=reduction)
        (found,) = torch.autograd.grad(loss, logits, gradient, create_graph=True)
    return found
