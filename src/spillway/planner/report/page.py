"""A plan as one HTML file that needs no network.

NOTE [ Content policy of the page ]

The page's policy names the two scripts that may run, by their hashes. It forbids everything else: requests, frames,
forms, injected scripts. Scripts may set styles, since plotly does. Images and fonts from elsewhere are forbidden, so
that none can leak data. The template escapes all text from profiles and plans.
"""

from __future__ import annotations

import base64
import json
from hashlib import sha256

from spillway.errors import printable
from spillway.planner.report.facts import Facts, OperatorRow
from spillway.planner.report.figures import curve_figure, graph_objects, memory_figure, streams_figure
from spillway.units import format_bytes, format_seconds


def to_page(facts: Facts) -> str:
    """The page. See NOTE [ Content policy of the page ].

    Raises:
        UsageError: if plotly is not installed.
    """
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
        size=format_bytes, duration=format_seconds, heading=lambda text: text[:1].upper() + text[1:]
    )

    def asset(name: str) -> Markup:
        return Markup(environment.loader.get_source(environment, name)[0])  # type: ignore[union-attr]

    # The hash is of what a parser of HTML reads, and it reads all line ends as newlines.
    plotly = Markup(get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n"))
    figures = {"memory": memory_figure(facts), "streams": streams_figure(facts), "curve": curve_figure(facts)}
    data = json.dumps({name: figure for name, figure in figures.items() if figure is not None}, allow_nan=False)
    # Blocks with equal operators share the table that opens below them.
    tables: dict[tuple[OperatorRow, ...], str] = {}
    blocks = [(row, tables.setdefault(row.operators, f"operators-{len(tables)}")) for row in facts.rows]
    return environment.get_template("page.html").render(
        facts=facts,
        blocks=blocks,
        tables=tables,
        hashes=[base64.b64encode(sha256(script.encode()).digest()).decode() for script in (plotly, asset("page.js"))],
        # No parser of HTML takes anything in it for the end of its element.
        data=Markup(data.replace("<", "\\u003c")),
        plotly=plotly,
        script=asset("page.js"),
        style=asset("page.css"),
    )
