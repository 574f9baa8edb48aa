"""Which parameters are held, by a fraction or by a budget; and what state an optimizer class will make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW
from torch.testing._internal.common_optimizers import optim_db

from optim.store_loops import Loop, net, same, session
from spillway import OffloadedOptimizer, SizeError, UsageError
from spillway.optim.optimizer_class import StatePrediction, for_cpu
from spillway.optim.options import held_beyond, held_of

SIZES = st.lists(st.integers(0, 50), max_size=12)


@given(SIZES, st.floats(0, 1))
def test_the_last_parameters_are_held_and_no_more_than_it_takes(sizes: list[int], fraction: float) -> None:
    held = held_of(sizes, fraction)
    assert held == sorted(held)
    taken = [size for size, one in zip(sizes, held, strict=True) if one]
    assert sum(taken) >= fraction * sum(sizes) - 1e-9
    assert not taken or sum(taken) - taken[0] < fraction * sum(sizes)


@given(SIZES, st.integers(0, 200))
def test_a_budget_is_kept_and_used(sizes: list[int], budget: int) -> None:
    held = held_beyond(sizes, budget)
    left = budget
    for size, one in zip(sizes, held, strict=True):
        # One is held only if what is left of the budget has no room for it.
        assert one == (size > left)
        left -= 0 if one else size
    assert left >= 0


def test_a_budget_takes_the_first_that_fit() -> None:
    assert held_beyond([4, 8, 2, 4], 7) == [False, True, False, True]
    assert held_beyond([4, 8, 2], 0) == [True, True, True]
    assert held_beyond([4, 8, 2], 14) == [False, False, False]
    assert held_beyond([], 3) == []


SERVED = [info for info in optim_db if info.optim_cls.__name__ not in ("SparseAdam", "LBFGS")]
SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (300,), (0, 3), (7, 1), (40, 20), (2, 3, 4, 5), (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("info", SERVED, ids=lambda info: info.optim_cls.__name__)
def test_a_state_is_told_before_it_is_made(info: Any) -> None:
    cls = info.optim_cls
    shapes = [(40, 20), (7, 1)] if cls.__name__ == "Muon" else SHAPES
    if cls.__name__ == "Adafactor":
        # Which divides by the number of elements.
        shapes = [shape for shape in shapes if 0 not in shape]
    for case in info.optim_inputs_func(device="cpu"):
        settings = {name: value for name, value in case.kwargs.items() if name != "differentiable"}
        forecast = StatePrediction(cls, for_cpu(settings))
        for shape in shapes:
            parameter = nn.Parameter(torch.randn(shape))
            optimizer = cls([parameter], **settings)
            group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
            parameter.grad = torch.randn(shape)
            optimizer.step()
            state = optimizer.state[parameter]
            told = forecast.state(parameter.shape, parameter.stride(), torch.float32, group)
            assert told.keys() == state.keys()
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    assert (told[name].shape, told[name].dtype) == (value.shape, value.dtype)
                    assert told[name].stride() == value.stride() or value.numel() <= 1
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            assert forecast.nbytes(parameter.shape, torch.float32, group) == sum(value.nbytes for value in tensors)


def test_the_forecast_knows_settings_apart() -> None:
    forecast = StatePrediction(SGD, {"lr": 0.1})
    settings = {**SGD([nn.Parameter(torch.ones(1))]).defaults}
    assert forecast.nbytes((10, 10), torch.float32, settings) == 0
    assert forecast.nbytes((10, 10), torch.float32, {**settings, "momentum": 0.9}) == 400
    assert forecast.nbytes((10, 10), torch.float64, {**settings, "momentum": 0.9}) == 800


def bytes_there(optimizer: OffloadedOptimizer, model: nn.Module) -> int:
    """State of parameters that are not held, masters among it."""
    states = [optimizer.state[one] for one in model.parameters() if one not in optimizer._placement.held]
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"step_on": "gpu"}, {"step_on": "auto", "cpu_share": 0.5}, {"tier": "disk"}], ids=str
)
def test_the_device_has_no_more_state_than_its_budget(tmp_path: Path, more: dict[str, str], dtype: torch.dtype) -> None:
    models = [net(dtype), net(dtype)]
    each = 12 if dtype == torch.bfloat16 else 8
    # The first weight does not fit; its bias, and the second weight with its bias, do.
    budget = each * (65 + 65 * 17 + 17) + 3 * 4
    with session(tmp_path) as where:
        for given_as in (budget, f"{budget}B"):
            optimizer = OffloadedOptimizer(
                models[0].parameters(),
                AdamW,
                lr=1e-2,
                fused=True,
                session=where,
                device_budget=given_as,
                **more,  # type: ignore[arg-type]
            )
            assert [one in optimizer._placement.held for one in models[0].parameters()] == [
                True,
                False,
                False,
                False,
                True,
                True,
            ]
            optimizer.close()
        optimizer = OffloadedOptimizer(
            models[0].parameters(),
            AdamW,
            lr=1e-2,
            fused=True,
            session=where,
            device_budget=budget,
            **more,  # type: ignore[arg-type]
        )
        Loop(dtype=dtype).run(models[0], optimizer)
        assert bytes_there(optimizer, models[0]) == budget
        loop = Loop(dtype=dtype)
        if dtype == torch.float32:
            loop.run(models[1], AdamW(models[1].parameters(), lr=1e-2, fused=True))
        else:
            loop.run_in_float(models[1], AdamW, {"lr": 1e-2, "fused": True})
        assert same(*models)
        optimizer.close()


def test_groups_that_come_later_get_what_is_left_of_the_budget(tmp_path: Path) -> None:
    first, second, third = (nn.Parameter(torch.zeros(100)) for _ in range(3))
    with session(tmp_path) as where:
        # Two tensors of 400 bytes each and a count of 4.
        optimizer = OffloadedOptimizer([first], AdamW, session=where, device_budget=1700)
        optimizer.add_param_group({"params": [second]})
        optimizer.add_param_group({"params": [third]})
        assert [one in optimizer._placement.held for one in (first, second, third)] == [False, False, True]
        optimizer.close()


def test_a_budget_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    parameters = list(net().parameters())
    with session(tmp_path) as where:
        with pytest.raises(UsageError, match="got both a fraction and a device_budget"):
            OffloadedOptimizer(parameters, AdamW, session=where, fraction=0.5, device_budget="1GiB")
        with pytest.raises(SizeError, match="device_budget"):
            OffloadedOptimizer(parameters, AdamW, session=where, device_budget="some")
        with pytest.raises(SizeError, match="device_budget"):
            OffloadedOptimizer(parameters, AdamW, session=where, device_budget=-1)
