"""One step's work for the host: in which parts it is queued, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from spillway.optim.held import CHUNK, Held
from spillway.optim.host_step import HostStep, Settings, Share, Turn
from spillway.optim.shared import Shared
from spillway.optim.tally import Tally
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


def in_order(turns: Sequence[Turn], settings: Callable[[Held], Settings], *, overlapped: bool) -> list[Share]:
    """Shares, in the order in which their gradients come, or in that in which the next forward wants them.

    Args:
        turns: in the order of the model.
        settings: of a parameter's group.
        overlapped: whether the next forward runs meanwhile.
    """
    if not overlapped and not any(turn.gradient.factors for turn in turns):
        turns = sorted(turns, key=lambda turn: turn.gradient.came)
    # A factor is known when all gradients are there.
    return list(shares(turns, settings))


def by_groups(turns: Sequence[Turn], settings: Callable[[Held], Settings]) -> list[Share]:
    """All parameters, by their groups."""
    groups: dict[int, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.held.group, []).append(turn)
    return [Share(some, settings(some[0].held)) for some in groups.values()]


def _kind(held: Held) -> tuple[object, ...]:
    return held.group, held.work_dtype, held.cut, id(held.shared)


class Round(Tally):
    """One step from memory of the host.

    Args:
        step: what steps on the host.
    """

    def __init__(self, step: HostStep) -> None:
        super().__init__()
        self._step = step
        self._ready: dict[Shared, Event] = {}

    def expect(self, turns: Sequence[Turn]) -> None:
        """These will be queued."""
        # Compute may have read and written parameters since.
        self._ready = {
            shared: shared.traffic.ready(turn.held.local() for turn in turns if turn.held.shared is shared)
            for shared in {turn.held.shared for turn in turns}
        }

    def queue(self, shares: Sequence[Share], *, together: bool) -> None:
        """Have them stepped, all in one call if ``together``."""
        held = [turn.held for share in shares for turn in share.turns]
        for one in held:
            one.check()
        shared, ready = held[0].shared, self._ready

        def work() -> Event:
            for one in held:
                one.begin_step()
            return self._step.step_together(shares, ready) if together else self._step.step(shares[0], ready[shared])

        end = shared.lane.run(work)
        for one in held:
            one.written()
            one.gradient.reader = one.coming = end
        self.on_host += sum(one.numel for one in held)

    def end(self, shared: Iterable[Shared]) -> None:
        """Compute waits for all that was queued."""
        self.host_seconds = self._step.count_anew()
        super().end(shared)
