"""Parameters that come back while the next forward runs: each block waits for its own."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils._pytree import tree_leaves, tree_map

import spillway
from optim.support import (
    Block,
    Wide,
    assert_same_state,
    assert_same_values,
    batches,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    saved,
    train,
    wide,
)
from spillway import OffloadedOptimizer, UsageError
from spillway.testing import AdversaryBackend
from support import SlowBackend

SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(params=["slow", "adversary"])
def late(request: pytest.FixtureRequest, adversary: Any) -> Iterator[spillway.Session]:
    """A session in which parameters are still on their way when a step returns."""
    serve = adversary.serve if request.param == "adversary" else SlowBackend("parameters", 0.003).serve
    with spillway.Session(backend=serve) as session:
        yield session
    adversary.check()


def overlapped(session: spillway.Session, **options: Any) -> Callable[[Module], OffloadedOptimizer]:
    def make(model: Module) -> OffloadedOptimizer:
        optimizer = offloaded(torch.optim.SGD, session, **SGD, **options)(model)
        optimizer.overlap_forward(model, blocks=Block)
        return optimizer

    return make


def plain_after(data: list[Tensor], micro: int = 1) -> Module:
    model = wide()
    train(model, plainly(torch.optim.SGD, **SGD)(model), data, micro=micro)
    return model


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_training_is_the_same(micro: int, fraction: float, late: spillway.Session) -> None:
    model = wide()
    optimizer = overlapped(late, fraction=fraction, fused=True)(model)
    data = batches(6)
    train(model, optimizer, data, micro=micro)
    optimizer.synchronize()
    assert_same_values(model, plain_after(data, micro))
    optimizer.close()
    assert late.used_bytes == (0, 0)


def test_parameters_are_on_their_way_when_the_step_returns(adversary: Any) -> None:
    with spillway.Session(backend=adversary.serve) as session:
        model = wide()
        optimizer = overlapped(session)(model)
        before = [one.detach().clone() for one in model.parameters()]
        train(model, optimizer, batches(1))
        assert_same_values(model.parameters(), before)
        optimizer.synchronize()
        assert not same_bits(model.first.weight, before[1])
        optimizer.close()


def test_each_block_waits_for_its_own_and_no_more(adversary: Any, pieces_of: Callable[[int], None]) -> None:
    # So small that parameters of two blocks share no call.
    pieces_of(640)
    with spillway.Session(backend=adversary.serve) as session:
        model = wide()
        optimizer = overlapped(session)(model)
        before = copy.deepcopy(model)
        train(model, optimizer, batches(1))
        # So small, all gradients leave together, and the host steps in the order of the model.
        model.blocks[0](torch.randn(3, 19))
        assert not same_bits(model.blocks[0].up.weight, before.blocks[0].up.weight)
        assert same_bits(model.blocks[1].up.weight, before.blocks[1].up.weight)
        model.blocks[1](torch.randn(3, 19))
        assert not same_bits(model.blocks[1].up.weight, before.blocks[1].up.weight)
        optimizer.close()


CALLS: dict[str, Callable[[Wide, Tensor], object]] = {
    "the model": lambda model, x: model(x),
    "a block by itself": lambda model, x: model.blocks[1](torch.randn(2, 19)),
    "a part of a block": lambda model, x: model.blocks[1].up(torch.randn(2, 19)),
    "another part of a block": lambda model, x: model.blocks[0].norm(torch.randn(2, 19)),
    "a module that is in no block": lambda model, x: model.first(x),
    "without gradients": lambda model, x: no_grad(model, x),
    "for evaluation": lambda model, x: no_grad(model.eval(), x),
    "functionally": lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "by a checkpoint": lambda model, x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
}


def no_grad(model: Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.replace(" ", "-"))
def test_what_is_called_finds_the_new_values(name: str, late: spillway.Session) -> None:
    model, data = wide(), batches(2)
    optimizer = overlapped(late)(model)
    plain = plain_after(data[:1])
    train(model, optimizer, data[:1])
    torch.manual_seed(3)
    got = CALLS[name](model, data[1])
    torch.manual_seed(3)
    assert same_bits(got, CALLS[name](plain, data[1]))  # type: ignore[arg-type]
    optimizer.close()


class Tied(Module):
    """A parameter of the first block is the head's too, and one is called only by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(7) for _ in range(2))
        self.head = torch.nn.Linear(7, 33, bias=False)
        self.head.weight = self.blocks[0].up.weight  # type: ignore[union-attr, assignment]
        self.gain = Parameter(torch.ones(33))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.linear(x, self.head.weight)[:, :7]
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain


def test_tied_weights(late: spillway.Session) -> None:
    torch.manual_seed(0)
    plain = Tied()
    model = copy.deepcopy(plain)
    optimizer = offloaded(torch.optim.SGD, late, **SGD)(model)
    optimizer.overlap_forward(model)
    reference = plainly(torch.optim.SGD, **SGD)(plain)
    data = batches(5)
    train(plain, reference, data)
    train(model, optimizer, data)
    optimizer.synchronize()
    assert_same_values(model, plain)
    optimizer.close()


