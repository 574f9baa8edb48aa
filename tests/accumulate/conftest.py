"""The ranks that tests of windows over several processes share."""

from __future__ import annotations

from integrations.conftest import world

__all__ = ["world"]
