from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch

import spillway
from optim.support import MODULES_WITH_CHUNK
from spillway.testing import AdversaryBackend


@pytest.fixture
def adversary() -> AdversaryBackend:
    return AdversaryBackend()


@pytest.fixture(params=["cpu", "adversary"])
def session(request: pytest.FixtureRequest, adversary: AdversaryBackend) -> Iterator[spillway.Session]:
    """A session on the CPU, and one under the adversary, which must have found nothing when the test ends."""
    backend = adversary.serve if request.param == "adversary" else None
    with spillway.Session(backend=backend) as session:
        yield session
    adversary.check()


@pytest.fixture
def cpu_session() -> Iterator[spillway.Session]:
    with spillway.Session() as session:
        yield session


@pytest.fixture
def pieces_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Cut parameters into pieces of so many elements."""

    def cut(numel: int) -> None:
        for name in MODULES_WITH_CHUNK:
            monkeypatch.setattr(importlib.import_module(f"spillway.optim.{name}"), "CHUNK", numel)

    return cut


@pytest.fixture
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
