"""Windows against loops that are written out plainly: the same bits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from accumulate.loops import (
    PADDING,
    Batch,
    Trace,
    assert_same,
    averaged,
    batches,
    by_hand,
    fresh,
    plain,
    plain_steps,
    summed,
    windowed,
)
from spillway.accumulate.gradients import Factors
from spillway.accumulate.stepping import Totals
from spillway.policies import Offload
from support import assert_nothing_left

STEPS = 4
LOADER = batches(3 * STEPS)
WINDOWS = [LOADER[start : start + STEPS] for start in range(0, len(LOADER), STEPS)]

Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "fused AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "Adam, foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": model.head.parameters(), "weight_decay": 0.0},
            {"params": [*model.hidden.parameters(), *model.words.parameters()]},
        ],
        lr=0.01,
    ),
}
SOME = ["SGD", "fused AdamW"]


def pair(make: str = "AdamW", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh(**options)
    return model, OPTIMIZERS[make](model)


@pytest.mark.parametrize("max_norm", [None, 0.05, math.inf])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_counts_that_are_known_last_or_first_give_the_plain_loops_bits(make: str, max_norm: float | None) -> None:
    model, optimizer = pair(make)
    expected = plain(model, optimizer, WINDOWS, max_norm=max_norm)
    assert len({*expected.totals}) == len(WINDOWS), "windows of one weight prove little"
    weighs: dict[str, Callable[[Tensor], Any]] = {
        "tensors": lambda words: words,
        "numbers": int,
        "one element": lambda words: words.reshape(1).float(),
    }
    for weigh in weighs.values():
        model, optimizer = pair(make)
        window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=max_norm)
        assert_same(windowed(model, window, LOADER, weigh=weigh), expected)
    model, optimizer = pair(make)
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=max_norm, normalize="samples")
    assert_same(by_hand(model, window, WINDOWS), expected)


def test_a_mean_of_means_is_something_else() -> None:
    model, optimizer = pair("SGD")
    expected = plain(model, optimizer, WINDOWS)
    model, optimizer = pair("SGD")
    window = spillway.Accumulator(model, optimizer, steps=STEPS, normalize="steps")
    means = windowed(model, window, LOADER, loss=averaged, weigh=None)
    assert not torch.allclose(means.weights[0][0], expected.weights[0][0])


@pytest.mark.parametrize("steps", [1, 3, 4])
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("make", SOME)
def test_steps_is_the_loop_of_every_tutorial(make: str, max_norm: float | None, steps: int) -> None:
    windows = [LOADER[start : start + steps] for start in range(0, len(LOADER), steps)]
    model, optimizer = pair(make)
    expected = plain_steps(model, optimizer, windows, max_norm=max_norm)
    model, optimizer = pair(make)
    window = spillway.Accumulator(model, optimizer, steps=steps, normalize="steps", max_norm=max_norm)
    assert_same(windowed(model, window, LOADER, loss=averaged, weigh=None), expected)
    # The unscaled loss is reported.
    assert window.last is not None
    with torch.no_grad():
        model, optimizer = pair(make)
    first = spillway.Accumulator(model, optimizer, steps=steps, normalize="steps")
    losses = [averaged(model, batch)[0].item() for batch in LOADER[:steps]]
    windowed(model, first, LOADER[:steps], loss=averaged, weigh=None)
    assert first.last is not None
    assert float(first.last.loss) == pytest.approx(sum(losses) / steps, rel=1e-12)
    assert float(first.last.weight) == steps


def test_sum_is_no_normalisation_at_all() -> None:
    model, optimizer = pair("SGD")
    trace = Trace()
    for each in WINDOWS:
        for batch in each:
            summed(model, batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        trace.note(model)
    model, optimizer = pair("SGD")
    window = spillway.Accumulator(model, optimizer, steps=STEPS, normalize="sum")
    ours = windowed(model, window, LOADER, weigh=None)
    assert_same(ours, trace)
    assert ours.totals == [STEPS] * len(WINDOWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_type_is_normalised_as_by_a_number(dtype: torch.dtype) -> None:
    expected = plain(*pair("SGD", dtype=dtype), WINDOWS, max_norm=0.5)
    for weigh in (int, lambda words: words):
        model, optimizer = pair("SGD", dtype=dtype)
        window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.5)
        assert_same(windowed(model, window, LOADER, weigh=weigh), expected)


def test_a_total_on_a_device_gives_the_bits_of_a_number() -> None:
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
    for dtype in kinds:
        for shape in [(), (7,), (3, 5), (2, 3, 4, 5)]:
            for total in (3, 7, 1000, 12345, 1 << 20):
                gradient = torch.randn(shape, dtype=dtype)
                parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for _ in range(2)]
                for parameter in parameters:
                    parameter.grad = gradient.clone()
                Factors(float(total), lambda _: 2.0).apply(parameters[:1])
                Factors(torch.tensor(total, dtype=torch.float64), lambda _: 2.0).apply(parameters[1:])
                assert torch.equal(parameters[0].grad, parameters[1].grad)
                assert torch.equal(parameters[0].grad, gradient.clone().mul_(2 / total))


def test_weights_that_stay_on_a_device_are_added_up_there() -> None:
    totals = Totals(())
    for weight in (torch.tensor(3), 4.0, torch.tensor([5.5])):
        totals.add(torch.tensor(0.25), weight)
    totals.finish()
    assert totals.weight == 12.5 and totals.loss == 0.75
    for nonsense in (-1.0, math.nan):
        totals = Totals(())
        totals.add(torch.tensor(0.25), 4.0)
        totals.add(torch.tensor(0.25), torch.tensor(nonsense))
        totals.finish()
        assert isinstance(totals.weight, Tensor) and totals.weight.isnan()


AUTOCAST: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("cast", AUTOCAST)
@pytest.mark.parametrize("make", SOME)
def test_a_scaler_skips_whole_windows_and_the_scheduler_waits(make: str, cast: str, max_norm: float | None) -> None:
    """An infinity in one micro-batch: in the first of a window, in the last of another."""
    poisoned = {1, STEPS * 2 - 1}

    def poison(loss: Any) -> Any:
        count = iter(range(len(LOADER)))

        def poisonous(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            value, words = loss(model, batch)
            return (value * math.inf if next(count) in poisoned else value), words

        return poisonous

    def things() -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
        model, optimizer = pair(make)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
        return model, optimizer, scaler, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, optimizer, scaler, scheduler = things()
    expected = plain(
        model,
        optimizer,
        WINDOWS,
        loss=poison(summed),
        max_norm=max_norm,
        scaler=scaler,
        scheduler=scheduler,
        autocast=AUTOCAST[cast],
    )
    assert expected.skipped == [True, True, False]
    expected.losses, expected.norms = [], []  # not numbers, which equal nothing
    model, optimizer, ours, scheduler = things()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=max_norm, scaler=ours, scheduler=scheduler)
    got = windowed(model, window, LOADER, loss=poison(summed), autocast=AUTOCAST[cast])
    assert_same(got, expected)
    assert ours.state_dict() == scaler.state_dict()
    assert scheduler.last_epoch == 1
    assert got.rates == [got.rates[0]] * 3


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_steps_with_a_scaler_is_the_loop_of_every_tutorial(max_norm: float | None) -> None:
    traces = []
    for ours in (False, True):
        model, optimizer = pair("fused AdamW")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        if ours:
            window = spillway.Accumulator(
                model, optimizer, steps=STEPS, normalize="steps", scaler=scaler, max_norm=max_norm
            )
            cast = AUTOCAST["float16"]
            traces.append(windowed(model, window, LOADER, loss=averaged, weigh=None, autocast=cast))
        else:
            traces.append(
                plain_steps(model, optimizer, WINDOWS, scaler=scaler, max_norm=max_norm, autocast=AUTOCAST["float16"])
            )
    assert_same(traces[1], traces[0])


@pytest.mark.parametrize("cast", AUTOCAST)
def test_autocast_needs_no_scaler(cast: str) -> None:
    expected = plain(*pair(), WINDOWS, max_norm=0.05, autocast=AUTOCAST[cast])
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.05)
    assert_same(windowed(model, window, LOADER, autocast=AUTOCAST[cast]), expected)


def test_a_scaler_that_is_switched_off_is_none() -> None:
    expected = plain(*pair(), WINDOWS)
    model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    window = spillway.Accumulator(model, optimizer, steps=STEPS, scaler=scaler)
    assert_same(windowed(model, window, LOADER), expected)


def test_gradients_are_unscaled_and_clipped_once_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Counting(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            calls.append("unscale")
            super().unscale_(optimizer)

        def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().step(optimizer, *args, **kwargs)

        def update(self, new_scale: Any = None) -> None:
            calls.append("update")
            super().update(new_scale)

    clip = nn.utils.clip_grad_norm_

    def clipping(*args: Any, **kwargs: Any) -> Any:
        calls.append("clip")
        return clip(*args, **kwargs)

    monkeypatch.setattr("spillway.accumulate.gradients.clip_grad_norm_", clipping)
    model, optimizer = pair()
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    monkeypatch.setattr(scheduler, "step", lambda: calls.append("schedule"))
    window = spillway.Accumulator(
        model, optimizer, steps=STEPS, max_norm=1.0, scaler=Counting("cpu"), scheduler=scheduler
    )
    windowed(model, window, LOADER[: 2 * STEPS])
    assert calls == ["unscale", "clip", "step", "update", "schedule"] * 2


PARTIAL = LOADER[:10]


def test_a_partial_window_steps_by_what_there_is() -> None:
    windows = [LOADER[:4], LOADER[4:8], LOADER[8:10]]
    expected = plain(*pair(), windows, max_norm=0.05)
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.05)
    assert_same(windowed(model, window, PARTIAL), expected)
    assert window.last is not None and window.last.micro_batches == 2
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.05)
    assert_same(by_hand(model, window, windows), expected)


def test_a_partial_window_of_steps_is_divided_by_the_steps_that_there_were() -> None:
    model, optimizer = pair("SGD")
    trace = Trace()
    for each in (LOADER[:4], LOADER[4:8], LOADER[8:10]):
        for batch in each:
            (averaged(model, batch)[0] / STEPS).backward()
        if len(each) < STEPS:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(STEPS / len(each))
        optimizer.step()
        optimizer.zero_grad()
        trace.note(model)
    model, optimizer = pair("SGD")
    window = spillway.Accumulator(model, optimizer, steps=STEPS, normalize="steps")
    assert_same(windowed(model, window, PARTIAL, loss=averaged, weigh=None), trace)


def test_a_partial_window_is_dropped() -> None:
    expected = plain(*pair(), [LOADER[:4], LOADER[4:8], LOADER[:4]])
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, partial="drop")
    trace = windowed(model, window, PARTIAL)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 5
    assert not window.stepped and window.micro_batches == 0
    more = windowed(model, window, LOADER[:4])
    assert_same(
        Trace(trace.weights + more.weights, trace.losses + more.losses), Trace(expected.weights, expected.losses)
    )
    assert window.last is not None and window.last.index == 2


def test_a_partial_window_is_carried_into_the_next_pass() -> None:
    both = [*PARTIAL, *PARTIAL]
    expected = plain(*pair(), [both[start : start + 4] for start in range(0, 20, 4)])
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, partial="carry")
    first = windowed(model, window, PARTIAL)
    assert window.micro_batches == 2
    second = windowed(model, window, PARTIAL)
    assert_same(Trace(first.weights + second.weights), Trace(expected.weights))
    assert window.micro_batches == 0


def test_no_more_is_fetched_than_a_full_window_needs() -> None:
    given: list[int] = []

    def loader() -> Any:
        for number, batch in enumerate(PARTIAL):
            given.append(number)
            yield batch

    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    seen = []
    for number, batch in enumerate(window(loader())):
        seen.append(len(given) - number)
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        assert window.stepped == (number in (3, 7, 9))
        if window.stepped and number < 9:
            assert len(given) == number + 1
    # One ahead, but where the window is full anyway, and where there is no more.
    assert seen == [2, 2, 2, 1, 2, 2, 2, 1, 2, 1]


def test_nothing_is_fetched_ahead_for_a_window_that_is_carried() -> None:
    given: list[int] = []

    def loader() -> Any:
        for number, batch in enumerate(PARTIAL):
            given.append(number)
            yield batch

    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, partial="carry")
    for number, batch in enumerate(window(loader())):
        assert len(given) == number + 1
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)


def test_a_batch_without_a_backward_does_not_count() -> None:
    kept = [batch for place, batch in enumerate(PARTIAL) if place not in (1, 3, 9)]
    expected = plain(*pair(), [kept[:4], kept[4:]])
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    trace = Trace()
    for place, batch in enumerate(window(PARTIAL)):
        if place in (1, 3, 9):
            continue
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        if window.stepped:
            trace.note(model)
    trace.note(model)
    assert_same(trace, Trace(expected.weights))


def test_a_window_that_weighs_nothing_steps_with_gradients_of_zero() -> None:
    words, following = LOADER[0]
    nothing = words, torch.full_like(following, PADDING)
    model, optimizer = pair("SGD")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    window = spillway.Accumulator(model, optimizer, steps=2, max_norm=1.0)
    trace = windowed(model, window, [nothing, nothing])
    assert math.isnan(trace.losses[0])
    assert trace.totals == trace.norms == [0]
    assert all(map(torch.equal, before, model.parameters()))


def test_a_micro_batch_that_weighs_nothing_changes_nothing() -> None:
    words, following = LOADER[0]
    nothing = words, torch.full_like(following, PADDING)
    expected = plain(*pair("SGD"), [LOADER[1:4]])
    model, optimizer = pair("SGD")
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    assert_same(windowed(model, window, [nothing, *LOADER[1:4]]), expected)


def test_sparse_gradients_are_normalised() -> None:
    weights = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Embedding(7, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        words = torch.tensor([1, 2, 1])
        if ours:
            window = spillway.Accumulator(model, optimizer, steps=2)
            for batch in window([words, words[:2]]):
                window.backward(model(batch).square().sum(), weight=len(batch))
        else:
            for batch in (words, words[:2]):
                model(batch).square().sum().backward()
            assert model.weight.grad is not None
            model.weight.grad = model.weight.grad * (1 / 5)
            optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_frozen_tied_and_complex_parameters() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fresh()
        model.head.weight.requires_grad_(False)
        model.hidden.bias = nn.Parameter(model.hidden.bias.detach().clone())
        model.words.weight = model.head.weight = nn.Parameter(model.words.weight.detach().clone())
        model.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)))
        model.hidden.weight.requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        value, words = summed(model, batch)
        return value + model.phase.abs().square().sum() * words, words

    expected = plain(*build(), WINDOWS, loss=loss, max_norm=3.0)
    model, optimizer = build()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=3.0)
    assert_same(windowed(model, window, LOADER, loss=loss), expected)


def test_learning_rates_that_are_tensors_are_reported_as_they_were() -> None:
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    window = spillway.Accumulator(model, optimizer, steps=STEPS, scheduler=scheduler)
    assert windowed(model, window, LOADER).rates == [0.5, 0.25, 0.125]


def test_parameters_of_the_optimizer_only_are_normalised_and_clipped() -> None:
    """Another optimizer may have the others."""
    model = fresh()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    window = spillway.Accumulator(model, optimizer, steps=1, max_norm=1e-3)
    loss, words = summed(model, LOADER[0])
    with window.micro(weight=words):
        window.backward(loss)
    other = model.words.weight.grad
    assert other is not None
    kept = other.clone()
    window.step()
    assert torch.equal(other, kept)


def test_a_step_shows_in_a_trace_under_its_name() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        windowed(model, window, LOADER[:4])
    assert sum(event.name == "spillway.accumulation_step" for event in profile.events()) == 2


# Hazards.


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_h56_a_gradient_that_becomes_none_is_not_applied_again(grad_dtype: Any) -> None:
    """Weights that a window does not use stay as they are, momentum and decay too: their gradient is None."""
    model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)}).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    window = spillway.Accumulator(model, optimizer, steps=2, grad_dtype=grad_dtype)
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    seen: list[list[bool]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([parameter.grad is None for parameter in model.parameters()])
    )
    for names in (["one", "other"], ["one", "one"], ["other", "other"]):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for name in window(names):
            window.backward(model[name](x).float().square().sum(), weight=3)
        same = list(map(torch.equal, before, model.parameters()))
        assert same == seen[-1] == [name not in names for name in ("one", "one", "other", "other")]


@pytest.mark.parametrize("how", ["offload", "attach", "regions"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_h57_offloading_drops_no_micro_batch_and_counts_none_twice(how: str, tier: str, tmp_path: Any) -> None:
    expected = plain(*pair(), WINDOWS, max_norm=0.05)
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.05)
    with spillway.Session(window=0, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        context: Any = spillway.offload(tier=tier, min_bytes=0, session=session)
        attached = None
        if how != "offload":
            policy: Any = Offload(tier) if how == "attach" else spillway.Recompute(offload=["inputs", "matmul"])
            blocks = None if how == "attach" else lambda name, module: name in ("hidden", "head")
            attached = spillway.attach(model, policy=policy, blocks=blocks, min_bytes=0, session=session)
        cast = contextlib.nullcontext if attached is not None else lambda: context
        assert_same(windowed(model, window, LOADER, autocast=cast), expected)
        assert (context if attached is None else attached).stats().offloaded_bytes > 0
        assert_nothing_left(session)
