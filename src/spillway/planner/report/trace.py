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
from spillway.planner.timeline import STREAMS

_MICRO = 1e6
_THREADS = {stream: number for number, stream in enumerate(STREAMS, 1)}


def to_trace(facts: Facts) -> str:
    """The step as JSON in the Trace Event Format."""
    return json.dumps({"traceEvents": list(_events(facts)), "displayTimeUnit": "ms"}, allow_nan=False)


def _events(facts: Facts) -> Iterator[dict[str, Any]]:
    def event(kind: str, name: str, **fields: Any) -> dict[str, Any]:
        return {"ph": kind, "pid": 1, "name": name, **fields}

    model = printable(f"{facts.plan.model} on {facts.hardware}, simulated")
    yield event("M", "process_name", args={"name": model})
    for stream, number in _THREADS.items():
        yield event("M", "thread_name", tid=number, args={"name": stream})
        yield event("M", "thread_sort_index", tid=number, args={"sort_index": number})
    for span in facts.timeline.spans:
        task = printable(span.name)
        name, category = task, span.stream
        args: dict[str, str] = {}
        if span.reason:
            name, category = f"stall: {span.reason}", "stall"
            args = {"task": task, "reason": STALLS[span.reason]}
        elif span.stream == "compute":
            category = facts.phases[span.name].value
        start, seconds = span.start * _MICRO, (span.end - span.start) * _MICRO
        yield event("X", name, tid=_THREADS[span.stream], cat=category, ts=start, dur=seconds, args=args)
    for place, seconds in enumerate(facts.instants):
        for name, values in (
            ("device", {layer.name: layer.nbytes[place] for layer in facts.layers}),
            ("CPU memory", {"bytes": facts.host_bytes[place]}),
            ("disk", {"bytes": facts.disk_bytes[place]}),
        ):
            yield event("C", name, ts=seconds * _MICRO, args=values)
