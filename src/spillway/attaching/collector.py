"""Profiles an attached model in three steps of the user's own loop.

NOTE [ Stages of a search ]

Each call of the model in training begins a step, and each step has a stage. A step is judged when the next one begins.

| stage | the step that has ended | the next stage |
|---|---|---|
| each but ``ACTIVE`` | had no backward through the blocks | the same |
| ``PROFILING_OPERATORS`` | | ``PROFILING_MEMORY`` |
| ``PROFILING_MEMORY``, ``PROFILING_TIME`` | had a new kind of block | the same |
| ``PROFILING_MEMORY`` | had known kinds | ``PROFILING_TIME`` |
| ``PROFILING_TIME`` | had the kinds of the step before | ``WARMING_UP`` with the first plan |
| ``WARMING_UP`` | | ``VALIDATING`` |
| ``VALIDATING`` | recorded or compared replays, and was above the budget | the same, four times at most |
| ``VALIDATING`` | was within the budget | ``ACTIVE``, or once ``VALIDATING`` with torch's checkpointing |
| ``VALIDATING`` | was above the budget | ``VALIDATING`` with another plan; on several ranks ``WARMING_UP`` |
| ``VALIDATING`` | had torch's checkpointing beside a plan | ``ACTIVE`` with the plan before |
| ``ACTIVE`` | was above the budget | ``WARMING_UP`` with another plan |

A step may also begin otherwise than those before, once a plan is applied. If it begins with more bytes than planned
for, the next stage is ``WARMING_UP`` with a plan for these. If its inputs are larger, it is ``WARMING_UP`` in the least
memory, then with a plan for them. If they are more than twice the profiled ones, or no plan is for them, it is
``PROFILING_OPERATORS``.

NOTE [ Profiling steps ]

In the first three stages of the search for a plan, blocks are recomputed and their inputs are offloaded: no step takes
less memory.

``PROFILING_OPERATORS``
    One call of each kind of block is measured operator by operator.
``PROFILING_MEMORY``
    Memory is measured at the ends of blocks, and in a block's backward wherever it receives a saved tensor.
``PROFILING_TIME``
    Times are measured at the ends of blocks only, because each reading takes CPU time. After four steps of inputs of
    another size, the times of the step before are taken.

Frozen blocks before all others save nothing, and are left alone.
"""

from __future__ import annotations

import enum
import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from spillway.attaching.blocks import AppliedPlan, BlockTracing, DividedOptimizer, tensor_bytes
from spillway.attaching.ranks import ALONE, RankGroup, shared_profile
from spillway.checkpointing.losses import own_losses
from spillway.errors import UsageError
from spillway.planner.profile import Profile, Static, enlarged, risen
from spillway.profiler.compile import compile_profile
from spillway.profiler.meter import known_bytes
from spillway.session import MIN_BYTES, Session
from spillway.units import parse_bytes

if TYPE_CHECKING:
    from spillway.attaching.block import BlockCall
    from spillway.parameters.streamed import StreamedModel
    from spillway.planner.plan import Plan
    from spillway.profiler.step_trace import StepTrace

_LOG = logging.getLogger("spillway.attach")
_MOST_OTHER_KINDS = 4
"""Steps of other kinds of blocks than the step whose memory was measured."""
_MOST_NEW_KINDS = 32
_MOST_WAITING = 256
"""Steps in which an optimizer may take none."""


class Stage(enum.Enum):
    """See NOTE [ Stages of a search ]."""

    PROFILING_OPERATORS = "profiling operators"
    PROFILING_MEMORY = "profiling memory"
    PROFILING_TIME = "profiling time"
    WARMING_UP = "warming up"
    VALIDATING = "validating"
    ACTIVE = "active"

    def log(self, model: str) -> None:
        """Say in the log that the search for a model's plan has come to this stage."""
        _LOG.info("%s: %s", model, self.value)


