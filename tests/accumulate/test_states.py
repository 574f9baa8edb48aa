"""Windows in the wrong order, windows that fail halfway, windows that end: nothing is left behind."""

from __future__ import annotations

import math
import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from accumulate.loops import Trace, assert_same, batches, fresh, note, plain, summed, windowed
from spillway import UsageError
from support import FailsInBackward

STEPS = 4
LOADER = batches(3 * STEPS)
WINDOWS = [LOADER[start : start + STEPS] for start in range(0, len(LOADER), STEPS)]


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fresh()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def windows(**options: Any) -> spillway.Accumulator:
    model, optimizer = pair()
    return spillway.Accumulator(model, optimizer, **{"steps": STEPS, **options})


NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"steps": 0}, "steps: got 0, expected the number of micro-batches: an integer of at least 1"),
    "steps of a bool": ({"steps": True}, "steps: got True"),
    "half a step": ({"steps": 1.5}, "steps: got 1.5"),
    "normalize": ({"normalize": "rows"}, "normalize: got 'rows', expected 'tokens' or 'samples' or 'steps' or 'sum'"),
    "partial": ({"partial": "keep"}, "partial: got 'keep', expected 'scale' or 'drop' or 'carry'"),
    "sync": ({"sync": "never"}, "sync: got 'never', expected 'last' or 'every'"),
    "no norm": ({"max_norm": 0}, "max_norm: got 0, expected a number above 0"),
    "norm of nan": ({"max_norm": math.nan}, "max_norm: got nan"),
    "scaler": ({"scaler": 2.0}, "scaler: got 2.0, expected a torch.amp.GradScaler or None"),
    "scheduler": ({"scheduler": 0.1}, "scheduler: got 0.1"),
    "type": ({"grad_dtype": torch.bfloat16}, "grad_dtype: got torch.bfloat16, expected torch.float32, or None"),
    "group": ({"group": "world"}, "group: got 'world', expected a process group, a device mesh, or None"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_cannot_be_meant_is_said_at_once(name: str) -> None:
    options, words = NONSENSE[name]
    with pytest.raises(UsageError, match=re.escape(words)):
        windows(**options)


def test_things_of_other_kinds_are_refused() -> None:
    model, optimizer = pair()
    with pytest.raises(UsageError, match="model: got"):
        spillway.Accumulator(optimizer, optimizer, steps=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizer: got"):
        spillway.Accumulator(model, model, steps=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="optimizer: LBFGS recomputes the loss"):
        spillway.Accumulator(model, torch.optim.LBFGS(model.parameters()), steps=1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(UsageError, match="ReduceLROnPlateau steps with a metric"):
        spillway.Accumulator(model, optimizer, steps=1, scheduler=plateau)


def loss_of(window: Any, place: int = 0) -> Tensor:
    return torch.ones(1, requires_grad=True).sum()


def test_a_step_wants_a_backward_before_it() -> None:
    window = windows()
    with pytest.raises(UsageError, match="called before any backward"):
        window.step()
    with window.micro(weight=1), pytest.raises(UsageError, match="called in a micro-batch before its backward"):
        window.step()
    with pytest.raises(UsageError, match="called before any backward"):
        window.step()


def test_a_backward_wants_a_micro_batch_around_it_and_is_its_only_one() -> None:
    window = windows()
    with pytest.raises(UsageError, match="called outside of a micro-batch"):
        window.backward(loss_of(window), weight=1)
    with window.micro():
        window.backward(loss_of(window), weight=1)
        with pytest.raises(UsageError, match="has run its backward already; add the losses"):
            window.backward(loss_of(window), weight=1)
    assert window.micro_batches == 1


def test_micro_batches_do_not_nest() -> None:
    window = windows()
    with window.micro(weight=1), pytest.raises(UsageError, match="another micro-batch is still open"), window.micro():
        pass
    for _ in window([1]):
        with pytest.raises(UsageError, match="another micro-batch is still open"):
            window([2])
        window.backward(loss_of(window), weight=1)
    held = iter(window([1, 2]))
    next(held)
    with pytest.raises(UsageError, match=r"close\(\) an iterator that you hold"), window.micro():
        pass
    held.close()  # type: ignore[attr-defined]
    with window.micro(weight=1):
        window.backward(loss_of(window))


def test_a_full_window_takes_no_more() -> None:
    window = windows(steps=1)
    with window.micro(weight=1):
        window.backward(loss_of(window))
    with pytest.raises(UsageError, match="all 1 micro-batches have run"):
        window.micro(weight=1)
    window.step()
    with window.micro(weight=1):
        window.backward(loss_of(window))


def test_weights_are_wanted_once() -> None:
    window = windows()
    with window.micro(), pytest.raises(UsageError, match="weight: normalize='tokens' divides by the number of tokens"):
        window.backward(loss_of(window))
    with (
        window.micro(weight=1),
        pytest.raises(UsageError, match=r"weight: got 1.0 from micro\(\) and 2 from backward\(\)"),
    ):
        window.backward(loss_of(window), weight=2)
    with window.micro():
        for nonsense in (-1, math.nan, math.inf, "many", True, torch.tensor(-2), torch.ones(2), torch.ones(1) * 1j):
            with pytest.raises(UsageError, match="weight: got"):
                window.backward(loss_of(window), weight=nonsense)  # type: ignore[arg-type]
        # Nothing of it has done any harm.
        window.backward(loss_of(window), weight=0)
    for normalize in ("steps", "sum"):
        other = windows(normalize=normalize, steps=1)
        with other.micro(weight=7):
            other.backward(loss_of(other))
        assert float(other.step().weight) == 7


def test_losses_are_tensors_of_one_element_that_hang_on_something() -> None:
    window = windows()
    with window.micro(weight=1):
        with pytest.raises(UsageError, match=r"loss: got a tensor of shape \(2,\), expected a tensor of one element"):
            window.backward(torch.ones(2, requires_grad=True))
        with pytest.raises(UsageError, match="loss: got 3, expected a tensor"):
            window.backward(3)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="loss: this one depends on no parameter"):
            window.backward(torch.zeros(()))
        window.backward(torch.ones(1, 1, requires_grad=True))


def test_a_pass_in_which_nothing_has_a_backward_is_an_error() -> None:
    window = windows()
    passing = window(LOADER[:2])
    for _ in range(2):
        summed(fresh(), next(passing))[0].backward()
    with pytest.raises(UsageError, match="no batch of this pass had a backward"):
        next(passing)
    assert list(window([])) == []


def test_a_closed_window_is_closed() -> None:
    with windows() as window:
        pass
    calls: list[Any] = [
        window.step,
        window.state_dict,
        lambda: window.load_state_dict({"index": 1}),
        lambda: window([1]),
        lambda: window.micro().__enter__(),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="this Accumulator is closed"):
            call()
    window.close()
    window.discard()
    assert "closed" in repr(window)


# Passes that are left.


def test_a_pass_that_is_left_in_a_window_is_not_taken_up_by_accident() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    for place, batch in enumerate(window(LOADER)):
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        if place == 5:
            break
    with pytest.raises(UsageError, match=r"the accumulation step is filling \(2 of 4 micro-batches\)"):
        window(LOADER)
    expected = plain(*pair(), [LOADER[:4], LOADER[4:6], LOADER[:4]])
    trace = Trace()
    note(trace, model, window.step())
    trace.weights += windowed(model, window, LOADER[:4]).weights
    assert_same(Trace(trace.weights), Trace(expected.weights[1:]))


def test_a_window_may_be_stepped_early_in_a_loop() -> None:
    expected = plain(*pair(), [LOADER[:4], LOADER[4:6], LOADER[6:10], LOADER[10:]])
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    trace = Trace()
    for place, batch in enumerate(window(LOADER)):
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        if place == 5:
            window.step()
        if window.stepped:
            trace.note(model)
    assert_same(trace, Trace(expected.weights))


# Errors.


def test_an_error_in_forward_leaves_the_window_without_that_micro_batch() -> None:
    expected = plain(*pair(), [[LOADER[0], *LOADER[2:5]]])
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    trace = Trace()
    for place, batch in enumerate(LOADER[:5]):
        try:
            with window.micro():
                if place == 1:
                    raise KeyError("on purpose")
                loss, words = summed(model, batch)
                window.backward(loss, weight=words)
        except KeyError:
            assert place == 1
    note(trace, model, window.step())
    assert_same(trace, expected)


def test_an_error_in_the_loops_body_leaves_the_loop_and_nothing_else() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, partial="carry")

    def run() -> None:
        for place, batch in enumerate(window(LOADER)):
            loss, words = summed(model, batch)
            if place == 2:
                raise KeyError("on purpose")
            window.backward(loss, weight=words)

    with pytest.raises(KeyError):
        run()
    assert window.micro_batches == 2
    expected = plain(*pair(), [LOADER[:4]])
    assert_same(windowed(model, window, LOADER[2:4]), expected)


def test_an_error_in_backward_spoils_the_window_until_it_is_discarded() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)

    def run() -> None:
        for batch in window(LOADER):
            loss, words = summed(model, batch)
            window.backward(FailsInBackward.apply(loss) if window.micro_batches == 2 else loss, weight=words)

    with pytest.raises(KeyError):
        run()
    for call in (window.step, window.state_dict, lambda: window(LOADER), lambda: window.micro().__enter__()):
        with pytest.raises(UsageError, match="a backward or step of this accumulation step failed"):
            call()
    assert "spoiled, 2 of 4" in repr(window)
    window.discard()
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = plain(*pair(), WINDOWS)
    assert_same(windowed(model, window, LOADER), expected)


