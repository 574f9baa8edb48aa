"""Pipeline stages of ``torch.distributed.pipelining`` under Spillway, whatever the schedule.

A *chunk* is the forward of one micro-batch through one stage, with a tag of its own. So Spillway learns the order of
reloads for each place in the schedule.

NOTE [ How a stage is taken over ]

Every schedule of torch calls ``stage.forward_one_chunk``, ``backward_one_chunk`` and ``backward_weight_one_chunk``.
Attributes of the instance replace them until :meth:`OffloadedStages.remove`. The module is touched only if it is
recomputed, or if there is a budget.

NOTE [ Weight gradients on their own ]

Zero-bubble schedules split a chunk's backward. First come the gradients of the inputs. Those of the weights come later,
by one ``torch.autograd.grad`` for each group of weights. Tensors are reloaded, and blocks recomputed, for both. A block
would be recomputed for each group of weights, but in one ``GraphExecGroup`` torch asks for its saved tensors once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import GraphExecGroup

from spillway._torch import exec_group
from spillway.attaching import Attached, attach
from spillway.attaching.model import ModelCall, ModelPass
from spillway.checkpointing.blocks import Blocks
from spillway.errors import UnsupportedError, UsageError
from spillway.offloading import offload
from spillway.policies import FirstBytes, Keep, Policy
from spillway.recomputing import Recompute
from spillway.session import Session
from spillway.types import StepStats
from spillway.units import parse_bytes

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage as Stage

    from spillway.attaching.pipeline import PipelinePlanController, StageCollector
    from spillway.planner.hardware import Hardware
    from spillway.planner.plan import Plan

__all__ = ["OffloadedStages", "offload_stages"]

_FORWARD, _BACKWARD, _WEIGHT = "forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"


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
    """Offload the activations of pipeline stages, and reload them in time for their backward.

    Call it once, before or after the schedule is made, and train as before. It works with every schedule of
    ``torch.distributed.pipelining``. Losses and gradients are bit for bit those of the same schedule without it.
    Activations of the loss stay on the device. Evaluation and torch's shape inference are not affected.

    Args:
        stages: one or several stages of this rank.
        ratio: offload the first tensors of a chunk, up to this ratio of its bytes, from 0 to 1. The first step offloads
            all and counts. ``None``, without ``nbytes`` and ``policy``: offload all, or with ``recompute`` only what
            that says.
        nbytes: offload the first tensors of a chunk, up to so many bytes: a number, or a size like ``"256MiB"``. A pair
            is for the first and the last rank of the pipeline, with a linear share for the ranks between.
        policy: decides instead, as in :class:`~spillway.offload`. For different policies call this for each stage.
        min_bytes: as in :class:`~spillway.offload`, also for the next two.
        tier: see there.
        window: see there.
        recompute: recompute the stage's blocks with these options (:func:`spillway.attach`). A zero-bubble schedule
            recomputes them twice.
        blocks: which modules are blocks, as for :func:`spillway.attach`. ``None``: those that the stage repeats.
        budget: instead of all that: most bytes that this rank may allocate on its device, or a size like ``"40GiB"``.
            A plan then decides for each operator of each block whether to keep, offload or recompute, the same for all
            chunks. Call this once for all stages of the rank. The first steps are profiled.
        hardware: with a budget: as for :func:`spillway.attach`, also for the next three.
        host_budget: see there.
        disk_budget: see there.
        allow: see there.
        session: ``None``: the default one.

    Returns:
        Statistics, and :meth:`OffloadedStages.remove`. It need not be kept.

    Raises:
        UsageError: for an invalid argument; for a stage that is offloaded already; for blocks that are not found, and
            what else :func:`spillway.attach` refuses.
        UnsupportedError: for a budget with sharded parameters. In a step: for a budget with a schedule that splits
            backwards.
        BudgetError: in a step: if no plan fits the budget.

    Example:
        >>> stage = PipelineStage(part, rank, ranks, device)  # doctest: +SKIP
        >>> offloaded = offload_stages(stage, nbytes=("2GiB", 0))  # doctest: +SKIP
        >>> Schedule1F1B(stage, 8, loss_fn).step(batch)  # doctest: +SKIP
        >>> offloaded.stats().offloaded_bytes  # doctest: +SKIP
    """
    found = _checked(stages)
    ways = _given(ratio=ratio, nbytes=nbytes, policy=policy)
    if budget is None:
        limits = _given(hardware=hardware, host_budget=host_budget, disk_budget=disk_budget, allow=allow)
        _check_without_budget(ways, limits, recompute, blocks)
    elif ways := ways + _given(window=window, recompute=recompute, tier=None if tier == "auto" else tier):
        raise UsageError(
            f"{' and '.join(ways)} beside a budget: the plan for the budget decides; leave it out, or leave out the "
            f"budget"
        )
    if not ways and recompute is not None:
        policy = Keep()
    elif not ways:
        # Explicit, so that offloading is not disabled for chunks that save little.
        ratio = 1.0

    def context(stage: Stage, tag: str) -> offload:
        if budget is not None:
            # Offloads nothing outside of blocks; blocks offload in the order of this pass, which the plan knows.
            return ModelPass(tag=tag, min_bytes=min_bytes, policy=Keep(), session=session)
        decides = policy if nbytes is None else FirstBytes(_share_of(stage, nbytes))
        return offload(
            ratio=ratio, tag=tag, min_bytes=min_bytes, tier=tier, window=window, policy=decides, session=session
        )

    for stage in found:
        # Raises for invalid arguments now, not in the first step.
        context(stage, "")
    collectors: list[StageCollector] = []
    rank: PipelinePlanController | None = None
    if budget is not None:
        # Slow to import, and only needed for plans.
        from spillway.attaching.pipeline import PipelinePlanController, StageCollector

        collectors = [StageCollector(stage.stage_index, stage.submod, session, min_bytes) for stage in found]
        options: dict[str, Any] = {"host_budget": host_budget, "disk_budget": disk_budget, "allow": allow}
        rank = PipelinePlanController(collectors, session, hardware, budget, **options)
    calls: list[_StageCalls] = []
    offloaded = OffloadedStages(calls, rank)
    with ExitStack() as undo:
        undo.callback(offloaded.remove)
        for part, stage in enumerate(found):
            attached = None
            if recompute is not None or rank is not None:
                attached = attach(stage.submod, policy=recompute, blocks=blocks, min_bytes=min_bytes, session=session)
            calls.append(_StageCalls(stage, functools.partial(context, stage), attached, rank, part))
            if attached is not None and rank is not None:
                ModelCall.of(stage.submod).hand_to(collectors[part])
            calls[-1].install()
        undo.pop_all()
    return offloaded


def _check_without_budget(ways: list[str], limits: list[str], recompute: object, blocks: object) -> None:
    """Raise for arguments that exclude each other. ``ways`` decide what is offloaded, ``limits`` are those of plans."""
    if limits:
        raise UsageError(
            f"{' and '.join(limits)} without a budget: it has an effect only on the plan for a budget; give budget=..."
        )
    if len(ways) > 1:
        raise UsageError(
            f"{' and '.join(ways)}: each decides alone; give one of them, or a policy that contains the others"
        )
    if recompute is not None and not isinstance(recompute, Recompute):
        raise UsageError(f"recompute: got {recompute!r}, expected a spillway.Recompute(...) or None")
    if blocks is not None and recompute is None:
        raise UsageError(f"blocks: got {blocks!r} without recompute; give recompute=spillway.Recompute(...) too")


def _given(**options: object) -> list[str]:
    return [name for name, value in options.items() if value is not None]


class OffloadedStages:
    """The result of :func:`offload_stages`. As a context manager it removes everything at its end.

    Example:
        >>> with offload_stages(stages, ratio=0.5) as offloaded:  # doctest: +SKIP
        ...     schedule.step(batch)
        >>> offloaded.stats().reloaded_bytes  # doctest: +SKIP
    """

    def __init__(self, calls: Sequence[_StageCalls], rank: PipelinePlanController | None) -> None:
        self._calls = calls
        self._rank = rank

    @property
    def plans(self) -> dict[int, Plan]:
        """With a budget: the plan of each stage, by its place in the pipeline, once there are plans.

        They predict the peak of this rank, and the seconds that it works in a step, without waits for other ranks.
        """
        stages = () if self._rank is None else self._rank.stages
        return {stage.index: plan for stage in stages if (plan := stage.applied.plan) is not None}

    @property
    def stage(self) -> str | None:
        """With a budget: as :attr:`spillway.Attached.stage`, and ``"active"`` once plans are validated."""
        return None if self._rank is None else self._rank.stage.value

    @property
    def measured(self) -> int | None:
        """With a budget: peak bytes on the device in the validating step."""
        measured = None if self._rank is None else self._rank.search.measured
        return None if measured is None else measured.peak_bytes

    def explain(self) -> str:
        """The plans in words, and how they were found.

        Raises:
            UsageError: before there are plans.
        """
        if self._rank is None or not self.plans:
            raise UsageError(
                "explain() was called before there are plans; say offload_stages(budget=...), and run some steps"
            )
        return "\n".join([*(f"stage {index}: {plan}" for index, plan in self.plans.items()), *self._rank.notes])

    def stats(self) -> StepStats:
        """Sums over all chunks of the last step on this rank, as far as their backward has run.

        Reserved bytes and the peak are the current ones.
        """
        return StepStats.together(context.stats() for call in self._calls for context in call.step.values())

    def remove(self) -> None:
        """Restore the stages. A second call does nothing.

        Chunks that have not run their backward still can.

        Raises:
            UsageError: if a recomputed block was compiled in the meantime: see :meth:`spillway.Attached.remove`.
        """
        with ExitStack() as all_of_them:
            for call in self._calls:
                all_of_them.callback(call.uninstall)
            if self._rank is not None:
                all_of_them.callback(self._rank.drop)

    def __enter__(self) -> OffloadedStages:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # An exception from inside matters more.
        with suppress(UsageError) if kind is not None else nullcontext():
            self.remove()

    def __repr__(self) -> str:
        return f"<spillway.OffloadedStages {', '.join(str(call.stage.stage_index) for call in self._calls)}>"


class _StageCalls:
    """Replaces methods of one stage. See NOTE [ How a stage is taken over ].

    ``context`` makes the context of a chunk, by its tag. With a budget, ``rank`` observes the schedule and plans for
    it, and ``part`` is the stage's index there.
    """

    def __init__(
        self,
        stage: Stage,
        context: Callable[[str], offload],
        attached: Attached | None,
        rank: PipelinePlanController | None,
        part: int,
    ) -> None:
        self.stage = stage
        self.step: dict[int, offload] = {}
        """Contexts of the chunks of the last step, by number."""
        self._make_context = context
        self._contexts: dict[str, offload] = {}
        self._applied = 0
        """Number of plans that were applied when the contexts were made."""
        self._attached = attached
        self._rank = rank
        self._part = part
        self._ours: dict[str, Callable[..., Any]] = {_FORWARD: self._forward, _WEIGHT: self._weight}
        if rank is not None:
            self._ours[_BACKWARD] = self._backward
        self._before: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        self._removed = False

    def install(self) -> None:
        own = self.stage.__dict__
        self._before = {name: own[name] for name in self._ours if name in own}
        self._methods = {name: getattr(self.stage, name) for name in self._ours}
        own.update(self._ours)

    def uninstall(self) -> None:
        """Restore the stage. If its methods were replaced again, ours stay below and pass calls on."""
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
                f"budget: this schedule splits the backward of stage {self.stage.stage_index}, so blocks would be "
                f"recomputed twice, which no plan covers; make the stages with dw_builder=lambda: lambda: None, or "
                f"give offload_stages nbytes instead of a budget"
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
            applied = self._rank.stages[self._part].applied.count
            if applied != self._applied:
                self._applied = applied
                self._contexts.clear()
        # The time until a chunk's backward depends on its place in the schedule, so each place learns on its own.
        tag = f"stage {self.stage.stage_index}, micro-batch {number} of {self.stage.chunks}"
        context = self._contexts.get(tag)
        if context is None:
            context = self._contexts[tag] = self._make_context(tag)
        if number in self.step:
            self.step.clear()
        self.step[number] = context
        return context

    def _weight(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See NOTE [ Weight gradients on their own ]. The first stage runs its whole backward there, in one piece."""
        alone = self._removed or self.stage.is_first or exec_group() is not None
        with nullcontext() if alone else GraphExecGroup():
            return self._methods[_WEIGHT](bwd_chunk_id, *args, **kwargs)


