"""A recomputed region: one call of a function whose saved tensors are mostly computed again.

NOTE [ How a region goes ]

``torch.utils.checkpoint`` runs the function, and runs it again when backward asks; it sees to random generators,
autocast, nesting and early stop. What it runs is :meth:`Region.run`, which does more, inside of torch's own hooks:

First run
    Under a mode that writes the trace (``recording.py``), and under hooks of our own, which pass on to torch's what is
    to be computed again. A saved tensor that is kept or offloaded gets a handle as anywhere else, and torch never hears
    of it; neither does it of parameters, nor of what comes from outside and is alive anyway. When the function has
    returned, it is settled which operators must run again, and what these need handed in gets handles too.

Re-run
    Under the mode of ``replay.py``. What is saved is collected, and told to torch all at once when the last tensor that
    torch waits for is there (torch then stops the run). So if an operator turns out to differ from the first run's,
    nothing has been told yet, and the function runs again, whole.

NOTE [ What holds what ]

Autograd owns the handles; a handle that is to be computed owns torch's holder and hook, which own torch's frame, which
owns the region, which owns the handles for its re-run. A region never owns a hook of torch's, nor any of its outputs.

NOTE [ Gradients inside ]

A function may take a gradient of what it computes. Autograd then asks for what it saved while the first run goes on.
The function runs again as far as it has come, is compared operator by operator, and what it saved until then is kept
from there on; so is all that it saves later. So such a call never runs again when it has ended. A region around it has
the gradient inside, too: it is told first, since what is computed again here is no part of what it did.

From then on the function is known (:attr:`~spillway.regions.proofs.Proofs.takes_gradients`), and is called plainly.

NOTE [ The reentrant mode ]

It runs the function without autograd first, so nothing is known of what autograd will save: in the re-run every
operator runs but those whose outputs were kept or offloaded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.dynamo import may_run_compiled
from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass, in_backward
from spillway.capture.identity import is_parameter
from spillway.operators import Choices
from spillway.records import Decision
from spillway.regions.calls import Call
from spillway.regions.computed import ComputedHandle, Hooks, WatchedHandle
from spillway.regions.kernel_choice import KernelChoice
from spillway.regions.observer import Observer
from spillway.regions.packs import NOT_WANTED, Enough, Pack, Packs
from spillway.regions.proofs import Proofs, fingerprint
from spillway.regions.python_state import PythonState
from spillway.regions.recording import Recording
from spillway.regions.replay import Act
from spillway.regions.replayed_function import ReplayedFunction
from spillway.regions.rerun import Rerun
from spillway.regions.script import TapeKey
from spillway.regions.tensors import aliases_of, below_modes, is_strided, may_be_seed, tensors_in
from spillway.regions.trace import Trace

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Surroundings(enum.Enum):
    """How a region saves what it did not make."""

    KEEP = "keep"
    """It is alive anyway."""
    PASS = "pass"
    """The pass around may have sent it away: then it is that copy."""
    TORCH = "torch"
    """As torch does, which asks whoever saved the region's inputs: another region, or somebody's hooks."""


def surroundings() -> Surroundings:
    """By the hooks that are in force where a region is called."""
    hooks: tuple[object, object] | None = _top_saved_tensors_default_hooks(True)
    if hooks is None:
        return Surroundings.KEEP
    return Surroundings.PASS if isinstance(getattr(hooks[0], "__self__", None), Pass) else Surroundings.TORCH


class Region:
    """One call of a recomputed function.

    Args:
        function: what runs; called with the tensors that :meth:`run` is given.
        first: runs it the first time, with the caller's own arguments.
        choices: what is kept and offloaded.
        passage: the pass that the region belongs to.
        proofs: which re-runs of the function were seen to be right.
        state: the function's Python state, before the first run.
        root: the module that paths of submodules begin below, if there is one.
        label: names the function in messages.
        surroundings: how it saves what it did not make.
        reentrant: see NOTE [ The reentrant mode ].
        stops_early: whether a re-run ends with the last tensor that is wanted.
        draws: whether random numbers are to be the same in the re-run.
        drops_output: whether the output, too, can be computed again: :attr:`outputs` then has handles of it.
        observer: who watches the first run.
        key: by which calls of the function are told from others, if a tape of them is wanted.
        writes_at_once: whether one is written even if no such call came before; ``None``: only if one did.
    """

    def __init__(
        self,
        function: ReplayedFunction,
        first: Callable[[], Any],
        choices: Choices,
        passage: Pass,
        proofs: Proofs,
        state: PythonState,
        *,
        root: torch.nn.Module | None,
        label: str,
        surroundings: Surroundings,
        reentrant: bool,
        stops_early: bool,
        draws: bool,
        drops_output: bool,
        observer: Observer | None = None,
        key: TapeKey | None = None,
        writes_at_once: bool | None = None,
    ) -> None:
        self._key = key
        self._writes_at_once = writes_at_once
        self._first: Callable[[], Any] | None = first
        self._choices = choices
        self._passage = passage
        self._surroundings = surroundings
        self._root = root
        self._label = label
        self._reentrant = reentrant
        self._draws = draws
        self._drops_output = drops_output
        self._observer = observer
        self._trace = Trace(reentrant=reentrant)
        self._packs = Packs(stops_early=stops_early)
        self._rerun = Rerun(function, self._trace, self._packs, passage, proofs)
        self._torch: Hooks | None = None
        self._handles: dict[int, Handle] = {}
        self._early: dict[int, Handle] = {}
        """Handles for the re-run of what leaves already."""
        self._pending: list[tuple[Pack, ComputedHandle, torch.Tensor]] = []
        self._unknown: list[tuple[Pack, ComputedHandle, torch.Tensor]] = []
        self._proofs = proofs
        self._script = proofs.script
        self._state = state
        self._takes_prints = proofs.is_untried and not reentrant
        self.outer: Callable[[], Region | None] = _none
        """A weak reference to the region around this one."""
        self._computed: list[tuple[Pack, ComputedHandle]] = []
        """All that torch was told of, until the first run has ended."""
        self.has_inner = False
        """Whether another region, a backward, or FSDP's own work was in its first run."""
        self._last_node = 0
        self._saving_node = 0
        self.outputs: list[tuple[torch.Tensor, ComputedHandle]] = []
        """The outputs with the handles by which they can be computed again; whoever reads it clears it."""
        self.error: BaseException | None = None
        """What the function raised in its first run. Torch is not told: it would leave its hooks behind."""

    def run(self, *tensors: torch.Tensor) -> Any:
        """The function, for the first time or again. See NOTE [ How a region goes ]."""
        first, self._first = self._first, None
        if first is None:
            self._passage.ledger.note_unused(self._choices.unused())
            self._tell_outer()
            try:
                return self._rerun(tensors)
            except Enough:
                self._keep_made()
                return None
        try:
            return self._run_first(first, tensors)
        except BaseException as error:  # noqa: BLE001  (raised again by whoever called torch's checkpoint)
            self.error = error
            return None

    def input_before(self, place: int) -> torch.UntypedStorage | None:
        """The storage of an input as it was before the region wrote it, if it did."""
        values = self._trace.inputs[place] if place < len(self._trace.inputs) else ()
        outside = self._trace.outside.get(values[0]) if len(values) == 1 else None
        before = None if outside is None else outside.before
        return None if before is None else before.clone().untyped_storage()

    def _run_first(self, first: Callable[[], Any], tensors: tuple[torch.Tensor, ...]) -> Any:
        self._trace.take_inputs(tensors)
        recording = Recording(
            self._trace,
            self._choices,
            self._on_call if self._choices.saved_by else None,
            root=self._root,
            draws=self._draws,
            # What saves may change its mind about a call that has ended.
            script=() if self._choices.saved_by else self._script.calls,
        )
        choice = None if may_run_compiled(self._root) else KernelChoice(reentrant=self._reentrant)
        choosing = nullcontext() if choice is None else choice
        if choice is not None:
            self._trace.chosen = choice.results
        if self._reentrant:
            with recording, choosing:
                output = first()
            self._chose(choice)
            self._end(output)
            return output
        self._torch = _top_saved_tensors_default_hooks(True)
        try:
            watching = nullcontext() if self._observer is None else self._observer.watching(self._trace)
            pack = self._pack if self._observer is None else self._pack_watched
            with saved_tensors_hooks(pack, unpack), recording, watching, choosing:
                output = first()
            self._chose(choice)
            self.has_inner |= recording.hides
            if self._trace.takes_gradient:
                self._keep_all()
                self._proofs.takes_gradients = True
                self._passage.ledger.note(keeps_note(self._label))
            elif self._drops_output:
                self._save_outputs(output)
            self._end(output)
        finally:
            self._torch = None
            self._computed.clear()
            self._pending.clear()
            self._unknown.clear()
            self._handles.clear()
            self._early.clear()
        return output

    # See NOTE [ Gradients inside ].

    def _keep_all(self) -> None:
        """The function takes a gradient inside: nothing of this call is to be computed again when it has ended."""
        self._trace.takes_gradient = self.has_inner = True
        handle = next((handle for pack, handle in reversed(self._computed) if pack.wanted), None)
        if handle is not None:
            handle.compute_anew()

    def _keep_made(self) -> None:
        made, self._rerun.made_inside = self._rerun.made_inside, []
        if not made:
            return
        for (pack, handle), tensor in zip(self._computed, made, strict=True):
            if pack.wanted:
                pack.wanted = False
                handle.forgo(KeptHandle(tensor))

    def _tell_outer(self) -> None:
        outer = self.outer()
        if outer is not None:
            outer.has_gradient_inside()

    def has_gradient_inside(self) -> None:
        """Something inside is asked for, while the first run goes on or later."""
        if not self._trace.complete:
            self._tell_outer()
            self._keep_all()

    def _chose(self, choice: KernelChoice | None) -> None:
        """See NOTE [ Kernels under a mode ]. No tape has what was run with modes off."""
        if choice is not None and choice.results:
            self._key = None

    # Hooks of the first run.

    def _pack(self, tensor: torch.Tensor) -> Any:
        with below_modes(tensor):
            return self._pack_here(tensor)

    def _pack_watched(self, tensor: torch.Tensor) -> Any:
        node = _next_node()
        if node > self._saving_node:
            self._saving_node = node
            self._packs.saves_at.append(len(self._trace.calls))
        return self._pack(tensor)

    def _pack_here(self, tensor: torch.Tensor) -> Any:
        if in_backward():
            self.has_inner = True
        else:
            self._passage.advance()
        trace = self._trace
        # Torch's checkpoint asks for its shape, which a strided nested tensor has not.
        if trace.is_in_gradient() or (tensor.is_nested and tensor.layout is torch.strided):
            self._packs.add(NOT_WANTED)
            return KeptHandle(tensor)
        find = trace.values.find
        values: tuple[int, ...]
        if type(tensor) is torch.Tensor:
            # Most are, and were made in the region.
            found = find(tensor)
            values = () if found is None else (found,)
        else:
            values = tuple([value for part in tensors_in((tensor,)) if (value := find(part)) is not None])
        makers = [trace.makers[value] for value in values if value in trace.makers]
        if not makers or type(tensor) is not torch.Tensor:
            if is_parameter(tensor):
                self._packs.add(NOT_WANTED)
                return KeptHandle(tensor)
            if values and not makers and self._is_alive_anyway(values):
                self._packs.add(NOT_WANTED)
                self._packs.outside.update(dict.fromkeys(values, len(trace.calls)))
                return self._passage.alias(tensor) if self._surroundings is Surroundings.PASS else KeptHandle(tensor)
        pack = Pack(len(trace.calls), values)
        decision = self._decided(pack, makers)
        if decision is not Decision.RECOMPUTE:
            self._packs.add(NOT_WANTED)
            return self._save(tensor, pack, decision)
        self._packs.add(pack)
        handle = self._to_be_computed(tensor, pack)
        self._computed.append((pack, handle))
        if not values:
            self._unknown.append((pack, handle, tensor))
        elif self._choices.saved_by:
            self._pending.append((pack, handle, tensor))
        return handle

    def _is_alive_anyway(self, values: tuple[int, ...]) -> bool:
        """Whether what comes from outside need not be computed, or be asked for, again."""
        if not self._trace.targets.isdisjoint(values):
            self._trace.values.opaque = "a tensor of compiled code"
            return False
        return self._surroundings is not Surroundings.TORCH and self._trace.casts.isdisjoint(values)

    def _decided(self, pack: Pack, makers: list[Call]) -> Decision:
        """What becomes of what was packed."""
        if len(makers) == 1:
            (maker,) = makers
            if maker.decision is not Decision.RECOMPUTE:
                return maker.decision
        elif makers and all(maker.is_given for maker in makers):
            return makers[0].decision
        if makers and self._choices.saved_by:
            last = self._trace.calls[-1]
            # An operator saves its own output under the number of its own node; the next one has a higher number.
            saving = self._choices.by_saving(last.func) if _next_node() == self._last_node else None
            if saving is not None and makers == [last] and last.held is not None:
                last.decision = saving
                return saving
        return Decision.RECOMPUTE

    def _to_be_computed(self, tensor: torch.Tensor, pack: Pack) -> ComputedHandle:
        assert self._torch is not None
        pack.told = pack.wanted = True
        if self._takes_prints and not (may_be_seed(tensor) and self._trace.are_random(pack.values)):
            pack.prints = [fingerprint(part) for part in tensors_in((tensor,))]
        nothing = self._passage.nothing(tensor.device)
        if self._observer is None:
            return ComputedHandle(tensor, self._torch, nothing)
        handle = WatchedHandle(tensor, self._torch, nothing)
        handle.tell = partial(self._observer.asked, pack.place)
        return handle

    def _save(self, tensor: torch.Tensor, pack: Pack, decision: Decision) -> Handle:
        handle = self._passage.save(tensor, decision)
        for value in pack.values:
            self._handles[value] = handle
            if decision is not Decision.KEEP:
                self._let_go(value, handle, decision)
        return handle

    def _let_go(self, value: int, handle: Handle, decision: Decision) -> None:
        """What leaves is not to be held until the region has ended: the re-run's handle of it is made now."""
        maker = self._trace.makers.get(value)
        if maker is None or maker.held is None or maker.is_settled:
            return
        place = maker.makes.index(value)
        held = maker.held[place]
        if held is not None:
            self._early[value] = self._passage.another(handle, held, decision)
            maker.held[place] = None

    def _on_call(self, call: Call, new: list[torch.Tensor]) -> None:
        """For ``saved_by``: an operator ran; what was packed right before is what it saved of its inputs."""
        self._last_node = _next_node()
        decision = self._choices.by_saving(call.func)
        if decision is not None:
            if call.held is None:
                call.held = [*aliases_of(new)]
            # Below autograd, where a mode is called, aliases do not share the counter of versions unless told to; and
            # what is done here is no operator of an outer region.
            with (
                torch._C._DisableTorchDispatch(),
                torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
            ):
                for pack, handle, tensor in self._pending:
                    # A fake tensor has nothing to save.
                    if pack.values and set(pack.values) <= set(call.reads) and not isinstance(tensor, FakeTensor):
                        self._save_after_all(pack, handle, tensor, decision)
        self._pending.clear()

    def _save_after_all(self, pack: Pack, handle: ComputedHandle, tensor: torch.Tensor, decision: Decision) -> None:
        pack.wanted = False
        pack.decision = decision
        handle.forgo(self._save(tensor, pack, decision))
        (value, *others) = pack.values
        maker = self._trace.makers.get(value)
        if others or maker is None or maker.is_given or value in self._trace.rewritten:
            return
        # What made it need not run either, if its output can be told from what was saved.
        whole = tensor.nbytes == tensor.untyped_storage().nbytes() and not (tensor.is_conj() or tensor.is_neg())
        if whole and maker.plain and maker.makes == (value,) and maker.single:
            form = maker.forms[0]
            maker.decision = decision
            maker.held = [tensor.detach().as_strided(form.size, form.stride, 0)]

    # The end of the first run.

    def _save_outputs(self, output: Any) -> None:
        with torch._C._DisableTorchDispatch():
            for index, tensor in enumerate(tensors_in(tree_leaves(output))):
                values = tuple(value for value in (self._trace.values.find(tensor),) if value is not None)
                if not all(value in self._trace.makers for value in values):
                    continue
                pack = Pack(len(self._trace.calls), values)
                self._packs.add(pack)
                self._packs.output_leaves.append(index)
                self.outputs.append((tensor, self._to_be_computed(tensor, pack)))

    def _end(self, output: Any) -> None:
        """It is settled what runs again, and that gets what it needs handed in."""
        trace = self._trace
        self._root = None
        self._rerun.gave(output)
        self._note_state()
        self._find_unknown()
        trace.settle()
        if self._observer is not None:
            self._observer.ended(trace, self._packs, trace.values_in(output))
            self._observer = None
        wanted = [(value, len(trace.calls)) for value in range(trace.count)] if self._reentrant else self._wanted()
        self._rerun.wanted = wanted
        trace.share()
        self._script.learn(trace)
        acts = self._script.acts(trace, wanted)
        with torch._C._DisableTorchDispatch():
            for call, act in zip(trace.calls, acts, strict=True):
                if call.is_shared:
                    continue
                held, call.held = call.held, None
                if act is Act.GIVE:
                    call.given = [self._give(call, *each) for each in zip(call.makes, held or (), strict=True)]
            self._passage.flush()
        self._rerun.acts = acts
        if self._key is not None and not self.has_inner:
            self._rerun.wants_tape(self._key, self._writes_at_once, self._choices.unused(), is_closed=self._is_closed())

    def _is_closed(self) -> bool:
        """See :attr:`~spillway.regions.tape.Tape.is_closed`."""
        held = {id(tensor.untyped_storage()) for tensor in self._state.tensors() if is_strided(tensor)}
        for outside in self._trace.outside.values():
            storage = outside.storage()
            if not (outside.is_input or outside.is_parameter or (storage is not None and id(storage) in held)):
                return False
        return True

    def _note_state(self) -> None:
        """See NOTE [ Python state ]: calls of a function that changes some are not told apart by their tensors."""
        if not self._state.changes:
            return
        self._key = None
        self._passage.ledger.note(
            f"{self._label}: its forward changes Python state ({self._state.changed_names()}). Each recomputation "
            f"starts from the state before the forward, and puts the later state back."
        )
        find = self._trace.values.find
        self._state.release(lambda tensor: find(tensor) is not None)

    def _find_unknown(self) -> None:
        """Of what was saved before any operator had it: whether it comes from outside, or was made unseen."""
        trace = self._trace
        for pack, handle, tensor in self._unknown:
            with torch._C._DisableTorchDispatch():
                values = [trace.values.find(part) for part in tensors_in((tensor,))]
            pack.values = tuple([value for value in values if value is not None])
            if None in values or not trace.outside.keys() >= set(pack.values):
                # A compiled function's, say.
                trace.values.opaque = "a tensor that no operator was seen to make, or to read"
            elif self._is_alive_anyway(pack.values):
                pack.wanted = False
                keeps = self._surroundings is not Surroundings.PASS
                with below_modes(tensor):
                    handle.forgo(KeptHandle(tensor) if keeps else self._passage.alias(tensor))

    def _wanted(self) -> list[tuple[int, int]]:
        """What is to be computed again, each with how many operators must have run."""
        calls = self._trace.calls
        last_written = {value: place for place, call in enumerate(calls) if call.writes for value in call.writes}
        if not last_written:
            return [(value, pack.place) for pack in self._packs.all if pack.wanted for value in pack.values]
        wanted: list[tuple[int, int]] = []
        for pack in self._packs.all:
            if not pack.wanted:
                continue
            place = pack.place
            if any(last_written.get(value, -1) >= place for value in pack.values):
                # When the region ends, it is not what was saved: whoever asks for it hears of that from its version.
                pack.prints = None
            if place < len(calls) and not set(pack.values).isdisjoint(calls[place].writes):
                # Saved before its own operator wrote it (rrelu's noise): it is good when that has run.
                place += 1
                self._packs.stops_early = False
            wanted.extend((value, place) for value in pack.values)
        return wanted

    def _give(self, call: Call, value: int, tensor: torch.Tensor | None) -> Handle:
        if tensor is None:
            return self._early[value]
        known = self._handles.get(value)
        return (
            self._passage.save(tensor, call.decision)
            if known is None
            else self._passage.another(known, tensor, call.decision)
        )


def keeps_note(label: str) -> str:
    """What is said of a function that takes a gradient inside."""
    return f"{label} takes a gradient of what it computes. What autograd saves in it is kept, not recomputed."


def _none() -> None:
    return None
