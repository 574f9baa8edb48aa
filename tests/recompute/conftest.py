"""Fixtures of what is tried on regions: see ``regions.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import spillway
from latest_states import keep_all_states
from recompute.regions import PLACES, Place, Regions
from spillway.testing import AdversaryBackend
from support import FAILED, assert_nothing_left


@pytest.fixture(params=PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    return place


@pytest.fixture
def regions(request: pytest.FixtureRequest, place: Place, tmp_path: Path) -> Iterator[Regions]:
    """A session of its own for each test, of which nothing may be left when the test ends."""
    adversary = AdversaryBackend() if place.adversary else None
    more = {} if adversary is None else {"backend": adversary.serve}
    with spillway.Session(
        window=place.window, spill_directory=tmp_path, allow_memory_filesystem=True, **more
    ) as session:
        yield Regions(session, place, adversary)
        # The traceback of a test that failed holds its graphs.
        if not request.node.stash.get(FAILED, False):
            assert_nothing_left(session)


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which later call is compared depends on how many functions there were before: tests of samples say so."""
    monkeypatch.setattr("spillway.checkpointing.learned._EVERY", 1 << 40)


@pytest.fixture(autouse=True)
def _keep_states(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all_states(monkeypatch)