@pytest.mark.parametrize("where", ["before the optimizer", "in the optimizer", "in the scheduler"])
def test_an_error_in_a_step_leaves_scaler_and_optimizer_fit_for_the_next(where: str) -> None:
    def things() -> tuple[Any, ...]:
        model, optimizer = pair()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        return model, optimizer, scaler, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    model, optimizer, scaler, scheduler = things()

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    window = spillway.Accumulator(model, optimizer, steps=STEPS, scaler=scaler, scheduler=scheduler, max_norm=1.0)
    with pytest.MonkeyPatch.context() as patch:
        if where == "before the optimizer":
            patch.setattr("spillway.accumulate.stepping.clip", fail)
        elif where == "in the scheduler":
            patch.setattr(scheduler, "step", fail)
        else:
            hook = optimizer.register_step_pre_hook(fail)
        with pytest.raises(KeyError):
            windowed(model, window, LOADER[:4])
        if where == "in the optimizer":
            hook.remove()
    assert not optimizer._optimizer_step_pre_hooks
    window.discard()
    if where != "in the scheduler":
        model2, optimizer2, scaler2, scheduler2 = things()
        expected = plain(model2, optimizer2, WINDOWS, scaler=scaler2, scheduler=scheduler2, max_norm=1.0)
        assert_same(windowed(model, window, LOADER), expected)
        assert scaler.state_dict() == scaler2.state_dict()
    else:
        windowed(model, window, LOADER)


