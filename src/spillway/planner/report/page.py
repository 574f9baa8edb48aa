"""A plan as one HTML file that needs no network, with figures by plotly; its simulated step as a trace.

NOTE [ Content policy of the page ]

The page's policy names the two scripts that may run, by their hashes. It forbids everything else: requests, frames,
forms, injected scripts. Scripts may set styles, since plotly does. Images and fonts from elsewhere are forbidden, so
that none can leak data. The template escapes all text from profiles and plans.

The colours of traces work on a light and on a dark background. The page sets those of text, axes and grid when it is
opened or switched.
"""

from __future__ import annotations

import base64
import html
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from types import ModuleType
from typing import Any

from spillway.errors import UsageError, printable
from spillway.planner.planner import Point
from spillway.planner.report.facts import STALLS, STATIC, Facts, OperatorRow
from spillway.planner.tasks import Phase
from spillway.planner.timeline import STREAMS, Span
from spillway.units import format_bytes, format_seconds

_PHASES = {
    Phase.FORWARD: ("forward", "#3f83c8"),
    Phase.BACKWARD: ("backward", "#8b7cc4"),
    Phase.RECOMPUTE: ("recomputation", "#3fa37c"),
    Phase.OUTSIDE: ("outside of blocks", "#b08d57"),
}
_COPIES = {"out": ("offloading", "#e08a3c"), "back": ("reloading", "#c9a227"), "disk": ("disk", "#64748b")}
_RED = "#d0303a"
"""The colour of stalls, the budget, the peak and this plan."""
_MEASURED = "#c2479e"
_ORDER = [
    *(name for name, _ in _PHASES.values()),
    *(f"stalls for {reason}" for reason in STALLS),
    *(name for name, _ in _COPIES.values()),
]
"""Order of the bars in the legend."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A storage that is offloaded, or a saved parameter that is streamed."""

    block: str
    """The module's name, dotted."""
    operator: str
    """The operator that makes it; ``"input"``: it is an input of the block; ``"parameter"``: a parameter."""
    nbytes: int
    spans: tuple[int, ...]
    """Numbers of the spans of its copies: out, to disk, from disk, back."""


def copies_of(facts: Facts) -> tuple[Copied, ...]:
    """All storages that are copied in a step, in the order in which they are offloaded.

    Copies of all streamed parameters of a block at once are not among them.
    """
    found: dict[int, list[int]] = {}
    for number, span in enumerate(facts.timeline.spans):
        if span.key is not None:
            found.setdefault(span.key, []).append(number)
    # Keys number the values of all blocks. Those of saved parameters follow, if nothing is recomputed.
    calls = facts.profile.calls
    kinds = [facts.profile.kinds[call.kind] for call in calls]
    numbers = (
        len(kind.values) + (0 if block.recomputes else len(kind.parameters))
        for kind, block in zip(kinds, facts.plan.blocks, strict=True)
    )
    first = list(accumulate(numbers, initial=0))
    made = []
    for sent in (each for task in facts.program.tasks for each in task.sends if each.key in found):
        place = bisect_right(first, sent.key) - 1
        kind, number = kinds[place], sent.key - first[place]
        maker = None if sent.is_weight else kind.values[number].maker
        operator = "parameter" if sent.is_weight else "input" if maker is None else kind.operators[maker].name
        made.append(Copied(calls[place].name, operator, sent.nbytes, tuple(found[sent.key])))
    return tuple(made)


