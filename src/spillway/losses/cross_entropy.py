"""Cross entropy of many classes, some rows at a time.

NOTE [ What a loss holds ]

``torch.nn.functional.cross_entropy`` of logits ``(rows, classes)`` makes all their logarithms of probabilities, which
autograd saves, and in backward the gradient of these and of the logits: three times the logits, and a fourth time
where they are cast first. With a large vocabulary that is the most a step ever holds: 8192 rows of 128,256 classes are
4.2 GB in float32, each time.

But each row stands for itself, up to the one number that is made of all of them. So they are computed some rows at a
time: in forward only each row's loss is kept, and in backward the logarithms are computed again from the logits, which
are all that is saved. Beside the logits and their gradient, a few parts of the logarithms are there at a time.

The gradient is written where the logits were, part by part, where that is nobody's loss: see NOTE [ Whose the logits
are ]. So then all that is ever there beside the logits are a few parts.

The gradient of the logarithms is nothing but for one class of each row. So there is one piece of zeros for all parts,
in which these are set, and set back; what they are is told by the same kernel as ever, which is given one class.

NOTE [ Which rows go together ]

Kernels of a row add up its exponentials in an order that hangs on where it begins in memory, by the 16 bytes that they
read at once. Steps are of a multiple of 16 rows, so that each row begins at the same place among these as it would.

What is made of all rows is made of their losses by the same kernel as ever, which is given one class: it adds up the
same numbers in the same order.

NOTE [ Whose the logits are ]

A graph that goes through its backward once, and is not to be kept, has no more use for the logits when their gradient
is there. Whether anybody else has is seen by counts of who holds the tensor, the one that it is a view of, and their
memory: they must be what they are for logits of which all names were let go of, which is tried once. A user who holds
the output of a model, a second loss, an array or a view of the same memory raise a count, and the gradient has memory
of its own then.

Counts tell of names, and not of what is known without one. So the logits must be new memory of torch's own, made by an
operator that is known to have no more use for what it gave; a region that computes them again has one, and so has the
user of a leaf. Hooks put a handle in the place of what is saved: it must be one that keeps an alias, and that nobody
else has. What is not seen then is a copy on a stream of its own whose memory was only recorded there, and another
process that was sent memory of the device: nobody should have logits so.

What fails half-way leaves logits that are none any more. So it is written down before, and a second backward through
the same graph is refused.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.capture.handles import KeptHandle, pack_kept, unpack
from spillway.errors import RecomputeError, UsageError

_LEAST_BYTES = 64 << 20
"""What all logarithms take where there is something to be gained."""
_STEPS = 16
"""How many there are. On an H200, 512 rows of 32,000 or 128,256 classes keep it busy, and 128 do not. On an H100 256
do, but twice as many steps take the host twice as long: with 8192 rows of 32,000, longer than the device."""
_TOGETHER = 16
"""Rows of a step are a multiple of it. See NOTE [ Which rows go together ]."""
_NOBODY = -1
"""A class that no row has, where there is one class."""
_VIEWS = frozenset(
    (
        *("AliasBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2"),
        *("UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0"),
    )
)
_MAKERS = frozenset(
    (
        *("AddBackward0", "AddmmBackward0", "BaddbmmBackward0", "BmmBackward0", "DivBackward0", "LinearBackward0"),
        *("MmBackward0", "MulBackward0", "SubBackward0", "ToCopyBackward0"),
    )
)
"""By their nodes in the graph, operators that give new memory, and save nothing of what they give."""
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
    return _loss(logits, target, _How(computed_in, ignore_index, reduction, _counts_alone(logits)))


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


_Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Types:
    """What things are computed in."""

    logarithms: torch.dtype
    losses: torch.dtype
    """To which the logarithms are cast: autocast may do that."""


@dataclass(frozen=True, slots=True)
class _How:
    """How a loss is computed."""

    types: _Types
    ignore_index: int
    reduction: str
    alone: _Counts | None
    """The logits' counts if nobody else has a use for them; ``None``: that is not known."""
    tell: Callable[[_Counts], object] | None = None
    """Is told the logits' counts."""
    handles: list[Callable[[], KeptHandle | None]] = field(default_factory=list)
    """What hooks have made of what was saved, if there are any: the logits' comes first."""


