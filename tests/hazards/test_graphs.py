"""Hazards 5 to 8 and 10 to 13: graphs that are dropped, half used, or alive beside each other."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

import spillway
from spillway import EventKind
from spillway.saved_tensors.hooks import SavedState
from support import Context, Trial, Way, assert_nothing_left, grads, mlp


def test_h05_forward_without_backward(trial: Trial, no_collector: None) -> None:
    model = mlp(16, 64, 64, 1)
    for _ in range(3):
        with trial.offload():
            loss = model(torch.randn(8, 16)).square().mean()
        trial.push_out()
        assert trial.session.used_bytes != (0, 0)
        del loss
        assert_nothing_left(trial.session)
    assert trial.count(EventKind.RELEASE) > 0


def test_h05_graph_dropped_inside_the_context(trial: Trial, no_collector: None) -> None:
    """While some of it waits to leave, some is leaving and some is away."""
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        for _ in range(4):
            loss = (leaf * 2).sin().exp().tanh().sum()
            del loss
        trial.session.runtime(leaf.device).mover.read_notes()  # as whoever saves next would
        assert len(trial.session.of(SavedState).identity) == 0
    assert_nothing_left(trial.session)


def test_h05_graph_dies_in_another_thread(trial: Trial) -> None:
    held = [torch.randn(256, requires_grad=True)]
    with trial.offload():
        held.append((held[0] * 2).sin().exp().sum())
    trial.push_out()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert_nothing_left(trial.session)


def test_h06_an_unused_branch(trial: Trial) -> None:
    """A mixture of experts, of which some get no gradient, and others in the next step."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        experts = [mlp(16, 64, 16) for _ in range(4)]
        for used in ((0, 2), (1, 3), (0, 1, 2, 3), ()):
            batch = torch.randn(8, 16, requires_grad=True)
            with context():
                outs = [expert(batch * 2).square().mean() for expert in experts]
                loss = sum((outs[index] for index in used), start=batch.exp().sum())
            loss.backward()
            yield from [gradient.clone() for gradient in grads(batch)]
        yield from grads(*(parameter for expert in experts for parameter in expert.parameters()))

    trial(step)


def test_h06_an_unused_branch_is_given_back_with_its_graph(trial: Trial, no_collector: None) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        used, unused = (leaf * 2).sin().exp().sum(), (leaf * 3).cos().exp().sum()
    used.backward()
    trial.push_out()
    assert len(trial.session.of(SavedState).identity) > 0, "the branch that was not used could still be asked for"
    del unused
    assert_nothing_left(trial.session)


@pytest.mark.parametrize("context", ["offload", "offload-keeps", "keep"])
def test_h07_h08_no_bookkeeping_holds_a_saved_output(trial: Trial, no_collector: None, context: str) -> None:
    """``exp`` saves its own output: whoever holds that very tensor holds the graph that holds the handle."""
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "offload": trial.offload,
        "offload-keeps": lambda: trial.offload(policy=spillway.policies.Keep()),
        "keep": spillway.keep,
    }
    leaf = torch.randn(256, requires_grad=True)
    with contexts[context]():
        out = leaf.exp()
        loss = out.sigmoid().sum()

    def hook(gradient: torch.Tensor) -> None:
        """Lives as long as the node that it is registered with."""

    out.register_hook(hook)
    graph, tensor, storage = weakref.ref(hook), weakref.ref(out), weakref.ref(out.untyped_storage())
    del hook, out, loss
    assert tensor() is None
    assert graph() is None
    trial.push_out()
    assert storage() is None
    assert_nothing_left(trial.session)


def test_h07_the_graph_is_free_after_backward_though_the_loss_is_held(trial: Trial, no_collector: None) -> None:
    leaf = torch.randn(256, requires_grad=True)
    losses = []
    for _ in range(3):
        with trial.offload():
            losses.append(leaf.exp().sigmoid().softmax(0).sum())
        losses[-1].backward()
        assert_nothing_left(trial.session)


