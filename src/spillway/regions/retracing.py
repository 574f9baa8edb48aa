"""Runs a function again by a tape: what nobody needs is left out. See NOTE [ Unwatched calls ] in ``unwatched.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import torch

from spillway.regions.following import Following
from spillway.regions.replay import Differs
from spillway.regions.tape import Base, Step, Tape


class Retracing(Following):  # type: ignore[no-untyped-call]
    """Compares operators with a tape's, and leaves out those that need not run.

    Args:
        tape: these.
        inputs: what the function is called with.
        base_of: fetches the memory of what was preserved.

    Raises:
        Differs: from within any operator, once one of them was not the one on the tape.
    """

    def __init__(self, tape: Tape, inputs: Sequence[torch.Tensor], base_of: Callable[[int], Base]) -> None:
        super().__init__(tape, inputs, {})
        # What is handed in is held by whoever handed it.
        self._handed = frozenset()
        self._runs, self._given = tape.again
        self._base_of = base_of
        self._bases: dict[int, Base] = {}

    def differs(self) -> Never:
        """The function does something else."""
        self.is_lost = True
        raise Differs

    def _unfollowed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.differs()

    def _run(self, place: int, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if place in self._runs or not step.makes or step.others is None:
            return super()._run(place, step, args, kwargs)
        with torch._C._DisableTorchDispatch():
            outputs = list(step.others)
            for index, spot in step.makes:
                if spot.value in self._given:
                    outputs[index] = spot.view.rebuild(*self._base_of(spot.value))
                else:
                    # Nobody reads it. While the function's own code holds it, its memory is there.
                    memory = torch.empty(spot.end, dtype=torch.uint8, device=spot.view.device)
                    outputs[index] = spot.view.rebuild(memory.untyped_storage(), 0)
        if step.single:
            return outputs[0]
        return outputs if len(step.func._schema.returns) == 1 else tuple(outputs)

    def _take(self, step: Step, output: Any) -> None:
        super()._take(step, output)
        if self.is_lost:
            self.differs()