def _loss(logits: torch.Tensor, target: torch.Tensor, how: _How) -> torch.Tensor:
    hooks: tuple[Callable[..., Any], Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or (how.alone is None and how.tell is None):
        found: torch.Tensor = _CrossEntropy.apply(logits, target, how)  # type: ignore[no-untyped-call]
        return found
    pack, handles = hooks[0], how.handles

    def packing(tensor: torch.Tensor) -> Any:
        handle = pack(tensor)
        handles.append(weakref.ref(handle) if type(handle) is KeptHandle else _none)
        return handle

    with saved_tensors_hooks(packing, hooks[1]):
        loss: torch.Tensor = _CrossEntropy.apply(logits, target, how)  # type: ignore[no-untyped-call]
    return loss


def _none() -> None:
    return None


def _counts_alone(logits: torch.Tensor) -> _Counts | None:
    """See NOTE [ Whose the logits are ]."""
    if not torch.is_grad_enabled() or not _is_new(logits):
        return None
    hooks: tuple[object, object] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[1] is not unpack:
        # They may hold what is saved, or something else in its place.
        return None
    return _tried(logits._base is not None, hooks is not None)


def _is_new(logits: torch.Tensor) -> bool:
    """Whether an operator has made it that has no more use for it."""
    node = logits.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _MAKERS


def _is_own(logits: torch.Tensor) -> bool:
    """Whether it lies in memory that is torch's own, and this process's."""
    storage = logits.untyped_storage()
    return logits.is_contiguous() and storage.resizable() and not (logits.device.type == "cpu" and storage.is_shared())


def _tried(is_view: bool, is_hooked: bool) -> _Counts | None:
    """Counts of logits of which all names were let go of, and which are saved as they are, or by a handle."""
    key = is_view, is_hooked
    if key not in _known:
        found: list[_Counts] = []
        # In a thread of its own there are nobody's modes, hooks or settings.
        thread = threading.Thread(target=_try, args=(is_view, is_hooked, found.append))
        thread.start()
        thread.join()
        if not found:
            return None
        _known[key] = found[0]
    return _known[key]


_known: dict[tuple[bool, bool], _Counts] = {}


def _try(is_view: bool, is_hooked: bool, tell: Callable[[_Counts], object]) -> None:
    if sys.gettrace() is not None or sys.getprofile() is not None:
        # They may hold what they see.
        return
    source = torch.zeros(2, 2, dtype=torch.float32, device="cpu", requires_grad=True)
    logits = source * 1
    if is_view:
        logits = logits.view(2, 2)
    target = torch.zeros(2, dtype=torch.int64, device="cpu")
    own = _Types(torch.float32, torch.float32)
    with saved_tensors_hooks(pack_kept, unpack) if is_hooked else nullcontext():
        loss = _loss(logits, target, _How(own, -100, "sum", None, tell))
    del logits
    torch.autograd.grad(loss, source)


def _counts(tensor: torch.Tensor, how: _How) -> _Counts | None:
    """``None``: a hook has made something else of it than an alias."""
    base, storage = tensor._base, tensor.untyped_storage()
    counts = [torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)]
    for each in (tensor, base):
        if each is not None:
            counts += each._use_count(), sys.getrefcount(each)  # type: ignore[attr-defined]
    if how.handles:
        handle = how.handles[0]()
        if handle is None:
            return None
        counts.append(sys.getrefcount(handle))
    return tuple(counts)


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
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, how: _How) -> torch.Tensor:
        types, ignore_index, reduction = how.types, how.ignore_index, how.reduction
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
        ctx.how, ctx.is_spent = how, False
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.is_spent:
            raise RecomputeError(
                "got a second backward through a cross entropy in rows whose first one has failed half-way, expected "
                "none, since the gradient is written where the logits were; run the forward again"
            )
        logits, target, weight = ctx.saved_tensors
        how = ctx.how
        counts = _counts(logits, how)
        types, ignore_index, reduction = how.types, how.ignore_index, how.reduction
        if how.tell is not None and counts is not None:
            how.tell(counts)
        if torch.is_grad_enabled():
            # Of a gradient that has one itself.
            return _differentiable(logits, target, gradient, how), None, None

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
            return of(logits, nothing.scatter(1, classes, theirs)).to(logits.dtype), None, None
        step = _rows_together(logits)
        is_alone = counts is not None and counts == how.alone and _is_own(logits)
        if is_alone and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.is_spent, found = True, logits.detach()
        else:
            found = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        nothing = torch.zeros(min(step, logits.shape[0]), logits.shape[1], dtype=types.logarithms, device=logits.device)
        for some, its_classes, its_own, into in zip(
            _parts(logits, step), *(torch.split(each, step) for each in (classes, theirs, found)), strict=True
        ):
            of_logarithms = nothing[: len(some)]
            of_logarithms.scatter_(1, its_classes, its_own)
            into.copy_(of(some, of_logarithms))
            of_logarithms.scatter_(1, its_classes, 0.0)
        ctx.is_spent = False
        return found, None, None


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
    how: _How,
) -> torch.Tensor:
    with torch.autocast(logits.device.type, enabled=False):
        logarithms = functional.log_softmax(logits.to(how.types.logarithms), 1).to(how.types.losses)
        loss = functional.nll_loss(logarithms, target, ignore_index=how.ignore_index, reduction=how.reduction)
        (found,) = torch.autograd.grad(loss, logits, gradient, create_graph=True)
    return found
