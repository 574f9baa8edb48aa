"""One call of a checkpointed function.

NOTE [ A checkpointed call ]

Forward runs the function under a pack hook and without any mode. Autograd gets a :class:`SavedSlot` for each tensor
that it saves, known by its number in the order of saving. The slot holds nothing.

Backward asks for one of the slots. The function then runs again (the *replay*) under a hook that collects the tensors
by the same numbers, with its Python state, random generators, autocast and other settings as they were when forward
began. With the last tensor that is still wanted the replay ends.

The replay is right if the function does the same when it runs again, as for ``torch.utils.checkpoint``. Spillway checks
more of that than torch does: the number, shape, dtype and device of each saved tensor in every call, versions of what
the function reads, and the values themselves in the first call and in samples of the later ones (``learned.py``).

NOTE [ Gradients inside ]

A function may take a gradient of what it computes. Autograd then asks for a slot while forward goes on. The function
is replayed as far as it has come, and is compared. What it saved until then is kept from there on, and all that it
saves later: such a call is not replayed when it has ended. Later calls of the kind are plain.

NOTE [ What holds what ]

Autograd owns the slots. A slot owns the call, and the call owns the arguments' handles and the copy of the Python
state. The call knows its slots by weak references. A replayed value is held by its slot until autograd takes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.dynamo import untraced
from spillway.capture.handles import KeptHandle, check_version, unpack
from spillway.capture.hooks import Pass
from spillway.checkpointing.collector import Collector, Meta, alias_of, meta_of
from spillway.checkpointing.contents import copy_of, has_content_of, overlap, print_of, prints_of
from spillway.checkpointing.learned import Learned
from spillway.checkpointing.reached import ReachedTensors
from spillway.checkpointing.refused import RefusedTensor
from spillway.errors import RecomputeError
from spillway.records import Decision
from spillway.regions.generators import drawing, generators_of, states_of
from spillway.regions.globals import Ambience
from spillway.regions.packs import Enough
from spillway.regions.python_state import PythonState
from spillway.regions.refusing import Refusing
from spillway.regions.region import keeps_note
from spillway.regions.replayed_function import ReplayedFunction
from spillway.regions.rerun import rerunning
from spillway.regions.tensors import (
    PLAIN,
    below_modes,
    is_strided,
    tensor_without_memory,
    tensors_in,
)
from spillway.regions.verdicts import Verdicts, differed

_KEEP = Decision.KEEP
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_weak = weakref.ref


class SavedSlot:
    """What autograd holds in place of a tensor that a checkpointed function saved."""

    __slots__ = ("__weakref__", "call", "number", "seen", "tracked", "value")

    def __init__(self, call: CheckpointedCall, number: int) -> None:
        self.call = call
        self.number = number
        self.value: tuple[torch.Tensor, int] | None = None
        """The replayed tensor, and its version when the replay saved it."""
        self.seen: Callable[[], torch.Tensor | None] | None = None
        """The tensor that autograd was given last, if it is alive: some nodes ask several times."""
        self.tracked: tuple[torch.Tensor, int] | None = None
        """Shares the version counter of the saved tensor, and not its memory; and the version at that time."""

    def track(self, tensor: torch.Tensor) -> None:
        """Notice in-place writes from now on, as autograd does for tensors that it holds itself."""
        if type(tensor) in PLAIN and is_strided(tensor) and not tensor.is_inference():
            self.tracked = tensor_without_memory(tensor), tensor._version

    def keep(self, tensor: torch.Tensor) -> None:
        """Hold the tensor."""
        with below_modes(tensor):
            self.value = alias_of(tensor), -1 if tensor.is_inference() else tensor._version

    def unpack(self) -> torch.Tensor:
        if self.tracked is not None:
            tracker, version = self.tracked
            if tracker._version != version:
                check_version(tracker, version, tracker)
        return self.call.value_of(self)


class CheckpointedCall:
    """One call. See NOTE [ A checkpointed call ].

    Args:
        function: the function with its arguments and its Python state; called with the tensors among the arguments.
        state: the Python state before the call.
        learned: what earlier calls of this kind taught.
        passage: the forward scope that the call belongs to: counts bytes, and offloads inputs if asked to.
        inputs: what is done with the tensors among the arguments; ``None``: what the hooks around the call do.
        verdicts: takes comparisons whose outcome the device has yet to tell.
        label: names the function in messages.
        stops_early: whether a replay ends with the last tensor that is wanted.
        draws: whether the replay draws the random numbers of forward.
        checks: whether shape, dtype and device of what is saved are compared.
        compares: whether the values of each call are compared, and not only of samples.
        is_captured: whether the call is captured into a graph, where nothing is compared.
        unused: selectors that choose nothing, for a note.
        tell_outer: called before each replay, for a region around that still runs.
    """

    def __init__(
        self,
        function: ReplayedFunction,
        state: PythonState,
        learned: Learned,
        passage: Pass,
        inputs: Decision | None,
        verdicts: Verdicts,
        *,
        label: str,
        stops_early: bool,
        draws: bool,
        checks: bool,
        compares: bool = False,
        is_captured: bool = False,
        unused: Sequence[object] = (),
        tell_outer: Callable[[], None] | None = None,
    ) -> None:
        self._function = function
        self._state = state
        self._learned = learned
        self._passage = passage
        self._inputs = inputs
        self._verdicts = verdicts
        self._label = label
        self._stops_early = stops_early
        self._draws = draws
        self._checks = checks
        self._unused = unused
        self._tell_outer = tell_outer
        self._keeps = False
        """Whether what autograd saves is kept: see NOTE [ Gradients inside ]."""
        self._is_captured = is_captured
        self._is_observed = learned.begins() and not is_captured
        """Whether it is observed in full: see NOTE [ Learning ]."""
        self._compares = not is_captured and (compares or self._is_observed or learned.is_sampled())
        self._ambience = Ambience.now()
        self._restore: Callable[[], None] = _nothing
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        """In an observed call: random generators with their states when forward began."""
        self._devices: set[torch.device] = set()
        self._tensors: list[tuple[Any, Callable[[Any], torch.Tensor], bool, bool]] = []
        """Of each tensor among the arguments: its handle, how to unpack it, whether it requires grad, and whether the
        function writes it in place."""
        self._odd: torch.Tensor | None = None
        """A tensor of a subclass among what the function reads, if there is one: its own code runs, without modes."""
        self._metas: list[Meta] = []
        """Shape, dtype and device of what forward saved."""
        self._slots: list[Callable[[], SavedSlot | None]] = []
        self._prints: dict[int, torch.Tensor] = {}
        """Fingerprints of what forward saved, where values are compared."""
        self._output_prints: list[torch.Tensor | None] = []
        """Those of what forward gave."""
        self._pending: list[tuple[int, torch.Tensor, int]] = []
        """What was saved by the operator that runs, which may write it yet, with the number of its node."""
        self._storages: dict[int, int] = {}
        """In an observed call: memory of what forward saved, by numbers."""
        self._reached: ReachedTensors
        """What the function can reach besides its arguments."""
        self._lock = threading.RLock()
        self._is_running = False
        self._is_replaying = False

    # Forward.

    def run(self, first: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
        """What the function gives.

        Args:
            first: runs it, with the caller's own arguments.
            tensors: the tensors among the arguments.
        """
        if not self._is_captured:
            self._verdicts.send()
            self._verdicts.read()
        learned, observed = self._learned, self._is_observed
        if learned.written_inputs and overlap(tensors, learned.written_inputs):
            # Copies would be apart from each other.
            self._passage.ledger.note(
                f"{self._label} writes an argument that shares memory with another one. What autograd saves in it is "
                f"kept, not recomputed."
            )
            return first()
        self._devices = {tensor.device for tensor in tensors}
        if self._draws:
            generators = generators_of(self._devices)
            self._restore = states_of(generators)
            if observed:
                self._states = [(each, each.get_state()) for each in generators]
        named = self._state.reachable()
        read = [*tensors, *(each for _, each in named)]
        if not PLAIN.issuperset(map(type, read)):
            self._odd = next(each for each in read if type(each) not in PLAIN)
        with below_modes(self._odd):
            copies = self._save_inputs(tensors)
            self._reached = ReachedTensors(named, learned, self._odd, is_observed=observed, is_compared=self._compares)
            self._passage.flush()
        input_versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors] if observed else []
        self._is_running, output = True, None
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = first()
        finally:
            self._is_running = False
            with below_modes(self._odd):
                if self._compares:
                    self._print_pending(None)
                    self._output_prints = prints_of(output)
                self._reached.forward_ended()
                if observed:
                    self._learn(output, tensors, input_versions, copies)
                if learned.state:
                    self._note_state()
                self._passage.flush()
        return output

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Have the arguments saved; gives copies of them, in an observed call."""
        around = _top_saved_tensors_default_hooks(True)
        passage, is_light = self._passage, False
        pack: Callable[[torch.Tensor], Any] = KeptHandle
        back: Callable[[Any], torch.Tensor] = unpack
        if self._inputs is not None and self._inputs is not _KEEP:
            pack = passage.pack_to_leave
        elif self._inputs is None and around is not None:
            pack, back = around
            if getattr(pack, "__self__", None) is passage and passage.keeps_the_rest:
                # What needs no gradient is mostly alive anyway: to count it is not worth the time.
                pack, is_light = passage.keep, True
        written = self._learned.written_inputs
        copies: list[torch.Tensor | None] = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            if place in written:
                # What is saved is what it was before.
                copy = copy_of(tensor)
                self._tensors.append((KeptHandle(copy), unpack, tensor.requires_grad, True))
                continue
            handle = KeptHandle(tensor) if is_light and not tensor.requires_grad else pack(tensor)
            self._tensors.append((handle, back, tensor.requires_grad, False))
            if self._is_observed:
                copies[place] = copy_of(tensor)
        return copies

    def _packing(self) -> Callable[[torch.Tensor], SavedSlot]:
        """The pack hook of forward."""
        metas, slots, passage = self._metas, self._slots, self._passage
        leaving, escaping, looks = passage.waiting, self._learned.escaping, self._compares or self._is_observed

        def pack(tensor: torch.Tensor) -> SavedSlot:
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            number = len(metas)
            metas.append(meta_of(tensor))
            slot = SavedSlot(self, number)
            slots.append(_weak(slot))
            if looks:
                self._observe(tensor, number, slot)
            elif number in escaping:
                with below_modes(tensor):
                    slot.track(tensor)
            if self._keeps:
                slot.keep(tensor)
            return slot

        return pack

    def _observe(self, tensor: torch.Tensor, number: int, slot: SavedSlot) -> None:
        with below_modes(tensor):
            self._print_pending(_next_node())
            if self._is_observed or number in self._learned.escaping:
                slot.track(tensor)
            if self._is_observed and is_strided(tensor) and type(tensor) in PLAIN:
                self._storages[number] = tensor.untyped_storage()._cdata
            self._pending.append((number, tensor.detach(), _next_node()))

    def _print_pending(self, node: int | None) -> None:
        """Take fingerprints of what earlier operators have saved; ``None``: of all."""
        while self._pending and (node is None or self._pending[0][2] < node):
            number, tensor, _ = self._pending.pop(0)
            found = print_of(tensor)
            if found is not None:
                self._prints[number] = found

    def _learn(
        self,
        output: Any,
        tensors: Sequence[torch.Tensor],
        versions: Sequence[int],
        copies: Sequence[torch.Tensor | None],
    ) -> None:
        """An observed call has ended: see NOTE [ Learning ]."""
        learned = self._learned
        learned.draws |= any(not torch.equal(a.get_state(), b) for a, b in self._states)
        learned.state = tuple(dict.fromkeys((*learned.state, *self._state.changed())))
        # What the function reached before is watched anyway.
        known = {id(tensor) for tensor in self._reached.tensors()}
        kept = (tensor for tensor in self._state.again().tensors() if id(tensor) not in known)
        outside = (*tensors_in(tree_leaves(output)), *kept)
        storages = {each.untyped_storage()._cdata for each in outside if type(each) in PLAIN and is_strided(each)}
        learned.escaping |= {number for number, storage in self._storages.items() if storage in storages}
        self._storages.clear()
        for place, tensor in enumerate(tensors):
            copy = copies[place]
            if copy is None or versions[place] == -1:
                continue
            if tensor._version != versions[place] or not has_content_of(tensor, copy):
                learned.written_inputs |= {place}
                self._tensors[place] = (KeptHandle(copy), unpack, tensor.requires_grad, True)

    def _note_state(self) -> None:
        names = self._learned.state
        self._passage.ledger.note(
            f"{self._label}: its forward changes Python state ({', '.join(names[:4])}"
            f"{' and more' if len(names) > 4 else ''}). Each recomputation starts from the state before the forward, "
            f"and puts the later state back."
        )

    # Backward.

    def value_of(self, slot: SavedSlot) -> torch.Tensor:
        """What autograd saved in this slot, by a replay if there was none."""
        with self._lock:
            seen = None if slot.seen is None else slot.seen()
            if seen is not None:
                return seen
            if self._is_running and not self._keeps:
                self._keeps = self._learned.takes_gradients = True
                self._passage.ledger.note(keeps_note(self._label))
            if slot.value is None:
                if self._is_replaying:
                    raise RecomputeError(
                        f"{self._label} went, when it was recomputed, through the graph of its own forward pass. That "
                        f"graph is being recomputed just then. Do not keep a graph from one run of the function for "
                        f"its next run."
                    )
                self._is_replaying = True
                try:
                    self._replay()
                finally:
                    self._is_replaying = False
            assert slot.value is not None
            value, version = slot.value
            if not self._keeps:
                slot.value = None
            if version != -1 and value._version != version:
                check_version(value, version, value)
            slot.seen = _weak(value)
            return value

    @untraced
    def _replay(self) -> None:
        passage = self._passage
        if self._tell_outer is not None:
            self._tell_outer()
        passage.was_recomputed = True
        passage.ledger.note_unused(self._unused)
        compares = self._compares
        if self._is_running:
            self._print_pending(None)
        collector = self._run_again(compares)
        if compares and not collector.is_same():
            again = self._run_on_todays_state(compares)
            if again is None or not again.is_same():
                raise collector.error()
            collector = again
        collector.raise_if_other()
        if compares and self._is_observed and not self._is_running:
            self._learned.is_validated = True
        values = collector.take()
        passage.ledger.recomputed_bytes += collector.made_bytes(values)
        for number, value in values.items():
            slot = self._slots[number]()
            if slot is not None:
                slot.value = value
        for differs in collector.differences():
            self._verdicts.add(self._label, differs)

    def _run_on_todays_state(self, compares: bool) -> Collector | None:
        """A replay for a function that prepares itself in its first call; ``None``, if there is no other state."""
        with self._function.on_todays_state() as is_another:
            if not is_another:
                return None
            try:
                return self._run_again(compares)
            except Exception as error:
                # On a state that is no longer the first run's, anything may be missing.
                raise differed([self._label]) from error

    def _run_again(self, compares: bool) -> Collector:
        """Run the function, and collect what it saves."""
        wanted = {number for number, slot in enumerate(self._slots) if slot() is not None}
        # Within the function itself, forward has come no further.
        stops = self._is_running or (self._stops_early and not compares)
        reached = self._reached
        changed = reached.changed()
        collector = Collector(
            self._label,
            wanted,
            max(wanted) if stops else None,
            self._metas,
            self._prints if compares else None,
            self._output_prints if compares else [],
            reached.storages(),
            {tensor.untyped_storage()._cdata: (tensor, v) for tensor, v in changed if is_strided(tensor)},
            checks=self._checks,
            waits=self._is_observed,
        )
        asked: list[RefusedTensor] = []
        may_go = self._state.replaceable() if changed else set()
        refused = {id(each): RefusedTensor.of(each, v, asked) for each, v in changed if _may_be_refused(each, may_go)}
        others = [pair for pair in changed if id(pair[0]) not in refused]
        refusing = Refusing(others) if others else None
        output = None
        with drawing:
            restore = states_of(generators_of(self._devices)) if self._draws else _nothing
            with below_modes(self._odd):
                tensors = [_argument(*each) for each in self._tensors]
            collector.know([*tensors, *reached.tensors()])
            try:
                self._restore()
                with (
                    rerunning(),
                    self._ambience.in_force(),
                    torch.enable_grad(),
                    saved_tensors_hooks(collector.pack, collector.unpack),
                    nullcontext() if refusing is None else refusing,
                ):
                    output = self._function(*tensors, within=self._as_before(collector, tensors, refused))
                    collector.gave(output)
            except Enough:
                pass
            except Exception:
                # The function may have made another error of ours.
                if not collector.has_ended:
                    raise
            finally:
                collector.end()
                restore()
        if refusing is not None:
            refusing.check()
        for each in asked:
            each.refuse()
        del output
        return collector

    @contextmanager
    def _as_before(
        self, collector: Collector, tensors: Sequence[torch.Tensor], refused: dict[int, RefusedTensor]
    ) -> Iterator[None]:
        """A context around the function's code, in which reached tensors have the content from before forward."""
        state, reached = self._state, self._reached
        sole = state.sole_buffers() if reached.may_be_written else set()
        with reached.as_before(sole, tensors) as others, state.swapped(others), state.replaced(refused):
            try:
                yield
            finally:
                # What was saved of them is compared before they are put back.
                collector.compare_pending()


def _nothing() -> None:
    return None


def _may_be_refused(tensor: torch.Tensor, replaceable: set[int]) -> bool:
    """Whether a stand-in can take its place: see NOTE [ What was written since forward ]."""
    return id(tensor) in replaceable and type(tensor) in PLAIN and is_strided(tensor)


def _argument(handle: Any, back: Callable[[Any], torch.Tensor], requires_grad: bool, is_written: bool) -> torch.Tensor:
    """One of the function's tensors, by its handle."""
    tensor = back(handle)
    if tensor.requires_grad and tensor.is_leaf and not is_written:
        return tensor
    if not requires_grad and not is_written:
        with below_modes(tensor):
            return tensor.detach()
    with below_modes(tensor), torch.enable_grad():
        alias = tensor.detach().requires_grad_(requires_grad)
        if is_written:
            # A leaf cannot be written in place, nor a view of one; and the next replay needs it as it is.
            return alias.clone()  # type: ignore[no-untyped-call, unused-ignore]
        if not is_strided(alias) or torch._C._len_torch_dispatch_stack() > 0:
            return alias
        # Not a leaf, which it was not: of leaves, casts are taken for autocast's own.
        return alias.view_as(alias)
