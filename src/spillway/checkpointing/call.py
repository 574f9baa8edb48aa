"""One call of a checkpointed function.

NOTE [ A checkpointed call ]

In forward, autograd gets a :class:`SavedSlot` for each tensor that the function saves. The slot has the tensor's number
in the order of saving, and no memory. No dispatch mode is active.

In backward, autograd unpacks a slot. The function is recomputed (the *replay*) under a hook that collects the tensors
by the same numbers, on the Python state, random generators, autocast and other settings of forward. The replay ends
with the last tensor that is still wanted.

The replay is right if the function does the same again, as for ``torch.utils.checkpoint``. ``docs/replays.md`` lists
what is compared in every call. Values are compared in the first one, and in samples of later ones (``learned.py``).

NOTE [ Gradients inside ]

A function may take a gradient of its own results. Autograd then unpacks a slot before forward has ended. The function
is replayed as far as forward has come, and is compared. From there on, its saved tensors are kept, and this call is not
replayed again. Later calls of the kind are plain.

NOTE [ Ownership ]

Autograd owns the slots. A slot owns the call, and the call owns the arguments' handles and the copy of the Python
state. The call knows its slots by weak references. A replayed value is held by its slot until autograd takes it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway._torch import (
    disable_function,
    next_hook,
    next_node,
    remove_hooks,
    storage_key,
    tree_leaves,
    untraced,
    version_of,
)
from spillway.checkpointing.blocks import is_sharded
from spillway.checkpointing.checks import Fingerprints
from spillway.checkpointing.collector import Collector, Meta, ReplayEnded, meta_of, shapes_of, storages_of
from spillway.checkpointing.learned import LearnedCalls
from spillway.checkpointing.partial_replay import PartialReplay
from spillway.checkpointing.preserved import PreservedTensors
from spillway.checkpointing.program import Decisions, Program
from spillway.checkpointing.recorder import Recorder
from spillway.checkpointing.replayable import ReplayableCall, ReplayedFunction, replay_argument
from spillway.checkpointing.selectors import Choices
from spillway.checkpointing.slots import OutputSlot, SavedSlot
from spillway.checkpointing.tensors import PLAIN, below_modes, is_plain, is_strided, tensors_in
from spillway.errors import RecomputeError, SpillwayError
from spillway.runtime.system import many_processes
from spillway.saved_tensors.handles import Handle, check_version, replaying, unpack
from spillway.types import Decision

if TYPE_CHECKING:
    from spillway.saved_tensors.hooks import ForwardScope

_NOTHING: AbstractContextManager[object] = nullcontext()
_weak = weakref.ref


class CheckpointedCall(ReplayableCall):
    """One call. See NOTE [ A checkpointed call ]. Its operators are recorded only if there are ``choices``."""

    def __init__(
        self,
        function: ReplayedFunction,
        learned: LearnedCalls,
        scope: ForwardScope,
        inputs: Decision | None,
        *,
        stops_early: bool,
        checks: bool = False,
        drops_output: bool = False,
        choices: Choices | None = None,
        **options: Any,
    ) -> None:
        super().__init__(function, learned, scope, inputs, **options)
        self._stops_early = stops_early
        self._checks = checks
        self._drops_output = drops_output
        self._keeps = False
        """Whether what autograd saves is kept: see NOTE [ Gradients inside ]."""
        self.holds_values = False
        """Whether slots ask the call each time that they are unpacked."""
        self._choices = choices
        self._shapes: tuple[Any, ...] = ()
        self._program: Program | None = None
        self._decisions: Decisions | None = None
        self._preserved: PreservedTensors | None = None
        self._records = False
        """Whether its first replay records the program."""
        self._metas: list[Meta] = []
        """Shape, dtype, device and strides of each tensor that forward saved."""
        self._slots: list[Callable[[], SavedSlot | None]] = []
        """Weak references to slots of saved tensors, by numbers."""
        self._outputs: list[Callable[[], OutputSlot | None]] = []
        """Weak references to slots of dropped outputs, whose numbers come next."""
        self._fingerprints = Fingerprints()
        """Those of the tensors that forward saved, if values are compared."""
        self._storages: dict[int, int] = {}
        """In an observed call: memory of the tensors that forward saved, by numbers."""
        self._lock = threading.RLock()
        self._is_running = False
        self._is_replaying = False
        self._has_drawn = False
        """Whether an observed forward had drawn from a generator of Python or NumPy when it saved a tensor."""

    # Forward.

    def run(self, forward: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Run the function, by ``forward`` on the caller's own arguments, and return its output."""
        if not self._may_begin(tensors):
            return forward()
        if self._choices is not None:
            self._select(self._choices, tensors)
        self._forward_begins(tensors)
        if self._decisions is not None and self._decisions.preserves:
            arguments = [handle for handle, *_ in self._tensors]
            reached = self._reached.constants()
            self._preserved = PreservedTensors(self._decisions, self._scope, tensors, arguments, reached)
        self._is_running, output, first_node = True, None, next_node()
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = forward()
        except BaseException:
            # A replay ends with the last tensor that was saved by then.
            self._records = self._compares = False
            self._fingerprints = Fingerprints()
            if self._preserved is not None:
                self._preserved.is_other = True
            raise
        finally:
            self._is_running = False
            with below_modes(self._subclass):
                if self._compares:
                    self._fingerprints.end(output, first_node)
                if self._preserved is not None:
                    self._preserved.forward_ended(output, len(self._metas))
                self._forward_ended(output, tensors)
        self._has_returned(output, tensors)
        return output

    def _has_returned(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        if self._preserved is not None and self._preserved.is_other and not self._keeps:
            self._learned.differed(self._preserved.decisions.program, is_final=False)
        if not self._drops_output or self._keeps:
            return
        outside = storages_of([*tensors, *self._reached.tensors()])
        for index, tensor in enumerate(tensors_in(tree_leaves(output))):
            if is_plain(tensor) and storage_key(tensor.untyped_storage()) not in outside:
                slot = OutputSlot(self, len(self._slots) + len(self._outputs), index, tensor)
                self._outputs.append(_weak(slot))
                self._scope.outputs.set(tensor, slot.pack)

    def _packing(self) -> Callable[[torch.Tensor], SavedSlot | Handle]:
        metas, slots, scope = self._metas, self._slots, self._scope
        leaving, escaping, looks = scope.waiting, self._learned.escaping, self._compares or self._is_observed
        before, self._learned.metas = self._learned.metas, metas
        preserved = self._preserved

        def pack(tensor: torch.Tensor) -> SavedSlot | Handle:
            if leaving.nbytes and leaving.is_batch:
                scope.advance()
            number = len(metas)
            meta = meta_of(tensor)
            # Most calls save the same: one object for all. Other tensors may have symbolic sizes, not to be compared.
            is_known = type(tensor) in PLAIN and number < len(before) and before[number] == meta
            metas.append(before[number] if is_known else meta)
            if preserved is not None and not self._keeps:
                if looks:
                    with below_modes(tensor):
                        self._fingerprints.compute(next_node())
                handle = preserved.pack(tensor, number)
                if handle is not None:
                    slots.append(lambda: None)
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

    def _select(self, choices: Choices, tensors: Sequence[torch.Tensor]) -> None:
        """Find the program of such calls, and the decisions about them."""
        self._shapes = shapes_of(tensors)
        decisions, self._records = self._learned.decisions(self._shapes, choices)
        self._program = None if decisions is None else decisions.program
        is_new = decisions is not None and decisions.is_new
        if self._is_captured:
            # Nothing can be compared in a captured graph.
            decisions, is_new, self._records = None if is_new else decisions, False, False
        self._decisions = decisions
        self._compares = self._compares or self._records or is_new
        # A replay that records must draw what forward drew: nothing is preserved yet.
        self._draws |= self._records

    def _observe(self, tensor: torch.Tensor, number: int, slot: SavedSlot) -> None:
        self._has_drawn = self._has_drawn or (self._is_observed and self._state.has_drawn())
        with below_modes(tensor):
            self._fingerprints.compute(next_node())
            if self._is_observed or number in self._learned.escaping:
                slot.track(tensor)
            if self._is_observed and is_plain(tensor):
                self._storages[number] = storage_key(tensor.untyped_storage())
            self._fingerprints.add(number, tensor.detach(), next_node())

    def _learn(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        super()._learn(output, tensors)
        self._learned.puts_back |= self._has_drawn and not self._state.has_drawn()
        # Versions of reached tensors are checked anyway.
        known = {id(tensor) for tensor in self._reached.tensors()}
        kept = (tensor for tensor in self._function.reachable_now() if id(tensor) not in known)
        outside = (*tensors_in(tree_leaves(output)), *kept)
        storages = {storage_key(each.untyped_storage()) for each in outside if is_plain(each)}
        self._learned.escaping |= {number for number, storage in self._storages.items() if storage in storages}
        self._storages.clear()

    # Backward.

    def value_of(self, slot: SavedSlot) -> torch.Tensor:
        """The tensor of this slot, by a replay if there was none."""
        with self._lock:
            seen = None if slot.seen is None else slot.seen()
            if seen is not None:
                return seen
            if self._is_running and not self._keeps:
                self._keeps = self.holds_values = True
                self._learned.why_kept = "takes a gradient of what it computes"
                self._scope.ledger.note(
                    f"{self._label} {self._learned.why_kept}. Its saved tensors are kept, not recomputed."
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
                    with self._function.around():
                        self._replay()
                finally:
                    self._is_replaying = False
                    self._replay_ended()
            assert slot.value is not None
            value, version = slot.value
            if not self._keeps:
                slot.value = None
            if version != -1 and version_of(value) != version:
                check_version(value, version, value)
            slot.seen = _weak(value)
            return value

    @untraced
    def _replay(self) -> None:
        self._scope.was_recomputed = True
        compares = self._compares
        if self._is_observed or self._records or (self._decisions is not None and self._decisions.is_new):
            self._learned.learned_from += 1
        if self._is_running:
            self._fingerprints.compute()
        collector = None if self._is_running else self._replay_by_program(compares)
        if collector is None:
            collector = self._replay_once(compares)
        if compares and not collector.is_same():
            second = self._on_current_state(lambda: self._replay_once(compares))
            if second is None or not second.is_same():
                raise collector.error()
            collector = second
        collector.raise_if_other()
        if compares and self._is_observed and not self._is_running:
            self._learned.is_validated = True
        self._scope.ledger.recomputed_bytes += self._learned.recomputed_bytes(self._metas, collector)
        slots = [*self._slots, *self._outputs]
        for number, value in collector.pop_values().items():
            slot = slots[number]()
            if slot is not None:
                slot.value = value

    def _replay_by_program(self, compares: bool) -> Collector | None:
        """A replay that records the program, or a partial replay; ``None`` if neither is possible."""
        if self._records:
            return self._record()
        preserved = self._preserved
        if self._decisions is not None:
            self._scope.ledger.note_unused(self._decisions.unused)
        # A program does not say which operators an output needs that must be recomputed.
        if preserved is None or self._needs_outputs():
            return None
        decisions, given = preserved.decisions, preserved.pop_handles()
        if given is None:
            # In a second backward of one graph, every rank replays the function whole.
            if not preserved.is_spent:
                self._check_ranks(decisions.program, "it differs from its program")
            return None

        def tensor_of(value: int) -> torch.Tensor | None:
            handle = given.get(value)
            return None if handle is None else handle.unpack()

        poisons = decisions.is_new or any(map(self._scope.devices.poisons, self._devices))
        mode = PartialReplay(decisions, tensor_of, draws=self._draws, poisons=poisons)
        collector: Collector | None = None
        why: str | None = None
        try:
            collector = self._replay_once(compares, mode)
        except Exception as error:
            # Our own may be about memory that was handed in. Another may come of memory without content.
            if isinstance(error, SpillwayError) and mode.differs is None:
                raise
            why = f"it raised {type(error).__name__} where operators were left out"
        why = mode.differs or why
        if why is None and mode.is_held():
            why = "it keeps a tensor that was left out of its replay"
        if why is None and (collector is None or collector.other or not collector.is_same()):
            why = "other tensors were saved"
        if why is not None:
            self._learned.differed(decisions.program, is_final=mode.differs is None)
            self._check_ranks(decisions.program, why)
            self._scope.ledger.note(f"{self._label} was recomputed whole: {why}.")
            return None
        if compares:
            decisions.is_new = False
        return collector

    def _check_ranks(self, program: Program, why: str) -> None:
        """Raise an error if other ranks would not take part in collectives of a whole replay."""
        if program.collectives and many_processes():
            raise RecomputeError(
                f"{self._label} must be recomputed whole on this rank: {why}. Other ranks would not take part in its "
                f"collectives, since save, offload or a policy names one. Do not name collectives for this function."
            )

    def _record(self) -> Collector | None:
        """See NOTE [ Recording ] in ``recorder.py``."""
        self._records = False
        choices, learned, recorder = self._choices, self._learned, self._recorder()
        assert choices is not None
        collector = self._replay_once(True, recorder)
        if not collector.is_same():
            learned.record(self._shapes, Program(opaque="it gives other values under a dispatch mode"))
            return None
        learned.record(self._shapes, recorder.program())
        # This asks the selectors.
        decisions, _ = learned.decisions(self._shapes, choices)
        if decisions is not None:
            self._scope.ledger.note_unused(decisions.unused)
            if decisions.is_whole and decisions.program.gathers:
                self._scope.ledger.note(
                    f"FSDP gathers parameters of modules inside of {self._label}: it is recomputed whole, since a "
                    f"later replay would gather them again"
                )
            elif decisions.is_whole:
                self._scope.ledger.note(
                    f"{self._label} runs collectives, and save or offload names none: it is recomputed whole, so that "
                    f"all ranks repeat them"
                )
        return collector

    def _recorder(self, **options: Any) -> Recorder:
        root, choices = self._function.module, self._choices
        assert choices is not None
        inside = [each for each in self._state.modules() if each is not root]
        return Recorder(choices, root, gathers=any(map(is_sharded, inside)), **options)

    def _replay_once(self, compares: bool, mode: Recorder | PartialReplay | None = None) -> Collector:
        """Replay the function, under a mode if there is one, and collect the tensors that it saves."""
        outputs, shared = self._dropped_outputs(), many_processes()
        wanted = {number for number, slot in enumerate(self._slots) if slot() is not None}
        changed = self._reached.changed()
        # An optimizer may have stepped weights that only the rest of the function reads.
        ends_early = shared or not compares or (bool(changed) and not (self._is_observed or isinstance(mode, Recorder)))
        # If forward still runs, it has come no further.
        stops_early = self._stops_early and not self._learned.puts_back
        stops = self._is_running or (stops_early and ends_early and not self._needs_outputs())
        until = len(self._metas) - 1 if shared else max(wanted, default=-1)
        fingerprints = self._fingerprints.found
        output_fingerprints: list[torch.Tensor | None] | None = self._output_fingerprints
        if isinstance(mode, PartialReplay):
            # Tensors that are left out have no content. Outputs may be among them.
            until = max((*wanted, mode.decisions.until))
            fingerprints = {
                number: found for number, found in fingerprints.items() if number in mode.decisions.recomputed
            }
            output_fingerprints = None
        collector = Collector(
            self._label,
            wanted,
            outputs,
            until if stops else None,
            self._metas,
            fingerprints if compares else None,
            output_fingerprints,
            self._reached.storages(),
            {storage_key(tensor.untyped_storage()): (tensor, v) for tensor, v in changed if is_strided(tensor)},
            checks=self._checks,
            saves=None if mode is None else mode.saves,
            shared=shared,
            may_end=mode.all_saved if shared and isinstance(mode, Recorder) else None,
            refuse_unpack=mode.was_unpacked if isinstance(mode, PartialReplay) else None,
        )
        self._run_into(collector, changed, mode)
        return collector

    def _needs_outputs(self) -> bool:
        """Whether a replay goes to the end, for the function's output."""
        return self._drops_output and (many_processes() or bool(self._dropped_outputs()))

    def _dropped_outputs(self) -> dict[int, int]:
        """Numbers of outputs that must be recomputed, with their places among the tensors of the output."""
        slots = [slot() for slot in self._outputs]
        return {slot.number: slot.index for slot in slots if slot is not None and slot.is_dropped()}

    def _run_into(
        self,
        collector: Collector,
        changed: Sequence[tuple[torch.Tensor, int]],
        mode: Recorder | PartialReplay | None,
        around: AbstractContextManager[object] | None = None,
    ) -> None:
        """Run the function, with a context around it within the mode."""
        with below_modes(self._subclass), torch.enable_grad():
            inputs = zip(self._unpack_inputs(), self._tensors, strict=True)
            tensors = [
                tensor
                if grad and tensor.requires_grad and tensor.is_leaf and not written
                else replay_argument(tensor, grad, written)
                for tensor, (*_, grad, written) in inputs
            ]
        known = [*tensors, *self._reached.tensors()]
        collector.know(known)
        first_hook = next_hook()
        if isinstance(mode, Recorder):
            mode.begin(tensors)
        output = None
        with self._as_of_forward(changed):
            try:
                with (
                    replaying(),
                    saved_tensors_hooks(collector.pack, collector.unpack),
                    mode or _NOTHING,
                    around or _NOTHING,
                ):
                    output = self._function(*tensors, within=self._reached.as_before(collector.function_ended))
                    collector.gave(output)
            except ReplayEnded:
                pass
            except Exception:
                # The function may have raised another error after ours.
                if collector.refused:
                    raise RecomputeError(collector.refused) from None
                if not collector.has_ended:
                    raise
            finally:
                collector.end()
                if next_hook() != first_hook:
                    # Forward has registered its hooks already, on the same tensors and modules. Function modes must
                    # not see this.
                    owners: list[torch.Tensor | torch.nn.Module] = [*known, *self._state.modules()]
                    with disable_function():
                        for owner in owners:
                            remove_hooks(owner, first_hook)
        if isinstance(mode, Recorder):
            mode.gave(output)
        del output
