"""Profiles an attached model in three steps of the user's own loop, and applies plans to its blocks.

NOTE [ Profiling steps ]

In the first three stages of the search for a plan, blocks are recomputed and their inputs are offloaded: no step takes
less memory.

``PROFILING_OPERATORS``
    One call of each kind of block is measured operator by operator.
``PROFILING_MEMORY``
    Memory is measured at the ends of blocks, and in a block's backward wherever it receives a saved tensor.
``PROFILING_TIME``
    Times are measured at the ends of blocks only, because each reading takes CPU time. The CPU's lead over the device
    at the end of the step is measured, too (``compile.py``). Inputs of another size have other times. After four such
    steps, the times of the step before are taken.

A step without a backward through the blocks is repeated. So is a step in which a new kind of block was measured
operator by operator. An optimizer whose state is offloaded steps on the CPU meanwhile. ``PROFILING_TIME`` lasts until
it has stepped twice.

The collector traces one step at a time, and one thread. Calls in other threads are ignored. So is the replay of an
earlier step, whose tracer is closed. Frozen blocks before all others save nothing, and are left alone.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module

from spillway._torch import tree_leaves
from spillway.attaching.ranks import ALONE, RankGroup, shared_profile
from spillway.checkpointing.blocks import signature
from spillway.checkpointing.learned import LearnedFunctions
from spillway.checkpointing.losses import own_losses
from spillway.checkpointing.selectors import Planned
from spillway.errors import UsageError
from spillway.planner.plan import BlockPlan, Plan
from spillway.planner.profile import OptimizerProfile, Profile, Static, enlarged, risen
from spillway.profiler.compile import compile_profile, queues, without_lead
from spillway.profiler.meter import known_bytes
from spillway.profiler.probe import Probe, ProfilerListener
from spillway.profiler.step_trace import StepTrace, StepTracer
from spillway.recomputing import Recompute
from spillway.runtime.mover import Mover
from spillway.session import MIN_BYTES, Session
from spillway.types import Decision
from spillway.units import parse_bytes

if TYPE_CHECKING:
    from spillway.attaching.block import BlockCall, Traced

LEAST = Recompute(offload="inputs")
"""The least memory: everything is recomputed, and inputs are offloaded meanwhile."""
_LOG = logging.getLogger("spillway.attach")
_MOST_PROBES = 256
_MOST_OTHER_KINDS = 4
"""Steps of other kinds of blocks than the step whose memory was measured."""
_MOST_NEW_KINDS = 32
_MOST_WAITING = 256
"""Steps in which an optimizer may take none."""
_LAG = 0.1
"""Seconds by which the device is made to lag behind the CPU to be timed."""
_SHORT_LAG = 0.03
"""Seconds of lag in the step whose memory is measured: the CPU does not fill the device's queue meanwhile."""


class Stage(enum.Enum):
    """Stages of the search for a plan. See NOTE [ Profiling steps ], and NOTE [ How a plan is found ]."""

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


class DividedOptimizer(Protocol):
    """An optimizer that steps a fraction of its elements on the CPU."""

    def divide(self, fraction: float) -> None:
        """From the next step on, step this fraction of all elements on the CPU."""

    def profile(self) -> OptimizerProfile | None:
        """The cost of stepping all of them there; ``None``: it has not stepped twice yet."""


