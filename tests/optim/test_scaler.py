"""``GradScaler`` with gradients on the host: infinities are found, steps skipped, scales the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spillway
from optim.plain_loop import NARROW, pair, windows
from optim.support import assert_same_values, batches, loss_of, wide
from spillway import OffloadedOptimizer


class NarrowScaler(torch.amp.GradScaler):
    """Unscales ``float16`` gradients too, which torch's refuses, since a plain loop has no wider place for them."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


@NARROW
@pytest.mark.parametrize("sizes", [[1] * 6, [2] * 6, [1, 3, 1, 2, 1, 1]], ids=["one", "two", "ragged"])
@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["", "clipped"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
def test_a_scaler_skips_the_steps_in_which_it_finds_an_infinity(
    dtype: torch.dtype, sizes: list[int], max_norm: float | None, bad: float, session: spillway.Session
) -> None:
    both = pair(dtype, session, lr=1e-2)
    ours, plain = (NarrowScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2))
    scales = []
    for number, window in enumerate(windows(dtype, sizes)):
        if number in (1, 4):
            window[-1][0, 0] = bad
        for batch in window:
            both.backward(batch, scaled=(ours.scale, plain.scale))
        ours.unscale_(both.optimizer)
        plain.unscale_(both.plain.optimizer)
        if max_norm is not None:
            both.assert_same_norm(max_norm)
        ours.step(both.optimizer)
        plain.step(both.plain.optimizer)
        both.plain.write_back()
        ours.update()
        plain.update()
        both.zero_grad()
        both.assert_same()
        assert ours.get_scale() == plain.get_scale()
        scales.append(ours.get_scale())
    assert min(scales) < 64.0, "no step was skipped: the test proves nothing"
    both.optimizer.close()
    assert session.used_bytes == (0, 0)


@NARROW
def test_a_scaler_that_unscales_in_its_step(dtype: torch.dtype, session: spillway.Session) -> None:
    both = pair(dtype, session, torch.optim.SGD, lr=0.1, momentum=0.9)
    ours, plain = (NarrowScaler("cpu", init_scale=1024.0) for _ in range(2))
    for batch in batches(4, dtype):
        both.backward(batch, scaled=(ours.scale, plain.scale))
        ours.step(both.optimizer)
        plain.step(both.plain.optimizer)
        both.plain.write_back()
        ours.update()
        plain.update()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


def test_a_scaler_over_parameters_of_which_some_are_empty(session: spillway.Session) -> None:
    empty, full = torch.nn.Parameter(torch.zeros(0, 3)), torch.nn.Parameter(torch.ones(5))
    optimizer = OffloadedOptimizer([empty, full], torch.optim.SGD, lr=0.5, session=session)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        scaler.scale(full.sum() + empty.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(full, torch.zeros(5))
    optimizer.close()


def test_a_scaler_over_parameters_of_which_some_step_on_the_device(session: spillway.Session) -> None:
    models = wide(), wide()
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, fused=True)
    # The device's part is given no implementation of its own: the two are equal for SGD without momentum.
    ours = OffloadedOptimizer(models[1].parameters(), torch.optim.SGD, lr=0.1, fraction=0.5, session=session)
    scalers = torch.amp.GradScaler("cpu", init_scale=32.0), torch.amp.GradScaler("cpu", init_scale=32.0)
    for number, batch in enumerate(batches(4)):
        if number == 2:
            batch[0, 0] = float("inf")
        for model, optimizer, scaler in zip(models, (plain, ours), scalers, strict=True):
            scaler.scale(loss_of(model, batch)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same_values(models[1], models[0])
    assert scalers[0].get_scale() == scalers[1].get_scale() == 16.0
    ours.close()
    assert session.used_bytes == (0, 0)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**72])
def test_a_scale_whose_squares_overflow(scale: float, session: spillway.Session) -> None:
    """Scalers grow without bound in ``float32`` and ``bfloat16``. Plain training takes norms of unscaled gradients."""
    found = []
    for make in (
        lambda some: OffloadedOptimizer(some, torch.optim.AdamW, session=session, lr=1e-2, fused=True),
        lambda some: torch.optim.AdamW(some, lr=1e-2, fused=True),
    ):
        model = wide()
        optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=scale)
        norms = []
        for batch in batches(3):
            scaler.scale(loss_of(model, batch)).backward()
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if isinstance(optimizer, OffloadedOptimizer):
            optimizer.close()
        found.append([*norms, *(parameter.detach() for parameter in model.parameters())])
    assert all(map(torch.equal, *found))
