"""Hazards 9 and 63: tensors that change after autograd saved them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import spillway
from spillway import EventKind
from spillway.policies import Keep
from support import Context, Trial, grads

AUTOGRAD_SAYS = (
    r"one of the variables needed for gradient computation has been modified by an inplace operation: "
    r"\[torch\.FloatTensor \[256\]\] is at version 1; expected version 0 instead"
)

CONTEXTS: dict[str, Callable[[Trial], AbstractContextManager[object]]] = {
    "away": lambda trial: trial.offload(),
    "kept": lambda trial: trial.offload(policy=Keep()),
    "keep-context": lambda trial: spillway.keep(),
}


@pytest.fixture(params=CONTEXTS)
def context(request: pytest.FixtureRequest, trial: Trial) -> AbstractContextManager[object]:
    return CONTEXTS[request.param](trial)


def test_h09_input_changed(trial: Trial, context: AbstractContextManager[object]) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with context:
        hidden = leaf * 2
        loss = hidden.sin().sum()
    trial.push_out()
    hidden.add_(1)
    with pytest.raises(spillway.InplaceError, match=AUTOGRAD_SAYS):
        loss.backward()


def test_h09_the_words_are_those_of_the_installed_torch() -> None:
    """Up to the node that made the tensor, which torch's own message names in between."""
    leaf = torch.randn(256, requires_grad=True)
    hidden = leaf * 2
    loss = hidden.sin().sum()
    hidden.add_(1)
    with pytest.raises(RuntimeError, match=AUTOGRAD_SAYS.replace(" is at", ".* is at")):
        loss.backward()


def test_h09_output_changed(trial: Trial, context: AbstractContextManager[object]) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with context:
        out = (leaf * 2).exp()
        loss = (out * 3).sum()
    trial.push_out()
    out.mul_(2)
    with pytest.raises(spillway.InplaceError, match=AUTOGRAD_SAYS):
        loss.backward()


@pytest.mark.parametrize("way_in", ["through-a-view", "through-the-base", "through-detach", "under-no-grad"])
def test_h09_changed_through_an_alias(trial: Trial, context: AbstractContextManager[object], way_in: str) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with context:
        base = leaf * 2
        saved = base[:] if way_in == "through-the-base" else base
        loss = saved.sin().sum()
    trial.push_out()
    if way_in == "through-a-view":
        base[3:5].zero_()
    elif way_in == "through-the-base":
        base.add_(1)
    elif way_in == "through-detach":
        base.detach().add_(1)
    else:
        with torch.no_grad():
            base.add_(1)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        loss.backward()


def test_h09_leaf_changed(trial: Trial, context: AbstractContextManager[object]) -> None:
    """An optimizer's step between forward and backward."""
    weight = torch.nn.Parameter(torch.randn(16, 16))
    with context:
        loss = (torch.randn(4, 16, requires_grad=True) @ weight).square().sum()
    with torch.no_grad():
        weight.sub_(0.1)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        loss.backward()


def test_h09_changed_before_it_has_left(trial: Trial) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        hidden = leaf * 2
        loss = hidden.sin().sum()
        hidden.add_(1)
    with pytest.raises(spillway.InplaceError, match=AUTOGRAD_SAYS):
        loss.backward()


def test_h09_changed_though_its_tensor_is_gone(trial: Trial) -> None:
    """Only a view of it is left, through which it changes: the counter must be remembered without the tensor."""
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        hidden = leaf * 2
        view = hidden.detach()[10:20]
        loss = hidden.sin().sum()
    del hidden
    trial.push_out()
    view.zero_()
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        loss.backward()


