"""The page as text: what it may do, what is in it, and that nothing of a file becomes a part of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from report.conftest import with_tasks
from spillway import UsageError
from spillway.planner.report.facts import Facts
from spillway.planner.report.page import curve_figure, memory_figure, streams_figure, to_page
from spillway.planner.tasks import Phase
from spillway.units import format_bytes, format_seconds

pytest.importorskip("plotly", reason="the page is drawn by plotly")

Made = Callable[..., Facts]
EVIL = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&"


class Reader(HTMLParser):
    """What a page is made of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} ends where it did not begin"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif data.strip():
            self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page(facts: Made) -> str:
    return to_page(facts())


@pytest.fixture(scope="module")
def reader(page: str) -> Reader:
    return Reader(page)


def test_the_policy_lets_only_the_two_scripts_of_the_page_run(reader: Reader) -> None:
    [policy] = [each["content"] for each in reader.of("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    running = [
        script
        for script, attributes in zip(reader.scripts, reader.of("script"), strict=True)
        if attributes.get("type") != "application/json"
    ]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in running]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert len(digests) == 2
    # Nothing can be asked for: not by a picture, a font, a style, a frame or a connection.
    assert rules.keys() == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert (rules["img-src"], rules["style-src"]) == ("data: blob:", "'unsafe-inline'")
    names = [name for name, _ in reader.tags]
    assert names.index("meta") < names.index("script")


def test_the_page_is_one_file_with_plotly_in_it_once(page: str, reader: Reader) -> None:
    assert page.count("* plotly.js v") == 1
    for tag, attributes in reader.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in page.split("</style>")[0]
    assert not reader.open


def test_the_page_has_a_language_headings_and_names_for_what_it_shows(reader: Reader) -> None:
    assert reader.of("html") == [{"lang": "en"}]
    assert len(reader.of("h1")) == len(reader.of("main")) == len(reader.of("title")) == 1
    headings = [tag for tag, _ in reader.tags if re.fullmatch(r"h\d", tag)]
    assert headings[0] == "h1" and set(headings) == {"h1", "h2", "h3"} and headings[1] == "h2"
    identities = {attributes["id"] for _, attributes in reader.tags if attributes.get("id")}
    for _, attributes in reader.tags:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name) is None or attributes[name] in identities
    assert {"memory", "streams", "curve", "blocks"} <= identities


def test_all_that_there_is_to_say_is_on_the_page(facts: Made, reader: Reader) -> None:
    found, said = facts(), " ".join(" ".join(reader.words).split())
    for name, value in found.figures:
        assert name[1:] in said and value in said
    assert found.in_short in said
    for way in found.ways:
        assert all(each in said for each in (way.name.capitalize(), way.distance))
        assert {format_bytes(way.point.peak_bytes), format_seconds(way.point.seconds)} <= set(reader.words)
    for sentence in found.peak_sentences:
        assert sentence in said
    for why, _ in found.stalls:
        assert why in said
    for row in found.rows:
        assert row.name in said and row.reason.replace("&", "&amp;") in said
        assert all(each.operator in said and each.reason in said for each in row.operators)
    assert all(note in said for note in found.notes)
    assert all(figure in said for line in found.compared for figure in line[1:])
    assert all(layer.name.capitalize() in said and layer.meaning in said for layer in found.layers)


def test_the_bars_of_the_three_steps_are_relative_to_the_largest(facts: Made, reader: Reader) -> None:
    ways = facts().ways
    widths = [float(str(each["style"]).removeprefix("width: ").removesuffix("%")) for each in reader.of("i")]
    for place, name in enumerate(("peak_bytes", "seconds")):
        values = [getattr(way.point, name) for way in ways]
        assert widths[place::2] == [pytest.approx(100 * value / max(values), abs=0.1) for value in values]


