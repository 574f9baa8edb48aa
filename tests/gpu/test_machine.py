"""What a machine with an accelerator can do, measured over its own link."""

from __future__ import annotations

import time

import pytest
import torch

from spillway.planner.hardware import Hardware
from spillway.profiler.machine import measure_hardware

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured() -> tuple[Hardware, float, int]:
    """The hardware, the seconds that it took, and the bytes that are allocated more than before."""
    before, start = torch.accelerator.memory_allocated(), time.perf_counter()
    hardware = measure_hardware()
    return hardware, time.perf_counter() - start, torch.accelerator.memory_allocated() - before


def test_it_takes_less_than_half_a_minute(measured: tuple[Hardware, float, int]) -> None:
    assert measured[1] < 30


def test_rates_are_those_of_an_accelerator(measured: tuple[Hardware, float, int]) -> None:
    hardware = measured[0]
    link = hardware.bandwidths[0]
    assert 1e9 < min(link.out, link.back) <= max(link.out, link.back) < link.both * 1.1
    # Its own memory is far nearer than the host's.
    assert hardware.memory_bandwidth > 4 * link.both
    assert hardware.flops > 1e12


def test_sizes_are_what_torch_has(measured: tuple[Hardware, float, int], device: torch.device) -> None:
    assert measured[0].device_bytes == torch.accelerator.get_memory_info(device)[1]


def test_nothing_is_held_afterwards(measured: tuple[Hardware, float, int]) -> None:
    # cuBLAS keeps its workspace.
    assert measured[2] < 64 << 20