class WritesIntoSaved(torch.autograd.Function):
    """A backward that uses what it saved as its scratch space: a second backward over it must be refused."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor * tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tensor,) = ctx.saved_tensors
        return tensor.mul_(2).mul_(gradient)


def test_h09_changed_by_a_backward_function(trial: Trial, context: AbstractContextManager[object]) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with context:
        loss = WritesIntoSaved.apply(leaf * 2).sum()
    trial.push_out()
    loss.backward(retain_graph=True)
    assert torch.equal(*grads(leaf), leaf.detach() * 8)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        loss.backward()


def legal(context: Context) -> Iterator[torch.Tensor]:
    """In-place changes that plain autograd allows, of which there are many: none may raise, and none may matter."""
    leaf, other = torch.randn(256, requires_grad=True), torch.randn(256)
    with context():
        hidden = (leaf * 2).add_(other).mul_(1.5).relu_()  # only relu_ saves: its result, after the changes
        scratch = hidden.detach().clone()
        kept = hidden.sin()
        scratch.zero_()
        dropped = kept.exp()  # saved by a node that nobody goes back through
        dropped.add_(1)
        buffer = torch.zeros(4, 256)
        for row in range(4):
            buffer = buffer.clone()
            buffer[row] = kept * row
        loss = (buffer.sigmoid_() * 2).sum()  # sigmoid_ saves its result
        other.add_(1)  # add_ did not save it
    del hidden
    loss.backward()
    yield loss.detach()
    yield from grads(leaf)
    buffer.detach().zero_()  # backward is over


def test_h09_legal_changes_do_not_raise(trial: Trial) -> None:
    trial(legal)


def test_h09_legal_changes_of_kept_tensors_do_not_raise(trial: Trial) -> None:
    trial(legal, policy=Keep(), moves=False)


def test_h09_saved_changed_and_saved_again(trial: Trial) -> None:
    """Two contents of one storage. Only the second is asked for: it must not be given the copy of the first."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(256)
        factors = [torch.randn(256, requires_grad=True) for _ in range(3)]
        losses = []
        with context():
            for factor in factors:
                leaf.add_(1)
                losses.append((leaf * factor).sin().exp().sum())
        del leaf
        losses[-1].backward()
        yield from grads(factors[-1])

    trial(step)


def test_h09_the_check_is_made_while_another_version_is_legal(trial: Trial) -> None:
    buffer = torch.randn(256)
    one, two = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    with trial.offload():
        first = (buffer * one).sum()
        buffer.add_(1)
        second = (buffer * two).sum()
    trial.push_out()
    expected = buffer.clone()
    del buffer
    second.backward()
    assert torch.equal(*grads(two), expected)
    with pytest.raises(spillway.InplaceError, match="is at version 1; expected version 0"):
        first.backward()


@pytest.mark.parametrize("saved_first", ["base", "alias"])
def test_h63_data_alias_with_the_same_version_and_other_content(trial: Trial, saved_first: str) -> None:
    """``.data`` counts from 0 anew: storage and version are those of the first, and the content is not."""
    content = torch.randn(256)
    one, two = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    buffer = content.clone()
    alias = buffer.data
    earlier, later = (buffer, alias) if saved_first == "base" else (alias, buffer)
    with trial.offload():
        first = (earlier * one).sum()
    trial.push_out()  # the copy of the first content is taken, and away
    assert trial.count(EventKind.RELEASE) == 1
    buffer.data.add_(1)
    assert earlier._version == later._version == 0
    with trial.offload():
        second = (later * two).sum()
    del buffer, alias, earlier, later
    trial.push_out()
    second.backward()
    assert torch.equal(*grads(two), content + 1)
    assert trial.count(EventKind.TAKE) == 1
    del first


def test_h63_data_alias_before_the_first_copy_is_taken(trial: Trial) -> None:
    """One operator saves both: nothing has left yet, and one copy taken later holds what both see."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        buffer = torch.randn(256)
        leaf = torch.randn(256, requires_grad=True)
        with context():
            loss = (buffer * leaf * buffer.data).sin().sum()
        del buffer
        trial.push_out()
        loss.backward()
        yield from grads(leaf)

    trial(step)


def test_h63_aliases_with_counters_of_their_own_are_checked_apart(trial: Trial) -> None:
    """Autograd does not see a change through ``.data``; one through the tensor itself it sees, for the tensor alone."""
    buffer = torch.randn(256)
    alias = buffer.data
    one, two = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    with trial.offload():
        first, second = (buffer * one).sum(), (alias * two).sum()
    buffer.add_(1)
    second.backward()
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        first.backward()


def test_h63_saved_bytes_of_an_alias_that_shares_its_counter_leave_once(trial: Trial) -> None:
    leaf = torch.randn(256, requires_grad=True)
    with trial.offload():
        hidden = leaf * 2
        loss = hidden.sin().sum() + hidden[:].cos().sum() + hidden.view(16, 16).exp().sum()
    assert trial.nbytes(EventKind.LEAVE) == 2 * 1024  # hidden, and the result of exp
    loss.backward()
