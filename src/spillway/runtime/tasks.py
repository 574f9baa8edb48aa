"""Host work, done by a few threads: see NOTE [ Lanes, events, waits ] in ``backend.py``."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from spillway.runtime.backend import Event, Task, finish


class _Here(threading.local):
    task = False


_here = _Here()


def in_task() -> bool:
    """Whether the calling thread does a task, or holds a lock that a task may want: it must not wait for one."""
    return _here.task


def be_in_task() -> None:
    """The calling thread does tasks, from now on."""
    _here.task = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, the calling thread counts as one that does a task."""
    before, _here.task = _here.task, True
    try:
        yield
    finally:
        _here.task = before


class HostTasks:
    """A few threads for host work. They start with the first task.

    Args:
        threads: how many.
        begin: what each of them does first.
        name: of the threads.
    """

    def __init__(self, threads: int, begin: Callable[[], None] = be_in_task, *, name: str = "task") -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"spillway-{name}", initializer=begin)

    def run(self, task: Task) -> TaskEvent:
        # The thread keeps what it was given until a moment after the event is reached, and a task holds memory: so it
        # is given a box, and takes the task out of it.
        return TaskEvent(self._pool.submit(_take_and_run, [task]))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def chained(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    """One after the other."""

    def both() -> None:
        first()
        if second is not None:
            second()

    return both


def _take_and_run(box: list[Task]) -> Event | None:
    return box.pop()()


class TaskEvent:
    """The end of a task, and of the copy that it queued."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[Event | None]) -> None:
        self._future = future

    def query(self) -> bool:
        if not self._future.done():
            return False
        inner = None if self._future.exception() else self._future.result()
        return inner is None or inner.query()

    def finish(self) -> None:
        """Block until the task is done, and those that it queued, or have failed."""
        if self._future.exception() is None:
            finish(self._future.result())

    def resolve(self) -> Event | None:
        """Block until the task is done; the event of the copy that it queued, if it queued one."""
        error = self._future.exception()
        if error is not None:
            raise_again(error)
        return self._future.result()

    def synchronize(self) -> None:
        inner = self.resolve()
        if inner is not None:
            inner.synchronize()


def raise_again(error: BaseException) -> NoReturn:
    """Raise an error that several may ask for.

    A copy of it: raising the very object would hang the frames of whoever asks onto it, and what keeps the object (an
    event of an entry of a graph that those frames hold) would keep the graph, in a circle that no collector sees.
    """
    raise copy.copy(error).with_traceback(None) from error
