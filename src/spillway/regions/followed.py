"""A call of a function that is compared with a tape, and of which backward has only the tape run again.

NOTE [ How a call is followed ]

The function runs, under a mode that compares each operator with the tape's next one, and under hooks that give
autograd handles of what is to be computed. What the tape needs handed in is held: tensors from outside as they are, the
function's own tensors and what is preserved as was decided about them. When backward asks for the first handle of a
part (NOTE [ Parts ] in ``tape.py``), that part runs, and has what the part's other handles stand for, too; each lets go
of its own when it is asked, or dies. What is handed in is let go of when all handles have died that hang on it: as long
as one lives, somebody may go through the graph again.

Where an operator, or what is saved, is not what the tape has next, the call is *lost*: what comes after is kept. What
came before stands as it is, for it hangs on nothing that came later: also what is written in place was saved after the
last write to it, or the call is lost there.

Autograd owns the handles, these own the call, and that owns the handles of what is handed in. It owns no output.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.handles import Handle, KeptHandle, check_version, unpack
from spillway.capture.hooks import Pass, in_backward
from spillway.capture.identity import ViewRecipe, reach
from spillway.records import Decision
from spillway.regions.following import Following
from spillway.regions.generators import GeneratorState
from spillway.regions.globals import Globals, Numerics
from spillway.regions.inputs import hook_for
from spillway.regions.progress import FromOutside, Progress
from spillway.regions.tape import Base, Tape, Use
from spillway.regions.tensors import Tracker, below_modes, storage_bytes

_RECOMPUTE, _KEEP = Decision.RECOMPUTE, Decision.KEEP
_NO_PART = -1

Rerunning = Callable[[], AbstractContextManager[object]]
"""A context around what runs again."""


def may_follow(tape: Tape, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what comes back of the function's tensors, if they leave, is all that the tape reads of their memory."""
    for tensor, value in zip(tensors, tape.inputs, strict=True):
        extent = tape.extents.get(value)
        if extent is not None:
            start, nbytes = reach(tensor, tensor.untyped_storage().nbytes())
            if extent[0] < start or extent[1] > start + nbytes:
                return False
    return True


