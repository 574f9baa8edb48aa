"""The re-run of a region: tried once, replayed, and told to torch. See NOTE [ How a region goes ] in ``region.py``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from spillway.capture.generators import default_generator
from spillway.capture.globals import Globals
from spillway.capture.handles import KeptHandle, unpack
from spillway.capture.hooks import Pass
from spillway.capture.identity import storage_parts
from spillway.capture.proofs import Proofs, fingerprint, same_bits
from spillway.capture.recording import Recording
from spillway.capture.replay import Act, Differs, Replay, acts_of, whole
from spillway.capture.trace import Trace, nbytes_of, tensors_in
from spillway.errors import RecomputeError
from spillway.operators import Choices
from spillway.records import Decision
from spillway.runtime.ledger import Ledger


class _Here(threading.local):
    depth = 0


_here = _Here()


def in_rerun() -> bool:
    """Whether the calling thread runs a region again."""
    return _here.depth > 0


class Pack:
    """One tensor that autograd saved in the first run."""

    __slots__ = ("place", "prints", "told", "values", "wanted")

    def __init__(self, place: int, values: tuple[int, ...]) -> None:
        self.place = place
        """How many operators had run."""
        self.values = values
        self.told = False
        """Whether torch was told of it."""
        self.wanted = False
        """Whether it is to be computed again."""
        self.prints: list[torch.Tensor | None] | None = None
        """Its fingerprints, if they were taken."""


NOT_WANTED = Pack(0, ())
"""Any tensor that torch was not told of: kept, offloaded, or from outside."""


class Rerun:
    """Runs a region again, as often as it is called.

    Args:
        function: the region's, called with its tensors.
        trace: of the first run.
        packs: what autograd saved in the first run.
        passage: the pass that the region belongs to.
        proofs: which re-runs of the function were seen to be right.
        reentrant: whether torch is told nothing, and what is returned counts.
        stops_early: whether a re-run may end with the last tensor that is wanted.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        trace: Trace,
        packs: list[Pack],
        passage: Pass,
        proofs: Proofs,
        *,
        reentrant: bool,
        stops_early: bool,
    ) -> None:
        self._function = function
        self._trace = trace
        self._packs = packs
        self._passage = passage
        self._proofs = proofs
        self._reentrant = reentrant
        self.stops_early = stops_early
        """Whether a re-run may end with the last tensor that is wanted."""
        self._inner_backward = False
        self._globals = Globals.now()
        self.wanted: list[tuple[int, int]] = []
        """What is to be computed again, and how many operators must have run for it."""
        self.acts: list[Act] = []
        """What is done with each operator of the trace."""
        self.output_prints: list[torch.Tensor | None] = []
        """Fingerprints of what the first run of a reentrant region gave."""
        self.output_leaves: list[int] = []
        """Which of the tensors in the function's output are saved after it has returned."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        # The re-run of a reentrant region makes the very graph that backward goes through: regions in it are regions.
        _here.depth += not self._reentrant
        try:
            # What is written again is a copy, but autograd counts on the tensor itself.
            with self._globals.in_force(), _unsafe_preserve_version_counter(self._trace.written_outside()):
                return self._run(tensors)
        finally:
            _here.depth -= not self._reentrant

    def _run(self, tensors: Sequence[torch.Tensor]) -> Any:
        self._passage.was_recomputed = True
        if self._reentrant:
            self._check()
            return self._replayed(tensors, self.acts, None)
        collected = _Collected(self._packs, _tell_torch(), stops_early=self.stops_early, ledger=self._passage.ledger)
        if not self._trace.complete:
            # A backward inside of the region's own first run.
            self._inner_backward = True
        if self._inner_backward:
            output = self._unseen(tensors, collected)
        else:
            self._check()
            if Act.SKIP in self.acts:
                signature = self._signature()
                if self._proofs.needs_trial(signature):
                    self._try(tensors, signature)
            acts = self.acts
            if self._proofs.wrong is not None:
                acts = whole(self._trace)
                self._check_whole(tensors)
            output = self._replayed(tensors, acts, collected)
        self._finish(collected, output)
        return output

    def _finish(self, collected: _Collected, output: Any) -> None:
        """The function has returned."""
        if self.output_leaves and self._trace.complete:
            leaves = list(tensors_in(tree_leaves(output)))
            for index in self.output_leaves:
                collected.add(leaves[index])
        collected.end()

    def _unseen(self, tensors: Sequence[torch.Tensor], collected: _Collected | None) -> Any:
        """Run whole, and without the mode."""
        generators = self._trace.generators.values()
        states = [generator.get_state() for generator, _ in generators]
        written = self._trace.written_bytes()
        now = [content.clone() for content, _ in written]
        try:
            for generator, state in generators:
                generator.set_state(state)
            for content, before in written:
                content.copy_(before)
            with _hooks(collected, None):
                return self._function(*tensors)
        finally:
            for (content, _), latest in zip(written, now, strict=True):
                content.copy_(latest)
            for (generator, _), state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _replayed(self, tensors: Sequence[torch.Tensor], acts: list[Act], collected: _Collected | None) -> Any:
        """Run under the mode; if the run is not like the first one, whole and without it."""
        replay = Replay(self._trace, acts, tensors, reentrant=self._reentrant, poisoned=self._passage.poisons)
        restore = _generators_now(tensors)
        try:
            with _hooks(collected, replay), replay:
                output = self._function(*tensors)
        except Differs:
            output = None
        if replay.differs is None:
            return output
        restore()
        self._passage.ledger.note(f"a region ran again whole: its re-run was not like the first ({replay.differs})")
        if collected is not None:
            # All of it, so that it can be compared before torch is told anything.
            collected.start_anew()
        trace = Trace()
        with Recording(trace, Choices(), None, root=None, draws=False):
            output = self._unseen(tensors, collected)
        if self._reentrant:
            # Other kernels may run with gradients than without: what counts is what they give.
            ours = [fingerprint(part) for part in tensors_in(tree_leaves(output))]
            is_same = same_bits(ours, self.output_prints)
        else:
            # Draws come in the order of all that draws: of what ran otherwise, that is not known to be the same.
            draws = any(call.facts.is_random for call in (*self._trace.calls, *trace.calls))
            is_same = not draws and trace.essence(tensors) == self._trace.essence(None)
        if not is_same:
            raise RecomputeError(
                f"got a re-run that computes something else than the first run ({replay.differs}), expected the same "
                f"operators on what depends on inputs and parameters; leave what is random or changes from run to run "
                f"outside of the region"
            )
        return output

    def _check(self) -> None:
        """What was kept or offloaded, and what the re-run reads and the region did not make, must be as it was."""
        trace = self._trace
        written = [call for call in trace.calls if call.given and not all(each.is_intact() for each in call.given)]
        if written:
            for call in trace.calls:
                if call in written or (call.is_given and call.given is None):
                    # Its output was written after the region had ended: it is computed again.
                    call.decision, call.given = Decision.RECOMPUTE, None
            self.acts = acts_of(trace, self.wanted)
        if not any(outside.changed() for outside in trace.outside.values()):
            return
        read = {
            value for call, act in zip(trace.calls, self.acts, strict=True) if act is Act.RUN for value in call.reads
        } | trace.cast
        for value, outside in trace.outside.items():
            tensor = outside.tensor()
            if value in read and tensor is not None and outside.changed():
                raise RecomputeError(
                    f"got a tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} that was written in place "
                    f"(version {tensor._version}, expected {outside.version}) after a recomputed region had read it, "
                    f"expected it unchanged until backward; write a copy, or save or offload what the region computes "
                    f"from it"
                )

    # The trial. See NOTE [ What the trace does not see ] in replay.py.

    def _signature(self) -> tuple[object, ...]:
        calls = tuple(
            (call.func, call.reads, call.writes, call.makes, act)
            for call, act in zip(self._trace.calls, self.acts, strict=True)
        )
        return (*calls, *(pack.values for pack in self._packs if pack.wanted))

    def _try(self, tensors: Sequence[torch.Tensor], signature: tuple[object, ...]) -> None:
        """Whether a pruned re-run gives the bits of the first run, or, where these are not known, of a whole one."""
        truth: Sequence[torch.Tensor | None] | None = self._first_prints()
        pruned = self._fingerprints(tensors, self.acts, poisoned=True)
        if truth is None:
            truth = self._fingerprints(tensors, whole(self._trace), poisoned=False)
        if truth is None or pruned is None:
            return
        if same_bits(truth, pruned):
            self._proofs.add(signature)
            return
        self._proofs.wrong = (
            "regions run again whole: to run only the operators that are needed gave other bits, or left traces, "
            "so some of what they compute is read unseen: by kernels that do not go through torch's dispatcher, or "
            "by hooks that keep what they see"
        )
        self._passage.ledger.note(self._proofs.wrong)

    def _first_prints(self) -> list[torch.Tensor | None] | None:
        """Fingerprints of the first run; ``None`` for those that could not be taken."""
        prints: list[torch.Tensor | None] = []
        for pack in self._packs:
            if pack.told:
                prints.extend([None] if pack.prints is None or not pack.wanted else pack.prints)
        return prints if any(each is not None for each in prints) else None

    def _check_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        """Where a pruned re-run was wrong, a whole one must be right, or be made by kernels that are never alike."""
        truth = self._first_prints()
        if truth is None:
            return
        runs = [self._fingerprints(tensors, whole(self._trace), poisoned=False) for _ in range(2)]
        if runs[0] is None or runs[1] is None or same_bits(truth, runs[0]) or not same_bits(runs[0], runs[1]):
            return
        raise RecomputeError(
            "got other bits from a re-run of a whole region than from its first run, twice the same ones, expected the "
            "same; some of what it computes is read or written unseen by torch (through NumPy or DLPack, by a kernel "
            "that keeps a workspace): leave that outside of the region"
        )

    def _fingerprints(
        self, tensors: Sequence[torch.Tensor], acts: list[Act], *, poisoned: bool
    ) -> list[torch.Tensor | None] | None:
        """Of what a run gives; ``None`` if it is not like the first."""
        prints: list[torch.Tensor | None] = []

        def tell(tensor: torch.Tensor) -> None:
            prints.extend(fingerprint(part) for part in storage_parts(tensor))

        replay = Replay(self._trace, acts, tensors, reentrant=self._reentrant, poisoned=lambda device: poisoned)
        replay.watched = []
        collected = _Collected(self._packs, tell, stops_early=self.stops_early, ends=True)
        restore = _generators_now(tensors)
        try:
            with _hooks(collected, replay), replay:
                output = self._function(*tensors)
            self._finish(collected, output)
        except (Differs, _Enough):
            pass
        restore()
        output = None
        if any(storage() is not None for storage in replay.watched):
            # Hooks that keep what they see, say. No fingerprint of a whole run equals none.
            prints.clear()
        return prints if replay.differs is None else None


class _Enough(Exception):  # noqa: N818  (no error of anybody's)
    """All that is wanted is there."""


class _Collected:
    """What a re-run has given so far.

    Args:
        packs: what autograd saved in the first run.
        tell: takes the tensors, in order, when all are there.
        stops_early: whether that is at the last one, or when the function has returned.
        ends: whether it ends the run by itself then (torch's own hook raises, if it does so).
        ledger: counts the bytes.
    """

    def __init__(
        self,
        packs: list[Pack],
        tell: Callable[[torch.Tensor], Any],
        *,
        stops_early: bool,
        ends: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self._packs = packs
        self._tell = tell
        self._stops_early = stops_early
        self._ends = ends
        self._last = max((place for place, pack in enumerate(packs) if pack.wanted), default=-1)
        self._place = 0
        self._tensors: list[torch.Tensor | None] = []
        self._is_told = False
        self._ledger = ledger

    def start_anew(self) -> None:
        """The run starts anew, and is to go to its end."""
        self._place = 0
        self._tensors.clear()
        self._stops_early = False

    def add(self, tensor: torch.Tensor) -> None:
        """The run saves a tensor."""
        place, self._place = self._place, self._place + 1
        if self._is_told or place >= len(self._packs):
            return
        pack = self._packs[place]
        if pack.wanted:
            self._tensors.append(tensor)
        elif pack.told:
            self._tensors.append(None)
        if place == self._last and self._stops_early:
            self._tell_all()

    def wants(self) -> bool:
        """Whether the next one is wanted."""
        return self._place < len(self._packs) and self._packs[self._place].wanted

    def end(self) -> None:
        """The function has returned, and its output was saved."""
        if not self._is_told:
            self._tell_all()

    def _tell_all(self) -> None:
        self._is_told = True
        tensors, self._tensors = self._tensors, []
        if self._ledger is not None:
            self._ledger.recomputed_bytes += sum(nbytes_of(tensor) for tensor in tensors if tensor is not None)
        # Of what was kept after all, torch counts that it came by; what comes after the last that is wanted is such.
        tensors.extend(None for pack in self._packs[self._place :] if pack.told)
        for tensor in tensors:
            self._tell(tensor if tensor is not None else torch.empty(0))
        if self._ends:
            raise _Enough


class _Graph:
    """What the graph of a reentrant re-run saves: of bytes for which a copy stands, that copy."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def pack(self, tensor: torch.Tensor) -> KeptHandle:
        if type(tensor) is not torch.Tensor:
            return KeptHandle(tensor)
        with torch._C._DisableTorchDispatch():
            return KeptHandle(self._replay.instead(tensor))


class _Absent:
    """What the graph of a re-run saves of tensors that nobody wants."""

    __slots__ = ("_replay",)

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def unpack(self) -> torch.Tensor:
        self._replay.differs = "a backward inside of the region asks for what was not computed"
        raise Differs(self._replay.differs)


def _hooks(collected: _Collected | None, replay: Replay | None) -> AbstractContextManager[object]:
    if collected is None:
        return nullcontext() if replay is None else saved_tensors_hooks(_Graph(replay).pack, unpack)

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Absent:
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

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: torch.Tensor | _Absent) -> torch.Tensor:
    return packed.unpack() if isinstance(packed, _Absent) else packed


def _tell_torch() -> Callable[[torch.Tensor], object]:
    """The hook of ``torch.utils.checkpoint`` that takes what a re-run saves."""
    hooks = _top_saved_tensors_default_hooks(True)
    assert hooks is not None
    pack: Callable[[torch.Tensor], object] = hooks[0]
    return pack


def _generators_now(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Gives what sets the generators back to where they are now."""
    generators = [default_generator(device) for device in {torch.device("cpu"), *(each.device for each in tensors)}]
    states = [generator.get_state() for generator in generators]

    def restore() -> None:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    return restore