PROFILING = (Stage.PROFILING_OPERATORS, Stage.PROFILING_MEMORY, Stage.PROFILING_TIME)


class Notes(list[str]):
    """Notes on a search for the user."""

    def once(self, what: str) -> None:
        if what not in self:
            self.append(what)


class ProfileCollector:
    """Makes a profile of traced steps. See NOTE [ Profiling steps ].

    The state of ``optimizer`` is offloaded; that of ``stepped`` is not, and the profile tells it apart. The model
    computes on ``device``, by default where it is. It is not kept alive.
    """

    spare_bytes = 0
    """Bytes that the budget leaves if no block does anything."""

    def __init__(
        self,
        model: Module,
        session: Session | None,
        min_bytes: int | str | None = None,
        *,
        optimizer: DividedOptimizer | None = None,
        stepped: torch.optim.Optimizer | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.model = type(model).__name__
        self.device = device_of(model) if device is None else device
        self.tracing = BlockTracing(self.device, session)
        self.applied = AppliedPlan(self.tracing, optimizer)
        self.min_bytes = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")
        self.stage = Stage.PROFILING_OPERATORS
        self.profile: Profile | None = None
        """The profile of the measured step."""
        self.measured_inputs = 0
        """Bytes of the model's inputs in that step."""
        self.is_rough = False
        """Whether kinds of blocks in that step had not come before."""
        self.is_waiting = False
        """Whether the profile only lacks steps of the optimizer."""
        self.notes = Notes()
        self.losses = own_losses(model)
        """Losses of the model's modules, which are computed in rows."""
        self._module = weakref.ref(model)
        self._stepped = stepped
        self._inputs = 0
        self._statics: Static | None = None
        """The bytes at the start of the step whose memory is measured."""
        self._weighed: StepTrace | None = None
        """The step whose memory was measured."""
        self._other_kinds = self._new_kinds = self._waited = 0

    @property
    def is_plain(self) -> bool:
        return self.applied.is_plain

    def manage(self, blocks: Sequence[BlockCall], plan: Plan | None = None) -> None:
        """From now on, say how these blocks are called, by a plan if there is one."""
        self.applied.manage(blocks)
        if plan is None:
            self.restart()
        else:
            self.applied.apply(plan, is_given=True)

    def stream(self, blocks: Sequence[str], streams: StreamedModel) -> None:
        """These blocks, or parts of them, are streamed: their copies are told apart, and plans place their weights."""
        self.tracing.stream(blocks, streams.blocks)
        self.applied.stream(streams)

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: the step before has ended."""
        if not self.tracing.is_elsewhere:
            self.finish()
            self.begin_step(self.stage, tensor_bytes(args, kwargs))

    def evaluates(self) -> None:
        """The model is called in evaluation."""
        self.tracing.evaluates()

    def finish(self) -> None:
        """The step has ended, and the next one need not come."""
        trace = self.tracing.end()
        if self.profile is None:
            self.advance(trace)

    def drop(self) -> None:
        """Measure nothing any more, and give the session its in-flight limit back."""
        self.tracing.drop()
        self.applied.drop()

    def begin_step(self, stage: Stage, inputs: int) -> None:
        """Trace a step, with so many bytes of inputs."""
        self._inputs = inputs
        is_weighed = stage is Stage.PROFILING_MEMORY
        if is_weighed:
            self._statics = self._known()
        self.tracing.begin(
            is_timed=stage is Stage.PROFILING_TIME,
            is_weighed=is_weighed,
            is_recorded=is_weighed or stage is Stage.PROFILING_OPERATORS,
        )

    def advance(self, trace: StepTrace | None, ranks: RankGroup = ALONE) -> bool:
        """A profiling step has ended; whether there is a profile. Ranks go through the stages in step."""
        is_enough = trace is not None and self._shows_enough(trace)
        if not all(ranks.share(self.stage.value, lambda: is_enough)):
            return False
        assert trace is not None
        if self.stage is Stage.PROFILING_TIME:
            self.profile = shared_profile(ranks.share("profile", lambda: self._compiled(trace)))
            # The profile has all that they measured, in fewer bytes.
            self.tracing.probes.clear()
            self._weighed = None
            return True
        if self.stage is Stage.PROFILING_MEMORY:
            self._weighed, self._other_kinds, self.measured_inputs = trace, 0, self._inputs
        self.stage = PROFILING[PROFILING.index(self.stage) + 1]
        self.stage.log(self.model)
        return False

    def restart(self) -> None:
        """Forget the profile: blocks take the least memory again."""
        self.stage = Stage.PROFILING_OPERATORS
        self.stage.log(self.model)
        self.tracing.probes.clear()
        self.profile = self._weighed = None
        self._new_kinds = self._waited = 0
        self.is_rough = self.is_waiting = False
        self.applied.withdraw()

    def enlarged(self, inputs: int) -> Profile:
        """The profile for inputs of so many bytes, if they are larger."""
        assert self.profile is not None
        return enlarged(self.profile, max(inputs / max(self.measured_inputs, 1), 1.0))

    def risen(self, profile: Profile, nbytes: int) -> Profile:
        """A profile for a step that begins with so many bytes more than the measured one."""
        assert self._statics is not None
        more = self._known().gradients - self._statics.gradients
        return risen(profile, nbytes, has_gradients=2 * more > profile.gradient_bytes > 0)

    def _known(self) -> Static:
        """Bytes of weights, gradients and state."""
        model = self._module()
        # A call of the model is running.
        assert model is not None
        return known_bytes(model, self.device, self._stepped)

    def _shows_enough(self, trace: StepTrace) -> bool:
        """Whether a step shows all that its stage needs."""
        if self.stage is Stage.PROFILING_OPERATORS:
            return True
        if self.tracing.probed:
            # Its memory is not a step's. If no size comes twice, there is no better one.
            self._new_kinds += 1
            self.is_rough = self._new_kinds > _MOST_NEW_KINDS
            return self.is_rough
        if self.stage is Stage.PROFILING_MEMORY:
            return True
        if not self._is_as_weighed(trace):
            self._other_kinds += 1
            if self._other_kinds <= _MOST_OTHER_KINDS:
                return False
        # The optimizer is measured, too, or is given up.
        optimizer = self.applied.optimizer
        self.is_waiting = optimizer is not None and optimizer.profile() is None
        if not self.is_waiting:
            return True
        self._waited += 1
        if self._waited < _MOST_WAITING:
            return False
        self.notes.once(
            f"the optimizer took no two steps in {_MOST_WAITING} calls of the model: all of it is on the CPU"
        )
        self.applied.optimizer, self.is_waiting = None, False
        return True

    def _compiled(self, trace: StepTrace) -> Profile:
        """The profile, of the step whose memory was measured and of one whose times were."""
        assert self._weighed is not None
        profile = compile_profile(
            # Memory decides what fits. So that step gives the times, too, if no other one is like it.
            trace if self._is_as_weighed(trace) else self._weighed,
            self._weighed,
            self.tracing.probes,
            model=self.model,
            device=self.device,
            min_bytes=self.min_bytes,
            known=self._statics,
        )
        calls = tuple(replace(each, read_seconds=self.tracing.read_seconds(each.name)) for each in profile.calls)
        optimizer = self.applied.optimizer
        return replace(profile, calls=calls, optimizer=None if optimizer is None else optimizer.profile())

    def _is_as_weighed(self, trace: StepTrace) -> bool:
        assert self._weighed is not None
        return [call.kind for call in self._weighed.calls] == [call.kind for call in trace.calls]


def device_of(model: Module) -> torch.device:
    """The device where a model computes."""
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise UsageError(
            f"{type(model).__name__} has no parameters, so there is nothing to plan for; attach to the module that "
            f"has them"
        )
    return parameter.device
