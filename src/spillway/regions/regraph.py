"""What the graph of a re-run saves: the hooks that are in force while a region runs again."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from spillway.capture.handles import KeptHandle, unpack
from spillway.errors import RecomputeError
from spillway.regions.packs import Collected
from spillway.regions.replay import Differs, Replay
from spillway.regions.tensors import is_strided
from spillway.runtime.ledger import Ledger


class Collecting:
    """The graph of a re-run that nobody goes through: what it saves is what the re-run is for.

    Args:
        collected: takes it.
        replay: leaves operators out, if the run is not whole.
    """

    def __init__(self, collected: Collected, replay: Replay | None) -> None:
        self._collected = collected
        self._replay = replay

    def hooks(self) -> AbstractContextManager[object]:
        """A context in which they are in force."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Absent:
        collected, replay = self._collected, self._replay
        is_wanted = collected.wants()
        if type(tensor) is not torch.Tensor:
            with _disable_current_modes():
                tensor = tensor.detach()
                collected.add(tensor)
            return tensor
        with torch._C._DisableTorchDispatch():
            # A graph that holds its own output would never die.
            tensor = tensor.detach()
            collected.add(tensor if replay is None else replay.instead(tensor))
        return tensor if is_wanted or replay is None else _Absent(replay)


class _Absent:
    """Stands for a tensor that nobody wants."""

    __slots__ = ("_replay",)

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def unpack(self) -> torch.Tensor:
        if self._replay.is_over:
            raise RecomputeError(
                "got a backward through a graph that a region left behind when it ran again, expected one through the "
                "graph of its first run; give what the region keeps in a module or a list back as an output"
            )
        self._replay.differs = "a backward inside of the region asks for what was not computed"
        raise Differs(self._replay.differs)


def _unpack(packed: torch.Tensor | _Absent) -> torch.Tensor:
    return packed.unpack() if isinstance(packed, _Absent) else packed


class Regraph:
    """The graph of a reentrant re-run, which backward goes through: of bytes for which a copy stands, that copy.

    Args:
        replay: knows the copies, and what is computed again.
        ledger: counts the bytes of that.
    """

    def __init__(self, replay: Replay, ledger: Ledger) -> None:
        self._replay = replay
        self._ledger = ledger
        self._counted: set[int] = set()

    def hooks(self) -> AbstractContextManager[object]:
        """A context in which they are in force."""
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: torch.Tensor) -> KeptHandle:
        if type(tensor) is not torch.Tensor:
            return KeptHandle(tensor)
        with torch._C._DisableTorchDispatch():
            if self._replay.is_made_anew(tensor):
                self._count(tensor)
            return KeptHandle(self._replay.instead(tensor))

    def _count(self, tensor: torch.Tensor) -> None:
        if is_strided(tensor) and tensor.untyped_storage()._cdata not in self._counted:
            self._counted.add(tensor.untyped_storage()._cdata)
            self._ledger.recomputed_bytes += tensor.untyped_storage().nbytes()