def test_parameters_that_are_read_after_synchronize(late: spillway.Session) -> None:
    model, data = wide(), batches(3)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data[:1])
    optimizer.synchronize()
    values = [one.detach().clone() for one in model.parameters()]
    assert_same_values(values, plain_after(data[:1]).parameters())
    train(model, optimizer, data[1:])
    optimizer.synchronize()
    assert_same_values(model, plain_after(data))
    optimizer.close()


@pytest.mark.parametrize("part", ["", "blocks.0", "blocks.1.up", "first", "last"])
def test_a_state_dict_of_a_model_or_of_a_part_of_it_in_flight(part: str, late: spillway.Session) -> None:
    model, data = wide(), batches(2)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data)
    state = {name: value.clone() for name, value in model.get_submodule(part).state_dict().items()}
    expected = plain_after(data).get_submodule(part).state_dict()
    assert state.keys() == expected.keys()
    assert all(same_bits(state[name], expected[name]) for name in expected)
    optimizer.close()


def test_states_in_flight(late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data[:2])
    state, weights = saved(optimizer.state_dict()), saved(model.state_dict())
    train(model, optimizer, data[2:])
    resumed = wide(seed=5)
    other = overlapped(late)(resumed)
    train(resumed, other, batches(1, seed=9))
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    train(resumed, other, data[2:])
    other.synchronize()
    optimizer.synchronize()
    assert_same_values(resumed, plain_after(data))
    assert_same_state(other.state_dict(), optimizer.state_dict())
    other.close()
    optimizer.close()


@pytest.mark.parametrize("part", ["", "blocks.1"])
def test_weights_that_are_loaded_in_flight(part: str, late: spillway.Session) -> None:
    models, data = (wide(), wide()), batches(3)
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), overlapped(late)(models[1])
    weights = wide(seed=7).get_submodule(part).state_dict()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data[:2])
        model.get_submodule(part).load_state_dict(weights)
        train(model, optimizer, data[2:])
    optimizers[1].synchronize()
    assert_same_values(models[1], models[0])
    optimizers[1].close()


def test_an_evaluation_between(late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    for batch in data:
        train(model, optimizer, [batch])
        no_grad(model, batch)
    optimizer.synchronize()
    assert_same_values(model, plain_after(data))
    optimizer.close()


def test_an_exception_in_a_forward(late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data[:2])
    handle = model.blocks[0].down.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        model(data[0])
    handle.remove()
    train(model, optimizer, data[2:])
    optimizer.synchronize()
    assert_same_values(model, plain_after(data))
    optimizer.close()


def test_gradients_that_are_written_to_in_flight(late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data, set_to_none=False)
    optimizer.synchronize()
    plain = wide()
    train(plain, plainly(torch.optim.SGD, **SGD)(plain), data, set_to_none=False)
    assert_same_values(model, plain)
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"step_on": "auto", "cpu_share": 0.5}], ids=str)
def test_gradients_that_stay_and_are_written_to_in_flight(options: dict[str, Any]) -> None:
    # The copies of a step's gradients are late; what is written to the gradients after the step is not for it.
    with spillway.Session(backend=SlowBackend("gradients", 0.005).serve) as session:
        model, data = wide(), batches(4)
        optimizer = overlapped(session, offload_gradients=False, fused=True, **options)(model)
        train(model, optimizer, data, set_to_none=False)
        optimizer.synchronize()
        plain = wide()
        train(plain, plainly(torch.optim.SGD, **SGD)(plain), data, set_to_none=False)
        assert_same_values(model, plain)
        optimizer.close()


def hooks_of(model: Module) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._state_dict_pre_hooks) + len(module._load_state_dict_pre_hooks)
        for module in model.modules()
    )


def test_close_takes_the_hooks_off(late: spillway.Session) -> None:
    model, data = wide(), batches(2)
    optimizer = overlapped(late)(model)
    assert hooks_of(model) > 0
    train(model, optimizer, data)
    optimizer.close()
    assert hooks_of(model) == 0
    assert_same_values(model, plain_after(data))
    assert all(one._post_accumulate_grad_hooks in (None, {}) for one in model.parameters())