def _checked(stages: Stage | Sequence[Stage]) -> list[Stage]:
    """The stages as a list, if they can be offloaded."""
    found: list[Any] = list(stages) if isinstance(stages, Sequence) else [stages]
    if not found:
        raise UsageError("stages: got none, expected at least one torch.distributed.pipelining.PipelineStage")
    for place, stage in enumerate(found):
        if not all(callable(getattr(stage, name, None)) for name in (_FORWARD, _WEIGHT)):
            raise UsageError(
                f"stages: got {stage!r:.200}, expected a torch.distributed.pipelining.PipelineStage, or a list of "
                f"them; give the stages, neither their modules nor the schedule"
            )
        taken = isinstance(getattr(stage.__dict__.get(_FORWARD), "__self__", None), _StageCalls)
        if taken or any(stage is other for other in found[:place]):
            raise UsageError(
                f"stages: stage {stage.stage_index} is offloaded already; call remove() of the result of the other "
                f"offload_stages first"
            )
    return found


def _share_of(stage: Stage, nbytes: int | str | tuple[int | str, int | str]) -> int:
    """Bytes to offload of each chunk of a stage: linear between the first and the last rank."""
    ends = nbytes if isinstance(nbytes, tuple) else (nbytes, nbytes)
    if len(ends) != 2:
        raise UsageError(
            f"nbytes: got {nbytes!r}, expected a size, or a pair of sizes: for the first rank and for the last"
        )
    first, last = (parse_bytes(end, what="nbytes") for end in ends)
    return first + (last - first) * stage.group_rank // max(stage.group_size - 1, 1)
