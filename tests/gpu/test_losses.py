"""Cross entropy in rows on an accelerator: torch's own bits, and little memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import spillway

pytestmark = pytest.mark.gpu

BYTES = 96 << 20
"""Of the logits, in what they are computed in."""


def both(logits: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    found = loss(logits)
    weights = torch.linspace(0.1, 1, found.numel(), device=found.device).reshape(found.shape).to(found.dtype)
    (gradient,) = torch.autograd.grad(found, logits, weights)
    return found.detach(), gradient


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("cast", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1000, 1025, 4099, 32000, 50257, 128256])
def test_it_is_torchs_own(
    classes: int, dtype: torch.dtype, cast: torch.dtype | None, reduction: str, device: torch.device
) -> None:
    rows = BYTES // classes // (cast or dtype).itemsize + 5
    logits = (torch.randn(rows, classes, device=device) * 5).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,), device=device)
    target[::3] = -100
    found = both(logits, lambda logits: spillway.cross_entropy(logits, target, reduction=reduction, dtype=cast))
    assert "CrossEntropy" in type(spillway.cross_entropy(logits, target, dtype=cast).grad_fn).__name__
    expected = both(
        logits,
        lambda logits: functional.cross_entropy(
            logits if cast is None else logits.to(cast), target, reduction=reduction
        ),
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_says_the_type(inside: bool, device: torch.device) -> None:
    def run(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        features = torch.randn(3000, 64, device=device, generator=generator)
        weight = torch.randn(32000, 64, device=device, generator=generator).requires_grad_()
        target = torch.randint(32000, (3000,), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16):
            found = loss(features @ weight.t(), target)
            if inside:
                found.backward()
        if not inside:
            found.backward()
        assert weight.grad is not None
        return found.detach(), weight.grad

    found, expected = run(spillway.cross_entropy), run(functional.cross_entropy)
    assert found[0].dtype is expected[0].dtype
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_it_takes_little_more_than_the_logits_and_their_gradient(device: torch.device) -> None:
    logits = torch.randn(8192, 32000, device=device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(32000, (8192,), device=device)

    def peak(loss: Callable[[], torch.Tensor]) -> int:
        logits.grad = None
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        loss().backward()
        return torch.accelerator.max_memory_allocated(device) - before

    ours = peak(lambda: spillway.cross_entropy(logits, target, dtype=torch.float32))
    plain = peak(lambda: functional.cross_entropy(logits.float(), target))
    assert ours < 1.6 * logits.nbytes
    assert plain > 5.5 * logits.nbytes
