"""Which parameters are held, which class steps which of them, and what a class keeps in its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import spillway
from spillway import OffloadedOptimizer, UnsupportedError, UsageError
from spillway.optim.options import counted, held_of
from spillway.testing import AdversaryBackend

HALF = 0.5


class Counting(Optimizer):
    """Steps less far each time, by a count that it keeps in its groups, as some classes do."""

    def __init__(self, params: Any, lr: float = 0.1, warm: int = 2) -> None:
        super().__init__(params, {"lr": lr, "warm": warm})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", group["warm"]) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * (group["lr"] / group["count"]))


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).to(dtype)


def train(trained: nn.Module, optimizer: Optimizer, steps: int = 3, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        trained(torch.randn(4, 8, dtype=next(trained.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_a_fraction_counts_what_is_on_devices_or_all_where_all_is_on_the_cpu() -> None:
    cpu, device = torch.device("cpu"), torch.device("cuda", 0)
    assert counted([device, cpu, device]) == [True, False, True]
    assert counted([cpu, cpu]) == [True, True]
    assert counted([]) == []


def test_the_first_may_be_held_instead_of_the_last_until_the_fraction_is_reached() -> None:
    assert held_of([4, 4, 2], HALF, last_first=False) == [True, True, False]
    assert held_of([4, 4, 2], 0.4, last_first=False) == [True, False, False]
    trained = model()
    weights = [trained[0].weight, trained[0].bias, trained[2].weight, trained[2].bias]
    for hold, expected in (("first", [True, True, False, False]), ("last", [False, False, True, True])):
        with_half = OffloadedOptimizer(weights, AdamW, fraction=HALF, hold=hold)
        assert [with_half.holds(weight) for weight in weights] == expected
        with_half.close()


@pytest.mark.parametrize(("fraction", "expected"), [(0, [True, False, False]), (0.5, [True, True, False])])
def test_what_is_on_the_cpu_beside_others_is_held_and_not_counted(fraction: float, expected: list[bool]) -> None:
    """Parameters without memory stand for those of a device that this machine need not have."""
    parameters = [nn.Parameter(torch.empty(99))] + [nn.Parameter(torch.empty(8, device="meta")) for _ in range(2)]
    with spillway.Session(backend=AdversaryBackend().serve) as session:
        optimizer = OffloadedOptimizer(parameters, AdamW, fraction=fraction, hold="first", session=session)
        assert [optimizer.holds(parameter) for parameter in parameters] == expected
        optimizer.close()


def test_what_stays_on_the_device_may_be_stepped_by_another_class() -> None:
    plain, ours = model(), model()
    options = {"lr": 0.01, "weight_decay": 0.1}
    fused = Adam(plain[0].parameters(), fused=True, **options)
    other = SGD(plain[2].parameters(), momentum=0.9, **options)
    torch.manual_seed(1)
    for _ in range(3):
        plain(torch.randn(4, 8)).square().mean().backward()
        for each in (fused, other):
            each.step()
            each.zero_grad()
    # Each is given what it takes: Adam no momentum.
    optimizer = OffloadedOptimizer(
        ours.parameters(), Adam, device_class=SGD, hold="first", fraction=HALF, momentum=0.9, **options
    )
    train(ours, optimizer)
    assert_same(ours, plain)
    assert optimizer.state[ours[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[ours[2].weight].keys() == {"momentum_buffer"}


def test_each_class_is_what_it_is_where_the_groups_of_both_say_so_by_one_name() -> None:
    """AdamW is torch's Adam with ``decoupled_weight_decay``, which is in the groups, and which AdamW does not take."""
    ours, plain = model(), model()
    options = {"lr": 0.01, "weight_decay": 0.5}
    optimizer = OffloadedOptimizer(ours.parameters(), AdamW, device_class=Adam, fraction=HALF, **options)
    train(plain, Adam(plain[0].parameters(), **options), steps=1)
    train(ours, optimizer, steps=1)
    assert torch.equal(ours[0].weight, plain[0].weight)
    other = model()
    train(other, AdamW(other[2].parameters(), fused=True, **options), steps=1)
    assert torch.equal(ours[2].weight, other[2].weight)


def test_a_default_that_classes_do_not_agree_about_has_to_be_given() -> None:
    with pytest.raises(UsageError, match=r"AdamW and Adam have different defaults of \['weight_decay'\]"):
        OffloadedOptimizer(model().parameters(), AdamW, device_class=Adam, lr=0.1)


