"""Parameters and gradients that are refused, and parameters that are no longer what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter

import spillway
from optim.support import (
    assert_same_values,
    batches,
    here,
    is_away,
    loss_of,
    offloaded,
    same_bits,
    train,
    wide,
)
from spillway import OffloadedOptimizer, SpillwayError, UnsupportedError, UsageError

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}


def test_a_sparse_gradient_is_refused(session: spillway.Session) -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = OffloadedOptimizer(embedding.parameters(), torch.optim.SGD, lr=0.1, session=session)
    with pytest.raises(UnsupportedError, match=r"got a gradient of layout torch\.sparse_coo, expected a dense one"):
        embedding(torch.tensor([1, 2])).sum().backward()
    embedding.zero_grad()
    embedding.weight.grad = torch.eye(10, 3).to_sparse()
    with pytest.raises(UnsupportedError, match="Give the parameter to an optimizer of its own"):
        optimizer.step()
    embedding.zero_grad()
    embedding.weight.grad = torch.ones(10, 3)
    before = embedding.weight.detach().clone()
    optimizer.step()
    assert torch.equal(embedding.weight, before - 0.1)
    optimizer.close()
    assert session.used_bytes == (0, 0)


@pytest.mark.parametrize("make", [torch.conj, lambda z: torch._neg_view(z.abs())], ids=["conjugate", "negative"])
def test_a_parameter_whose_bytes_are_not_its_values_is_refused(
    make: Callable[[Tensor], Tensor], session: spillway.Session
) -> None:
    values = make(torch.ones(3, dtype=torch.complex64))
    assert values.is_conj() or values.is_neg()
    with pytest.raises(UnsupportedError, match=r"conjugate or negative bit.*tensor\.resolve_conj\(\)\.resolve_neg\(\)"):
        OffloadedOptimizer([Parameter(values)], torch.optim.SGD, lr=0.1, session=session)
    parameter = Parameter(values.resolve_conj().resolve_neg())
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=0.1, session=session)
    parameter.abs().sum().backward()
    parameter.data = values
    with pytest.raises(UsageError, match=r"A parameter has .*, with a conjugate or negative bit"):
        optimizer.step()
    optimizer.close()


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
    with pytest.raises(UnsupportedError, match=r"overlap or leave gaps\. Make it contiguous"):
        OffloadedOptimizer([Parameter(tensor)], torch.optim.SGD, lr=0.1, session=session)
    optimizer = OffloadedOptimizer([good := Parameter(torch.ones(2))], torch.optim.SGD, lr=0.5, session=session)
    with pytest.raises(UnsupportedError, match="overlap or leave gaps"):
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
    with pytest.raises(UsageError, match=r"A parameter has shape .*It had shape .* when the optimizer was made"):
        optimizer.step()
    assert_same_values(model.parameters(), before)
    optimizer.close()
    assert session.used_bytes == (0, 0)


def test_a_gradient_on_another_device(session: spillway.Session) -> None:
    # As of a model that was moved after its optimizer was made. To copy it as memory of the CPU would end the process.
    model = wide()
    optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
    assert isinstance(optimizer, OffloadedOptimizer)
    gradient = optimizer._placement.held[model.first.weight].fresh_gradient()
    with pytest.raises(UsageError, match="got a gradient on meta of a parameter that was on cpu"):
        gradient.begin(torch.empty(19, 7, device="meta"))
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


OPTIONS = pytest.mark.parametrize("options", [{}, {"fraction": 0.0}, {"step_on": "gpu"}], ids=str)


@OPTIONS
def test_parameters_that_share_memory_are_refused(options: dict[str, float], session: spillway.Session) -> None:
    memory = torch.ones(6)
    pairs = [(memory, memory), (memory, memory[3:]), (memory[:4].view(2, 2), memory[3:]), (memory, memory[2:3])]
    for some in (each for pair in pairs for each in (pair, pair[::-1])):
        one, other = map(Parameter, some)
        with pytest.raises(UnsupportedError, match=r"share memory.* Use one parameter in both places"):
            OffloadedOptimizer([one, other], torch.optim.SGD, lr=0.5, session=session, **options)
        optimizer = OffloadedOptimizer([one], torch.optim.SGD, lr=0.5, session=session, **options)
        with pytest.raises(UnsupportedError, match="share memory"):
            optimizer.add_param_group({"params": [other]})
        assert len(optimizer.param_groups) == 1
        optimizer.close()


@OPTIONS
def test_parameters_that_share_memory_later(options: dict[str, float], session: spillway.Session) -> None:
    one, other = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = OffloadedOptimizer([one, other], torch.optim.SGD, lr=0.5, session=session, **options)
    kept, other.data = other.data, one.data
    for _ in range(2):
        (one.sum() + other.sum()).backward()
        with pytest.raises(UnsupportedError, match="share memory"):
            optimizer.step()
        assert torch.equal(one, torch.ones(3))
        optimizer.zero_grad()
    other.data = kept
    (one.sum() + other.sum()).backward()
    optimizer.step()
    assert torch.equal(one, torch.full((3,), 0.5)) and torch.equal(other, one)
    optimizer.close()


@OPTIONS
def test_parameters_that_are_neighbours_in_one_memory(options: dict[str, float], session: spillway.Session) -> None:
    memory = torch.ones(10)
    some = [Parameter(each) for each in (memory[4:], memory[:3].view(1, 3), memory[3:4], memory[5:5], memory[:0])]
    optimizer = OffloadedOptimizer(some, torch.optim.SGD, lr=0.5, session=session, **options)
    sum(one.sum() for one in some).backward()  # type: ignore[union-attr]
    optimizer.step()
    assert torch.equal(memory, torch.full((10,), 0.5))
    optimizer.close()
