"""A call of a function at whose operators nobody looks, and which runs again in backward.

NOTE [ Unwatched calls ]

To look at each operator takes the host several times as long as to queue it. In forward, where the device has the least
to do, it then waits for the host. So the first run of a function that has a tape is not looked at: what is kept, sent
away or computed again goes by the order in which autograd saves things, as on the tape.

But nobody has seen then that it did what is on the tape, so the tape cannot stand for it. Backward runs the function
itself again, with its generators, settings and arguments as they were. If all of it is computed again, that is all.
Otherwise operators are looked at, in backward, where the device has more to do: what is on the tape and of no use to
anybody is left out, and what was preserved is handed in (``retracing.py``). As soon as an operator is not the tape's
next one, the function runs anew, whole. Before there is anything to leave out, nobody looks, nor once there is nothing
more, and the function holds nothing of what was left out or handed in: that runs as it is. So a function that does
something else than in the call before, and does that in both of its runs, is right.

Whether both runs did the same is seen by their values: of what autograd saves at last of what is computed again (of
what all the rest goes into) sums are taken in the first run and in the re-run
(:func:`~spillway.regions.proofs.sums`). The device compares them, and is not waited for: that they differed is told as
soon as it is known (:mod:`~spillway.regions.verdicts`).

What all the rest goes into need not show every difference of it: behind a gate that is zero, or a rounding, may be
none. So each function has a call now and then of which all is compared; and what operators give that hide differences
by their nature is followed no further (``showing.py``). Which parameters are saved, and in which forms, is compared in
each call, on the host.

Where what is saved is like nothing that the tape has next, or a buffer was written, the rest of it is kept, and the
function's outputs are compared instead. Buffers that the first run wrote are written once. A buffer that somebody else
has written since is no more what the first run may have read: a second run that reads it is refused.

Autograd owns the handles, and these own the call, which owns what the function is called with, and what is handed in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import length_hint
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.dynamo import untraced
from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass, in_backward
from spillway.capture.identity import ViewRecipe
from spillway.capture.keeping import Keeping
from spillway.errors import RecomputeError
from spillway.records import Decision
from spillway.regions.call_handle import CallHandle
from spillway.regions.generators import drawing, states_of
from spillway.regions.globals import Ambience
from spillway.regions.inputs import hook_for
from spillway.regions.outsiders import Outsiders
from spillway.regions.packs import Enough
from spillway.regions.proofs import sums
from spillway.regions.refusing import Refusing
from spillway.regions.rerun import rerunning, sums_of
from spillway.regions.resaved import Resaved, Shown, identity_of
from spillway.regions.retracing import Retracing
from spillway.regions.steps import Fate, Foreseen
from spillway.regions.tape import Base, Tape
from spillway.regions.tensors import PLAIN, below_modes, storage_bytes
from spillway.regions.verdicts import Verdicts, differed

_KEEP = Decision.KEEP
_OUTSIDE, _PRESERVED, _PARAMETER = Fate.OUTSIDE, Fate.PRESERVED, Fate.PARAMETER
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class Unwatched:
    """One call. See NOTE [ Unwatched calls ].

    Args:
        function: what runs again; called with the function's tensors.
        tape: what it did before.
        passage: the pass that the call belongs to.
        inputs: what is done with the function's tensors; ``None``: what the hooks around do.
        verdicts: takes the comparisons.
        label: names the function.
        aliases: whether what comes from outside may have been sent away by the pass.
        lose: is called if it turns out that the call did something else than is on the tape.
        buffers: of the function's module.
        compares_all: whether all that is computed again is compared, and not only what the rest of it goes into.
    """

    _restore: Callable[[], None]
    """Sets generators to where they were."""
    _is_running = False
    _is_computing = False
    _is_like = True
    """Whether autograd has saved what is on the tape, so far."""
    _outputs: list[torch.Tensor | None] | None = None
    """Sums of what the first run gave, if it saved something else."""

    def __init__(
        self,
        function: Callable[..., Any],
        tape: Tape,
        passage: Pass,
        inputs: Decision | None,
        verdicts: Verdicts,
        *,
        label: str,
        aliases: bool,
        lose: Callable[[], object],
        buffers: Sequence[torch.Tensor],
        compares_all: bool,
    ) -> None:
        self._function = function
        self._tape = tape
        self._passage = passage
        self._inputs = inputs
        self._verdicts = verdicts
        self._label = label
        self._lose = lose
        self._buffers = [(buffer, _version_of(buffer)) for buffer in buffers]
        self._others: list[tuple[weakref.ref[torch.Tensor], int]] = []
        """Those that the first run did not write."""
        self._ambience = Ambience.now()
        self._tensors: list[tuple[Any, bool, int]] = []
        """Handles of the function's tensors, whether these need gradients, and where they begin in their memory."""
        self._keeping = Keeping(passage)
        self._given: dict[int, tuple[Handle, ViewRecipe]] = {}
        """What is handed in to the re-run, by its values, and how it lay."""
        self._compared = tape.showing.compared if compares_all else tape.showing.last
        self._rest = list(tape.foreseen)
        """What autograd is to save, while the function runs and has saved nothing else."""
        self._outsiders = Outsiders(passage, aliases=aliases)
        self._parameters: dict[int, int] = {}
        """Which ones the first run saved, by their places."""
        self._sums: dict[int, Shown] = {}
        """Of what the first run saved at some places."""
        self._lock = threading.RLock()
        self._alive: set[int] = set()
        """Places of what somebody may ask for."""
        self._results: dict[int, torch.Tensor] = {}

    def run(self, first: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        """What the function gives, and whether it saved all that is on the tape, and nothing else.

        Args:
            first: runs it the first time, with the caller's own arguments.
            tensors: its tensors.
        """
        # What is known by now need not wait, nor what leaves: it was there before the function.
        self._verdicts.send()
        self._verdicts.read()
        self._restore = states_of(self._tape.generators)
        with below_modes():
            pack = hook_for(self._inputs, self._passage)
            self._tensors = [(pack(tensor), tensor.requires_grad, int(tensor.storage_offset())) for tensor in tensors]
            self._passage.flush()
        for tensor, (handle, _, _) in zip(tensors, self._tensors, strict=True):
            # What has not left by now will not.
            self._outsiders.know(tensor, handle)
        following = iter(self._rest)
        self._is_running, output = True, None
        try:
            with saved_tensors_hooks(self._packing(following.__next__), unpack):
                output = first()
        finally:
            self._is_running, is_over = False, not length_hint(following)
            self._outsiders.clear()
            with below_modes():
                self._passage.flush()
            self._keeping.end(output)
        after = [(buffer, version, _version_of(buffer)) for buffer, version in self._buffers]
        self._buffers = [(buffer, version) for buffer, version, now in after if now != version]
        self._others = [(weakref.ref(buffer), now) for buffer, version, now in after if now == version]
        is_whole = self._is_like and is_over and not self._buffers
        if not is_whole and self._alive:
            self._outputs = sums_of(output)
        return output, is_whole

    # What autograd saves.

    def _packing(self, follow: Callable[[], Foreseen]) -> Callable[[torch.Tensor], Any]:
        """The hook, which is short, since the host comes by for each tensor: what it reads is at hand.

        Args:
            follow: gives what is to be saved next.
        """
        passage, compared, alive = self._passage, self._compared, self._alive
        leaving = passage.waiting

        def pack(tensor: torch.Tensor) -> Any:
            if _graph_task() != -1:
                return self._pack_another(tensor)
            try:
                foreseen = follow()
            except StopIteration:
                return self._pack_another(tensor)
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            place, fate, spot, _, _ = foreseen
            if fate is _PARAMETER:
                return self._pack_parameter(tensor, place)
            if fate is _OUTSIDE:
                return self._outsiders.pack(tensor)
            if tensor.shape != spot.size or tensor.dtype is not spot.dtype or type(tensor) not in PLAIN:
                return self._pack_another(tensor)
            if fate is _PRESERVED:
                return self._pack_preserved(tensor, foreseen)
            if place in compared:
                self._show(tensor, place)
            alive.add(place)
            return CallHandle((self, place))

        return pack

    def _show(self, tensor: torch.Tensor, place: int) -> None:
        """Something that is compared."""
        with below_modes():
            found = sums(tensor)
            if found is not None:
                self._sums[place] = Shown(found, tensor.stride())

    def _pack_preserved(self, tensor: torch.Tensor, foreseen: Foreseen) -> Handle:
        """What is kept, or leaves."""
        place, _, spot, decision, is_shown = foreseen
        recipe = spot.view
        if not recipe.is_of(tensor):
            return self._pack_another(tensor)
        with below_modes():
            handle: Handle
            if decision is _KEEP:
                handle = self._keeping.keep(tensor, place, self._tape.kept_bytes)
            else:
                self._passage.advance()
                handle = self._passage.save_made(tensor, recipe, decision)
            if is_shown:
                # What stays is there for both of them.
                given = handle if type(handle) is KeptHandle else self._passage.another(handle, tensor, decision)
                self._given[spot.value] = given, recipe
            return handle

    def _pack_parameter(self, tensor: torch.Tensor, place: int) -> Handle:
        """One of the function's own, or a buffer, which nobody sends away."""
        identity = identity_of(tensor)
        if identity is not None:
            self._parameters[place] = identity
        if _modes() == 0:
            return KeptHandle(tensor)
        with below_modes(tensor):
            return KeptHandle(tensor)

    def _pack_another(self, tensor: torch.Tensor) -> Handle:
        """Something that is not on the tape, or comes after such."""
        self._is_like = False
        self._rest.clear()
        if not self._is_running or in_backward():
            # By somebody who goes through the graph within the call, and whom no tape knows of.
            return KeptHandle(tensor)
        with below_modes(tensor):
            self._passage.advance()
            return self._passage.save(tensor, _KEEP)

    # What is computed again.

    def compute(self, place: int) -> torch.Tensor:
        """What autograd saved at a place."""
        with self._lock:
            if self._is_computing:
                raise RecomputeError(
                    f"got a backward through the graph of the first run of {self._label} when it ran again, expected "
                    f"one through that of the run itself; do not keep a graph for the function's next run"
                )
            if place not in self._results:
                self._is_computing = True
                try:
                    self._again()
                finally:
                    self._is_computing = False
            return self._results.pop(place)

    def forget(self, place: int) -> None:
        """Nobody will ask for it."""
        # Without the lock: a handle may die within what holds it.
        self._alive.discard(place)
        self._results.pop(place, None)
        uses = self._tape.used_by.get(place)
        if uses and self._given and not self._is_running and self._lock.acquire(blocking=False):
            # What is computed hangs on all that is handed in.
            over = [] if self._is_computing else uses
            users = self._tape.users
            given = [self._given.pop(value, None) for value, _ in over if self._alive.isdisjoint(users[value])]
            self._lock.release()
            del given

    @untraced
    def _again(self) -> None:
        passage, tape = self._passage, self._tape
        passage.was_recomputed = True
        passage.ledger.note_unused(tape.unused)
        alive = self._alive.copy()
        until = None if self._outputs is not None else max(alive | self._sums.keys())
        tensors = [_argument(handle, requires_grad) for handle, requires_grad, _ in self._tensors]
        packs = None
        written = [
            (buffer, version)
            for reference, version in self._others
            if (buffer := reference()) is not None and _version_of(buffer) != version
        ]
        # Where the function has failed, some of it was never saved.
        is_intact = tape.handed <= self._given.keys() and all(each.is_intact() for each, _ in self._given.values())
        # What has left without its memory's first bytes lies elsewhere when it is back.
        is_there = all(tensor.storage_offset() == at for tensor, (_, _, at) in zip(tensors, self._tensors, strict=True))
        with drawing:
            if self._outputs is None and not tape.is_whole and is_intact and is_there and not written:
                mode = Retracing(tape, tensors, self._base)
                packs = self._run_again(tensors, alive, until, mode)
                if packs is None and mode.looks_from >= 0:
                    tape.look_early()
                elif packs is None:
                    self._lose()
            if packs is None:
                refusing = Refusing(written) if written else None
                with nullcontext() if refusing is None else refusing:
                    packs = self._run_again(tensors, alive, until, None)
                if refusing is not None:
                    refusing.check()
        assert packs is not None
        if packs.is_other:
            raise differed([self._label])
        results = packs.take()
        passage.ledger.recomputed_bytes += storage_bytes(results.values())
        for differs in packs.differ():
            self._verdicts.add(self._label, differs)
        for place, tensor in results.items():
            if place in self._alive:
                self._results[place] = tensor

    def _run_again(
        self, tensors: Sequence[torch.Tensor], alive: set[int], until: int | None, mode: Retracing | None
    ) -> Resaved | None:
        """Run the function; ``None``: under the mode, it was seen to do something else."""
        packs = Resaved(alive, until, self._sums, self._parameters, self._tape.saved, mode)
        restore = states_of(self._tape.generators)
        # What the first run wrote is not to be written twice.
        written = [(buffer, buffer.clone()) for buffer, _ in self._buffers]
        output = None
        try:
            self._restore()
            with (
                rerunning(),
                self._ambience.in_force(),
                torch.enable_grad(),
                saved_tensors_hooks(packs.pack, packs.unpack),
            ):
                try:
                    if mode is not None and mode.looks_from < 0:
                        mode.look()
                    output = self._function(*tensors)
                finally:
                    if mode is not None:
                        mode.leave()
            if self._outputs is not None:
                packs.compare_outputs(self._outputs, output)
        except Enough:
            pass
        except Exception:
            # The function may have made another error of ours.
            if not (packs.has_ended or (mode is not None and mode.is_lost)):
                raise
        finally:
            packs.end()
            restore()
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffer for buffer, _ in written)):
                for buffer, content in written:
                    buffer.copy_(content)
        del output
        # Under the mode, what was handed out unwritten is nobody's.
        return None if mode is not None and (mode.is_lost or packs.is_other or mode.is_kept) else packs

    def _base(self, value: int) -> Base:
        """Memory of what was preserved."""
        handle, view = self._given[value]
        return Base.under(handle.unpack(), view)


def _argument(handle: Any, requires_grad: bool) -> torch.Tensor:
    """One of the function's tensors, by its handle."""
    tensor: torch.Tensor = handle.unpack()
    if tensor.requires_grad:
        # A leaf itself.
        return tensor
    with below_modes(tensor), torch.enable_grad():
        # Not a leaf, which it was not: of leaves, casts are taken for autocast's own.
        alias = tensor.detach().requires_grad_(requires_grad)
        return alias.view_as(alias)


def _version_of(buffer: torch.Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version
