"""A plan: decisions for the saved tensors of all blocks, predictions, and the step that follows from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from spillway.errors import UsageError, printable
from spillway.planner.block_tasks import make_option, outside_task
from spillway.planner.files import Count, FileRecord, Record, Seconds
from spillway.planner.profile import BlockProfile, Profile, ReplayRule
from spillway.planner.tasks import (
    AFTER,
    BEFORE,
    MIDDLE,
    Option,
    Part,
    Phase,
    Problem,
    Program,
    Rates,
    Streamed,
    in_words,
)
from spillway.types import Decision
from spillway.units import format_bytes, format_html, format_seconds

if TYPE_CHECKING:
    from spillway.planner.solve import Solution

SCHEMA = 6
ALL = frozenset({"keep", "host", "disk", "recompute"})
"""All that ``allow=`` may name."""
ANY_RATES = Rates(1.0, 1.0, 1.0, 1.0, 1)
"""For steps that offload nothing."""


@dataclass(frozen=True, slots=True)
class OperatorPlan(Record):
    """A decision for the outputs of one operator of a block.

    Operators without one are recomputed, or kept if nothing of the block is (:attr:`BlockPlan.recomputes`).
    """

    place: Count
    """Number of operators of the block that run before it."""
    operator: str
    """As ``"aten::mm.default"``."""
    decision: Decision
    nbytes: Count
    reason: str


@dataclass(frozen=True, slots=True)
class BlockPlan(Record):
    """The decisions for one call of a block."""

    name: str
    """Dotted name of the module."""
    plain: bool
    """Whether the block is not changed, and keeps everything."""
    inputs: Decision
    operators: tuple[OperatorPlan, ...]
    kept_bytes: int
    """Bytes on the GPU between its forward and its backward."""
    sent_bytes: Count
    """Offloaded bytes."""
    recompute_seconds: Seconds
    recomputes: bool = True
    """Whether operators without a decision are recomputed; if not, they are kept."""

    def __str__(self) -> str:
        name = printable(self.name)
        if self.plain:
            return f"{name}: keeps all of its {format_bytes(self.kept_bytes)}"
        seconds = f"for {format_seconds(self.recompute_seconds)}" if self.recomputes else "nothing"
        return (
            f"{name}: keeps {format_bytes(self.kept_bytes)}, offloads {format_bytes(self.sent_bytes)}, recomputes "
            f"{seconds}"
        )


@dataclass(frozen=True, slots=True)
class Plan(FileRecord):
    """Decisions for a step: made by :func:`spillway.plan`, applied by ``spillway.attach(model, plan=...)``."""

    model: str
    """Class of the model."""
    device: str
    budget: Count
    """Most bytes that may be allocated on the GPU."""
    window: Annotated[int, Field(ge=1)]
    """The in-flight limit in bytes, for offloading and for prefetching."""
    predicted_peak: Count
    """Most bytes on the GPU at once."""
    predicted_seconds: Seconds
    """Duration of a step."""
    stall_seconds: Seconds
    """Seconds of the step in which compute stalls for copies."""
    peak_task: str
    host_bytes: Count
    disk_bytes: Count
    blocks: tuple[BlockPlan, ...]
    """In the order of the forward."""
    optimizer_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """The fraction of an ``OffloadedOptimizer`` that is stepped on the CPU; ``None``: this plan does not set it."""
    resident: tuple[str, ...] = ()
    """Blocks that are streamed in the profile, and whose weights stay on the GPU by this plan."""
    schema: int = SCHEMA

    @property
    def sent_bytes(self) -> int:
        """Bytes that are offloaded in a step."""
        return sum(block.sent_bytes for block in self.blocks)

    @property
    def recompute_seconds(self) -> float:
        """Seconds of recomputation in a step."""
        return sum(block.recompute_seconds for block in self.blocks)

    def __str__(self) -> str:
        lines = [
            f"peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)}, in "
            f"{printable(in_words(self.peak_task))}; a step of {format_seconds(self.predicted_seconds)}: offloads "
            f"{format_bytes(self.sent_bytes)}, recomputes for {format_seconds(self.recompute_seconds)}, stalls "
            f"{format_seconds(self.stall_seconds)}"
        ]
        if self.optimizer_fraction is not None:
            lines.append(f"  optimizer: {self.optimizer_fraction:.0%} of it on the CPU")
        if self.resident:
            count = len(self.resident)
            lines.append(f"  weights: those of {count} block{'s' if count > 1 else ''} stay on the GPU")
        lines += [f"  {block}" for block in self.blocks]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return format_html(str(self))


def planned_block(name: str, block: BlockProfile, option: Option) -> BlockPlan:
    """The decisions of an option of a block."""
    sent = {each.key for task in option.forward for each in task.sends}
    recomputes = any(task.phase is Phase.RECOMPUTE for task in option.backward)
    operators = []
    for place, each in enumerate(block.operators):
        if not each.makes or each.replay is not ReplayRule.FREE:
            continue
        decision = option.decisions[each.makes[0]]
        offloads = not sent.isdisjoint(each.makes)
        if decision is Decision.RECOMPUTE or not (recomputes or offloads):
            continue
        nbytes = block.nbytes(each.makes)
        price = each.seconds / nbytes * 1e12 if nbytes else 0.0
        reason = f"recomputing it would cost {format_seconds(each.seconds)}, {price:.1f} ps a byte"
        operators.append(OperatorPlan(place, each.name, decision if offloads else Decision.KEEP, nbytes, reason))
    inputs = (number for number, value in enumerate(block.values) if value.is_input)
    return BlockPlan(
        name=name,
        plain=not sent and not recomputes,
        inputs=next((option.decisions[number] for number in inputs if number in sent), Decision.KEEP),
        operators=tuple(operators),
        kept_bytes=option.kept_bytes,
        sent_bytes=option.sent_bytes,
        recompute_seconds=option.recompute_seconds,
        recomputes=recomputes,
    )


def plan_of(profile: Profile, solution: Solution, *, part: int = 0) -> Plan:
    """A solution as a plan for one part, whose profile is given."""
    problem, timeline = solution.problem, solution.timeline
    options = [solution.options[block] for block in problem.blocks_of(part)]
    return Plan(
        model=profile.model,
        device=profile.device,
        budget=problem.budget + (problem.spare or 0),
        window=problem.rates.window,
        predicted_peak=timeline.peak_bytes,
        predicted_seconds=timeline.seconds,
        stall_seconds=timeline.stall_seconds,
        peak_task=timeline.peak_task,
        host_bytes=timeline.host_bytes,
        disk_bytes=timeline.disk_bytes,
        blocks=tuple(
            planned_block(call.name, profile.kinds[call.kind], option)
            for call, option in zip(profile.calls, options, strict=True)
        ),
    )


def check_allow(allow: object, what: str = "allow") -> None:
    """Raise :class:`~spillway.errors.UsageError` for an invalid ``allow=``."""
    if isinstance(allow, str) or not isinstance(allow, Collection) or not allow or not set(allow) <= ALL:
        given = ",".join(map(str, allow)) if isinstance(allow, tuple) else allow
        raise UsageError(f"{what}: got {given!r}, expected a collection of at least one of {sorted(ALL)!r}")


def options_of(profile: Profile, plan: Plan) -> tuple[Option, ...]:
    """The option of each call of a block in a plan."""
    if [block.name for block in plan.blocks] != [call.name for call in profile.calls]:
        raise UsageError(
            f"The plan is for {plan.model} with {len(plan.blocks)} blocks, and the profile has the "
            f"{len(profile.calls)} blocks of {profile.model}. Make a plan from this profile."
        )
    pairs = [(profile.kinds[call.kind], block) for call, block in zip(profile.calls, plan.blocks, strict=True)]
    return tuple(make_option(kind, _decisions(kind, block), min_bytes=profile.min_bytes) for kind, block in pairs)


def _decisions(block: BlockProfile, planned: BlockPlan) -> list[Decision]:
    rest = Decision.KEEP if planned.plain or not planned.recomputes else Decision.RECOMPUTE
    decisions = [planned.inputs if value.is_input else rest for value in block.values]
    for each in planned.operators:
        if each.place >= len(block.operators) or block.operators[each.place].name != each.operator:
            raise UsageError(
                f"The plan names {each.operator} as operator {each.place} of {planned.name!r}, and the profile has "
                f"another operator there. Make a plan from this profile."
            )
        for number in block.operators[each.place].makes:
            decisions[number] = each.decision
    return decisions


def program_of(profile: Profile, plan: Plan) -> Program:
    """The step of a plan, from a profile that is :func:`divided` if it has an optimizer."""
    return _program(profile, options_of(profile, plan))


def uniform_options(profile: Profile, decision: Decision) -> list[Option]:
    """For each call of a block: keep its inputs, with one decision for the rest."""
    kinds = []
    for kind in profile.kinds:
        decisions = [Decision.KEEP if value.is_input else decision for value in kind.values]
        kinds.append(make_option(kind, decisions, min_bytes=profile.min_bytes))
    return [kinds[call.kind] for call in profile.calls]


def uniform_program(profile: Profile, decision: Decision) -> Program:
    """The step that keeps everything, or, with ``RECOMPUTE``, that of torch's own checkpointing."""
    return _program(profile, uniform_options(profile, decision))


def _program(profile: Profile, options: Sequence[Option]) -> Program:
    return problem_with(profile, [(option,) for option in options]).program([0] * len(options))


def problem_with(
    profile: Profile, options: Iterable[tuple[Option, ...]], rates: Rates = ANY_RATES, *, budget: int = 0
) -> Problem:
    """The problem of a profile's step, with options for each call of a block, and a budget in bytes."""
    return Problem(
        static_bytes=profile.static_bytes,
        parts=(part_of(profile),),
        names=tuple(call.name for call in profile.calls),
        options=tuple(options),
        rates=rates,
        budget=budget,
        extra_bytes=tuple(call.backward_extra_bytes for call in profile.calls),
        streamed=tuple(Streamed(call.streamed, call.read_seconds) for call in profile.calls),
    )


def part_of(profile: Profile) -> Part:
    """The tasks around its blocks."""
    return Part(
        len(profile.calls),
        before=(outside_task(BEFORE, profile.before),),
        middle=(outside_task(MIDDLE, profile.middle),),
        after=(outside_task(AFTER, profile.after),),
        late=() if profile.late is None else (outside_task(MIDDLE, profile.late),),
    )
