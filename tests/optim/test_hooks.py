"""Closures, and hooks around steps: each is called once, as with any optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import spillway
from optim.support import (
    assert_both_same,
    assert_same_values,
    batches,
    both,
    loss_of,
    offloaded,
    three_groups,
    train,
    wide,
)
from spillway import OffloadedOptimizer


def test_closures(session: spillway.Session) -> None:
    pair = both(torch.optim.RMSprop, session, lr=0.01)
    losses: list[list[float]] = []
    for model, optimizer in pair:
        mine: list[float] = []
        for batch in batches(3):

            def closure(model: Module = model, optimizer: Optimizer = optimizer, batch: Tensor = batch) -> Tensor:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            with torch.no_grad():
                mine.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
        losses.append(mine)
    assert losses[0] == losses[1]
    assert_both_same(pair)
    pair[1][1].close()


def test_a_closure_that_fails_leaves_all_as_it_is(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    before = [one.detach().clone() for one in model.parameters()]

    def closure() -> Tensor:
        raise ZeroDivisionError

    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert_same_values(model.parameters(), before)
    optimizer.step()
    optimizer.close()


@contextlib.contextmanager
def removed(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_hooks_of_steps_are_called_once_a_step(
    fraction: float, pieces_of: Callable[[int], None], cpu_session: spillway.Session
) -> None:
    pieces_of(64)
    model = wide()
    optimizer = OffloadedOptimizer(three_groups(model), torch.optim.AdamW, session=cpu_session, fraction=fraction)
    calls: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        def called(who: Optimizer, args: Any, kwargs: Any) -> None:
            assert who is optimizer
            calls.append(name)

        return called

    optimizer.register_step_pre_hook(hook("before"))
    optimizer.register_step_post_hook(hook("after"))
    with removed(
        register_optimizer_step_pre_hook(hook("before all")), register_optimizer_step_post_hook(hook("after all"))
    ):
        train(model, optimizer, batches(2))
    # Torch's own order.
    assert calls == ["before all", "before", "after", "after all"] * 2
    optimizer.close()


def test_a_hook_before_the_step_changes_what_is_stepped(session: spillway.Session) -> None:
    pair = both(torch.optim.SGD, session, lr=0.1)

    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def decay(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                with torch.no_grad():
                    parameter.mul_(0.9)

    for model, optimizer in pair:
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(decay)
        train(model, optimizer, batches(3))
    assert_both_same(pair)
    pair[1][1].close()