def test_discard_in_the_middle_of_a_micro_batch_begins_a_new_window() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    trace = Trace()
    for place, batch in enumerate(window(LOADER[:8])):
        if place == 2:
            window.discard()
            continue
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        if window.stepped:
            trace.note(model)
    expected = plain(*pair(), [LOADER[3:7], LOADER[7:8]])
    assert_same(trace, Trace(expected.weights))


# What is left behind.


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    left: list[Any] = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    for module in model.modules():
        left += [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]
    for parameter in model.parameters():
        left += [*(parameter._backward_hooks or {}), *(parameter._post_accumulate_grad_hooks or {})]
    return left


@pytest.mark.parametrize("end", ["closed", "dead"])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_no_hook_and_no_other_type_is_left_behind(end: str, grad_dtype: Any, no_collector: None) -> None:
    model = fresh(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=1.0, grad_dtype=grad_dtype)
    windowed(model, window, LOADER[:4])
    for batch in window(LOADER):
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        if window.micro_batches == 2:
            break
    if end == "closed":
        window.close()
        assert all(parameter.grad is None for parameter in model.parameters())
    died = weakref.ref(window)
    del window
    assert died() is None
    assert hooks_of(model, optimizer) == []
    for parameter in model.parameters():
        assert parameter.grad_dtype == torch.bfloat16
        assert parameter.grad is None or parameter.grad.dtype == torch.bfloat16
    # The model trains on without.
    summed(model, LOADER[0])[0].backward()
    optimizer.step()


