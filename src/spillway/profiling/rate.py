"""How much of something is done in a second: the median of several samples, within a time that is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

MOST_SAMPLES = 9
LONG_ENOUGH = 0.02
"""Seconds of a sample: some hundred times what it takes to begin one and to be told of its end."""
_SHORTEST = 1e-9
"""Seconds that anything takes: no clock is so fine that it could say 0 and be right."""


def rate_of(
    queue: Callable[[], None],
    wait: Callable[[], None],
    amount: float,
    seconds: float,
    *,
    enough: float = LONG_ENOUGH,
    most_repeats: int = 1024,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """How much is done in a second.

    Work is queued once, and then twice as often each time until a sample is long enough to be told from the time that
    it takes to begin: those are the warm-up. It takes about ``seconds`` at most, or as long as the work takes once.

    Args:
        queue: begins the work, and need not wait for its end.
        wait: blocks until all that was begun is done.
        amount: how much one call of ``queue`` does: bytes, or operations.
        seconds: that the samples may take together.
        enough: seconds that a sample has to take.
        most_repeats: how often work may be queued before it is waited for.
        clock: in seconds.
    """
    end = clock() + seconds
    repeats, steady = 1, False

    def sample() -> float:
        start = clock()
        for _ in range(repeats):
            queue()
        wait()
        return max(clock() - start, _SHORTEST)

    # The first one makes what the work needs: it counts only where there is no time for another.
    took = sample()
    rates = [amount / took]
    while len(rates) < MOST_SAMPLES and clock() + took < end:
        took = sample()
        rates = [*rates, repeats * amount / took] if steady else [repeats * amount / took]
        steady = steady or took >= enough or 2 * repeats > most_repeats
        if not steady:
            repeats *= 2
    return statistics.median(rates)
