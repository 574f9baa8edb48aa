from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import spillway
from support import FAILED, WAYS, Trial, Way, assert_nothing_left


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    return way


@pytest.fixture
def session(
    request: pytest.FixtureRequest, way: Way, events: spillway.EventList, tmp_path: Path
) -> Iterator[spillway.Session]:
    """A session of its own for each test, of which nothing may be left when the test ends."""
    with spillway.Session(
        window=way.window, spill_directory=tmp_path, allow_memory_filesystem=True, recorder=events
    ) as session:
        yield session
        # The traceback of a test that failed holds its graphs.
        if not request.node.stash.get(FAILED, False):
            assert_nothing_left(session)


@pytest.fixture
def events() -> spillway.EventList:
    return spillway.EventList()


@pytest.fixture
def trial(session: spillway.Session, events: spillway.EventList, way: Way) -> Trial:
    return Trial(session, events, way)
