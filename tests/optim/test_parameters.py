"""Kinds of parameters: tied, unused, frozen, empty, complex, of odd strides; changed by somebody; refused."""

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
    here,
    implementation,
    is_away,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    train,
    wide,
)
from spillway import OffloadedOptimizer, SpillwayError, UnsupportedError, UsageError

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}

Make = Callable[[], Tensor]

SHAPES: dict[str, Make] = {
    "of no dimensions": lambda: torch.tensor(1.25),
    "empty": lambda: torch.zeros(3, 0, 2),
    "of one element": lambda: torch.ones(1, 1, 1),
    "transposed": lambda: torch.arange(15.0).view(3, 5).t(),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "with a size of one and an odd stride": lambda: torch.arange(6.0).as_strided((1, 6), (99, 1)),
    "in the middle of a storage": lambda: torch.arange(64.0)[7:29],
    "complex": lambda: torch.complex(torch.arange(6.0), torch.ones(6)),
    "complex, of no dimensions": lambda: torch.tensor(1.0 + 2.0j),
}


def strides_that_count(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def step_both(
    make: Make,
    optimizer_class: type[Optimizer],
    defaults: dict[str, Any],
    session: spillway.Session,
    deed: Callable[[Parameter], object] = lambda parameter: None,
    master_dtype: torch.dtype | None = None,
) -> None:
    ours, plain = Parameter(make()), Parameter(make())
    assert ours.stride() == make().stride()
    how = {"foreach": False} if ours.is_complex() else implementation(optimizer_class, ours.dtype)
    optimizer = OffloadedOptimizer([ours], optimizer_class, session=session, master_dtype=master_dtype, **defaults)
    reference = optimizer_class([plain], **defaults, **how)
    for number in range(3):
        results = []
        for parameter, one in ((ours, optimizer), (plain, reference)):
            for _ in range(1 + number % 2):
                torch.manual_seed(number)
                weight = torch.randn(parameter.shape, dtype=parameter.dtype)
                (parameter * weight).sum().abs().backward()  # type: ignore[no-untyped-call]
            results.append(deed(parameter))
            one.step()
            one.zero_grad()
        if isinstance(results[0], Tensor):
            assert same_bits(results[0], results[1])
            assert isinstance(results[1], Tensor)
            assert strides_that_count(results[0]) == strides_that_count(results[1])
        assert same_bits(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    for name, value in reference.state[plain].items():
        if isinstance(value, Tensor):
            assert strides_that_count(optimizer.state[ours][name]) == strides_that_count(value)
    optimizer.close()


@pytest.mark.parametrize("name", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, SGD), (torch.optim.RMSprop, {})],
    ids=["AdamW", "SGD", "RMSprop"],
)
def test_a_parameter_that_is(
    name: str, optimizer_class: type[Optimizer], defaults: dict[str, Any], session: spillway.Session
) -> None:
    step_both(SHAPES[name], optimizer_class, defaults, session)


@pytest.mark.parametrize("name", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize(
    "deed",
    [
        lambda p: p.grad.clone(),
        lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
        lambda p: p.grad.add_(torch.ones_like(p.grad), alpha=0.5).clone(),
        lambda p: p.grad.mul_(0.5).clone(),
        lambda p: (p.grad.norm(), p.grad.zero_())[0],
    ],
    ids=["clone", "clip", "write", "scale", "zero"],
)
@pytest.mark.parametrize("session", ["adversary"], indirect=True)
def test_a_gradient_of_a_parameter_that_is(
    name: str, deed: Callable[[Parameter], object], session: spillway.Session
) -> None:
    step_both(SHAPES[name], torch.optim.SGD, SGD, session, deed)


@pytest.mark.parametrize("name", [name for name in SHAPES if "complex" not in name], ids=lambda n: n.replace(" ", "-"))
def test_a_narrow_parameter_that_is(name: str, session: spillway.Session) -> None:
    ours = Parameter(SHAPES[name]().bfloat16())
    plain = Parameter(SHAPES[name]().bfloat16())
    master = Parameter(plain.detach().float())
    optimizer = OffloadedOptimizer([ours], torch.optim.AdamW, lr=0.1, session=session)
    reference = torch.optim.AdamW([master], lr=0.1, fused=True)
    for number in range(3):
        for parameter in (ours, plain):
            torch.manual_seed(number)
            (parameter * torch.randn(parameter.shape).bfloat16()).sum().backward()  # type: ignore[no-untyped-call]
        assert plain.grad is not None
        assert same_bits(here(ours.grad), plain.grad)
        master.grad, plain.grad = plain.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        with torch.no_grad():
            plain.copy_(master)
        assert same_bits(ours, plain)
        assert same_bits(optimizer.state[ours]["master"], master)
    optimizer.close()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_of_other_strides_than_the_parameter(session: spillway.Session) -> None:
    ours, plain = Parameter(torch.zeros(5, 3)), Parameter(torch.zeros(5, 3))
    optimizer = OffloadedOptimizer([ours], torch.optim.SGD, session=session, **SGD)
    reference = torch.optim.SGD([plain], fused=True, **SGD)
    for number in range(3):
        gradient = torch.randn(3, 5).t()
        plain.grad = gradient.contiguous()
        ours.grad = gradient
        if number == 1:
            (ours * 2.0).sum().backward()
            (plain * 2.0).sum().backward()
        optimizer.step()
        reference.step()
        assert same_bits(ours, plain)
    ours.grad = torch.ones(1).expand(5, 3)
    plain.grad = torch.ones(5, 3)
    optimizer.step()
    reference.step()
    assert same_bits(ours, plain)
    optimizer.close()


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


def test_a_sparse_gradient_is_refused(session: spillway.Session) -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = OffloadedOptimizer(embedding.parameters(), torch.optim.SGD, lr=0.1, session=session)
    with pytest.raises(UnsupportedError, match=r"got a gradient of layout torch\.sparse_coo, expected a dense one"):
        embedding(torch.tensor([1, 2])).sum().backward()
    embedding.zero_grad()
    embedding.weight.grad = torch.eye(10, 3).to_sparse()
    with pytest.raises(UnsupportedError, match="leave the parameter to an optimizer of its own"):
        optimizer.step()
    embedding.zero_grad()
    embedding.weight.grad = torch.ones(10, 3)
    before = embedding.weight.detach().clone()
    optimizer.step()
    assert torch.equal(embedding.weight, before - 0.1)
    optimizer.close()
    assert session.used_bytes == (0, 0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 3).expand(4, 3),
        torch.ones(8).as_strided((3, 3), (2, 1)),
        torch.arange(12.0)[::2],
        torch.eye(3).to_sparse(),
    ],
    ids=["expanded", "overlapping", "with gaps", "sparse"],
)
def test_a_parameter_whose_elements_do_not_fill_its_memory_is_refused(
    tensor: Tensor, session: spillway.Session
) -> None:
    with pytest.raises(UnsupportedError, match="expected one whose elements fill its memory; make it contiguous"):
        OffloadedOptimizer([Parameter(tensor)], torch.optim.SGD, lr=0.1, session=session)
    optimizer = OffloadedOptimizer([good := Parameter(torch.ones(2))], torch.optim.SGD, lr=0.5, session=session)
    with pytest.raises(UnsupportedError, match="expected one whose elements fill its memory"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2)), Parameter(tensor)]})
    assert len(optimizer.param_groups) == 1, "what was refused is in no group"
    good.sum().backward()
    optimizer.step()
    assert torch.equal(good, torch.full((2,), 0.5))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.close()


