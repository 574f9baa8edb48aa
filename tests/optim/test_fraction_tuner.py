"""The choice of a fraction: what a step is seen to cost, and what may be on the host then."""

from __future__ import annotations

import pytest
import torch

import spillway
from spillway.optim.options import ENOUGH, MEASURED, WARM_UP, FractionTuner, StepTimes, affordable


def test_all_stays_on_the_host_where_nothing_is_waited_for() -> None:
    assert affordable(StepTimes(1.0, 0.0, 0.9), 1.0, 0.05) == 1.0


def test_what_is_hidden_may_stay_and_what_is_allowed_on_top_of_it() -> None:
    # Of 0.8 s on the host 0.3 are hidden; 5 % of the device's own second are 0.05: 0.35 of 0.8, and a margin.
    assert affordable(StepTimes(1.5, 0.5, 0.8), 1.0, 0.05) == pytest.approx(0.97 * 0.35 / 0.8)


def test_a_choice_is_made_of_medians_after_a_warm_up_and_made_again_from_what_it_costs() -> None:
    balance = FractionTuner(0.05)
    slow = StepTimes(1.5, 0.5, 0.8)
    for _ in range(WARM_UP + MEASURED - 1):
        assert balance.note(slow, 1.0) is None
    assert balance.note(StepTimes(9.0, 8.0, 0.8), 1.0) == pytest.approx(affordable(slow, 1.0, 0.05))
    still = StepTimes(1.2, 0.2, 0.3)
    for _ in range(WARM_UP + MEASURED - 1):
        assert balance.note(still, 0.4) is None
    assert balance.note(still, 0.4) == pytest.approx(affordable(still, 0.4, 0.05))


def test_a_fraction_that_is_cheap_enough_is_kept_for_good() -> None:
    balance = FractionTuner(0.05)
    steps = WARM_UP + ENOUGH * MEASURED
    assert [balance.note(StepTimes(1.0, 0.01, 0.9), 1.0) for _ in range(steps)] == [None] * steps
    assert [balance.note(StepTimes(9.0, 8.0, 0.9), 1.0) for _ in range(20)] == [None] * 20


def test_one_that_seemed_cheap_is_lowered_if_it_is_not() -> None:
    balance = FractionTuner(0.05)
    for _ in range(WARM_UP + MEASURED):
        assert balance.note(StepTimes(1.0, 0.01, 0.9), 1.0) is None
    found = [balance.note(StepTimes(1.5, 0.5, 0.8), 1.0) for _ in range(MEASURED)]
    assert found[-1] == pytest.approx(affordable(StepTimes(1.5, 0.5, 0.8), 1.0, 0.05))


def trained(steps: int, **options: object) -> tuple[torch.nn.Module, spillway.OffloadedOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, fused=True, **options)  # type: ignore[arg-type]
    for _ in range(steps):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_parameters_that_go_to_the_device_take_their_state_along(monkeypatch: pytest.MonkeyPatch) -> None:
    # On the CPU, the device's fused step is the host's: wherever a parameter is stepped, the bits are the same.
    expected, _ = trained(12, fraction=0.0)
    monkeypatch.setattr(FractionTuner, "note", lambda self, seen, fraction: fraction / 2 if fraction > 0.1 else None)
    got, optimizer = trained(12, fraction="auto")
    assert 0 < optimizer.fraction < 0.5
    for one, other in zip(got.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_session_gets_back_what_a_parameter_had_that_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FractionTuner, "note", lambda self, seen, fraction: 0.0)
    with spillway.Session() as session:
        _, optimizer = trained(6, fraction="auto", session=session)
        assert optimizer.fraction == 0
        assert session.used_bytes == (0, 0)
        optimizer.close()


@pytest.mark.parametrize("slowdown", [-0.1, float("inf"), True, "5 %"])
def test_a_slowdown_that_cannot_be_meant_is_refused(slowdown: object) -> None:
    with pytest.raises(spillway.UsageError, match="slowdown: got"):
        trained(0, fraction="auto", slowdown=slowdown)
