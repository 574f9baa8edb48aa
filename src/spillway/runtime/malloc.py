"""Sets glibc's ``malloc`` so that memory that tensors free goes back to the system.

NOTE [ malloc on a CPU ]

Torch allocates aligned memory. glibc's aligned ``malloc`` does not reuse a freed block of the same size, and its
threshold for blocks with a mapping of their own rises to 32 MiB. Small tensors that live then keep large holes
resident: training of 2 GiB took 23. With a fixed threshold each larger tensor is a mapping, which ends when it is
freed. This costs page faults. Other C libraries are left alone, and a user's own setting wins.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD`` of glibc's ``malloc.h``."""
MAPPED_BYTES = 1 << 16
"""Blocks of at least this size have a mapping of their own."""
_SET = f"Spillway sets glibc's mmap threshold to {MAPPED_BYTES >> 10} KiB"
_MOST_KEPT = 1 << 20
"""Free bytes at the end of the heap that glibc keeps."""
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
_OTHERS = ("jemalloc", "mimalloc", "tcmalloc")


@functools.cache
def set_malloc() -> str:
    """Set it, once in the process; says in a sentence how ``malloc`` is set.

    Example:
        >>> set_malloc() == malloc_setting()
        True
    """
    return _left_alone() or _set()


def malloc_setting() -> str:
    """How ``malloc`` is set where Spillway works in CPU memory; sets nothing."""
    return set_malloc() if set_malloc.cache_info().currsize else _left_alone() or _SET


def _left_alone() -> str:
    """Why it is left alone; empty: it is not."""
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "left alone: the C library is not glibc"
    preloaded = os.environ.get("LD_PRELOAD", "")
    other = next((name for name in _OTHERS if name in preloaded), None)
    if other is not None:
        return f"left alone: LD_PRELOAD names {other}"
    variable = next((name for name in _VARIABLES if name in os.environ), None)
    if variable is None and "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        variable = "GLIBC_TUNABLES"
    return "" if variable is None else f"left alone: {variable} is set"


def _set() -> str:
    library = ctypes.CDLL(None)
    for option, value in ((_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, _MOST_KEPT)):
        if not library.mallopt(option, value):
            return f"left alone: mallopt({option}, {value}) failed"
    # The heap may have holes already.
    library.malloc_trim(0)
    return _SET
