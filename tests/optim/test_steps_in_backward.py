"""Parameters that are stepped in backward: the same bits, and an error for whatever cannot be taken back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import spillway
from optim.support import (
    FUSED,
    Block,
    assert_same_state,
    assert_same_values,
    batches,
    loss_of,
    offloaded,
    plainly,
    train,
    wide,
)
from spillway import OffloadedOptimizer, UnsupportedError, UsageError
from spillway.errors import TierFullError
from spillway.optim import state_store, transfers
from spillway.optim.host_parameter import HostParameter
from spillway.optim.stepping import BackwardSteps
from spillway.runtime.bytes import Bytes
from spillway.testing import AdversaryBackend
from support import SlowBackend

OTHERS = [one for one in FUSED if one is not torch.optim.AdamW]
SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(params=["cpu", "slow", "adversary"])
def late(request: pytest.FixtureRequest, adversary: AdversaryBackend) -> Iterator[spillway.Session]:
    """A session in which parameters are still on their way when backward goes on."""
    kinds: dict[str, Any] = {
        "cpu": None,
        "slow": SlowBackend("parameters", 0.002).serve,
        "adversary": adversary.serve,
    }
    with spillway.Session(backend=kinds[request.param]) as session:
        yield session
    adversary.check()


@pytest.fixture(
    params=[400, pytest.param(1, marks=pytest.mark.long), pytest.param(1 << 20, marks=pytest.mark.long)],
    ids="together={}".format,
    autouse=True,
)
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements that wait for each other; at most all of them, for ``step``."""
    monkeypatch.setattr(state_store, "_TOGETHER", request.param)
    return int(request.param)


