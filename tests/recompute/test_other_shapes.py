"""Functions whose later calls have other shapes, dtypes or constants than the ones that were learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import spillway


class Block(torch.nn.Module):
    """Its operators are the same ones in each call, but for their arguments."""

    k = 3
    dtype = torch.float16
    flag = True

    def __init__(self, compute: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self._compute(self, x, w)


def of_a_view_of_an_input(block: Any, x: Tensor, w: Tensor) -> Tensor:
    t = x[:, : block.k].sin()
    kept = torch.exp(t.sum(1))
    return (torch.tanh(x * w) * t.shape[1]).cos() * kept[:, None]


def of_a_view(block: Any, x: Tensor, w: Tensor) -> Tensor:
    t = (x * w)[:, : block.k].sin()
    kept = torch.exp(t.sum(1))
    return torch.tanh(x * w).cos() * t.shape[1] * kept[:, None]


def of_a_product(block: Any, x: Tensor, w: Tensor) -> Tensor:
    t = (x * w) @ torch.ones(8, block.k)
    kept = torch.exp(t.sum(1))
    return torch.tanh(x * w).cos() * t.size(1) * kept[:, None]


def of_a_cast(block: Any, x: Tensor, w: Tensor) -> Tensor:
    t = (x * w).to(block.dtype)
    kept = torch.exp(t.float().sum(1))
    return torch.tanh(x * w).cos() * (2 if t.dtype == torch.float64 else 1) * kept[:, None]


def of_a_flag(block: Any, x: Tensor, w: Tensor) -> Tensor:
    t = (x * w).sum(1, keepdim=block.flag)
    kept = torch.exp(t.sum())
    return torch.tanh(x * w).cos() * t.dim() * kept


COMPUTED = (of_a_view_of_an_input, of_a_view, of_a_product, of_a_cast, of_a_flag)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("compute", COMPUTED, ids=lambda each: each.__name__)
def test_a_replay_sees_the_shapes_of_its_own_call(
    compute: Callable[[Any, Tensor, Tensor], Tensor], needs_grad: bool
) -> None:
    block, w = Block(compute), torch.randn(8, 8, requires_grad=True)
    how = spillway.Recompute(save=["aten::exp"])
    for call in range(7):
        if call >= 3:
            block.k, block.dtype, block.flag = call % 3 + 2, (torch.float64, torch.float16)[call % 2], bool(call % 2)
        x = torch.randn(8, 8, requires_grad=needs_grad)
        (wanted,) = torch.autograd.grad(block(x, w).sum(), w)
        (found,) = torch.autograd.grad(how(block, x, w).sum(), w)
        assert torch.equal(found, wanted), call


def test_two_storages_over_one_memory_share_it() -> None:
    w = torch.randn(6, 6, requires_grad=True)

    def compute(a: Tensor, b: Tensor) -> Tensor:
        kept = torch.exp(b @ w)
        a.mul_(1.5)
        return torch.sin(b @ w) * torch.tanh(a @ w) * kept

    def arguments(*, shared: bool) -> tuple[Tensor, Tensor]:
        memory = numpy.linspace(0, 1, 48, dtype=numpy.float32).reshape(8, 6).copy()
        a, b = torch.from_numpy(memory[:6]), torch.from_numpy(memory[2:])
        return a, b if shared else b.clone()

    for shared in (False, True, True):
        (wanted,) = torch.autograd.grad(compute(*arguments(shared=shared)).sum(), w)
        (found,) = torch.autograd.grad(spillway.recompute(compute, *arguments(shared=shared)).sum(), w)
        assert torch.equal(found, wanted)
