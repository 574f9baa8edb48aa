"""One step's work for the host: in which parts it is queued, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from spillway.optim.gradient import CHUNK
from spillway.optim.held import Held
from spillway.optim.host_step import HostStep, Settings, Share, Turn
from spillway.optim.shared import Shared
from spillway.records import OptimizerStats
from spillway.runtime.backend import Event


def shares(turns: Sequence[Turn], settings: Callable[[Held], Settings]) -> Iterator[Share]:
    """Parameters that follow each other, are alike, and are small enough to share a call; or one that is not."""
    together: list[Turn] = []
    for turn in turns:
        if together and (
            _kind(turn.held) != _kind(together[-1].held)
            or sum(one.held.numel for one in together) + turn.held.numel > CHUNK
        ):
            yield Share(together, settings(together[0].held))
            together = []
        together.append(turn)
    if together:
        yield Share(together, settings(together[0].held))


def by_groups(turns: Sequence[Turn], settings: Callable[[Held], Settings]) -> list[Share]:
    """All parameters, by their groups."""
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.held.group, []).append(turn)
    return [Share(some, settings(some[0].held)) for some in groups.values()]


def _kind(held: Held) -> tuple[object, ...]:
    return held.group, held.work_dtype, held.cut, id(held.shared)


class Round:
    """One step.

    Args:
        shared: of every device.
        step: what steps on the host.
    """

    def __init__(self, shared: Iterable[Shared], step: HostStep) -> None:
        self._shared = list(shared)
        self._step = step
        self._before = self._counts()
        self._host_seconds = 0.0
        self._elements = 0

    def queue(self, shares: Sequence[Share], *, together: bool) -> None:
        """Have them stepped, all in one call if ``together``."""
        held = [turn.held for share in shares for turn in share.turns]
        for one in held:
            one.check()
        stale = [one for one in held if one.changed()]
        shared = held[0].shared
        ready = {each: each.traffic.ready(one.local() for one in stale if one.shared is each) for each in self._shared}

        def work() -> Event:
            before = time.perf_counter()
            for one in held:
                one.in_doubt = True
            for one in stale:
                one.take(ready[one.shared])
            for one in held:
                one.begin_step()
            if together:
                ends = self._step.step_together(shares, ready)
            else:
                ends = [end for share in shares for end in self._step.step(share, ready[shared])]
            for one in held:
                one.in_doubt = False
            self._host_seconds += time.perf_counter() - before
            return shared.traffic.backend.all_of(ends)

        end = shared.lane.run(work)
        for one in held:
            one.written()
            one.gradient.reader = one.coming = end
        self._elements += sum(one.numel for one in held)

    def close(self) -> None:
        """Nothing more is queued."""
        for one in self._shared:
            one.lane.run(one.traffic.unstage)
            one.forget_factor()

    def stats(self) -> OptimizerStats:
        """What it cost, when all of it is done."""
        sent, received, waited = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        return OptimizerStats(
            stepped_on_host=self._elements,
            host_seconds=self._host_seconds,
            stall_seconds=waited,
            sent_bytes=int(sent),
            received_bytes=int(received),
            host_bytes=sum(one.traffic.arena.reserved_bytes for one in self._shared),
        )

    def _counts(self) -> tuple[float, float, float]:
        traffic = [one.traffic for one in self._shared]
        return (
            sum(one.sent_bytes for one in traffic),
            sum(one.received_bytes for one in traffic),
            sum(one.waits.seconds() for one in traffic),
        )
