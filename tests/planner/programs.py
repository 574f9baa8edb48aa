"""Programs for tests: tasks by hand, and for properties programs of every kind.

What these hold are small numbers, so that windows are often full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from spillway.planner.tasks import Phase, Program, Rates, Sent, Task

SLOW = Rates(out=1, back=1, disk_write=1, disk_read=1, window=4)
"""Every stream copies one byte a second."""
KEPT = -1
"""A key that no task sends."""

_seconds = st.integers(0, 24).map(lambda eighths: eighths / 8)
"""Eighths are exact, and so are their sums."""
_powers = st.sampled_from((0.25, 0.5, 1.0, 2.0, 4.0))


def task(name: str, seconds: float, *sends: Sent, peak: int = 0, change: int | None = None, **more: Any) -> Task:
    """A task that allocates what it sends, unless told otherwise."""
    change = sum(sent.nbytes for sent in sends) if change is None else change
    return Task(name, Phase.OUTSIDE, seconds, peak, change, sends, **more)


@st.composite
def rates(draw: st.DrawFn, *, exact: bool = True) -> Rates:
    """Rates that whole bytes can be divided by with no rounding, or any."""
    rate = _powers if exact else st.floats(0.1, 10)
    return Rates(draw(rate), draw(rate), draw(rate), draw(rate), draw(st.integers(1, 12)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program: takes, sends and drops wherever they can be, keys that are used again, tasks that do nothing."""
    free, live = [0], [KEPT]
    tasks = []
    for number in range(draw(st.integers(0, 10))):
        takes = draw(st.lists(st.sampled_from(live), max_size=4))
        sends = []
        for _ in range(draw(st.integers(0, 3))):
            key = draw(st.sampled_from(free))
            free.remove(key)
            if not free:
                free.append(key + 1 if key + 1 not in live else max(live) + 1)
            live.append(key)
            sends.append(Sent(key, draw(st.integers(0, 7)), draw(st.integers(0, 3)) == 0))
        drops = draw(st.lists(st.sampled_from(live), unique=True, max_size=2))
        for key in drops:
            if key != KEPT:
                live.remove(key)
                free.append(key)
        tasks.append(_task(draw, f"t{number}", Phase.OUTSIDE, tuple(sends), tuple(takes), tuple(drops)))
    return Program(draw(st.integers(0, 20)), tuple(tasks))


@st.composite
def steps(draw: st.DrawFn) -> Program:
    """A forward that sends, and a backward that takes, in the reverse order or in another one, and drops."""
    forward, names, keys = [], [], []
    for number in range(draw(st.integers(1, 8))):
        sends = []
        for _ in range(draw(st.integers(0, 3))):
            sends.append(Sent(len(keys), draw(st.integers(0, 7)), draw(st.integers(0, 3)) == 0))
            keys.append(len(keys))
        forward.append(_task(draw, f"f{number}", Phase.FORWARD, tuple(sends)))
        names.append(f"b{number}")
    order = keys[::-1] if draw(st.booleans()) else draw(st.permutations(keys))
    backward = []
    for left, name in zip(range(len(names), 0, -1), reversed(names), strict=True):
        takes = order if left == 1 else order[: draw(st.integers(0, len(order)))]
        order = order[len(takes) :]
        backward.append(_task(draw, name, Phase.BACKWARD, takes=tuple(takes), drops=tuple(takes)))
    return Program(draw(st.integers(0, 20)), (*forward, *backward))


def _task(
    draw: st.DrawFn,
    name: str,
    phase: Phase,
    sends: tuple[Sent, ...] = (),
    takes: tuple[int, ...] = (),
    drops: tuple[int, ...] = (),
) -> Task:
    change = sum(sent.nbytes for sent in sends) + draw(st.integers(-3, 5))
    host = draw(st.just(0.0) | _seconds)
    task = Task(name, phase, draw(_seconds), draw(st.integers(0, 12)), change, sends, takes, drops, host_seconds=host)
    if draw(st.booleans()):
        return task
    return replace(task, gradient_bytes=draw(st.integers(-3, 5)), recomputed_bytes=draw(st.integers(-3, 5)))
