"""Parameters of a model: tied, used twice or never, frozen, shared out to several optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

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
from spillway import OffloadedOptimizer, UnsupportedError, UsageError

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


def removed(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups[0]["params"].pop(0)


def emptied(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups[1]["params"] = []


def deleted(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        del optimizer.param_groups[0]


def taken_out_and_back(model: Any, optimizer: Optimizer, step: int) -> None:
    parameters = optimizer.param_groups[1]["params"]
    if step == 1:
        parameters.pop(1)
    if step == 3:
        parameters.insert(0, model.blocks[0].norm.bias)


def moved(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(2))


def moved_with_other_state(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        first, second = optimizer.param_groups[1]["params"][2:4]
        optimizer.state[first]["exp_avg"] = torch.ones_like(first)
        optimizer.state[second]["exp_avg"].mul_(0.5)
    moved(model, optimizer, step)


def swapped(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups.reverse()


def one_group_for_each(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups = [
            {**optimizer.param_groups[0], "params": [one], "lr": 0.01 * 0.9**number}
            for number, one in enumerate(model.parameters())
        ]


def replaced(model: Any, optimizer: Optimizer, step: int) -> None:
    """Parameters that are pruned, with their state."""
    if step == 1:
        for group in optimizer.param_groups:
            for index, before in enumerate(group["params"]):
                if before is model.blocks[1].up.bias or before is model.first.weight:
                    name, module = ("bias", model.blocks[1].up) if before.ndim == 1 else ("weight", model.first)
                    state = optimizer.state[before]
                    for key in ("exp_avg", "exp_avg_sq"):
                        state[key] = state[key] * 0.5
                    del optimizer.state[before]
                    setattr(module, name, Parameter(before.detach() * 0.5))
                    group["params"][index] = getattr(module, name)
                    optimizer.state[getattr(module, name)] = state


def new_ones(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 1:
        getattr(optimizer, "synchronize", int)()
        for block in model.blocks:
            block.up.weight = Parameter(block.up.weight.detach().clone())
        optimizer.param_groups[0]["params"] = list(model.parameters())
        del optimizer.param_groups[1]


Edit = Callable[[Any, Optimizer, int], None]
EDITS = (
    removed,
    emptied,
    deleted,
    taken_out_and_back,
    moved,
    moved_with_other_state,
    swapped,
    one_group_for_each,
    replaced,
    new_ones,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"step_on": "gpu", "overlap": True},
        {"step_on": "auto", "cpu_share": 0.5},
        {"tier": "disk"},
        {"offload_gradients": False},
        {"fraction": 0.5},
        {"step_in_backward": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("when", ["before backward", "before step"])
def test_groups_that_were_edited(edit: Edit, options: dict[str, Any], when: str, session: spillway.Session) -> None:
    models: list[Any] = [wide(), wide()]
    options = dict(options)
    overlaps = options.pop("overlap", False)
    # Large chunks share settings, and a learning rate of each group tells which was used.
    groups = [
        [
            {"params": [*model.first.parameters(), model.last.weight, model.gain]},
            {"params": list(model.blocks.parameters()), "lr": 0.003, "weight_decay": 0.3},
        ]
        for model in models
    ]
    plain = torch.optim.AdamW(groups[0], lr=0.01, fused=True)
    ours = OffloadedOptimizer(groups[1], torch.optim.AdamW, session=session, lr=0.01, fused=True, **options)
    if overlaps:
        ours.overlap_forward(models[1])
    for number, batch in enumerate(batches(5)):
        for model, optimizer in zip(models, (plain, ours), strict=True):
            if when == "before backward":
                edit(model, optimizer, number)
            loss_of(model, batch).backward()
            if when == "before step":
                edit(model, optimizer, number)
            optimizer.step()
            model.zero_grad()
    ours.synchronize()
    assert_same_values(models[1], models[0])
    for one in (one for group in ours.param_groups for one in group["params"]):
        ours.state.setdefault(one, {})
    for optimizer in (plain, ours):
        inside = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for one in [one for one in optimizer.state if id(one) not in inside]:
            # Torch's own state dict has no place for it.
            del optimizer.state[one]
    assert_same_state(ours.state_dict(), plain.state_dict())
    ours.close()
    assert session.used_bytes == (0, 0)


def test_a_parameter_that_left_its_group_has_its_gradient(session: spillway.Session) -> None:
    model, plain = wide(torch.bfloat16), wide(torch.bfloat16)
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    for one in (model, plain):
        loss_of(one, batches(1, torch.bfloat16)[0]).backward()
    weight = model.first.weight
    assert is_away(weight.grad)
    before = weight.detach().clone()
    optimizer.param_groups[0]["params"].pop(1)
    optimizer.step()
    assert torch.equal(weight, before)
    assert weight.grad is not None and plain.first.weight.grad is not None
    assert not is_away(weight.grad)
    assert torch.equal(weight.grad, plain.first.weight.grad)
    assert not optimizer.holds(weight)
    optimizer.close()


def test_a_new_parameter_in_a_group_that_is_refused(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
    loss_of(model, batches(1)[0]).backward()
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.param_groups[0]["params"].append(Parameter(torch.ones(3).expand(2, 3)))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="overlap or leave gaps"):
            optimizer.step()
    assert_same_values(model.parameters(), before)
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    assert not torch.equal(model.first.weight, before[0])
    optimizer.close()


def test_groups_that_are_edited_after_parameters_have_stepped_in_backward(session: spillway.Session) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    optimizer = offloaded(torch.optim.SGD, session, lr=0.1, step_in_backward=True)(model)
    model(torch.ones(1, 1024)).sum().backward()
    kept = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = kept[1:]
    with pytest.raises(UsageError, match=r"parameters that left their group between a backward and its step\(\)"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = kept
    optimizer.step()
    optimizer.close()


def test_an_empty_group(session: spillway.Session) -> None:
    optimizer = OffloadedOptimizer([one := Parameter(torch.ones(2))], torch.optim.SGD, lr=0.5, session=session)
    optimizer.add_param_group({"params": [], "lr": 0.25})
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    one.sum().backward()
    optimizer.step()
    assert torch.equal(one, torch.full((2,), 0.75))
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"step_on": "gpu"}], ids=str)
def test_groups_that_are_edited_and_added_while_a_step_is_under_way(
    options: dict[str, Any], session: spillway.Session
) -> None:
    models: list[Any] = [wide(torch.bfloat16), wide(torch.bfloat16)]
    optimizers = (
        plainly(torch.optim.AdamW)(models[0]),
        offloaded(torch.optim.AdamW, session, master_dtype=None, fused=True, **options)(models[1]),
    )
    optimizers[1].overlap_forward(models[1])
    for number, batch in enumerate(batches(4, torch.bfloat16)):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                weight = optimizer.param_groups[0]["params"].pop(3)
                optimizer.add_param_group({"params": [], "lr": 0.1})
                optimizer.param_groups[1]["params"].append(weight)
    optimizers[1].synchronize()
    assert_same_values(models[1], models[0])
    optimizers[1].close()