def test_a_model_that_is_given_twice_and_one_that_is_wrapped(late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    optimizer.overlap_forward(model, blocks=torch.nn.Linear)
    outer = torch.nn.Sequential(model)
    optimizer.overlap_forward(outer, blocks=Block)
    train(outer, optimizer, data)
    optimizer.synchronize()
    assert_same_values(model, plain_after(data))
    optimizer.close()
    assert hooks_of(outer) == 0


def test_parameters_that_are_not_in_the_model_are_waited_for_at_once(late: spillway.Session) -> None:
    models, data = (wide(), wide(seed=1)), batches(3)
    parameters = [one for model in models for one in model.parameters()]
    optimizer = OffloadedOptimizer(parameters, torch.optim.SGD, session=late, **SGD)
    optimizer.overlap_forward(models[0], blocks=Block)
    plain = wide(), wide(seed=1)
    reference = torch.optim.SGD([one for model in plain for one in model.parameters()], fused=True, **SGD)
    for batch in data:
        for (one, other), each in (((models[0], models[1]), optimizer), ((plain[0], plain[1]), reference)):
            (loss_of(one, batch) + loss_of(other, batch)).backward()
            each.step()
            each.zero_grad()
        assert_same_values(models[1], plain[1])
    optimizer.synchronize()
    assert_same_values(models[0], plain[0])
    optimizer.close()


def test_parameters_that_came_later_than_the_hooks(late: spillway.Session) -> None:
    models, data = (wide(), wide()), batches(3)
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), overlapped(late)(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data[:1])
        torch.manual_seed(2)
        model.last = torch.nn.Sequential(model.last, torch.nn.Linear(5, 4))  # type: ignore[assignment]
        optimizer.add_param_group({"params": list(model.last[1].parameters())})
        train(model, optimizer, data[1:])
    optimizers[1].synchronize()
    assert_same_values(models[1], models[0])
    optimizers[1].close()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_copy_of_a_model_has_nothing_to_do_with_the_optimizer(in_flight: bool, late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data[:2])
    optimizer.synchronize()
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    file = saved_module(model)
    for other in (twin, again, file):
        assert_same_values(other, plain_after(data[:2]))
    if in_flight:
        train(model, optimizer, data[2:])
        before = len(optimizer._steps.pending)
        assert before > 0
        for other in (twin, again, file):
            other(data[0])
            other.state_dict()
        assert len(optimizer._steps.pending) == before, "a copy does not wait for the original's parameters"
    optimizer.close()
    dead = weakref.ref(optimizer)
    del optimizer, model
    gc.collect()
    assert dead() is None, "no copy keeps the optimizer"
    other = plainly(torch.optim.SGD, **SGD)(twin)
    train(twin, other, data[2:])


def saved_module(model: Module) -> Module:
    import io

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def test_an_error_in_the_work_of_a_step_reaches_the_next_call_and_the_next_step_works(late: spillway.Session) -> None:
    model, data = wide(), batches(4)
    optimizer = overlapped(late)(model)
    train(model, optimizer, data[:1])
    optimizer.synchronize()
    before = [one.detach().clone() for one in model.parameters()]
    optimizer.param_groups[0]["momentum"] = "wrong"
    loss_of(model, data[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises((TypeError, RuntimeError)):
        model(data[0])
    optimizer.synchronize()
    assert_same_values(model.parameters(), before)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, data[1:])
    optimizer.synchronize()
    assert_same_values(model, plain_after(data))
    optimizer.close()
    assert late.used_bytes == (0, 0)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [("no model", None), (torch.nn.Linear(2, 2), None), (torch.nn.Linear(2, 2), "nothing.*"), (wide(), 3)],
    ids=["no model", "no blocks", "no match", "no selector"],
)
def test_a_model_that_cannot_be_meant(model: Any, blocks: Any, cpu_session: spillway.Session) -> None:
    own = wide()
    optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1)(own)
    with pytest.raises(UsageError):
        optimizer.overlap_forward(model, blocks=blocks)
    train(own, optimizer, batches(1))
    optimizer.close()


def test_a_compiled_model(cpu_session: spillway.Session) -> None:
    torch._dynamo.reset()
    models, data = (wide(), wide()), batches(6)
    optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), overlapped(cpu_session)(models[1])
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    for model, optimizer in zip(compiled, optimizers, strict=True):
        train(model, optimizer, data)  # type: ignore[arg-type]
    optimizers[1].synchronize()
    assert_same_values(models[1], models[0])
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) < 60
    optimizers[1].close()


@pytest.mark.parametrize(
    "options", [{}, {"tier": "disk"}, {"step_on": "gpu"}, {"step_on": "auto", "cpu_share": 0.5}], ids=str
)
@pytest.mark.parametrize("what", ["lr", "betas"])
def test_a_queued_step_has_the_settings_of_its_time(
    what: str, options: dict[str, Any], adversary: AdversaryBackend, tmp_path: Path
) -> None:
    """A scheduler that writes a tensor in place writes to the next step's settings."""
    settings = {"lr": 0.1, "betas": (0.9, 0.99)}
    given = {name: tree_map(torch.tensor, value) for name, value in settings.items()}
    served = {"spill_directory": tmp_path, "allow_memory_filesystem": True}
    with spillway.Session(backend=adversary.serve, **served) as session:  # type: ignore[arg-type]
        model, plain = wide(), wide()
        optimizer = offloaded(torch.optim.AdamW, session, fused=True, **given, **options)(model)
        optimizer.overlap_forward(model, blocks=Block)
        reference = plainly(torch.optim.AdamW, **tree_map(torch.tensor, settings))(plain)
        for batch in batches(3):
            for one, its in ((model, optimizer), (plain, reference)):
                train(one, its, [batch])
                for value in tree_leaves(its.param_groups[0][what]):
                    value.mul_(0.5)
        optimizer.synchronize()
        assert_same_values(model, plain)
        optimizer.close()
    adversary.check()
