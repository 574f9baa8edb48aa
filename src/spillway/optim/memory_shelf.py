"""Masters and states that lie in memory of the host, and are stepped as they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from spillway.optim.held import Held
from spillway.optim.host_step import HostStep, Turn
from spillway.optim.kinds import Kind
from spillway.optim.layout import State
from spillway.optim.rounds import Round, by_groups, in_order
from spillway.optim.shelf import Loading, Settings, Shelf
from spillway.optim.states import MASTER, host_copy
from spillway.optim.tally import Tally


class MemoryShelf(Shelf):
    """Lets the host step what it has.

    Args:
        kind: of the class.
        optimizer_class: the user's.
        given: what the user gave for it.
        settings: of a parameter's group, for the host.
        hands: how many the host has.
    """

    def __init__(
        self, kind: Kind, optimizer_class: type[Optimizer], given: dict[str, Any], settings: Settings, *, hands: int
    ) -> None:
        self._kind = kind
        self._step = HostStep(optimizer_class, given, hands=hands)
        self._settings = settings

    def add(self, held: Held) -> None:
        """Its memory is made when it is first stepped; on the CPU it may be the parameter's own."""
        held.in_place = held.shared.traffic.backend.direct_disk and not held.has_master

    def prepare(self, held: Iterable[Held]) -> None:
        """Nothing is told in advance."""

    def tally(self) -> Round:
        return Round(self._step)

    def step(self, turns: Sequence[Turn], now: Tally, *, overlapped: bool) -> None:
        assert isinstance(now, Round)
        now.expect(turns)
        if self._kind.alone:
            for share in in_order(turns, self._settings, overlapped=overlapped):
                now.queue([share], together=False)
        elif turns:
            now.queue(by_groups(turns, self._settings), together=True)

    def shown(self, held: Held) -> State | None:
        state = dict(held.state)
        if held.has_master and held.known:
            state[MASTER] = held.master
        return state or None

    def opened(self, held: Held) -> State:
        return self.shown(held) or {}

    def whole(self, held: Sequence[Held]) -> list[State]:
        return [self.shown(one) or {} for one in held]

    def put(self, loading: Sequence[Loading]) -> None:
        for held, state in loading:
            fresh = {key: host_copy(key, value, held) for key, value in state.items()}
            master = fresh.pop(MASTER, None)
            if fresh or master is not None:
                held.make_master()
            if held.has_master and master is not None:
                held.put_master(master)
            elif held.has_master:
                held.forget_master()
            if fresh:
                self._step.put_state(held, fresh, self._settings(held))
            else:
                self._step.drop_state(held)

    def begin(self, held: Sequence[Held]) -> None:
        for one in held:
            one.make_master()
            self._step.begin_state(one, self._settings(one))

    def refresh(self, held: Held) -> None:
        held.refresh()

    def written(self) -> dict[int, dict[str, Any]]:
        written, self._step.written = self._step.written, {}
        return written

    def discard(self, held: Held) -> None:
        self._step.drop_state(held)

    def close(self) -> None:
        self._step.close()