def test_a_name_that_neither_class_takes_is_refused_and_a_class_that_cannot_be() -> None:
    parameters = list(model().parameters())
    with pytest.raises(UsageError, match=r"Adam and SGD: got \['colour'\]"):
        OffloadedOptimizer(parameters, Adam, device_class=SGD, colour=1)
    with pytest.raises(UsageError, match="device_class: got 'SGD'"):
        OffloadedOptimizer(parameters, Adam, device_class="SGD")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="device_class: SparseAdam"):
        OffloadedOptimizer(parameters, Adam, device_class=torch.optim.SparseAdam)
    with pytest.raises(UsageError, match="device_class differs"):
        OffloadedOptimizer(parameters, Adam, device_class=SGD, fraction="auto")
    with pytest.raises(UsageError, match="hold: got 'middle'"):
        OffloadedOptimizer(parameters, Adam, hold="middle")


@pytest.mark.parametrize("fraction", [0.0, HALF, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_class_keeps_in_its_groups_is_there_at_the_next_step_and_is_saved(
    fraction: float, overlap: bool
) -> None:
    plain, ours = model(), model()
    expected, optimizer = (
        Counting(plain.parameters()),
        OffloadedOptimizer(ours.parameters(), Counting, fraction=fraction),
    )
    if overlap:
        optimizer.overlap_forward(ours, blocks=nn.Linear)
    train(plain, expected)
    train(ours, optimizer)
    assert optimizer.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    assert optimizer.param_groups[0]["count"] == 5
    again = Counting(ours.parameters())
    again.load_state_dict(optimizer.state_dict())
    train(ours, again, seed=2)
    train(plain, expected, seed=2)
    assert_same(ours, plain)


class Once(SGD):
    """Puts something into its groups at its first step."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group.setdefault("found", "by the step")


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_what_a_user_writes_over_what_a_class_has_written_stands(fraction: float) -> None:
    ours = model()
    optimizer = OffloadedOptimizer(ours.parameters(), Once, fraction=fraction, lr=0.1)
    train(ours, optimizer, steps=1)
    assert optimizer.param_groups[0]["found"] == "by the step"
    optimizer.param_groups[0]["found"] = "by the user"
    train(ours, optimizer, steps=2)
    assert optimizer.param_groups[0]["found"] == "by the user"


def test_a_device_class_finds_its_own_defaults_in_its_groups() -> None:
    plain, ours = model(), model()
    train(plain, Counting(plain[0].parameters(), lr=0.01))
    plain_rest = model()
    # The host's class knows nothing of "warm".
    optimizer = OffloadedOptimizer(ours.parameters(), RMSprop, device_class=Counting, fraction=HALF, lr=0.01)
    assert optimizer.param_groups[0]["warm"] == 2
    del optimizer.param_groups[0]["warm"]
    ours[2].requires_grad_(False)
    plain_rest[2].load_state_dict(ours[2].state_dict())
    train(ours, optimizer)
    assert torch.equal(ours[0].weight, plain[0].weight)


@pytest.mark.parametrize("fraction", [0.0, HALF, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_past_a_version_is_seen_after_masters_were_refreshed(
    fraction: float, dtype: torch.dtype
) -> None:
    """Hazard 55: ``.data`` has a version of its own."""
    ours, session = model(dtype), spillway.Session()
    optimizer = OffloadedOptimizer(ours.parameters(), SGD, fraction=fraction, lr=1.0, session=session)
    train(ours, optimizer, steps=1)
    for parameter in ours.parameters():
        parameter.data.fill_(0.5)
        parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.refresh_master_weights()
    optimizer.step()
    assert all(bool((parameter == 0.25).all()) for parameter in ours.parameters())
    optimizer.close()
    assert session.used_bytes == (0, 0)


def test_refreshed_masters_lose_what_the_parameters_do_not_say() -> None:
    ours = model(torch.bfloat16)
    optimizer = OffloadedOptimizer(ours.parameters(), AdamW, lr=1e-3)
    train(ours, optimizer)
    weight = ours[0].weight
    assert not torch.equal(optimizer.state[weight]["master"], weight.float())
    optimizer.refresh_master_weights()
    optimizer.param_groups[0]["lr"] = 0.0
    train(ours, optimizer, steps=1)
    assert torch.equal(optimizer.state[weight]["master"], weight.float())