def test_h10_two_graphs_alive_and_the_context_entered_twice(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model, one, two = mlp(16, 64, 64, 1), torch.randn(8, 16), torch.randn(8, 16)
        with context():
            first = model(one).square().mean()
        with context():
            second = model(two).square().mean()
        first.backward()
        yield from [gradient.clone() for gradient in grads(*model.parameters())]
        second.backward()
        yield from grads(*model.parameters())

    trial(step)


def test_h10_one_object_entered_again_and_nested(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf, again = torch.randn(256, requires_grad=True), context()
        with again:
            outer = (leaf * 2).sin().exp()
            with again:
                inner = (outer * 2).cos().exp()
                with again:
                    inner = inner.tanh()
            loss = (outer * inner).sum()
        with again:
            other = (leaf * 3).sin().exp().sum()
        other.backward()
        loss.backward()
        yield from grads(leaf)

    trial(step)


def test_h10_contexts_of_two_sessions_never_meet(trial: Trial, way: Way) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(256, requires_grad=True)
        with context():
            hidden = (leaf * 2).sin()
            with spillway.offload(session=other, min_bytes=0, tier="host"):
                hidden = (hidden * 2).exp() * hidden
            loss = (hidden.cos() * hidden).sum()
        loss.backward()
        yield from grads(leaf)

    with spillway.Session(window=way.window) as other:
        trial(step)
        assert_nothing_left(other)


def test_h11_two_losses_under_one_context(trial: Trial) -> None:
    """A GAN: the discriminator's loss goes back through a part of the graph, the generator's through all of it."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        generator, discriminator = mlp(8, 64, 32), mlp(32, 64, 1)
        noise, real = torch.randn(16, 8), torch.randn(16, 32)
        with context():
            fake = generator(noise)
            judged = discriminator(fake.detach()).mean() - discriminator(real).mean()
            deceived = -discriminator(fake).mean()
        judged.backward()
        yield from [gradient.clone() for gradient in grads(*discriminator.parameters())]
        deceived.backward()
        yield from grads(*generator.parameters(), *discriminator.parameters())

    trial(step)


def test_h11_two_losses_that_share_a_trunk(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        trunk, heads = mlp(16, 64, 32), [mlp(32, 32, 1), mlp(32, 32, 1)]
        batch = torch.randn(16, 16)
        with context():
            shared = trunk(batch)
            first, second = (head(shared).square().mean() for head in heads)
        second.backward(retain_graph=True)
        first.backward()
        yield from grads(*trunk.parameters(), *heads[0].parameters(), *heads[1].parameters())

    trial(step)


SCHEDULES = {
    "gpipe": "F0 F1 F2 F3 B0 B1 B2 B3",
    "reversed": "F0 F1 F2 F3 B3 B2 B1 B0",
    "1f1b": "F0 F1 F2 B0 F3 B1 B2 B3",
    "interleaved": "F0 F1 B1 F2 F3 B0 B3 B2",
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("contexts", ["object-each", "backward-inside"])
def test_h12_pipeline_orders(trial: Trial, schedule: str, contexts: str) -> None:
    """Two parts of a model on one stage, four micro-batches: forwards and backwards in the order of the schedule."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        model = mlp(16, 64, 64, 1)
        batches = torch.randn(4, 8, 16, requires_grad=True)
        losses: dict[str, torch.Tensor] = {}
        with context() if contexts == "backward-inside" else contextlib.nullcontext():
            for direction, number in SCHEDULES[schedule].split():
                if direction == "F":
                    with context():
                        losses[number] = model(batches[int(number)]).square().mean()
                else:
                    losses.pop(number).backward()
                    yield from [gradient.clone() for gradient in grads(batches, *model.parameters())]

    trial(step)


def test_h12_backward_of_a_graph_inside_the_forward_of_the_next(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batches = mlp(16, 64, 64, 1), torch.randn(3, 8, 16)
        with context():
            previous = model(batches[0]).square().mean()
            for batch in batches[1:]:
                hidden = model[:2](batch)
                previous.backward()
                previous = model[2:](hidden).square().mean()
        previous.backward()
        yield from grads(*model.parameters())

    trial(step)


@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_h13_accumulation(trial: Trial, inside: bool) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model = mlp(16, 64, 64, 1)
        for _ in range(2):
            for batch in torch.randn(4, 8, 16):
                with context():
                    loss = model(batch).square().mean() / 4
                    if inside:
                        loss.backward()
                if not inside:
                    loss.backward()
                yield loss.detach()
            yield from [gradient.clone() for gradient in grads(*model.parameters())]
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), grads(*model.parameters()), strict=True):
                    parameter -= 0.1 * gradient
            model.zero_grad()
        yield from [parameter.detach() for parameter in model.parameters()]

    trial(step)
