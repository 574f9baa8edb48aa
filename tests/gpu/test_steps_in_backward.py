"""Steps in the backward of the last micro-batch, on an accelerator: the bits of steps after backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import spillway
from accumulate.models import assert_equal, batches, made, trained

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("step_on", ["cpu", "gpu"])
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["spillway", "untied", "mixture"])
def test_accumulated_gradients(
    device: torch.device, deterministic: None, name: str, dtype: torch.dtype, own_stream: bool, step_on: str
) -> None:
    found = []
    for options in ({"offload_gradients": False}, {"step_in_backward": True}):
        given: dict[str, Any] = {"lr": 0.01, "fused": True, "step_on": step_on, **options}
        make = lambda parameters, given=given: spillway.OffloadedOptimizer(  # noqa: E731
            parameters, torch.optim.AdamW, **given
        )
        stream = torch.Stream(device) if own_stream else contextlib.nullcontext()
        with stream:
            found.append(trained(made(name).to(device, dtype), [each.to(device) for each in batches(8)], make=make))
        torch.accelerator.synchronize()
    assert_equal(found[1], found[0])
