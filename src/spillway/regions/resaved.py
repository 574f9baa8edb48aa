"""What a function saves for backward when it runs again, compared with what it saved in its first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spillway.errors import RecomputeError
from spillway.regions.packs import Enough
from spillway.regions.proofs import sums
from spillway.regions.rerun import sums_of
from spillway.regions.retracing import Retracing
from spillway.regions.steps import Saved, Spot
from spillway.regions.tensors import below_modes

_Cell = list[torch.Tensor]


class Shown(NamedTuple):
    """What is compared of something that was saved."""

    sums: torch.Tensor
    stride: tuple[int, ...]


class Resaved:
    """Takes what a re-run saves. See NOTE [ Unwatched calls ] in ``unwatched.py``.

    Args:
        wanted: places of what is to be computed.
        until: the last place of interest; ``None``: the function is to run to its end.
        shown: by the first run, by places.
        parameters: which one the first run saved, by places: their identities.
        saved: what is on the tape.
        mode: leaves operators out, if the run is not whole.
    """

    def __init__(
        self,
        wanted: set[int],
        until: int | None,
        shown: Mapping[int, Shown],
        parameters: Mapping[int, int],
        saved: Sequence[Saved],
        mode: Retracing | None,
    ) -> None:
        self._wanted = wanted
        self._until = until
        self._shown = shown
        self._parameters = parameters
        self._saved = saved
        self._mode = mode
        self._packed = 0
        self._cells: list[_Cell] = []
        """What the graph of the run has: a graph that somebody keeps would hold all of it."""
        self.results: dict[int, torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of what is compared, the sums of both runs."""
        self.is_other = False
        """Whether it was seen to be another one."""
        self.has_ended = False

    def pack(self, tensor: torch.Tensor) -> _Cell:
        """The hook."""
        mode, place = self._mode, self._packed
        self._packed = place + 1
        if mode is not None and mode.is_looking and mode.is_done:
            mode.end_at(tensor)
        cell: _Cell = []
        parameter = self._parameters.get(place)
        if parameter is not None and parameter != identity_of(tensor):
            self.is_other = True
        if place in self._wanted or place in self._shown or mode is None:
            with below_modes(tensor):
                # A graph that holds its own output would never die.
                tensor = tensor.detach()
                self._take(place, tensor)
                cell.append(tensor)
                self._cells.append(cell)
        if place == self._until:
            self.has_ended = True
            raise Enough
        if mode is not None and place == mode.looks_from:
            mode.look()
        return cell

    def unpack(self, cell: _Cell) -> torch.Tensor:
        """The hook."""
        if cell:
            return cell[0]
        if self._mode is not None and not self.has_ended:
            # A backward inside of the function asks for what was not computed.
            self._mode.differs()
        raise RecomputeError(
            "got a backward through a graph that a region left behind when it ran again, expected one through the "
            "graph of its first run; give what the region keeps in a module or a list back as an output"
        )

    def end(self) -> None:
        """The run is over, whichever way."""
        if self._until is not None and not self.has_ended:
            # It saved less than the first one.
            self.is_other = True
        self.has_ended = True
        for cell in self._cells:
            cell.clear()
        self._cells.clear()
        # A graph that somebody keeps has these hooks, and the mode has the call.
        self._mode = None

    def take(self) -> dict[int, torch.Tensor]:
        """What was to be computed, by places. It is not held here any more."""
        results, self.results = self.results, {}
        return results

    def differ(self) -> list[torch.Tensor]:
        """Whether the runs gave something else, as far as that is compared: a bool on each device.

        All of it at once, since each comparison takes the host as long as any other.
        """
        pairs, self._pairs = self._pairs, []
        sides: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for one, other in pairs:
            ones, others = sides.setdefault(one.device, ([], []))
            ones.append(one)
            others.append(other)
        with torch._C._DisableTorchDispatch():
            return [(torch.cat(ones) != torch.cat(others)).any() for ones, others in sides.values()]

    def compare_outputs(self, before: Sequence[torch.Tensor | None], output: Any) -> None:
        """The function has returned; those are sums of what it returned the first time."""
        found = sums_of(output)
        if len(before) != len(found) or all(each is None for each in before):
            self.is_other = True
            return
        for one, other in zip(before, found, strict=True):
            if one is not None:
                self._compare(one, other)

    def _take(self, place: int, tensor: torch.Tensor) -> None:
        spot = self._saved[place].spot if place < len(self._saved) else None
        if place in self._wanted:
            if not self._is_like(tensor, spot):
                self.is_other = True
            self.results[place] = tensor
        before = self._shown.get(place)
        if before is None:
            return
        if before.stride == tensor.stride():
            self._compare(before.sums, sums(tensor))
        else:
            # Sums are of what lies in memory: of a transposed tensor they are the same.
            self.is_other = True

    def _is_like(self, tensor: torch.Tensor, spot: Spot | None) -> bool:
        """Whether it looks like what is on the tape."""
        mode = self._mode
        looks = mode is not None and mode.is_looking and not mode.has_ended
        if mode is not None and looks and (spot is None or not mode.recognizes(tensor, spot)):
            mode.differs()
        return spot is not None and tensor.dtype is spot.dtype and tensor.shape == spot.size

    def _compare(self, before: torch.Tensor, found: torch.Tensor | None) -> None:
        if found is not None and found.shape == before.shape and found.device == before.device:
            self._pairs.append((before, found))
        else:
            self.is_other = True


def identity_of(tensor: torch.Tensor) -> int | None:
    """What tells a parameter from others, also where it is seen by a view of it; ``None`` of what is none."""
    base = tensor._base
    owner = tensor if base is None else base
    return id(owner) if type(owner) is torch.nn.Parameter else None
