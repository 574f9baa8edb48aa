"""What the graph of a re-run saves: the hooks that are in force while a region runs again."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.identity import is_parameter
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
        if replay is not None:
            collected.final = replay.as_in_first

    def hooks(self) -> AbstractContextManager[object]:
        """A context in which they are in force."""
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Absent:
        collected, replay = self._collected, self._replay
        place = collected.next_place()
        if replay is not None and place is not None:
            replay.check_place(place)
        if type(tensor) is not torch.Tensor:
            with _disable_current_modes():
                tensor = tensor.detach()
                collected.add(tensor)
        else:
            with torch._C._DisableTorchDispatch():
                # A graph that holds its own output would never die.
                tensor = tensor.detach()
                collected.add(tensor)
        if collected.is_full and not collected.is_told:
            if replay is None:
                collected.tell_all()
            else:
                replay.ends_by(collected.tell_all)
        return tensor if place is not None or replay is None else _Absent(replay)


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
        self._replay.was_asked = True
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

    @property
    def has_inner(self) -> bool:
        """Whether another region is called in this run."""
        return self._replay.has_inner

    @has_inner.setter
    def has_inner(self, value: bool) -> None:
        self._replay.has_inner = value

    def hooks(self) -> AbstractContextManager[object]:
        """A context in which they are in force."""
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if type(tensor) is not torch.Tensor:
            return KeptHandle(tensor)
        with torch._C._DisableTorchDispatch():
            if self._replay.is_made_anew(tensor):
                self._count(tensor)
            if self._replay.knows(tensor) or is_parameter(tensor):
                return KeptHandle(self._replay.instead(tensor))
            return _ReadHandle(tensor, self._replay)

    def _count(self, tensor: torch.Tensor) -> None:
        if is_strided(tensor) and tensor.untyped_storage()._cdata not in self._counted:
            self._counted.add(tensor.untyped_storage()._cdata)
            self._ledger.recomputed_bytes += tensor.untyped_storage().nbytes()


class _ReadHandle(KeptHandle):
    """Stands for a tensor that was saved before its operator was seen: only then it is known if another stands for it.

    Args:
        tensor: what autograd saved.
        replay: the run.
    """

    __slots__ = ("_replay",)

    def __init__(self, tensor: torch.Tensor, replay: Replay) -> None:
        super().__init__(tensor)
        self._replay = replay

    def unpack(self) -> torch.Tensor:
        tensor = super().unpack()
        with torch._C._DisableTorchDispatch():
            instead: torch.Tensor = self._replay.instead(tensor)
            return instead
