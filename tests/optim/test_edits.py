"""Parameters that somebody writes to between two steps: the next step starts from what they say (hazard 55).

A master says more than its parameter does. It is taken anew where the parameter says something else, element by
element; where the parameter says the same, rounded, the master stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.nn import Module, Parameter

import spillway
from optim.plain_loop import PlainLoop, pair
from optim.support import (
    assert_same_values,
    batches,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    train,
    wide,
)
from spillway import OffloadedOptimizer
from spillway.testing import AdversaryBackend

Edit = Callable[[Module], object]


@torch.no_grad()
def in_place(model: Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.5)


@torch.no_grad()
def of_some_elements(model: Module) -> None:
    model.first.weight[3].zero_()  # type: ignore[union-attr, index]
    model.last.weight[:, 2] = 0.25  # type: ignore[union-attr, index]


def loaded(model: Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def other_memory(model: Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 1.5


def from_a_vector(model: Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach() * 1.5
    torch.nn.utils.vector_to_parameters(vector, model.parameters())


def cast_and_back(model: Module) -> None:
    dtype = next(model.parameters()).dtype
    model.to(torch.float8_e5m2).to(dtype)


def initialised(model: Module) -> None:
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.125)


EDITS = pytest.mark.parametrize(
    "edit",
    [in_place, of_some_elements, loaded, other_memory, from_a_vector, cast_and_back, initialised],
    ids=lambda edit: edit.__name__,
)


def take_anew(plain: PlainLoop) -> None:
    """What a plain loop would do after somebody wrote to its parameters."""
    with torch.no_grad():
        for master, parameter in zip(plain.masters, plain.model.parameters(), strict=True):
            bits = torch.int16 if parameter.itemsize == 2 else torch.int32
            same = master.to(parameter.dtype).view(bits) == parameter.view(bits)
            master.copy_(torch.where(same, master, parameter.to(master.dtype)))


@EDITS
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_an_edit_of_narrow_parameters(edit: Edit, fraction: float, session: spillway.Session) -> None:
    both = pair(torch.bfloat16, session, torch.optim.RMSprop, {"fraction": fraction}, lr=1e-2)
    for number, batch in enumerate(batches(4, torch.bfloat16)):
        if number in (0, 2):
            edit(both.model)
            edit(both.plain.model)
            take_anew(both.plain)
        both.backward(batch)
        both.step()
        both.zero_grad()
        assert_same_values(both.model, both.plain.model)
        masters = [both.optimizer.state[parameter]["master"] for parameter in both.model.parameters()]
        assert_same_values(masters, both.plain.masters)
    both.optimizer.close()


@EDITS
def test_an_edit_of_wide_parameters(edit: Edit, session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.RMSprop)(models[0]), offloaded(torch.optim.RMSprop, session)(models[1])
    for number, batch in enumerate(batches(4)):
        for model, optimizer in zip(models, optimizers, strict=True):
            if number in (0, 2):
                edit(model)
            train(model, optimizer, [batch])
        assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]


def test_an_edit_while_gradients_are_away(session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.RMSprop)(models[0]), offloaded(torch.optim.RMSprop, session)(models[1])
    for batch in batches(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, batch).backward()
            in_place(model)
            optimizer.step()
            of_some_elements(model)
            optimizer.zero_grad()
        assert_same_values(models[1], models[0])
    optimizers[1].close()  # type: ignore[attr-defined]


def test_a_master_stays_as_it_is_where_the_parameter_says_the_same(session: spillway.Session) -> None:
    model = wide(torch.bfloat16)
    optimizer = offloaded(torch.optim.AdamW, session, lr=1e-3)(model)
    train(model, optimizer, batches(3, torch.bfloat16))
    before = {name: optimizer.state[one]["master"].clone() for name, one in model.named_parameters()}
    weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    with torch.no_grad():
        model.first.weight[0, 0] = 7.0
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
    train(model, optimizer, batches(1, torch.bfloat16))
    before["first.weight"][0, 0] = 7.0
    for name, parameter in model.named_parameters():
        assert same_bits(optimizer.state[parameter]["master"], before[name]), name
    assert any(not same_bits(value.bfloat16().float(), value) for value in before.values())
    optimizer.close()


def test_zeros_of_the_other_sign_and_nan_are_edits(session: spillway.Session) -> None:
    parameter = Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=0.0, session=session)
    parameter.grad = torch.zeros(4, dtype=torch.bfloat16)
    optimizer.step()
    with torch.no_grad():
        parameter.copy_(torch.tensor([-0.0, float("nan"), 1.0, 0.0]))
    optimizer.step()
    for got in (optimizer.state[parameter]["master"], parameter.detach().float()):
        assert got[1].isnan()
        assert same_bits(got[[0, 2, 3]], torch.tensor([-0.0, 1.0, 0.0]))
    optimizer.close()


def test_a_step_reads_each_parameter_once(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve) as session:
        for dtype in (torch.float32, torch.bfloat16):
            model = wide(dtype)
            optimizer = offloaded(torch.optim.SGD, session, lr=0.1)(model)
            nbytes = sum(parameter.nbytes for parameter in model.parameters())
            for batch in batches(3, dtype):
                train(model, optimizer, [batch])
                assert optimizer.stats().sent_bytes == 2 * nbytes
            optimizer.close()
    adversary.check()


def test_on_the_cpu_the_step_works_on_the_parameter_itself(cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1)(model)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    for batch in batches(2):
        train(model, optimizer, [batch])
        assert (optimizer.stats().sent_bytes, optimizer.stats().received_bytes) == (nbytes, 0)
    optimizer.close()


def test_a_write_by_data_is_noticed(cpu_session: spillway.Session) -> None:
    parameter = Parameter(torch.ones(8))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=cpu_session)
    parameter.sum().backward()
    optimizer.step()
    parameter.data.clamp_(min=0.5)
    optimizer.step()
    optimizer.close()
    assert torch.equal(parameter, torch.full((8,), -0.5))
