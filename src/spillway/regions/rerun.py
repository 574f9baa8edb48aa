"""The re-run of a region: checked, pruned as far as that may be trusted, and whole where it is not like the first run.

See NOTE [ How a region goes ] in ``region.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError

from spillway.capture.handles import KeptHandle
from spillway.capture.hooks import Pass
from spillway.errors import RecomputeError
from spillway.operators import Choices
from spillway.records import Decision
from spillway.regions.generators import generators_now, put_state, state_now
from spillway.regions.globals import Globals, Numerics
from spillway.regions.kernel_choice import choosing
from spillway.regions.outside import refuse_written
from spillway.regions.packs import Collected, Enough, Packs
from spillway.regions.proofs import Proofs, same_sums, sums
from spillway.regions.recording import Recording
from spillway.regions.regraph import Collecting, Regraph
from spillway.regions.replay import Act, Replay, acts_of, whole
from spillway.regions.replayed_function import ReplayedFunction
from spillway.regions.script import TapeKey
from spillway.regions.tensors import below_modes, is_strided, tensors_in
from spillway.regions.trace import Trace
from spillway.regions.trial import Trial


class _Here(threading.local):
    depth = 0


_here = _Here()


def in_rerun() -> bool:
    """Whether the calling thread runs a region again."""
    return _here.depth > 0


@contextmanager
def rerunning(depth: int = 1) -> Iterator[None]:
    """A context in which it does."""
    _here.depth += depth
    try:
        yield
    finally:
        _here.depth -= depth


class Rerun:
    """Runs a region again, as often as it is called.

    Args:
        function: the region's, called with its tensors.
        trace: of the first run.
        packs: what autograd saved in the first run.
        passage: the pass that the region belongs to.
        proofs: which re-runs of the function were seen to be right.
    """

    def __init__(self, function: ReplayedFunction, trace: Trace, packs: Packs, passage: Pass, proofs: Proofs) -> None:
        self._function = function
        self._trace = trace
        self._packs = packs
        self._passage = passage
        self._trial = Trial(function, trace, packs, proofs, passage)
        self._proofs = proofs
        self._settings = Globals.now(), Numerics.now()
        self.wanted: list[tuple[int, int]] = []
        """What is to be computed again, and how many operators must have run for it."""
        self.acts: list[Act] = []
        """What is done with each operator of the trace."""
        self._given: list[torch.Tensor | None] = []
        self.made_inside: list[torch.Tensor] = []
        """What a run within the first run has made of all that was saved so far."""

    def wants_tape(self, key: TapeKey, at_once: bool | None, unused: Sequence[object], *, is_closed: bool) -> None:
        """Of calls that are told apart in this way, a tape may be written. These selectors decided nothing."""
        self._trial.key, self._trial.writes_at_once, self._trial.unused = key, at_once, tuple(unused)
        self._trial.is_closed = is_closed

    def gave(self, output: Any) -> None:
        """The first run has returned."""
        self._given = sums_of(output)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        # The re-run of a reentrant region makes the very graph that backward goes through: regions in it are regions.
        depth = 0 if self._trace.reentrant else 1
        self._passage.was_recomputed = True
        # What is written again is a copy, but autograd counts on the tensor itself.
        kept = _unsafe_preserve_version_counter(self._trace.written_outside())
        with rerunning(depth), self._settings[0].in_force(), self._settings[1].in_force(), kept:
            return self._regraph(tensors) if self._trace.reentrant else self._collect(tensors)

    def _regraph(self, tensors: Sequence[torch.Tensor]) -> Any:
        """In the reentrant mode, torch is told nothing: what is returned counts."""
        self._check()
        return self._replayed(tensors, self.acts, None)

    def _collect(self, tensors: Sequence[torch.Tensor]) -> Any:
        if not self._trace.complete:
            return self._inside(tensors)
        collected = Collected(self._packs, tell_torch(), ledger=self._passage.ledger)
        self._check()
        output = self._replayed(tensors, self._trial.trusted(tensors, self.acts), collected)
        collected.end(output)
        return output

    def _inside(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run again, whole, as far as the first run has come. See NOTE [ Gradients inside ] in ``region.py``."""
        trace, tell = self._trace, tell_torch()
        trace.takes_gradient = True
        for call in trace.calls:
            if call.is_settled:
                call.given = [KeptHandle(tensor) for tensor in call.held or () if tensor is not None]
        self.made_inside = []

        def keep_and_tell(tensor: torch.Tensor) -> None:
            self.made_inside.append(tensor)
            tell(tensor)

        collected = Collected(self._packs, keep_and_tell, ends=True, stops_early=True, ledger=self._passage.ledger)
        replay = Replay(trace, whole(trace), tensors, poisoned=self._passage.poisons)
        replay.runs_last = self._packs.is_last_written(trace.calls)
        restore = generators_now(tensors)
        trace.is_paused = True
        try:
            with Collecting(collected, replay).hooks(), replay, choosing(trace):
                output = self._function(*tensors)
            collected.end(output)
        except Enough:
            pass
        except Exception:
            # The function may have made another error of ours: TorchScript does.
            if replay.differs is None and not collected.is_told:
                raise
        finally:
            trace.is_paused = False
        if not collected.is_told:
            restore()
            raise RecomputeError(
                f"got a recomputed function that takes a gradient inside, and that computed something else when it ran "
                f"again for this gradient ({replay.differs}), expected the same operators; leave what changes from run "
                f"to run outside of the function, or call it without recompute"
            )
        raise Enough

    def _unseen(self, tensors: Sequence[torch.Tensor], collected: Collected | None) -> Any:
        """Run whole, and without the mode."""
        # A region inside of its own first run may come to know of others.
        generators = list(self._trace.generators.values())
        states = [state_now(generator) for generator, _ in generators]
        written = self._trace.written_bytes()
        now = [content.clone() for content, _ in written]
        try:
            for generator, state in generators:
                put_state(generator, state)
            for content, before in written:
                content.copy_(before)
            with nullcontext() if collected is None else Collecting(collected, None).hooks():
                return self._function(*tensors)
        finally:
            for (content, _), latest in zip(written, now, strict=True):
                content.copy_(latest)
            for (generator, _), state in zip(generators, states, strict=True):
                put_state(generator, state)

    def _replayed(self, tensors: Sequence[torch.Tensor], acts: list[Act], collected: Collected | None) -> Any:
        """Run under the mode; if the run is not like the first one, whole and without it."""
        replay = Replay(self._trace, acts, tensors, poisoned=self._passage.poisons)
        graph = Regraph(replay, self._passage.ledger) if collected is None else Collecting(collected, replay)
        restore = generators_now(tensors)
        replay.watched = []
        output, is_enough = None, False
        try:
            with graph.hooks(), replay, choosing(self._trace):
                output = self._function(*tensors)
        except Enough:
            is_enough = True
        except Exception:
            # The function may have made another error of ours: TorchScript does.
            is_enough = collected is not None and collected.is_told
            if replay.differs is None and not is_enough:
                raise
        if replay.differs is None:
            if collected is not None and _is_kept(replay.watched, output):
                # What the function has left somewhere is to have been written. Torch has been told already.
                self._trial.distrust()
                with saved_tensors_hooks(_detached, _same):
                    self._unseen(tensors, None)
            if is_enough:
                raise Enough
            return output
        restore()
        if replay.was_asked:
            self._proofs.takes_gradients = True
            return self._with_gradients(tensors, collected)
        self._passage.ledger.note(f"a region ran again whole: its re-run was not like the first ({replay.differs})")
        return self._compared(tensors, collected, replay.differs)

    def _with_gradients(self, tensors: Sequence[torch.Tensor], collected: Collected | None) -> Any:
        """Run a function that takes a gradient of its own whole, by its outputs like the first run."""
        if collected is not None:
            collected.start_anew()
        output = self._unseen(tensors, collected)
        if not same_sums(self._given, sums_of(output)):
            raise RecomputeError(
                "A recomputed function takes a gradient inside, and gave other outputs than in its first run. Its "
                "gradients would be wrong. Leave what changes from run to run outside of the function."
            )
        return output

    def _compared(self, tensors: Sequence[torch.Tensor], collected: Collected | None, why: str) -> Any:
        """Run whole, which must give what the first run gave."""
        if collected is not None:
            # All of it is compared before torch is told anything.
            collected.start_anew()
        restore = generators_now(tensors)
        is_same, output = self._whole(tensors, collected)
        if not is_same:
            restore()
            with self._function.on_todays_state() as is_another:
                if is_another:
                    if collected is not None:
                        collected.start_anew()
                    try:
                        is_same, output = self._whole(tensors, collected)
                    except Exception as error:
                        # The first run may have deleted what the function reads.
                        raise _another(why) from error
        if not is_same:
            raise _another(why)
        return output

    def _whole(self, tensors: Sequence[torch.Tensor], collected: Collected | None) -> tuple[bool, Any]:
        """Run whole; whether that gave what the first run gave, and the output."""
        trace = Trace()
        trace.take_inputs(tensors)
        with Recording(trace, Choices(), None, root=None, draws=False), choosing(self._trace):
            output = self._unseen(tensors, collected)
        is_same = same_sums(self._given, sums_of(output))
        if collected is not None:
            # What is saved on the way must be the same too, one by one. Draws come in the order of all that draws: of
            # what ran otherwise, that is not known.
            ran, had_run = trace.calls, self._trace.calls
            draws = any(call.facts.is_random for call in (*had_run, *ran))
            draws = draws and [call.func for call in ran] != [call.func for call in had_run]
            is_same = is_same and not draws and trace.essence() == self._trace.essence()
        return is_same, output

    def _check(self) -> None:
        """What was kept or offloaded, and what the re-run reads and the region did not make, must be as it was."""
        trace = self._trace
        renamed = trace.written_since()
        written = [
            call
            for call in trace.calls
            if call.given and not (renamed.isdisjoint(call.makes) and all(each.is_intact() for each in call.given))
        ]
        if written:
            for call in trace.calls:
                if call in written or (call.is_given and call.given is None):
                    # Its output was written after the region had ended: it is computed again.
                    call.decision, call.given = Decision.RECOMPUTE, None
            self.acts = acts_of(trace, self.wanted)
        if not any(outside.changed() for outside in trace.outside.values()):
            return
        # A view reads nothing.
        # In the reentrant mode the re-run's graph saves what an operator reads, also where its output is handed in.
        acts = zip(trace.calls, self.acts, strict=True)
        runs = [call for call, act in acts if act is Act.RUN or trace.reentrant]
        read = {value for call in runs if not call.is_only_a_view for value in call.reads} | trace.cast
        for value, outside in trace.outside.items():
            # Compiled code makes its buffers anew, and may have used one for several things.
            if value in read and value not in trace.targets and outside.changed():
                refuse_written(outside.tracker, outside.version)


