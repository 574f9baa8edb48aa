"""Hazards 1 to 4: what autograd packed once is asked for more than once, or out of turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spillway import EventKind
from support import Context, Trial, grads, mlp


def test_h01_second_backward_with_retain_graph(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(16, 64, 64, 1), torch.randn(8, 16, requires_grad=True)
        with context():
            loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        yield from [gradient.clone() for gradient in grads(*model.parameters(), batch)]
        loss.backward(retain_graph=True)
        yield from [gradient.clone() for gradient in grads(*model.parameters(), batch)]
        loss.backward()
        yield from grads(*model.parameters(), batch)

    trial(step)


def test_h01_each_backward_brings_a_storage_back_at_most_once(trial: Trial) -> None:
    # Saved three times, so unpacked three times in each backward: one copy back serves all three.
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        hidden = leaf * 2
        loss = (hidden.sin() + hidden.cos() + hidden.exp()).sum()
    del hidden
    trial.push_out()
    for backward in (1, 2, 3):
        trial.events.events.clear()
        loss.backward(retain_graph=True)
        counts = [event.entry for event in trial.events.events if event.kind is EventKind.TAKE]
        assert counts, f"backward {backward} took nothing back"
        assert len(counts) == len(set(counts))


def test_h01_backward_in_two_halves(trial: Trial) -> None:
    """``torch.autograd.grad`` for the inputs first, for the weights afterwards, over the same graph."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(16, 32, 32, 4), torch.randn(8, 16, requires_grad=True)
        with context():
            loss = model(batch).square().mean()
        yield from torch.autograd.grad(loss, [batch], retain_graph=True)
        yield from torch.autograd.grad(loss, list(model.parameters()))

    trial(step)


def test_h02_double_backward(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(16, 32, 32, 1), torch.randn(8, 16, requires_grad=True)
        with context():
            loss = model(batch).square().sum()
        (slope,) = torch.autograd.grad(loss, [batch], create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        (loss + penalty).backward()
        yield slope.detach()
        yield penalty.detach()
        yield from grads(*model.parameters(), batch)

    trial(step)


def test_h02_double_backward_inside_the_context(trial: Trial) -> None:
    """A gradient penalty as WGAN-GP computes it: the first backward runs under the hooks and saves anew."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(16, 32, 32, 1), torch.randn(8, 16, requires_grad=True)
        with context():
            score = model(batch).square().sum()
            (slope,) = torch.autograd.grad(score, [batch], create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
        (score + penalty).backward()
        yield penalty.detach()
        yield from grads(*model.parameters(), batch)

    trial(step)


def test_h02_third_derivative(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(256, requires_grad=True)
        with context():
            value = (leaf.sin() * leaf.exp()).tanh().sum()
            for _ in range(3):
                (slope,) = torch.autograd.grad(value, [leaf], create_graph=True)
                value = slope.sum()
        yield slope.detach()
        yield from torch.autograd.grad(value, [leaf])

    trial(step)


class ReadsTwice(torch.autograd.Function):
    """Reads ``ctx.saved_tensors`` twice in one backward: each reading unpacks."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return left * right

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (_, right), (left, _) = ctx.saved_tensors, ctx.saved_tensors
        return gradient * right, gradient * left


def test_h03_saved_tensors_read_twice(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf, other = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
        with context():
            out = ReadsTwice.apply(leaf.sin(), other.cos())
            loss = ReadsTwice.apply(out, out.exp()).sum()
        loss.backward()
        yield from grads(leaf, other)

    trial(step)


def test_h04_saved_tensor_read_outside_of_backward(trial: Trial) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        hidden = leaf * 2
        out = hidden.sin()
        loss = out.exp().sum()
    content = hidden.detach().clone()
    del hidden
    trial.push_out()
    node: Any = out.grad_fn
    assert torch.equal(node._saved_self, content)
    assert torch.equal(node._saved_self, content)
    loss.backward()
    plain = content.requires_grad_()
    plain.sin().exp().sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad * 2)
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = node._saved_self


def test_h04_unpacked_in_any_order(trial: Trial) -> None:
    """Saved tensors read from the graph in an order that no backward would choose, again and again."""
    leaf = torch.randn(256, requires_grad=True)
    outs: list[torch.Tensor] = []
    contents: list[torch.Tensor] = []
    with trial.offload():
        hidden = leaf
        for _ in range(6):
            hidden = hidden * 1.25
            contents.append(hidden.detach().clone())
            outs.append(hidden.sin())
            hidden = outs[-1]
    trial.push_out()
    nodes: list[Any] = [out.grad_fn for out in outs]
    del hidden, outs
    for index in (2, 5, 0, 0, 3, 1, 4, 2, 5):
        assert torch.equal(nodes[index]._saved_self, contents[index])


def test_h04_first_backward_runs_after_the_session_worked_on_other_graphs(trial: Trial) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        loss = (leaf * 2).sin().exp().sum()
    for _ in range(3):
        other = torch.randn(256, requires_grad=True)
        with trial.offload():
            (other * 3).cos().exp().sum().backward()
    loss.backward()
    plain = leaf.detach().clone().requires_grad_()
    (plain * 2).sin().exp().sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad)
