"""States that are saved and loaded: what is in them, what is refused, and what hooks see of them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import spillway
from optim.support import (
    CLASSES,
    assert_same_state,
    assert_same_values,
    batches,
    closed,
    offloaded,
    plainly,
    saved,
    train,
    wide,
)
from spillway import OffloadedOptimizer, UsageError

Class = type[Optimizer]


@CLASSES
def test_a_state_from_before_the_first_step(
    optimizer_class: Class, defaults: dict[str, Any], cpu_session: spillway.Session
) -> None:
    ours, plain = wide(), wide()
    optimizer = offloaded(optimizer_class, cpu_session, **defaults)(ours)
    reference = plainly(optimizer_class, **defaults)(plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    mine, theirs = saved(optimizer.state_dict()), saved(reference.state_dict())
    how = {name: reference.defaults[name] for name in ("fused", "foreach") if name in reference.defaults}
    for group in mine["param_groups"]:
        group.update(how)
    optimizer.load_state_dict(theirs)
    reference.load_state_dict(mine)
    train(ours, optimizer, batches(2))
    train(plain, reference, batches(2))
    assert_same_values(ours, plain)
    optimizer.close()


@CLASSES
def test_a_state_of_parameters_of_which_some_never_had_a_gradient(
    optimizer_class: Class, defaults: dict[str, Any], cpu_session: spillway.Session
) -> None:
    ours, plain = wide(), wide()
    optimizer = offloaded(optimizer_class, cpu_session, **defaults)(ours)
    reference = plainly(optimizer_class, **defaults)(plain)
    for model, one in ((ours, optimizer), (plain, reference)):
        model.first(batches(1)[0]).sum().backward()
        one.step()
        one.zero_grad()
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    state = saved(optimizer.state_dict())
    for group in state["param_groups"]:
        group.update({name: reference.defaults[name] for name in ("fused", "foreach") if name in reference.defaults})
    reference.load_state_dict(state)
    if optimizer_class is not torch.optim.SGD:
        # Torch's fused SGD takes no parameters of which some have stepped and some have not.
        train(ours, optimizer, batches(2))
        train(plain, reference, batches(2))
        assert_same_values(ours, plain)
    optimizer.close()


def test_a_loaded_state_is_no_alias_of_what_was_loaded(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    train(model, optimizer, batches(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train(model, optimizer, batches(2))
    assert_same_state(state, kept)
    optimizer.close()


def test_groups_are_loaded(session: spillway.Session) -> None:
    model = wide()
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.1, "name": "first"},
        {"params": list(model.blocks.parameters()), "weight_decay": 0.3},
    ]
    optimizer = OffloadedOptimizer(copy_of(groups), torch.optim.AdamW, session=session, lr=0.01)
    state = saved(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.7
    state["param_groups"][1]["betas"] = (0.5, 0.6)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert optimizer.param_groups[0]["name"] == "first"
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["weight_decay"] == 0.3
    optimizer.close()


def copy_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(group) for group in groups]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda state: state["param_groups"].append(dict(state["param_groups"][0])), ValueError),
        (lambda state: state["param_groups"][0]["params"].pop(), ValueError),
        (lambda state: state.pop("param_groups"), KeyError),
        (lambda state: state.pop("state"), KeyError),
        (lambda state: state["state"][0].update(master=torch.zeros(3)), UsageError),
    ],
    ids=["a group more", "a parameter less", "no groups", "no state", "a master of another shape"],
)
def test_a_state_that_does_not_fit_changes_nothing(
    change: Callable[[dict[str, Any]], object], error: type[Exception], session: spillway.Session
) -> None:
    dtype = torch.bfloat16
    model, untouched = wide(dtype), wide(dtype)
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    reference = offloaded(torch.optim.AdamW, session)(untouched)
    train(model, optimizer, batches(2, dtype))
    train(untouched, reference, batches(2, dtype))
    state = saved(optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].zero_()
    change(state)
    with pytest.raises(error):
        optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    train(model, optimizer, batches(2, dtype))
    train(untouched, reference, batches(2, dtype))
    assert_same_values(model, untouched)
    optimizer.close()
    reference.close()


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_state_of_another_shape_is_refused_where_a_fused_kernel_would_write_past_its_end(
    fraction: float, session: spillway.Session
) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.AdamW, session, fraction=fraction)(model)
    train(model, optimizer, batches(1))
    state = saved(optimizer.state_dict())
    kept = saved(optimizer.state_dict())
    state["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(UsageError, match=r"exp_avg: got a state of shape \(3,\) for a parameter of shape \(19, 7\)"):
        optimizer.load_state_dict(state)
    assert_same_state(optimizer.state_dict(), kept)
    optimizer.close()


def test_a_state_of_another_shape_fails_in_the_step_where_the_class_does_so(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.RMSprop, session)(model)
    train(model, optimizer, batches(1))
    good, bad = saved(optimizer.state_dict()), saved(optimizer.state_dict())
    bad["state"][1]["square_avg"] = torch.zeros(3)
    optimizer.load_state_dict(bad)
    with pytest.raises(RuntimeError, match="must match the size"):
        train(model, optimizer, batches(1))
    optimizer.load_state_dict(good)
    optimizer.zero_grad()
    train(model, optimizer, batches(1))
    optimizer.close()


def test_hooks_of_states_are_called_once_with_all_of_it(session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.AdamW, session)(model)
    train(model, optimizer, batches(1))
    calls: list[str] = []

    def noted(name: str, value: dict[str, Any]) -> None:
        calls.append(name)
        assert len(value["state"]) == len(list(model.parameters())), name
        assert all(set(one) == {"step", "exp_avg", "exp_avg_sq"} for one in value["state"].values()), name

    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: noted("after saving", state))
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: noted("before loading", state))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: noted("after loading", {"state": optimizer.state}))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before saving", "after saving", "before loading", "after loading"]
    # Those that loading itself needs are gone.
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    optimizer.close()


def test_a_hook_may_change_what_is_loaded(session: spillway.Session) -> None:
    results = []
    for make in (plainly(torch.optim.AdamW), offloaded(torch.optim.AdamW, session)):
        model = wide()
        optimizer = make(model)
        train(model, optimizer, batches(2))

        def change(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            state = copy.deepcopy(state)
            for values in state["state"].values():
                values["exp_avg"].zero_()
            return state

        optimizer.register_load_state_dict_pre_hook(change)
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer, batches(2))
        results.append(model)
        closed(optimizer)
    assert_same_values(results[1], results[0])


def test_names_of_parameters(session: spillway.Session) -> None:
    model, plain = wide(), wide()
    optimizer = OffloadedOptimizer(model.named_parameters(), torch.optim.AdamW, session=session)
    reference = torch.optim.AdamW(plain.named_parameters(), fused=True)
    for one, other in ((optimizer, model), (reference, plain)):
        train(other, one, batches(2))
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    optimizer.load_state_dict(saved(reference.state_dict()))
    train(model, optimizer, batches(2))
    train(plain, reference, batches(2))
    assert_same_values(model, plain)
    optimizer.close()


def test_a_new_parameter_has_no_state(session: spillway.Session) -> None:
    parameter = Parameter(torch.zeros(3))
    optimizer = OffloadedOptimizer([parameter], torch.optim.AdamW, session=session)
    assert optimizer.state_dict()["state"] == {}
    optimizer.close()


@pytest.mark.parametrize("between", ["a step", "another edit"])
@pytest.mark.parametrize("options", [{}, {"tier": "disk"}, {"step_on": "gpu"}], ids=str)
def test_an_edit_of_a_state_that_was_stored_again_with_others(
    session: spillway.Session, options: dict[str, Any], between: str
) -> None:
    """Small parameters share a chunk. It is stored when one of them is stepped or set, and the state of each moves."""
    found = []
    for make in (
        lambda some: OffloadedOptimizer(some, torch.optim.AdamW, session=session, lr=0.1, fused=True, **options),
        lambda some: torch.optim.AdamW(some, lr=0.1, fused=True),
    ):
        first, second = (Parameter(torch.full((5,), value)) for value in (1.0, 2.0))
        optimizer = make([first, second])

        def step(*parameters: Parameter, optimizer: Any = optimizer) -> None:
            sum(each.square().sum() for each in parameters).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

        step(first, second)
        assert optimizer.state[first]["exp_avg"].numel() == 5
        if between == "a step":
            step(second)
        else:
            optimizer.state[second]["exp_avg"] = torch.ones(5)
            optimizer.state_dict()
        optimizer.state[first]["exp_avg"].mul_(0.5)
        step(first, second)
        found.append([*optimizer.state[first].values(), first.detach().clone(), second.detach().clone()])
        if isinstance(optimizer, OffloadedOptimizer):
            optimizer.close()
    assert all(map(torch.equal, *found))


def assigned(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def set_with_groups(optimizer: Optimizer) -> None:
    optimizer.__setstate__({"state": defaultdict(dict), "param_groups": optimizer.param_groups})


@pytest.mark.parametrize("reset", [assigned, set_with_groups], ids=lambda reset: reset.__name__)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("options", [{}, {"tier": "disk"}, {"step_on": "gpu"}, {"step_in_backward": True}], ids=str)
def test_a_state_that_is_reset_after_a_step(
    reset: Callable[[Optimizer], None], overlaps: bool, options: dict[str, Any], session: spillway.Session
) -> None:
    models = wide(), wide()
    optimizers = (
        plainly(torch.optim.AdamW, lr=0.1)(models[0]),
        offloaded(torch.optim.AdamW, session, lr=0.1, fused=True, **options)(models[1]),
    )
    if overlaps:
        optimizers[1].overlap_forward(models[1])
    for number, batch in enumerate(batches(4)):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, [batch])
            if number == 1:
                reset(optimizer)
    optimizers[1].synchronize()
    assert_same_values(models[1], models[0])
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())
    optimizers[1].close()


def test_a_state_that_is_reset_after_parameters_have_stepped_in_backward(session: spillway.Session) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    optimizer = offloaded(torch.optim.AdamW, session, step_in_backward=True)(model)
    model(torch.ones(1, 1024)).sum().backward()
    for reset in (assigned, set_with_groups):
        with pytest.raises(UsageError, match=r"a new optimizer\.state between a backward and its step\(\)"):
            reset(optimizer)
    optimizer.step()
    assert len(optimizer.state) == 4
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"tier": "disk"}, {"step_on": "gpu"}, {"fraction": 0.0}], ids=str)
def test_a_state_of_an_earlier_torch(session: spillway.Session, options: dict[str, Any]) -> None:
    """Its count of steps is an ``int``, and its groups have fewer settings."""
    found = []
    for make in (
        lambda some: OffloadedOptimizer(some, torch.optim.AdamW, session=session, lr=0.1, fused=True, **options),
        lambda some: torch.optim.AdamW(some, lr=0.1, fused=True),
    ):
        model = wide()
        optimizer = make(model.parameters())
        train(model, optimizer, batches(2))
        state = copy.deepcopy(optimizer.state_dict())
        for each in state["state"].values():
            each["step"] = int(each["step"])
        for group in state["param_groups"]:
            for name in ("amsgrad", "maximize", "capturable", "differentiable"):
                del group[name]
        closed(optimizer)
        optimizer = make(model.parameters())
        optimizer.load_state_dict(state)
        train(model, optimizer, batches(2))
        assert optimizer.param_groups[0]["amsgrad"] is False
        closed(optimizer)
        found.append(model)
    assert_same_values(*found)
