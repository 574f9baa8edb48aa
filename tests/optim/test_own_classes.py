"""Optimizer classes of one's own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

import spillway
from optim.support import (
    assert_same_state,
    assert_same_values,
    batches,
    closed,
    loss_of,
    same_bits,
    saved,
    three_groups,
    wide,
)
from spillway import OffloadedOptimizer
from spillway.errors import UnsupportedError


class Everything(Optimizer):
    """A class of one's own that looks at all parameters at once: it scales by the largest of all norms."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        given = [(group["lr"], one) for group in self.param_groups for one in group["params"] if one.grad is not None]
        largest = torch.stack([one.grad.norm() for _, one in given if one.grad is not None]).max()
        for lr, one in given:
            state = self.state[one]
            state["steps"] = self.steps
            state["sum"] = state.get("sum", 0) + one.grad
            one.sub_(state["sum"] / largest, alpha=lr)


class Child(torch.optim.AdamW):
    """A class that changes a little of one of torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.01, 0.01)
        return super().step(closure)


class Counting(Optimizer):
    """A class that keeps entries in its state that are no parameter's, one of them from the beginning."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.state["made"]["steps"] = 3  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        counts: Any = self.state
        counts["made"]["steps"] += 1
        counts["later"]["steps"] = counts["later"].get("steps", 0) + 1
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["seen"] = True
                    one.sub_(one.grad, alpha=group["lr"] / (counts["made"]["steps"] * counts["later"]["steps"]))


class Slowing(Optimizer):
    """A class that counts the steps of each group in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [one for one in group["params"] if one.grad is not None]
            group["count"] += bool(given)
            for one in given:
                one.sub_(one.grad, alpha=group["lr"] / group["count"])


class Replacing(Optimizer):
    """A class that gives parameters other memory, and keeps the old one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["before"] = one.data
                    one.data = one - group["lr"] * one.grad


@pytest.mark.parametrize("optimizer_class", [Everything, Child])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_class_of_ones_own_steps_all_parameters_at_once(
    optimizer_class: type[Optimizer], dtype: torch.dtype, session: spillway.Session
) -> None:
    how = {"foreach": False} if optimizer_class is Child else {}
    plain, ours = wide(dtype), wide(dtype)
    reference = optimizer_class(three_of_lr(plain), **how)
    optimizer = OffloadedOptimizer(three_of_lr(ours), optimizer_class, session=session, master_dtype=None)
    for number, batch in enumerate(batches(4, dtype)):
        for model, one in ((plain, reference), (ours, optimizer)):
            if number == 2:
                model.first(batch).square().mean().backward()
            else:
                loss_of(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            one.step()
            one.zero_grad()
        assert_same_values(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    other = wide(dtype)
    resumed = OffloadedOptimizer(three_of_lr(other), optimizer_class, session=session, master_dtype=None)
    resumed.load_state_dict(saved(optimizer.state_dict()))
    assert_same_state(resumed.state_dict(), reference.state_dict())
    resumed.close()
    optimizer.close()
    assert session.used_bytes == (0, 0)


def three_of_lr(model: Module) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "maximize"} for group in three_groups_of_lr(model)]


def three_groups_of_lr(model: Module) -> list[dict[str, Any]]:
    groups = three_groups(model)
    for group in groups:
        group.pop("weight_decay", None)
    return groups


