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
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.dynamo import untraced
from spillway.capture.handles import check_version, unpack
from spillway.capture.hooks import Pass
from spillway.checkpointing.collector import Collector, Meta, alias_of, meta_of, storages_of
from spillway.checkpointing.contents import print_of
from spillway.checkpointing.learned import Learned
from spillway.checkpointing.replayable import ReplayableCall
from spillway.errors import RecomputeError
from spillway.records import Decision
from spillway.regions.packs import Enough
from spillway.regions.partition import Partition
from spillway.regions.python_state import PythonState
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


class OutputSlot(SavedSlot):
    """What stands for an output that is dropped: see ``regions/outputs.py``."""

    __slots__ = ("_storage", "index")

    def __init__(self, call: CheckpointedCall, number: int, index: int, output: torch.Tensor) -> None:
        super().__init__(call, number)
        self.index = index
        """Which of the tensors in the output it is."""
        self._storage = _weak(output.untyped_storage())

    def is_dropped(self) -> bool:
        """Whether the output has to be computed if it is asked for."""
        return self._storage() is None


class CheckpointedCall(ReplayableCall):
    """One call. See NOTE [ A checkpointed call ].

    Args:
        function: see :class:`ReplayableCall`, as all that follows but these three.
        stops_early: whether a replay ends with the last tensor that is wanted.
        drops_output: whether outputs, too, can be computed again: :attr:`outputs` then has them.
        checks: whether shape, dtype and device of what is saved are compared.
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
        tell_outer: Callable[[], None] | None = None,
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
            tell_outer=tell_outer,
        )
        self._stops_early = stops_early
        self._checks = checks
        self._drops_output = drops_output
        self.outputs: list[tuple[torch.Tensor, OutputSlot]] = []
        """Outputs that can be computed again, with their slots; whoever reads it clears it."""
        self._keeps = False
        """Whether what autograd saves is kept: see NOTE [ Gradients inside ]."""
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
        self._forward_begins(tensors)
        self._is_running, output = True, None
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = first()
        finally:
            self._is_running = False
            with below_modes(self._odd):
                self._print_pending(None)
                self._forward_ended(output, tensors)
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
                    self._replay_ended()
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
        self._replay_begins()
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
        self._passage.ledger.recomputed_bytes += collector.made_bytes(values)
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
        slots = [slot for each in self._slots if (slot := each()) is not None]
        outputs = {each.number: each.index for each in slots if isinstance(each, OutputSlot) and each.is_dropped()}
        wanted = {each.number for each in slots if not isinstance(each, OutputSlot)}
        del slots
        # Within the function itself, forward has come no further.
        stops = self._is_running or (self._stops_early and not compares and not outputs)
        reached = self._reached
        changed = reached.changed()
        collector = Collector(
            self._label,
            wanted,
            outputs,
            max(wanted) if stops else None,
            self._metas,
            self._prints if compares else None,
            self._output_prints if compares else [],
            reached.storages(),
            {tensor.untyped_storage()._cdata: (tensor, v) for tensor, v in changed if is_strided(tensor)},
            checks=self._checks,
            waits=self._is_observed,
        )
        with below_modes(self._odd):
            backs = zip(self._inputs_back(), self._tensors, strict=True)
            tensors = [_argument(tensor, needs_grad, written) for tensor, (*_, needs_grad, written) in backs]
        collector.know([*tensors, *reached.tensors()])
        output = None
        with self._as_of_forward(tensors, changed) as within:
            try:
                with rerunning(), saved_tensors_hooks(collector.pack, collector.unpack):
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
        del output
        return collector


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
        if not is_strided(alias) or torch._C._len_torch_dispatch_stack() > 0:
            return alias
        # Not a leaf, which it was not: of leaves, casts are taken for autocast's own.
        return alias.view_as(alias)
