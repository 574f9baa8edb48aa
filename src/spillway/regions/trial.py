"""Whether a pruned re-run may be trusted. See NOTE [ What the trace does not see ] in ``replay.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from spillway.capture.hooks import Pass
from spillway.capture.identity import storage_parts
from spillway.errors import RecomputeError, UnsupportedError
from spillway.regions.calls import Form
from spillway.regions.draft import Draft
from spillway.regions.generators import generators_now
from spillway.regions.kernel_choice import choosing
from spillway.regions.packs import Collected, Enough, Packs
from spillway.regions.proofs import Proofs, fingerprint, same_bits
from spillway.regions.regraph import Collecting
from spillway.regions.replay import Act, Replay, whole
from spillway.regions.script import TapeKey
from spillway.regions.tape import Tape
from spillway.regions.tensors import may_be_seed
from spillway.regions.trace import Trace

_WRONG = (
    "regions run again whole: to run only the operators that are needed gave other bits, or left traces, so some of "
    "what they compute is read unseen: by kernels that do not go through torch's dispatcher, or by hooks that keep "
    "what they see"
)

_NEVER_ALIKE = (
    "no two runs of a region gave the same bits: its kernels add up in any order, as in plain PyTorch, or it draws "
    "random numbers that torch does not know of, which would make its gradients wrong"
)


class Trial:
    """Runs a region again for no other purpose than to see whether the result is right.

    Args:
        function: the region's, called with its tensors.
        trace: of the first run.
        packs: what autograd saved in it.
        proofs: which re-runs of the function were seen to be right.
        passage: the pass that the region belongs to, which takes the note, if it is wrong.
    """

    key: TapeKey | None = None
    """By which calls like this one are told from others, if a tape of them is wanted."""
    writes_at_once: bool | None = None
    """See :meth:`~spillway.regions.script.Script.wants_tape`."""
    unused: Sequence[object] = ()
    """Selectors that decided nothing."""
    is_closed = False
    """See :attr:`~spillway.regions.tape.Tape.is_closed`."""

    def __init__(self, function: Callable[..., Any], trace: Trace, packs: Packs, proofs: Proofs, passage: Pass) -> None:
        self._function = function
        self._trace = trace
        self._packs = packs
        self._proofs = proofs
        self._passage = passage

    def trusted(self, tensors: Sequence[torch.Tensor], acts: list[Act]) -> list[Act]:
        """What to do with each operator: these acts, if they are right, or else all of them again."""
        script = self._proofs.script
        if self._proofs.wrong is None and not script.is_trusted(self._trace, acts, self._packs):
            structure, forms = self._signature(acts)
            if self._proofs.needs_trial(structure, forms):
                self._refuse_capture()
                if self._is_right(tensors, acts):
                    self._proofs.add(structure, forms)
            if self._proofs.wrong is None:
                script.trust(self._trace, acts, self._packs)
        if self._proofs.wrong is None:
            if self.key is not None and script.wants_tape(self.key, self.writes_at_once) and not self._is_captured():
                script.write(self.key, self._tape(tensors))
            return acts
        # Whoever found it out may have been a profile, of whose passes nobody reads the notes.
        self._passage.ledger.note(self._proofs.wrong)
        self._refuse_capture()
        self._check_whole(tensors)
        return whole(self._trace)

    def _refuse_capture(self) -> None:
        """Bits are about to be compared, which a graph that is captured cannot wait for."""
        if self._is_captured():
            raise UnsupportedError(
                "got a region whose re-run has to be compared with its first run while a graph is captured, expected "
                "one that was found right before; run a step like it in the same session, without capturing, first"
            )

    def _is_captured(self) -> bool:
        devices = {form.device for call in self._trace.calls for form in call.forms if isinstance(form, Form)}
        return any(map(self._passage.is_captured, devices))

    def _tape(self, tensors: Sequence[torch.Tensor]) -> Tape | None:
        """A tape of the region, if there is one, and it gives what the function gives."""
        restore = generators_now(tensors)
        try:
            draft = Draft.of(self._function, tensors, self._trace, self._packs)
            if draft is None or not same_bits(draft.prints, draft.played(self._trace)):
                return None
            return replace(draft.tape, unused=self.unused, is_closed=self.is_closed).prepared()
        finally:
            restore()

    def _signature(self, acts: list[Act]) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """By what a re-run is known: its operators, how they hang together and on what types; and the shapes."""
        structure: list[object] = [pack.values for pack in self._packs.all if pack.wanted]
        forms: list[object] = []
        for call, act in zip(self._trace.calls, acts, strict=True):
            # By identity: an overload's hash is a function of Python's, too.
            structure.append((id(call.func), call.reads, call.writes, call.makes, act))
            for form in call.forms:
                if isinstance(form, Form):
                    structure.append(form.dtype)
                    structure.append(form.device)
                    forms.append((form.size, form.stride))
        return tuple(structure), tuple(forms)

    def _is_right(self, tensors: Sequence[torch.Tensor], acts: list[Act]) -> bool:
        """Whether it gives the bits of the first run, or, where these are not known, of a whole one."""
        truth = self._packs.prints()
        is_whole = Act.SKIP not in acts
        if truth is None and is_whole:
            return True
        tried = self._fingerprints(tensors, acts, poisoned=True)
        if truth is None:
            truth = self._fingerprints(tensors, whole(self._trace), poisoned=False)
        if truth is None or tried is None:
            # The re-run is not like the first one: that is seen again when it counts.
            return False
        if same_bits(truth, tried):
            return True
        if is_whole:
            self._check_whole(tensors)
            return True
        self.distrust()
        return False

    def distrust(self) -> None:
        """Nothing is left out any more when the function runs again."""
        self._proofs.wrong = _WRONG
        self._proofs.script.distrust()
        self._passage.ledger.note(_WRONG)

    def _check_whole(self, tensors: Sequence[torch.Tensor]) -> None:
        """Where a re-run was wrong, a whole one must be right, or be made by kernels that are never alike."""
        truth = self._packs.prints()
        if truth is None:
            return
        runs = [self._fingerprints(tensors, whole(self._trace), poisoned=False) for _ in range(2)]
        if runs[0] is None or runs[1] is None or same_bits(truth, runs[0]):
            return
        if not same_bits(runs[0], runs[1]):
            self._passage.ledger.note(_NEVER_ALIKE)
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
        are_random = iter([self._trace.are_random(pack.values) for pack in self._packs.all if pack.told])

        # Who keeps what the function makes holds this: it must not hold the function, or all that is a circle.
        def tell(tensor: torch.Tensor) -> None:
            is_seed = next(are_random) and may_be_seed(tensor)
            prints.extend(None if is_seed else fingerprint(part) for part in storage_parts(tensor))

        replay = Replay(self._trace, acts, tensors, poisoned=lambda device: poisoned)
        replay.watched = []
        collected = Collected(self._packs, tell, ends=True)
        restore = generators_now(tensors)
        try:
            with Collecting(collected, replay).hooks(), replay, choosing(self._trace):
                output = self._function(*tensors)
            collected.end(output)
        except Enough:
            pass
        except Exception:
            # The function may have made another error of ours: TorchScript does.
            if replay.differs is None and not collected.is_told:
                raise
        restore()
        output = None
        if any(storage() is not None for storage in replay.watched):
            # Hooks that keep what they see, say. No fingerprint of a whole run equals none.
            prints.clear()
        return prints if replay.differs is None else None
