"""The blocks of a model: how their calls are traced, and how they are called."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module

from spillway._torch import tree_leaves
from spillway.checkpointing.blocks import signature
from spillway.checkpointing.learned import LearnedFunctions
from spillway.checkpointing.selectors import Planned
from spillway.errors import UsageError
from spillway.planner.plan import BlockPlan, Plan
from spillway.planner.profile import OptimizerProfile
from spillway.profiler.probe import Probe, ProfilerListener
from spillway.profiler.step_trace import StepTrace, StepTracer
from spillway.recomputing import Recompute
from spillway.runtime.mover import Mover
from spillway.session import Session
from spillway.types import Decision

if TYPE_CHECKING:
    from spillway.attaching.block import BlockCall, Traced
    from spillway.parameters.streamed import StreamedBlock, StreamedModel

LEAST = Recompute(offload="inputs")
"""The least memory: everything is recomputed, and inputs are offloaded meanwhile."""
_MOST_PROBES = 256
_LAG = 0.1
"""Seconds by which the device is made to lag behind the CPU to be timed."""


class BlockTracing:
    """Traces one step at a time, and one thread.

    Calls in other threads are ignored. So is the replay of an earlier step, whose tracer is closed.
    """

    def __init__(self, device: torch.device, session: Session | None) -> None:
        self.device = device
        self.probes: dict[Hashable, Probe] = {}
        """Operators of each kind of block."""
        self.probed: set[Hashable] = set()
        """Kinds of blocks of which a call of the step is measured operator by operator."""
        self.is_paused = False
        """Whether blocks that are called now are not traced, though a step is."""
        self.idle_steps = 0
        """Consecutive steps without a backward."""
        self.tracer: StepTracer | None = None
        self._streamed: dict[str, list[StreamedBlock]] = {}
        """The streamed blocks that each block consists of."""
        self._session = session
        self._is_recorded = False
        """Whether new kinds of blocks are measured operator by operator."""
        self._cut: StepTrace | None = None
        """A step that ended before the next one began."""

    @property
    def session(self) -> Session:
        return self._session if self._session is not None else Session.default()

    @property
    def mover(self) -> Mover:
        return self.session.runtime(self.device).mover

    @property
    def groups(self) -> list[Any]:
        """The process groups in which measured blocks communicate, in an order that is the same on their ranks."""
        return [group for probe in self.probes.values() for group in probe.groups]

    @property
    def is_elsewhere(self) -> bool:
        """Whether a step is traced in another thread, which still runs."""
        return self.tracer is not None and not self._is_here(self.tracer) and self.tracer.thread.is_alive()

    def stream(self, blocks: Iterable[str], streamed: Iterable[StreamedBlock]) -> None:
        """Tell the copies of these streamed blocks apart, if they are in blocks that are planned for."""
        self._streamed = {
            name: [each for each in streamed if each.name == name or each.name.startswith(f"{name}.")]
            for name in blocks
        }

    def begin(self, *, is_timed: bool, is_weighed: bool, is_recorded: bool) -> None:
        """Trace a step: with its times, its memory, or the operators of new kinds of blocks."""
        self._is_recorded = is_recorded
        self.probed.clear()
        lag = _LAG if is_timed else 0.0
        self.tracer = StepTracer(self.device, self.carried, times_host=is_timed, lag=lag, weighs=is_weighed)
        for each in self._copied:
            each.listener = self.tracer
        if is_weighed:
            self.mover.listen(self.tracer.moves)

    def evaluates(self) -> None:
        """An evaluation begins, which ends the step before it."""
        if self.tracer is not None and self.tracer.has_backward and self._is_here(self.tracer):
            self.cut()

    def cut(self) -> None:
        """The step ends here, and not at the start of the next one."""
        self._cut = self._finish() or self._cut

    def end(self) -> StepTrace | None:
        """The measurements of the step; ``None`` if it had no backward."""
        trace, cut, self._cut = self._finish(), self._cut, None
        return cut if trace is None else trace

    def drop(self) -> None:
        """Measure nothing any more."""
        self._cut = None
        tracer = self._take_tracer()
        if tracer is not None:
            tracer.close()
        self.probes.clear()

    def carried(self) -> int:
        """Bytes on the device that are being offloaded or reloaded, and copies of streamed parameters in use."""
        counts = self.mover.counts()
        moving = counts["leaving bytes"] + counts["shared bytes"] + counts["returning bytes"]
        return moving + sum(each.here_bytes for each in self._copied)

    def read_seconds(self, name: str) -> float:
        """Time to read the streamed parameters of a block that are in files, as in the step before."""
        return sum(each.read_seconds for each in self._streamed.get(name, ()))

    @property
    def _copied(self) -> Iterator[StreamedBlock]:
        return (each for found in self._streamed.values() for each in found)

    def block_begins(
        self, call: BlockCall, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Traced | None:
        """A block is called; gives the step's tracer and the number of the call, if it is traced."""
        call.listener = None
        tracer = self.tracer
        if tracer is None or self.is_paused or not self._is_here(tracer):
            return None
        kind = kind_of(module, tensors_of(args, kwargs))
        probe = self._probe_of(kind, call) if self._is_recorded else None
        streamed = tuple(nbytes for each in self._streamed.get(call.name, ()) for nbytes in each.sizes)
        number = tracer.block_begins(call.name, kind, (args, kwargs), streamed)
        if self._is_recorded:
            call.listener = ProfilerListener(probe, partial(tracer.asked, number), tracer.casts)
        return tracer, number

    def _probe_of(self, kind: Hashable, call: BlockCall) -> Probe | None:
        """A new probe for a call of this kind of block; ``None`` if one has measured it already."""
        known = self.probes.get(kind)
        # A call that failed, or that no backward came to, was not measured.
        if kind in self.probed or (known is not None and known.is_complete):
            return None
        self.probed.add(kind)
        if len(self.probes) >= _MOST_PROBES:
            self.probes.clear()
        probe = self.probes[kind] = Probe(self.device, known, block=call.module())
        return probe

    def _finish(self) -> StepTrace | None:
        tracer = self._take_tracer()
        if tracer is None:
            return None
        self.idle_steps = 0 if tracer.has_backward else self.idle_steps + 1
        if tracer.has_backward and self._is_here(tracer):
            return tracer.finish()
        # Without a backward, or with measurements of a thread that has ended.
        tracer.close()
        return None

    def _take_tracer(self) -> StepTracer | None:
        tracer, self.tracer = self.tracer, None
        for each in self._copied:
            each.listener = None
        if tracer is not None and not self.session.closed:
            self.mover.stop_listening(tracer.moves)
        return tracer

    @staticmethod
    def _is_here(tracer: StepTracer) -> bool:
        return tracer.thread is threading.current_thread()


