"""Makes slabs of host memory, the next ones while the present one is filled.

To pin memory, the system clears its pages and the driver then registers them: two things that two slabs can do at the
same time, and that a copy into a third does not disturb.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from spillway.runtime.tasks import be_in_task

AHEAD = 2
"""How many slabs are made at once."""


class SlabMaker:
    """Makes slabs. Used with the arena's lock held.

    Args:
        make: bytes in, host memory out (:meth:`Backend.host_slab`).
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._coming: deque[tuple[int, Future[torch.Tensor]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def make(self, nbytes: int) -> torch.Tensor:
        """A slab, now."""
        return self._make(nbytes)

    def prepare(self, nbytes: int) -> bool:
        """Begin to make one for later, if there are not enough already; says whether."""
        if self._closed or len(self._coming) >= AHEAD:
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AHEAD, thread_name_prefix="spillway-slab", initializer=be_in_task)
        self._coming.append((nbytes, self._pool.submit(self._make, nbytes)))
        return True

    def prepared(self) -> torch.Tensor | None:
        """The oldest one that was prepared, when it is made; raises what went wrong in making it."""
        return self._coming.popleft()[1].result() if self._coming else None

    @property
    def coming_bytes(self) -> int:
        """Bytes of those that are prepared."""
        return sum(nbytes for nbytes, _ in self._coming)

    @property
    def is_busy(self) -> bool:
        """Whether one is being made."""
        return not all(slab.done() for _, slab in self._coming)

    def drop(self) -> None:
        """Prepare no more, and let go of what nobody has asked for, when it is made."""
        self._closed = True
        self._coming.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def close(self) -> None:
        """The same, and wait for the threads to end."""
        self.drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