def test_a_meta_parameter_is_refused() -> None:
    with spillway.Session() as session, pytest.raises(SpillwayError, match="meta"):
        OffloadedOptimizer([Parameter(torch.ones(2, device="meta"))], torch.optim.SGD, lr=0.1, session=session)


CHANGES: dict[str, Callable[[Module], object]] = {
    "recast": lambda model: model.double(),
    "resized": lambda model: setattr(model.first.weight, "data", torch.zeros(3, 7)),
    "restrided": lambda model: setattr(model.first.weight, "data", torch.zeros(7, 19).t()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["at first", "after a step", "after a backward"])
def test_a_parameter_that_was(change: str, when: str, session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
    batch = batches(1)[0]
    if when == "after a step":
        train(model, optimizer, [batch])
    if when == "after a backward":
        loss_of(model, batch).backward()
    CHANGES[change](model)
    for parameter in model.parameters():
        if not is_away(parameter.grad):
            parameter.grad = torch.ones_like(parameter)
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(
        UsageError, match=r"got a parameter of shape .*, expected shape .*, as it was when the optimizer"
    ):
        optimizer.step()
    assert_same_values(model.parameters(), before)
    optimizer.close()
    assert session.used_bytes == (0, 0)


def test_a_model_that_is_cast_while_its_gradients_are_away(session: spillway.Session) -> None:
    model, plain = wide(), wide()
    optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
    batch = batches(1)[0]
    loss_of(model, batch).backward()
    loss_of(plain, batch).backward()
    model.double()
    plain.double()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert other.grad is not None
        assert same_bits(here(one.grad), other.grad)
    model.float()
    plain.float()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), fused=True, **SGD).step()
    assert_same_values(model, plain)
    optimizer.close()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch whose gradients have their tensor's type")
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, torch.float16])
def test_gradients_of_a_type_of_their_own(grad_dtype: torch.dtype, session: spillway.Session) -> None:
    ours, plain = Parameter(torch.ones(37, dtype=torch.bfloat16)), Parameter(torch.ones(37, dtype=torch.bfloat16))
    for parameter in (ours, plain):
        parameter.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    master = Parameter(plain.detach().float())
    optimizer = OffloadedOptimizer([ours], torch.optim.AdamW, lr=0.1, session=session)
    reference = torch.optim.AdamW([master], lr=0.1, fused=True)
    for number in range(3):
        for parameter in (ours, plain):
            torch.manual_seed(number)
            weight = torch.randn(37)
            for _ in range(1 if grad_dtype is not torch.float32 else 1 + number % 2):
                (parameter.float() * weight).sum().backward()  # type: ignore[no-untyped-call]
        assert plain.grad is not None
        assert ours.grad is not None
        assert ours.grad.dtype is grad_dtype
        assert same_bits(here(ours.grad), plain.grad)
        master.grad, plain.grad = plain.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        with torch.no_grad():
            plain.copy_(master)
        assert same_bits(ours, plain)
    optimizer.close()
