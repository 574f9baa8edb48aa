"""What a machine with an accelerator can do, measured over its own link."""

from __future__ import annotations

import time

import pytest
import torch

from spillway.planner.hardware import Hardware
from spillway.profiler.machine import measure_hardware

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured() -> tuple[Hardware, float]:
    start = time.perf_counter()
    hardware = measure_hardware()
    return hardware, time.perf_counter() - start


def test_it_takes_less_than_half_a_minute(measured: tuple[Hardware, float]) -> None:
    assert measured[1] < 30


def test_rates_are_those_of_an_accelerator(measured: tuple[Hardware, float]) -> None:
    hardware, _ = measured
    link = hardware.bandwidths[0]
    assert 1e9 < min(link.out, link.back) <= max(link.out, link.back) < link.both * 1.1
    # Its own memory is far nearer than the host's.
    assert hardware.memory_bandwidth > 4 * link.both
    assert hardware.flops > 1e12


def test_sizes_are_what_torch_has(measured: tuple[Hardware, float], device: torch.device) -> None:
    assert measured[0].device_bytes == torch.accelerator.get_memory_info(device)[1]


def test_nothing_is_held_afterwards(measured: tuple[Hardware, float], device: torch.device) -> None:
    assert torch.accelerator.memory_allocated(device) < 64 << 20
