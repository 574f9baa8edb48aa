"""State that lies in pinned memory and is stepped on the device, and state on disk: what both have to do alike."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.testing._internal.common_optimizers import optim_db

import spillway
from optim.store_loops import (
    DEVICE,
    DISK,
    SPLIT,
    WAYS,
    Loop,
    Way,
    assert_same_state,
    model_for,
    net,
    same,
    saved,
    session,
    small_pieces,
)
from spillway import OffloadedOptimizer, UnsupportedError, UsageError
from spillway.optim.chunks import Slot
from spillway.testing import AdversaryBackend
from support import pairwise

SERVED = [info for info in optim_db if info.optim_cls.__name__ not in ("SparseAdam", "LBFGS")]
BF16 = torch.bfloat16
FEW: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1}),
    (Adagrad, {"lr": 0.1, "fused": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.ASGD, {}),
]


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[spillway.Session]:
    """A session in which large parameters are many pieces; nothing may be left of them."""
    small_pieces(monkeypatch)
    with session(tmp_path, window=8192) as found:
        yield found
        if found.used_bytes != (0, 0):
            gc.collect()
            found.synchronize()
        assert found.used_bytes == (0, 0)


@pytest.fixture
def adversary() -> AdversaryBackend:
    return AdversaryBackend()


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adversary: AdversaryBackend) -> Iterator[spillway.Session]:
    """The same under the adversary."""
    small_pieces(monkeypatch)
    with session(tmp_path, window=8192, adversary=adversary) as found:
        yield found
        adversary.check()


def compare(
    way: Way,
    where: spillway.Session,
    optimizer_class: type[Optimizer],
    settings: dict[str, Any],
    loop: Loop,
    **more: Any,
) -> None:
    """The loop with state elsewhere gives the bits of the plain one: parameters, norms, states, masters."""
    plain, mine = model_for(optimizer_class, loop.dtype), model_for(optimizer_class, loop.dtype)
    expected = Loop(**{**vars(loop), "norms": []})
    if loop.dtype == BF16:
        reference = expected.run_in_float(plain, optimizer_class, way.plain(optimizer_class, settings))
    else:
        reference = optimizer_class(plain.parameters(), **way.plain(optimizer_class, settings))
        expected.run(plain, reference)
    optimizer = OffloadedOptimizer(mine.parameters(), optimizer_class, session=where, **way.options, **more, **settings)
    loop.run(mine, optimizer)
    assert same(mine, plain)
    norms = [one for one in loop.norms if one.isfinite()]
    assert all(torch.equal(one, other) for one, other in zip(norms, expected.norms, strict=True))
    masters = [one for group in reference.param_groups for one in group["params"]] if loop.dtype == BF16 else None
    assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"], masters=masters)
    optimizer.close()


@pytest.mark.parametrize("info", SERVED, ids=lambda info: info.optim_cls.__name__)
@pytest.mark.covered
def test_every_optimizer_steps_to_the_bits_of_its_class(way: Way, here: spillway.Session, info: Any) -> None:
    for given in info.optim_inputs_func(device="cpu"):
        settings = {name: value for name, value in given.kwargs.items() if name != "differentiable"}
        if way is DISK and settings.pop("fused", None) is False:
            continue
        compare(way, here, info.optim_cls, settings, Loop(steps=3))


@pytest.mark.parametrize("info", SERVED, ids=lambda info: info.optim_cls.__name__)
def test_every_optimizer_steps_masters_to_the_bits_of_a_plain_loop(way: Way, here: spillway.Session, info: Any) -> None:
    compare(way, here, info.optim_cls, {}, Loop(steps=3, micro=2, clip=0.01, dtype=BF16))


@pytest.mark.parametrize("offload_gradients", [True, False], ids=["away", "here"])
@pytest.mark.parametrize(("optimizer_class", "settings"), FEW, ids=lambda value: getattr(value, "__name__", ""))
def test_no_wait_is_missing(
    way: Way,
    checked: spillway.Session,
    optimizer_class: type[Optimizer],
    settings: dict[str, Any],
    offload_gradients: bool,
) -> None:
    loops = [Loop(steps=3), Loop(steps=3, micro=2, clip=0.01)]
    if offload_gradients:
        loops += [Loop(steps=3, dtype=BF16, clip=0.01), Loop(steps=3, micro=3, clip=0.01, dtype=BF16)]
    for loop in loops:
        compare(way, checked, optimizer_class, settings, loop, offload_gradients=offload_gradients)


def test_a_scaler_skips_steps_with_infinities(way: Way, here: spillway.Session) -> None:
    compare(way, here, AdamW, {"fused": True}, Loop(steps=5, scale=1024.0, infinite=(0, 3)))
    compare(way, here, AdamW, {"fused": True}, Loop(steps=5, scale=1024.0, infinite=(0, 3), clip=0.01, dtype=BF16))


@pytest.mark.parametrize(("way", "window", "checks"), pairwise(WAYS, [0, 1 << 12, 1 << 26], [False, True]), ids=str)
def test_the_window_changes_no_bit(
    way: Way, window: int, checks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    with session(tmp_path, window=window, adversary=AdversaryBackend() if checks else None) as where:
        compare(way, where, AdamW, {"fused": True}, Loop(clip=0.01, dtype=BF16))
        compare(way, where, AdamW, {"fused": True}, Loop(micro=2))


def test_groups_schedules_and_late_groups(way: Way, here: spillway.Session) -> None:
    def halve(step: int, _: nn.Module, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        if step == 2:
            optimizer.add_param_group({"params": late[id(optimizer)], "lr": 0.3})

    models = net(), net()
    late = {}
    made = []
    for model in models:
        rest = list(model.parameters())
        groups = [{"params": rest[:2], "weight_decay": 0.2}, {"params": rest[2:5], "lr": 0.05}]
        if model is models[0]:
            optimizer: Optimizer = AdamW(groups, lr=1e-2, fused=True)
        else:
            optimizer = OffloadedOptimizer(groups, AdamW, session=here, lr=1e-2, fused=True, **way.options)  # type: ignore[arg-type]
        late[id(optimizer)] = rest[5:]
        Loop(each=halve, steps=5).run(model, optimizer)
        made.append(optimizer)
    assert same(*models)
    assert_same_state(made[1].state_dict()["state"], made[0].state_dict()["state"], masters=None)
    made[1].close()  # type: ignore[attr-defined]


def test_parameters_without_a_gradient_are_left_alone(way: Way, checked: spillway.Session) -> None:
    def freeze(step: int, model: nn.Module, _: Optimizer) -> None:
        # Others than in the step before: of a load that small ones share, some are stepped.
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_((index + step) % 3 != 0)

    models = net(BF16), net(BF16)
    for parameter in [*models[0].parameters(), *models[1].parameters()]:
        assert parameter.requires_grad
    optimizer = OffloadedOptimizer(models[1].parameters(), AdamW, session=checked, lr=1e-2, **way.options)  # type: ignore[arg-type]
    masters = [nn.Parameter(one.detach().float()) for one in models[0].parameters()]
    plain = AdamW(masters, lr=1e-2, fused=way is DISK)
    for step in range(6):
        freeze(step, models[0], plain)
        freeze(step, models[1], optimizer)
        batch = torch.randn(8, 33, dtype=BF16)
        for model in models:
            model(batch).square().mean().backward()
        for parameter, master in zip(models[0].parameters(), masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        plain.step()
        with torch.no_grad():
            for parameter, master in zip(models[0].parameters(), masters, strict=True):
                parameter.copy_(master)
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
    assert same(*models)
    optimizer.close()


MEMORY = Way("memory", {})
PLAIN = Way("plain", {})


def made(way: Way, model: nn.Module, where: spillway.Session) -> Optimizer:
    if way is PLAIN:
        return AdamW(model.parameters(), lr=1e-2, fused=True)
    return OffloadedOptimizer(model.parameters(), AdamW, session=where, lr=1e-2, fused=True, **way.options)  # type: ignore[arg-type]


def closed(optimizer: Optimizer) -> None:
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.close()


RESUMED = [
    pair
    for pair in itertools.product([PLAIN, MEMORY, *WAYS, SPLIT], repeat=2)
    if any(one in (*WAYS, SPLIT) for one in pair)
]


@pytest.mark.parametrize(("first", "second"), RESUMED, ids=str)
def test_training_resumes_from_and_with_other_ways(first: Way, second: Way, here: spillway.Session) -> None:
    reference = net()
    uninterrupted = made(PLAIN, reference, here)
    Loop(steps=3).run(reference, uninterrupted)
    Loop(steps=3, seed=2).run(reference, uninterrupted)
    model = net()
    optimizer = made(first, model, here)
    Loop(steps=3).run(model, optimizer)
    weights, state = saved((model.state_dict(), optimizer.state_dict()))
    closed(optimizer)
    fresh = net()
    resumed = made(second, fresh, here)
    Loop(steps=1, seed=7).run(fresh, resumed)
    fresh.load_state_dict(weights)
    resumed.load_state_dict(state)
    Loop(steps=3, seed=2).run(fresh, resumed)
    assert same(fresh, reference)
    closed(resumed)


@pytest.mark.parametrize(
    ("way", "other", "weights_first"), pairwise([*WAYS, SPLIT], [MEMORY, DEVICE, DISK, SPLIT], [True, False]), ids=str
)
def test_masters_are_carried_whatever_is_loaded_first(
    way: Way, other: Way, here: spillway.Session, weights_first: bool
) -> None:
    reference = net(BF16)
    uninterrupted = made(way, reference, here)
    Loop(steps=3, dtype=BF16).run(reference, uninterrupted)
    weights, state = saved((reference.state_dict(), uninterrupted.state_dict()))
    Loop(steps=3, seed=2, dtype=BF16).run(reference, uninterrupted)
    fresh = net(BF16)
    resumed = made(other, fresh, here)
    Loop(steps=1, seed=7, dtype=BF16).run(fresh, resumed)
    if weights_first:
        fresh.load_state_dict(weights)
    resumed.load_state_dict(state)
    if not weights_first:
        fresh.load_state_dict(weights)
    Loop(steps=3, seed=2, dtype=BF16).run(fresh, resumed)
    assert same(fresh, reference)
    closed(uninterrupted)
    closed(resumed)


def test_loading_is_safe_under_the_adversary(way: Way, checked: spillway.Session) -> None:
    model = net(BF16)
    optimizer = made(way, model, checked)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    weights, state = saved((model.state_dict(), optimizer.state_dict()))
    Loop(steps=2, dtype=BF16, seed=2).run(model, optimizer)
    after = [one.detach().clone() for one in model.parameters()]
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    Loop(steps=2, dtype=BF16, seed=2).run(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), after, strict=True))
    closed(optimizer)


def test_a_loaded_state_may_have_no_masters_or_nothing_at_all(way: Way, here: spillway.Session) -> None:
    model, plain = net(BF16), net(BF16)
    optimizer, reference = made(way, model, here), made(PLAIN, plain, here)
    Loop(steps=2, dtype=BF16).run(plain, reference)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(saved(reference.state_dict()))
    masters = [nn.Parameter(one.detach().float()) for one in plain.parameters()]
    stepped = AdamW(masters, lr=1e-2, fused=True)
    stepped.load_state_dict(reference.state_dict())
    batch = torch.randn(8, 33, dtype=BF16)
    model(batch).square().mean().backward()
    gradients = torch.autograd.grad(plain(batch).square().mean(), list(plain.parameters()))
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient.float()
    optimizer.step()
    stepped.step()
    assert all(
        torch.equal(parameter, master.to(BF16)) for parameter, master in zip(model.parameters(), masters, strict=True)
    )
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    optimizer.step()
    steps = {state["step"].item() for state in optimizer.state_dict()["state"].values()}
    assert steps == {1.0}
    closed(optimizer)


def test_a_parameter_that_somebody_wrote_to_is_taken_anew(way: Way, here: spillway.Session) -> None:
    model = net(BF16)
    optimizer = made(way, model, here)
    Loop(steps=3, dtype=BF16).run(model, optimizer)
    before = saved(optimizer.state_dict()["state"])
    weight = model[0].weight
    with torch.no_grad():
        weight[0] = 0.125
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    Loop(steps=1, dtype=BF16, seed=2).run(model, optimizer)
    after = optimizer.state_dict()["state"]
    # The rest of it still says more exactly what the parameter says.
    assert torch.equal(after[0]["master"][1:], before[0]["master"][1:])
    assert (after[0]["master"][0] == 0.125).all()
    assert torch.equal(after[2]["master"], before[2]["master"])
    del after
    closed(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_odd_parameters_are_served(way: Way, checked: spillway.Session, dtype: torch.dtype) -> None:
    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(3)
        return [
            nn.Parameter(torch.randn((), dtype=dtype)),
            nn.Parameter(torch.randn(0, 3, dtype=dtype)),
            nn.Parameter(torch.randn(1, dtype=dtype)),
            nn.Parameter(torch.randn(6, 5, dtype=dtype).t()),
            nn.Parameter(torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(400, dtype=dtype)),
            nn.Parameter(torch.randn(40, 20, dtype=dtype).t()),
        ]

    mine, plain = parameters(), parameters()
    masters = plain if dtype == torch.float32 else [nn.Parameter(one.detach().float()) for one in plain]
    optimizer = OffloadedOptimizer(mine, AdamW, session=checked, lr=0.1, fused=True, **way.options)  # type: ignore[arg-type]
    reference = AdamW(masters, lr=0.1, fused=True)
    for step in range(3):
        for one in mine:
            (one * (step + 1)).square().sum().backward()
        for one, master in zip(plain, masters, strict=True):
            (gradient,) = torch.autograd.grad((one * (step + 1)).square().sum(), one)
            master.grad = gradient.to(master.dtype)
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for one, master in zip(plain, masters, strict=True):
                if one is not master:
                    one.copy_(master)
    assert all(torch.equal(one, other) for one, other in zip(mine, plain, strict=True))
    found = optimizer.state_dict()["state"]
    for index, state in reference.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(found[index][name], value)
            assert name == "step" or found[index][name].stride() == value.stride()
    del found
    optimizer.close()


def test_complex_parameters_are_served(way: Way, here: spillway.Session) -> None:
    torch.manual_seed(0)
    values = torch.randn(6, 70, dtype=torch.complex64)
    mine, plain = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = OffloadedOptimizer([mine], Adam, session=here, lr=0.1, **way.options)  # type: ignore[arg-type]
    reference = Adam([plain], lr=0.1)
    for _ in range(3):
        for one, stepped in ((mine, optimizer), (plain, reference)):
            one.abs().square().sum().backward()
            stepped.step()
            stepped.zero_grad()
    assert torch.equal(mine, plain)
    optimizer.close()


def places(state: dict[Any, Any]) -> set[Any]:
    """The names of what lies elsewhere."""
    return {name for name in state if isinstance(dict.__getitem__(state, name), Slot)}


def test_between_steps_the_state_lies_elsewhere(way: Way, here: spillway.Session) -> None:
    model = net(BF16)
    optimizer = made(way, model, here)
    Loop(steps=1, dtype=BF16).run(model, optimizer)
    assert all(places(state) == {"exp_avg", "exp_avg_sq", "master"} for state in optimizer.state.values())
    whole = optimizer.state_dict()["state"]
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq", "master"} for state in whole.values())
    assert not any(places(state) for state in whole.values())
    assert all(places(state) == {"exp_avg", "exp_avg_sq", "master"} for state in optimizer.state.values())
    del whole
    other = net()
    momentum = OffloadedOptimizer(other.parameters(), SGD, session=here, lr=0.1, momentum=0.9, **way.options)  # type: ignore[arg-type]
    assert not momentum.state
    Loop(steps=1).run(other, momentum)
    # Torch's distributed checkpoint steps an optimizer that has no state, to make some.
    assert len(momentum.state) == 6
    closed(optimizer)
    momentum.close()


def test_a_state_dict_outlives_its_optimizer(way: Way, here: spillway.Session) -> None:
    model = net(BF16)
    optimizer = made(way, model, here)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    state = optimizer.state_dict()["state"]
    copied = saved(state)
    closed(optimizer)
    other = made(way, net(BF16), here)
    Loop(steps=2, dtype=BF16).run(net(BF16), other)
    closed(other)
    for index, expected in copied.items():
        assert all(torch.equal(state[index][name], value) for name, value in expected.items())


def test_one_that_nobody_holds_gives_all_back(way: Way, here: spillway.Session) -> None:
    model = net(BF16)
    optimizer = made(way, model, here)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    # Without gradients: it lets go of the last ones.
    optimizer.step()
    del optimizer
    gc.collect()
    assert here.used_bytes == (0, 0)


def test_a_closed_session_is_no_trouble_for_what_is_left(way: Way, tmp_path: Path) -> None:
    model = net(BF16)
    with session(tmp_path) as where:
        optimizer = made(way, model, where)
        Loop(steps=2, dtype=BF16).run(model, optimizer)
    with pytest.raises(spillway.SessionError):
        optimizer.step()
    del optimizer
    gc.collect()


def test_the_forward_may_overlap(way: Way, checked: spillway.Session) -> None:
    reference, model = net(BF16), net(BF16)
    expected = Loop(steps=4, dtype=BF16, clip=0.01)
    expected.run_in_float(reference, AdamW, {"lr": 1e-2, "fused": True})
    optimizer = made(way, model, checked)
    assert isinstance(optimizer, OffloadedOptimizer)
    optimizer.overlap_forward(model, blocks=nn.Linear)
    Loop(steps=4, dtype=BF16, clip=0.01).run(model, optimizer)
    optimizer.synchronize()
    assert same(model, reference)
    optimizer.close()


def test_a_fraction_steps_on_the_device_meanwhile(way: Way, here: spillway.Session) -> None:
    models = net(), net()
    settings = {"lr": 1e-2, "fused": True}
    optimizer = OffloadedOptimizer(models[0].parameters(), AdamW, session=here, fraction=0.3, **way.options, **settings)  # type: ignore[arg-type]
    reference = AdamW(models[1].parameters(), **settings)  # type: ignore[arg-type]
    Loop().run(models[0], optimizer)
    Loop().run(models[1], reference)
    assert same(*models)
    assert 0 < optimizer.fraction < 1
    optimizer.close()


def test_a_parameter_that_is_held_no_more_leaves_its_neighbours(here: spillway.Session) -> None:
    # What fraction="auto" does, when it was seen that less is affordable.
    models = net(BF16), net(BF16)
    optimizer = OffloadedOptimizer(models[0].parameters(), AdamW, session=here, tier="disk", lr=1e-2, fused=True)
    Loop(dtype=BF16, steps=2).run(models[0], optimizer)
    for index in (1, 2, 4):
        optimizer._moves._to_device(optimizer._placement.held[list(models[0].parameters())[index]])
    Loop(dtype=BF16, steps=2, seed=2).run(models[0], optimizer)
    other = OffloadedOptimizer(models[1].parameters(), AdamW, session=here, tier="disk", lr=1e-2, fused=True)
    Loop(dtype=BF16, steps=2).run(models[1], other)
    Loop(dtype=BF16, steps=2, seed=2).run(models[1], other)
    assert same(*models)
    optimizer.close()
    other.close()


def test_a_parameter_whose_gradient_finds_no_memory_on_the_device_stays_where_it_was(
    here: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = net(BF16), net(BF16)
    one, other = (OffloadedOptimizer(model.parameters(), AdamW, session=here, lr=1e-2, fused=True) for model in models)
    Loop(dtype=BF16, steps=2).run(models[0], one)
    first = next(iter(models[0].parameters()))

    def refuse(held: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(one._moves._steps, "bring_back", refuse)
        with pytest.raises(torch.OutOfMemoryError):
            one._moves._to_device(one._placement.held[first])
    assert first not in one._placement.device
    Loop(dtype=BF16, steps=2, seed=2).run(models[0], one)
    Loop(dtype=BF16, steps=2).run(models[1], other)
    Loop(dtype=BF16, steps=2, seed=2).run(models[1], other)
    assert same(*models)
    one.close()
    other.close()


class Own(AdamW):
    """Of which nothing is known."""


def test_what_cannot_be_meant_is_refused(here: spillway.Session) -> None:
    parameters = list(net().parameters())

    def make(optimizer_class: type[Optimizer] = AdamW, **options: Any) -> None:
        OffloadedOptimizer(parameters, optimizer_class, session=here, **options)

    with pytest.raises(UsageError, match="tier: got 'tape', expected 'host' or 'disk'"):
        make(tier="tape")
    with pytest.raises(UsageError, match="step_on: got 'disk', expected 'cpu', 'gpu' or 'auto'"):
        make(step_on="disk")
    with pytest.raises(UnsupportedError, match="Leave one of the two out"):
        make(tier="disk", step_on="gpu")
    for way in WAYS:
        with pytest.raises(UnsupportedError, match=r"Own with .* a class that is not torch's"):
            make(Own, **way.options)
    with pytest.raises(UsageError, match="the CPU steps nothing"):
        make(step_on="gpu", fraction="auto")
    make(Own)


def test_a_parameter_that_was_moved_is_named_before_anything_is_stepped(way: Way, here: spillway.Session) -> None:
    model = net()
    optimizer = made(way, model, here)
    Loop(steps=1).run(model, optimizer)
    before = [one.detach().clone() for one in model.parameters()]
    model(torch.randn(8, 33)).sum().backward()
    model[2].weight.data = torch.zeros(17, 66)
    with pytest.raises(UsageError, match="A parameter has shape"):
        optimizer.step()
    model[2].weight.data = before[2].clone()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    optimizer.zero_grad()
    Loop(steps=1).run(model, optimizer)
    closed(optimizer)


def test_stats_count_what_moved(way: Way, here: spillway.Session) -> None:
    model = net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=here, lr=1e-2, fused=True, **way.options)  # type: ignore[arg-type]
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    stats = optimizer.stats()
    elements = sum(one.numel() for one in model.parameters())
    # Three tensors of 4 bytes an element; some lines between them.
    state = 12 * elements
    if way is DEVICE:
        assert (stats.streamed, stats.stepped_on_host) == (elements, 0)
        # A gradient of 2 bytes goes out in backward, and comes for the step.
        assert state + 2 * elements <= stats.received_bytes <= state + 2 * elements + 4096
        assert state + 2 * elements <= stats.sent_bytes <= state + 2 * elements + 4096
    else:
        assert (stats.streamed, stats.stepped_on_host) == (0, elements)
        assert state <= stats.read_bytes == stats.written_bytes <= state + 4096
        assert stats.host_seconds > 0
        assert stats.received_bytes == 2 * elements
    optimizer.close()
