"""The numbers of a plan, computed once and shown three ways: as a page, as a trace, and in the terminal."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spillway.planner.block_tasks import ResolvedDecisions
from spillway.planner.hardware import Hardware
from spillway.planner.plan import BlockPlan, Plan, options_of, program_of, uniform_program
from spillway.planner.planner import Point, planning_rates, profile_for
from spillway.planner.profile import BlockProfile, Profile
from spillway.planner.report.text import names_of
from spillway.planner.tasks import Option, Program, in_words, measured_groups
from spillway.planner.timeline import Timeline, settled, simulate_program
from spillway.types import Decision
from spillway.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """An operator of a block that makes tensors."""

    place: int
    """Its position among the operators of the block."""
    operator: str
    decision: str
    nbytes: int
    """Size of the tensors that it makes."""
    seconds: float
    """One run in forward."""
    reason: str
    origin: str
    """The module inside of the block, and the source line, that it comes from; empty if the profile has none."""


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a block."""

    name: str
    """The module's, dotted."""
    decision: str
    kept_bytes: int
    """On the device from its forward to its backward, with its inputs."""
    sent_bytes: int
    recomputed_bytes: int
    """Recomputed, of the tensors that autograd saves."""
    recompute_seconds: float
    reason: str
    operators: tuple[OperatorRow, ...]
    kind: int
    """Its place in :attr:`Profile.kinds`."""


@dataclass(frozen=True, slots=True)
class KindRow:
    """All calls of one kind of block."""

    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return names_of([row.name for row in self.rows])

    @property
    def decision(self) -> str:
        """The decision for each block, or for how many of them each is."""
        counts = Counter(row.decision for row in self.rows)
        if len(counts) == 1:
            return self.rows[0].decision
        return ", ".join(f"{decision} x {count}" for decision, count in counts.items())


