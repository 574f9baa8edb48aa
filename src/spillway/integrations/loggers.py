"""Statistics of a step as a flat dictionary of floats, and a call that logs them, for TensorBoard, W&B and others."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from spillway.attaching import Attached
from spillway.errors import UsageError
from spillway.types import GroupStats, OptimizerStats, StepStats

__all__ = ["log", "scalars"]


def log(
    source: Attached | StepStats | OptimizerStats,
    to: Any,
    step: int | None = None,
    *,
    prefix: str = "spillway/",
    report: bool = False,
) -> None:
    """Log :func:`scalars` of a step to TensorBoard, W&B or accelerate, and with ``report`` the plan as well.

    On an accelerator this may wait until the device has finished the last step.

    Args:
        source: the result of :func:`spillway.attach`, or statistics of a step.
        to: a ``SummaryWriter``, or an object with ``log(numbers, step=...)``: a W&B run, an ``Accelerator``.
        step: the number of the step; ``None``: the logger counts.
        prefix: of all names.
        report: also log the plan of a model with a budget, as ``<prefix>report``: the HTML page to W&B
            (:meth:`spillway.Attached.report`), the text to TensorBoard (:meth:`spillway.Attached.explain`).

    Raises:
        UsageError: for something without statistics, or a logger of another kind; with ``report``, for statistics
            without a model, and whatever :meth:`spillway.Attached.report` raises.

    Example:
        >>> log(attached, writer, step)  # doctest: +SKIP
        >>> log(attached, writer, step, report=True)  # once, after the last step  # doctest: +SKIP
    """
    logged: dict[str, Any] = dict(scalars(source, prefix=prefix))
    planned = source if report and isinstance(source, Attached) else None
    if report and planned is None:
        raise UsageError(f"report=True: got {type(source).__name__}, expected the result of spillway.attach")
    if hasattr(to, "add_scalar"):
        for name, number in logged.items():
            to.add_scalar(name, number, step)
        if planned is not None:
            # The text is Markdown there, in which indented lines keep their columns.
            to.add_text(f"{prefix}report", textwrap.indent(planned.explain(), "    "), step)
    elif hasattr(to, "log"):
        if planned is not None:
            logged[f"{prefix}report"] = _page_for_wandb(planned)
        to.log(logged, step=step)
    else:
        raise UsageError(
            f"to: got {to!r:.200}, expected a SummaryWriter, or an object with log(numbers, step=...), such as the run "
            f"that wandb.init returns; give another logger the result of scalars(...)"
        )


def scalars(source: Attached | StepStats | OptimizerStats, *, prefix: str = "spillway/") -> dict[str, float]:
    """Names and numbers for a logger, in bytes and seconds.

    They are all numbers of :class:`~spillway.StepStats`, the number of its ``notes``, and those of each group under
    ``group/<name>/``. With a budget, they also are, once known: ``plan/active`` (1.0 when the plan is active),
    ``plan/budget_bytes``, ``plan/predicted_peak_bytes``, ``plan/predicted_seconds``, ``plan/offloaded_bytes``,
    ``plan/recompute_seconds``, and, measured in the validating step, ``plan/checked_peak_bytes`` and
    ``plan/checked_seconds``.

    On an accelerator this may wait until the device has finished the last step. Call it only when you log.

    Args:
        source: the result of :func:`spillway.attach`, or statistics of a step.
        prefix: of all names.

    Raises:
        UsageError: for something without statistics.

    Example:
        >>> scalars(StepStats(offloaded_bytes=3), prefix="")["offloaded_bytes"]
        3.0
    """
    if not isinstance(prefix, str):
        raise UsageError(f"prefix: got {prefix!r}, expected a string such as 'spillway/'")
    if isinstance(source, Attached):
        named = [*_numbers(source.stats()), *_plan_numbers(source)]
    elif isinstance(source, StepStats | OptimizerStats):
        named = [*_numbers(source)]
    else:
        raise UsageError(
            f"got {source!r:.200}, expected the result of spillway.attach, a StepStats or an OptimizerStats; for an "
            f"offload context, a session or an optimizer, give its stats()"
        )
    return {f"{prefix}{name}": float(number) for name, number in named}


def _numbers(record: StepStats | OptimizerStats | GroupStats) -> Iterator[tuple[str, float]]:
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, int | float):
            yield field.name, value
    if isinstance(record, StepStats):
        yield "notes", len(record.notes)
        for group in record.groups:
            for name, number in _numbers(group):
                yield f"group/{group.name}/{name}", number


def _plan_numbers(attached: Attached) -> Iterator[tuple[str, float]]:
    if attached.stage is not None:
        yield "plan/active", attached.stage == "active"
    plan, measured = attached.plan, attached.measured
    if plan is not None:
        yield "plan/budget_bytes", plan.budget
        yield "plan/predicted_peak_bytes", plan.predicted_peak
        yield "plan/predicted_seconds", plan.predicted_seconds
        yield "plan/offloaded_bytes", plan.sent_bytes
        yield "plan/recompute_seconds", plan.recompute_seconds
    if measured is not None:
        yield "plan/checked_peak_bytes", measured.peak_bytes
        yield "plan/checked_seconds", measured.seconds


def _page_for_wandb(attached: Attached) -> object:
    try:
        from wandb import Html  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise UsageError("report=True: only a TensorBoard writer and W&B take a report: install wandb") from error
    with tempfile.TemporaryDirectory(prefix="spillway-report-") as folder:
        path = Path(folder, "report.html")
        attached.report(path)
        return Html(str(path))
