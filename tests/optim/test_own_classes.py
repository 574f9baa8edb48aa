"""Optimizer classes of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Module
from torch.optim import Optimizer

import spillway
from optim.support import (
    assert_same_state,
    assert_same_values,
    batches,
    loss_of,
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
