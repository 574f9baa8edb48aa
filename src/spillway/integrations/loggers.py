"""Statistics of a step as a flat dictionary of floats, for TensorBoard, W&B and other loggers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from spillway.attaching import Attached
from spillway.errors import UsageError
from spillway.types import GroupStats, OptimizerStats, StepStats

__all__ = ["scalars"]


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
