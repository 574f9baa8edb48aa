"""Gradients on the host are clipped as in a loop that keeps ``float32`` copies of narrow parameters, bit for bit."""

from __future__ import annotations

import pytest
import torch

import spillway
from optim.plain_loop import NARROW, NARROW_KINDS, pair, windows
from optim.support import batches
from spillway.optim.gradient import Snapshot
from support import pairwise


@NARROW
@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, float("inf"), 0.0, -1.0])
def test_clipping_by_any_norm(dtype: torch.dtype, order: float, session: spillway.Session) -> None:
    both = pair(dtype, session, lr=1e-2)
    for window in windows(dtype, [1, 1, 2]):
        for batch in window:
            both.backward(batch)
        both.assert_same_norm(0.1, norm_type=order)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@NARROW
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2], [1, 3]], ids=["one", "two", "ragged"])
def test_a_norm_after_gradients_were_scaled_by_hand(
    dtype: torch.dtype, sizes: list[int], session: spillway.Session
) -> None:
    both = pair(dtype, session, lr=1e-2)
    for window in windows(dtype, sizes):
        for batch in window:
            both.backward(batch)
        for gradient in both.gradients():
            gradient.div_(3.0)
        both.assert_same_norm(0.02)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@pytest.mark.parametrize(
    ("session", "dtype", "sizes", "first"),
    [(*kind, *row) for kind, *row in pairwise(NARROW_KINDS, [[1, 1], [2, 2], [1, 3]], ["nothing", "norm"])],
    indirect=["session"],
)
def test_clipping_by_value(dtype: torch.dtype, sizes: list[int], first: str, session: spillway.Session) -> None:
    both = pair(dtype, session, lr=1e-2)
    for window in windows(dtype, sizes):
        for batch in window:
            both.backward(batch)
        if first == "norm":
            both.assert_same_norm(0.1)
        torch.nn.utils.clip_grad_value_(both.plain.masters, 0.003)
        torch.nn.utils.clip_grad_value_(both.model.parameters(), 0.003)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@pytest.mark.parametrize("factor", [0.25, torch.tensor(2.0**-16), 0.37, torch.tensor(0.37)], ids=str)
@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_a_norm_after_gradients_were_multiplied(
    factor: float | torch.Tensor, order: float, session: spillway.Session
) -> None:
    both = pair(torch.bfloat16, session, lr=1e-2)
    for batch in batches(4, torch.bfloat16):
        both.backward(batch)
        for gradient in both.gradients():
            gradient.mul_(factor)
        both.assert_same_norm(1e-3, norm_type=order)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


def test_each_gradient_is_read_once_for_a_norm(cpu_session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    both = pair(torch.bfloat16, cpu_session, lr=1e-2)
    read: list[object] = []
    values = Snapshot.exact
    monkeypatch.setattr(Snapshot, "exact", lambda one: (read.append(one.held), values(one))[1])
    for batch in batches(2, torch.bfloat16):
        both.backward(batch)
    for gradient in both.gradients():
        gradient.mul_(0.37)
    both.assert_same_norm(1e-3)
    assert len(read) == len(set(read)) == len(list(both.model.parameters()))
    both.optimizer.close()