class ProfileCollector:
    """Traces the calls of a model's blocks, and makes a profile. See NOTE [ Profiling steps ].

    It also says how blocks are called: recomputed in the least memory, or by a plan.

    Args:
        model: on one device. It is not kept alive.
        session: ``None``: the default one.
        min_bytes: smaller tensors are not offloaded. ``None``: 1 MiB.
        optimizer: the one whose state is offloaded, if there is one.
        stepped: an optimizer whose state the profile tells apart.
        has_lead: whether the CPU can be ahead of the device when a step begins.
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
        has_lead: bool = True,
    ) -> None:
        self.model = type(model).__name__
        self.device = device_of(model)
        self.min_bytes = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")
        self.optimizer = optimizer
        self.plan: Plan | None = None
        """The plan that was applied since profiling began."""
        self.stage = Stage.PROFILING_OPERATORS
        self.profile: Profile | None = None
        """The profile of the measured step."""
        self.measured_inputs = 0
        """Bytes of the model's inputs in that step."""
        self.is_rough = False
        """Whether kinds of blocks in that step had not come before."""
        self.applied = 0
        """How many plans were applied."""
        self.idle_steps = 0
        """Consecutive steps without a backward."""
        self.is_waiting = False
        """Whether the profile only lacks steps of the optimizer."""
        self.is_left_alone = False
        """Whether nothing is done in its blocks, since no backward comes through them."""
        self.notes = Notes()
        self.losses = own_losses(model)
        """Losses of the model's modules, which are computed in rows."""
        self._module = weakref.ref(model)
        self._session = session
        self._stepped = stepped
        self._has_lead = has_lead
        self._blocks: Sequence[BlockCall] = ()
        self._probes: dict[Hashable, Probe] = {}
        self._traced: Stage | None = None
        """The stage of the traced step."""
        self._tracer: StepTracer | None = None
        self._cut: StepTrace | None = None
        """A step that ended before the next one began."""
        self._is_cut = False
        self._has_probed = False
        """Whether a block of the step is measured operator by operator."""
        self._inputs = 0
        self._statics: Static | None = None
        """The bytes at the start of the step whose memory is measured."""
        self._weighed: StepTrace | None = None
        """The step whose memory was measured."""
        self._other_kinds = self._new_kinds = self._waited = 0

    @property
    def is_plain(self) -> bool:
        return self.plan is not None and all(block.plain for block in self.plan.blocks)

    def manage(self, blocks: Sequence[BlockCall], plan: Plan | None = None) -> None:
        """From now on, decide how these blocks are called, by a plan if there is one."""
        self._blocks = blocks
        for block in blocks:
            block.collector = self
        if plan is None:
            self.restart()
        else:
            self.apply(plan, is_given=True)

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: the step before has ended."""
        if not self.is_elsewhere:
            self.finish()
            self.begin_step(self.stage, tensor_bytes(args, kwargs))

    def evaluates(self) -> None:
        """The model is called in evaluation, which ends the step before it."""
        tracer = self._tracer
        if tracer is not None and tracer.has_backward and tracer.thread is threading.current_thread():
            self.cut()

    def finish(self) -> None:
        """The step has ended, and the next one need not come."""
        trace = self.end_step()
        if self.profile is None:
            self.advance(trace)

    def drop(self) -> None:
        """Measure nothing any more, and give the session its in-flight limit back."""
        self._cut = None
        tracer = self._pop_tracer()
        if tracer is not None:
            tracer.close()
        self._probes.clear()
        if not self.session.closed:
            self._mover.claim(self, None)

    @property
    def is_elsewhere(self) -> bool:
        """Whether a step is traced in another thread, which still runs."""
        thread = None if self._tracer is None else self._tracer.thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()

    def begin_step(self, stage: Stage, inputs: int, lead: float = 0.0) -> None:
        """Trace a step, with so many bytes of inputs, and the CPU so many seconds ahead of the device."""
        self._traced, self._inputs, self._has_probed = stage, inputs, False
        is_timed, is_weighed = stage is Stage.PROFILING_TIME, stage is Stage.PROFILING_MEMORY
        if is_weighed:
            self._statics = self._known()
            lead = _SHORT_LAG if self._has_lead and queues(self.device) else lead
        lag = _LAG if is_timed else 0.0
        self._tracer = StepTracer(self.device, self.carried, times_host=is_timed, lag=lag, lead=lead)
        if is_weighed:
            self._mover.listen(self._tracer.moves)

    def cut(self) -> None:
        """The step ends here, and not at the start of the next one."""
        self._cut = self._finish() or self._cut

    def end_step(self) -> StepTrace | None:
        """The measurements of the step; ``None`` if it had no backward."""
        trace, cut, self._cut = self._finish(), self._cut, None
        self._is_cut = trace is None and cut is not None
        return cut if trace is None else trace

    def advance(self, trace: StepTrace | None, ranks: RankGroup = ALONE) -> bool:
        """A profiling step has ended; whether there is a profile. Ranks go through the stages in step."""
        is_enough = trace is not None and self._shows_enough(trace)
        if not all(ranks.share(self.stage.value, lambda: is_enough)):
            return False
        assert trace is not None
        if self.stage is Stage.PROFILING_TIME:
            self.profile = shared_profile(ranks.share("profile", lambda: self._compiled(trace)))
            # The profile has all that they measured, in fewer bytes.
            self._probes.clear()
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
        self._probes.clear()
        self.plan = self.profile = self._weighed = None
        self._new_kinds = self._waited = 0
        self.is_rough = self.is_waiting = False
        self.use_least_memory()
        if self.optimizer is not None:
            self.optimizer.divide(1.0)
        if self.applied and not self.session.closed:
            self._mover.claim(self, None)

    def use_least_memory(self) -> None:
        """From the next call on, blocks take the least memory."""
        for block in self._blocks:
            block.how = None if self.is_left_alone else LEAST

    def apply(self, plan: Plan, *, is_given: bool = False) -> None:
        """From the next call on, blocks do as the plan says. Those that it does not name take the least memory.

        Raises:
            UsageError: if it is of another model: a given one has to name all blocks that are trained.
        """
        known = {block.name: block for block in plan.blocks}
        names = {call.name for call in self._blocks}
        modules = {call.name: module for call in self._blocks if (module := call.module()) is not None}
        trained = {name for name, module in modules.items() if any(each.requires_grad for each in module.parameters())}
        frozen = modules.keys() - known.keys() - trained
        if known.keys() | frozen != names and (is_given or not known.keys() <= names):
            odd = sorted((known.keys() | frozen) ^ names)
            raise UsageError(
                f"plan: got one for {plan.model} with {len(known)} blocks, expected the {len(names)} of this model "
                f"({', '.join(map(repr, odd[:3]))} only one of them has); make a plan of this model's own profile"
            )
        for call in self._blocks:
            block = known.get(call.name)
            call.how = None if call.name in frozen else LEAST if block is None else how_of(block)
        self.plan = plan
        self.applied += 1
        self._mover.claim(self, plan.window, plan.ahead)
        if self.optimizer is not None and plan.optimizer_fraction is not None:
            self.optimizer.divide(plan.optimizer_fraction)

    def enlarged(self, inputs: int) -> Profile:
        """The profile for inputs of so many bytes, if they are larger."""
        assert self.profile is not None
        return enlarged(self.profile, max(inputs / max(self.measured_inputs, 1), 1.0))

    def risen(self, profile: Profile, nbytes: int) -> Profile:
        """A profile for a step that begins with so many bytes more than the measured one."""
        assert self._statics is not None
        more = self._known().gradients - self._statics.gradients
        return risen(profile, nbytes, has_gradients=2 * more > profile.gradient_bytes > 0)

    @property
    def learned(self) -> int:
        """How many calls of its blocks were recorded or compared, and so cost more than others."""
        learned = self.session.of(LearnedFunctions)
        modules = [module for block in self._blocks if (module := block.module()) is not None]
        return sum(call.learned_from for each in modules for call in learned.of(weakref.ref(each)).calls.values())

    @property
    def session(self) -> Session:
        return self._session if self._session is not None else Session.default()

    def carried(self) -> int:
        """Bytes on the device that are being offloaded or reloaded."""
        counts = self._mover.counts()
        return counts["leaving bytes"] + counts["shared bytes"] + counts["returning bytes"]

    def block_begins(
        self, call: BlockCall, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Traced | None:
        """A block is called; gives the step's tracer and the number of the call, if it is traced."""
        call.listener = None
        tracer = self._tracer
        if tracer is None or tracer.thread is not threading.current_thread():
            return None
        kind = kind_of(module, tensors_of(args, kwargs))
        # New kinds of blocks are measured operator by operator.
        is_recorded = self._traced in (Stage.PROFILING_OPERATORS, Stage.PROFILING_MEMORY)
        probe = self._probe_of(kind) if is_recorded else None
        number = tracer.block_begins(call.name, kind, (args, kwargs))
        if is_recorded:
            call.listener = ProfilerListener(probe, partial(tracer.asked, number), tracer.casts)
        return tracer, number

    def _known(self) -> Static:
        """Bytes of weights, gradients and state."""
        model = self._module()
        # A call of the model is running.
        assert model is not None
        return known_bytes(model, self.device, self._stepped)

    def _probe_of(self, kind: Hashable) -> Probe | None:
        """A new probe for a kind of block; ``None`` if one has measured it already."""
        known = self._probes.get(kind)
        # A call that failed was not measured to its end.
        if known is not None and known.is_complete:
            return None
        self._has_probed = True
        if len(self._probes) >= _MOST_PROBES:
            self._probes.clear()
        probe = self._probes[kind] = Probe(self.device, known)
        return probe

    def _shows_enough(self, trace: StepTrace) -> bool:
        """Whether a step shows all that its stage needs."""
        if self.stage is Stage.PROFILING_OPERATORS:
            return True
        if self._has_probed:
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
        self.is_waiting = self.optimizer is not None and self.optimizer.profile() is None
        if not self.is_waiting:
            return True
        self._waited += 1
        if self._waited < _MOST_WAITING:
            return False
        self.notes.once(
            f"the optimizer took no two steps in {_MOST_WAITING} calls of the model: all of it is on the CPU"
        )
        self.optimizer, self.is_waiting = None, False
        return True

    def _compiled(self, trace: StepTrace) -> Profile:
        """The profile, of the step whose memory was measured and of one whose times were."""
        assert self._weighed is not None
        profile = compile_profile(
            # Memory decides what fits. So that step gives the times, too, if no other one is like it.
            trace if self._is_as_weighed(trace) else self._weighed,
            self._weighed,
            self._probes,
            model=self.model,
            device=self.device,
            min_bytes=self.min_bytes,
            known=self._statics,
        )
        # An evaluation hides the end of the step, and an offloaded optimizer stalls for gradients.
        if self._is_cut or self.optimizer is not None:
            profile = without_lead(profile)
        return profile if self.optimizer is None else replace(profile, optimizer=self.optimizer.profile())

    def _is_as_weighed(self, trace: StepTrace) -> bool:
        assert self._weighed is not None
        return kinds_of(self._weighed) == kinds_of(trace)

    def _finish(self) -> StepTrace | None:
        tracer = self._pop_tracer()
        if tracer is None:
            return None
        self.idle_steps = 0 if tracer.has_backward else self.idle_steps + 1
        if tracer.has_backward and tracer.thread is threading.current_thread():
            return tracer.finish()
        # Without a backward, or with measurements of a thread that has ended.
        tracer.close()
        return None

    def _pop_tracer(self) -> StepTracer | None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None and not self.session.closed:
            self._mover.stop_listening(tracer.moves)
        return tracer

    @property
    def _mover(self) -> Mover:
        return self.session.runtime(self.device).mover