def to_page(facts: Facts) -> str:
    """The page. See NOTE [ Content policy of the page ]."""
    graph_objects()
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=PackageLoader("spillway.planner.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        size=format_bytes,
        duration=format_seconds,
        heading=lambda text: text[:1].upper() + text[1:],
        percent=lambda part, whole: f"{part / whole if whole else 0:.1%}",
    )

    def asset(name: str) -> Markup:
        return Markup(environment.loader.get_source(environment, name)[0])  # type: ignore[union-attr]

    # The hash is of what a parser of HTML reads, and it reads all line ends as newlines.
    plotly = Markup(get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n"))
    figures = {"memory": memory_figure(facts), "streams": streams_figure(facts), "curve": curve_figure(facts)}
    data = json.dumps({name: figure for name, figure in figures.items() if figure is not None}, allow_nan=False)
    # Blocks with equal operators share the table that opens below them.
    tables: dict[tuple[OperatorRow, ...], str] = {}
    kinds = [
        (kind, [(row, tables.setdefault(row.operators, f"operators-{len(tables)}")) for row in kind.rows])
        for kind in facts.kinds
    ]
    return environment.get_template("page.html").render(
        facts=facts,
        # The bars of the three steps are relative to the largest.
        most=Point(*(max(getattr(way.point, name) for way in facts.ways) for name in ("peak_bytes", "seconds"))),
        hides_static=hides_static(facts),
        kinds=kinds,
        tables=tables,
        hashes=[base64.b64encode(sha256(script.encode()).digest()).decode() for script in (plotly, asset("page.js"))],
        # No parser of HTML takes anything in it for the end of its element.
        data=Markup(data.replace("<", "\\u003c")),
        plotly=plotly,
        script=asset("page.js"),
        style=asset("page.css"),
    )


def graph_objects() -> ModuleType:
    """The module of plotly's figures.

    Raises:
        UsageError: if plotly is not installed.
    """
    try:
        import plotly.graph_objects as found
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("plotly"):
            raise
        raise UsageError(
            "A report is drawn by plotly, which is not installed: pip install 'spillway[report]'"
        ) from error
    module: ModuleType = found
    return module


def memory_figure(facts: Facts) -> dict[str, Any]:
    """Memory of the device over the step, as stacked layers, with the budget, the peak and the measured peak."""
    scale, unit = _byte_scale(facts.timeline.peak_bytes)
    faster, time_unit = _time_scale(facts.timeline.seconds)
    times = [seconds * faster for seconds in facts.instants]
    hides = hides_static(facts)
    figure = graph_objects().Figure()

    def add(name: str, x: Sequence[float], sizes: Sequence[float], looks: dict[str, Any], **more: Any) -> None:
        y = [_short(nbytes / scale) for nbytes in sizes]
        figure.add_scatter(name=name, x=x, y=y, mode="lines", line=looks, hovertemplate=f"%{{y:.2f}} {unit}", **more)

    for layer in facts.layers:
        add(
            layer.name,
            times,
            layer.nbytes,
            {"width": 0.5, "shape": "hv", "color": layer.colour},
            stackgroup="device",
            fillcolor=layer.colour,
            showlegend=not (hides and layer.key in STATIC),
        )
    top, budget = facts.timeline.peak_bytes, facts.plan.budget
    lines = [("budget", budget, _RED, "dash")] if budget <= 1.5 * top else []
    tasks = facts.measured_tasks
    if facts.measured is not None and not tasks:
        lines.append(("measured peak", facts.measured.peak_bytes, _MEASURED, "dot"))
    if tasks:
        moments = [seconds * faster for task in tasks for seconds in (task.start, task.end)]
        sizes = [nbytes for task in tasks for nbytes in (task.peak, task.level)]
        add("measured", moments, sizes, {"color": _MEASURED, "width": 2, "shape": "hv"})
    for name, nbytes, colour, dash in lines:
        add(name, [times[0], times[-1]], [nbytes, nbytes], {"color": colour, "width": 2, "dash": dash})
    figure.add_scatter(
        x=[times[facts.peak_place]],
        y=[top / scale],
        name="peak",
        mode="markers",
        marker={"color": _RED, "size": 10, "symbol": "triangle-down", "line": {"color": "white", "width": 1}},
        hovertemplate=f"%{{y:.2f}} {unit} in {_safe(facts.timeline.peak_task)}",
    )
    ground = facts.constant_bytes / scale
    highest = max([top, *(nbytes for _, nbytes, *_ in lines), *(task.peak for task in tasks)]) / scale
    # Both looks of the axis: all memory, or only what lies above the ground. The latter says where it begins.
    axes = [
        {"range": [low, highest + 0.06 * (highest - low)], "title": f"memory, {unit}{words}"}
        for low, words in ((0.0, ""), (ground, f" (axis from {format_bytes(facts.constant_bytes)})"))
    ]
    chosen = axes[hides]
    return _laid_out(
        figure,
        # Below plotly's buttons.
        legend={"y": 0.95, "yanchor": "top"},
        hovermode="x unified",
        # The time is written below the streams, whose axis is the same.
        xaxis={"range": _over(facts), "showticklabels": False, "ticksuffix": f" {time_unit}"},
        yaxis={"title": {"text": chosen["title"]}, "range": chosen["range"], "tickformat": "~g"},
        meta={"axes": axes, "static": [place for place, each in enumerate(facts.layers) if each.key in STATIC]},
    )


def hides_static(facts: Facts) -> bool:
    """Whether the figure of memory begins above static memory: it would fill most of the figure."""
    return 2 * facts.constant_bytes > facts.timeline.peak_bytes


def _over(facts: Facts) -> list[float]:
    """The range of the time axis, which memory and streams share."""
    scale, _ = _time_scale(facts.timeline.seconds)
    return [0, max(facts.instants[-1], facts.timeline.seconds) * scale]


def streams_figure(facts: Facts) -> dict[str, Any]:
    """The tasks of each stream over time, and why compute stalls."""
    figure = graph_objects().Figure()
    scale, time_unit = _time_scale(facts.timeline.seconds)
    copied = {number: each for each in copies_of(facts) for number in each.spans}
    phases = {task.name: task.phase for task in facts.program.tasks}
    sorts: dict[tuple[str, str, str], list[tuple[Span, str]]] = {}
    for number, span in enumerate(facts.timeline.spans):
        if span.end > span.start:
            sorts.setdefault(_sort(span, phases), []).append((span, _told(span, copied.get(number))))
    for (name, colour, pattern), spans in sorted(sorts.items(), key=lambda sort: _ORDER.index(sort[0][0])):
        figure.add_bar(
            orientation="h",
            name=name,
            y=[span.stream for span, _ in spans],
            base=[_short(span.start * scale) for span, _ in spans],
            x=[_short((span.end - span.start) * scale) for span, _ in spans],
            hovertext=[told for _, told in spans],
            hoverinfo="text",
            marker={"color": colour, "pattern": {"shape": pattern, "size": 6}, "line": {"width": 0}},
        )
    return _laid_out(
        figure,
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        xaxis={"title": {"text": f"time, {time_unit}"}, "range": _over(facts)},
        yaxis={
            "categoryorder": "array",
            "categoryarray": list(STREAMS),
            "autorange": "reversed",
            "fixedrange": True,
        },
    )


def curve_figure(facts: Facts) -> dict[str, Any] | None:
    """Predicted step time over predicted peak for several budgets, with this plan; ``None`` without a curve."""
    if not facts.curve:
        return None
    plan = facts.point
    scale, unit = _byte_scale(max(facts.keep.peak_bytes, plan.peak_bytes))
    faster, time_unit = _time_scale(max(plan.seconds, *(point.seconds for point in facts.curve)))

    def add(name: str, points: Sequence[Point], **looks: Any) -> None:
        figure.add_scatter(
            name=name,
            x=[_short(point.peak_bytes / scale) for point in points],
            y=[_short(point.seconds * faster) for point in points],
            hovertext=[
                f"{name}: {format_bytes(point.peak_bytes)}, {format_seconds(point.seconds)}" for point in points
            ],
            hoverinfo="text",
            **looks,
        )

    figure = graph_objects().Figure()
    add("plans", facts.curve, mode="lines+markers", line={"color": "#3f83c8", "width": 2}, marker={"size": 6})
    for name, point, symbol, colour in (
        ("keep everything", facts.keep, "square", "#64748b"),
        ("full checkpointing", facts.checkpoint, "diamond", "#3fa37c"),
        ("this plan", plan, "star", _RED),
        ("measured", facts.measured, "x", _MEASURED),
    ):
        if point is not None:
            marker = {"symbol": symbol, "size": 13, "color": colour, "line": {"color": "white", "width": 1}}
            add(name, [point], mode="markers", marker=marker)
    return _laid_out(
        figure,
        hovermode="closest",
        xaxis={"title": {"text": f"peak memory, {unit}"}},
        yaxis={"title": {"text": f"step, {time_unit}"}, "rangemode": "tozero"},
    )


def _laid_out(figure: Any, legend: dict[str, Any] | None = None, **layout: Any) -> dict[str, Any]:
    beside = {"orientation": "h", "traceorder": "normal", "yref": "container", "yanchor": "bottom", "y": 0}
    beside |= {"xanchor": "left", "x": 0, **(legend or {})}
    figure.update_layout(template="none", legend=beside, **layout)
    found: dict[str, Any] = figure.to_plotly_json()
    return found


def _sort(span: Span, phases: dict[str, Phase]) -> tuple[str, str, str]:
    if span.reason:
        return f"stalls for {span.reason}", _RED, "/"
    if span.stream == "compute":
        return (*_PHASES[phases[span.name]], "")
    return (*_COPIES[span.stream], "")


def _told(span: Span, copied: Copied | None) -> str:
    when = f"{format_seconds(span.start)} to {format_seconds(span.end)}, {format_seconds(span.end - span.start)}"
    if span.reason:
        return f"Before {_safe(span.name)} compute stalls<br>{STALLS[span.reason]}<br>{when}"
    if copied is not None:
        return f"{_safe(f'{copied.operator} of {copied.block}')}<br>{format_bytes(copied.nbytes)}<br>{when}"
    return f"{_safe(span.name)}<br>{when}"


def _time_scale(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 10 else (1e3, "ms") if seconds >= 1e-2 else (1e6, "us")


def _byte_scale(nbytes: int) -> tuple[int, str]:
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 4)
    return 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def _short(value: float) -> float:
    return float(f"{value:.9g}")


def _safe(name: str) -> str:
    # Plotly understands some HTML, and the name comes from a file.
    return html.escape(printable(name), quote=False)


_MICRO = 1e6
_THREADS = {stream: number for number, stream in enumerate(STREAMS, 1)}


def to_trace(facts: Facts) -> str:
    """The simulated step as JSON in the Trace Event Format.

    Chrome (``chrome://tracing``) and Perfetto (https://ui.perfetto.dev) read it. Streams are threads. Stalls of the
    compute stream are there too, with their reasons. Arguments of a slice name its block and its bytes, and for a copy
    the operator. A flow leads from each offload to its reload. Memory is shown by counters: device memory by layers,
    CPU memory, and disk. Times are microseconds from the start of the step.
    """
    return json.dumps({"traceEvents": list(_events(facts)), "displayTimeUnit": "ms"}, allow_nan=False)


def _events(facts: Facts) -> Iterator[dict[str, Any]]:
    def event(kind: str, name: str, **fields: Any) -> dict[str, Any]:
        return {"ph": kind, "pid": 1, "name": name, **fields}

    model = printable(f"{facts.plan.model} on {facts.hardware}, simulated")
    yield event("M", "process_name", args={"name": model})
    for stream, number in _THREADS.items():
        yield event("M", "thread_name", tid=number, args={"name": stream})
        yield event("M", "thread_sort_index", tid=number, args={"sort_index": number})
    copied = {number: each for each in copies_of(facts) for number in each.spans}
    blocks = {call.name for call in facts.profile.calls}
    tasks = iter(facts.program.tasks)
    for number, span in enumerate(facts.timeline.spans):
        task = printable(span.name)
        name, category = task, span.stream
        block = span.name.rpartition(" ")[0]
        args: dict[str, str | int] = {"block": printable(block)} if block in blocks else {}
        if span.reason:
            name, category = f"stall: {span.reason}", "stall"
            args |= {"task": task, "reason": STALLS[span.reason]}
        elif span.stream == "compute":
            # Each task has one span.
            work = next(tasks)
            category = work.phase.value
            args |= {"allocated bytes": work.peak_bytes, "offloaded bytes": sum(sent.nbytes for sent in work.sends)}
        elif number in copied:
            storage = copied[number]
            args = {"block": printable(storage.block), "operator": printable(storage.operator)}
            args |= {"bytes": storage.nbytes, "task": task}
        start, seconds = span.start * _MICRO, (span.end - span.start) * _MICRO
        yield event("X", name, tid=_THREADS[span.stream], cat=category, ts=start, dur=seconds, args=args)
    yield from _flows(facts)
    for place, seconds in enumerate(facts.instants):
        for name, values in (
            ("device", {layer.name: layer.nbytes[place] for layer in facts.layers}),
            ("CPU memory", {"bytes": facts.host_bytes[place]}),
            ("disk", {"bytes": facts.disk_bytes[place]}),
        ):
            yield event("C", name, ts=seconds * _MICRO, args=values)
    for measured in facts.measured_tasks:
        for seconds, nbytes in ((measured.start, measured.peak), (measured.end, measured.level)):
            yield event("C", "measured", ts=seconds * _MICRO, args={"bytes": nbytes})


def _flows(facts: Facts) -> Iterator[dict[str, Any]]:
    """From the copy out of each storage to its reload, through the disk if it is there."""
    for number, copied in enumerate(copies_of(facts)):
        last = len(copied.spans) - 1
        for place, each in enumerate(copied.spans if last else ()):
            span = facts.timeline.spans[each]
            # A flow belongs to the slice that its time lies in.
            yield {
                "ph": "s" if place == 0 else "f" if place == last else "t",
                "bp": "e",
                "id": number,
                "cat": "storage",
                "name": "offload to reload",
                "pid": 1,
                "tid": _THREADS[span.stream],
                "ts": (span.start + span.end) / 2 * _MICRO,
            }
