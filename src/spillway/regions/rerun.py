"""Whether the calling thread replays a checkpointed function."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Here(threading.local):
    depth = 0


_here = _Here()


def in_rerun() -> bool:
    """Whether the calling thread runs a region again."""
    return _here.depth > 0


@contextmanager
def rerunning(depth: int = 1) -> Iterator[None]:
    """A context in which it does."""
    _here.depth += depth
    try:
        yield
    finally:
        _here.depth -= depth