def test_gradients_of_others_do_not_come_into_a_window() -> None:
    expected = plain(*pair(), WINDOWS)
    model, optimizer = pair()
    summed(model, LOADER[0])[0].backward()
    window = spillway.Accumulator(model, optimizer, steps=STEPS)
    assert_same(windowed(model, window, LOADER), expected)


# The record.


def test_nothing_is_read_until_somebody_asks() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=1.0)
    assert window.last is None
    windowed_reads: list[str] = []
    for batch in window(LOADER[:4]):
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
    record = window.last
    assert record is not None and record.gradient_norm is not None
    assert repr(record.loss) == repr(record.gradient_norm) == "DeviceNumber(<not read>)"
    assert record.loss.tensor.shape == ()
    assert f"{record.loss:.3f}" == f"{float(record.loss.tensor):.3f}"
    assert repr(record.loss) == f"DeviceNumber({record.loss.item()})"
    assert not record.skipped and record.index == 0 and record.micro_batches == STEPS
    assert record.skipped.tensor.item() == 0
    with pytest.raises(AttributeError):
        record.index = 2  # type: ignore[misc]


# Resuming.


def test_a_run_that_is_resumed_between_windows_has_the_bits_of_one_that_was_not() -> None:
    def things() -> tuple[Any, ...]:
        model, optimizer = pair()
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        window = spillway.Accumulator(model, optimizer, steps=STEPS, scaler=scaler, scheduler=scheduler, max_norm=0.1)
        return model, window, (model, optimizer, scaler, scheduler, window)

    model, window, _ = things()
    expected = windowed(model, window, LOADER)
    model, window, parts = things()
    saved: list[Any] = []
    loader = iter(LOADER)
    for batch in window(loader):
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
        if window.stepped:
            saved = [part.state_dict() for part in parts]
            break
    model, window, parts = things()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    # The loader has given what the first window took, and no more.
    got = windowed(model, window, loader)
    assert_same(Trace(got.weights), Trace(expected.weights[1:]))
    assert window.last is not None and window.last.index == 2


def test_the_middle_of_a_window_is_in_no_checkpoint() -> None:
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, partial="carry")
    windowed(model, window, LOADER[:2])
    with pytest.raises(UsageError, match=r"^state_dict\(\) was called in the middle of an accumulation step \(2 of 4 "):
        window.state_dict()
    with pytest.raises(UsageError, match=r"load_state_dict\(\) was called in the middle of an accumulation step"):
        window.load_state_dict({"index": 3})
    window.discard()
    window.load_state_dict({"index": 3})
    assert window.state_dict() == {"index": 3}
    for nonsense in ({}, {"index": "3"}, {"index": 3, "more": 1}, 3):
        with pytest.raises(UsageError, match=r"expected what state_dict\(\) of an Accumulator gave"):
            window.load_state_dict(nonsense)  # type: ignore[arg-type]
