"""What a function saves for backward when it runs again, compared with what it saved in its first run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spillway.errors import RecomputeError
from spillway.regions.packs import Enough
from spillway.regions.proofs import Sums, sums
from spillway.regions.rerun import sums_of
from spillway.regions.retracing import Retracing
from spillway.regions.tape import Saved
from spillway.regions.tensors import below_modes


class Resaved:
    """Takes what a re-run saves. See NOTE [ Unwatched calls ] in ``unwatched.py``.

    Args:
        wanted: places of what is to be computed.
        until: the last place of interest; ``None``: the function is to run to its end.
        sums: of the first run, by places.
        saved: what is on the tape.
        mode: leaves operators out, if the run is not whole.
    """

    def __init__(
        self,
        wanted: set[int],
        until: int | None,
        sums: dict[int, Sums],
        saved: Sequence[Saved],
        mode: Retracing | None,
    ) -> None:
        self._wanted = wanted
        self._until = until
        self._sums = sums
        self._saved = saved
        self._mode = mode
        self._packed = 0
        self.results: dict[int, torch.Tensor] = {}
        self.differ: list[torch.Tensor] = []
        """Comparisons with the first run."""
        self.has_ended = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The hook."""
        mode, place = self._mode, self._packed
        self._packed = place + 1
        if place not in self._wanted and place not in self._sums and mode is not None:
            return None
        with below_modes(tensor):
            # A graph that holds its own output would never die.
            tensor = tensor.detach()
            if mode is not None:
                spot = self._saved[place].spot
                if spot is None or not mode.knows(tensor, spot):
                    mode.differs()
            before = self._sums.get(place)
            if before is not None:
                self._compare(before, sums(tensor))
            if place in self._wanted:
                self.results[place] = tensor
        if place == self._until:
            self.has_ended = True
            raise Enough
        return tensor

    def unpack(self, packed: torch.Tensor | None) -> torch.Tensor:
        """The hook."""
        if packed is not None:
            return packed
        if self._mode is not None and not self.has_ended:
            # A backward inside of the function asks for what was not computed.
            self._mode.differs()
        raise RecomputeError(
            "got a backward through a graph that a region left behind when it ran again, expected one through the "
            "graph of its first run; give what the region keeps in a module or a list back as an output"
        )

    def compare_outputs(self, before: Sequence[Sums | None], output: Any) -> None:
        """The function has returned; those are sums of what it returned the first time."""
        found = sums_of(output)
        with torch._C._DisableTorchDispatch():
            for one, other in zip(before, found, strict=False):
                if one is not None:
                    self._compare(one, other)
            if len(before) != len(found):
                self.differ.append(torch.ones((), dtype=torch.bool, device="cpu"))

    def _compare(self, before: Sums, found: Sums | None) -> None:
        one = _joined(before)
        other = None if found is None else _joined(found)
        if other is not None and one.shape == other.shape and one.device == other.device:
            self.differ.append((one != other).any())
        else:
            self.differ.append(torch.ones((), dtype=torch.bool, device=one.device))


def _joined(found: Sums) -> torch.Tensor:
    return torch.cat([each.to(torch.int64) for each in found])
