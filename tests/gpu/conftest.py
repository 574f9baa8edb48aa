"""What the tests on an accelerator share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# Deterministic products of matrices need it, and it is read when the first of them is computed.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "tests marked gpu need an accelerator"
    return torch.device(accelerator.type, 0)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
