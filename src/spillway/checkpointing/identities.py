"""Whether two tuples have the very same objects.

A loop over a tuple takes 25 ns an object, and a state has hundreds, which each call compares three times. In CPython a
tuple ends with the addresses of its objects. So these are compared as bytes, which takes less than 1 us. The layout is
checked once; if it differs, objects are compared one by one.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from operator import is_
from typing import Any

_FIRST, _SIZE = tuple.__basicsize__, struct.calcsize("P")
"""The place in a tuple at which addresses begin, and the size of one."""


def _addresses(items: tuple[Any, ...]) -> bytes:
    return ctypes.string_at(id(items) + _FIRST, _SIZE * len(items))


def _are_known() -> bool:
    if sys.implementation.name != "cpython":
        return False
    items = tuple(object() for _ in range(5))
    return _addresses(items) == struct.pack("5P", *map(id, items))


_HAS_ADDRESSES = _are_known()


def have_same_items(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two tuples have the same objects in the same order. Equal ones are not enough."""
    if len(a) != len(b):
        return False
    return _addresses(a) == _addresses(b) if _HAS_ADDRESSES else all(map(is_, a, b))
