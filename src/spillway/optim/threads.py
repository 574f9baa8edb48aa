"""How many threads the host's step computes with."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from spillway.errors import UsageError
from spillway.runtime.host_memory import local_ranks

_MOST = 16
_FEW = 4
_THREADS_OF_A_HAND = 2


def thread_count(threads: int | None) -> int:
    """What was asked for; else one a CPU that this process may run on, shared by the ranks of the machine, up to 16.

    Of many, two are left to the threads that queue the device's work.

    Raises:
        UsageError: if it is no number of threads.
    """
    if threads is not None:
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise UsageError(f"threads: got {threads!r}, expected a whole number of at least 1, or None")
        return threads
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mine = max(1, min(_MOST, cpus // local_ranks()))
    return mine - 2 if mine > _FEW else mine


def hands_of(threads: int) -> tuple[int, int]:
    """How many hands share so many threads, and how many each has.

    Several, so that while one is between two computations the others use the memory's rate; few, since all of them
    want the interpreter's lock there.

    Example:
        >>> hands_of(14), hands_of(4), hands_of(1)
        ((7, 2), (2, 2), (1, 1))
    """
    hands = max(1, threads // _THREADS_OF_A_HAND)
    return hands, threads // hands


def begin_with(threads: int) -> Callable[[], None]:
    """What the thread of the host lane does first: the number of OpenMP's threads belongs to the thread that asks."""

    def begin() -> None:
        # Torch gives a thread its number when it asks for the first time.
        before = torch.get_num_threads()
        openmp: Any = ctypes.CDLL(None) if os.name == "posix" else None
        if hasattr(openmp, "omp_set_num_threads"):
            openmp.omp_set_num_threads(threads)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
            # That is the number of threads that begin later, too: whose sums would have other bits.
            _restore(before)

    return begin


def _restore(threads: int) -> None:
    thread = threading.Thread(target=torch.set_num_threads, args=(threads,))
    thread.start()
    thread.join()
