"""Windows on an accelerator: the bits of a plain loop, and nothing that waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import spillway
from accumulate.loops import assert_same, batches, fresh, plain, summed, windowed

pytestmark = pytest.mark.gpu

STEPS = 4
LOADER = batches(3 * STEPS)


def on(device: torch.device) -> list[Any]:
    return [tuple(part.to(device) for part in batch) for batch in LOADER]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
def test_a_window_on_a_device_has_the_plain_loops_bits(
    device: torch.device, deterministic: None, fused: bool, dtype: torch.dtype
) -> None:
    loader = on(device)
    windows = [loader[start : start + STEPS] for start in range(0, len(loader), STEPS)]

    def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fresh(dtype=dtype).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)

    expected = plain(*pair(), windows, max_norm=0.05)
    expected.losses = []  # added up in float64 there, and read one by one here
    for weigh in (int, lambda words: words):
        model, optimizer = pair()
        window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=0.05)
        assert_same(windowed(model, window, loader, weigh=weigh), expected)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("options", [{}, {"normalize": "steps"}, {"grad_dtype": torch.float32}, {"scaled": True}])
def test_nothing_waits_for_the_device_until_a_number_is_read(device: torch.device, options: dict[str, Any]) -> None:
    if device.type != "cuda":
        pytest.skip("only CUDA tells who waits")
    options = dict(options)
    model = fresh(dtype=torch.bfloat16 if "grad_dtype" in options else torch.float32).to(device)
    # A fused optimizer looks for infinities itself, so that GradScaler.step need not wait.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    if options.pop("scaled", False):
        options["scaler"] = torch.amp.GradScaler(device.type)
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=1.0, **options)
    loader = on(device)
    for weigh in (lambda words: words, lambda words: 3):
        # The first window makes what is made once.
        for waits in (False, True):
            if waits:
                torch.cuda.set_sync_debug_mode("error")
            try:
                for batch in window(loader[:STEPS]):
                    loss, words = summed(model, batch)
                    window.backward(loss, weight=weigh(words))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert window.last is not None
    assert repr(window.last.loss) == "DeviceNumber(<not read>)"
    assert float(window.last.loss) > 0 and not window.last.skipped
