"""By how much the host is ahead of the device where a step begins.

NOTE [ The host's lead ]

A loop that waits for the device nowhere has a host that gets further ahead with each step, until the device's queue is
full. One that waits somewhere, for a loss that is printed or inputs that are copied, has what it has gained since. Both
are seen where the device is made to lag: what the host is ahead at the end of such a step is what it can be ahead.

Two waits are not felt so, since the lag comes after them. One before the first block: so in the pass that is weighed
the device lags from the begin on, and where the host has waited for it by the first block, a lead would be lost there,
and counts for nothing. And one between forward and backward, after which the device is made to lag once more: where the
host has waited by then, that second lag is none of the loop's.

The host's time after the blocks is known only where it waits for nothing there: where, at the end of the step, the
device had not got there.
"""

from __future__ import annotations

from spillway.profiling.watch import Place, Watched

_AHEAD, _BEGIN, _STARTED, _TURNED = ("ahead", 0), ("begin", 0), ("started", 0), ("turned", 0)
_FORWARD, _DONE = ("forward", 0), ("done", 0)


def lead_of(watched: Watched, weighed: Watched) -> float:
    """Seconds. See NOTE [ The host's lead ].

    Args:
        watched: a pass in which the device lagged where the blocks begin, forward and backward.
        weighed: one in which it lagged where the pass begins.
    """
    if not _is_kept(weighed, _AHEAD, _FORWARD):
        return 0.0
    lead = watched.lead(_DONE)
    if not _is_kept(watched, _STARTED, _TURNED):
        lead -= _lag(watched, _TURNED)
    return max(lead, 0.0)


def _is_kept(watched: Watched, lags: Place, until: Place) -> bool:
    """Whether the host is ahead by most of a lag at an instant after it."""
    return watched.lead(until) > _lag(watched, lags) / 2 > 0


def _lag(watched: Watched, lags: Place) -> float:
    """How long the device was made to lag at an instant; 0: it was not."""
    if lags not in watched.readings:
        return 0.0
    return watched.seconds(lags, watched.order[watched.order.index(lags) + 1])
