"""A call of a function that runs again whole in backward, and at whose operators nobody looks.

NOTE [ Unwatched calls ]

To look at each operator takes the host several times as long as to queue it. Where nothing of a function is kept or
sent away, all of it is computed again, and there is nothing to leave out: it can run as under
``torch.utils.checkpoint``, first and again, and the host needs little more than without.

But nobody has seen then that both runs did the same. So the values themselves are compared: of what autograd saves at
last (of what all the rest goes into) sums are taken in the first run and in the re-run
(:func:`~spillway.regions.proofs.sums`). The device compares them, and is not waited for: that they differed is told as
soon as it is known (:mod:`~spillway.regions.verdicts`). A function that does something else than in the call before,
and does that in both of its runs, is right.

Functions that have a tape can be called so: they did the same in two runs, bit by bit, and nothing but what values
tell. Where a tape leaves out operators that take their time, calls are followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.handles import KeptHandle, unpack
from spillway.capture.hooks import Pass
from spillway.capture.identity import is_parameter
from spillway.regions.computed import ComputedHandle, Hooks
from spillway.regions.globals import Globals
from spillway.regions.proofs import sums
from spillway.regions.rerun import rerunning, tell_torch
from spillway.regions.tape import Saved, Tape
from spillway.regions.tensors import below_modes, is_strided, tensors_in
from spillway.regions.verdicts import Verdicts


class Unwatched:
    """One call, inside of ``torch.utils.checkpoint``, which calls :meth:`run`. See NOTE [ Unwatched calls ].

    Args:
        function: what runs again; called with the tensors that :meth:`run` is given.
        first: runs it the first time, with the caller's own arguments.
        tape: what it did before.
        passage: the pass that the call belongs to.
        verdicts: takes the comparisons.
        label: names the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        first: Callable[[], Any],
        tape: Tape,
        passage: Pass,
        verdicts: Verdicts,
        label: str,
    ) -> None:
        self._function = function
        self._first: Callable[[], Any] | None = first
        self._tape = tape
        self._passage = passage
        self._verdicts = verdicts
        self._label = label
        self._globals = Globals.now()
        self._torch: Hooks | None = None
        self._packed = 0
        self._sums: dict[int, torch.Tensor] = {}
        """Of what the first run saved at some places."""
        self.is_whole = True
        """Whether autograd saved in the first run what it had saved before."""
        self.error: BaseException | None = None
        """What the function raised in its first run. Torch is not told: it would leave its hooks behind."""

    def run(self, *tensors: torch.Tensor) -> Any:
        """The function, for the first time or again."""
        first, self._first = self._first, None
        if first is None:
            return self._again(tensors)
        try:
            return self._run_first(first)
        except BaseException as error:  # noqa: BLE001  (raised again by whoever called torch's checkpoint)
            self.error = error
            return None

    def input_before(self, place: int) -> None:
        """It writes none of its inputs."""

    def _run_first(self, first: Callable[[], Any]) -> Any:
        # What is known by now need not wait, nor what leaves: it was there before the function.
        self._verdicts.send()
        self._verdicts.read()
        self._passage.flush()
        self._torch = _top_saved_tensors_default_hooks(True)
        try:
            with saved_tensors_hooks(self._pack, unpack):
                output = first()
        finally:
            # Autograd holds the pack hook for as long as what it packed.
            self._torch = None
        self.is_whole = self.is_whole and self._packed == len(self._tape.saved)
        return output

    def _pack(self, tensor: torch.Tensor) -> KeptHandle | ComputedHandle:
        place = self._packed
        self._packed = place + 1
        if self.is_whole and not (place < len(self._tape.saved) and _is_like(tensor, self._tape.saved[place])):
            self.is_whole = False
        # What comes after something new may hang on nothing that is compared.
        if place in self._tape.last or not self.is_whole:
            with below_modes(tensor):
                found = _sums(tensor)
            if found is not None:
                self._sums[place] = found
        if is_parameter(tensor) or self._torch is None:
            return KeptHandle(tensor)
        # What of it is written later is not what is computed again: as it was saved, it comes back.
        return ComputedHandle(tensor, self._torch, None)

    def _again(self, tensors: Sequence[torch.Tensor]) -> Any:
        ledger = self._passage.ledger
        ledger.note_unused(self._tape.unused)
        self._passage.was_recomputed = True
        again = _Again(tell_torch(), self._sums, self._tape.saved)
        try:
            with rerunning(), self._globals.in_force(), saved_tensors_hooks(again.pack, _same):
                return self._function(*tensors)
        finally:
            ledger.recomputed_bytes += sum(again.nbytes.values())
            for differs in again.differ:
                self._verdicts.add(self._label, differs)


class _Again:
    """Takes what a re-run saves.

    Args:
        tell: the hook of ``torch.utils.checkpoint``.
        sums: of the first run.
        saved: what is on the tape.
    """

    def __init__(
        self, tell: Callable[[torch.Tensor], object], sums: dict[int, torch.Tensor], saved: Sequence[Saved]
    ) -> None:
        self._tell = tell
        self._sums = sums
        self._saved = saved
        self._packed = 0
        self.differ: list[torch.Tensor] = []
        """Comparisons with the first run."""
        self.nbytes: dict[int, int] = {}
        """Of storages that were made again."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        with below_modes(tensor):
            place, self._packed = self._packed, self._packed + 1
            before = self._sums.get(place)
            if before is not None:
                found = _sums(tensor)
                if found is not None and found.shape == before.shape:
                    self.differ.append((found != before).any())
                else:
                    self.differ.append(torch.ones((), dtype=torch.bool, device=before.device))
            is_told = not is_parameter(tensor)
            # A graph that holds its own output would never die.
            tensor = tensor.detach()
            if is_told:
                if place >= len(self._saved) or self._saved[place].spot is not None:
                    for part in filter(is_strided, tensors_in((tensor,))):
                        storage = part.untyped_storage()
                        self.nbytes[storage._cdata] = storage.nbytes()
                # The last one ends the run.
                self._tell(tensor)
            return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_like(tensor: torch.Tensor, saved: Saved) -> bool:
    spot = saved.spot
    return spot is None or (tensor.dtype is spot.dtype and tensor.shape == spot.size)


def _sums(tensor: torch.Tensor) -> torch.Tensor | None:
    found = sums(tensor)
    return None if found is None else torch.cat([each.to(torch.int64) for each in found])
