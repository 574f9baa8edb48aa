"""Host memory that is full: the call that needs it says so, nothing is lost, and the next works when there is some."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Module

import spillway
from optim.support import assert_same_values, batches, here, loss_of, offloaded, plainly, same_bits, train, wide
from spillway import OffloadedOptimizer
from spillway.errors import TierFullError
from spillway.runtime.arena import Block
from spillway.runtime.cpu import CpuBackend
from spillway.testing import AdversaryBackend

RMS = torch.optim.RMSprop


@pytest.fixture(params=["cpu", "adversary"])
def small(request: pytest.FixtureRequest, adversary: AdversaryBackend) -> Iterator[spillway.Session]:
    backend = adversary.serve if request.param == "adversary" else None
    with spillway.Session(backend=backend, host_budget="64MiB") as session:
        yield session
    adversary.check()


@pytest.fixture(autouse=True)
def each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small gradients do not wait for others."""
    monkeypatch.setattr("spillway.optim.transfers._TOGETHER", 0)


@contextlib.contextmanager
def full(optimizer: OffloadedOptimizer, *, but: int = 0) -> Iterator[None]:
    """Inside, there is room for so many blocks more."""
    arena = next(iter(optimizer._placement.contexts.values())).transfers.arena
    optimizer.synchronize()
    allocate, left = arena.allocate, itertools.count(but, -1)

    def refuse(nbytes: int, **options: bool) -> Block:
        if next(left) > 0:
            return allocate(nbytes, **options)
        raise TierFullError(f"host memory: got a request for {nbytes} bytes, expected it to fit")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "allocate", refuse)
        yield


def pair_of(small: spillway.Session, dtype: torch.dtype = torch.float32) -> tuple[Module, OffloadedOptimizer, Module]:
    model, plain = wide(dtype), wide(dtype)
    return model, offloaded(RMS, small, master_dtype=None)(model), plain


@pytest.mark.parametrize("but", [0, 3])
def test_in_a_backward(but: int, small: spillway.Session) -> None:
    model, optimizer, plain = pair_of(small)
    reference = plainly(RMS)(plain)
    data = batches(3)
    train(model, optimizer, data[:1])
    train(plain, reference, data[:1])
    with full(optimizer, but=but), pytest.raises(TierFullError, match="host memory: got a request"):
        loss_of(model, data[1]).backward()
    optimizer.zero_grad()
    train(model, optimizer, data[1:])
    train(plain, reference, data[1:])
    assert_same_values(model, plain)
    optimizer.close()
    assert small.used_bytes == (0, 0)


