"""What came of a script, as values: what was attached, what it did and cost, and what was not attached, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from spillway.records import StepStats
from spillway.running.clock import Clock
from spillway.running.roots import Root, Roots
from spillway.running.steps import Steps

SCHEMA = 1
NO_MODULE = "in no module"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOutcome:
    """What came of one model. Bytes and seconds; ``None``: not known."""

    kind: str
    """Its class."""
    blocks: int
    way: str
    """``"budget"``, ``"plan"``, or the policy."""
    stage: str | None
    """Where the search for a plan was in the end."""
    budget: int | None
    missing: str | None
    """What a plan still needed in the end."""
    predicted_peak: int | None
    peak: int
    """Of the step in which the plan was checked, or else of the whole process so far."""
    predicted_seconds: float | None
    checked_seconds: float | None
    """Of the step in which the plan was checked."""
    predicted_stall_seconds: float | None
    predicted_rerun_seconds: float | None
    predicted_kept_bytes: int | None
    predicted_sent_bytes: int | None
    stats: StepStats
    """Of the last step."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotAttached:
    """Modules of one class to which nothing was attached, and why."""

    kind: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What came of a script."""

    rank: int
    steps: int
    seconds: float | None
    """Median of the time between the last steps."""
    roots: tuple[RootOutcome, ...]
    not_attached: tuple[NotAttached, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """All of it, for programs."""
        text: bytes = _RUN.dump_json(self, indent=1)
        return text.decode()


def outcome_of(roots: Roots, steps: Steps, clock: Clock, *, rank: int) -> RunOutcome:
    """What came of it so far."""
    reasons = Counter((each.kind, each.reason) for each in roots.given_up)
    not_attached = [NotAttached(kind, count, reason) for (kind, reason), count in reasons.items()]
    if steps.nobodys:
        not_attached.append(NotAttached("Parameter", steps.nobodys, NO_MODULE))
    return RunOutcome(
        rank=rank,
        steps=clock.count,
        seconds=clock.seconds,
        roots=tuple(map(_of_root, roots.attached)),
        not_attached=tuple(not_attached),
    )


def _of_root(root: Root) -> RootOutcome:
    attached = root.attached
    plan, measured, stats = attached.plan, attached.measured, attached.stats()
    return RootOutcome(
        kind=root.kind,
        blocks=root.blocks,
        way=root.treated.way,
        stage=attached.stage,
        budget=attached.budget,
        missing=attached.missing,
        predicted_peak=None if plan is None else plan.predicted_peak,
        peak=stats.peak_bytes if measured is None else measured.peak_bytes,
        predicted_seconds=None if plan is None else plan.predicted_seconds,
        checked_seconds=None if measured is None else measured.seconds,
        predicted_stall_seconds=None if plan is None else plan.stall_seconds,
        predicted_rerun_seconds=None if plan is None else plan.rerun_seconds,
        predicted_kept_bytes=None if plan is None else sum(block.kept_bytes for block in plan.blocks),
        predicted_sent_bytes=None if plan is None else plan.sent_bytes,
        stats=stats,
        notes=(*root.notes, *stats.notes, *attached.notes),
    )


_RUN: TypeAdapter[Any] = TypeAdapter(RunOutcome)
