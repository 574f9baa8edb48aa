"""A plan as one HTML file that needs no network.

NOTE [ Content policy of the page ]

The page's policy names the two scripts that may run, by their hashes. It forbids everything else: requests, frames,
forms, injected scripts. Scripts may set styles, since plotly does. Images and fonts from elsewhere are forbidden, so
that none can leak data. All text from profiles and plans is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from string import Template

from spillway.errors import printable
from spillway.report.facts import Facts, OperatorRow, Row
from spillway.report.figures import curve_figure, graph_objects, memory_figure, streams_figure
from spillway.units import format_bytes, format_seconds


def to_page(facts: Facts) -> str:
    """The page. See NOTE [ Content policy of the page ].

    Args:
        facts: of a plan.

    Raises:
        UsageError: if plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    # The hash is of what a parser of HTML reads, and it reads all line ends as newlines.
    plotly = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    script = _asset("page.js")
    templates: dict[tuple[OperatorRow, ...], str] = {}
    plan = facts.plan
    return Template(_asset("page.html")).substitute(
        policy=_policy(plotly, script),
        title=f"A plan for {_text(plan.model)}",
        subtitle=_text(
            f"{len(facts.rows)} blocks on {plan.device}, budget {format_bytes(plan.budget)}; "
            f"bandwidths of {facts.hardware}"
        ),
        style=_asset("page.css"),
        figures="\n".join(f"<div>{_term(name, value)}</div>" for name, value in facts.figures),
        compared=_compared(facts),
        notes=_list("Notes", facts.notes),
        peak=_paragraphs(facts.peak_sentences),
        layers="\n".join(_term(layer.name, layer.meaning) for layer in facts.layers),
        stalls=_stalls(facts),
        headings="\n".join(_heading(name, number) for name, number in _HEADINGS),
        blocks="\n".join(_block(row, place, templates) for place, row in enumerate(facts.rows)),
        templates="\n".join(_template(name, operators) for operators, name in templates.items()),
        curve="" if facts.curve is None else _CURVE,
        data=_data(facts),
        plotly=plotly,
        script=script,
    )


_HEADINGS = (
    ("Block", False),
    ("Decision", False),
    ("Kept", True),
    ("Offloaded", True),
    ("Recomputed", True),
    ("Recomputation", True),
    ("Why", False),
)

_CURVE = """<section aria-labelledby="curve-heading">
<h2 id="curve-heading">Other budgets</h2>
<p>Predicted step time over predicted peak memory: plans for several budgets, a step that keeps everything, a step that
recomputes every block (full checkpointing), and this plan.</p>
<div class="figure" id="curve" role="img" aria-labelledby="curve-heading"></div>
</section>"""


def _asset(name: str) -> str:
    return resources.files("spillway.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        f"form-action 'none'"
    )


def _data(facts: Facts) -> str:
    """The figures, as JSON that cannot end the element that it is in."""
    figures = {"memory": memory_figure(facts), "streams": streams_figure(facts), "curve": curve_figure(facts)}
    text = json.dumps({name: figure for name, figure in figures.items() if figure is not None}, allow_nan=False)
    return text.replace("<", "\\u003c")


def _text(text: str) -> str:
    return html.escape(printable(text))


def _term(name: str, value: str) -> str:
    return f"<dt>{_text(name.capitalize())}</dt><dd>{_text(value)}</dd>"


def _paragraphs(sentences: Iterable[str]) -> str:
    return "\n".join(f"<p>{_text(each)}</p>" for each in sentences)


def _list(heading: str, items: Iterable[str]) -> str:
    lines = "\n".join(f"<li>{_text(each)}</li>" for each in items)
    return f"<h3>{_text(heading)}</h3>\n<ul>\n{lines}\n</ul>" if lines else ""


def _stalls(facts: Facts) -> str:
    if not facts.stalls:
        return "<p>Compute never stalls.</p>"
    items = [f"{format_seconds(seconds)} {why}" for why, seconds in facts.stalls]
    return _list(f"Compute stalls {format_seconds(facts.timeline.wait_seconds)}", items)


def _compared(facts: Facts) -> str:
    if not facts.compared:
        return ""
    rows = "\n".join(
        f'<tr><th scope="row">{_text(what.capitalize())}</th>'
        + "".join(f'<td class="number">{_text(each)}</td>' for each in figures)
        + "</tr>"
        for what, *figures in facts.compared
    )
    headings = "".join(
        f'<th scope="col" class="number">{name}</th>' for name in ("Predicted", "Measured", "Difference")
    )
    return (
        f'<h3>Predicted and measured</h3>\n<table class="compared">\n<thead><tr><th scope="col"></th>{headings}</tr>'
        f"</thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    )


def _heading(name: str, number: bool) -> str:
    kind = ' class="number"' if number else ""
    return f'<th scope="col"{kind}><button type="button">{name}</button></th>'


def _block(row: Row, place: int, templates: dict[tuple[OperatorRow, ...], str]) -> str:
    """A block's row. Equal blocks share the table of operators that opens below it."""
    template = templates.setdefault(row.operators, f"operators-{len(templates)}")
    name = _text(row.name)
    cells = (
        _cell(row.decision, row.decision),
        *(_cell(format_bytes(nbytes), nbytes) for nbytes in (row.kept_bytes, row.sent_bytes, row.recomputed_bytes)),
        _cell(format_seconds(row.rerun_seconds), row.rerun_seconds),
        f'<td class="reason" data-value="{_text(row.reason)}">{_text(row.reason)}</td>',
    )
    return (
        f'<tbody><tr><th scope="row" data-value="{name}"><button type="button" aria-expanded="false" '
        f'aria-controls="opened-{place}" data-operators="{template}">{name}</button></th>{"".join(cells)}</tr></tbody>'
    )


def _cell(text: str, value: float | str) -> str:
    kind = "" if isinstance(value, str) else ' class="number"'
    return f'<td{kind} data-value="{_text(str(value))}">{_text(text)}</td>'


def _template(name: str, operators: tuple[OperatorRow, ...]) -> str:
    cell = f'<td colspan="{len(_HEADINGS)}"><p class="why"></p>{_operators(operators)}</td>'
    return f'<template id="{name}"><tr class="operators">{cell}</tr></template>'


def _operators(operators: tuple[OperatorRow, ...]) -> str:
    if not operators:
        return "No operator of this block makes a tensor."
    headings = "".join(
        f'<th scope="col"{kind}>{text}</th>'
        for text, kind in (
            ("Operator", ""),
            ("Decision", ""),
            ("Makes", ' class="number"'),
            ("Takes", ' class="number"'),
            ("Why", ""),
        )
    )
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{''.join(_operator_rows(operators))}</tbody></table>"


def _operator_rows(operators: Iterable[OperatorRow]) -> Iterator[str]:
    for each in operators:
        yield (
            f"<tr><td>{each.place} <code>{_text(each.operator)}</code></td><td>{_text(each.decision)}</td>"
            f'<td class="number">{format_bytes(each.nbytes)}</td><td class="number">{format_seconds(each.seconds)}</td>'
            f"<td>{_text(each.reason)}</td></tr>"
        )