class Followed:
    """One call. See NOTE [ How a call is followed ].

    Args:
        tape: what the function did before.
        passage: the pass that the call belongs to.
        inputs: what is done with the function's tensors; ``None``: what the hooks around do.
        aliases: whether what comes from outside may have been sent away by the pass.
        rerunning: a context around what runs again.
    """

    def __init__(
        self, tape: Tape, passage: Pass, inputs: Decision | None, *, aliases: bool, rerunning: Rerunning
    ) -> None:
        self._tape = tape
        self._passage = passage
        self._inputs = inputs
        self._aliases = aliases
        self._rerunning = rerunning
        self._settings = Globals.now(), Numerics.now()
        self._mode: Progress | None = None
        self._packed = 0
        self._lock = threading.Lock()
        self._given: dict[Use, tuple[Handle, ViewRecipe]] = {}
        """What is handed in to parts of the tape, and how it lay."""
        self._outside: dict[int, FromOutside] = {}
        self._before: dict[int, torch.Tensor] = {}
        """Of what the function wrote when it was lost, all bytes as they were."""
        self._trackers: list[tuple[int, Tracker]] = []
        self._states: dict[int, GeneratorState] = {}
        self._alive: set[int] = set()
        """Places of what somebody may ask to be computed."""
        self._results: dict[int, torch.Tensor] = {}
        self._made: list[torch.Tensor] = []
        """What was computed, while some is."""

    def run(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        """What the function gives, and whether it did all that is on the tape, and nothing else.

        Args:
            function: the call.
            tensors: its tensors.
        """
        try:
            with torch._C._DisableTorchDispatch():
                self._save_inputs(tensors)
            return self._called(function, tensors)
        finally:
            mode = self._mode
            # Some of the graph may be used, even if the function has failed.
            with torch._C._DisableTorchDispatch():
                if mode is not None:
                    for value, (tensor, decision) in mode.held.items():
                        if mode.is_as_held(value):
                            self._hand_in(value, self._passage.save(tensor, decision), tensor)
                    self._outside.update(mode.outside)
                    self._before, self._trackers = mode.before, mode.trackers
                self._passage.flush()
            # Autograd holds the pack hook for as long as what it packed.
            self._mode = None

    def _called(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        """The same, below the hooks and a mode."""
        self._mode = mode = Following(self._tape, tensors, self._states)
        with saved_tensors_hooks(self._pack, unpack), mode:
            output = function()
        is_over = (mode.place, self._packed) == (len(self._tape.steps), len(self._tape.saved))
        return output, is_over and not mode.is_lost

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        pack = hook_for(self._inputs, self._passage)
        needed, leave = self._tape.needed, pack is not KeptHandle
        for tensor, value in zip(tensors, self._tape.inputs, strict=True):
            # What leaves here is not held by what else autograd saves of it.
            if leave or value in needed:
                # Another name for a leaf: its memory may be another one by then, as plain PyTorch would not notice.
                handle = pack(tensor if leave else tensor.detach())
                if value in needed:
                    self._hand_in(value, handle, tensor)

    def _hand_in(self, value: int, handle: Handle, tensor: torch.Tensor, view: ViewRecipe | None = None) -> None:
        """A value is there for each part that will ask for it, by a handle of its own: the last lets go of it."""
        view = view or ViewRecipe.of(tensor)
        first, *others = self._tape.parts_of.get(value, (_NO_PART,))
        self._given[Use(value, first)] = handle, view
        for part in others:
            self._given[Use(value, part)] = self._passage.twin(handle, tensor) or handle, view

    # What autograd saves.

    def _pack(self, tensor: torch.Tensor) -> Any:
        with below_modes(tensor):
            return self._pack_here(tensor)

    def _pack_here(self, tensor: torch.Tensor) -> Handle:
        mode, place = self._mode, self._packed
        self._packed += 1
        if mode is None or in_backward():
            # By somebody who goes through the graph within the call, and whom no tape knows of.
            if mode is not None:
                mode.is_lost = True
            return KeptHandle(tensor)
        self._passage.advance()
        if place >= len(self._tape.saved):
            mode.is_lost = True
        if mode.is_lost:
            return self._passage.save(tensor, _KEEP)
        spot, decision, is_parameter = self._tape.saved[place]
        if spot is None:
            return self._passage.alias(tensor) if self._aliases and not is_parameter else KeptHandle(tensor)
        if not mode.knows(tensor, spot) or mode.place <= self._tape.last_written.get(spot.value, -1):
            # What is saved before the tape's last write to it may never be written so.
            mode.is_lost = True
            return self._passage.save(tensor, _KEEP)
        if decision is not _RECOMPUTE:
            handle = self._passage.save(tensor, decision)
            held = mode.held.pop(spot.value, None)
            if held is not None:
                self._hand_in(spot.value, self._passage.another(handle, *held), held[0])
            return handle
        computed = TapeHandle(self, place, tensor, spot.view, self._passage.nothing(spot.view.device))
        self._alive.add(place)
        return computed

    # What is computed again.

    def compute(self, place: int) -> torch.Tensor:
        """What autograd saved at a place."""
        with self._lock:
            result = self._results.pop(place, None)
            if result is None:
                self._play(place)
                result = self._results.pop(place)
            return result

    def forget(self, place: int) -> None:
        """Nobody will ask for it."""
        # Without the lock: a handle may die within what holds it.
        self._alive.discard(place)
        self._results.pop(place, None)
        # What is handed in stays while a part is computed, and the function itself may yet hang more on it.
        if self._mode is None and self._lock.acquire(blocking=False):
            uses, alive = self._tape.uses, self._alive
            over = [use for use in self._tape.used_by.get(place, ()) if alive.isdisjoint(uses[use])]
            given = [self._given.pop(use, None) for use in over]
            self._lock.release()
            # Handles let go of memory here, and may do anything.
            del given

    def _play(self, place: int) -> None:
        """Compute the part that a place belongs to."""
        mode = self._mode
        if mode is not None:
            # Within the function itself: what it has come to is there.
            self._outside.update(mode.outside)
            self._before = mode.before
        part = self._tape.part(place)
        wanted = [each for each in part if each in self._alive]
        lost = {value for (value, _), (handle, _) in self._given.items() if not handle.is_intact()}
        lost.update(value for value, tracker in self._trackers if tracker.was_written)
        lost.difference_update(self._tape.inputs)
        there = {value for value, _ in self._given}
        there.update(self._before, () if mode is None else mode.held)
        # What the call has not come to.
        lost.update(self._tape.handed_to.get(part[0], frozenset()) - there)
        if lost:
            # What takes their place may hang on what was let go of.
            lost.update(self._tape.handed - there)
        self._passage.was_recomputed = True
        self._passage.ledger.note_unused(self._tape.unused)
        try:
            around = torch._C._DisableTorchDispatch() if mode is not None else self._rerunning()
            with around, self._settings[0].in_force(), self._settings[1].in_force():
                self._tape.play(self._tape.runs(wanted, lost), partial(self._base, part[0]), self._states, self._give)
            self._passage.ledger.recomputed_bytes += storage_bytes(self._made)
        finally:
            self._made.clear()

    def _give(self, place: int, tensor: torch.Tensor) -> None:
        """This was computed again."""
        if place in self._alive:
            self._results[place] = tensor
            self._made.append(tensor)

    def _base(self, part: int, value: int) -> Base:
        """Memory that a part of the tape does not make."""
        before = self._before.get(value)
        if before is not None:
            return Base(before.untyped_storage())
        given = self._given.get(Use(value, part))
        if given is None:
            # In place of what was lost, a part asks for what is another's.
            given = next((given for (each, _), given in self._given.items() if each == value), None)
        if given is not None:
            handle, view = given
            return Base.under(handle.unpack(), view)
        if self._mode is not None and value in self._mode.held:
            return Base(self._mode.held[value][0].untyped_storage())
        return Base(self._outside[value].tensor().untyped_storage())


class TapeHandle:
    """Stands for a tensor that is computed again when it is asked for."""

    __slots__ = ("__weakref__", "_call", "_place", "_tracker", "_version", "_view")

    def __init__(
        self, call: Followed, place: int, tensor: torch.Tensor, view: ViewRecipe, nothing: torch.Tensor
    ) -> None:
        # What the finaliser reads comes first.
        self._call = call
        self._place = place
        self._view = view
        self._version = tensor._version
        self._tracker = tensor.detach()
        self._tracker.data = nothing

    def unpack(self) -> torch.Tensor:
        if self._tracker._version != self._version:
            check_version(self._tracker, self._version, self._view)
        return self._call.compute(self._place)

    def is_intact(self) -> bool:
        return self._tracker._version == self._version

    def __del__(self) -> None:
        self._call.forget(self._place)
