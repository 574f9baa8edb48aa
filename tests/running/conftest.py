from __future__ import annotations

from pathlib import Path

import pytest

from running.scripts import Folder, keep_hardware


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, keep_hardware(tmp_path / "cache"))
