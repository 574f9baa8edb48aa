"""Versions of classes: whether a class is as it was, without a look at each attribute.

CPython numbers the states of a class, for its own caches. The number is not public. It is looked for once, by watching
the memory of a class while that is changed. Where it is not found, nothing has a version, and attributes are compared.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

_SIZE: int = type.__dict__["__basicsize__"].__get__(type)
"""Bytes of a class, in memory."""


def _offset() -> int | None:
    """Where a class has its version, in bytes from its address."""
    if sys.implementation.name != "cpython":
        return None

    class Sample:
        pass

    words = (ctypes.c_uint32 * (_SIZE // 4)).from_address(id(Sample))

    def looked_up() -> list[int]:
        # By this it gets a version, if it has none.
        hasattr(Sample, "name")
        return list(words)

    first, again = looked_up(), looked_up()
    Sample.name = 1  # type: ignore[attr-defined]
    changed, later = list(words), looked_up()
    Sample.name = 2  # type: ignore[attr-defined]
    last = looked_up()
    found = [
        place
        for place, version in enumerate(first)
        if version and again[place] == version and not changed[place] and version < later[place] < last[place]
    ]
    return 4 * found[0] if len(found) == 1 else None


_OFFSET = _offset()


def versions_of(kinds: Sequence[type]) -> Callable[[], list[int]] | None:
    """Gives the versions of classes, which must be held meanwhile; ``None``: they have none.

    A class with the same version has the same attributes.
    """
    if _OFFSET is None:
        return None
    for kind in kinds:
        hasattr(kind, "__name__")
    places = [ctypes.c_uint32.from_address(id(kind) + _OFFSET) for kind in kinds]
    # Zero is none: the class has changed, and was not asked for anything since.
    return (lambda: [place.value for place in places]) if all(place.value for place in places) else None