def how_of(block: BlockPlan) -> Recompute | None:
    """How a block is called; ``None``: without recomputation or offloading."""
    if block.plain:
        return None
    decisions = {each.place: (each.operator, each.decision) for each in block.operators}
    inputs = Decision.KEEP if block.inputs is Decision.RECOMPUTE else block.inputs
    return Recompute(policy=Planned(decisions, inputs, block.recomputes))


def kinds_of(trace: StepTrace) -> list[Hashable]:
    """The kinds of blocks that were called in a step, in order."""
    return [call.kind for call in trace.calls]


def tensors_of(*values: object) -> list[torch.Tensor]:
    """All tensors among arguments or outputs."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(*values: object) -> int:
    """Bytes of all tensors among arguments."""
    return sum(each.nbytes for each in tensors_of(*values))


def kind_of(module: Module, tensors: Iterable[torch.Tensor]) -> Hashable:
    """The kind of a block that is called with these tensors. Casts of leaves are not counted among its operators."""
    return signature(module), tuple((each.shape, each.dtype, each.requires_grad, each.is_leaf) for each in tensors)


def device_of(model: Module) -> torch.device:
    """The device where a model computes.

    Raises:
        UsageError: if it has no parameters.
    """
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise UsageError(
            f"{type(model).__name__} has no parameters, so there is nothing to plan for; attach to the module that "
            f"has them"
        )
    return parameter.device