@pytest.mark.parametrize("master_dtype", ["auto", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_class_that_gives_parameters_other_memory_is_refused(
    dtype: torch.dtype, master_dtype: Any, session: spillway.Session
) -> None:
    """Its steps would be lost, and what it keeps would be overwritten."""
    model = wide(dtype)
    optimizer = OffloadedOptimizer(model.parameters(), Replacing, session=session, master_dtype=master_dtype)
    before = [one.detach().clone() for one in model.parameters()]
    loss_of(model, next(iter(batches(1, dtype)))).backward()
    with pytest.raises(UnsupportedError, match=r"Replacing gave a parameter other memory .*p.copy_"):
        optimizer.step()
    assert all(torch.equal(one, value) for one, value in zip(model.parameters(), before, strict=True))
    optimizer.close()


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_class_that_keeps_a_state_of_no_parameter(fraction: float, session: spillway.Session) -> None:
    plain, ours = wide(), wide()
    reference = Counting(plain.parameters())
    optimizer = OffloadedOptimizer(ours.parameters(), Counting, session=session, fraction=fraction)
    for number, batch in enumerate(batches(4)):
        for model, one in ((plain, reference), (ours, optimizer)):
            (model.first(batch).square().mean() if number == 0 else loss_of(model, batch)).backward()
            one.step()
            one.zero_grad()
        assert_same_values(ours, plain)
    # The states of parameters are loaded. The others are those of the constructor.
    resumed = OffloadedOptimizer(ours.parameters(), Counting, session=session, fraction=fraction)
    resumed.load_state_dict(saved(optimizer.state_dict()))
    optimizer.close()
    for model, one in ((plain, Counting(plain.parameters())), (ours, resumed)):
        loss_of(model, batches(1)[0]).backward()
        one.step()
    assert_same_values(ours, plain)
    resumed.close()


def test_entries_that_a_class_writes_to_groups_which_are_then_reordered(session: spillway.Session) -> None:
    plain, ours = wide(), wide()
    reference = Slowing([{"params": one.parameters()} for one in (plain.first, plain.blocks, plain.last)])
    optimizer = OffloadedOptimizer(
        [{"params": one.parameters()} for one in (ours.first, ours.blocks, ours.last)], Slowing, session=session
    )
    optimizer.overlap_forward(ours)
    for number, batch in enumerate(batches(4)):
        for model, one in ((plain, reference), (ours, optimizer)):
            (model.first(batch).square().mean() if number == 0 else loss_of(model, batch)).backward()
            one.step()
            one.param_groups.reverse()
            model.zero_grad()
    optimizer.synchronize()
    assert_same_values(ours, plain)
    assert [group["count"] for group in optimizer.param_groups] == [4, 3, 3]
    optimizer.close()


class Failing(Optimizer):
    """A class whose step fails until it is told otherwise."""

    fails = True

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if Failing.fails:
            raise ArithmeticError("no")
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=group["lr"])


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_error_of_both_parts_of_a_step_is_raised_once(
    overlaps: bool, cpu_session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = wide(), wide()
    optimizer = OffloadedOptimizer(model.parameters(), Failing, session=cpu_session, fraction=0.5)
    assert 0 < optimizer.fraction < 1
    if overlaps:
        optimizer.overlap_forward(model)
    for batch in batches(2):
        loss_of(model, batch).backward()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        optimizer.zero_grad()
    monkeypatch.setattr(Failing, "fails", False)
    for one, its in ((model, optimizer), (plain, Failing(plain.parameters()))):
        for batch in batches(2):
            loss_of(one, batch).backward()
            its.step()
            its.zero_grad()
    optimizer.synchronize()
    assert_same_values(model, plain)
    optimizer.close()


class Own(Optimizer):
    """The frame of a class that steps each parameter by ``one``."""

    def __init__(self, params: Any, lr: float = 0.1, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.begin(group)
            for one in group["params"]:
                if one.grad is not None:
                    self.one(group, one, self.state[one])

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
        raise NotImplementedError


class Wider(Own):
    """Its state has tensors of other types and shapes than the parameter."""

    def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
        if not state:
            state["sum"], state["flat"] = torch.zeros_like(p, dtype=torch.float64), torch.zeros(p.numel())
            state["step"] = torch.zeros((), dtype=torch.float64)
        state["sum"].add_(p.grad.double() / 3)
        state["flat"].mul_(0.9).add_(p.grad.flatten())
        state["step"] += 1 / 3
        p.sub_(state["sum"].to(p.dtype) + state["flat"].view_as(p), alpha=group["lr"] * float(2 ** -state["step"]))


class Nested(Own):
    """Its state has lists and dictionaries."""

    def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
        if not state:
            state["of"] = {"sum": torch.zeros_like(p), "all": [torch.zeros_like(p, dtype=torch.float64)]}
            state["norms"] = []
        state["norms"].append(float(p.grad.norm()))
        state["of"]["sum"].mul_(0.9).add_(p.grad)
        state["of"]["all"][0].add_(p.grad.double() / 3)
        p.sub_(state["of"]["sum"] + state["of"]["all"][0].to(p.dtype), alpha=group["lr"] / (1 + sum(state["norms"])))


class Sharing(Own):
    """Its parameters share a tensor of their states."""

    def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
        if "shared" not in state:
            found = [of["shared"] for of in self.state.values() if "shared" in of]
            state["shared"] = found[0] if found else torch.zeros(3)
        state["shared"].mul_(0.9).add_(p.grad.norm())
        p.sub_(p.grad, alpha=group["lr"] / (1 + float(state["shared"][0])))


class WritingGroups(Own):
    """It writes in place to what its groups have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, seen=None, count=None)

    def begin(self, group: dict[str, Any]) -> None:
        if group["seen"] is None:
            group["seen"], group["count"] = [], torch.zeros(2)
        group["seen"].append(len(group["seen"]))
        group["count"] += 1

    def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"] / (len(group["seen"]) + float(group["count"][0])))


class Remembering(Own):
    """It keeps on the object what it made of all its parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.numel = sum(one.numel() for group in self.param_groups for one in group["params"])
        self.known = [one for group in self.param_groups for one in group["params"]]
        self.steps = torch.zeros(len(self.param_groups))

    def begin(self, group: dict[str, Any]) -> None:
        self.steps += 1
        for one in self.known:
            one.mul_(1 - 1e-3)

    def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
        state["seen"] = True
        p.sub_(p.grad, alpha=group["lr"] * self.numel / float(self.steps.sum()) * 1e-3)


def resume(model: Module, optimizer: Any, make: Any) -> Any:
    state = saved(optimizer.state_dict())
    closed(optimizer)
    optimizer = make(model)
    optimizer.load_state_dict(state)
    return optimizer


def edit(model: Module, optimizer: Any, make: Any) -> Any:
    for one in model.parameters():
        if optimizer.state[one]:
            optimizer.state[one]["edited"] = True
    return optimizer


def regroup(model: Module, optimizer: Any, make: Any) -> Any:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    return optimizer


@pytest.mark.parametrize("act", [resume, edit, regroup], ids=lambda act: act.__name__)
@pytest.mark.parametrize("optimizer_class", [Wider, Nested, Sharing, WritingGroups, Remembering])
@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_class_that_keeps_anything(
    fraction: float, optimizer_class: type[Optimizer], act: Any, session: spillway.Session
) -> None:
    plain, ours = wide(), wide()

    def offload(model: Module) -> OffloadedOptimizer:
        return OffloadedOptimizer(three_of_lr(model), optimizer_class, session=session, fraction=fraction)

    optimizers = []
    for model, make in ((plain, lambda model: optimizer_class(three_of_lr(model))), (ours, offload)):  # type: ignore[call-arg]
        optimizer: Any = make(model)
        for number, batch in enumerate(batches(6)):
            if number == 3:
                optimizer = act(model, optimizer, make)
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_same_values(ours, plain)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert_same_contents(dict(optimizers[1].state.get(other, {})), optimizers[0].state.get(one, {}))
    for one, other in zip(*(each.param_groups for each in optimizers), strict=True):
        assert_same_contents({**other, "params": ()}, {**one, "params": ()})
    closed(optimizers[1])


def assert_same_contents(ours: Any, plain: Any) -> None:
    (flat, form), (other, expected) = tree_flatten(ours), tree_flatten(plain)
    assert form == expected
    assert all(same_bits(one, two) for one, two in zip(flat, other, strict=True))


def test_a_tensor_of_a_group_that_is_written_in_place_stays_the_users(cpu_session: spillway.Session) -> None:
    rate = torch.tensor(0.1)

    class Decaying(Own):
        def begin(self, group: dict[str, Any]) -> None:
            group["lr"].mul_(0.5)

        def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
            p.sub_(group["lr"] * p.grad)

    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = OffloadedOptimizer([parameter], Decaying, lr=rate, session=cpu_session)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate == 0.05
    rate.fill_(4)
    optimizer.step()
    assert torch.equal(parameter, torch.full((3,), 1 - 0.05 - 2.0))
    optimizer.close()


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_a_class_that_keeps_a_master_of_its_own_is_refused(fraction: float, cpu_session: spillway.Session) -> None:
    class Mastering(Own):
        def one(self, group: dict[str, Any], p: Any, state: Any) -> None:
            state["master"] = state.get("master", p.double()) - p.grad.double() / 3
            p.copy_(state["master"])

    model = wide()
    optimizer = OffloadedOptimizer(model.parameters(), Mastering, session=cpu_session, fraction=fraction)
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(UnsupportedError, match=r"Mastering keeps an entry 'master' .* Rename it"):
        optimizer.step()
    optimizer.close()


def test_a_class_that_counts_on_its_object_is_stepped_from_any_thread(cpu_session: spillway.Session) -> None:
    models = [wide(), wide()]
    for model, make in ((models[0], Remembering), (models[1], None)):
        optimizer: Any = (
            make(model.parameters())
            if make is not None
            else OffloadedOptimizer(model.parameters(), Remembering, session=cpu_session, fraction=0.0)
        )
        for batch in batches(3):
            loss_of(model, batch).backward()
            thread = threading.Thread(target=optimizer.step)
            thread.start()
            thread.join()
            optimizer.zero_grad()
        closed(optimizer)
    assert_same_values(*models)


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_parameters_are_not_compared_to_find_what_a_step_writes_to_groups(
    fraction: float, cpu_session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are large, and a DTensor has no list."""
    model = wide()
    optimizer = OffloadedOptimizer(model.parameters(), Everything, session=cpu_session, fraction=fraction)
    loss_of(model, batches(1)[0]).backward()

    def tolist(tensor: torch.Tensor) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    optimizer.step()
    optimizer.close()
