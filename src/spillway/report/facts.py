"""The numbers of a plan that page, trace and terminal share: made once, shown in three ways."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spillway.planning.curve import Curve, Point
from spillway.planning.hardware import Hardware
from spillway.planning.holders import settled
from spillway.planning.plan import Plan
from spillway.planning.profile import Profile
from spillway.planning.programs import options_of, program_of
from spillway.planning.tasks import Phase
from spillway.planning.timeline import Timeline, simulate_program
from spillway.planning.windows import rates_of
from spillway.report.rows import Row, rows_of
from spillway.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Layer:
    """One holder of the device's bytes."""

    key: str
    name: str
    """For people."""
    meaning: str
    """What is counted here, in a sentence."""
    nbytes: tuple[int, ...]
    """At each of :attr:`Facts.instants`."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Where the device has the most bytes."""

    place: int
    """Of :attr:`Facts.instants`."""
    seconds: float
    task: str
    """In which it is."""
    shares: tuple[tuple[str, int], ...]
    """What holds how many bytes, the largest first. They add up to the peak."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is to say of a plan. Made by :func:`facts_of`."""

    profile: Profile
    plan: Plan
    timeline: Timeline
    """The simulated step."""
    hardware: str
    """Of which machine's rates."""
    phases: dict[str, Phase]
    """Of tasks, by their names."""
    rows: tuple[Row, ...]
    """The calls of blocks, in the order of the forward."""
    instants: tuple[float, ...]
    """Seconds from the begin of the step, at which memory changes, each a little later than the one before."""
    layers: tuple[Layer, ...]
    """From the ground up. At each instant they add up to what the device has."""
    host_bytes: tuple[int, ...]
    """In host memory, at each instant."""
    disk_bytes: tuple[int, ...]
    peak: Peak
    measured: Point | None
    """What a real step took; ``None``: none was measured."""
    notes: tuple[str, ...]
    """What happened while the plan was looked for."""
    curve: Curve | None
    """``None``: it was left out."""

    @property
    def waits(self) -> tuple[tuple[str, float], ...]:
        """Why compute waits, and for how many seconds in all; the longest first."""
        seconds: dict[str, float] = {}
        for span in self.timeline.spans:
            if span.reason:
                seconds[span.reason] = seconds.get(span.reason, 0.0) + span.end - span.start
        return tuple(sorted(((WAITS[reason], each) for reason, each in seconds.items()), key=lambda pair: -pair[1]))

    @property
    def compared(self) -> tuple[tuple[str, str, str, str], ...]:
        """Predicted against measured: what, either, and by how much the measured one is larger. Empty without one."""
        if self.measured is None:
            return ()
        predicted = Point(self.timeline.peak_bytes, self.timeline.seconds)
        return (
            (
                "peak",
                format_bytes(predicted.peak_bytes),
                format_bytes(self.measured.peak_bytes),
                _difference(self.measured.peak_bytes, predicted.peak_bytes),
            ),
            (
                "step",
                format_seconds(predicted.seconds),
                format_seconds(self.measured.seconds),
                _difference(self.measured.seconds, predicted.seconds),
            ),
        )

    @property
    def figures(self) -> tuple[tuple[str, str], ...]:
        """The plan in a few figures, each with its name."""
        plan, timeline = self.plan, self.timeline
        # A plan may be looked at with the rates of another machine.
        elsewhere = abs(timeline.seconds - plan.predicted_seconds) > _SAME * plan.predicted_seconds
        then = f"; where it was made, {format_seconds(plan.predicted_seconds)}" if elsewhere else ""
        known = plan.bound_seconds and not elsewhere
        bound = f"; no plan takes less than {format_seconds(plan.bound_seconds or 0)}" if known else ""
        found = {"exact": "counting: there is none better", "search": "a search: none better was found"}
        ahead = "" if plan.ahead is None else f", {format_bytes(plan.ahead)} of it on the way back"
        again = plan.rerun_seconds
        return (
            ("budget", format_bytes(plan.budget)),
            ("peak", f"{format_bytes(timeline.peak_bytes)}, in {timeline.peak_task or 'no task'}"),
            ("step", f"{format_seconds(timeline.seconds)} on {self.hardware}{then}"),
            ("computed again", f"{format_seconds(again)}, {_share(again, timeline.seconds)} of the step"),
            ("waits", f"{format_seconds(timeline.wait_seconds)}, {_share(timeline.wait_seconds, timeline.seconds)}"),
            ("sent away", format_bytes(plan.sent_bytes)),
            ("host memory", format_bytes(timeline.host_bytes)),
            ("disk", format_bytes(timeline.disk_bytes)),
            ("window", f"{format_bytes(plan.window)}{ahead}"),
            ("found by", f"{found.get(plan.method, plan.method)}{bound}"),
        )

    @property
    def peak_sentences(self) -> tuple[str, ...]:
        """The peak in words: where it is, what it is made of, and how far from the budget."""
        most, budget = self.timeline.peak_bytes, self.plan.budget
        room = f"{format_bytes(abs(budget - most))} {'below' if most <= budget else 'above'} the budget"
        parts = [f"{format_bytes(nbytes)} {name} ({_share(nbytes, most)})" for name, nbytes in self.peak.shares]
        made_of = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)
        return (
            f"The peak is {format_bytes(most)}, {room}.",
            f"It is in the task {self.peak.task or 'before all others'!r}, {format_seconds(self.peak.seconds)} after "
            f"the step began.",
            f"It is made of {made_of or 'nothing'}.",
        )


