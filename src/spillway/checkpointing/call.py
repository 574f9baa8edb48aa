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

NOTE [ What holds what ]

Autograd owns the slots. A slot owns the call, and the call owns the arguments' handles and the copy of the Python
state. The call knows its slots by weak references. A replayed value is held by its slot until autograd takes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.dynamo import untraced
from spillway.capture.handles import KeptHandle, check_version, unpack
from spillway.capture.hooks import Pass
from spillway.checkpointing.collector import Collector, Meta, meta_of
from spillway.checkpointing.contents import (
    copies_of,
    copy_of,
    has_content_of,
    may_be_written,
    print_of,
    prints_of,
    write_back,
)
from spillway.checkpointing.learned import Learned
from spillway.errors import RecomputeError
from spillway.records import Decision
from spillway.regions.generators import drawing, generators_of, states_of
from spillway.regions.globals import Ambience
from spillway.regions.packs import Enough
from spillway.regions.python_state import PythonState
from spillway.regions.refusing import Refusing
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
_MOST_OBSERVED, _MOST_COPIED = 64 << 20, 1 << 20
"""Bytes of a tensor that is copied in case that the function writes it, in observed calls and in others."""
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_weak = weakref.ref


class SavedSlot:
    """What autograd holds in place of a tensor that a checkpointed function saved."""

    __slots__ = ("__weakref__", "call", "number", "seen", "tracker", "value", "version")

    def __init__(self, call: CheckpointedCall, number: int) -> None:
        self.call = call
        self.number = number
        self.value: tuple[torch.Tensor, int] | None = None
        """The replayed tensor, and its version when the replay saved it."""
        self.seen: Callable[[], torch.Tensor | None] | None = None
        """The tensor that autograd was given last, if it is alive: some nodes ask several times."""
        self.tracker: torch.Tensor | None = None
        """Shares the version counter of the saved tensor, and not its memory."""
        self.version = -1

    def track(self, tensor: torch.Tensor) -> None:
        """Notice in-place writes from now on, as autograd does for tensors that it holds itself."""
        if type(tensor) in PLAIN and is_strided(tensor) and not tensor.is_inference():
            self.version = tensor._version
            self.tracker = tensor_without_memory(tensor)

    def unpack(self) -> torch.Tensor:
        if self.tracker is not None and self.tracker._version != self.version:
            check_version(self.tracker, self.version, self.tracker)
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
        self._watched: list[tuple[torch.Tensor, int]] = []
        """What the function can reach besides its arguments, with its versions when forward had ended."""
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that forward wrote in place, each with a copy of what it was before."""
        self._lost: list[torch.Tensor] = []
        """Tensors that forward wrote in place, of which there is no copy."""
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
        self._devices = {tensor.device for tensor in tensors}
        if self._draws:
            generators = generators_of(self._devices)
            self._restore = states_of(generators)
            if observed:
                self._states = [(each, each.get_state()) for each in generators]
        watched = [tensor for _, tensor in self._state.reachable()]
        self._odd = next((tensor for tensor in (*tensors, *watched) if type(tensor) not in PLAIN), None)
        with below_modes(self._odd):
            copies = self._save_inputs(tensors)
            versions = [tensor._version for tensor in watched]
            self._copy_before(watched)
            self._passage.flush()
        input_versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors] if observed else []
        self._is_running, output = True, None
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = first()
        finally:
            self._is_running = False
            with below_modes(self._odd):
                self._print_pending(None)
                if self._compares:
                    self._output_prints = prints_of(output)
                after = [tensor._version for tensor in watched]
                wrote = {place for place, now in enumerate(after) if now != versions[place]}
                if observed:
                    # Batch norm's kernels write its running statistics, and no version counter tells.
                    differ = {id(tensor) for tensor, before in self._before if not has_content_of(tensor, before)}
                    wrote |= {place for place, tensor in enumerate(watched) if id(tensor) in differ}
                if not (wrote or learned.written):
                    self._before.clear()
                # If anything is written, what was copied is held: no version counter tells of some kernels' writes.
                kept = {id(tensor) for tensor, _ in self._before}
                kept.update(id(watched[place]) for place in wrote)
                copied = {id(tensor) for tensor, _ in self._before}
                self._lost = [watched[place] for place in wrote if id(watched[place]) not in copied]
                self._watched = [
                    (tensor, now) for tensor, now in zip(watched, after, strict=True) if id(tensor) not in kept
                ]
                if wrote - learned.written:
                    learned.written |= wrote
                if observed:
                    self._learn(output, tensors, input_versions, copies)
                if learned.state:
                    self._note_state()
                self._passage.flush()
        return output

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Have the arguments saved; gives copies of them, in an observed call."""
        around = _top_saved_tensors_default_hooks(True)
        pack: Callable[[torch.Tensor], Any] = KeptHandle
        back: Callable[[Any], torch.Tensor] = unpack
        if self._inputs is not None and self._inputs is not _KEEP:
            pack = self._passage.pack_to_leave
        elif self._inputs is None and around is not None:
            pack, back = around
        written = self._learned.written_inputs
        copies: list[torch.Tensor | None] = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            if place in written:
                # What is saved is what it was before.
                copy = copy_of(tensor)
                self._tensors.append((KeptHandle(copy), unpack, tensor.requires_grad, True))
                continue
            self._tensors.append((pack(tensor), back, tensor.requires_grad, False))
            if self._is_observed:
                copies[place] = copy_of(tensor)
        return copies

    def _copy_before(self, watched: Sequence[torch.Tensor]) -> None:
        """Copy what the function may write in place: some write a buffer now and then only."""
        written, most = self._learned.written, _MOST_OBSERVED if self._is_observed else _MOST_COPIED
        found = [tensor for place, tensor in enumerate(watched) if place in written or may_be_written(tensor, most)]
        self._before = list(zip(found, copies_of(found), strict=True))

    def _packing(self) -> Callable[[torch.Tensor], SavedSlot]:
        """The pack hook of forward."""
        metas, slots, passage = self._metas, self._slots, self._passage
        leaving, escaping, looks = passage.waiting, self._learned.escaping, self._compares or self._is_observed

        def pack(tensor: torch.Tensor) -> SavedSlot:
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            number = len(metas)
            slot = SavedSlot(self, number)
            metas.append(meta_of(tensor))
            slots.append(_weak(slot))
            if looks:
                self._observe(tensor, number, slot)
            elif number in escaping:
                with below_modes(tensor):
                    slot.track(tensor)
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
        outside = [*tensors_in(tree_leaves(output)), *self._state.again().tensors()]
        storages = {each.untyped_storage()._cdata for each in outside if type(each) in PLAIN and is_strided(each)}
        learned.escaping |= {number for number, storage in self._storages.items() if storage in storages}
        self._storages.clear()
        for place, tensor in enumerate(tensors):
            copy = copies[place]
            if versions[place] != -1 and tensor._version != versions[place] and copy is not None:
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
            (value, version), slot.value = slot.value, None
            if version != -1 and value._version != version:
                check_version(value, version, value)
            slot.seen = _weak(value)
            return value

    @untraced
    def _replay(self) -> None:
        passage = self._passage
        passage.was_recomputed = True
        passage.ledger.note_unused(self._unused)
        compares = self._compares and not self._is_running
        collector = self._run_again(compares)
        if compares and not collector.is_same():
            again = self._run_on_todays_state(compares)
            if again is None or not again.is_same():
                raise collector.error()
            collector = again
        collector.raise_if_other()
        if compares and self._is_observed:
            self._learned.late |= collector.late
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
        until = None
        # Within the function itself, forward has come no further.
        if self._is_running or (self._stops_early and not compares):
            # What an operator writes after it has saved it is there when the next one saves.
            until = max(wanted)
            while until in self._learned.late:
                until += 1
        changed = [(tensor, version) for tensor, version in self._watched if tensor._version != version]
        changed += [(tensor, -1) for tensor in self._lost]
        collector = Collector(
            self._label,
            wanted,
            until,
            self._metas,
            self._prints if compares else None,
            self._output_prints if compares else [],
            {tensor.untyped_storage()._cdata for tensor, _ in self._before if is_strided(tensor)},
            {tensor.untyped_storage()._cdata: (tensor, v) for tensor, v in changed if is_strided(tensor)},
            checks=self._checks,
            finds_late=self._is_observed,
        )
        refusing = Refusing(changed) if changed else None
        output = None
        with drawing:
            restore = states_of(generators_of(self._devices)) if self._draws else _nothing
            with below_modes(self._odd):
                tensors = [_argument(*each) for each in self._tensors]
                targets = [tensor for tensor, _ in self._before]
                now = list(zip(targets, copies_of(targets), strict=True))
                write_back(self._before)
            kept = _unsafe_preserve_version_counter(tuple(tensor for tensor, _ in now)) if now else nullcontext()
            collector.know([*tensors, *(tensor for tensor, _ in self._watched), *(tensor for tensor, _ in now)])
            try:
                self._restore()
                with (
                    kept,
                    rerunning(),
                    self._ambience.in_force(),
                    torch.enable_grad(),
                    saved_tensors_hooks(collector.pack, collector.unpack),
                    nullcontext() if refusing is None else refusing,
                ):
                    output = self._function(*tensors)
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
                with below_modes(self._odd):
                    write_back(now)
        if refusing is not None:
            refusing.check()
        del output
        return collector


def _nothing() -> None:
    return None


def _argument(handle: Any, back: Callable[[Any], torch.Tensor], requires_grad: bool, is_written: bool) -> torch.Tensor:
    """One of the function's tensors, by its handle."""
    tensor = back(handle)
    if tensor.requires_grad and tensor.is_leaf and not is_written:
        return tensor
    with below_modes(tensor), torch.enable_grad():
        alias = tensor.detach().requires_grad_(requires_grad)
        if is_written:
            # A leaf cannot be written in place, nor a view of one; and the next replay needs it as it is.
            return alias.clone()  # type: ignore[no-untyped-call, unused-ignore]
        if alias.is_nested or torch._C._len_torch_dispatch_stack() > 0:
            return alias
        # Not a leaf, which it was not: of leaves, casts are taken for autocast's own.
        return alias.view_as(alias)