def _another(why: str) -> RecomputeError:
    return RecomputeError(
        f"got a re-run that computes something else than the first run ({why}), expected the same operators on what "
        f"depends on inputs and parameters, and the same output; leave what is random or changes from run to run "
        f"outside of the region"
    )


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    with below_modes(tensor):
        return tensor.detach()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_kept(storages: Sequence[weakref.ref[torch.UntypedStorage]], output: Any) -> bool:
    """Whether somebody else than a function's output has one of these."""
    if all(storage() is None for storage in storages):
        return False
    own = {part.untyped_storage()._cdata for part in tensors_in(tree_leaves(output)) if is_strided(part)}
    alive = (storage() for storage in storages)
    return any(storage is not None and storage._cdata not in own for storage in alive)


def sums_of(output: Any) -> list[torch.Tensor | None]:
    """Those of all tensors that a function gives."""
    with torch._C._DisableTorchDispatch():
        return [sums(part) for part in tensors_in(tree_leaves(output))]


def tell_torch() -> Callable[[torch.Tensor], object]:
    """The hook of ``torch.utils.checkpoint`` that takes what a re-run saves.

    With the last one it ends the run, by an error that the function may catch: by :class:`Enough`, then.
    """
    hooks = _top_saved_tensors_default_hooks(True)
    assert hooks is not None
    pack: Callable[[torch.Tensor], object] = hooks[0]

    def tell(tensor: torch.Tensor) -> object:
        try:
            return pack(tensor)
        except _StopRecomputationError:
            raise Enough from None

    return tell
