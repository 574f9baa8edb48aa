"""Odd functions, and odd things between their calls, which were once wrong."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from recompute.regions import HiddenList, Regions, leaf, one_place
from spillway.checkpointing.selectors import Planned
from spillway.errors import RecomputeError
from spillway.types import Decision
from support import assert_identical, grads

pytestmark = one_place

hows = pytest.mark.parametrize(
    "how", [{}, {"save": "pointwise"}, {"save": "matmul"}, {"offload": ["inputs", "pointwise", "random"]}], ids=str
)
Run = Callable[..., Any]


def plainly(function: Run, *args: Any) -> Any:
    return function(*args)


def recomputed(regions: Regions, **how: Any) -> Run:
    return lambda function, *args: spillway.recompute(function, *args, session=regions.session, **how)


@hows
def test_a_cast_that_is_older_than_its_leaf_is_what_it_was(regions: Regions, how: dict[str, Any]) -> None:
    def step(call: Run) -> list[Tensor]:
        weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
        cast = weight.to(torch.bfloat16)
        with torch.no_grad():
            weight.mul_(2)
        x = leaf(4, 16)
        call(lambda x: (x.bfloat16() @ cast).sin().exp(), x * 1).float().sum().backward()
        return [*grads(x, weight)]

    for _ in range(5):
        assert_identical(step(recomputed(regions, **how)), step(plainly))


@hows
def test_steps_within_one_autocast(regions: Regions, how: dict[str, Any]) -> None:
    """Autocast remembers the cast of the first one, whatever becomes of the weight."""

    def steps(call: Run) -> list[Tensor]:
        weight, x = nn.Parameter(torch.ones(16, 16) / 16), leaf(4, 16)
        found = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                x.grad = weight.grad = None
                call(lambda x: functional.linear(x, weight).sin().exp(), x * 1).float().sum().backward()
                found += grads(x, weight)
                with torch.no_grad():
                    assert weight.grad is not None
                    weight.sub_(weight.grad)
        return found

    for _ in range(4):
        assert_identical(steps(recomputed(regions, **how)), steps(plainly))


def test_what_one_plan_kept_is_tried_before_another_computes_it(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        # A kernel that is no operator.
        ctypes.c_float.from_address(y.untyped_storage().data_ptr()).value = 0.5
        return y.exp().tanh()

    def step(call: Run) -> list[Tensor]:
        x = leaf()
        call(function, x * 1).sum().backward()
        return [*grads(x)]

    kept, none = Planned({0: ("aten::sin.default", Decision.KEEP)}), Planned({})
    for plan in (kept, kept, kept, none, none, none, kept, none):
        assert_identical(step(recomputed(regions, policy=plan)), step(plainly))


@hows
def test_what_a_function_saved_before_it_failed_can_be_gone_through(regions: Regions, how: dict[str, Any]) -> None:
    fails = False

    def step(call: Run) -> list[Tensor]:
        x, kept = leaf(), HiddenList()

        def function(x: Tensor) -> Tensor:
            y = x.sin()
            z = y.exp().tanh()
            kept.append(z)
            if fails:
                raise ValueError
            return (y.cos() * z).sigmoid()

        try:
            call(function, x * 1)
        except ValueError:
            assert fails
        kept[0].sum().backward()
        return [*grads(x)]

    for number in range(6):
        fails = number >= 4
        assert_identical(step(recomputed(regions, **how)), step(plainly))


class Masked(nn.Module):
    """What it reads of a buffer is hidden by what comes of it; of another one it reads nothing."""

    mask: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(2, 5, 16))
        self.register_buffer("count", torch.zeros(()))
        self.catches = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        try:
            y = x + self.mask
        except RecomputeError:
            if not self.catches:
                raise
            y = x * 1
        return y.sin(), y.relu()


@hows
@pytest.mark.parametrize("what", ["nothing", "count", "mask", "mask, caught"])
def test_a_buffer_that_is_written_before_backward(regions: Regions, what: str, how: dict[str, Any]) -> None:
    block = Masked()

    def step(call: Run, write: bool) -> list[Tensor]:
        block.mask.zero_()
        x = leaf()
        first, second = call(block, x * 1)
        if write and "mask" in what:
            block.mask[x.detach() < 0] = -1.0
        elif write and what == "count":
            block.count += 1
        (first.sum() + second.sum()).backward()
        return [*grads(x)]

    for number in range(6):
        block.catches = number >= 3 and "caught" in what
        if number < 3 or "mask" not in what or "pointwise" in str(how):
            # Where all is preserved, nothing reads it again.
            assert_identical(step(recomputed(regions, **how), number >= 3), step(plainly, number >= 3))
        else:
            with pytest.raises(RecomputeError, match="written in place"):
                step(recomputed(regions, **how), True)


@hows
def test_one_tensor_that_is_given_several_times(regions: Regions, how: dict[str, Any]) -> None:
    """Modules ask whether their arguments are one."""
    attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def step(call: Run, same: bool) -> list[Tensor]:
        x = leaf()
        y = x * 1
        others = [y, y] if same else [y * 2, y * 3]
        call(lambda *args: attention(*args, need_weights=False)[0], y, *others).square().sum().backward()
        found = [*grads(x, *attention.parameters())]
        attention.zero_grad()
        return found

    for number in range(8):
        same = number % 4 < 2
        assert_identical(step(recomputed(regions, **how), same), step(plainly, same))


@hows
def test_threads_that_draw_again_at_once(regions: Regions, how: dict[str, Any]) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * torch.bernoulli(torch.full_like(x, 0.5))).sin() + x
        return x

    def step(call: Run) -> list[Tensor]:
        leaves = [leaf(200, 200, seed=seed) for seed in range(4)]
        losses = []
        for seed, x in enumerate(leaves):
            torch.manual_seed(seed)
            losses.append(call(function, x * 1).sum())
        errors: list[BaseException] = []

        def backward(loss: Tensor) -> None:
            try:
                loss.backward()
            except RecomputeError as error:
                errors.append(error)

        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        return [torch.get_rng_state(), *grads(*leaves)]

    call = recomputed(regions, **how)
    for _ in range(3):
        x = leaf(200, 200)
        call(function, x * 1).sum().backward()
    for _ in range(3):
        assert_identical(step(call), step(plainly))
