"""What all tests of parking share."""

import pytest

from spillway.parking import storages


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages of any size are compared with the copies that stay."""
    monkeypatch.setattr(storages, "FINGERPRINTED", 1)
