from __future__ import annotations

from pathlib import Path

import pytest

from running.scripts import Folder, Server, keep_hardware, shared_server


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, keep_hardware(tmp_path / "cache"))


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()
