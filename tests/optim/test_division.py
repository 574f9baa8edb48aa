"""Another part of the parameters on the host from one step to the next: the bits of an optimizer that never moved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from allocations import count_exactly
from optim.support import batches, loss_of, wide
from spillway import OffloadedOptimizer, UsageError
from spillway.attaching import collector
from spillway.planner.profile import OptimizerProfile

SPLIT = {"step_on": "auto", "cpu_share": 0.5}
PARTS = [1.0, 0.4, 0.0, 0.7, 1.0, 0.2]


def course(
    dtype: torch.dtype, make: Callable[[Any], Any], before: Callable[[Any, int], None] = lambda optimizer, step: None
) -> list[torch.Tensor]:
    """Weights after steps of two micro-batches, and the state at last; ``before`` is called between the two.

    In narrow types the first one's gradients are dropped: the host adds gradients up in the masters' type.
    """
    model = wide(dtype)
    optimizer = make(model.parameters())
    for step, (first, second) in enumerate(zip(*[iter(batches(2 * len(PARTS), dtype))] * 2, strict=True)):
        loss_of(model, first).backward()
        if dtype.itemsize < 4:
            optimizer.zero_grad()
        before(optimizer, step)
        loss_of(model, second).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    found = [parameter.detach().clone() for parameter in model.parameters()]
    return found + [value.clone() for _, each in sorted(state.items()) for _, value in sorted(each.items())]


def divide(optimizer: Any, step: int) -> None:
    optimizer.divide(PARTS[step])
    parts = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = sum(parameter.numel() for parameter in parts if optimizer.holds(parameter))
    assert optimizer.fraction == held / sum(parameter.numel() for parameter in parts)
    assert optimizer.fraction >= PARTS[step]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"tier": "disk"}, SPLIT], ids=["memory", "disk", "split"])
def test_steps_are_those_of_an_optimizer_that_is_never_divided(
    dtype: torch.dtype, options: dict[str, Any], session: spillway.Session
) -> None:
    def make(parameters: Any) -> OffloadedOptimizer:
        return OffloadedOptimizer(parameters, torch.optim.AdamW, lr=0.01, fused=True, session=session, **options)

    plain, moved = course(dtype, make), course(dtype, make, divide)
    assert len(plain) == len(moved)
    assert all(map(torch.equal, plain, moved))


def test_steps_are_those_of_the_plain_class(session: spillway.Session) -> None:
    plain = course(torch.float32, lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True))
    moved = course(
        torch.float32,
        lambda parameters: OffloadedOptimizer(parameters, torch.optim.AdamW, lr=0.01, fused=True, session=session),
        divide,
    )
    assert all(map(torch.equal, plain, moved))


def test_what_it_costs_is_known_after_two_steps_on_the_host(session: spillway.Session) -> None:
    model = wide(torch.bfloat16)
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, session=session)

    def step() -> None:
        loss_of(model, batches(1, torch.bfloat16)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    count = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.profile() is None
    step()
    assert optimizer.profile() is None
    step()
    found = optimizer.profile()
    assert found is not None
    # A master and two moments, and for each parameter the number of its steps.
    assert found.state_bytes == 12 * count + 4 * len(list(model.parameters()))
    assert found.gradient_bytes == 2 * count
    assert found.step_bytes == 4 * count
    assert found.host_seconds > 0
    optimizer.divide(0.5)
    step()
    step()
    assert optimizer.profile() is None, "a part of it is on the device"
    optimizer.divide(1)
    step()
    assert optimizer.profile() is None, "the step before was another one"
    step()
    assert optimizer.profile() is not None


@pytest.mark.parametrize("fraction", [-0.1, 1.5, "half", None, True])
def test_what_is_no_fraction_is_refused(fraction: Any, session: spillway.Session) -> None:
    optimizer = OffloadedOptimizer(wide().parameters(), torch.optim.AdamW, session=session)
    with pytest.raises(UsageError, match="fraction: got"):
        optimizer.divide(fraction)


@pytest.mark.parametrize("options", [{"fraction": "auto"}, {"device_budget": "1MiB"}, {"step_in_backward": True}])
def test_where_something_else_says_the_fraction_it_is_refused(
    options: dict[str, Any], session: spillway.Session
) -> None:
    optimizer = OffloadedOptimizer(wide().parameters(), torch.optim.AdamW, session=session, **options)
    with pytest.raises(UsageError, match=r"divide\(\) of an optimizer"):
        optimizer.divide(0.5)


# Between two steps


@pytest.mark.parametrize(
    "options", [{}, {"tier": "disk"}, {"step_on": "gpu"}, SPLIT], ids=["memory", "disk", "streamed", "split"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_is_whole_right_after(options: dict[str, Any], dtype: torch.dtype, session: spillway.Session) -> None:
    model = wide(dtype)
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, session=session, **options)
    for batch in batches(2, dtype):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> list[tuple[str, torch.Tensor]]:
        found = sorted(optimizer.state_dict()["state"].items())
        return [(name, value.clone()) for _, each in found for name, value in sorted(each.items())]

    before = state()
    for part in (0.5, 0.0, 1.0):
        optimizer.divide(part)
        after = state()
        assert [name for name, _ in after] == [name for name, _ in before]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("first", "then", "place"), [(1.0, 0.0, "placement.device_copy"), (0.0, 1.0, "state_store.host_copy")]
)
def test_an_error_in_the_middle_loses_and_doubles_nothing(
    first: float, then: float, place: str, session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(fails: bool) -> list[torch.Tensor]:
        model = wide()
        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True, session=session)
        for number, batch in enumerate(batches(5)):
            if number == 1:
                optimizer.divide(first)
            if number == 3 and fails:
                with monkeypatch.context() as patch:
                    patch.setattr(f"spillway.optim.{place}", failing_the_fifth_time())
                    with pytest.raises(MemoryError, match="the fifth"):
                        optimizer.divide(then)
                assert not [
                    one for one in model.parameters() if optimizer.holds(one) and one in optimizer._placement.device
                ]
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def failing_the_fifth_time() -> Any:
    count = 0

    def copy(key: str, value: Any, *_: Any, **__: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise MemoryError("the fifth")
        return value.clone() if isinstance(value, torch.Tensor) else value

    return copy


def test_masters_that_are_to_be_refreshed_are(session: spillway.Session) -> None:
    def run(divides: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 5).bfloat16()
        optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, session=session)
        for batch in batches(4, torch.bfloat16):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.refresh_master_weights()
            if divides:
                optimizer.divide(0.0)
        state = optimizer.state_dict()["state"]
        return [*model.parameters(), *(each["master"] for _, each in sorted(state.items()) if "master" in each)][:2]

    assert all(map(torch.equal, run(True), run(False)))


def test_moving_to_and_fro_leaves_no_hook_and_no_finalizer(session: spillway.Session) -> None:
    optimizer = OffloadedOptimizer(wide().parameters(), torch.optim.AdamW, session=session)
    before = len(weakref.finalize._registry)
    for _ in range(3):
        optimizer.divide(0.0)
        optimizer.divide(1.0)
    assert len(weakref.finalize._registry) == before


# Said by a plan


@pytest.mark.parametrize(("budget", "fraction"), [("1GiB", 0.0), ("least", 1.0)])
def test_a_plan_says_the_fraction_and_training_has_the_bits_of_none(
    budget: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exactly(monkeypatch, lambda: 16 << 20)
    hardware = spillway.Hardware.named("h200")

    def make(model: torch.nn.Module, session: spillway.Session | None) -> OffloadedOptimizer:
        return OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, fused=True, session=session)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = []
        for batch in batches(10, rows=512):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return [*found, *(parameter.detach().clone() for parameter in model.parameters())]

    plain = wide()
    expected = train(plain, make(plain, None))
    with spillway.Session(spill_directory=tmp_path) as session:
        model = wide()
        optimizer = make(model, session)
        if budget == "least":
            with pytest.raises(spillway.BudgetError) as caught:
                spillway.plan(
                    spillway.profile(model, batches(1, rows=512)[0], session=session), budget=1, hardware=hardware
                )
            # A MiB for what a CPU's peak differs by; its states would need less.
            budget = str(caught.value.least + (1 << 20))
            # It is slow to wait for what is on the host, and there is no room for it elsewhere.
            monkeypatch.setattr(optimizer._placement, "state_bytes", lambda group, parameter: 1 << 20)
        monkeypatch.setattr(optimizer, "profile", lambda found=optimizer.profile: stalls(found()), raising=True)
        how = {"hardware": hardware, "session": session, "min_bytes": "4KiB"}
        with spillway.attach(model, budget=budget, optimizer=optimizer, **how) as attached:
            assert all(map(torch.equal, train(model, optimizer), expected))
            assert attached.stage == "active"
            assert attached.plan is not None
            assert attached.plan.optimizer_fraction == fraction
            assert optimizer.fraction == fraction
            assert f"optimizer: {fraction:.0%} of it on the CPU" in attached.explain()
        optimizer.close()


def stalls(found: OptimizerProfile | None) -> OptimizerProfile | None:
    """On a CPU nothing is waited for; as if all of it were."""
    return None if found is None else replace(found, host_seconds=1.0, stall_seconds=1.0)


def test_an_optimizer_that_never_steps_stays_on_the_host_with_a_note(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_MOST_WAITING", 3)
    model = wide()
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session)
    how = {"hardware": spillway.Hardware.named("h200"), "session": session}
    with spillway.attach(model, budget="64GiB", optimizer=optimizer, **how) as attached:
        for batch in batches(12):
            loss_of(model, batch).backward()
        assert attached.stage == "active"
        assert "the optimizer took no two steps" in attached.explain()
    assert optimizer.fraction == 1


def test_another_optimizer_is_refused(session: spillway.Session) -> None:
    model = wide()
    with pytest.raises(UsageError, match=r"optimizer: got AdamW, expected a spillway.OffloadedOptimizer"):
        spillway.attach(model, budget="1GiB", optimizer=torch.optim.AdamW(model.parameters()), session=session)
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session)
    with pytest.raises(UsageError, match=r"got optimizer without a budget"):
        spillway.attach(model, optimizer=optimizer, session=session)
    assert "_compiled_call_impl" not in vars(model)
