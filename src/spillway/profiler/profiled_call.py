"""A checkpointed call that a profiler listens to.

NOTE [ Operators are measured in backward ]

To measure a block's operators, its function runs one more time. This run comes right before the first replay. In
forward, hooks inside of the block would add its tensors to those that the model collects for its loss, such as the
logits of routers. It comes in forward only if there is no replay.

With several ranks, this run ends before the first collective: the ranks may measure other calls. Then the first replay
is measured instead. Without a replay, operators before the collective are all that is known of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from spillway.checkpointing.call import CheckpointedCall
from spillway.checkpointing.collector import Collector
from spillway.checkpointing.recorder import Recorder
from spillway.checkpointing.selectors import Choices
from spillway.checkpointing.slots import SavedSlot
from spillway.checkpointing.tensors import is_strided
from spillway.runtime.system import many_processes
from spillway.saved_tensors.handles import Handle

if TYPE_CHECKING:
    from spillway.profiler.probe import Probe, ProfilerListener

_VIEWS = frozenset(("TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ExpandBackward0"))
"""Views of a cast weight that a matrix product may save."""


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
