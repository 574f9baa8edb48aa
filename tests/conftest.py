"""What all tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def young_heap() -> Iterator[None]:
    """Tests collect garbage all the time, and need not go through torch and all modules of tests each time for it."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
