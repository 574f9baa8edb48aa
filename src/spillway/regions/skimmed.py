"""A call of a function that is compared with a tape by the tape's outline: see NOTE [ Outlines ] in ``outline.py``.

All else is as in ``followed.py``: where the call does something else, what comes after is kept; backward has the tape
run again. That functions of torch's run the operators that they ran before is taken to be so, and looked at now and
then: of one call in so many, sums are taken of all that is computed again, and of what the tape makes of it
(:func:`~spillway.regions.proofs.sums`). The device compares them, and is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import length_hint
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.handles import Handle, KeptHandle, check_version, unpack
from spillway.capture.hooks import Pass
from spillway.capture.keeping import Keeping
from spillway.records import Decision
from spillway.regions.call_handle import CallHandle
from spillway.regions.followed import Followed, Rerunning
from spillway.regions.outsiders import Outsiders
from spillway.regions.proofs import sums
from spillway.regions.skimming import Skimming
from spillway.regions.steps import Fate, Foreseen
from spillway.regions.tape import Tape
from spillway.regions.tensors import below_modes
from spillway.regions.verdicts import Verdicts

_KEEP = Decision.KEEP
_OUTSIDE, _PRESERVED, _PARAMETER = Fate.OUTSIDE, Fate.PRESERVED, Fate.PARAMETER
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Skimmed(Followed):
    """One call.

    Args:
        tape: what the function did before; it has an outline.
        passage: the pass that the call belongs to.
        inputs: what is done with the function's tensors; ``None``: what the hooks around do.
        aliases: whether what comes from outside may have been sent away by the pass.
        rerunning: a context around what runs again.
        verdicts: takes the comparisons.
        label: names the function.
        compares: whether what is computed again is compared.
    """

    _mode: Skimming | None

    def __init__(
        self,
        tape: Tape,
        passage: Pass,
        inputs: Decision | None,
        *,
        aliases: bool,
        rerunning: Rerunning,
        verdicts: Verdicts,
        label: str,
        compares: bool,
    ) -> None:
        super().__init__(tape, passage, inputs, aliases=aliases, rerunning=rerunning)
        self._verdicts = verdicts
        self._label = label
        self._keeping = Keeping(passage)
        self._rest = list(tape.foreseen)
        """What autograd is to save, while the function has saved nothing else."""
        self._outsiders = Outsiders(passage, aliases=aliases)
        self._compared = tape.showing.compared if compares else frozenset[int]()
        self._sums: dict[int, torch.Tensor] = {}
        """Of what the function saved at some places."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of what is compared, the sums of both runs."""
        self._trackers_of: dict[int, tuple[torch.Tensor, int]] = {}
        """Of what is computed again and somebody still has, what tells that it is written, and its version."""

    def run(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        self._verdicts.send()
        self._verdicts.read()
        output = None
        try:
            output, is_whole = super().run(function, tensors)
        finally:
            self._outsiders.clear()
            self._keeping.end(output)
        return output, is_whole

    def _called(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        assert self._tape.outline is not None
        self._mode = mode = Skimming(self._tape, self._tape.outline, tensors, self._states)
        following = iter(self._rest)
        with saved_tensors_hooks(self._packing(following.__next__), unpack), mode:
            output = function()
        with below_modes():
            for value, tensor, version in mode.left():
                # It is not to be written before backward, as in plain PyTorch.
                tracker = tensor.detach()
                tracker.data = self._passage.nothing(tensor.device)
                self._trackers_of[value] = tracker, version
        return output, mode.is_over and not mode.is_lost and not length_hint(following)

    def _packing(self, follow: Callable[[], Foreseen]) -> Callable[[torch.Tensor], Any]:
        """The hook, which is short, since the host comes by for each tensor. Autograd holds it, but not the mode.

        Args:
            follow: gives what is to be saved next.
        """
        passage, compared, alive = self._passage, self._compared, self._alive
        leaving = passage.waiting

        def pack(tensor: torch.Tensor) -> Any:
            mode = self._mode
            if mode is None or mode.is_running:
                return pack_next(tensor, mode)
            # By no function of torch's: what is done here would be seen.
            with torch._C.DisableTorchFunction():
                return pack_next(tensor, mode)

        def pack_next(tensor: torch.Tensor, mode: Skimming | None) -> Any:
            if mode is None or mode.is_lost or _graph_task() != -1:
                return self._pack_another(tensor)
            try:
                foreseen = follow()
            except StopIteration:
                return self._pack_another(tensor)
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            place, fate, spot, _, _ = foreseen
            if fate is _PARAMETER:
                return KeptHandle(tensor)
            if fate is _OUTSIDE:
                return self._outsiders.pack(tensor)
            if not mode.saves(tensor, spot):
                return self._pack_another(tensor)
            if fate is _PRESERVED:
                with below_modes():
                    return self._pack_preserved(tensor, foreseen)
            if place in compared:
                with below_modes():
                    found = sums(tensor)
                if found is not None:
                    self._sums[place] = found
            alive.add(place)
            return CallHandle((self, place))

        return pack

    def _pack_preserved(self, tensor: torch.Tensor, foreseen: Foreseen) -> Handle:
        """What is kept, or leaves."""
        place, _, spot, decision, is_shown = foreseen
        if decision is _KEEP:
            handle = self._keeping.keep(tensor, place, self._tape.kept_bytes)
        else:
            self._passage.advance()
            handle = self._passage.save_made(tensor, spot.view, decision)
        if is_shown and spot.value in self._tape.handed:
            given = handle if type(handle) is KeptHandle else self._passage.another(handle, tensor, decision)
            self._hand_in(spot.value, given, tensor, spot.view)
        return handle

    def _pack_another(self, tensor: torch.Tensor) -> Handle:
        """Something that is not on the tape, or comes after such."""
        mode = self._mode
        if mode is not None:
            mode.is_lost = True
        self._rest.clear()
        if mode is None or _graph_task() != -1:
            # By somebody who goes through the graph within the call, and whom no tape knows of.
            return KeptHandle(tensor)
        with below_modes(tensor):
            self._passage.advance()
            return self._passage.save(tensor, _KEEP)

    def compute(self, place: int) -> torch.Tensor:
        spot = self._tape.saved[place].spot
        known = None if spot is None else self._trackers_of.get(spot.value)
        if spot is not None and known is not None:
            check_version(*known, spot.view)
        return super().compute(place)

    def _play(self, place: int) -> None:
        super()._play(place)
        pairs, self._pairs = self._pairs, []
        if pairs:
            ones, others = zip(*pairs, strict=True)
            self._verdicts.add(self._label, (torch.cat(ones) != torch.cat(others)).any())

    def _give(self, place: int, tensor: torch.Tensor) -> None:
        before = self._sums.pop(place, None)
        if before is not None:
            found = sums(tensor)
            assert found is not None
            self._pairs.append((before, found))
        super()._give(place, tensor)
