"""A plan: a decision for everything that the blocks of a model save, its predictions, and the steps that it makes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from spillway.errors import UsageError, printable
from spillway.planner.block_tasks import make_option, outside_task
from spillway.planner.files import Count, FileRecord, Record, Seconds
from spillway.planner.profile import Again, BlockProfile, Profile
from spillway.planner.tasks import Option, Part, Phase, Problem, Program, Rates
from spillway.types import Decision
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from spillway.planner.solve import Solution

SCHEMA = 3
ALL = frozenset({"keep", "host", "disk", "recompute"})
"""What may be done with saved tensors."""
ANY_RATES = Rates(1.0, 1.0, 1.0, 1.0, 1)
"""For steps that offload nothing."""


@dataclass(frozen=True, slots=True)
class OperatorPlan(Record):
    """A decision for the outputs of one operator of a block.

    An operator that is not named is recomputed, or kept where nothing is (:attr:`BlockPlan.recomputes`).
    """

    place: Count
    """How many operators of the block run before it."""
    operator: str
    """As ``"aten::mm.default"``."""
    decision: Decision
    nbytes: Count
    reason: str


@dataclass(frozen=True, slots=True)
class BlockPlan(Record):
    """The decisions for one call of a block."""

    name: str
    """The module's, dotted."""
    plain: bool
    """Whether it is left alone, and keeps everything."""
    inputs: Decision
    operators: tuple[OperatorPlan, ...]
    kept_bytes: int
    """On the device between its forward and its backward."""
    sent_bytes: Count
    """Offloaded bytes."""
    rerun_seconds: Seconds
    """Of recomputation."""
    recomputes: bool = True
    """Whether anything is recomputed; if not, operators that are not named are kept."""

    def __str__(self) -> str:
        name = printable(self.name)
        if self.plain:
            return f"{name}: keeps all of its {format_bytes(self.kept_bytes)}"
        again = f"{format_seconds(self.rerun_seconds)} again" if self.recomputes else "nothing again"
        return (
            f"{name}: keeps {format_bytes(self.kept_bytes)}, sends away {format_bytes(self.sent_bytes)}, computes "
            f"{again}"
        )


@dataclass(frozen=True, slots=True)
class Plan(FileRecord):
    """Decisions for a step. A value: made by :func:`spillway.plan`, applied by ``spillway.attach(model, plan=...)``."""

    model: str
    """Class of the model."""
    device: str
    budget: Count
    """Bytes that may be allocated on the device at most."""
    window: Annotated[int, Field(ge=1)]
    """Bytes that may be on their way out at once."""
    predicted_peak: Count
    """Most bytes that are allocated on the device at once."""
    predicted_seconds: Seconds
    """Of a step."""
    stall_seconds: Seconds
    """Seconds of the step in which compute waits for copies."""
    peak_task: str
    host_bytes: Count
    disk_bytes: Count
    blocks: tuple[BlockPlan, ...]
    """In the order of the forward."""
    method: str
    """``"exact"``: there is no better one. ``"search"``: no better one was found."""
    bound_seconds: Seconds | None = None
    """No plan can be faster. ``None``: that is not known."""
    ahead: Annotated[int, Field(ge=1)] | None = None
    """Bytes that may be prefetched; ``None``: as many as may be on their way out."""
    optimizer_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """The fraction of an ``OffloadedOptimizer`` that is stepped on the CPU; ``None``: the plan does not say."""
    schema: int = SCHEMA

    @property
    def sent_bytes(self) -> int:
        """Bytes that are offloaded in a step."""
        return sum(block.sent_bytes for block in self.blocks)

    @property
    def rerun_seconds(self) -> float:
        """Seconds of recomputation in a step."""
        return sum(block.rerun_seconds for block in self.blocks)

    def __str__(self) -> str:
        task = printable(self.peak_task)
        lines = [
            f"{format_bytes(self.predicted_peak)} of {format_bytes(self.budget)}, in {task}; a step of "
            f"{format_seconds(self.predicted_seconds)}: {format_bytes(self.sent_bytes)} leave, "
            f"{format_seconds(self.rerun_seconds)} are computed again, {format_seconds(self.stall_seconds)} waited for"
        ]
        if self.optimizer_fraction is not None:
            lines.append(f"  optimizer: {self.optimizer_fraction:.0%} of it on the host")
        lines += [f"  {block}" for block in self.blocks]
        return "\n".join(lines)


