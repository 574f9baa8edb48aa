"""The ranks that tests of several processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from integrations.ranks import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as world:
        yield world
