"""Hazards 14 and 15: what is raised in forward or backward passes through, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import spillway
from spillway import Decision, SavedTensor
from spillway.policies import Modules, Offload, Operators
from support import Context, Trial, assert_nothing_left, grads, mlp


class Deliberate(Exception):
    """Raised by these tests and by nothing else."""


class Raises(torch.autograd.Function):
    """Raises in forward or in backward, or in neither."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if where == "forward":
            raise Deliberate
        ctx.save_for_backward(tensor)
        ctx.where = where
        return tensor * tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tensor,) = ctx.saved_tensors
        if ctx.where == "backward":
            raise Deliberate
        return 2 * gradient * tensor, None


def healthy(context: Context) -> Iterator[torch.Tensor]:
    """A step without a fault: what must still work after one with."""
    model, batch = mlp(16, 64, 64, 1), torch.randn(8, 16, requires_grad=True)
    with context():
        loss = model(batch).square().mean()
    loss.backward()
    yield loss.detach()
    yield from grads(*model.parameters(), batch)


@pytest.mark.parametrize("error", [Deliberate, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("depth", [1, 3])
def test_h14_exception_in_forward(trial: Trial, error: type[BaseException], depth: int) -> None:
    def nested(levels: int, tensor: torch.Tensor) -> torch.Tensor:
        with trial.offload():
            tensor = (tensor * 2).sin().exp().sin()
            if levels == 1:
                raise error
            return nested(levels - 1, tensor).cos()

    with pytest.raises(error):
        nested(depth, torch.randn(256, requires_grad=True))
    assert_nothing_left(trial.session)
    trial(healthy)


@pytest.mark.parametrize(
    "context",
    [
        lambda trial: trial.offload(policy=Modules("*", Offload())),
        lambda trial: trial.offload(policy=Operators("*", Offload())),
        lambda trial: spillway.keep(),
    ],
    ids=["offload-modules", "offload-operators", "keep"],
)
def test_h14_exception_leaves_no_hook_of_any_kind(
    trial: Trial, context: Callable[[Trial], AbstractContextManager[object]]
) -> None:
    model = mlp(16, 64, 64, 1)

    def fail(*_: object) -> None:
        raise Deliberate

    model[2].register_forward_hook(fail)
    with pytest.raises(Deliberate), context(trial):
        model(torch.randn(8, 16))
    assert_nothing_left(trial.session)
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks
    trial(healthy)


def test_h14_exception_in_an_operator_that_had_packed(trial: Trial) -> None:
    def once() -> None:
        leaf = torch.randn(256, requires_grad=True)
        with trial.offload():
            hidden = (leaf * 2).sin().exp()
            hidden = Raises.apply(Raises.apply(hidden, ""), "forward")

    with pytest.raises(Deliberate):
        once()
    assert_nothing_left(trial.session)
    trial(healthy)


@pytest.mark.parametrize("answer", ["raises", "nonsense"])
def test_h14_exception_in_a_policy(trial: Trial, answer: str) -> None:
    def policy(saved: SavedTensor) -> Decision:
        if saved.position < 2:
            return Decision.OFFLOAD
        if answer == "raises":
            raise Deliberate
        return "away"  # type: ignore[return-value]

    def once() -> None:
        leaf = torch.randn(256, requires_grad=True)
        with trial.offload(policy=policy):
            (leaf * 2).sin().exp().sin().exp().sin()

    with pytest.raises(Deliberate if answer == "raises" else spillway.PolicyError):
        once()
    assert_nothing_left(trial.session)
    trial(healthy)


def test_h14_what_was_computed_before_the_exception_is_still_right(trial: Trial) -> None:
    """A loop that stops early by an exception, and goes back through what it has."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(256, requires_grad=True)
        hidden = leaf * 2
        with pytest.raises(Deliberate), context():  # noqa: PT012
            for count in range(8):
                hidden = (hidden * 1.5).sin() * hidden
                if count == 5:
                    raise Deliberate
        hidden.sum().backward()
        yield from grads(leaf)

    trial(step)


def faulty_graph(trial: Trial) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and a loss whose backward raises halfway."""
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        hidden = (leaf * 2).sin().exp().sin().exp()
        hidden = Raises.apply(hidden, "backward")
        loss = (hidden.sin().exp().sin() * 2).exp().sum()
    trial.push_out()
    return leaf, loss


def test_h15_exception_in_backward(trial: Trial) -> None:
    _, loss = faulty_graph(trial)
    with pytest.raises(Deliberate):
        loss.backward()
    del loss
    assert_nothing_left(trial.session)
    trial(healthy)


def test_h15_exception_in_backward_and_the_next_step_runs_while_the_graph_lives(trial: Trial) -> None:
    _, loss = faulty_graph(trial)
    with pytest.raises(Deliberate):
        loss.backward(retain_graph=True)
    leaf = torch.randn(256, requires_grad=True)
    plain = leaf.detach().clone().requires_grad_()
    with trial.offload():
        good = (leaf * 2).sin().exp().sin().sum()
    good.backward()
    (plain * 2).sin().exp().sin().sum().backward()
    assert torch.equal(*grads(leaf), *grads(plain))
    with pytest.raises(Deliberate):
        loss.backward()
    del loss, good
    assert_nothing_left(trial.session)


def test_h15_exception_in_a_tensor_hook_and_a_second_try(trial: Trial) -> None:
    """The hook raises the first time only: with ``retain_graph`` the second backward is as good as any."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf, failures = torch.randn(256, requires_grad=True), [Deliberate()]
        with context():
            hidden = (leaf * 2).sin().exp()
            middle = hidden.sin().exp()
            loss = (middle.sin() * 2).exp().sum()

        def fail_once(gradient: torch.Tensor) -> None:
            if failures:
                raise failures.pop()

        middle.register_hook(fail_once)
        with pytest.raises(Deliberate):
            loss.backward(retain_graph=True)
        assert leaf.grad is None
        loss.backward()
        yield from grads(leaf)

    trial(step)


def test_h15_exception_in_a_backward_inside_the_context(trial: Trial) -> None:
    def once() -> None:
        leaf = torch.randn(256, requires_grad=True)
        with trial.offload():
            hidden = Raises.apply((leaf * 2).sin().exp(), "backward")
            hidden.sin().exp().sum().backward()

    with pytest.raises(Deliberate):
        once()
    assert_nothing_left(trial.session)
    trial(healthy)


def test_h15_autograd_refuses_a_second_backward_as_ever(trial: Trial) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        loss = (leaf * 2).sin().exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