def planned_block(name: str, block: BlockProfile, option: Option) -> BlockPlan:
    """The decisions of an option of a block."""
    sent = {each.key for task in option.forward for each in task.sends}
    recomputes = any(task.phase is Phase.RERUN for task in option.backward)
    operators = []
    for place, each in enumerate(block.operators):
        if not each.makes or each.again is not Again.FREE:
            continue
        decision = option.decisions[each.makes[0]]
        leaves = not sent.isdisjoint(each.makes)
        if decision is Decision.RECOMPUTE or not (recomputes or leaves):
            continue
        nbytes = block.nbytes(each.makes)
        price = each.seconds / nbytes * 1e12 if nbytes else 0.0
        reason = f"{'leaves' if leaves else 'stays'}: {price:.1f} ps a byte to compute again"
        operators.append(OperatorPlan(place, each.name, decision if leaves else Decision.KEEP, nbytes, reason))
    inputs = (number for number, value in enumerate(block.values) if value.is_input)
    return BlockPlan(
        name=name,
        plain=not sent and not recomputes,
        inputs=next((option.decisions[number] for number in inputs if number in sent), Decision.KEEP),
        operators=tuple(operators),
        kept_bytes=option.kept_bytes,
        sent_bytes=option.sent_bytes,
        rerun_seconds=option.rerun_seconds,
        recomputes=recomputes,
    )


def plan_of(profile: Profile, problem: Problem, solution: Solution, *, part: int = 0) -> Plan:
    """A solution as a plan for one part, whose profile is given."""
    timeline = solution.timeline
    options = [problem.options[block][solution.chosen[block]] for block in problem.blocks_of(part)]
    return Plan(
        model=profile.model,
        device=profile.device,
        budget=problem.budget,
        window=problem.rates.window,
        ahead=problem.rates.ahead,
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
        method=solution.method,
        bound_seconds=solution.bound_seconds,
    )


def check_allow(allow: object) -> None:
    """Raise :class:`~spillway.errors.UsageError` for what does not say what may be done."""
    if isinstance(allow, str) or not isinstance(allow, Collection) or not allow or not set(allow) <= ALL:
        raise UsageError(f"allow: got {allow!r}, expected a collection of at least one of {sorted(ALL)!r}")


def options_of(profile: Profile, plan: Plan) -> tuple[Option, ...]:
    """What a plan does with each call of a block.

    Raises:
        UsageError: if the plan is of another model.
    """
    if [block.name for block in plan.blocks] != [call.name for call in profile.calls]:
        raise UsageError(
            f"plan: got one for {plan.model} with {len(plan.blocks)} blocks, expected the {len(profile.calls)} of the "
            f"profile of {profile.model}; make a plan of this profile"
        )
    pairs = [(profile.kinds[call.kind], block) for call, block in zip(profile.calls, plan.blocks, strict=True)]
    return tuple(make_option(kind, _decisions(kind, block), min_bytes=profile.min_bytes) for kind, block in pairs)


def _decisions(block: BlockProfile, planned: BlockPlan) -> list[Decision]:
    rest = Decision.KEEP if planned.plain or not planned.recomputes else Decision.RECOMPUTE
    decisions = [planned.inputs if value.is_input else rest for value in block.values]
    for each in planned.operators:
        if each.place >= len(block.operators) or block.operators[each.place].name != each.operator:
            raise UsageError(
                f"plan: got {each.operator} as operator {each.place} of {planned.name!r}, which is another one in the "
                f"profile, expected a plan of this profile"
            )
        for number in block.operators[each.place].makes:
            decisions[number] = each.decision
    return decisions


def program_of(profile: Profile, plan: Plan) -> Program:
    """The step that a plan makes of a profile, :func:`divided` where it has an optimizer.

    Raises:
        UsageError: if the plan is of another model.
    """
    return _program(profile, options_of(profile, plan))


def uniform_options(profile: Profile, decision: Decision) -> list[Option]:
    """For each call of a block: keep its inputs, with one decision for the rest."""
    said = [[Decision.KEEP if value.is_input else decision for value in kind.values] for kind in profile.kinds]
    pairs = zip(profile.kinds, said, strict=True)
    kinds = [make_option(kind, decisions, min_bytes=profile.min_bytes) for kind, decisions in pairs]
    return [kinds[call.kind] for call in profile.calls]


def kept_program(profile: Profile) -> Program:
    """The step that keeps everything."""
    return _program(profile, uniform_options(profile, Decision.KEEP))


def checkpointed_program(profile: Profile) -> Program:
    """The step of torch's checkpointing: it keeps the inputs of blocks, and recomputes the rest."""
    return _program(profile, uniform_options(profile, Decision.RECOMPUTE))


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
        lead=profile.lead_seconds,
    )


def part_of(profile: Profile) -> Part:
    """The tasks around its blocks."""
    return Part(
        len(profile.calls),
        before=(outside_task("before the blocks", profile.before),),
        middle=(outside_task("head and loss", profile.middle),),
        after=(outside_task("after the blocks", profile.after),),
        late=() if profile.late is None else (outside_task("head and loss", profile.late),),
    )
