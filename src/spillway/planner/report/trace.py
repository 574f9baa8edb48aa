"""The simulated step as a trace that Chrome (``chrome://tracing``) and Perfetto (https://ui.perfetto.dev) read.

Streams are threads. Stalls of the compute stream are there too, with their reasons. Memory is shown by counters: device
memory by layers, CPU memory, and disk. Times are microseconds from the begin of the step, as the format has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from spillway.errors import printable
from spillway.planner.report.facts import STALLS, Facts
from spillway.planner.timeline import Lane

_PROCESS = 1
_MICRO = 1e6
_THREADS = {lane: number for number, lane in enumerate(Lane, 1)}


def to_trace(facts: Facts) -> str:
    """The step as JSON in the Trace Event Format.

    Example:
        >>> Path("step.json").write_text(to_trace(facts), encoding="utf-8")  # doctest: +SKIP
    """
    events = [*_named(facts), *_spans(facts), *_counters(facts)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False)


def _named(facts: Facts) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", None, name=printable(f"{facts.plan.model} on {facts.hardware}, simulated"))
    for lane, number in _THREADS.items():
        yield _meta("thread_name", lane, name=lane.value)
        yield _meta("thread_sort_index", lane, sort_index=number)


def _meta(kind: str, lane: Lane | None, **args: object) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "M", "pid": _PROCESS, "name": kind, "args": args}
    return event if lane is None else {**event, "tid": _THREADS[lane]}


def _spans(facts: Facts) -> Iterator[dict[str, Any]]:
    for span in facts.timeline.spans:
        task = printable(span.name)
        name, category, args = task, span.lane.value, {}
        if span.reason:
            name, category = f"stall: {span.reason}", "stall"
            args = {"task": task, "reason": STALLS[span.reason]}
        elif span.lane is Lane.COMPUTE:
            category = facts.phases[span.name].value
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": _THREADS[span.lane],
            "name": name,
            "cat": category,
            "ts": span.start * _MICRO,
            "dur": (span.end - span.start) * _MICRO,
            "args": args,
        }


def _counters(facts: Facts) -> Iterator[dict[str, Any]]:
    for place, seconds in enumerate(facts.instants):
        for name, args in (
            ("device", {layer.name: layer.nbytes[place] for layer in facts.layers}),
            ("CPU memory", {"bytes": facts.host_bytes[place]}),
            ("disk", {"bytes": facts.disk_bytes[place]}),
        ):
            yield {"ph": "C", "pid": _PROCESS, "name": name, "ts": seconds * _MICRO, "args": args}
