"""Hazards 28, 29, 60 and 61: nested with ``torch.utils.checkpoint``, outside of it and within."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import spillway
from spillway import Decision, EventKind, SavedTensor
from spillway.policies import Modules, Offload
from support import HOOKS_OF_SELECTIVE, Context, Trial, assert_nothing_left, grads, mlp

reentrancy = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
backward_place = pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])


@reentrancy
@backward_place
def test_h28_around_checkpointed_blocks(trial: Trial, reentrant: bool, inside: bool) -> None:
    """Only what the checkpoints keep leaves. With backward inside, the recompute saves under the same hooks."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        blocks = [mlp(32, 64, 32) for _ in range(4)]
        batch = torch.randn(16, 32, requires_grad=True)
        with context():
            hidden = batch * 2
            for block in blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            loss = hidden.square().mean()
            del hidden
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        yield loss.detach()
        yield from grads(batch, *(parameter for block in blocks for parameter in block.parameters()))

    trial(step)


@reentrancy
@backward_place
def test_h28_the_recompute_is_not_offloaded_again(trial: Trial, reentrant: bool, inside: bool) -> None:
    block = mlp(32, 64, 64, 32)
    batch = torch.randn(16, 32, requires_grad=True)
    with trial.offload():
        hidden = checkpoint(block, batch * 2, use_reentrant=reentrant)
        loss = checkpoint(block, hidden, use_reentrant=reentrant).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    # The inputs of the two; with backward inside, the second is asked for before it leaves.
    assert trial.nbytes(EventKind.LEAVE) == (1 if inside else 2) * batch.nbytes


@reentrancy
@backward_place
def test_h28_inside_of_checkpointed_blocks(trial: Trial, reentrant: bool, inside: bool) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        blocks = [mlp(32, 64, 32) for _ in range(3)]
        batch = torch.randn(16, 32, requires_grad=True)

        def region(block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.sin()
            with context():
                hidden = block(hidden)
            return hidden.cos()

        hidden = batch * 2
        for block in blocks:
            hidden = checkpoint(region, block, hidden, use_reentrant=reentrant)
        hidden.square().mean().backward()
        yield from grads(batch, *(parameter for block in blocks for parameter in block.parameters()))

    # Reentrant, the first forward runs without gradients and saves nothing, and the second runs in backward.
    trial(step, moves=not reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@reentrancy
def test_h28_on_both_sides_and_nested(trial: Trial, reentrant: bool) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        first, second = mlp(32, 64, 32), mlp(32, 64, 32)
        batch = torch.randn(16, 32, requires_grad=True)

        def inner(hidden: torch.Tensor) -> torch.Tensor:
            with context(tag="inner"):
                return second(hidden.sin())

        def outer(hidden: torch.Tensor) -> torch.Tensor:
            with context(tag="outer"):
                hidden = first(hidden)
            return checkpoint(inner, hidden, use_reentrant=reentrant).cos()

        with context():
            hidden = checkpoint(outer, batch * 2, use_reentrant=reentrant)
            loss = hidden.exp().square().mean()
        del hidden
        loss.backward()
        yield loss.detach()
        yield from grads(batch, *first.parameters(), *second.parameters())

    trial(step)


@reentrancy
def test_h28_with_dropout_and_autocast(trial: Trial, reentrant: bool) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 32))
        batch = torch.randn(16, 32, requires_grad=True)
        with context(), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.nn.functional.dropout(batch * 2, 0.2)
            hidden = checkpoint(model, hidden, use_reentrant=reentrant)
            loss = torch.nn.functional.dropout(hidden, 0.2).square().mean()
        del hidden
        loss.backward()
        yield from grads(batch, *model.parameters())

    trial(step)


@pytest.mark.parametrize("more", HOOKS_OF_SELECTIVE, ids=str)
def test_h28_with_selective_checkpoint(trial: Trial, more: dict[str, bool]) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        block, batch = mlp(32, 64, 64, 32), torch.randn(16, 32, requires_grad=True)
        with context():
            hidden = checkpoint(
                block,
                batch * 2,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default]),
                **more,
            )
            loss = hidden.square().mean()
        del hidden
        loss.backward()
        yield from grads(batch, *block.parameters())

    trial(step)


@reentrancy
def test_h28_a_graph_dropped_without_backward(trial: Trial, no_collector: None, reentrant: bool) -> None:
    blocks = [mlp(32, 64, 32) for _ in range(3)]
    with trial.offload():
        hidden = torch.randn(16, 32, requires_grad=True) * 2
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
    trial.push_out()
    del hidden
    assert_nothing_left(trial.session)