_SAME = 1e-6
"""Times that differ by less, of a whole, are the same."""

WAITS = {
    "out": "for room in the window: what leaves has not left yet",
    "back": "for what comes back from host memory",
    "disk": "for what comes back from the disk",
    "host": "for the host, which has not queued it yet",
}
"""What a wait of the compute lane is for, by the reason that the simulation gives."""


def facts_of(
    profile: Profile,
    plan: Plan,
    hardware: Hardware,
    *,
    active: int = 1,
    measured: Point | None = None,
    notes: Sequence[str] = (),
    curve: Curve | None = None,
) -> Facts:
    """Simulate a plan, and gather what there is to say of it.

    Args:
        profile: of a step.
        plan: of this profile's model.
        hardware: whose rates the lanes have.
        active: how many devices of the machine copy at the same time.
        measured: the peak and the seconds of a real step.
        notes: what happened while the plan was looked for.
        curve: through several budgets.

    Raises:
        UsageError: for a plan of another model.
    """
    program = program_of(profile, plan)
    timeline = simulate_program(program, rates_of(plan, hardware, active=active), spans=True)
    places, instants = _instants(timeline)
    kinds, stacks = _stacked(profile, timeline)
    layers = tuple(
        Layer(key, name, meaning, tuple(stacks[place][number] for place in places))
        for number, (key, name, meaning) in enumerate(kinds)
    )
    return Facts(
        profile=profile,
        plan=plan,
        timeline=timeline,
        hardware=hardware.name,
        phases={task.name: task.phase for task in program.tasks},
        rows=rows_of(profile, plan, options_of(profile, plan)),
        instants=instants,
        # What is nowhere in a step is not shown.
        layers=tuple(layer for layer in layers if any(layer.nbytes)),
        host_bytes=tuple(timeline.levels[place].host for place in places),
        disk_bytes=tuple(timeline.levels[place].disk for place in places),
        peak=_peak(timeline, layers, instants),
        measured=measured,
        notes=tuple(notes),
        curve=curve,
    )


_STATIC = ("static", "there when the step begins", "Parameters, gradients, optimizer state and what else is there.")
_WEIGHTS = ("weights", "weights", "Parameters of the model.")
_OPTIMIZER = ("optimizer", "optimizer state", "State of the optimizer that the profile was told of.")
_OTHER = ("other", "other static bytes", "Buffers, and what else the process has there.")
_OTHER_WITH_STATE = (
    "other",
    "optimizer state and other",
    "Buffers, what else the process has there, and an optimizer's state: the profile was told of none.",
)
_MOVING = (
    ("gradients", "gradients", "Of parameters: those of the step, and those that were there when it began."),
    ("outside", "outside of blocks", "What embeddings, head and loss hold."),
    ("kept", "kept", "What blocks hold from their forward to their backward."),
    ("leaving", "leaving", "On its way out, and still on the device."),
    ("returning", "returning", "Fetched ahead, and not yet asked for."),
    ("returned", "returned", "Back on the device, and in use by backward."),
    ("recomputed", "computed again", "Computed again, and in use by backward."),
    ("working", "being worked on", "What the running task allocates while it runs, also what it will leave behind."),
)


