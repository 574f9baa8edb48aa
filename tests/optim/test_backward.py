"""Kinds of backward under an optimizer that takes gradients away as soon as they are there."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

import spillway
from optim.support import (
    assert_same_values,
    batches,
    here,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    train,
    wide,
)
from spillway import OffloadedOptimizer, UsageError
from support import FailsInBackward

SGD = {"lr": 0.1, "momentum": 0.9}

Backward = Callable[[Module, Tensor], object]


def twice(model: Module, batch: Tensor) -> None:
    loss = loss_of(model, batch)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def of_some_inputs(model: Module, batch: Tensor) -> None:
    wanted = list(model.parameters())[::2]
    loss_of(model, batch).backward(inputs=wanted)  # type: ignore[no-untyped-call]


def of_gradients(model: Module, batch: Tensor) -> None:
    """A gradient penalty, by ``autograd.grad``."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss_of(model, batch), parameters, create_graph=True)
    sum(gradient.square().sum() for gradient in grads).backward()  # type: ignore[union-attr]


def with_hooks(model: Module, batch: Tensor) -> None:
    handles = [one.register_hook(lambda gradient: gradient * 0.5) for one in model.parameters()]
    loss_of(model, batch).backward()
    for handle in handles:
        handle.remove()


def with_hooks_that_keep(model: Module, batch: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    handles = [one.register_hook(seen.append) for one in model.parameters()]
    loss_of(model, batch).backward()
    for handle in handles:
        handle.remove()
    return seen


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def with_hooks_after(model: Module, batch: Tensor) -> None:
    """Hooks that run when a gradient has been accumulated: ours ran before them."""
    handles = [
        one.register_post_accumulate_grad_hook(halve)  # type: ignore[no-untyped-call]
        for one in model.parameters()
    ]
    loss_of(model, batch).backward()
    for handle in handles:
        handle.remove()


def recomputed(model: Module, batch: Tensor) -> None:
    checkpoint(model, batch, use_reentrant=False).square().mean().backward()


def recomputed_within(model: Module, batch: Tensor) -> None:
    checkpoint(model, batch.requires_grad_(), use_reentrant=True).square().mean().backward()


def in_anomaly_mode(model: Module, batch: Tensor) -> None:
    with torch.autograd.set_detect_anomaly(True):
        loss_of(model, batch).backward()


def offloaded_activations(model: Module, batch: Tensor) -> None:
    with spillway.Session() as session:
        with spillway.offload(session=session, min_bytes=0, tier="host"):
            loss = loss_of(model, batch)
        loss.backward()


def of_two_losses(model: Module, batch: Tensor) -> None:
    one, other = loss_of(model, batch), loss_of(model, batch * 2)
    (one + 0.3 * other).backward()


def in_a_thread(model: Module, batch: Tensor) -> None:
    thread = threading.Thread(target=lambda: loss_of(model, batch).backward())
    thread.start()
    thread.join()


def in_threads_one_after_the_other(model: Module, batch: Tensor) -> None:
    for factor in (1.0, 2.0, 3.0):
        in_a_thread(model, batch * factor)


BACKWARDS: list[Backward] = [
    twice,
    of_some_inputs,
    of_gradients,
    with_hooks,
    with_hooks_that_keep,
    with_hooks_after,
    recomputed,
    recomputed_within,
    offloaded_activations,
    of_two_losses,
    in_a_thread,
    in_threads_one_after_the_other,
]


@pytest.mark.parametrize("session", ["adversary"], indirect=True)
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda backward: backward.__name__)
@pytest.mark.parametrize("micro", [1, 2])
def test_a_backward_of_this_kind(backward: Backward, micro: int, session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.RMSprop)(models[0]), offloaded(torch.optim.RMSprop, session)(models[1])
    for batch in batches(3):
        results = []
        for model, optimizer in zip(models, optimizers, strict=True):
            for number in range(micro):
                results.append(backward(model, batch.clone() * (number + 1)))
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(results[:micro], results[micro:], strict=True):
            if one is not None:
                assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))  # type: ignore[call-overload]
        assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]
    del results, one, other
    assert session.used_bytes == (0, 0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode(cpu_session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.RMSprop)(models[0]), offloaded(torch.optim.RMSprop, cpu_session)(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        in_anomaly_mode(model, batches(1)[0])
        optimizer.step()
    assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_a_backward_that_makes_a_graph(session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), offloaded(torch.optim.SGD, session, **SGD)(models[1])
    for batch in batches(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(2):
                loss_of(model, batch).backward(create_graph=True)  # type: ignore[no-untyped-call]
            penalty = sum(one.grad.square().sum() for one in model.parameters() if one.grad is not None)
            optimizer.zero_grad()
            (loss_of(model, batch) + 0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
            del penalty
        assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]
    gc.collect()
    assert session.used_bytes == (0, 0)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_step_with_gradients_that_have_a_graph(session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), offloaded(torch.optim.SGD, session, **SGD)(models[1])
    for batch in batches(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, batch).backward(create_graph=True)  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]


def test_backwards_in_several_threads_at_once() -> None:
    # Over parameters of their own: what several threads add to one parameter on the CPU at once, torch adds to the
    # plain gradient while hooks of the last one run. (A device has one thread for all backwards.)
    models = [wide(seed=seed) for seed in range(4)]
    plain = [wide(seed=seed) for seed in range(4)]
    data = batches(12, rows=2)
    failed: list[BaseException] = []

    def work(model: Module) -> None:
        try:
            for batch in data:
                loss_of(model, batch).backward()
        except RuntimeError as error:
            failed.append(error)

    # A window of a few gradients, so that who adds one has to wait for those that others added.
    with spillway.Session(window=4096) as session:
        everything = [parameter for model in models for parameter in model.parameters()]
        optimizer = OffloadedOptimizer(everything, torch.optim.SGD, lr=1.0, session=session)
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=work, args=(model,)) for model in models]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        assert failed == []
        optimizer.step()
        optimizer.close()
        assert session.used_bytes == (0, 0)
    for model, other in zip(models, plain, strict=True):
        work(other)
        torch.optim.SGD(other.parameters(), lr=1.0, fused=True).step()
        assert_same_values(model, other)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("before", [0, 1])
