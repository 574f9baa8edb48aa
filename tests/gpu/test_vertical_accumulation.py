"""Vertical order on an accelerator: the bits of plain accumulation, also on a stream of the user's own."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import spillway
from accumulate.models import MODELS, assert_equal, batches, made, trained

pytestmark = pytest.mark.gpu


def on(device: torch.device, count: int = 8) -> list[Any]:
    return [words.to(device) for words in batches(count)]


@pytest.mark.parametrize("name", list(MODELS))
def test_any_model_has_the_bits_of_plain_accumulation(device: torch.device, deterministic: None, name: str) -> None:
    plain = trained(made(name).to(device), "horizontal", on(device), max_norm=0.5)
    assert_equal(trained(made(name).to(device), "vertical", on(device), max_norm=0.5), plain)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_steps_in_backward(
    device: torch.device, deterministic: None, dtype: torch.dtype, own_stream: bool
) -> None:
    found = []
    for order, options in (
        ("horizontal", {"offload_gradients": False}),
        ("vertical", {"step_in_backward": True}),
        ("vertical", {"offload_gradients": False}),
    ):
        make = lambda parameters, options=options: spillway.OffloadedOptimizer(  # noqa: E731
            parameters, torch.optim.AdamW, lr=0.01, **options
        )
        stream = torch.Stream(device) if own_stream else contextlib.nullcontext()
        with stream:
            found.append(trained(made("spillway").to(device, dtype), order, on(device), make=make))
        torch.accelerator.synchronize()
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_offloaded_in_backward(
    device: torch.device, deterministic: None, dtype: torch.dtype
) -> None:
    make = lambda parameters: spillway.OffloadedOptimizer(parameters, torch.optim.AdamW, lr=0.01)  # noqa: E731
    model = made("spillway").to(device, dtype)
    plain = trained(model, "horizontal", on(device), make=make, max_norm=0.1)
    assert_equal(trained(made("spillway").to(device, dtype), "vertical", on(device), make=make, max_norm=0.1), plain)