def _stacked(profile: Profile, timeline: Timeline) -> tuple[list[tuple[str, str, str]], list[list[int]]]:
    """What the layers are, and the bytes of each at each level."""
    static = profile.static
    if static is None:
        ground, nbytes, gradients = [_STATIC], [], 0
    else:
        ground = [_WEIGHTS, *([_OPTIMIZER] if static.optimizer else [])]
        ground.append(_OTHER if static.optimizer else _OTHER_WITH_STATE)
        nbytes = [static.weights, *([static.optimizer] if static.optimizer else []), static.other]
        gradients = static.gradients
    stacks = []
    for held in timeline.holders:
        below = nbytes or [held.static]
        moving = [getattr(held, key) for key, *_ in _MOVING]
        stacks.append(settled([*below, moving[0] + gradients, *moving[1:]]))
    return [*ground, *_MOVING], stacks


def _instants(timeline: Timeline) -> tuple[list[int], tuple[float, ...]]:
    """Which levels are shown, and when.

    At one moment there may be many, in the order of the program, of which the last one lasts. It is shown, and so is
    the highest one before it. Of two that are shown, the later one comes a millionth of the step later: nobody sees it.
    """
    levels, places = timeline.levels, []
    first = 0
    for place, level in enumerate(levels):
        if place + 1 < len(levels) and levels[place + 1].seconds == level.seconds:
            continue
        highest = max(range(first, place + 1), key=lambda number: levels[number].device)
        places += [highest, place] if levels[highest].device > level.device else [place]
        first = place + 1
    step = timeline.seconds * 1e-6
    instants: list[float] = []
    for place in places:
        seconds = levels[place].seconds
        instants.append(max(seconds, instants[-1] + step) if instants else seconds)
    return places, tuple(instants)


def _peak(timeline: Timeline, layers: Sequence[Layer], instants: Sequence[float]) -> Peak:
    totals = [sum(each) for each in zip(*(layer.nbytes for layer in layers), strict=True)]
    place = totals.index(max(totals))
    shares = sorted(((layer.name, layer.nbytes[place]) for layer in layers), key=lambda share: -share[1])
    return Peak(place, instants[place], timeline.peak_task, tuple(share for share in shares if share[1]))


def grouped(rows: Sequence[Row]) -> Iterator[tuple[str, Row, int]]:
    """Equal blocks together: their names, the first of them, and how many there are.

    Example:
        >>> [names for names, *_ in grouped(rows)]  # doctest: +SKIP
        ['layers.0 to 3, 8 to 11', 'layers.4 to 7']
    """
    alike: dict[object, list[Row]] = {}
    for row in rows:
        alike.setdefault(row.what, []).append(row)
    for each in alike.values():
        yield names_of([row.name for row in each]), each[0], len(each)


def names_of(names: Sequence[str]) -> str:
    """Names that end in numbers which follow each other, in short: ``"layers.0 to 11"``."""
    runs: list[tuple[str, int, int] | str] = []
    for name in names:
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        last = runs[-1] if runs else None
        if not digits:
            runs.append(name)
        elif isinstance(last, tuple) and (last[0], last[2] + 1) == (stem, int(digits)):
            runs[-1] = (stem, last[1], int(digits))
        else:
            runs.append((stem, int(digits), int(digits)))
    words, before = [], None
    for run in runs:
        if isinstance(run, str):
            words.append(run)
            before = None
            continue
        stem, first, last_number = run
        # What was said of the one before need not be said again.
        name = f"{'' if stem == before else stem}{first}"
        between = "," if last_number == first + 1 else " to"
        words.append(name if first == last_number else f"{name}{between} {last_number}")
        before = stem
    return ", ".join(words)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _difference(found: float, expected: float) -> str:
    return f"{found / expected - 1:+.1%}" if expected else "-"