def test_an_exception_in_the_middle_of_a_backward(clears: bool, before: int, session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), offloaded(torch.optim.SGD, session, **SGD)(models[1])
    data = batches(4)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data[:1])
        for batch in data[1 : 1 + before]:
            loss_of(model, batch).backward()
        x = model.blocks[0](model.first(data[2]))
        with pytest.raises(KeyError, match="on purpose"):
            (model.last(model.blocks[1](FailsInBackward.apply(x))) * model.gain).sum().backward()
        if clears:
            optimizer.zero_grad()
        loss_of(model, data[3]).backward()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, data[:1])
    assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]
    assert session.used_bytes == (0, 0)


def test_autograd_grad_leaves_gradients_alone(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.SGD, session, lr=0.1)(model)
    one, other = batches(2)
    loss_of(model, one).backward()
    before = [here(parameter.grad) for parameter in model.parameters()]
    torch.autograd.grad(loss_of(model, other), list(model.parameters()))
    assert all(same_bits(here(one.grad), value) for one, value in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    torch.autograd.grad(loss_of(model, other), list(model.parameters()))
    assert all(one.grad is None for one in model.parameters())
    optimizer.close()


def test_a_compiled_model(cpu_session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), offloaded(torch.optim.SGD, cpu_session, **SGD)(models[1])
    torch._dynamo.reset()
    for model, optimizer in zip(models, optimizers, strict=True):
        compiled = torch.compile(model, backend="aot_eager")
        for rows in (6, 3):
            # Another shape is compiled anew, while the gradients of the first are away.
            for batch in batches(2, rows=rows):
                compiled(batch).square().mean().backward()
                compiled(batch[:2]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}], ids=str)
def test_backwards_of_two_threads_at_once_are_refused(options: dict[str, Any], cpu_session: spillway.Session) -> None:
    """Autograd adds the second gradient while a hook replaces the first: the process may crash."""
    models = [wide(), wide()]
    first, second = batches(2)
    optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1, **options)(models[0])
    inside, goes_on, errors = threading.Event(), threading.Event(), []

    def pause(gradient: Tensor) -> None:
        inside.set()
        goes_on.wait(30)

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    def loss_with(model: Module, batch: Tensor, hook: Callable[[Tensor], None] | None = None) -> Tensor:
        hidden = model.first(batch)
        if hook is not None:
            hidden.register_hook(hook)
        loss = model.last(hidden).square().mean()
        # A parameter of the second batch alone, whose gradient comes first.
        return loss if hook is not None else loss * model.blocks[0].up.bias.sum()

    def backward(batch: Tensor, hook: Callable[[Tensor], None] | None = None) -> None:
        loss = loss_with(models[0], batch, hook)
        try:
            loss.backward()
        except (ArithmeticError, UsageError) as error:
            errors.append(error)

    thread = threading.Thread(target=backward, args=(first, pause))
    thread.start()
    assert inside.wait(30)
    other = threading.Thread(target=backward, args=(second,))
    other.start()
    other.join()
    (error,) = errors
    assert "got backwards of two threads at once" in str(error)
    # Nothing is added, and a gradient that is returned may be taken.
    (found,) = torch.autograd.grad(models[0].last(models[0].first(second)).square().mean(), models[0].last.weight)
    goes_on.set()
    thread.join()
    models[0].blocks[0].up.bias.grad = None
    optimizer.step()
    optimizer.zero_grad()
    # One that has failed is over, and so is the other.
    thread = threading.Thread(target=backward, args=(first, fail))
    thread.start()
    thread.join()
    optimizer.step()
    optimizer.zero_grad()
    backward(second)
    optimizer.step()
    assert len(errors) == 2
    plain = plainly(torch.optim.SGD, lr=0.1)(models[1])
    assert found.any()
    for batch, whole in ((first, True), (first, False), (second, True)):
        loss_with(models[1], batch, None if batch is second else lambda _: None).backward()
        if not whole:
            models[1].first.zero_grad()
        plain.step()
        plain.zero_grad()
    assert_same_values(*models)
    optimizer.close()
