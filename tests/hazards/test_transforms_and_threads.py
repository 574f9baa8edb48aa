"""Hazards 31, 32, 37 and 38: ``torch.func``, threads, unified memory and inference mode."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import spillway
from spillway import EventKind
from spillway.policies import Modules
from support import Context, Trial, Way, assert_identical, assert_nothing_left, grads, mlp, run


def healthy(context: Context) -> Iterator[torch.Tensor]:
    model, batch = mlp(16, 64, 64, 1), torch.randn(8, 16, requires_grad=True)
    with context():
        loss = model(batch).square().mean()
    loss.backward()
    yield from grads(*model.parameters(), batch)


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Callable[[torch.Tensor], Any]]] = {
    "grad": torch.func.grad,
    "jacrev": torch.func.jacrev,
    "hessian": torch.func.hessian,
    "vjp": lambda function: lambda tensor: torch.func.vjp(function, tensor)[1](torch.ones(())),
    "grad of vmap": lambda function: torch.func.grad(lambda x: torch.func.vmap(lambda row: function(row))(x).sum()),
}
FORWARD_ONLY: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Callable[[torch.Tensor], Any]]] = {
    "vmap": torch.func.vmap,
    "jvp": lambda function: lambda tensor: torch.func.jvp(function, (tensor,), (tensor,)),
}
INNER: dict[str, Callable[[Trial], AbstractContextManager[object]]] = {
    "offload": lambda trial: trial.offload(),
    "offload-modules": lambda trial: trial.offload(policy=Modules("*")),
    "keep": lambda trial: spillway.keep(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("transform", [*TRANSFORMS, *FORWARD_ONLY])
def test_h31_offload_inside_of_a_transform(trial: Trial, transform: str, inner: str) -> None:
    """Refused on entering, with a typed error that says what to do. Nothing is left."""

    def function(tensor: torch.Tensor) -> torch.Tensor:
        with INNER[inner](trial):
            return tensor.sin().exp().sum()

    with pytest.raises(spillway.UnsupportedError, match=r"torch\.func"):
        {**TRANSFORMS, **FORWARD_ONLY}[transform](function)(torch.randn(4, 4))
    assert_nothing_left(trial.session)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    trial(healthy)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_h31_a_transform_inside_of_offload(trial: Trial, transform: str) -> None:
    """Torch refuses, in its own words, and nothing is left of what was saved before."""

    def once() -> None:
        leaf = torch.randn(4, 4, requires_grad=True)
        with trial.offload():
            hidden = (leaf * 2).sin().exp().sin()
            TRANSFORMS[transform](lambda tensor: tensor.sin().exp().sum())(hidden)

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        once()
    assert_nothing_left(trial.session)
    trial(healthy)


def test_h31_a_transform_after_offload(trial: Trial) -> None:
    trial(healthy, passes=1)
    function = torch.func.grad(lambda tensor: tensor.sin().exp().sum())
    tensor = torch.randn(16)
    expected = function(tensor)
    with trial.offload():
        loss = (torch.randn(256, requires_grad=True) * 2).sin().exp().sum()
    assert torch.equal(function(tensor), expected)
    loss.backward()


def test_h31_vmap_without_gradients_inside_of_offload(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(16, 64, requires_grad=True)
        with context():
            hidden = torch.func.vmap(lambda row: (row * 2).sin().exp())(leaf * 1)
            loss = (hidden.sin() * torch.vmap(torch.dot)(hidden, hidden)[:, None]).sum()
        del hidden
        loss.backward()
        yield from grads(leaf)

    trial(step)


@pytest.mark.parametrize("shared", ["one-object", "object-each"])
def test_h32_threads_train_under_one_session(session: spillway.Session, way: Way, shared: str) -> None:
    """Each thread has its own model, and its own seed; session, streams, tiers and what is learned are shared."""
    count, steps = 4, 5

    def train(number: int, context: Context) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        weights = [torch.randn(48, 48, generator=generator, requires_grad=True) for _ in range(4)]
        results = []
        for _ in range(steps):
            hidden = torch.randn(16, 48, generator=generator)
            with context():
                for weight in weights:
                    hidden = (hidden @ weight).tanh() * hidden.sigmoid()
                loss = hidden.square().mean()
            del hidden
            results += torch.autograd.grad(loss, weights)
        return results

    def offload() -> spillway.offload:
        return spillway.offload(session=session, tier=way.tier, min_bytes=0)

    single = offload()
    expected = [train(number, contextlib.nullcontext) for number in range(count)]
    start = threading.Barrier(count)

    def work(number: int) -> list[torch.Tensor]:
        start.wait()
        return train(number, (lambda: single) if shared == "one-object" else offload)

    with ThreadPoolExecutor(count) as pool:
        for got, want in zip(pool.map(work, range(count)), expected, strict=True):
            assert_identical(got, want)
    assert_nothing_left(session)


def test_h32_forward_in_one_thread_and_backward_in_another(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model = mlp(16, 64, 64, 1)
        losses: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        errors: list[RuntimeError] = []

        def backward() -> None:
            try:
                while (loss := losses.get()) is not None:
                    loss.backward()
                    del loss
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        for batch in torch.randn(4, 8, 16):
            with context():
                loss = model(batch).square().mean()
            losses.put(loss)
            del loss
        losses.put(None)
        thread.join()
        assert not errors
        yield from grads(*model.parameters())

    trial(step)


def test_h32_hooks_are_those_of_the_thread_that_entered(trial: Trial) -> None:
    """Another thread, in which no context was entered, saves as ever."""
    entered, done = threading.Event(), threading.Event()
    seen: list[object] = []

    def other() -> None:
        entered.wait()
        leaf = torch.randn(256, requires_grad=True)
        (leaf * 2).sin().exp().sum().backward()
        seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with trial.offload():
        entered.set()
        done.wait()
    thread.join()
    assert seen == [None]
    assert trial.count(EventKind.LEAVE) == 0


def test_h32_one_object_entered_by_two_threads_at_once(trial: Trial) -> None:
    """Each thread leaves its own pass: what waits to leave at the end of one is not left to the other."""
    context = trial.offload()
    entered, leave = threading.Event(), threading.Event()
    leaves = [torch.randn(256, requires_grad=True) for _ in range(2)]

    def other() -> torch.Tensor:
        with context:
            entered.set()
            leave.wait()
            return (leaves[1] * 2).sin().sum()

    with ThreadPoolExecutor(1) as pool:
        with context:
            theirs = pool.submit(other)
            entered.wait()
            ours = (leaves[0] * 2).sin().sum()
        assert trial.count(EventKind.LEAVE) == 1
        leave.set()
        theirs.result()
    assert trial.count(EventKind.LEAVE) == 2
    del ours, theirs


def test_h32_an_error_in_one_thread_leaves_the_others_alone(session: spillway.Session, way: Way) -> None:
    single = spillway.offload(session=session, tier=way.tier, min_bytes=0)
    expected = run(healthy, lambda **_: contextlib.nullcontext())
    failed = threading.Event()
    generator = torch.Generator()  # the global one is that of the thread that must not notice

    def fail() -> None:
        with contextlib.suppress(ZeroDivisionError):
            for _ in range(10):
                with single:
                    (torch.randn(256, generator=generator, requires_grad=True) * 2).sin().exp().sin()
                    if failed.is_set():
                        raise ZeroDivisionError
        failed.set()

    thread = threading.Thread(target=fail)
    thread.start()
    for _ in range(10):
        assert_identical(run(healthy, lambda **_: single), expected)
        failed.set()
    thread.join()
    assert_nothing_left(session)


def test_h37_a_tensor_in_host_memory_does_not_leave_for_host_memory(
    session: spillway.Session, events: spillway.EventList
) -> None:
    """Where the device's memory is the host's, a copy in host memory saves nothing: left to itself, it is the disk."""
    leaf = torch.randn(256, requires_grad=True)
    context = spillway.offload(session=session, min_bytes=0)
    with context:
        loss = (leaf * 2).sin().exp().sin().sum()
    session.synchronize()
    host, disk = session.used_bytes
    assert (host, disk > 0) == (0, True)
    loss.backward()


def test_h38_first_used_in_inference_mode(trial: Trial) -> None:
    """Whatever is made then must be good for writing into later."""
    model = mlp(16, 64, 64, 1)
    with torch.inference_mode(), trial.offload():
        model(torch.randn(8, 16))
    assert trial.count(EventKind.LEAVE) == 0
    trial(healthy)


def test_h38_training_within_inference_mode(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        with torch.inference_mode(), torch.inference_mode(mode=False):
            yield from list(healthy(context))

    trial(step)
    trial(healthy)


def test_h38_backward_within_inference_mode(trial: Trial) -> None:
    """Host memory and destinations that are made in it are used again outside."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(256, requires_grad=True)
        with context():
            loss = (leaf * 2).sin().exp().sin().sum()
        with torch.inference_mode():
            loss.backward()
        yield from grads(leaf)

    trial(step)
    trial(healthy)


def test_h38_a_saved_tensor_read_in_inference_mode_and_used_outside(trial: Trial) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        out = (leaf * 2).sin()
        loss = out.exp().sum()
    trial.push_out()
    node: Any = out.grad_fn
    with torch.inference_mode():
        assert torch.equal(node._saved_self, leaf * 2)
    loss.backward()
    plain = leaf.detach().clone().requires_grad_()
    (plain * 2).sin().exp().sum().backward()
    assert torch.equal(*grads(leaf), *grads(plain))
