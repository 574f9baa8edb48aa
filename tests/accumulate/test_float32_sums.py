"""Gradients of narrow parameters, summed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from accumulate.loops import Batch, Trace, assert_same, averaged, batches, fresh, summed, windowed
from spillway.accumulate.gradients import Factors

STEPS = 4
LOADER = batches(3 * STEPS)
WINDOWS = [LOADER[start : start + STEPS] for start in range(0, len(LOADER), STEPS)]
NARROW = [torch.bfloat16, torch.float16]


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return self.weight.sum()


@pytest.mark.parametrize(("grad_dtype", "total"), [(torch.float32, 600), (None, 256)])
def test_six_hundred_ones_are_six_hundred(grad_dtype: Any, total: int) -> None:
    model = Ones()
    # A step of 1 downhill: the weight is what the gradients added up to.
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = spillway.Accumulator(model, optimizer, steps=600, normalize="sum", grad_dtype=grad_dtype)
    for _ in window(range(600)):
        window.backward(model())
    assert model.weight.tolist() == [-total] * 3


def plainly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Sequence[Sequence[Batch]],
    *,
    max_norm: float | None = None,
    scaler: Any = None,
) -> Trace:
    """Float32 sums beside the parameters, as somebody would write them."""
    trace = Trace()
    parameters = list(model.parameters())
    for window in windows:
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        total = 0
        for batch in window:
            loss, words = summed(model, batch)
            total += int(words)
            (loss if scaler is None else scaler.scale(loss)).backward()
            for parameter, each in zip(parameters, sums, strict=True):
                assert parameter.grad is not None
                each.add_(parameter.grad)
                parameter.grad = None
        finite = all(each.isfinite().all() for each in sums)
        for each in sums:
            if scaler is not None:
                each.mul_(1 / scaler.get_scale())
            each.mul_(1 / total)
        if max_norm is not None:
            norm = torch.nn.utils.get_total_norm(sums)
            trace.norms.append(norm.item())
            for each in sums:
                each.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for parameter, each in zip(parameters, sums, strict=True):
            parameter.grad = each.to(parameter.dtype)
        if finite:
            optimizer.step()
        optimizer.zero_grad()
        trace.note(model)
    return trace


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_sums_in_float32_are_normalised_and_clipped_in_float32(
    dtype: torch.dtype, fused: bool, max_norm: float | None
) -> None:
    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fresh(dtype=dtype)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, eps=1e-4)

    expected = plainly(*pair(), WINDOWS, max_norm=max_norm)
    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=max_norm, grad_dtype=torch.float32)
    assert_same(windowed(model, window, LOADER), expected)
    model, optimizer = pair()
    other = windowed(model, spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=max_norm), LOADER)
    assert not all(map(torch.equal, other.weights[-1], expected.weights[-1])), "a narrow sum would have done"


def test_a_scaler_may_unscale_what_float16_parameters_added_up() -> None:
    def pair() -> tuple[Any, ...]:
        model = fresh(dtype=torch.float16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)

    model, optimizer, scaler = pair()
    scaler.scale(torch.ones(1))
    expected = plainly(model, optimizer, WINDOWS, max_norm=0.05, scaler=scaler)
    model, optimizer, scaler = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.05, scaler=scaler, grad_dtype=torch.float32)
    assert_same(windowed(model, window, LOADER), expected)


def test_wide_parameters_are_left_alone_and_mixtures_work() -> None:
    def pair() -> tuple[Any, torch.optim.Optimizer]:
        model = fresh()
        model.words.bfloat16()
        model.hidden.double()
        model.hidden.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        model.head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = pair()
    window = spillway.Accumulator(model, optimizer, steps=STEPS, grad_dtype=torch.float32)
    seen = set()
    optimizer.register_step_pre_hook(
        lambda *_: seen.update((parameter.dtype, parameter.grad.dtype) for parameter in model.parameters())
    )
    windowed(model, window, LOADER)
    assert seen == {(dtype, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}


@pytest.mark.parametrize("partial", ["scale", "drop", "carry"])
def test_between_windows_parameters_have_their_own_type(partial: str) -> None:
    model = fresh(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = spillway.Accumulator(
        model, optimizer, steps=STEPS, normalize="steps", partial=partial, grad_dtype=torch.float32
    )
    windowed(model, window, LOADER[:6], loss=averaged, weigh=None)
    left = {parameter.grad_dtype for parameter in model.parameters()}
    assert left == {torch.float32 if partial == "carry" else torch.bfloat16}
    window.discard()
    assert {parameter.grad_dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_that_adds_up_by_itself_is_left_to_it() -> None:
    class Masters(torch.optim.SGD):
        accumulates_in_master_dtype = True

    model = fresh(dtype=torch.bfloat16)
    optimizer = Masters(model.parameters(), lr=0.1)
    window = spillway.Accumulator(model, optimizer, steps=STEPS, grad_dtype=torch.float32)
    seen = set()
    for batch in window(LOADER[:4]):
        seen |= {parameter.grad_dtype for parameter in model.parameters()}
        loss, words = summed(model, batch)
        window.backward(loss, weight=words)
    assert seen == {torch.bfloat16}


class Elsewhere(torch.Tensor):
    """A gradient whose bytes are not where a tensor's are: only what is asked of it by name can be done."""

    allowed = {"mul_", "detach", "norm", "__get__", "_foreach_norm", "linalg_vector_norm", "add_"}

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if name not in cls.allowed:
            raise NotImplementedError(name)
        cls.done.append(name)
        if name == "mul_":
            assert not isinstance(args[1], Tensor) or args[1].dim() == 0
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    done: list[str] = []


def test_gradients_of_other_classes_are_only_multiplied() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    for total in (4.0, torch.tensor(4.0, dtype=torch.float64)):
        parameter.grad = torch.ones(3, 2).as_subclass(Elsewhere)
        Elsewhere.done.clear()
        Factors(total, lambda _: 1.0).apply([parameter])
        assert Elsewhere.done.count("mul_") == 1
        assert parameter.grad.as_subclass(Tensor).tolist() == [[0.25] * 2] * 3
