"""What a step took, as a flat dictionary of floats: what TensorBoard, W&B and their like are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from spillway.attaching import Attached
from spillway.errors import UsageError
from spillway.records import GroupStats, OptimizerStats, StepStats

__all__ = ["scalars"]


def scalars(source: Attached | StepStats | OptimizerStats, *, prefix: str = "spillway/") -> dict[str, float]:
    """Names and numbers for a logger. Bytes are bytes and times are seconds, as they are in the records.

    All numbers of :class:`~spillway.StepStats` are there, with the number of its ``notes``; those of each group are
    under ``group/<name>/``. Of what is attached with a budget, these too, as soon as they are known: ``plan/holding``
    (1.0 when the search for a plan is over), ``plan/budget_bytes``, ``plan/predicted_peak_bytes``,
    ``plan/predicted_seconds``, ``plan/sent_bytes``, ``plan/rerun_seconds``, and of the step that was checked
    ``plan/checked_peak_bytes`` and ``plan/checked_seconds``.

    On an accelerator this asks for the times of the last pass, and may wait for the device to end it: call it where you
    log, and not in every step.

    Args:
        source: what :func:`spillway.attach` gave back, or a record of a step.
        prefix: what all names begin with.

    Raises:
        UsageError: for something that has no statistics.

    Example:
        >>> scalars(StepStats(offloaded_bytes=3), prefix="")["offloaded_bytes"]
        3.0
    """
    if not isinstance(prefix, str):
        raise UsageError(f"prefix: got {prefix!r}, expected a string such as 'spillway/'")
    if isinstance(source, Attached):
        named = [*_numbers(source.stats()), *_of_plan(source)]
    elif isinstance(source, StepStats | OptimizerStats):
        named = [*_numbers(source)]
    else:
        raise UsageError(
            f"got {source!r:.200}, expected what spillway.attach gave back, or a StepStats or an OptimizerStats; of an "
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


def _of_plan(attached: Attached) -> Iterator[tuple[str, float]]:
    if attached.stage is not None:
        yield "plan/holding", attached.stage == "active"
    plan, measured = attached.plan, attached.measured
    if plan is not None:
        yield "plan/budget_bytes", plan.budget
        yield "plan/predicted_peak_bytes", plan.predicted_peak
        yield "plan/predicted_seconds", plan.predicted_seconds
        yield "plan/sent_bytes", plan.sent_bytes
        yield "plan/rerun_seconds", plan.rerun_seconds
    if measured is not None:
        yield "plan/checked_peak_bytes", measured.peak_bytes
        yield "plan/checked_seconds", measured.seconds