@pytest.mark.parametrize("before", [1, 2])
def test_in_a_backward_that_adds(before: int, small: spillway.Session) -> None:
    model, optimizer, plain = pair_of(small)
    reference = plainly(RMS)(plain)
    data = batches(5)
    train(model, optimizer, data[:2], micro=2)
    train(plain, reference, data[:2], micro=2)
    for batch in data[2 : 2 + before]:
        loss_of(model, batch).backward()
        loss_of(plain, batch).backward()
    with full(optimizer), pytest.raises(TierFullError):
        loss_of(model, data[4]).backward()
    # What was there is there still: no gradient had come through.
    assert all(
        same_bits(here(one.grad), other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    optimizer.step()
    reference.step()
    assert_same_values(model, plain)
    optimizer.close()
    assert small.used_bytes == (0, 0)


@pytest.mark.parametrize(
    ("but", "earlier", "dtype"),
    [
        (0, 0, torch.float32),
        (4, 0, torch.float32),
        (9, 0, torch.float32),
        (0, 0, torch.bfloat16),
        (4, 0, torch.bfloat16),
        (9, 0, torch.bfloat16),
        (0, 1, torch.bfloat16),
        (1, 1, torch.bfloat16),
        (4, 1, torch.bfloat16),
    ],
)
def test_in_a_step(
    but: int, earlier: int, dtype: torch.dtype, small: spillway.Session, pieces_of: Callable[[int], None]
) -> None:
    if dtype == torch.float32 and type(small.runtime(torch.device("cpu")).backend) is CpuBackend:
        pytest.skip("the step works on the parameters themselves, and needs no memory")
    # So that what parameters are comes in several calls.
    pieces_of(100)
    model, plain = wide(dtype), wide(dtype)
    optimizer, reference = offloaded(RMS, small)(model), offloaded(RMS, small)(plain)
    data = batches(4, dtype)
    for one, each in ((model, optimizer), (plain, reference)):
        train(one, each, data[:earlier])
        loss_of(one, data[1]).backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(1.5)
    before = [one.detach().clone() for one in model.parameters()]
    with full(optimizer, but=but), pytest.raises(TierFullError):
        optimizer.step()
    if but == 0:
        assert_same_values(model.parameters(), before)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        train(model, optimizer, data[2:])
        train(plain, reference, data[2:])
        assert_same_values(model, plain)
    else:
        # Some have stepped and some have not; all can, from what they are.
        optimizer.zero_grad()
        train(model, optimizer, data[2:])
        assert all(one.isfinite().all() for one in model.parameters())
        for parameter in model.parameters():
            master = optimizer.state[parameter].get("master", parameter)
            assert same_bits(master.to(dtype), parameter)
            # Whoever holds a state holds its memory.
            del master
    optimizer.close()
    reference.close()
    assert small.used_bytes == (0, 0)


def test_where_a_gradient_is_read(small: spillway.Session) -> None:
    model, optimizer, plain = pair_of(small)
    reference = plainly(RMS)(plain)
    batch = batches(1)[0]
    for one in (model, plain):
        loss_of(one, batch).backward()
        torch.nn.utils.clip_grad_norm_(one.parameters(), 0.01)
        for parameter in one.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.7)
    with full(optimizer):
        for read in (lambda g: g.clone(), lambda g: g.clamp_(-0.1, 0.1)):
            with pytest.raises(TierFullError):
                read(model.first.weight.grad)  # type: ignore[union-attr]
    optimizer.step()
    reference.step()
    assert_same_values(model, plain)
    optimizer.close()
    assert small.used_bytes == (0, 0)


def test_where_a_gradient_is_multiplied(small: spillway.Session) -> None:
    model, optimizer, plain = pair_of(small)
    reference = plainly(RMS)(plain)
    batch = batches(1)[0]
    for one in (model, plain):
        loss_of(one, batch).backward()
    factor: Callable[[], torch.Tensor] = lambda: torch.tensor(0.5)  # noqa: E731
    with full(optimizer), pytest.raises(TierFullError):
        model.first.weight.grad.mul_(factor())  # type: ignore[union-attr]
    for one in (model, plain):
        one.first.weight.grad.mul_(factor())  # type: ignore[union-attr]
    optimizer.step()
    reference.step()
    assert_same_values(model, plain)
    optimizer.close()
    assert small.used_bytes == (0, 0)


def test_small_gradients_that_leave_together_are_not_lost(
    small: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway.optim.transfers._TOGETHER", 1 << 20)
    model, optimizer, plain = pair_of(small)
    reference = plainly(RMS)(plain)
    data = batches(3)
    train(model, optimizer, data[:1])
    train(plain, reference, data[:1])
    for one in (model, plain):
        loss_of(one, data[1]).backward()
    with full(optimizer), pytest.raises(TierFullError, match="host memory: got a request"):
        optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    reference.step()
    reference.zero_grad()
    train(model, optimizer, data[2:])
    train(plain, reference, data[2:])
    assert_same_values(model, plain)
    optimizer.close()


def test_steps_in_backward_hold_no_more_memory_than_the_workers_need() -> None:
    # Real threads: the adversary runs their tasks when they are waited for. Each parameter is a step of its own.
    with spillway.Session(window=8 << 20, host_budget=100 << 20) as session:
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)]).bfloat16()
        optimizer = OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, session=session, step_in_backward=True, threads=1, lr=1e-3
        )
        stepped = optimizer._placement.stores[-1]._optimizer
        step_each = stepped.step_each

        def slowly(*args: Any, **options: Any) -> Any:
            time.sleep(0.05)
            return step_each(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            for _ in range(2):
                model(torch.randn(2, 1024, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.synchronize()
                patch.setattr(stepped, "step_each", slowly)
        optimizer.close()
