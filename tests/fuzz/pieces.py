"""What random programs are written with, beside torch: autograd functions, hooks, and settings for a while."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from spillway import OperatorCall

CALLS = [0]
"""A counter of the module's. Whoever runs a program sets it to nothing before."""


COUNTS: dict[str, int] = {}


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def counted() -> Iterator[int]:
    """A generator object with a counter of its own."""
    number = 0
    while True:
        number += 1
        yield number


def bump() -> int:
    """Counts in this module."""
    CALLS[0] += 1
    return CALLS[0]


def stamp() -> None:
    """Has a counter as an attribute."""


stamp.count = 0  # type: ignore[attr-defined]


def remember(seen: list[int] = []) -> int:  # noqa: B006  (on purpose)
    """Counts in a default argument."""
    seen.append(1)
    return len(seen)


def counter_in_a_closure() -> Callable[[], int]:
    """A function that counts in a cell."""
    count = 0

    def call() -> int:
        nonlocal count
        count += 1
        return count

    return call


def push(seen: list[int]) -> int:
    """Counts in an argument."""
    seen.append(1)
    return len(seen)


def every_other() -> Callable[..., CheckpointPolicy]:
    """A policy of torch's kind, by the operator's name."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if len(str(operator)) % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def is_even(call: OperatorCall) -> bool:
    """A predicate, by the operator's name."""
    return len(call.name) % 2 == 0


class Hidden(list[Any]):
    """A list that Spillway does not open."""

    __slots__ = ()


class Hollow(torch.Tensor):
    """A wrapper without memory, which does not say of what it is made."""

    content: Tensor

    @staticmethod
    def __new__(cls, content: Tensor) -> Hollow:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, content.shape, dtype=content.dtype, device=content.device)
        wrapper.content = content
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Hollow, lambda each: each.content, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Hollow, func(*args, **kwargs))


class _Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return torch.sin(torch.tanh(self.up(h)) * 2)


def _tanh(h: Tensor) -> Tensor:
    return torch.tanh(h).sin() * 2 + h


def _scripted(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(what)


def scripted_linear(width: int) -> Any:
    """A scripted module."""
    return _scripted(_Linear(width))


scripted = _scripted(_tanh)


class Out(NamedTuple):
    h: Tensor
    rest: Any


class Doubled(torch.autograd.Function):
    """Keeps a number beside a tensor."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        ctx.scale = 2.0
        return h * h * ctx.scale  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return gradient * h * (2 * ctx.scale)  # type: ignore[no-any-return]


class Folded(torch.autograd.Function):
    """Two outputs, of which one is saved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        first, second = h.sin() * factor, h.cos() * factor
        ctx.save_for_backward(first, second)
        return first, second

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, None]:
        first, second = ctx.saved_tensors
        return one * second - two * first, None


class Written(torch.autograd.Function):
    """Writes its input."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        h.exp_().clamp_(max=4.0)
        ctx.mark_dirty(h)
        ctx.save_for_backward(h)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        return gradient * h * (h < 4)  # type: ignore[no-any-return]


class Rounded(torch.autograd.Function):
    """Saves nothing: a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return (h * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class Counting:
    """A forward hook that counts."""

    def __init__(self, count: list[int]) -> None:
        self.count = count

    def __call__(self, *_: Any) -> None:
        self.count[0] += 1


@contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