class DividedOptimizer(Protocol):
    """An optimizer that steps a fraction of its elements on the CPU."""

    def divide(self, fraction: float) -> None:
        """From the next step on, step this fraction of all elements on the CPU."""

    def profile(self) -> OptimizerProfile | None:
        """The cost of stepping all of them there; ``None``: it has not stepped twice yet."""


class AppliedPlan:
    """A plan, applied to a model's blocks, to the in-flight limit, and to the optimizer whose state is offloaded."""

    def __init__(self, tracing: BlockTracing, optimizer: DividedOptimizer | None) -> None:
        self.plan: Plan | None = None
        """The plan that was applied since profiling began."""
        self.count = 0
        self.optimizer = optimizer
        self.is_left_alone = False
        """Whether nothing is done in the blocks, since no backward comes through them."""
        self.streams: StreamedModel | None = None
        """Streamed blocks, whose weights stay on the device where a plan says so."""
        self._tracing = tracing
        self._blocks: Sequence[BlockCall] = ()

    @property
    def is_plain(self) -> bool:
        return self.plan is not None and all(block.plain for block in self.plan.blocks)

    @property
    def learned(self) -> int:
        """How many calls of the blocks were recorded or compared, and so cost more than others."""
        learned = self._tracing.session.of(LearnedFunctions)
        modules = [module for block in self._blocks if (module := block.module()) is not None]
        return sum(call.learned_from for each in modules for call in learned.of(weakref.ref(each)).calls.values())

    def manage(self, blocks: Sequence[BlockCall]) -> None:
        """From now on, trace these blocks, and say how they are called."""
        self._blocks = blocks
        for block in blocks:
            block.tracing = self._tracing

    def take_least(self) -> None:
        """From the next call on, blocks take the least memory."""
        for block in self._blocks:
            block.how = None if self.is_left_alone else LEAST
        self._place(())

    def apply(self, plan: Plan, *, is_given: bool = False) -> None:
        """From the next call on, blocks do as the plan says. Those that it does not name take the least memory.

        A plan that is given has to name all blocks that are trained.
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
        self._place(plan.resident)
        self.plan = plan
        self.count += 1
        self._tracing.mover.claim(self, plan.window)
        if self.optimizer is not None and plan.optimizer_fraction is not None:
            self.optimizer.divide(plan.optimizer_fraction)

    def stream(self, streams: StreamedModel) -> None:
        """From now on, place the weights of these blocks."""
        self.streams = streams
        self._place(() if self.plan is None else self.plan.resident)

    def _place(self, resident: Collection[str]) -> None:
        if self.streams is not None:
            self.streams.place(resident)

    def withdraw(self) -> None:
        """Blocks take the least memory again, and all of the optimizer steps on the CPU."""
        self.plan = None
        self.take_least()
        if self.optimizer is not None:
            self.optimizer.divide(1.0)
        if self.count:
            self.drop()

    def drop(self) -> None:
        """Give the session its in-flight limit back."""
        if not self._tracing.session.closed:
            self._tracing.mover.claim(self, None)


def how_of(block: BlockPlan) -> Recompute | None:
    """How a block is called; ``None``: without recomputation or offloading."""
    if block.plain:
        return None
    decisions = {each.place: (each.operator, each.decision) for each in block.operators}
    inputs = Decision.KEEP if block.inputs is Decision.RECOMPUTE else block.inputs
    return Recompute(policy=Planned(decisions, inputs, block.recomputes))


def tensors_of(*values: object) -> list[torch.Tensor]:
    """All tensors among arguments or outputs."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(*values: object) -> int:
    """Bytes of all tensors among arguments."""
    return sum(each.nbytes for each in tensors_of(*values))


def kind_of(module: Module, tensors: Iterable[torch.Tensor]) -> Hashable:
    """The kind of a block that is called with these tensors. Casts of leaves are not counted among its operators."""
    return signature(module), tuple((each.shape, each.dtype, each.requires_grad, each.is_leaf) for each in tensors)