def test_equal_blocks_share_what_is_told_of_their_operators(facts: Made, reader: Reader) -> None:
    rows = facts().rows
    assert len(reader.of("template")) == len({row.operators for row in rows})
    opened = [each["data-operators"] for each in reader.of("button") if each.get("data-operators")]
    assert len(opened) == len(rows)
    assert set(opened) == {each["id"] for each in reader.of("template")}


def test_blocks_of_one_kind_are_one_row_with_their_sums(facts: Made, reader: Reader) -> None:
    [kind] = facts().kinds
    assert kind.rows == facts().rows
    bodies = [each for each in reader.of("tbody") if "data-kind" in each]
    assert [each.get("class") for each in bodies] == ["kind", *["member"] * 6]
    assert ["hidden" in each for each in bodies] == [False, *[True] * 6]
    said = " ".join(" ".join(reader.words).split())
    assert "layers.0 to 5 x 6" in said and kind.decision in said
    sums = [sum(getattr(row, name) for row in kind.rows) for name in ("kept_bytes", "sent_bytes", "recomputed_bytes")]
    values = [each["data-value"] for each in reader.of("td") if "data-value" in each]
    assert values[1:4] == list(map(str, sums))
    assert float(str(values[4])) == pytest.approx(sum(row.recompute_seconds for row in kind.rows))


def test_a_kind_of_one_block_is_that_block(facts: Made) -> None:
    rows = facts().rows
    found = replace(facts(), rows=(replace(rows[0], kind=1, name="stem"), *rows[1:]))
    stem, layers = found.kinds
    assert stem.rows == found.rows[:1] and layers.name == "layers.1 to 5"
    bodies = [each for each in Reader(to_page(found)).of("tbody") if "data-kind" in each]
    assert [each.get("class") for each in bodies] == [None, "kind", *["member"] * 5]


def test_a_kind_says_how_many_blocks_have_each_decision(facts: Made) -> None:
    rows = tuple(replace(row, decision="keep" if place < 2 else "offload") for place, row in enumerate(facts().rows))
    assert replace(facts(), rows=rows).kinds[0].decision == "keep x 2, offload x 4"
    assert replace(facts(), rows=rows[:2]).kinds[0].decision == "keep"


def test_without_a_curve_a_measurement_and_notes_nothing_is_said_of_them(facts: Made) -> None:
    found = Reader(to_page(replace(facts(), curve=None, measured=None, notes=())))
    said = " ".join(found.words)
    assert "Other budgets" not in said and "Measured" not in said and "Notes" not in said
    data = json.loads(found.scripts[0])
    assert data.keys() == {"memory", "streams"}


def test_names_from_files_stay_text(facts: Made, reader: Reader) -> None:
    found = facts()
    names = {f"{row.name} ": f"{EVIL}{row.name} " for row in found.rows}

    def evil(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)

    row = found.rows[0]
    operators = (replace(row.operators[0], operator=EVIL, reason=EVIL, decision=EVIL), *row.operators[1:])
    spans = tuple(replace(span, name=evil(span.name)) for span in found.timeline.spans)
    timeline = replace(found.timeline, spans=spans, peak_task=EVIL)
    spoilt = replace(
        found,
        plan=replace(found.plan, model=EVIL, device=EVIL),
        profile=replace(
            found.profile,
            model=EVIL,
            calls=tuple(replace(call, name=f"{EVIL}{call.name}") for call in found.profile.calls),
            kinds=tuple(
                replace(kind, operators=tuple(replace(each, name=EVIL) for each in kind.operators))
                for kind in found.profile.kinds
            ),
        ),
        hardware=EVIL,
        notes=(EVIL,),
        timeline=timeline,
        program=replace(
            found.program, tasks=tuple(replace(task, name=evil(task.name)) for task in found.program.tasks)
        ),
        # Rows of the same operators share what is said of them.
        rows=(
            replace(row, name=EVIL, reason=EVIL, decision=EVIL, operators=operators),
            *(
                replace(each, operators=operators if each.operators == row.operators else each.operators)
                for each in found.rows[1:]
            ),
        ),
    )
    page = Reader(to_page(spoilt))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in reader.tags]
    assert sum(EVIL in word for word in page.words) >= 6
    assert "<" not in page.scripts[0]
    # What plotly shows is HTML to it.
    data = json.loads(page.scripts[0])
    for trace in data["streams"]["data"]:
        assert not any("<script" in told or "<img" in told for told in trace["hovertext"])
    assert not any("<script" in trace["hovertemplate"] for trace in data["memory"]["data"])


