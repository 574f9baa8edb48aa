"""What must be there before anything of Spillway's is imported."""

from __future__ import annotations

import re

import torch

from spillway.errors import UnsupportedError

OLDEST_TORCH = (2, 11)


def require_torch(version: str = torch.__version__) -> None:
    """Raise :class:`~spillway.errors.UnsupportedError` if torch is older than Spillway needs."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_TORCH:
        raise UnsupportedError(
            f"got torch {version}, expected {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or later, whose saved-tensor hooks and "
            f"streams Spillway stands on; pip install --upgrade torch"
        )


require_torch()
