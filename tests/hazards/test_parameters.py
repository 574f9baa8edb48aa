"""Hazards 19 and 20: parameters, views of parameters and sharded parameters stay, and are not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spillway import EventKind
from spillway.saved_tensors.scopes import innermost_scope
from support import Context, Trial, grads, mlp

USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "linear, which saves weight.t()": torch.nn.functional.linear,
    "matmul with a view": lambda x, w: x @ w.view(64, 64).t(),
    "slices of one weight": lambda x, w: torch.cat([x @ w[:32].t(), x @ w[32:].t()], -1),
    "a view of a view, expanded": lambda x, w: torch.bmm(x[None], w.t().t()[None].expand(1, 64, 64)),
    "a product": lambda x, w: x * w[0] * w.diagonal(),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("use", USES)
def test_h19_views_of_parameters_stay(trial: Trial, use: str, frozen: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(64, 64), requires_grad=not frozen)
    batch = torch.randn(8, 64, requires_grad=True)
    parameter_bytes = weight.untyped_storage()
    seen: list[torch.UntypedStorage] = []
    with trial.offload():
        out = USES[use](batch, weight)
        out.sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.untyped_storage()), lambda _: None):
        USES[use](batch, weight)
    assert any(storage is parameter_bytes for storage in seen), "nothing of the parameter was saved"
    assert all(event.nbytes < parameter_bytes.nbytes() for event in trial.events.events)


@pytest.mark.parametrize("use", USES)
def test_h19_the_same_alias_is_handed_back(trial: Trial, use: str) -> None:
    """Not a copy, though the tensor that autograd saved is long gone: it is the parameter's memory that is read."""
    weight = torch.nn.Parameter(torch.randn(64, 64))
    handles: list[Any] = []
    context = trial.offload()
    with context:
        current = innermost_scope(trial.session, None)
        assert current is not None
        for view in (weight, weight.t(), weight[3:7], weight.view(-1)[None].expand(5, -1)):
            handles.append(current.pack(view))
    for handle in handles:
        assert handle.unpack().untyped_storage() is weight.untyped_storage()
    assert trial.count(EventKind.LEAVE) == 0
    del handles, current


def test_h19_buffers_known_as_such_stay(trial: Trial) -> None:
    buffer = torch.nn.Buffer(torch.randn(64, 64))
    leaf = torch.randn(8, 64, requires_grad=True)
    with trial.offload():
        (leaf @ buffer.t()).sum().backward()
    assert trial.count(EventKind.LEAVE) == 0


def test_h19_a_detached_parameter_is_right(trial: Trial) -> None:
    """A bare context cannot know that ``weight.detach().t()`` is a parameter: it may move, and must be exact."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        model, batch = mlp(16, 64, 64, 16), torch.randn(8, 16, requires_grad=True)
        with context():
            hidden = model(batch)
            for layer in model:
                if isinstance(layer, torch.nn.Linear):
                    hidden = hidden @ layer.weight.detach().t()[:16, :16]
            loss = hidden.square().mean()
        loss.backward()
        yield from grads(*model.parameters(), batch)

    trial(step)


def test_h19_tied_and_transposed_weights(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        embedding = torch.nn.Embedding(32, 64)
        tokens = torch.randint(32, (4, 8))
        with context():
            hidden = embedding(tokens).sin()
            loss = torch.nn.functional.cross_entropy((hidden @ embedding.weight.t()).flatten(0, 1), tokens.flatten())
        del hidden
        loss.backward()
        yield from grads(embedding.weight)

    trial(step)


def sharded(model: torch.nn.Sequential, *, reshard: bool) -> torch.nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "unsharded"])
def test_h20_fsdp2(trial: Trial, one_rank: None, reshard: bool) -> None:
    """Unsharded parameters lose their memory after forward and get it again in backward: never copy them."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        model = sharded(mlp(32, 64, 64, 8), reshard=reshard)
        for batch in torch.randn(2, 16, 32):
            with context():
                loss = model(batch).square().mean()
            loss.backward()
            yield loss.detach()
            yield from [gradient.full_tensor() for gradient in grads(*model.parameters())]  # type: ignore[attr-defined]

    trial(step)


def test_h20_fsdp2_moves_what_the_plain_model_moves(trial: Trial, one_rank: None) -> None:
    moved = []
    for model in (mlp(32, 64, 64, 8), sharded(mlp(32, 64, 64, 8), reshard=True)):
        trial.events.events.clear()
        with trial.offload(tag=type(model[0]).__name__):
            loss = model(torch.randn(16, 32)).square().mean()
        moved.append(trial.nbytes(EventKind.LEAVE))
        loss.backward()
        del loss
    assert moved[0] == moved[1]


def test_h20_fsdp2_forward_without_backward(trial: Trial, one_rank: None) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model = sharded(mlp(32, 64, 64, 8), reshard=True)
        with context():
            loss = model(torch.randn(16, 32)).square().mean()
        del loss
        with context():
            loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        yield from [gradient.full_tensor() for gradient in grads(*model.parameters())]  # type: ignore[attr-defined]

    trial(step)
