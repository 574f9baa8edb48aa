"""Steps: on the host, on the device, without gradients, of several optimizers; and what they cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import spillway
from optim.plain_loop import NARROW, pair
from optim.support import (
    assert_same_state,
    assert_same_values,
    batches,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    train,
    wide,
)
from spillway import OffloadedOptimizer


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("optimizer_class", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam])
def test_some_on_the_host_and_some_on_the_device(
    fraction: float, optimizer_class: type[Optimizer], session: spillway.Session
) -> None:
    plain, ours = wide(), wide()
    reference = optimizer_class(plain.parameters(), foreach=False)
    optimizer = OffloadedOptimizer(
        ours.parameters(),
        optimizer_class,
        fraction=fraction,
        session=session,
        foreach=False,
        **unfused(optimizer_class),
    )
    train(plain, reference, batches(4), micro=2)
    train(ours, optimizer, batches(4), micro=2)
    assert_same_values(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()


def unfused(optimizer_class: type[Optimizer]) -> dict[str, Any]:
    return {"fused": False} if optimizer_class is torch.optim.Adagrad else {}


@NARROW
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_masters_on_the_device(dtype: torch.dtype, fraction: float, session: spillway.Session) -> None:
    both = pair(dtype, session, torch.optim.RMSprop, {"fraction": fraction}, lr=1e-2)
    for batch in batches(4, dtype):
        both.backward(batch)
        both.step()
        both.zero_grad()
        both.assert_same()
    both.optimizer.close()


@pytest.mark.parametrize("fused", [True, False, None])
def test_the_implementation_that_was_asked_for(fused: bool | None, session: spillway.Session) -> None:
    plain, ours = wide(), wide()
    reference = torch.optim.AdamW(plain.parameters(), fused=fused is not False, foreach=False)
    optimizer = OffloadedOptimizer(ours.parameters(), torch.optim.AdamW, session=session, fused=fused)
    train(plain, reference, batches(3))
    train(ours, optimizer, batches(3))
    assert_same_values(ours, plain)
    optimizer.close()


def test_what_is_only_for_devices_does_no_harm(session: spillway.Session) -> None:
    ours, plain = wide(), wide()
    optimizer = OffloadedOptimizer(
        ours.parameters(), torch.optim.RMSprop, session=session, foreach=True, capturable=True
    )
    train(ours, optimizer, batches(3))
    train(plain, torch.optim.RMSprop(plain.parameters(), foreach=False), batches(3))
    assert_same_values(ours, plain)
    optimizer.close()


def test_a_step_without_any_gradient(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    assert_same_values(model.parameters(), before)
    assert not optimizer.state
    assert optimizer.stats().stepped_on_host == 0
    optimizer.close()


def test_a_gradient_that_became_none_is_not_applied_again(session: spillway.Session) -> None:
    # Hazard 56.
    model = wide()
    optimizer = offloaded(torch.optim.SGD, session, lr=0.1)(model)
    for clear in (model.zero_grad, optimizer.zero_grad, lambda: setattr(model.first.weight, "grad", None)):
        loss_of(model, batches(1)[0]).backward()
        clear()
        before = model.first.weight.detach().clone()
        optimizer.step()
        assert same_bits(model.first.weight, before)
    optimizer.close()


def test_the_default_session_serves() -> None:
    model, plain = wide(), wide()
    optimizer = offloaded(torch.optim.RMSprop)(model)
    train(model, optimizer, batches(2))
    train(plain, plainly(torch.optim.RMSprop)(plain), batches(2))
    assert_same_values(model, plain)
    optimizer.close()
    assert spillway.Session.default().used_bytes == (0, 0)


def test_several_optimizers_in_one_session(session: spillway.Session) -> None:
    models = [wide(seed=seed) for seed in range(3)]
    plain = [wide(seed=seed) for seed in range(3)]
    ours = [offloaded(torch.optim.AdamW, session)(model) for model in models]
    for batch in batches(3):
        for model in models:
            loss_of(model, batch).backward()
        for optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()
    for model, other in zip(models, plain, strict=True):
        train(other, plainly(torch.optim.AdamW)(other), batches(3))
        assert_same_values(model, other)
    for optimizer in ours:
        optimizer.close()
    assert session.used_bytes == (0, 0)


def test_what_a_step_cost(session: spillway.Session) -> None:
    model = wide(torch.bfloat16)
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    count = sum(one.numel() for one in model.parameters())
    train(model, optimizer, batches(1, torch.bfloat16))
    train(model, optimizer, batches(2, torch.bfloat16), micro=2)
    stats = optimizer.stats()
    assert stats.stepped_on_host == count
    # Since the last step: the gradients of two micro-batches went, and the parameters came.
    assert stats.received_bytes == 4 * count
    assert stats.host_seconds > 0
    assert stats.host_bytes > 0
    optimizer.close()
