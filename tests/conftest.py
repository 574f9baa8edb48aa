"""What all tests share."""

from __future__ import annotations

import gc
import os

# Before torch: threads that spin at the end of each small kernel take the cores from those that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Here, and not at the end of a run: what its plugins register (trio's, where selenium is installed) must not be frozen.
import hypothesis  # noqa: F401
import pytest
import torch


def pytest_configure() -> None:
    # What is small is slow in several threads, if others want the cores.
    torch.set_num_threads(1)
    if not torch.accelerator.is_available():
        # Of devices that are not there, torch writes down where each seed came from: three stacks for a manual_seed.
        for absent in (torch.cuda, torch.mtia, torch.xpu):
            absent.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Tests collect garbage all the time, and need not go through torch and all that ran before each time for it.
    gc.collect()
    gc.freeze()