def test_h28_second_backward_over_a_checkpoint(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        block, batch = mlp(32, 64, 32), torch.randn(16, 32, requires_grad=True)
        with context():
            hidden = checkpoint(block, batch * 2, use_reentrant=False)
            loss = (hidden.sin() * hidden.exp()).mean()
        del hidden
        (slope,) = torch.autograd.grad(loss, [batch], create_graph=True)
        slope.square().sum().backward(retain_graph=True)
        loss.backward()
        yield from grads(batch, *block.parameters())

    trial(step)


def test_h29_tensors_passed_by_keyword(trial: Trial) -> None:
    """A closure holds them: no hook sees them, so they stay. (The reentrant checkpoint takes no keywords.)"""

    def region(hidden: torch.Tensor, *, gate: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden.sin() * gate.exp()
        return hidden if mask is None else hidden * mask

    def step(context: Context) -> Iterator[torch.Tensor]:
        batch, gate = torch.randn(16, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
        with context():
            opened = gate.sigmoid()
            hidden = checkpoint(region, batch * 2, gate=opened, mask=torch.ones(16, 32), use_reentrant=False)
            hidden = checkpoint(region, hidden, gate=opened * 2, use_reentrant=False)
            loss = hidden.square().mean()
        del hidden, opened
        loss.backward()
        yield from grads(batch, gate)

    trial(step)


def test_h29_positional_tensors_leave_and_keyword_tensors_do_not(trial: Trial) -> None:
    def region(hidden: torch.Tensor, *, gate: torch.Tensor) -> torch.Tensor:
        return hidden.sin() * gate

    batch = torch.randn(16, 32, requires_grad=True)
    with trial.offload():
        loss = checkpoint(region, batch * 2, gate=torch.randn(64, 16, 32), use_reentrant=False).sum()
    assert trial.nbytes(EventKind.LEAVE) == batch.nbytes
    loss.backward()


@pytest.mark.parametrize("early_stop", [True, False])
def test_h60_h61_used_within_a_checkpointed_function(trial: Trial, early_stop: bool) -> None:
    """Torch counts the packs of the re-run: contexts that come and go there must not shift the count.

    Early stop is an exception that passes through the context in the middle of the re-run: no fault.
    """

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(256, requires_grad=True)
        other = torch.randn(256, requires_grad=True)

        def region(hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            # What is saved differs from line to line, in content and kind, so that a shifted count would show.
            hidden = hidden.sin() * gate.exp()
            with context(tag="first"):
                hidden = (hidden * gate).tanh() * hidden.sigmoid()
            hidden = hidden.softmax(0) * gate.cos()
            with context(tag="second"), spillway.keep():
                hidden = hidden.exp() * gate
                with context(tag="third"):
                    hidden = hidden.sigmoid() * hidden
            return hidden.cos() * 3

        with set_checkpoint_early_stop(early_stop):
            out = checkpoint(region, leaf * 2, other * 2, use_reentrant=False)
            (out.sin() * out).sum().backward()
        yield from grads(leaf, other)

    trial(step)


@pytest.mark.parametrize("early_stop", [True, False])
def test_h60_the_last_thing_saved_is_saved_within_the_context(trial: Trial, early_stop: bool) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(32, 64, 32), torch.randn(16, 32, requires_grad=True)

        def region(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.sin().exp()
            with context():
                return model(hidden) * 2

        with set_checkpoint_early_stop(early_stop), context(tag="outer"):
            loss = checkpoint(region, batch * 2, use_reentrant=False).square().mean()
        loss.backward()
        yield from grads(batch, *model.parameters())

    trial(step)


def test_h61_early_stop_leaves_no_hook_in_the_middle_of_a_forward(trial: Trial) -> None:
    """The re-run is cut off within a context that had installed module hooks too."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(32, 64, 64, 32), torch.randn(16, 32, requires_grad=True)

        def region(hidden: torch.Tensor) -> torch.Tensor:
            hidden = hidden.sin().exp()
            with context(policy=Modules("*", Offload())):
                return model(hidden).sum() * 2  # saves nothing after the last linear: early stop comes before it

        loss = checkpoint(region, batch * 2, use_reentrant=False)
        loss.backward()
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert not torch.nn.modules.module._global_forward_hooks
        yield from grads(batch, *model.parameters())

    trial(step)


def test_h61_what_was_learned_is_not_forgotten_for_an_early_stop(trial: Trial) -> None:
    """The pass that counts is the first forward: a re-run that is cut off must not overwrite its total."""
    leaf = torch.randn(256, requires_grad=True)
    totals: list[int | None] = []

    def policy(saved: SavedTensor) -> Decision:
        totals.append(saved.total_bytes)
        return Decision.OFFLOAD

    def region(hidden: torch.Tensor) -> torch.Tensor:
        with trial.offload(policy=policy, tag="region"):
            hidden = hidden.sin().exp().sin().exp().sin()
        return hidden.cos() * 2

    for _ in range(3):
        checkpoint(region, leaf * 2, use_reentrant=False).sum().backward()
    assert totals == [None] * 3 + [3 * leaf.nbytes] * 6
