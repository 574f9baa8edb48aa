"""What happened to a script: which models were attached, what that did and cost, and which were rejected."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from spillway.cli.running.models import ManagedModel
from spillway.cli.running.observer import ScriptObserver
from spillway.errors import printable
from spillway.types import StepStats
from spillway.units import format_bytes, format_seconds

SCHEMA = 1
WIDEST = 80
"""Columns of a terminal."""
NOTHING_CALLED = (
    "No module was called as model(...) in training with gradients on, in this process. Spillway does not see child "
    "processes: start each of them with spillway run, as torchrun does."
)
"""Why nothing was attached, if there is no other reason."""
IN_NO_MODULE = "in no module"
_HEADINGS = ("", "peak", "step", "stall", "kept", "offloaded", "recomputed")
_COLUMN = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """What happened to one model. Sizes are bytes; ``None``: unknown."""

    kind: str
    """Its class."""
    blocks: int
    way: str
    """``"budget"``, ``"plan"``, or the policy."""
    stage: str | None
    """The last stage of the search for a plan."""
    budget: int | None
    missing: str | None
    """What a plan still needed in the end."""
    predicted_peak: int | None
    peak: int
    """In the step that validated the plan, or else in the whole process so far."""
    predicted_seconds: float | None
    checked_seconds: float | None
    """Of the step that validated the plan."""
    predicted_stall_seconds: float | None
    predicted_rerun_seconds: float | None
    predicted_kept_bytes: int | None
    predicted_sent_bytes: int | None
    stats: StepStats
    """Of the last step."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotAttached:
    """Modules of one class that were rejected, and why."""

    kind: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What happened to a script."""

    rank: int
    steps: int
    seconds: float | None
    """Median of the time between the last steps."""
    roots: tuple[ModelResult, ...]
    not_attached: tuple[NotAttached, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """All of it, for programs."""
        text: bytes = _RUN.dump_json(self, indent=1)
        return text.decode()

    def to_text(self) -> str:
        """A table of at most 80 columns."""
        return "\n".join(_lines(self))

    @property
    def reasons(self) -> str:
        """Why nothing was attached, in a line."""
        return "; ".join(f"{each.kind} {each.reason}" for each in self.not_attached) or NOTHING_CALLED


def result_of(observer: ScriptObserver, *, rank: int = 0) -> RunResult:
    """What happened so far."""
    models, clock = observer.models, observer.clock
    reasons = Counter((each.kind, each.reason) for each in models.rejected)
    not_attached = [NotAttached(kind, count, reason) for (kind, reason), count in reasons.items()]
    if observer.parameters_in_no_module:
        not_attached.append(NotAttached("Parameter", observer.parameters_in_no_module, IN_NO_MODULE))
    return RunResult(
        rank=rank,
        steps=clock.count,
        seconds=clock.seconds,
        roots=tuple(map(_model_result, models.managed)),
        not_attached=tuple(not_attached),
    )


def _model_result(model: ManagedModel) -> ModelResult:
    attached = model.attached
    plan, measured, stats = attached.plan, attached.measured, attached.stats()
    return ModelResult(
        kind=model.kind,
        blocks=model.blocks,
        way=model.way,
        stage=attached.stage,
        budget=attached.budget,
        missing=attached.missing,
        predicted_peak=None if plan is None else plan.predicted_peak,
        peak=stats.peak_bytes if measured is None else measured.peak_bytes,
        predicted_seconds=None if plan is None else plan.predicted_seconds,
        checked_seconds=None if measured is None else measured.seconds,
        predicted_stall_seconds=None if plan is None else plan.stall_seconds,
        predicted_rerun_seconds=None if plan is None else plan.recompute_seconds,
        predicted_kept_bytes=None if plan is None else sum(block.kept_bytes for block in plan.blocks),
        predicted_sent_bytes=None if plan is None else plan.sent_bytes,
        stats=stats,
        notes=(*model.notes, *stats.notes, *attached.notes),
    )


def _lines(result: RunResult) -> Iterator[str]:
    rank = f" (rank {result.rank})" if result.rank else ""
    models, steps = len(result.roots), result.steps
    yield (
        f"spillway{rank}: {models} model{'' if models == 1 else 's'} attached, "
        f"{steps} optimizer step{'' if steps == 1 else 's'}"
    )
    for model in result.roots:
        yield ""
        yield from _of_model(model, result.seconds)
    for each in result.not_attached:
        yield ""
        kind = each.kind if each.count == 1 else f"{each.count} x {each.kind}"
        yield from wrapped(f"{kind} not attached: {each.reason}", "  ")
    if not result.roots and not result.not_attached:
        yield ""
        yield from wrapped(NOTHING_CALLED)


def _of_model(model: ModelResult, seconds: float | None) -> Iterator[str]:
    budget = "" if model.budget is None else f" of {format_bytes(model.budget)}"
    stage = "" if model.stage is None else f", {model.stage}"
    yield from wrapped(f"{model.kind}: {model.blocks} blocks, {model.way}{budget}{stage}", "  ")
    if model.missing is not None:
        yield from wrapped(f"no plan yet: it takes {model.missing}", "  ")
    yield _row(*_HEADINGS)
    if model.predicted_peak is not None:
        yield _row(
            "predicted",
            format_bytes(model.predicted_peak),
            _seconds(model.predicted_seconds),
            _seconds(model.predicted_stall_seconds),
            "-" if model.predicted_kept_bytes is None else format_bytes(model.predicted_kept_bytes),
            "-" if model.predicted_sent_bytes is None else format_bytes(model.predicted_sent_bytes),
            _seconds(model.predicted_rerun_seconds),
        )
    stats = model.stats
    sizes = map(format_bytes, (stats.kept_bytes, stats.offloaded_bytes, stats.recomputed_bytes))
    yield _row("measured", format_bytes(model.peak), _seconds(seconds), _seconds(stats.stall_seconds), *sizes)
    for note in model.notes:
        yield from wrapped(f"note: {note}", "  ")


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _row(first: str, *others: str) -> str:
    return f"  {first:<9}" + "".join(f"{cell:>{_COLUMN}}" for cell in others)


def wrapped(text: str, indent: str = "") -> list[str]:
    """A sentence as lines of at most :data:`WIDEST` columns."""
    return textwrap.wrap(printable(text), WIDEST, subsequent_indent=indent + "  ", initial_indent=indent) or [""]


_RUN: TypeAdapter[Any] = TypeAdapter(RunResult)