@dataclass(frozen=True, slots=True)
class Layer:
    """Memory of the device that is in use for one purpose."""

    key: str
    name: str
    colour: str
    meaning: str
    """A sentence about the memory that it counts."""
    nbytes: tuple[int, ...]
    """At each of :attr:`Facts.instants`."""


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """A task of the measured step, at the time that the plan gives it."""

    name: str
    start: float
    end: float
    predicted_peak: int
    peak: int
    level: int
    """Bytes when it has ended."""

    @property
    def difference(self) -> int:
        """Bytes by which the measured peak is above the predicted one."""
        return self.peak - self.predicted_peak


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run the step, with its simulated peak and time."""

    name: str
    point: Point
    budget: int
    is_plan: bool = False

    @property
    def distance(self) -> str:
        over = self.point.peak_bytes - self.budget
        return f"{format_bytes(over)} over budget" if over > 0 else "within the budget"


@dataclass(frozen=True, slots=True)
class Facts:
    """All numbers of a plan. Made by :func:`facts_of`."""

    profile: Profile
    plan: Plan
    timeline: Timeline
    hardware: str
    """Name of the machine whose bandwidths are used."""
    program: Program
    rows: tuple[Row, ...]
    instants: tuple[float, ...]
    """Seconds from the start of the step at which memory changes, strictly increasing."""
    layers: tuple[Layer, ...]
    """From the bottom up. At each instant they add up to the memory in use on the device."""
    host_bytes: tuple[int, ...]
    """In CPU memory, at each instant."""
    disk_bytes: tuple[int, ...]
    keep: Point
    """The simulated step that keeps everything."""
    checkpoint: Point
    """The simulated step of full checkpointing: it keeps the inputs of blocks, and recomputes the rest."""
    measured: Point | None
    """The peak and the time of a real step, if one was measured."""
    notes: tuple[str, ...]
    curve: tuple[Point, ...]

    @property
    def point(self) -> Point:
        """Peak and time of the plan's simulated step."""
        return Point(self.timeline.peak_bytes, self.timeline.seconds)

    @property
    def ways(self) -> tuple[Way, ...]:
        """The plan between the two steps that need no plan."""
        budget = self.plan.budget
        return (
            Way("keep everything", self.keep, budget),
            Way("this plan", self.point, budget, is_plan=True),
            Way("full checkpointing", self.checkpoint, budget),
        )

    @property
    def in_short(self) -> str:
        """The plan's gain and its price in one sentence, against keeping everything and full checkpointing."""
        plan = self.point
        return (
            f"Against keeping everything, this plan {_against(plan, self.keep)}; "
            f"against full checkpointing, it {_against(plan, self.checkpoint)}."
        )

    @property
    def kinds(self) -> tuple[KindRow, ...]:
        """The rows by kinds of blocks, in the order in which the forward comes to these."""
        rows: dict[int, list[Row]] = {}
        for row in self.rows:
            rows.setdefault(row.kind, []).append(row)
        return tuple(KindRow(tuple(each)) for each in rows.values())

    @property
    def constant_bytes(self) -> int:
        """Static memory that no instant of the step is without."""
        return sum(min(layer.nbytes) for layer in self.layers if layer.key in STATIC)

    @property
    def peak_place(self) -> int:
        """Index into :attr:`instants` of the highest memory use of the device."""
        return max(range(len(self.instants)), key=lambda place: sum(layer.nbytes[place] for layer in self.layers))

    @property
    def peak_shares(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the layers at the peak, the largest first. They add up to the peak."""
        place = self.peak_place
        shares = ((layer.name, layer.nbytes[place]) for layer in self.layers if layer.nbytes[place])
        return tuple(sorted(shares, key=lambda share: -share[1]))

    @property
    def stalls(self) -> tuple[tuple[str, float], ...]:
        """Why compute stalls, and for how many seconds in all; the longest first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for span in self.timeline.spans:
            if span.reason:
                seconds[STALLS[span.reason]] += span.end - span.start
        return tuple(sorted(seconds.items(), key=lambda pair: -pair[1]))

    @property
    def measured_tasks(self) -> tuple[MeasuredTask, ...]:
        """The tasks of the measured step; none if their bytes were not measured, or they are not those of the plan."""
        measured = () if self.measured is None else self.measured.tasks
        groups, real_groups = (measured_groups(task.name for task in tasks) for tasks in (self.program.tasks, measured))
        if [name for name, _ in groups] != [name for name, _ in real_groups]:
            return ()
        # Each task of the plan has one such span.
        spans = [span for span in self.timeline.spans if span.stream == "compute" and not span.reason]
        return tuple(
            MeasuredTask(
                name,
                start=spans[places[0]].start,
                end=spans[places[-1]].end,
                predicted_peak=max(spans[place].peak_bytes for place in places),
                peak=max(measured[place].peak_bytes for place in real_places),
                level=measured[real_places[-1]].end_bytes,
            )
            for (name, places), (_, real_places) in zip(groups, real_groups, strict=True)
        )

    @property
    def worst_task(self) -> MeasuredTask | None:
        """The task with the largest difference between its predicted and its measured peak."""
        return max(self.measured_tasks, key=lambda task: abs(task.difference), default=None)

    @property
    def compared(self) -> tuple[tuple[str, str, str, str], ...]:
        """Predicted against measured: name, both, and the relative difference. Empty without a measured step."""
        if self.measured is None:
            return ()
        peak, seconds = self.timeline.peak_bytes, self.timeline.seconds
        real_peak, real_seconds = self.measured.peak_bytes, self.measured.seconds
        rows = [("peak", peak, real_peak)]
        if (worst := self.worst_task) is not None:
            rows.append((f"most apart: {in_words(worst.name)}", worst.predicted_peak, worst.peak))
        return (
            *((name, format_bytes(one), format_bytes(other), _difference(other, one)) for name, one, other in rows),
            ("step", format_seconds(seconds), format_seconds(real_seconds), _difference(real_seconds, seconds)),
        )

    @property
    def measured_sentences(self) -> tuple[str, ...]:
        """The measured peak in words, and how a figure shows it; none without a measured step."""
        if self.measured is None:
            return ()
        real = self.measured.peak_bytes
        first = f"The measured step had a peak of {format_bytes(real)}, {_apart(real - self.timeline.peak_bytes)}."
        if (worst := self.worst_task) is not None:
            return (
                first,
                "The measured line has the peak of each task, over the time that the plan gives the task.",
                f"The largest difference is in the task {worst.name!r}: its measured peak of "
                f"{format_bytes(worst.peak)} is {_apart(worst.difference)}.",
            )
        why = (
            "The measured step had other tasks than the plan"
            if self.measured.tasks
            else "The measurement has its peak and its time only"
        )
        return first, f"{why}, so the figure has that peak as a line over the step."

    @property
    def figures(self) -> tuple[tuple[str, str], ...]:
        """The plan in a few named figures."""
        plan, timeline = self.plan, self.timeline
        # A plan may be simulated with the bandwidths of another machine.
        elsewhere = not math.isclose(timeline.seconds, plan.predicted_seconds, rel_tol=1e-6)
        then = f"; {format_seconds(plan.predicted_seconds)} on the machine that it was made for" if elsewhere else ""
        recomputing, stalled = plan.recompute_seconds, timeline.wait_seconds
        here, away = len(plan.resident), len({call.name for call in self.profile.calls if call.streamed})
        weights = (("weights", f"{away} blocks streamed, {here} on the GPU by the plan"),) if here or away else ()
        return (
            ("budget", format_bytes(plan.budget)),
            ("peak", f"{format_bytes(timeline.peak_bytes)}, in {in_words(timeline.peak_task) or 'no task'}"),
            ("step", f"{format_seconds(timeline.seconds)} on {self.hardware}{then}"),
            ("recomputation", f"{format_seconds(recomputing)}, {_share(recomputing, timeline.seconds)} of the step"),
            ("stalls", f"{format_seconds(stalled)}, {_share(stalled, timeline.seconds)} of the step"),
            *weights,
            ("offloaded", format_bytes(plan.sent_bytes)),
            ("CPU memory", format_bytes(timeline.host_bytes)),
            ("disk", format_bytes(timeline.disk_bytes)),
            ("in flight", f"at most {format_bytes(plan.window)}"),
        )

    @property
    def peak_sentences(self) -> tuple[str, ...]:
        """The peak in words: its distance from the budget, its task, and what it consists of."""
        most, budget = self.timeline.peak_bytes, self.plan.budget
        distance = f"{format_bytes(abs(budget - most))} {'below' if most <= budget else 'above'} the budget"
        parts = [f"{format_bytes(nbytes)} {name} ({_share(nbytes, most)})" for name, nbytes in self.peak_shares]
        made_of = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
        return (
            f"The peak is {format_bytes(most)}, {distance}.",
            f"It is in the task {self.timeline.peak_task or 'before all others'!r}, "
            f"{format_seconds(self.instants[self.peak_place])} after the step began.",
            f"It consists of {made_of or 'nothing'}.",
        )


STALLS = {
    "out": "for offloading: the in-flight limit is reached",
    "back": "for reloading from CPU memory",
    "disk": "for reloading from disk",
    "host": "for the CPU, which has not queued the kernel yet",
}
"""Why the compute stream stalls, by the reason that the simulation gives."""


def facts_of(
    profile: Profile,
    plan: Plan,
    hardware: Hardware,
    *,
    measured: Point | None = None,
    notes: Sequence[str] = (),
    curve: tuple[Point, ...] = (),
) -> Facts:
    """Simulate a plan with the bandwidths of some hardware, and gather its numbers.

    If the plan divides an optimizer, all simulated steps have the same part of it on the GPU.
    """
    profile = profile_for(profile, plan, hardware)
    program, rates = program_of(profile, plan), planning_rates(hardware, plan.window)
    timeline = simulate_program(program, rates, spans=True)
    steps = (simulate_program(uniform_program(profile, each), rates) for each in (Decision.KEEP, Decision.RECOMPUTE))
    keep, checkpoint = (Point(step.peak_bytes, step.seconds) for step in steps)
    places, instants = _instants(timeline)
    kinds, stacks = _stacked(profile, timeline)
    layers = tuple(Layer(*kind, tuple(stacks[place][number] for place in places)) for number, kind in enumerate(kinds))
    return Facts(
        profile=profile,
        plan=plan,
        timeline=timeline,
        hardware=hardware.name,
        program=program,
        rows=tuple(
            _row(profile, call.kind, block, option)
            for call, block, option in zip(profile.calls, plan.blocks, options_of(profile, plan), strict=True)
        ),
        instants=instants,
        # Layers that are empty in the whole step are not shown.
        layers=tuple(layer for layer in layers if any(layer.nbytes)),
        host_bytes=tuple(timeline.levels[place].host for place in places),
        disk_bytes=tuple(timeline.levels[place].disk for place in places),
        keep=keep,
        checkpoint=checkpoint,
        measured=measured,
        notes=tuple(notes),
        curve=curve,
    )


_STATIC = (
    "static",
    "static memory",
    "#64748b",
    "In use when the step begins: parameters, gradients, optimizer state and others.",
)
_WEIGHTS = ("weights", "weights", "#64748b", "Parameters of the model.")
_OPTIMIZER = ("optimizer", "optimizer state", "#8a94a6", "State of the optimizer that the profile was given.")
_OTHER = ("other", "other static memory", "#a9b1bd", "Buffers, and all other memory of the process.")
_OTHER_WITH_STATE = (
    "other",
    "optimizer state and other",
    "#a9b1bd",
    "Buffers, all other memory of the process, and optimizer state: the profile was given no optimizer.",
)
STATIC = frozenset(layer[0] for layer in (_STATIC, _WEIGHTS, _OPTIMIZER, _OTHER))
"""Keys of layers that lie below all others, and stay the same."""
_MOVING = (
    ("gradients", "gradients", "#8b7cc4", "Gradients of parameters: those of the step, and those from before it."),
    ("outside", "outside of blocks", "#b08d57", "Activations of embeddings, head and loss."),
    ("kept", "kept", "#3f83c8", "Activations of blocks, from their forward to their backward."),
    ("leaving", "being offloaded", "#e08a3c", "Still on the GPU until the copy is done."),
    ("returning", "prefetched", "#e9b949", "Reloaded ahead of time, and not used yet."),
    ("returned", "reloaded", "#c9a227", "On the GPU again, and in use by backward."),
    ("recomputed", "recomputed", "#3fa37c", "Recomputed, and in use by backward."),
    ("working", "working memory", "#d0605f", "Allocated by the running task, its results included."),
)
"""Attributes of the simulation's holders, with names, colours and meanings."""


def _stacked(profile: Profile, timeline: Timeline) -> tuple[list[tuple[str, str, str, str]], list[list[int]]]:
    """The layers, and the bytes of each at each level."""
    static = profile.static
    gradients = 0 if static is None else static.gradients
    if static is None:
        ground, nbytes = [_STATIC], [profile.static_bytes]
    elif static.optimizer:
        ground, nbytes = [_WEIGHTS, _OPTIMIZER, _OTHER], [static.weights, static.optimizer, static.other]
    else:
        ground, nbytes = [_WEIGHTS, _OTHER_WITH_STATE], [static.weights, static.other]
    stacks = []
    for level in timeline.levels:
        moving = [getattr(level.holders, key) for key, *_ in _MOVING]
        stacks.append(settled([*nbytes, moving[0] + gradients, *moving[1:]]))
    return [*ground, *_MOVING], stacks


def _instants(timeline: Timeline) -> tuple[list[int], tuple[float, ...]]:
    """Which levels are shown, and when.

    One moment may have many levels. The last of them lasts, and is shown; so is the highest one before it. The second
    is drawn a millionth of the step later, which is too little to see.
    """
    levels, places = timeline.levels, []
    for _, moment in itertools.groupby(range(len(levels)), lambda place: levels[place].seconds):
        together = list(moment)
        highest, last = max(together, key=lambda place: levels[place].device), together[-1]
        places += [highest, last] if levels[highest].device > levels[last].device else [last]
    step = timeline.seconds * 1e-6
    instants: list[float] = []
    for place in places:
        seconds = levels[place].seconds
        instants.append(max(seconds, instants[-1] + step) if instants else seconds)
    return places, tuple(instants)


_ALIKE = 0.005
"""A smaller difference is shown as none: it would be rounded to 0 %."""


def _against(plan: Point, other: Point) -> str:
    """The plan's peak and time beside those of another step, in words."""
    more, longer = plan.peak_bytes - other.peak_bytes, plan.seconds - other.seconds
    peak, seconds = "has the same peak", "takes the same time"
    if abs(more) > _ALIKE * other.peak_bytes:
        much = f"{format_bytes(abs(more))} ({_share(abs(more), other.peak_bytes)})"
        peak = f"takes {much} more at the peak" if more > 0 else f"saves {much} at the peak"
    if abs(longer) > _ALIKE * other.seconds:
        much = f"{format_seconds(abs(longer))} ({_share(abs(longer), other.seconds)})"
        seconds = f"takes {much} longer" if longer > 0 else f"is {much} faster"
    return f"{peak} and {seconds}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _apart(nbytes: int) -> str:
    return f"{format_bytes(abs(nbytes))} {'above' if nbytes > 0 else 'below'} the predicted one"


def _difference(found: float, expected: float) -> str:
    return f"{found / expected - 1:+.1%}" if expected else "-"


def _row(profile: Profile, number: int, block: BlockPlan, option: Option) -> Row:
    kind = profile.kinds[number]
    resolved = ResolvedDecisions.of(kind, option.decisions, profile.min_bytes)
    operators = tuple(_operators(kind, block, option, resolved))
    words = [*(["offload"] if resolved.offloaded else []), *(["recompute"] if resolved.recomputed else [])]
    return Row(
        name=block.name,
        decision="keep" if block.plain else " and ".join(words) or "keep",
        kept_bytes=kind.nbytes(resolved.kept),
        sent_bytes=kind.nbytes(resolved.offloaded),
        recomputed_bytes=kind.nbytes(resolved.recomputed),
        recompute_seconds=block.recompute_seconds,
        reason=_reason(block, operators),
        operators=operators,
        kind=number,
    )


_WORDS = {
    Decision.KEEP: "keep",
    Decision.OFFLOAD: "offload",
    Decision.OFFLOAD_HOST: "offload to CPU memory",
    Decision.OFFLOAD_DISK: "offload to disk",
    Decision.RECOMPUTE: "recompute",
}


def _operators(
    kind: BlockProfile, block: BlockPlan, option: Option, resolved: ResolvedDecisions
) -> Iterable[OperatorRow]:
    planned = {each.place: each for each in block.operators}
    for place, each in enumerate(kind.operators):
        if not each.makes:
            continue
        nbytes = kind.nbytes(each.makes)
        price = f"{each.seconds / nbytes * 1e12:.1f} ps a byte" if nbytes else "no bytes"
        if place in planned:
            decision, reason = _WORDS[planned[place].decision], planned[place].reason
        elif block.plain:
            decision, reason = "keep", "the whole block is kept"
        elif place in resolved.runs:
            decision, reason = "recompute", f"costs {price}"
        elif option.decisions[each.makes[0]] is Decision.RECOMPUTE or resolved.kept.isdisjoint(each.makes):
            decision, reason = "free", "backward does not need it"
        else:
            decision, reason = "keep", f"recomputing it would cost {price}"
        origin = " at ".join(part for part in (each.module, each.line) if part)
        yield OperatorRow(place, each.name, decision, nbytes, each.seconds, reason, origin)


def _reason(block: BlockPlan, operators: Sequence[OperatorRow]) -> str:
    """Why a block has its decisions: what recomputing its bytes costs, for each decision."""
    if block.plain:
        return "The budget is large enough to keep the whole block."
    parts = []
    for decision, word in (("offload", "offloaded"), ("keep", "kept"), ("recompute", "recomputed")):
        those = [each for each in operators if each.decision.startswith(decision) and each.nbytes]
        if those:
            prices = sorted(each.seconds / each.nbytes * 1e12 for each in those)
            nbytes = format_bytes(sum(each.nbytes for each in those))
            parts.append(
                f"{len(those)} operators {word} ({nbytes}, {prices[0]:.1f} to {prices[-1]:.1f} ps a byte to compute)"
            )
    inputs = "kept" if block.inputs is Decision.KEEP else "offloaded"
    return f"{'; '.join([*parts, f'inputs {inputs}'])}."
