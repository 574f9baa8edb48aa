"""The result of a script: the attached models, their bytes and times, and the rejected modules."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from spillway.cli import HOOK, is_hooked
from spillway.cli.running.models import ManagedModel, ScriptObserver
from spillway.errors import printable
from spillway.planner.report.text import WIDTH
from spillway.types import StepStats
from spillway.units import format_bytes, format_seconds, read_budget

NOTHING_CALLED = (
    "No module was called as model(...) in training with gradients on, in this process or in a managed child"
)
"""Why nothing was attached, if there is no other reason."""
NO_PLAN_FITS = "no plan fits"
_UNHOOKED = (
    f". Child processes are not managed, since this Python's site-packages lack {HOOK}: install Spillway with pip, or "
    f"start each of them with spillway run, as torchrun does"
)
_HEADINGS = ("", "peak", "step", "stall", "kept", "offloaded", "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """The result of one model. Sizes are bytes; ``None``: unknown."""

    kind: str
    blocks: int
    way: str
    """``"budget 40GiB"`` as it was given, ``"budget"`` for the default, ``"plan"``, ``"ratio 0.5"``, or the policy."""
    stage: str | None
    """The last stage of the search for a plan, or that no plan fits."""
    budget: int | None
    streamed: int | None = None
    """Blocks whose weights are in CPU memory in the end; ``None``: weights are not streamed."""
    missing: str | None
    """Steps or calls that a plan still needed in the end."""
    peak: int
    """In the step that validated the plan, or else in the whole process so far."""
    predicted_peak: int | None = None
    predicted_seconds: float | None = None
    predicted_stall_seconds: float | None = None
    predicted_recompute_seconds: float | None = None
    predicted_kept_bytes: int | None = None
    predicted_offloaded_bytes: int | None = None
    stats: StepStats
    """The last step's."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NotAttached:
    """Modules of one class that were rejected, and why."""

    kind: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a script."""

    rank: int
    steps: int
    seconds: float | None
    """Median of the time between the last steps."""
    models: tuple[ModelResult, ...]
    not_attached: tuple[NotAttached, ...]
    children: tuple[RunResult, ...] = ()
    """Results of managed child processes that attached to a model, or rejected one."""
    schema: int = 1

    def to_json(self) -> str:
        return TypeAdapter(RunResult).dump_json(self, indent=1).decode()

    def to_text(self) -> str:
        """A table of at most 80 columns."""
        return "\n".join(_lines(self))

    @property
    def reasons(self) -> str:
        """Why nothing was attached, in a line."""
        not_attached = (*self.not_attached, *(each for child in self.children for each in child.not_attached))
        reasons = dict.fromkeys(f"{each.kind} {each.reason}" for each in not_attached)
        return "; ".join(reasons) or f"{NOTHING_CALLED}{'' if is_hooked() else _UNHOOKED}"

    @property
    def models_below(self) -> tuple[ModelResult, ...]:
        """Models of managed child processes, and of theirs."""
        return tuple(model for child in self.children for model in (*child.models, *child.models_below))


def result_of(observer: ScriptObserver, *, rank: int = 0, children: tuple[RunResult, ...] = ()) -> RunResult:
    """The result so far."""
    reasons = Counter((each.kind, each.reason) for each in observer.models.rejected)
    return RunResult(
        rank=rank,
        steps=observer.count,
        seconds=observer.seconds,
        models=tuple(_model_result(each, observer.models.fatal is not None) for each in observer.models.managed),
        not_attached=tuple(NotAttached(kind, count, reason) for (kind, reason), count in reasons.items()),
        children=children,
    )


def _model_result(model: ManagedModel, is_unfit: bool) -> ModelResult:
    attached = model.attached
    plan, measured, stats = attached.plan, attached.measured, attached.stats()
    predicted: dict[str, Any] = {}
    if plan is not None:
        predicted = {
            "predicted_peak": plan.predicted_peak,
            "predicted_seconds": plan.predicted_seconds,
            "predicted_stall_seconds": plan.stall_seconds,
            "predicted_recompute_seconds": plan.recompute_seconds,
            "predicted_kept_bytes": sum(block.kept_bytes for block in plan.blocks),
            "predicted_offloaded_bytes": plan.sent_bytes,
        }
    return ModelResult(
        kind=model.kind,
        blocks=model.blocks,
        way=model.way,
        stage=NO_PLAN_FITS if is_unfit and plan is None and attached.budget is not None else attached.stage,
        budget=attached.budget,
        streamed=len(attached.streamed) if attached.streamed or (plan is not None and plan.resident) else None,
        missing=attached.missing,
        peak=stats.peak_bytes if measured is None else measured.peak_bytes,
        stats=stats,
        notes=(*model.notes, *stats.notes, *attached.notes),
        **predicted,
    )


def _lines(result: RunResult) -> Iterator[str]:
    rank = f" (rank {result.rank})" if result.rank else ""
    models, steps, below = len(result.models), result.steps, Counter(each.kind for each in result.models_below)
    yield (
        f"spillway{rank}: {models} model{'' if models == 1 else 's'} attached, "
        f"{steps} optimizer step{'' if steps == 1 else 's'}"
    )
    if below:
        kinds = ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in below.items())
        yield from wrapped(f"attached in child processes: {kinds}", "  ")
    for model in result.models:
        yield ""
        yield from _model_lines(model, result.seconds)
    for each in result.not_attached:
        yield ""
        kind = each.kind if each.count == 1 else f"{each.count} x {each.kind}"
        yield from wrapped(f"{kind} not attached: {each.reason}", "  ")
    if not (result.models or result.not_attached or below):
        yield ""
        yield from wrapped(f"{result.reasons}.")


def _model_lines(model: ModelResult, seconds: float | None) -> Iterator[str]:
    # The user's own figure, and bytes for a share.
    is_size = model.way.startswith("budget ") and isinstance(read_budget(model.way.partition(" ")[2]), int)
    budget = "" if model.budget is None or is_size else f" ({format_bytes(model.budget)})"
    stage = "" if model.stage is None else f", {model.stage}"
    streamed = "" if model.streamed is None else f" ({model.streamed} streamed)"
    yield from wrapped(f"{model.kind}: {model.blocks} blocks{streamed}, {model.way}{budget}{stage}", "  ")
    if model.missing is not None and model.stage != NO_PLAN_FITS:
        yield from wrapped(f"no plan yet: it takes {model.missing}", "  ")
    yield _row(*_HEADINGS)
    if model.predicted_peak is not None:
        yield _row(
            "predicted",
            format_bytes(model.predicted_peak),
            format_seconds(model.predicted_seconds or 0),
            format_seconds(model.predicted_stall_seconds or 0),
            format_bytes(model.predicted_kept_bytes or 0),
            format_bytes(model.predicted_offloaded_bytes or 0),
            format_seconds(model.predicted_recompute_seconds or 0),
        )
    stats = model.stats
    sizes = map(format_bytes, (stats.kept_bytes, stats.offloaded_bytes, stats.recomputed_bytes))
    step = "-" if seconds is None else format_seconds(seconds)
    yield _row("measured", format_bytes(model.peak), step, format_seconds(stats.stall_seconds), *sizes)
    for note in model.notes:
        yield from wrapped(f"note: {note}", "  ")


def _row(first: str, *others: str) -> str:
    return f"  {first:<9}" + "".join(f"{cell:>11}" for cell in others)


def wrapped(text: str, indent: str = "") -> list[str]:
    """A sentence as lines of at most 80 columns."""
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent=indent + "  ", initial_indent=indent) or [""]