def test_a_page_without_plotly_says_how_to_get_it(facts: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(UsageError, match=r"pip install 'spillway\[report\]'"):
        to_page(facts())


# Figures


def named(figure: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    assert figure is not None
    return {trace["name"]: trace for trace in figure["data"]}


def test_the_picture_of_memory_has_each_layer_the_budget_and_the_peak(facts: Made) -> None:
    found = facts()
    traces = named(memory_figure(found))
    assert list(traces) == [*(layer.name for layer in found.layers), "budget", "measured peak", "peak"]
    gib = 1 << 30
    for layer in found.layers:
        assert traces[layer.name]["y"] == pytest.approx([nbytes / gib for nbytes in layer.nbytes])
        assert traces[layer.name]["stackgroup"] == "device"
    assert traces["budget"]["y"] == pytest.approx([found.plan.budget / gib] * 2)
    assert found.measured is not None
    assert traces["measured peak"]["y"] == pytest.approx([found.measured.peak_bytes / gib] * 2)
    assert "measured peak" not in named(memory_figure(replace(found, measured=None)))
    assert traces["peak"]["x"] == [pytest.approx(found.instants[found.peak_place] * 1e3)]
    assert traces["peak"]["y"] == [pytest.approx(found.timeline.peak_bytes / gib)]


def test_the_measured_line_lies_over_the_layers(facts: Made) -> None:
    plain = with_tasks(facts())
    found = with_tasks(facts(), head_and_loss=8 << 30)
    figures = [memory_figure(each) for each in (plain, found)]
    before, after = (named(figure)["measured"] for figure in figures)
    assert (
        before["x"]
        == after["x"]
        == [pytest.approx(seconds * 1e3) for task in found.measured_tasks for seconds in (task.start, task.end)]
    )
    [place] = [place for place, task in enumerate(found.measured_tasks) if task.name == "head and loss"]
    rises = [after - before for before, after in zip(before["y"], after["y"], strict=True)]
    assert rises == pytest.approx([8 if number // 2 == place else 0 for number in range(len(rises))])
    assert after["line"]["shape"] == "hv" and "stackgroup" not in after
    # It takes the place of the peak's, and is inside of the figure.
    assert not any("measured peak" in named(figure) for figure in figures)
    assert max(after["y"]) < figures[1]["layout"]["yaxis"]["range"][1]
    assert "Most apart: head and loss" in to_page(found)


def test_a_budget_far_above_all_is_not_drawn(facts: Made) -> None:
    found = facts()
    far = replace(found.plan, budget=100 * found.plan.budget)
    figure = memory_figure(replace(found, plan=far, measured=None))
    assert "budget" not in named(figure)
    top = found.timeline.peak_bytes / (1 << 30)
    assert top < figure["layout"]["yaxis"]["range"][1] < 1.2 * top


def test_static_memory_is_left_out_if_it_is_more_than_half_of_the_peak(facts: Made) -> None:
    gib = 1 << 30
    found = facts(told=False)
    static = found.layers[0]
    assert static.key == "static" and min(static.nbytes) == found.constant_bytes > found.timeline.peak_bytes / 2
    figure = memory_figure(found)
    low, high = figure["layout"]["yaxis"]["range"]
    assert low == found.constant_bytes / gib
    assert found.measured is not None and found.measured.peak_bytes / gib < high
    assert format_bytes(found.constant_bytes) in figure["layout"]["yaxis"]["title"]["text"]
    assert [trace["name"] for trace in figure["data"] if trace.get("showlegend") is False] == ["static memory"]
    [closer] = [each for each in Reader(to_page(found)).of("button") if each.get("id") == "closer"]
    assert closer["aria-pressed"] == "true"
    # The same bytes above less that is always there.
    less = replace(static, nbytes=tuple(nbytes // 4 for nbytes in static.nbytes))
    figure = memory_figure(replace(found, layers=(less, *found.layers[1:])))
    assert figure["layout"]["yaxis"]["range"][0] == 0 and figure["layout"]["yaxis"]["title"]["text"] == "memory, GiB"
    assert not [trace for trace in figure["data"] if trace.get("showlegend") is False]
    assert [axis["range"][0] for axis in figure["layout"]["meta"]["axes"]] == [0, min(less.nbytes) / gib]


def test_static_memory_is_what_no_instant_is_without(facts: Made) -> None:
    found = facts()
    assert found.profile.static is not None
    # Gradients from before the step go in the step.
    assert found.constant_bytes == found.profile.static_bytes - found.profile.static.gradients
    lowest = min(sum(each) for each in zip(*(layer.nbytes for layer in found.layers), strict=True))
    assert found.constant_bytes <= lowest


def test_memory_and_streams_have_one_time_axis(facts: Made) -> None:
    found = facts(slow=True)
    memory, streams = (figure["layout"]["xaxis"] for figure in (memory_figure(found), streams_figure(found)))
    assert memory["range"] == streams["range"]
    assert memory["range"][1] >= found.timeline.seconds and memory["showticklabels"] is False


@pytest.mark.parametrize("hosted", [False, True])
@pytest.mark.parametrize("slow", [False, True])
def test_the_picture_of_streams_has_a_bar_for_whatever_takes_time(facts: Made, slow: bool, hosted: bool) -> None:
    found = facts(slow=slow, hosted=hosted)
    traces = named(streams_figure(found))
    spans = [span for span in found.timeline.spans if span.end > span.start]
    assert sum(len(trace["x"]) for trace in traces.values()) == len(spans)
    stalls = [name for name in traces if name.startswith("stalls for")]
    scale = 1e3 if found.timeline.seconds < 10 else 1
    assert sum(sum(traces[name]["x"]) for name in stalls) == pytest.approx(found.timeline.wait_seconds * scale)
    assert ("stalls for host" in stalls) == hosted
    phases = {task.name: task.phase for task in found.program.tasks}
    again = sum(
        span.end - span.start
        for span in spans
        if phases.get(span.name) is Phase.RECOMPUTE and span.stream == "compute" and not span.reason
    )
    assert sum(traces["recomputation"]["x"]) == pytest.approx(again * scale)
    assert all(set(traces[name]["y"]) == {"compute"} for name in stalls)
    assert set(traces["offloading"]["y"]) == {"out"} and set(traces["reloading"]["y"]) == {"back"}
    assert all("compute stalls<br>for" in told for name in stalls for told in traces[name]["hovertext"])
    copied = [told for name in ("offloading", "reloading") for told in traces[name]["hovertext"]]
    assert all(re.match(r"(aten::\S+|input) of layers\.\d<br>[\d.]+ [KMG]iB<br>", told) for told in copied)


def test_the_curve_marks_this_plan_and_what_needs_no_plan(facts: Made) -> None:
    found = facts()
    traces = named(curve_figure(found))
    assert list(traces) == ["plans", "keep everything", "full checkpointing", "this plan", "measured"]
    assert traces["this plan"]["x"] == [pytest.approx(found.timeline.peak_bytes / (1 << 30))]
    for name, point in (("keep everything", found.keep), ("full checkpointing", found.checkpoint)):
        assert traces[name]["x"] == [pytest.approx(point.peak_bytes / (1 << 30))]
        assert traces[name]["y"] == [pytest.approx(point.seconds * 1e3)]
    assert len(traces["plans"]["x"]) == 2
    assert curve_figure(replace(found, curve=None)) is None
