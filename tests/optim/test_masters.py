"""Parameters of a narrow type train bit for bit as in a loop that keeps ``float32`` copies of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import spillway
from optim.plain_loop import NARROW, NARROW_KINDS, pair, windows
from optim.support import assert_same_values, batches, is_away, train, wide
from spillway import OffloadedOptimizer
from support import pairwise

CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2}),
]


@pytest.mark.parametrize(
    ("session", "dtype", "optimizer_class", "defaults", "sizes", "max_norm"),
    [
        (*kind, *way, sizes, max_norm)
        for kind, way, sizes, max_norm in pairwise(
            NARROW_KINDS, CLASSES, [[1, 1, 1, 1], [3, 3, 3], [1, 4, 1, 2, 1]], [None, 0.05]
        )
    ],
    indirect=["session"],
)
def test_accumulation_steps_of_any_size(
    dtype: torch.dtype,
    optimizer_class: type[Optimizer],
    defaults: dict[str, Any],
    sizes: list[int],
    max_norm: float | None,
    session: spillway.Session,
) -> None:
    both = pair(dtype, session, optimizer_class, **defaults)
    for window in windows(dtype, sizes):
        for batch in window:
            both.backward(batch)
        assert all(is_away(one.grad) for one in both.model.parameters())
        if max_norm is not None:
            both.assert_same_norm(max_norm)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@pytest.mark.parametrize(
    ("session", "dtype", "factor", "divides", "sizes"),
    [(*kind, *row) for kind, *row in pairwise(NARROW_KINDS, [0.1, torch.tensor(0.7)], [False, True], [[1, 1], [1, 3]])],
    indirect=["session"],
)
def test_gradients_that_are_scaled_by_hand(
    dtype: torch.dtype, factor: float | Tensor, divides: bool, sizes: list[int], session: spillway.Session
) -> None:
    both = pair(dtype, session, lr=1e-2)
    for window in windows(dtype, sizes):
        for batch in window:
            both.backward(batch)
        for gradient in both.gradients():
            if divides:
                gradient.div_(factor)
            else:
                gradient.mul_(factor)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@NARROW
def test_gradients_that_are_zero_and_not_none(dtype: torch.dtype, session: spillway.Session) -> None:
    both = pair(dtype, session, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    for number, batch in enumerate(batches(5, dtype)):
        if number != 2:
            both.backward(batch)
        both.step()
        both.plain.optimizer.zero_grad(set_to_none=False)
        both.optimizer.zero_grad(set_to_none=False)
        both.assert_same()
    both.optimizer.close()


@NARROW
def test_a_step_again_with_the_same_gradients(dtype: torch.dtype, session: spillway.Session) -> None:
    both = pair(dtype, session, lr=1e-2)
    for batch in batches(3, dtype):
        both.backward(batch)
        for gradient in both.gradients():
            gradient.mul_(0.7)
        for _ in range(3):
            both.step()
            both.assert_same()
        both.zero_grad()
    both.optimizer.close()


@NARROW
def test_gradients_that_are_never_cleared_add_up(dtype: torch.dtype, session: spillway.Session) -> None:
    both = pair(dtype, session, lr=1e-2)
    for batch in batches(4, dtype):
        both.backward(batch)
        both.assert_same_norm(0.1)
        both.step()
        both.assert_same()
    both.optimizer.close()


@NARROW
def test_gradients_that_stay_on_the_device(dtype: torch.dtype, session: spillway.Session) -> None:
    both = pair(dtype, session, options={"offload_gradients": False}, lr=1e-2)
    for batch in batches(4, dtype):
        both.backward(batch)
        assert not any(is_away(one.grad) for one in both.model.parameters())
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@NARROW
@pytest.mark.parametrize("numel", [64, 512])
def test_in_pieces(dtype: torch.dtype, numel: int, pieces_of: Callable[[int], None], session: spillway.Session) -> None:
    pieces_of(numel)
    both = pair(dtype, session, lr=1e-2)
    for window in windows(dtype, [1, 2, 2]):
        for batch in window:
            both.backward(batch)
        both.assert_same_norm(0.05)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()
    assert session.used_bytes == (0, 0)


def test_masters_of_a_type_of_ones_own(session: spillway.Session) -> None:
    both = pair(torch.bfloat16, session, options={"master_dtype": torch.float64}, lr=1e-2)
    for window in windows(torch.bfloat16, [1, 2, 1]):
        for batch in window:
            both.backward(batch)
        both.assert_same_norm(0.05)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_parameters_have_no_masters(dtype: torch.dtype, session: spillway.Session) -> None:
    model, plain = wide(dtype), wide(dtype)
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    train(plain, reference, batches(6, dtype), micro=2)
    train(model, optimizer, batches(6, dtype), micro=2)
    assert_same_values(model, plain)
    assert not any("master" in state for state in optimizer.state.values())
    optimizer.close()


def test_masters_of_a_type_no_wider_than_the_parameters_are_none(session: spillway.Session) -> None:
    model = wide(torch.float64)
    optimizer = OffloadedOptimizer(
        model.parameters(), torch.optim.AdamW, session=session, lr=1e-2, master_dtype=torch.float32
    )
    train(model, optimizer, batches(1, torch.float64))
    assert all(state["exp_avg"].dtype is torch.float64 for state in optimizer.state.values())
    optimizer.close()
