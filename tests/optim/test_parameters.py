"""Parameters of a model: tied, used twice or never, frozen, shared out to several optimizers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import Module

import spillway
from optim.support import (
    assert_same_state,
    assert_same_values,
    batches,
    is_away,
    loss_of,
    offloaded,
    plainly,
    wide,
)
from spillway import OffloadedOptimizer

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}


class Tied(Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.inner = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.spare = torch.nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.embedding(x))
        return self.head(self.inner(y))


def test_tied_parameters_those_used_twice_and_those_never_used(session: spillway.Session) -> None:
    torch.manual_seed(0)
    plain = Tied()
    model = copy.deepcopy(plain)
    optimizer = offloaded(torch.optim.AdamW, session, lr=0.01)(model)
    reference = plainly(torch.optim.AdamW, lr=0.01)(plain)
    for number in range(4):
        tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(number))
        for module, one in ((model, optimizer), (plain, reference)):
            module(tokens).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            one.step()
            one.zero_grad()
        assert_same_values(model, plain)
    assert model.spare.weight.grad is None
    assert model.spare.weight not in optimizer.state
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()


def test_parameters_that_are_used_now_and_then(session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.AdamW)(models[0]), offloaded(torch.optim.AdamW, session)(models[1])
    for number, batch in enumerate(batches(6)):
        for model, optimizer in zip(models, optimizers, strict=True):
            y = model.first(batch)
            for block in model.blocks[: 1 + number % 2]:
                y = block(y)
            model.last(y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(models[1], models[0])
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())
    optimizers[1].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_that_are_frozen_and_unfrozen(dtype: torch.dtype, session: spillway.Session) -> None:
    models = wide(dtype), wide(dtype)
    for model in models:
        model.first.requires_grad_(False)
    optimizers = (
        plainly(torch.optim.AdamW)(models[0]),
        offloaded(torch.optim.AdamW, session, master_dtype=None)(models[1]),
    )
    for number, batch in enumerate(batches(6, dtype)):
        for model, optimizer in zip(models, optimizers, strict=True):
            if number == 2:
                model.first.requires_grad_(True)
                model.blocks[0].requires_grad_(False)
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_values(models[1], models[0])
    loss_of(models[1], batches(1, dtype)[0]).backward()
    assert is_away(models[1].first.weight.grad), "what is unfrozen leaves in backward, too"
    assert models[1].blocks[0].up.weight.grad is None
    optimizers[1].close()  # type: ignore[attr-defined]


def test_two_optimizers_over_different_parameters_of_a_model(session: spillway.Session) -> None:
    models = wide(), wide()
    parts = [[list(model.first.parameters()), list(model.blocks.parameters())] for model in models]
    plain = [torch.optim.SGD(parts[0][0], fused=True, **SGD), torch.optim.AdamW(parts[0][1], fused=True)]
    ours = [
        OffloadedOptimizer(parts[1][0], torch.optim.SGD, session=session, **SGD),
        OffloadedOptimizer(parts[1][1], torch.optim.AdamW, session=session),
    ]
    for number, batch in enumerate(batches(5)):
        for model, optimizers in ((models[0], plain), (models[1], ours)):
            loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers[: 1 + number % 2]:
                optimizer.step()
            model.zero_grad()
        assert_same_values(models[1], models[0])
    for one in ours:
        one.close()
    assert session.used_bytes == (0, 0)
