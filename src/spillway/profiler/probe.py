"""Measures one call of a block, operator by operator: the time of each, and the values that it makes and holds.

NOTE [ Small operators ]

An operator may take less time than the CPU needs to launch it, and would be measured by the CPU. So the block's
operators are queued behind work that keeps the device busy for a while, with events between them, and run one right
after the other when it ends. That work is products of matrices: after a mere pause, a device's clocks would be others
than in a step. In a first step kernels are loaded and memory is allocated, and the CPU may not be done when the work
has ended. The measured times are then the CPU's, and another call is measured.

NOTE [ Operators are measured in backward ]

To measure a block's operators, its function runs one more time. This run comes right before the first replay. In
forward, hooks inside of the block would add its tensors to those that the model collects for its loss, such as the
logits of routers. It comes in forward only if there is no replay.

With several ranks, this run ends before the first collective: the ranks may measure other calls. Then the first replay
is measured instead. Without a replay, operators before the collective are all that is known of the block.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from spillway._torch import disable_modes
from spillway.checkpointing.blocks import is_compiled
from spillway.checkpointing.call import CheckpointedCall
from spillway.checkpointing.collector import Collector
from spillway.checkpointing.program import Operator
from spillway.checkpointing.recorder import Recorder
from spillway.checkpointing.selectors import Choices, full_name
from spillway.checkpointing.slots import SavedSlot
from spillway.checkpointing.tensors import OperatorMode, is_strided, tensors_in
from spillway.errors import printable
from spillway.planner.profile import OperatorProfile, ReplayRule, SavedParameter, Value
from spillway.profiler.meter import GRAIN, AcceleratorMeter, ClockMeter, Meter
from spillway.runtime.system import many_processes
from spillway.saved_tensors.handles import Handle
from spillway.saved_tensors.locator import Locator

_WIDTH = 4096
_ODD = 251
_PRODUCTS = 500
"""About 100 ms on a fast device, and fewer launches than may be queued."""
_MOST_TRIES = 3
_PACKAGES = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__)))
"""Folders of torch and of this package: their lines say nothing about a model."""
_GENERATED = "<eval_with_key>"
"""The file of code that ``torch.fx`` makes."""
_VIEWS = frozenset(("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ExpandBackward0"))
"""Views of a cast weight that a matrix product may save."""


class Probe(OperatorMode):
    """Measures the operators of one call of a ``block``.

    ``before`` is the probe of an earlier call, which was not complete.

    As a dispatch mode it is above the one that records.
    """

    def __init__(
        self,
        device: torch.device,
        before: Probe | None = None,
        meter: Meter | None = None,
        block: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._recorder: Recorder | None = None
        if meter is None:
            meter = ClockMeter() if device.type == "cpu" else AcceleratorMeter(device)
        self._meter = meter
        self._marks = 0
        self._tries: int = 1 if before is None else before._tries + 1
        self.was_missed = before is not None and before._ended is None
        """Whether no backward came to the call of the probe before."""
        self._busy: torch.Event | None = None
        """The end of the work that keeps the device busy."""
        self._was_late = False
        """Whether that work ended before the CPU had queued all operators."""
        self._begins: dict[int, int] = {}
        """The mark at which each operator began: the next one is its end."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._nbytes: dict[int, int] = {}
        self._dies_at: dict[int, int] = {}
        self.operators: tuple[OperatorProfile, ...] | None = None
        """Known once the call has ended and :meth:`read` was called."""
        self.values: tuple[Value, ...] = ()
        self.saves_at: tuple[int, ...] = ()
        self.parameters: tuple[SavedParameter, ...] = ()
        """Parameters that autograd saves, in the order in which backward needs them."""
        self.groups: list[Any] = []
        """Process groups in which the block communicates."""
        self.shared_inputs: set[int] = set()
        """Places of tensors that other blocks share, and that may be offloaded."""
        self._ended: tuple[list[Operator], tuple[Value, ...]] | None = None
        self._block: Callable[[], torch.nn.Module | None] = (lambda: None) if block is None else weakref.ref(block)
        self._locator: Locator | None = None
        self._called_at, self._runs_at = calling_line(), ""
        """The model's line that calls the block, and the line outside of the measured run, which may be in backward."""
        self._found: dict[int, tuple[str, str]] = {}
        """Module and line of each operator, by places."""

    @property
    def is_complete(self) -> bool:
        """Whether the call has ended, and was timed by the device's clock if it can be."""
        return self._ended is not None and (not self._was_late or self._tries >= _MOST_TRIES)

    def around(self, recorder: Recorder) -> AbstractContextManager[None]:
        """A context around the run of the function."""
        self._runs_at = calling_line()
        return self._around(recorder)

    @contextmanager
    def _around(self, recorder: Recorder) -> Iterator[None]:
        if self._device.type not in ("cpu", "meta"):
            _keep_busy(self._device)
            self._busy = torch.Event(self._device)
            self._busy.record(torch.accelerator.current_stream(self._device))
        self._recorder, block = recorder, self._block()
        # A run before may have ended before a collective.
        for known in (self._begins, self._alive, self._nbytes, self._dies_at, self._found):
            known.clear()
        # Torch warns of hooks if a compiled module is called.
        may_hook = block is not None and not any(map(is_compiled, block.modules()))
        try:
            with Locator(modules=may_hook, operators=False, root=block) as self._locator, self:
                yield
        finally:
            self._recorder = self._locator = None

    def ended(self, recorder: Recorder) -> None:
        count = len(recorder.operators)
        self._was_late = self._busy is not None and self._busy.query()
        self._note_deaths(count)
        saved_at: dict[int, int] = {}
        saved_last_at: dict[int, int] = {}
        constants: dict[int, bool] = {}
        for each in recorder.saved:
            if each.value is not None and not each.is_parameter:
                saved_at.setdefault(each.value, each.place)
                saved_last_at[each.value] = each.place
                constants[each.value] = not each.requires_grad
        inputs = {value for values in recorder.inputs for value in values}
        made = recorder.makers.keys() | recorder.casts
        values = []
        for number in range(recorder.count):
            place = recorder.makers.get(number)
            is_input = number in inputs and place is None and self._is_offloadable(recorder, number)
            is_saved = number in saved_at and (number in made or is_input)
            nbytes = self._nbytes.get(number, 0)
            if number not in made:
                nbytes = recorder.outside[number].nbytes if number in recorder.outside else 0
            values.append(
                Value(
                    nbytes=nbytes,
                    maker=place,
                    is_input=is_input,
                    # Inputs may be offloaded at once.
                    saved_at=(0 if is_input else saved_at[number]) if is_saved else None,
                    saved_last_at=saved_last_at[number] if is_saved else None,
                    # The caller holds the outputs.
                    dies_at=count + 1
                    if place is None or number in recorder.outputs
                    else self._dies_at.get(number, count),
                    is_constant=is_saved and not is_input and constants[number],
                    is_cast=number in recorder.casts,
                )
            )
        self.saves_at = tuple(recorder.saves_at)
        self.parameters = tuple(
            SavedParameter(each.place, each.recipe.size.numel() * each.recipe.dtype.itemsize)
            for each in reversed(recorder.saved)
            if each.is_parameter and each.recipe is not None
        )
        self._ended = list(recorder.operators), tuple(values)
        self._inputs, self.groups = list(recorder.inputs), recorder.groups
        is_whole = recorder.gathers or recorder.has_ended or bool(recorder.collectives)
        self._opaque = is_whole or recorder.values.opaque is not None
        self._alive.clear()

    def read(self, shared: Collection[int]) -> None:
        """Make profiles of the operators. Other blocks share the tensors at these places. Waits for the device."""
        assert self._ended is not None
        calls, values = self._ended
        places = {place: self._inputs[place] for place in shared if place < len(self._inputs)}
        others = {value for found in places.values() for value in found}
        self.shared_inputs = {place for place, found in places.items() if any(values[each].is_input for each in found)}
        self.values = tuple(
            replace(value, is_input=False, saved_at=None, saved_last_at=None) if number in others else value
            for number, value in enumerate(values)
        )
        readings = self._meter.finish()
        operators = []
        for place, call in enumerate(calls):
            seconds, workspace, mark = 0.0, 0, self._begins.get(place)
            if mark is not None:
                begin, end = readings[mark], readings[mark + 1]
                seconds = end.seconds - begin.seconds
                workspace = max(end.peak - max(begin.level, end.level), 0)
            module, line = self._found.get(place, ("", ""))
            always = self._opaque or (call.always_runs and not call.is_view)
            operators.append(
                OperatorProfile(
                    name=full_name(call.func),
                    seconds=seconds,
                    reads=call.reads,
                    makes=call.makes,
                    writes=call.writes,
                    replay=ReplayRule.ALWAYS if always else ReplayRule.VIEW if call.is_view else ReplayRule.FREE,
                    workspace_bytes=workspace,
                    module=module,
                    line=line,
                )
            )
        self.operators = tuple(operators)

    def _is_offloadable(self, recorder: Recorder, number: int) -> bool:
        outside = recorder.outside[number]
        # The user holds a leaf anyway.
        is_ours = outside.device == self._device and not (outside.is_leaf and outside.requires_grad)
        return is_ours and outside.storage() is not None and outside.is_floating_point

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder, locator = self._recorder, self._locator
        assert recorder is not None and locator is not None
        place = len(recorder.operators)
        self._note_deaths(place)
        self._meter.mark()
        output = func(*args, **(kwargs or {}))
        self._meter.mark()
        self._marks += 2
        # The recorder has counted it, or it may have been a cast.
        is_counted = len(recorder.operators) > place
        if is_counted:
            self._begins[place] = self._marks - 2
            line = calling_line()
            self._found[place] = locator.here()[0] or "", self._called_at if line == self._runs_at else line
        makes = recorder.operators[place].makes if is_counted else recorder.casts
        for part in tensors_in((output,)):
            value = recorder.values.find(part)
            if value is not None and value in makes:
                storage = part.untyped_storage()
                self._nbytes[value] = -(-storage.nbytes() // GRAIN) * GRAIN
                if is_counted:
                    self._alive[value] = weakref.ref(storage)
        return output

    def _note_deaths(self, place: int) -> None:
        """Note the values that died before this place."""
        dead = [value for value, storage in self._alive.items() if storage() is None]
        for value in dead:
            del self._alive[value]
            self._dies_at[value] = place


@dataclass(frozen=True, slots=True)
class ProfilerListener:
    """Listens to one call. It changes nothing."""

    probe: Probe | None
    """Measures the call's operators: then the function runs one more time."""
    asked: Callable[[int, torch.Tensor | None], None]
    """Called when backward unpacks a tensor that was saved after so many operators, with the tensor if a replay made
    it."""
    casts: Callable[[torch.UntypedStorage], None]
    """Called with memory of a cast of a leaf that forward saves."""

    def call(self, *args: Any, **options: Any) -> ProfiledCall:
        """A checkpointed call that is listened to, with the arguments of :class:`CheckpointedCall`."""
        return ProfiledCall(self, *args, **options)


class ProfiledCall(CheckpointedCall):
    """One call that tells a listener of its casts, its operators and the requests of backward."""

    def __init__(self, listener: ProfilerListener, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.holds_values = True
        self._listener = listener
        self._unmeasured = None if self._is_captured else listener.probe
        """The probe, until it has measured the call's operators."""
        self._in_replay: Probe | None = None
        """The same probe, if it must measure the first replay."""

    def _packing(self) -> Callable[[torch.Tensor], SavedSlot | Handle]:
        pack_unprofiled = super()._packing()

        def pack(tensor: torch.Tensor) -> SavedSlot | Handle:
            if is_strided(tensor) and casts_leaf(tensor):
                self._listener.casts(tensor.untyped_storage())
            return pack_unprofiled(tensor)

        return pack

    def _select(self, choices: Choices, tensors: Sequence[torch.Tensor]) -> None:
        super()._select(choices, tensors)
        if self._unmeasured is not None and many_processes():
            # In case that the first replay is measured.
            self._records = self._compares = self._draws = True

    def _has_returned(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        super()._has_returned(output, tensors)
        probe = self._unmeasured
        if probe is not None and (probe.was_missed or self._keeps or not self._metas):
            self._measure_operators(probe)
            self._replay_ended()

    def _replay(self) -> None:
        if self._unmeasured is not None and not self._is_running:
            self._measure_operators(self._unmeasured)
        super()._replay()

    def _measure_operators(self, probe: Probe) -> None:
        """Run the function one more time, and keep nothing of it. See NOTE [ Operators are measured in backward ]."""
        self._unmeasured = None
        recorder = self._recorder(ends_before_collectives=many_processes())
        collector = Collector(
            *(self._label, set(), {}, None, self._metas, None, None, self._reached.storages(), {}),
            checks=False,
            saves=recorder.saves,
            holds=self._keeps,
        )
        ambient = self._ambient
        # Cached casts would not be seen. The cache itself is the user's: two uses of a weight share a cast.
        self._ambient = ambient._replace(caches=False)
        try:
            self._run_into(collector, (), recorder, probe.around(recorder))
        finally:
            self._ambient = ambient
        probe.ended(recorder)
        if recorder.has_ended:
            self._in_replay = probe
            return
        self._program = recorder.program()
        self._learned.record(self._shapes, self._program)
        self._records = False

    def _run_into(self, collector: Collector, changed: Any, mode: Any, around: Any = None) -> None:
        probe = self._in_replay if around is None and isinstance(mode, Recorder) else None
        if probe is None:
            super()._run_into(collector, changed, mode, around)
            return
        self._in_replay = None
        super()._run_into(collector, changed, mode, probe.around(mode))
        probe.ended(mode)
        self._program = mode.program()

    def value_of(self, slot: SavedSlot) -> torch.Tensor:
        with self._lock:
            seen = None if slot.seen is None else slot.seen()
            value, program = super().value_of(slot), self._program
            if value is not seen and program is not None and slot.number < len(program.saved):
                self._listener.asked(program.saved[slot.number].place, value)
            return value


def casts_leaf(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is a cast of a leaf, or a view of one."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable")


def _keep_busy(device: torch.device) -> None:
    """See NOTE [ Small operators ]."""
    with torch.no_grad(), disable_modes():
        # Zeros would take less power than other numbers, and so less time.
        numbers = torch.arange(_WIDTH * _WIDTH, dtype=torch.int32, device=device).remainder_(_ODD)
        factor = numbers.view(_WIDTH, _WIDTH).to(torch.bfloat16)
        del numbers
        product = torch.empty_like(factor)
        for _ in range(_PRODUCTS):
            torch.mm(factor, factor, out=product)


def calling_line() -> str:
    """The innermost line of the model's code that is being run, as ``model.py:12``; empty if there is none."""
    # Without the frames' locals: to look at them would let tensors live longer.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_PACKAGES, _GENERATED)):
        frame = frame.f_back
    return "" if frame is None else f"{printable(os.path.basename(frame.f_code.co_filename))}:{frame.f_lineno}"
