"""How fast a device multiplies matrices: what most of a training's time goes into."""

from __future__ import annotations

import time

import torch

from spillway.profiling.copies import wait_for_compute
from spillway.profiling.rate import rate_of
from spillway.runtime.backend import Backend

_SMALLEST, _LARGEST = 512, 8192
_LONG_ENOUGH = 0.02
"""Seconds of one product that need not be longer to reach the device's rate."""
_TRIES = 4
_HARDER = 8
"""What twice the width takes of what it took."""


def product_rate(backend: Backend, seconds: float) -> float:
    """Floating-point operations in a second of a product of matrices in bfloat16, an addition being one.

    The matrices are random, since those of zeros take less power and so less time, and square. They are made wider
    until a product is long, or as wide as they come.

    Args:
        backend: of the device.
        seconds: that this may take.
    """
    end = time.perf_counter() + seconds
    width = _SMALLEST
    left, right = _matrices(backend, width)
    while width < _LARGEST:
        # The first one of a shape loads its kernel, and any may have been disturbed.
        took = min(_once(backend, left, right) for _ in range(_TRIES))
        if took >= _LONG_ENOUGH or took * _HARDER > (end - time.perf_counter()) / 2:
            break
        width *= 2
        left, right = _matrices(backend, width)

    def queue() -> None:
        torch.matmul(left, right)

    return rate_of(queue, lambda: wait_for_compute(backend), 2 * width**3, max(0.0, end - time.perf_counter()))


def _once(backend: Backend, left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.matmul(left, right)
    wait_for_compute(backend)
    return time.perf_counter() - start


def _matrices(backend: Backend, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    # By a generator of its own: the user's random numbers stay what they are.
    generator = torch.Generator(device=backend.device).manual_seed(0)
    left, right = (
        torch.randn(width, width, generator=generator, device=backend.device, dtype=torch.bfloat16) for _ in range(2)
    )
    return left, right
