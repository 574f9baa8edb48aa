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

See ``preserved.py`` for what selectors, a policy or a plan preserve.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.handles import Handle, check_version, unpack
from spillway.capture.hooks import Pass
from spillway.capture.torch_internals import untraced
from spillway.checkpointing.checks import Verdicts, differed, print_of
from spillway.checkpointing.collector import Collector, Enough, Meta, meta_of, storages_of
from spillway.checkpointing.function import ReplayedFunction, rerunning
from spillway.checkpointing.learned import Learned
from spillway.checkpointing.partial_replay import PartialReplay
from spillway.checkpointing.partition import Partition
from spillway.checkpointing.preserved import PreservedTensors
from spillway.checkpointing.program import Decisions, Program, Selection
from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.recorder import Observer, Recorder
from spillway.checkpointing.replayable import ReplayableCall
from spillway.checkpointing.slots import OutputSlot, SavedSlot
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided, tensors_in, whole_view_of
from spillway.errors import RecomputeError
from spillway.records import Decision

_NOTHING: AbstractContextManager[object] = nullcontext()
_VIEWS = frozenset(("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ExpandBackward0"))
"""Views of a cast weight that a product may save."""
_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_weak = weakref.ref
_STRIDED = torch.strided


class CheckpointedCall(ReplayableCall):
    """One call. See NOTE [ A checkpointed call ].

    Args:
        function: see :class:`ReplayableCall`, as all that follows but these.
        stops_early: whether a replay ends with the last tensor that is wanted.
        drops_output: whether outputs, too, can be computed again: :attr:`outputs` then has them.
        checks: whether shape, dtype and device of what is saved are compared.
        selection: what is preserved; ``None``: nothing, and its operators are not recorded.
        observer: a profiler.
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
        drops_output: bool = False,
        compares: bool = False,
        is_captured: bool = False,
        partition: Partition | None = None,
        unused: Sequence[object] = (),
        selection: Selection | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(
            function,
            state,
            learned,
            passage,
            inputs,
            verdicts,
            label=label,
            draws=draws,
            compares=compares,
            is_captured=is_captured,
            partition=partition,
            unused=unused,
        )
        self._stops_early = stops_early
        self._checks = checks
        self._drops_output = drops_output
        self.outputs: list[tuple[torch.Tensor, OutputSlot]] = []
        """Outputs that can be computed again, with their slots; whoever reads it clears it."""
        self._keeps = False
        """Whether what autograd saves is kept: see NOTE [ Gradients inside ]."""
        self.holds_values = observer is not None
        """Whether slots hold their values after they were asked for them, or a profiler must know of it."""
        self._selection = selection
        self._observer = observer
        self._casts: dict[int, Callable[[], torch.UntypedStorage | None]] = {}
        """For the profiler, memory that leaves were cast to."""
        self._shapes: tuple[Any, ...] = ()
        """Of the function's tensors."""
        self._program: Program | None = None
        """What such calls do, if that is known."""
        self._decisions: Decisions | None = None
        """What is preserved of such calls, if that is known."""
        self._preserved: PreservedTensors | None = None
        """What is preserved of this one."""
        self._records = False
        """Whether its first replay records the program."""
        self._metas: list[Meta] = []
        """Shape, dtype and device of what forward saved."""
        self._slots: list[Callable[[], SavedSlot | None]] = []
        """Those of saved tensors, and then those of outputs that are dropped."""
        self._prints: dict[int, torch.Tensor] = {}
        """Fingerprints of what forward saved, where values are compared."""
        self._pending: list[tuple[int, torch.Tensor, int]] = []
        """What was saved by the operator that runs, which may write it yet, with the number of its node."""
        self._storages: dict[int, int] = {}
        """In an observed call: memory of what forward saved, by numbers."""
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
        if not self._may_begin(tensors):
            return first()
        if self._selection is not None:
            self._select(self._selection, tensors)
        self._forward_begins(tensors)
        if self._decisions is not None:
            arguments = self._tensors if self._partition is None else ()
            reached = self._reached.constants()
            self._preserved = PreservedTensors(self._decisions, self._passage, tensors, arguments, reached)
        self._is_running, output = True, None
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = first()
        except BaseException:
            # A replay ends with what was saved until then.
            self._records = self._compares = False
            if self._preserved is not None:
                self._preserved.is_other = True
            raise
        finally:
            self._is_running = False
            with below_modes(self._odd):
                if self._compares:
                    self._print_pending(None)
                if self._preserved is not None:
                    self._preserved.forward_ended(output, len(self._metas))
                self._forward_ended(output, tensors)
        if self._preserved is not None and self._preserved.is_other and not self._keeps:
            self._learned.differed(self._preserved.decisions.program, is_final=False)
        if self._observer is not None:
            self._profile(self._observer)
        if self._drops_output and not self._keeps:
            self._add_output_slots(output, tensors)
        return output

    def _add_output_slots(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        outside = storages_of([*tensors, *self._reached.tensors()])
        for index, tensor in enumerate(tensors_in(tree_leaves(output))):
            if type(tensor) in PLAIN and is_strided(tensor) and tensor.untyped_storage()._cdata not in outside:
                slot = OutputSlot(self, len(self._slots), index, tensor)
                self._slots.append(_weak(slot))
                self.outputs.append((tensor, slot))

    def _packing(self) -> Callable[[torch.Tensor], SavedSlot | Handle]:
        """The pack hook of forward."""
        metas, slots, passage = self._metas, self._slots, self._passage
        leaving, escaping, looks = passage.waiting, self._learned.escaping, self._compares or self._is_observed
        preserved, is_profiled = self._preserved, self._observer is not None

        def pack(tensor: torch.Tensor) -> SavedSlot | Handle:
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            number = len(metas)
            if type(tensor) in PLAIN and tensor.layout is _STRIDED and not tensor.is_nested:
                metas.append((tensor.shape, tensor.dtype, tensor.device, tensor.stride()))
            else:
                metas.append(meta_of(tensor))
            if is_profiled:
                self._note_cast(tensor)
            if preserved is not None and not self._keeps:
                if looks:
                    with below_modes(tensor):
                        self._print_pending(_next_node())
                handle = preserved.pack(tensor, number)
                if handle is not None:
                    slots.append(_nothing)
                    return handle
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

    def _select(self, selection: Selection, tensors: Sequence[torch.Tensor]) -> None:
        """Find what is known of such calls."""
        self._shapes = shapes_of(tensors)
        decisions, self._records = self._learned.decisions(self._shapes, selection)
        self._program = None if decisions is None else decisions.program
        if self._is_captured:
            # Nothing can be compared there.
            self._records = False
            if decisions is not None and (decisions.is_validated or not decisions.leaves_out):
                self._decisions = decisions
            return
        self._decisions = decisions
        is_new = decisions is not None and decisions.leaves_out and not decisions.is_validated
        self._compares = self._compares or self._records or is_new
        # A replay that records must draw what forward drew: nothing is preserved yet.
        self._draws |= self._records

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

    def _learn(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        super()._learn(output, tensors)
        # What the function reached before is watched anyway.
        known = {id(tensor) for tensor in self._reached.tensors()}
        kept = (tensor for tensor in self._state.again().tensors() if id(tensor) not in known)
        outside = (*tensors_in(tree_leaves(output)), *kept)
        storages = {each.untyped_storage()._cdata for each in outside if type(each) in PLAIN and is_strided(each)}
        self._learned.escaping |= {number for number, storage in self._storages.items() if storage in storages}
        self._storages.clear()

    # Backward.

    def value_of(self, slot: SavedSlot) -> torch.Tensor:
        """What autograd saved in this slot, by a replay if there was none."""
        with self._lock:
            seen = None if slot.seen is None else slot.seen()
            if seen is not None:
                return seen
            if self._is_running and not self._keeps:
                self._keeps = self.holds_values = self._learned.takes_gradients = True
                self._passage.ledger.note(
                    f"{self._label} takes a gradient of what it computes. What autograd saves in it is kept, not "
                    f"recomputed."
                )
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
                    self._replay_ended()
            assert slot.value is not None
            value, version = slot.value
            if not self._keeps:
                slot.value = None
            if version != -1 and value._version != version:
                check_version(value, version, value)
            slot.seen = _weak(value)
            program = self._program
            if self._observer is not None and program is not None and slot.number < len(program.saved):
                self._observer.asked(program.saved[slot.number].place, value, slot)
            return value

    @untraced
    def _replay(self) -> None:
        self._replay_begins()
        compares = self._compares
        decisions = self._decisions
        is_new = decisions is not None and decisions.leaves_out and not decisions.is_validated
        if self._is_observed or self._records or is_new:
            self._learned.learned_from += 1
        if self._is_running:
            self._print_pending(None)
        collector = None if self._is_running else self._replay_by_program(compares)
        if collector is None:
            collector = self._run_again(compares)
        if compares and not collector.is_same():
            again = self._run_on_todays_state(compares)
            if again is None or not again.is_same():
                raise collector.error()
            collector = again
        collector.raise_if_other()
        if compares and self._is_observed and not self._is_running:
            self._learned.is_validated = True
        self._passage.ledger.recomputed_bytes += self._learned.recomputed_bytes(self._metas, collector)
        values = collector.take()
        for number, value in values.items():
            slot = self._slots[number]()
            if slot is not None:
                slot.value = value
        for differs in collector.differences():
            self._verdicts.add(self._label, differs)

    def _has_dropped_outputs(self) -> bool:
        """Whether outputs have to be recomputed, of which a program does not tell what they need."""
        slots = (each() for each in self._slots) if self._drops_output else ()
        return any(isinstance(slot, OutputSlot) and slot.is_dropped() for slot in slots)

    def _replay_by_program(self, compares: bool) -> Collector | None:
        """A replay that records the program, or leaves out what it need not run; ``None``, if there was none."""
        if self._records:
            return self._record()
        preserved = self._preserved
        if preserved is None or self._has_dropped_outputs():
            return None
        decisions, given = preserved.decisions, preserved.take()
        self._passage.ledger.note_unused(decisions.unused)
        if given is None:
            return None

        def tensor_of(value: int) -> torch.Tensor | None:
            handle = given.get(value)
            return None if handle is None else handle.unpack()

        poisons = not decisions.is_validated or any(map(self._passage.poisons, self._devices))
        mode = PartialReplay(decisions, tensor_of, draws=self._draws, poisons=poisons)
        collector: Collector | None = None
        try:
            collector = self._run_again(compares, mode)
        except Exception:
            # The function may have made another error of ours.
            if mode.differs is None:
                raise
        why = mode.differs
        if why is None and mode.is_held():
            why = "it keeps a tensor that was left out of its replay"
        if why is None and (collector is None or collector.is_other or not collector.is_same()):
            why = "other tensors were saved"
        if why is not None:
            self._learned.differed(decisions.program, is_final=mode.differs is None)
            self._passage.ledger.note(f"{self._label} was recomputed whole: {why}.")
            return None
        if compares:
            decisions.is_validated = True
        return collector

    def _record(self) -> Collector | None:
        """See NOTE [ Where a program is recorded ] in ``recorder.py``."""
        self._records = False
        selection, learned = self._selection, self._learned
        assert selection is not None
        recorder = Recorder(selection)
        collector = self._run_again(True, recorder)
        if not collector.is_same():
            learned.record(self._shapes, selection, Program(opaque="it gives other values under a dispatch mode"))
            return None
        learned.record(self._shapes, selection, recorder.program())
        # Selectors are asked what they preserve.
        decisions, _ = learned.decisions(self._shapes, selection)
        if decisions is not None:
            self._passage.ledger.note_unused(decisions.unused)
        return collector

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

    def _run_again(self, compares: bool, mode: Recorder | PartialReplay | None = None) -> Collector:
        """Run the function, and collect what it saves.

        Args:
            compares: whether that is compared with what forward saved.
            mode: sees its operators.
        """
        slots = [slot for each in self._slots if (slot := each()) is not None]
        outputs = {each.number: each.index for each in slots if isinstance(each, OutputSlot) and each.is_dropped()}
        wanted = {each.number for each in slots if not isinstance(each, OutputSlot)}
        del slots
        # Within the function itself, forward has come no further.
        stops = self._is_running or (self._stops_early and not compares and not outputs)
        until, prints = max(wanted, default=-1), self._prints
        output_prints: list[torch.Tensor | None] | None = self._output_prints
        if isinstance(mode, PartialReplay):
            # What is left out has no content, and outputs may be.
            until = max(until, mode.decisions.until)
            prints = {number: found for number, found in prints.items() if mode.decisions.is_recomputed(number)}
            output_prints = None
        changed = self._reached.changed()
        collector = Collector(
            self._label,
            wanted,
            outputs,
            until if stops else None,
            self._metas,
            prints if compares else None,
            output_prints,
            self._reached.storages(),
            {tensor.untyped_storage()._cdata: (tensor, v) for tensor, v in changed if is_strided(tensor)},
            checks=self._checks,
            waits=self._is_observed or isinstance(mode, Recorder) or (mode is not None and mode.is_new),
            saves=None if mode is None else mode.saves,
            asked=mode.was_asked if isinstance(mode, PartialReplay) else None,
        )
        self._run_into(collector, changed, mode)
        return collector

    def _run_into(
        self,
        collector: Collector,
        changed: Sequence[tuple[torch.Tensor, int]],
        mode: Recorder | PartialReplay | None,
        around: AbstractContextManager[object] = _NOTHING,
    ) -> None:
        """Run the function.

        Args:
            collector: takes what it saves.
            changed: what was written since forward, with the versions from before.
            mode: sees its operators.
            around: a context around the function, within the mode.
        """
        with below_modes(self._odd):
            backs = zip(self._inputs_back(), self._tensors, strict=True)
            tensors = [_argument(tensor, needs_grad, written) for tensor, (*_, needs_grad, written) in backs]
        collector.know([*tensors, *self._reached.tensors()])
        if isinstance(mode, Recorder):
            mode.begin(tensors)
        output = None
        with self._as_of_forward(tensors, changed) as within:
            try:
                with (
                    rerunning(),
                    saved_tensors_hooks(collector.pack, collector.unpack),
                    _NOTHING if mode is None else mode,
                    around,
                ):
                    output = self._function(*tensors, within=within(lambda _: collector.compare_pending()))
                    collector.gave(output)
            except Enough:
                pass
            except Exception:
                # The function may have made another error of ours.
                if not collector.has_ended:
                    raise
            finally:
                collector.end()
        if isinstance(mode, Recorder):
            mode.gave(output)
        del output

    # For a profiler.

    def _profile(self, observer: Observer) -> None:
        """Forward has ended. If operators are to be measured, the function runs once more, and keeps nothing."""
        for storage in self._casts.values():
            if (cast := storage()) is not None:
                observer.casts(cast)
        self._casts.clear()
        if not observer.wants_operators or self._is_captured:
            return
        assert self._selection is not None
        # Casts that autocast remembers would not be seen.
        torch.clear_autocast_cache()
        recorder = Recorder(self._selection)
        collector = Collector(
            *(self._label, set(), {}, None, self._metas, None, None, self._reached.storages(), {}),
            checks=False,
            waits=False,
            saves=recorder.saves,
            holds=self._keeps,
        )
        self._run_into(collector, (), recorder, observer.watching(recorder))
        self._replay_ended()
        observer.ended(recorder)
        self._program = recorder.program()
        self._learned.record(self._shapes, self._selection, self._program)
        self._records = False

    def _note_cast(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor that a leaf was cast to, or a view of one."""
        node: Any = tensor.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0" or not is_strided(tensor):
            return
        if hasattr(node.next_functions[0][0], "variable"):
            storage = tensor.untyped_storage()
            self._casts[storage._cdata] = _weak(storage)


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """What tells calls apart that have programs of their own."""
    return tuple([meta_of(tensor)[0] for tensor in tensors])


def _nothing() -> None:
    return None


def _argument(tensor: torch.Tensor, requires_grad: bool, is_written: bool) -> torch.Tensor:
    """One of the function's tensors as a replay is given it."""
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
        if not is_strided(alias):
            return alias
        # Not a leaf, which it was not: of leaves, casts are taken for autocast's own.
        return whole_view_of(alias)
