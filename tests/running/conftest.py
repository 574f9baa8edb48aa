from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from running.scripts import Folder, Server, keep_hardware


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, keep_hardware(tmp_path / "cache"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("server")
    server = Server(Folder(path, keep_hardware(path / "cache")).environment())
    yield server
    server.close()
