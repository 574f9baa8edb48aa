"""A tape that was written of a region while it ran again, and was not tried yet."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.dynamo import has_compiled
from spillway.capture.handles import KeptHandle, unpack
from spillway.capture.identity import is_parameter
from spillway.records import Decision
from spillway.regions.outlining import Outlining
from spillway.regions.packs import Pack, Packs
from spillway.regions.proofs import fingerprint
from spillway.regions.scribe import Peeks, Scribe, is_own, writes_its_first
from spillway.regions.steps import Saved, Spot, Step
from spillway.regions.tape import Base, Tape, Untold
from spillway.regions.tensors import below_modes, may_be_seed
from spillway.regions.trace import Trace


class Draft:
    """See the top of this file.

    Args:
        tape: what was written.
        scribe: who wrote it.
        tensors: what the function was called with.
        prints: fingerprints of what it had autograd save, and what is computed again.
    """

    def __init__(
        self, tape: Tape, scribe: Scribe, tensors: Sequence[torch.Tensor], prints: list[torch.Tensor | None]
    ) -> None:
        self.tape = tape
        self.prints = prints
        self._scribe = scribe
        self._tensors = tensors

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        trace: Trace,
        packs: Packs,
    ) -> Draft | None:
        """Of a function that runs again for that; ``None``: there can be no tape of it.

        Args:
            function: the region's.
            tensors: what it is called with.
            trace: of its first run.
            packs: what it had autograd save in its first run.
        """
        if trace.values.opaque is not None or trace.targets or packs.output_leaves:
            return None
        if trace.generators:
            # Of the function's own: there is no telling in what state it expects them.
            return None
        # Above all, nobody waits for other ranks, which may have a tape.
        if any(call.is_settled or not is_own(call.func) for call in trace.calls) or not _writes_own(trace, packs):
            return None
        scribe = Scribe(tensors, trace.calls)
        saving = _Saving(scribe, packs)
        peeks, outlining = Peeks(), None if has_compiled() else Outlining(scribe, tensors)
        try:
            hooks = saved_tensors_hooks(saving.pack, _Nothing.unpack)
            with hooks, peeks, nullcontext() if outlining is None else outlining, scribe:
                function(*tensors)
        except RuntimeError:
            # It has run before without an error, and does again where nobody asks for a tape. Torch swaps no tensors
            # that somebody has weak references to, say.
            return None
        except Exception:
            # The function may have made another error of what it was told.
            if not saving.was_asked:
                raise
        if saving.is_held:
            # In a module, say. Somebody may go through that graph, as through one that a re-run leaves.
            with saved_tensors_hooks(_kept, unpack), Scribe(tensors, trace.calls):
                function(*tensors)
        if (
            saving.was_asked
            or scribe.is_untold
            or peeks.any
            or len(scribe.steps) != len(trace.calls)
            or len(saving.spots) != len(packs.all)
        ):
            return None
        makers: dict[int, Step] = {}
        for step, call in zip(scribe.steps, trace.calls, strict=True):
            step.decision = call.decision
            makers.update((spot.value, step) for _, spot in step.makes)
        saved = [
            _saved(spot, pack, is_parameter, makers)
            for spot, is_parameter, pack in zip(saving.spots, saving.are_parameters, packs.all, strict=True)
        ]
        told = [each for each in saved if each is not None]
        if len(told) < len(saved):
            return None
        tape = Tape(scribe.steps, told, tuple(scribe.inputs), scribe.count, tuple(saving.places))
        if outlining is not None:
            tape = replace(tape, outline=outlining.outline())
        return cls(tape, scribe, tensors, saving.prints)

    def played(self, trace: Trace) -> list[torch.Tensor | None]:
        """Fingerprints of what the tape gives; none, if it does not come to its end.

        Args:
            trace: of the first run, which has handles of what is preserved.
        """
        tape = self.tape
        prints: list[torch.Tensor | None] = [None] * len(tape.saved)
        inputs = dict(zip(tape.inputs, self._tensors, strict=True))
        given = {
            spot.value: (handle, spot)
            for step, call in zip(tape.steps, trace.calls, strict=True)
            for (_, spot), handle in zip(step.makes, call.given or (), strict=False)
        }

        def base_of(value: int) -> Base:
            if value in given:
                handle, spot = given[value]
                return Base.under(handle.unpack(), spot.view)
            known = inputs.get(value)
            return Base((self._scribe.outside[value] if known is None else known).untyped_storage())

        def give(place: int, tensor: torch.Tensor) -> None:
            prints[place] = fingerprint(tensor)

        try:
            tape.play(tape.all_runs, base_of, self._scribe.states, give)
        except Untold:
            return []
        return [None if known is None else each for known, each in zip(self.prints, prints, strict=True)]


class _Saving:
    """Takes what the function has autograd save while a tape is written."""

    def __init__(self, scribe: Scribe, packs: Packs) -> None:
        self._scribe = scribe
        self._packs = packs.all
        self._given: weakref.WeakSet[_Nothing] = weakref.WeakSet()
        self.was_asked = False
        """Whether there was a backward through the function's graph within it."""
        self.spots: list[Spot | None] = []
        self.are_parameters: list[bool] = []
        self.places: list[int] = []
        """How many operators had run."""
        self.prints: list[torch.Tensor | None] = []

    @property
    def is_held(self) -> bool:
        """Whether anybody still has some of the graph."""
        return len(self._given) > 0

    def pack(self, tensor: torch.Tensor) -> _Nothing:
        """The hook. No tensor is held: it would be all that the function saves, beside what is there already."""
        with below_modes(tensor), torch._C.DisableTorchFunction():
            place = len(self.spots)
            wanted = place < len(self._packs) and self._packs[place].wanted
            spot = self._scribe.spot_of(tensor)
            # What cannot be told is of no use, and need not even have bits of its own.
            wanted = wanted and spot is not None
            self.spots.append(spot)
            self.are_parameters.append(is_parameter(tensor))
            self.places.append(len(self._scribe.steps))
            self.prints.append(fingerprint(tensor) if wanted and not self._may_be_seed(tensor, spot) else None)
            nothing = _Nothing(self)
            self._given.add(nothing)
            return nothing

    def _may_be_seed(self, tensor: torch.Tensor, spot: Spot | None) -> bool:
        """Whether a random operator has made it, and may keep its seed in it."""
        if spot is None or not may_be_seed(tensor):
            return False
        made = (step for step in self._scribe.steps if step.is_random)
        return any(each.value == spot.value for step in made for _, each in step.makes)


