from __future__ import annotations

import pytest

from running.scripts import Server, shared_server


@pytest.fixture(scope="session")
def server() -> Server:
    return shared_server()
