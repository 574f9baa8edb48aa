"""By how much the host is ahead of the device where a step begins.

NOTE [ The host's lead ]

A loop that waits for the device nowhere has a host that gets further ahead with each step, until the device's queue is
full. One that waits between steps, for a loss that is printed or inputs that are copied, has what it has gained since.
Both are seen where the device is made to lag: what the host is ahead at the end of such a step is what it can be ahead.

A lead that is lost on the way is none. So the device is made to lag where the pass that is weighed begins, and where
the first block begins in the one that is timed. If the host does not have most of that by the first block, and at each
instant from there to the turn, the model or the loop waits there, or the host is slower than its device: then the lead
counts for nothing.

The host's time after the blocks is known only where it waits for nothing there: where, at the end of the step, the
device had not got there. Of both passes the shorter one counts: a host that has given the device all that its queue
holds waits for room in it.
"""

from __future__ import annotations

from dataclasses import replace

from spillway.planning.profile import Profile
from spillway.profiling.watch import Place, Watched

_AHEAD, _FORWARD, _STARTED, _TURNED = ("ahead", 0), ("forward", 0), ("started", 0), ("turned", 0)
_DONE = ("done", 0)
_LEAST_LAG = 0.01
"""Seconds. Some devices cannot be made to lag."""


def lead_of(watched: Watched, weighed: Watched) -> float:
    """Seconds. See NOTE [ The host's lead ].

    Args:
        watched: a pass in which the device lagged where the blocks begin, forward and backward.
        weighed: one in which it lagged where the pass begins.
    """
    is_kept = _is_kept(weighed, _AHEAD, _FORWARD) and _is_kept(watched, _STARTED, _TURNED)
    return max(watched.lead(_DONE), 0.0) if is_kept else 0.0


def seconds_after(watched: Watched, weighed: Watched, end: Place, lead: float) -> float:
    """What the host needs after the blocks, from an instant on; 0: that is not known. See NOTE [ The host's lead ].

    Args:
        watched: as for :func:`lead_of`, and so is the next one.
        weighed: the other pass.
        end: where the blocks' backward has ended.
        lead: what these two passes have shown.
    """
    if lead <= watched.seconds(end, _DONE):
        return 0.0
    return min(each.host_seconds(end, _DONE) for each in (watched, weighed))


def without_lead(profile: Profile) -> Profile:
    """The profile for a loop of which it is not known where it waits."""
    return replace(profile, lead_seconds=0.0, after=replace(profile.after, host_seconds=0.0))


def _is_kept(watched: Watched, since: Place, until: Place) -> bool:
    """Whether the device was made to lag at an instant, and the host was ahead by most of that until another one."""
    order = watched.order
    if since not in watched.readings or until not in watched.readings:
        return False
    first = order.index(since) + 1
    lag = watched.seconds(since, order[first])
    return lag > _LEAST_LAG and all(watched.lead(place) > lag / 2 for place in order[first : order.index(until) + 1])