class _Nothing:
    """What autograd has in place of a tensor while a tape is written."""

    __slots__ = ("__weakref__", "_saving")

    def __init__(self, saving: _Saving) -> None:
        self._saving = saving

    def unpack(self) -> torch.Tensor:
        """The hook."""
        self._saving.was_asked = True
        raise Untold(
            "got a backward inside of a region that had none in its first run, expected the same in each run; leave it "
            "outside of the region"
        )


def _writes_own(trace: Trace, packs: Packs) -> bool:
    """Whether all that is written was made within, is computed again, and was saved as it is after the last write."""
    written = {value: place for place, call in enumerate(trace.calls) for value in call.writes}
    if not written:
        return True
    makers = [trace.makers.get(value) for value in written]
    if any(maker is None or maker.is_given for maker in makers):
        return False
    # A scribe refuses these, too, but only after the function has run once more for it.
    if any(call.writes and not writes_its_first(call.facts) for call in trace.calls):
        return False
    return all(
        pack.decision is None and pack.place > written[value]
        for pack in packs.all
        for value in pack.values
        if value in written
    )


def _kept(tensor: torch.Tensor) -> KeptHandle:
    with below_modes(tensor), torch._C.DisableTorchFunction():
        return KeptHandle(tensor)


def _saved(spot: Spot | None, pack: Pack, is_parameter: bool, makers: dict[int, Step]) -> Saved | None:
    """What is on the tape; ``None``: it cannot be told."""
    maker = None if spot is None else makers.get(spot.value)
    if pack.wanted:
        return None if spot is None else Saved(spot)
    if maker is None:
        return Saved(None, is_parameter=is_parameter)
    if pack.decision is not None:
        return Saved(spot, pack.decision)
    return Saved(spot, maker.decision) if maker.decision is not Decision.RECOMPUTE else None