def make(optimizer_class: type[Optimizer], session: spillway.Session, **options: Any) -> Any:
    return offloaded(optimizer_class, session, step_in_backward=True, **options)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.AdamW, torch.optim.RMSprop, *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)],
)
def test_training_is_the_same(
    optimizer_class: type[Optimizer],
    dtype: torch.dtype,
    overlaps: bool,
    late: spillway.Session,
    pieces_of: Callable[[int], None],
) -> None:
    pieces_of(256)
    model, plain = wide(dtype), wide(dtype)
    optimizer = make(optimizer_class, late, lr=0.05, master_dtype=None)(model)
    if overlaps:
        optimizer.overlap_forward(model, blocks=Block)
    data = batches(6, dtype)
    train(model, optimizer, data)
    other = plainly(optimizer_class, lr=0.05)(plain)
    train(plain, other, data)
    optimizer.synchronize()
    assert_same_values(model, plain)
    assert_same_state(optimizer.state_dict(), other.state_dict())
    optimizer.close()
    assert late.used_bytes == (0, 0)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_masters_schedulers_and_norms(fraction: float, set_to_none: bool, late: spillway.Session) -> None:
    models = [wide(torch.bfloat16), wide(torch.bfloat16)]
    norms: list[list[Tensor]] = []
    for model, given in zip(models, ({"step_in_backward": True}, {}), strict=True):
        optimizer = offloaded(torch.optim.AdamW, late, lr=0.05, fraction=fraction, fused=True, **given)(model)
        optimizer.overlap_forward(model, blocks=Block)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        norms.append([])
        for batch in batches(5, torch.bfloat16):
            loss_of(model, batch).backward()
            norms[-1].append(torch.nn.utils.get_total_norm([one.grad for one in model.parameters()]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        optimizer.close()
    assert_same_values(*models)
    assert all(torch.equal(one, other) for one, other in zip(*norms, strict=True))


def test_backward_steps(late: spillway.Session, together: int) -> None:
    model, plain = wide(), wide()
    optimizer = make(torch.optim.SGD, late, **SGD)(model)
    (batch,) = batches(1)
    loss_of(model, batch).backward()
    optimizer.synchronize()
    stepped = [not torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all(stepped) if together == 1 else any(stepped) if together == 400 else not any(stepped)
    optimizer.step()
    optimizer.synchronize()
    train(plain, plainly(torch.optim.SGD, **SGD)(plain), [batch])
    assert_same_values(model, plain)
    optimizer.close()


def test_a_closure_frozen_and_unused_parameters(late: spillway.Session) -> None:
    models = [wide(), wide()]
    for model, given in zip(models, ({"step_in_backward": True}, {}), strict=True):
        optimizer = offloaded(torch.optim.SGD, late, **SGD, **given)(model)
        model.blocks[0].up.weight.requires_grad_(False)
        for number, batch in enumerate(batches(4)):
            model.first.bias.requires_grad_(number != 2)

            def closure(batch: Tensor = batch, model: Module = model, optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
        optimizer.close()
    assert_same_values(*models)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_and_activations_away(reentrant: bool, late: spillway.Session) -> None:
    models = [wide(), wide()]
    for model, given in zip(models, ({"step_in_backward": True}, {}), strict=True):
        optimizer = offloaded(torch.optim.SGD, late, **SGD, **given)(model)
        for batch in batches(4):
            with spillway.offload(tier="host", min_bytes=0, session=late):
                x = model.first(batch)
                for block in model.blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                loss = (model.last(x) * model.gain).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    assert_same_values(*models)


def test_a_run_resumed(late: spillway.Session) -> None:
    data = batches(6)
    whole = wide()
    optimizer = make(torch.optim.Adam, late, lr=0.05)(whole)
    train(whole, optimizer, data)
    optimizer.close()
    model = wide()
    first = make(torch.optim.Adam, late, lr=0.05)(model)
    train(model, first, data[:3])
    saved = first.state_dict()
    second = make(torch.optim.Adam, late, lr=0.05)(model)
    second.load_state_dict(saved)
    first.close()
    train(model, second, data[3:])
    second.close()
    assert_same_values(whole, model)


def test_a_parameter_is_not_written_before_backward_has_read_it(
    adversary: AdversaryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each gradient leaves at once: that it came says nothing of what reads the parameter later.
    monkeypatch.setattr(transfers, "_TOGETHER", 1)
    # The adversary cannot see what autograd reads: it is told, by who comes right before the gradient.
    with spillway.Session(backend=adversary.serve) as session:
        model = wide()
        optimizer = make(torch.optim.SGD, session, **SGD)(model)
        for parameter in model.parameters():
            parameter.register_hook(lambda _, one=parameter: adversary.compute_access(Bytes.of(one.detach())))
        for batch in batches(4):
            loss_of(model, batch).backward()
            # What waits for step() may be read until then.
            for held in optimizer._placement.held.values():
                if held not in optimizer._steps.early.stepped:
                    adversary.compute_access(Bytes.of(held.parameter.detach()))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    adversary.check()


def test_a_forward_that_waits_for_a_part_of_the_step_before(late: spillway.Session) -> None:
    models = [wide(), wide()]
    first, second = batches(2)
    for model, given in zip(models, ({"step_in_backward": True}, {}), strict=True):
        optimizer = offloaded(torch.optim.SGD, late, **SGD, **given)(model)
        optimizer.overlap_forward(model, blocks=Block)
        train(model, optimizer, [first])
        block = model.blocks[1]
        block(model.first(second)).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        assert not optimizer._steps.pending
        optimizer.close()
    assert_same_values(*models)


@pytest.fixture
def strict(together: int) -> None:
    if together > 400:
        pytest.skip("nothing is stepped early: what comes later is as without")


@pytest.fixture
def trained(cpu_session: spillway.Session) -> Iterator[tuple[Module, OffloadedOptimizer]]:
    """A model after a backward, and its optimizer."""
    model = wide()
    optimizer = make(torch.optim.SGD, cpu_session, **SGD)(model)
    loss_of(model, batches(1)[0]).backward()
    yield model, optimizer
    optimizer.close()


Trained = tuple[Module, OffloadedOptimizer]


def clip(model: Module, optimizer: OffloadedOptimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_values(model: Module, optimizer: OffloadedOptimizer) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


def zero(model: Module, optimizer: OffloadedOptimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def accumulate(model: Module, optimizer: OffloadedOptimizer) -> None:
    loss_of(model, batches(1, seed=3)[0]).backward()


def unscale(model: Module, optimizer: OffloadedOptimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("act", [clip, clip_values, zero, accumulate, unscale], ids=lambda act: act.__name__)
def test_what_is_done_to_a_gradient_after_its_step_is_refused(act: Callable[..., None], trained: Trained) -> None:
    with pytest.raises(UsageError, match="step_in_backward=True has stepped"):
        act(*trained)


def drop(model: Module, optimizer: OffloadedOptimizer) -> None:
    optimizer.zero_grad()


def replace(model: Module, optimizer: OffloadedOptimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def change_a_setting(model: Module, optimizer: OffloadedOptimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.2


def schedule(model: Module, optimizer: OffloadedOptimizer) -> None:
    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)


@pytest.mark.parametrize("act", [drop, replace, change_a_setting, schedule], ids=lambda act: act.__name__)
@pytest.mark.usefixtures("strict")
def test_a_step_that_is_not_the_one_that_was_taken_is_refused(act: Callable[..., None], trained: Trained) -> None:
    act(*trained)
    with pytest.raises(UsageError, match="step_in_backward=True has stepped"):
        trained[1].step()


def write(model: Module, optimizer: OffloadedOptimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def replace_bytes(model: Module, optimizer: OffloadedOptimizer) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)


def load_weights(model: Module, optimizer: OffloadedOptimizer) -> None:
    model.load_state_dict(wide(seed=5).state_dict())


@pytest.mark.parametrize("act", [write, replace_bytes, load_weights], ids=lambda act: act.__name__)
@pytest.mark.usefixtures("strict")
def test_a_parameter_that_is_written_between_is_noticed(act: Callable[..., None], trained: Trained) -> None:
    act(*trained)
    with pytest.raises(UsageError, match="A parameter was written between backward and step"):
        trained[1].step()


@pytest.mark.usefixtures("strict")
def test_a_step_hook_that_writes_is_noticed(trained: Trained) -> None:
    model, optimizer = trained
    optimizer.register_step_pre_hook(lambda *_: write(model, optimizer))
    with pytest.raises(UsageError, match="A parameter was written"):
        optimizer.step()


@pytest.mark.parametrize("act", ["state_dict", "load_state_dict", "refresh_master_weights"])
@pytest.mark.usefixtures("strict")
def test_states_between_are_refused(act: str, cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = make(torch.optim.SGD, cpu_session, **SGD)(model)
    saved = optimizer.state_dict()
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(UsageError, match=act + r"\(\) between a backward and its step"):
        getattr(optimizer, act)(*([saved] if act == "load_state_dict" else []))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state_dict()["state"]
    optimizer.close()


def of_state(optimizer: OffloadedOptimizer, model: Module) -> Any:
    """The state of the last parameter, whose gradient comes first, and of the first one, whose gradient comes last."""
    return [optimizer.state[one] for one in (model.last.weight, model.first.weight)]  # type: ignore[union-attr]


def replace_in_state(states: Any, tensors: Any) -> None:
    states[0]["momentum_buffer"] = torch.ones_like(tensors[0])


def replace_in_state_of_later(states: Any, tensors: Any) -> None:
    states[1]["momentum_buffer"] = torch.ones_like(tensors[1])


def remove_from_state(states: Any, tensors: Any) -> None:
    del states[0]["momentum_buffer"]


def write_state(states: Any, tensors: Any) -> None:
    tensors[0].mul_(2)


def write_state_of_later(states: Any, tensors: Any) -> None:
    tensors[1][0].zero_()


@pytest.mark.parametrize(
    "edit",
    [replace_in_state, replace_in_state_of_later, remove_from_state, write_state, write_state_of_later],
    ids=lambda edit: edit.__name__,
)
@pytest.mark.parametrize("options", [{}, {"fraction": 0.5, "hold": "first"}, {"fraction": 0.5}], ids=str)
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.usefixtures("strict")
def test_an_edit_of_states_between_is_refused(
    edit: Callable[..., None],
    options: dict[str, Any],
    waits: bool,
    cpu_session: spillway.Session,
    pieces_of: Callable[[int], None],
) -> None:
    pieces_of(64)
    model = wide()
    optimizer = make(torch.optim.SGD, cpu_session, **SGD, **options)(model)
    train(model, optimizer, batches(2))
    kept, states = optimizer.state, of_state(optimizer, model)
    tensors = [state["momentum_buffer"] for state in states]
    train(model, optimizer, batches(2))
    loss_of(model, batches(1)[0]).backward()
    assert optimizer._steps.early.stepped
    with pytest.raises(UsageError, match=r"got a read of optimizer.state between a backward and its step\(\)"):
        optimizer.state[model.gain]
    if waits:
        optimizer.synchronize()
    edit([kept[model.last.weight], kept[model.first.weight]], tensors)
    with pytest.raises(UsageError, match=r"optimizer.state was edited between backward and step\(\)"):
        optimizer.step()
    optimizer.close()


@pytest.mark.usefixtures("strict")
def test_states_are_not_shown_between(cpu_session: spillway.Session) -> None:
    """Whoever has them could write to them, and no version would tell."""
    model = wide()
    optimizer = make(torch.optim.SGD, cpu_session, **SGD)(model)
    kept = optimizer.state
    loss_of(model, batches(1)[0]).backward()
    optimizer.synchronize()
    assert optimizer._steps.early.stepped
    assert not kept
    optimizer.step()
    assert kept.keys() == set(model.parameters())
    optimizer.close()


@pytest.mark.usefixtures("strict")
def test_a_state_that_is_loaded_between_is_refused(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve) as session:
        model = wide()
        optimizer = make(torch.optim.SGD, session, step_on="gpu", **SGD)(model)
        train(model, optimizer, batches(1))
        _, kept = of_state(optimizer, model)
        loss_of(model, batches(1)[0]).backward()
        with pytest.raises(UsageError, match=r"got a read of optimizer.state between a backward and its step\(\)"):
            kept["momentum_buffer"]
        optimizer.step()
        assert kept["momentum_buffer"].any()
        optimizer.close()
    adversary.check()


def test_edits_of_states_after_steps_count(late: spillway.Session, pieces_of: Callable[[int], None]) -> None:
    pieces_of(64)
    models = [wide(), wide()]
    optimizers = [make(torch.optim.SGD, late, **SGD)(models[0]), plainly(torch.optim.SGD, **SGD)(models[1])]
    optimizers[0].overlap_forward(models[0], blocks=Block)
    for number, batch in enumerate(batches(6)):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, [batch])
            if number % 2:
                first, last = of_state(optimizer, model)
                first["momentum_buffer"] = torch.ones_like(first["momentum_buffer"])
                last["momentum_buffer"].mul_(2)
    optimizers[0].synchronize()
    assert_same_values(*models)
    optimizers[0].close()


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.usefixtures("strict")
def test_what_was_saved_begins_anew_after_a_batch_that_was_dropped(model_first: bool, late: spillway.Session) -> None:
    data = batches(5)
    model, plain = wide(), wide()
    optimizer, other = make(torch.optim.SGD, late, **SGD)(model), plainly(torch.optim.SGD, **SGD)(plain)
    train(model, optimizer, data[:2])
    train(plain, other, data[:2])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    loss_of(model, data[2]).backward()
    optimizer.zero_grad()
    # What was stepped is on its way to the parameters.
    model.load_state_dict(saved[0])
    with pytest.raises(UsageError, match=r"Call synchronize\(\), and load"):
        optimizer.load_state_dict(saved[1])
    optimizer.synchronize()
    for loads in (model, optimizer) if model_first else (optimizer, model):
        loads.load_state_dict(saved[loads is optimizer])
    train(model, optimizer, data[3:])
    train(plain, other, data[3:])
    assert_same_values(model, plain)
    optimizer.close()
    assert late.used_bytes == (0, 0)


@pytest.mark.usefixtures("strict")
def test_a_gradient_of_what_was_stepped_does_not_outlive_the_optimizer(trained: Trained) -> None:
    _, optimizer = trained
    stepped = list(optimizer._steps.early.stepped)  # type: ignore[union-attr]
    optimizer.close()
    assert stepped
    assert all(held.parameter.grad is None for held in stepped)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_settings_that_change_within_a_backward_are_noticed(
    rate: float | Tensor, cpu_session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "_TOGETHER", 1)
    one, other = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    rate = rate.clone() if isinstance(rate, Tensor) else rate
    optimizer = OffloadedOptimizer([one, other], torch.optim.SGD, lr=rate, session=cpu_session, step_in_backward=True)
    one.sum().backward()
    if isinstance(rate, Tensor):
        # Leaves no trace in its version.
        rate.data.fill_(0.7)
    else:
        optimizer.param_groups[0]["lr"] = 0.7
    with pytest.raises(UsageError, match=r"Settings of group 0 were changed between backward and step\(\): lr"):
        other.sum().backward()
    optimizer.close()


def test_settings_on_a_gpu_are_compared_without_waiting_for_it(cpu_session: spillway.Session) -> None:
    # A value on this device can be read no more than a value that is still being computed.
    rate, betas = (torch.full((), 0.1, device="meta") for _ in range(2))
    groups = [{"params": [], "lr": rate, "betas": (betas, 0.9)}]
    optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1)(wide())
    held = next(iter(optimizer._placement.held.values()))
    early = BackwardSteps(lambda some: None, list)
    for setting in (rate, betas):
        early.arrived(held, groups)
        early.end(groups)
        early.arrived(held, groups)
        setting.fill_(0.7)
        with pytest.raises(UsageError, match=r"Settings of group 0 were changed between backward and step\(\)"):
            early.end(groups)
        early.reset()
    optimizer.close()


@pytest.mark.parametrize(("fails", "at", "elements"), [("flush", 2, 1), ("prepare", 2, 1), ("check", 5, 1 << 9)])
def test_what_could_not_be_queued_in_backward_is_stepped_later(
    fails: str,
    at: int,
    elements: int,
    cpu_session: spillway.Session,
    pieces_of: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With many elements those of one call are queued and those of the next are not, when it fails.
    monkeypatch.setattr(state_store, "_TOGETHER", elements)
    pieces_of(64)
    model, plain = wide(), wide()
    optimizer = make(torch.optim.SGD, cpu_session, **SGD)(model)
    (batch,) = batches(1)
    transfers_of: Any = next(iter(optimizer._placement.contexts.values())).transfers
    owner: Any = {"flush": transfers_of, "prepare": optimizer._placement.stores[0], "check": HostParameter}[fails]
    works, calls = getattr(owner, fails), itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(calls) == at:
            raise TierFullError("host memory: no more")
        return works(*arguments)

    monkeypatch.setattr(owner, fails, fail)
    with pytest.raises(TierFullError, match="no more"):
        loss_of(model, batch).backward()
    came = [one.grad is not None for one in model.parameters()]
    assert any(came)
    if elements > 1:
        held = optimizer._placement.held.values()
        assert 0 < len(optimizer._steps.early.stepped) < sum(one.parameter.grad is not None for one in held)
    optimizer.step()
    optimizer.synchronize()
    reference = plainly(torch.optim.SGD, **SGD)(plain)
    loss_of(plain, batch).backward()
    for parameter, has in zip(plain.parameters(), came, strict=True):
        parameter.grad = parameter.grad if has else None
    reference.step()
    assert_same_values(model, plain)
    optimizer.close()


@pytest.mark.usefixtures("strict")
def test_a_backward_after_gradients_were_dropped_is_refused(trained: Trained) -> None:
    model, optimizer = trained
    drop(model, optimizer)
    with pytest.raises(UsageError, match="a second gradient of a parameter before step"):
        loss_of(model, batches(1)[0]).backward()


def test_one_may_go_on_after_a_backward_that_failed(late: spillway.Session) -> None:
    models = [wide(), wide()]
    data = batches(3)

    def fail(_: Tensor) -> None:
        raise RuntimeError("no more")

    for model, given in zip(models, ({"step_in_backward": True}, {}), strict=True):
        optimizer = offloaded(torch.optim.SGD, late, **SGD, **given)(model)
        handle = model.blocks[0].up.weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="no more"):
            loss_of(model, data[0]).backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, data[1:])
        optimizer.close()
    assert_same_values(*models)
    assert late.used_bytes == (0, 0)


@pytest.mark.parametrize("options", [{"tier": "disk"}, {"offload_gradients": False}], ids=lambda one: next(iter(one)))
def test_what_does_not_go_together(options: dict[str, Any], cpu_session: spillway.Session) -> None:
    with pytest.raises(UnsupportedError, match="step_in_backward=True needs"):
        make(torch.optim.SGD, cpu_session, lr=0.1, **options)(wide())


def test_a_class_of_ones_own_is_refused(cpu_session: spillway.Session) -> None:
    class Mine(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedError, match=r"Mine with .* step_in_backward=True: .* use a class of torch\.optim"):
        make(Mine, cpu_session, lr=0.1)(wide())


def test_a_fraction_cannot_be_found(cpu_session: spillway.Session) -> None:
    with pytest.raises(UsageError, match="fraction='auto' with step_in_backward=True"):
        make(torch.optim.SGD, cpu_session, lr=0.1, fraction="auto")(wide())


def test_no_bool(cpu_session: spillway.Session) -> None:
    with pytest.raises(UsageError, match="step_in_backward: got 1"):
        offloaded(torch.optim.SGD, cpu_session, lr=0.1, step_in_backward=1)(wide())
