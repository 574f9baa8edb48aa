"""Pipeline stages of ``torch.distributed.pipelining`` under Spillway, in one line, whatever the schedule.

A *chunk* is one micro-batch's forward through one stage. Each chunk is a pass of its own: it has a tag of its own, and
so an order and a tail of its own, since how long a chunk waits for its backward depends on its place in the schedule.

NOTE [ What is put on a stage ]

Every schedule of torch calls ``stage.forward_one_chunk``, ``backward_one_chunk`` and ``backward_weight_one_chunk``.
Attributes of the instance stand before those methods until :meth:`OffloadedStages.remove`. Nothing is installed in
torch, and the stage's module is not touched, unless it is to be recomputed, or there is a budget.

NOTE [ A weight's gradient by itself ]

Zero-bubble schedules run a chunk's backward in two halves: gradients of the inputs first, with the graph retained, and
those of the weights later, by one ``torch.autograd.grad`` for each group of weights. What was offloaded is brought back
in both halves: slots live as long as the graph. A region runs again in both, and would so for each group of weights in
the second, if it were not in one ``GraphExecGroup``, within which torch asks a region for all that it saved once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Module
from torch.utils.checkpoint import GraphExecGroup

from spillway.attaching import Attached, attach
from spillway.attaching.model import ModelPass
from spillway.blocks import Blocks
from spillway.errors import UnsupportedError, UsageError
from spillway.offloading import offload
from spillway.policies import FirstBytes, Keep, Policy
from spillway.recomputing import Recompute
from spillway.records import StepStats
from spillway.session import Session
from spillway.units import parse_bytes

if TYPE_CHECKING:
    from spillway.attaching.pipeline import PipelinePlanController
    from spillway.planning.hardware import Hardware
    from spillway.planning.plan import Plan

__all__ = ["OffloadedStages", "Stage", "offload_stages"]

_FORWARD, _BACKWARD, _WEIGHT = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"


class Stage(Protocol):
    """What is used of a ``torch.distributed.pipelining.PipelineStage``."""

    submod: Module
    stage_index: int
    group_rank: int
    group_size: int
    chunks: int | None
    """How many micro-batches a step has."""

    @property
    def is_first(self) -> bool: ...


def offload_stages(
    stages: Stage | Sequence[Stage],
    *,
    ratio: float | None = None,
    nbytes: int | str | tuple[int | str, int | str] | None = None,
    policy: Policy | None = None,
    min_bytes: int | str | None = None,
    tier: str = "auto",
    window: int | str | None = None,
    recompute: Recompute | None = None,
    blocks: Blocks | None = None,
    budget: int | str | None = None,
    hardware: Hardware | str | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    session: Session | None = None,
) -> OffloadedStages:
    """What the chunks of pipeline stages save leaves the device, and is back in time for their backward.

    Say it once, before or after the schedule is made, and train as always: ``schedule.step(...)``. A chunk is one
    micro-batch's forward through one stage. It goes for every schedule of ``torch.distributed.pipelining``, also with
    another number of micro-batches later. Losses and gradients are bit for bit those of the same schedule without.

    The loss belongs to no chunk: what it saves stays on the device. Neither do evaluation, nor the forward by which
    torch finds out shapes before the first step.

    Args:
        stages: the stages of this rank: one, or several.
        ratio: the first tensors of a chunk leave, up to this ratio of its bytes, from 0 to 1; the first step offloads
            all, and counts. ``None``, and no ``nbytes`` or ``policy`` either: all; with ``recompute``, nothing but what
            that says.
        nbytes: the first tensors of a chunk leave, up to so many bytes of each chunk: a number, or a size like
            ``"256MiB"``. A pair is for the first and the last rank of the pipeline, and the ranks between get a share
            that differs by the same from rank to rank: of most schedules the first rank has the most chunks waiting.
        policy: decides instead, as in :class:`~spillway.offload`. To each stage its own: call this once for each.
        min_bytes: leave smaller tensors where they are. Bytes, or a size like ``"4MiB"``. ``None``: 1 MiB.
        tier: ``"host"``, ``"disk"``, or ``"auto"``: host memory for an accelerator's tensors, disk for the CPU's.
        window: bytes that may be on their way out at once, or a share of the session's, like ``"40%"``. ``None``: all
            of that.
        recompute: make regions of the stage's blocks, with these options (:func:`spillway.attach`). In a zero-bubble
            schedule a region runs again twice: see ``docs/pipelining.md``.
        blocks: which modules are blocks, as :func:`spillway.attach` has it. ``None``: those that the stage repeats.
        budget: instead of all that: bytes that this rank may have allocated on its device at most, all included, or a
            size like ``"40GiB"``. Then it is decided for each operator of each block of the stages what stays, what
            leaves and what is computed again, the same for all chunks. Say it once for all stages of the rank. The
            first steps are measured, and a plan is made for the order in which the schedule has its turns:
            ``docs/pipelining.md``.
        hardware: with a budget: what the machine can do, as for :func:`spillway.plan`. ``None``: as it was measured.
        host_budget: with a budget: bytes of host memory. ``None``: what the session may have.
        disk_budget: with a budget: bytes of disk. ``None``: any.
        allow: with a budget: what may be done, as :func:`spillway.attach` has it.
        session: ``None``: the default one.

    Returns:
        What undoes it (:meth:`OffloadedStages.remove`), and counts. It need not be kept.

    Raises:
        UsageError: an argument that cannot be meant; a stage that is offloaded already; blocks that are not found, and
            whatever else :func:`spillway.attach` refuses.
        UnsupportedError: a budget for stages whose parameters several ranks share. In a step: a budget, and a schedule
            that splits backwards in two.
        BudgetError: in a step: no plan is within the budget.

    Example:
        >>> stage = PipelineStage(part, rank, ranks, device)  # doctest: +SKIP
        >>> offloaded = offload_stages(stage, nbytes=("2GiB", 0))  # doctest: +SKIP
        >>> Schedule1F1B(stage, 8, loss_fn).step(batch)  # doctest: +SKIP
        >>> offloaded.stats().offloaded_bytes  # doctest: +SKIP
    """
    found = _checked(stages)
    limits: dict[str, Any] = {
        "hardware": hardware,
        "host_budget": host_budget,
        "disk_budget": disk_budget,
        "allow": allow,
    }
    if budget is not None:
        others = {"ratio": ratio, "nbytes": nbytes, "policy": policy, "window": window, "recompute": recompute}
        named = [name for name, each in others.items() if each is not None] + ["tier"] * (tier != "auto")
        if named:
            raise UsageError(
                f"got {' and '.join(named)} beside a budget, expected none, since the plan decides; leave it out, or "
                f"leave out the budget"
            )
        return _planned(found, blocks, min_bytes, session, budget=budget, **limits)
    named = [name for name, each in limits.items() if each is not None]
    if named:
        raise UsageError(
            f"got {' and '.join(named)} without a budget, expected it beside one, since it says how is planned for it; "
            f"give budget=..."
        )
    given = [name for name, each in (("ratio", ratio), ("nbytes", nbytes), ("policy", policy)) if each is not None]
    if len(given) > 1:
        raise UsageError(f"got {' and '.join(given)}, expected one of them; a policy can contain the others")
    if recompute is not None and not isinstance(recompute, Recompute):
        raise UsageError(f"recompute: got {recompute!r}, expected a spillway.Recompute(...) or None")
    if blocks is not None and recompute is None:
        raise UsageError(f"blocks: got {blocks!r} without recompute, expected recompute=spillway.Recompute(...), too")
    if not given and recompute is not None:
        policy = Keep()
    elif not given:
        # Said, and not left open: one chunk saves little beside all those that wait for their backward.
        ratio = 1.0

    def context(stage: Stage, tag: str) -> offload:
        decides = policy if nbytes is None else FirstBytes(_share_of(stage, nbytes))
        return offload(
            ratio=ratio, tag=tag, min_bytes=min_bytes, tier=tier, window=window, policy=decides, session=session
        )

    for stage in found:
        # What cannot be meant is said now, and not in the first step.
        context(stage, "")
    calls: list[_StageCalls] = []
    offloaded = OffloadedStages(calls)
    with ExitStack() as undo:
        undo.callback(offloaded.remove)
        for stage in found:
            attached = None
            if recompute is not None:
                attached = attach(stage.submod, policy=recompute, blocks=blocks, min_bytes=min_bytes, session=session)
            calls.append(_StageCalls(stage, functools.partial(context, stage), attached))
            calls[-1].take()
        undo.pop_all()
    return offloaded


def _planned(
    stages: Sequence[Stage],
    blocks: Blocks | None,
    min_bytes: int | str | None,
    session: Session | None,
    *,
    hardware: Hardware | str | None,
    **limits: Any,
) -> OffloadedStages:
    """Stages within a budget."""
    # What solves and checks takes a while to import, and is for those who plan.
    from spillway.attaching.pipeline import StageCollector, pipeline_controller

    collectors = [StageCollector(stage.stage_index, stage.submod, session, min_bytes) for stage in stages]
    rank = pipeline_controller(collectors, session, hardware, **limits)

    def context(tag: str) -> offload:
        # Of what is in no block nothing leaves; what regions send has its order here, which is that of a plan.
        return ModelPass(tag=tag, min_bytes=min_bytes, policy=Keep(), session=session)

    calls: list[_StageCalls] = []
    offloaded = OffloadedStages(calls, rank)
    with ExitStack() as undo:
        undo.callback(offloaded.remove)
        for part, (stage, collector) in enumerate(zip(stages, collectors, strict=True)):
            attached = attach(stage.submod, blocks=blocks, min_bytes=min_bytes, session=session)
            calls.append(_StageCalls(stage, context, attached, rank, part))
            attached.follow(collector)
            calls[-1].take()
        undo.pop_all()
    return offloaded


class OffloadedStages:
    """What :func:`offload_stages` put on stages. Also a context manager, which removes it in the end.

    Example:
        >>> with offload_stages(stages, ratio=0.5) as offloaded:  # doctest: +SKIP
        ...     schedule.step(batch)
        >>> offloaded.stats().reloaded_bytes  # doctest: +SKIP
    """

    def __init__(self, calls: Sequence[_StageCalls], rank: PipelinePlanController | None = None) -> None:
        self._calls = calls
        self._rank = rank

    @property
    def plans(self) -> dict[int, Plan]:
        """With a budget: of each stage, by its place in the pipeline, once they were made.

        What they predict is of this rank: its peak, and the seconds that it works in a step, without those in which it
        waits for other ranks.
        """
        return {} if self._rank is None else self._rank.plans

    @property
    def stage(self) -> str | None:
        """With a budget: as :attr:`spillway.Attached.stage` has it, and ``"active"`` when plans were validated."""
        return None if self._rank is None else self._rank.stage.value

    @property
    def measured(self) -> int | None:
        """With a budget: most bytes on the device in the step that was checked."""
        measured = None if self._rank is None else self._rank.measured
        return None if measured is None else measured.peak_bytes

    def explain(self) -> str:
        """The plans in words, and what happened on the way to them.

        Raises:
            UsageError: where there are none.
        """
        if self._rank is None or not self._rank.plans:
            raise UsageError(
                "explain: got a call before there are plans, expected offload_stages(budget=...) and steps"
            )
        return self._rank.explain()

    def stats(self) -> StepStats:
        """Bytes and seconds of all chunks of the last step on this rank, as far as their backward has come.

        Bytes of chunks and seconds of waiting are sums; what the session has reserved, and the peak, are as they are
        now. A step begins with a chunk whose number was there already.
        """
        return StepStats.together(context.stats() for call in self._calls for context in call.step.values())

    def remove(self) -> None:
        """Take everything off the stages, which are then as they were. A second time, it does nothing.

        Chunks that wait for their backward can still have it.

        Raises:
            UsageError: if a recomputed block was compiled meanwhile, as :meth:`spillway.Attached.remove` has it.
        """
        with ExitStack() as all_of_them:
            for call in self._calls:
                all_of_them.callback(call.give_back)
            if self._rank is not None:
                all_of_them.callback(self._rank.drop)

    def __enter__(self) -> OffloadedStages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What went wrong inside is what is to be heard of.
        with suppress(UsageError) if kind is not None else nullcontext():
            self.remove()

    def __repr__(self) -> str:
        return f"<spillway.OffloadedStages {', '.join(str(call.stage.stage_index) for call in self._calls)}>"


class _StageCalls:
    """The calls of one stage, taken over. See NOTE [ What is put on a stage ].

    Args:
        stage: the stage.
        context: makes the context of a chunk, by its tag.
        attached: the regions of its module, if there are any.
        rank: who is told of turns, and plans for them.
        part: the stage's place among those of the rank.
    """

    def __init__(
        self,
        stage: Stage,
        context: Callable[[str], offload],
        attached: Attached | None,
        rank: PipelinePlanController | None = None,
        part: int = 0,
    ) -> None:
        self.stage = stage
        self.step: dict[int, offload] = {}
        """The chunks of the last step, by number."""
        self._make_context = context
        self._contexts: dict[str, offload] = {}
        """By tags."""
        self._applied = 0
        """Plans that were applied when they were made."""
        self._attached = attached
        self._rank = rank
        self._part = part
        self._ours: dict[str, Callable[..., Any]] = {_FORWARD: self._forward, _WEIGHT: self._weight}
        if rank is not None:
            self._ours[_BACKWARD] = self._backward
        self._before: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        self._removed = False

    def take(self) -> None:
        """Stand before the stage's methods."""
        own = self.stage.__dict__
        self._before = {name: own[name] for name in self._ours if name in own}
        self._methods = {name: getattr(self.stage, name) for name in self._ours}
        own.update(self._ours)

    def give_back(self) -> None:
        """Leave the stage as it was. Whoever stands before us by now stays, and we only pass his calls on."""
        if self._removed:
            return
        self._removed = True
        own = self.stage.__dict__
        for name, ours in self._ours.items():
            if own.get(name) is ours:
                del own[name]
        own.update({name: before for name, before in self._before.items() if name not in own})
        if self._attached is not None:
            self._attached.remove()

    def _forward(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._chunk(fwd_chunk_id):
            return self._methods[_FORWARD](fwd_chunk_id, *args, **kwargs)

    def _backward(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        method = functools.partial(self._methods[_BACKWARD], bwd_chunk_id, *args, **kwargs)
        if self._removed or self._rank is None:
            return method()
        is_whole = args[1] if len(args) > 1 else kwargs.get("full_backward", True)
        if not is_whole and getattr(self.stage, "dw_builder", None) is None:
            raise UnsupportedError(
                f"budget: got a backward in two halves of stage {self.stage.stage_index}, expected whole ones, since "
                f"blocks would run again twice and no plan knows of it; make the stages with dw_builder=lambda: "
                f"lambda: None, or give offload_stages no budget but its bytes"
            )
        self._rank.backward_begins(self._part, bwd_chunk_id)
        found = method()
        self._rank.backward_ended(self._part, bwd_chunk_id)
        return found

    def _chunk(self, number: int) -> AbstractContextManager[object]:
        if self._removed or not torch.is_grad_enabled():
            return nullcontext()
        if self._rank is not None:
            self._rank.forward_begins(self._part, number)
            if self._rank.is_plain:
                self.step.clear()
                return nullcontext()
            applied = self._rank.stages[self._part].applied
            if applied != self._applied:
                self._applied = applied
                self._contexts.clear()
        # How long a chunk waits for its backward depends on its place among so many: so does what is learned of it.
        tag = f"stage {self.stage.stage_index}, micro-batch {number} of {self.stage.chunks}"
        context = self._contexts.get(tag)
        if context is None:
            context = self._contexts[tag] = self._make_context(tag)
        if number in self.step:
            self.step.clear()
        self.step[number] = context
        return context

    def _weight(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._group():
            return self._methods[_WEIGHT](bwd_chunk_id, *args, **kwargs)

    def _group(self) -> AbstractContextManager[object]:
        """See NOTE [ A weight's gradient by itself ]. The first stage has its whole backward there, in one piece."""
        if self._removed or self.stage.is_first or GraphExecGroup._get_current_group() is not None:
            return nullcontext()
        return GraphExecGroup()


def _checked(stages: Stage | Sequence[Stage]) -> list[Stage]:
    """Stages that can be offloaded."""
    found: list[Any] = list(stages) if isinstance(stages, Sequence) else [stages]
    if not found:
        raise UsageError("stages: got none, expected at least one torch.distributed.pipelining.PipelineStage")
    for place, stage in enumerate(found):
        if not all(callable(getattr(stage, name, None)) for name in (_FORWARD, _WEIGHT)):
            raise UsageError(
                f"stages: got {stage!r:.200}, expected a torch.distributed.pipelining.PipelineStage, or a list of "
                f"them; give the stages, and neither their modules nor the schedule"
            )
        taken = isinstance(getattr(stage.__dict__.get(_FORWARD), "__self__", None), _StageCalls)
        if taken or any(stage is other for other in found[:place]):
            raise UsageError(
                f"stages: got stage {stage.stage_index}, which is offloaded already, expected each once; call remove() "
                f"of what the other offload_stages gave back"
            )
    return found


def _share_of(stage: Stage, nbytes: int | str | tuple[int | str, int | str]) -> int:
    """Bytes of each chunk of a stage on its rank: the ends are given, and between them it is linear."""
    ends = nbytes if isinstance(nbytes, tuple) else (nbytes, nbytes)
    if len(ends) != 2:
        raise UsageError(
            f"nbytes: got {nbytes!r}, expected a size, or a pair of sizes: for the first rank and for the last"
        )
    first, last = (parse_bytes(end, what="nbytes") for end in ends)
    return first + (last - first) * stage.group_rank // max(stage.group_size - 1, 1)
