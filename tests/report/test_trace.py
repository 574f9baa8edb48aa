"""The trace for Chrome and Perfetto."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from report.conftest import with_tasks
from spillway.planner.hardware import Hardware
from spillway.planner.planner import make_plan, planning_rates
from spillway.planner.report.facts import Facts, facts_of
from spillway.planner.report.page import copies_of, to_trace
from spillway.planner.timeline import STREAMS
from spillway.types import Decision

Made = Callable[..., Facts]
H200 = Hardware.named("h200")


@pytest.fixture(params=[{}, {"slow": True}, {"slow": True, "hosted": True}], ids=["quick", "slow", "hosted"])
def found(facts: Made, request: pytest.FixtureRequest) -> Facts:
    return facts(**request.param)


def events(found: Facts, phase: str) -> list[dict[str, Any]]:
    trace = json.loads(to_trace(found))
    assert trace["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in trace["traceEvents"]} - {"t"} == {"M", "X", "C", "s", "f"}
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_each_stream_is_a_thread_with_a_name_and_a_place(found: Facts) -> None:
    names = {event["tid"]: event["args"]["name"] for event in events(found, "M") if event["name"] == "thread_name"}
    places = [event for event in events(found, "M") if event["name"] == "thread_sort_index"]
    order = {event["tid"]: event["args"]["sort_index"] for event in places}
    assert [names[tid] for tid in sorted(names, key=order.__getitem__)] == ["compute", "out", "back", "disk"]


def test_each_span_is_there_once_and_streams_do_one_thing_at_a_time(found: Facts) -> None:
    spans = events(found, "X")
    assert len(spans) == len(found.timeline.spans)
    streams = defaultdict(list)
    for span in spans:
        streams[STREAMS[span["tid"] - 1]].append((span["ts"], span["ts"] + span["dur"]))
    for stream in STREAMS:
        expected = [(span.start * 1e6, span.end * 1e6) for span in found.timeline.spans if span.stream == stream]
        assert streams[stream] == [pytest.approx(each) for each in expected]
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(streams[stream]))
    stalls = [span for span in spans if span["cat"] == "stall"]
    assert sum(span["dur"] for span in stalls) == pytest.approx(found.timeline.wait_seconds * 1e6)
    assert all(span["args"]["reason"] and span["args"]["task"] and span["tid"] == 1 for span in stalls)
    assert {span["cat"] for span in spans if span["tid"] == 1} >= {"forward", "backward", "recompute", "outside"}


def on_disk(found: Facts) -> Facts:
    """A plan that offloads to disk only."""
    allow = {"keep", "disk", "recompute"}
    plan = make_plan(found.profile, H200, budget=found.plan.budget, window=256 << 20, allow=allow)
    return facts_of(found.profile, plan, H200)


def test_each_copy_has_the_bytes_that_its_time_is_for(facts: Made) -> None:
    for found in (facts(), on_disk(facts())):
        rates = planning_rates(H200, found.plan.window)
        spans = found.timeline.spans
        seen = [number for each in copies_of(found) for number in each.spans]
        assert sorted(seen) == [number for number, span in enumerate(spans) if span.stream != "compute"]
        for each in copies_of(found):
            out, *disk, back = (spans[number] for number in each.spans)
            assert (out.stream, [span.stream for span in disk], back.stream) in (
                ("out", [], "back"),
                ("out", ["disk", "disk"], "back"),
            )
            assert out.end <= back.start + 1e-9 and out.name.startswith(f"{each.block} ")
            times = [span.end - span.start for span in (out, *disk, back)]
            bandwidths = [rates.out, *([rates.disk_write, rates.disk_read] if disk else []), rates.back]
            assert times == pytest.approx([each.nbytes / rate for rate in bandwidths])


def test_copies_name_the_operator_that_made_their_bytes(facts: Made) -> None:
    found = facts()
    told: dict[str, Counter[str]] = defaultdict(Counter)
    for each in copies_of(found):
        if each.operator != "input":
            told[each.block][each.operator] += each.nbytes
    for block in found.plan.blocks:
        expected: Counter[str] = Counter()
        for each in block.operators:
            expected[each.operator] += each.nbytes if each.decision is not Decision.KEEP else 0
        # Some are used before they are freed, and never copied.
        assert told[block.name] <= expected
    assert sum(map(len, told.values())) > 10 and any(each.operator == "input" for each in copies_of(found))


def test_arguments_name_blocks_operators_and_bytes(facts: Made) -> None:
    found = facts(slow=True)
    names = {call.name for call in found.profile.calls}
    for event in events(found, "X"):
        args = event["args"]
        assert args.get("block") in names or event["cat"] in ("outside", "stall") or "casts" in event["name"]
        if event["tid"] > 1:
            assert args["bytes"] > 0 and args["operator"] and args["task"] == event["name"]
        elif event["cat"] != "stall":
            assert args["allocated bytes"] >= 0
    offloaded = sum(event["args"].get("offloaded bytes", 0) for event in events(found, "X"))
    assert offloaded == found.plan.sent_bytes


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_flow_leads_from_each_offload_to_its_reload(facts: Made, tier: str) -> None:
    found = facts() if tier == "host" else on_disk(facts())
    slices = events(found, "X")
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for phase in "stf":
        for event in events(found, phase):
            flows[event["id"]].append(event)
    assert len(flows) == len([each for each in copies_of(found) if len(each.spans) > 1]) > 10
    for number, steps in flows.items():
        assert [event["ph"] for event in steps] == list("sf" if tier == "host" else "sttf")
        streams = [STREAMS[event["tid"] - 1] for event in steps]
        assert streams == (["out", "back"] if tier == "host" else ["out", "disk", "disk", "back"])
        for event in steps:
            [there] = [
                each
                for each in slices
                if each["tid"] == event["tid"] and each["ts"] <= event["ts"] <= each["ts"] + each["dur"]
            ]
            copied = copies_of(found)[number]
            args = there["args"]
            assert (args["block"], args["operator"], args["bytes"]) == (copied.block, copied.operator, copied.nbytes)


def test_counters_are_bytes_by_tier_and_holder(found: Facts) -> None:
    counters = defaultdict(list)
    for event in events(found, "C"):
        counters[event["name"]].append((event["ts"], event["args"]))
    assert counters.keys() == {"device", "CPU memory", "disk"}
    assert max(sum(args.values()) for _, args in counters["device"]) == found.timeline.peak_bytes
    assert {name for _, args in counters["device"] for name in args} == {layer.name for layer in found.layers}
    assert max(args["bytes"] for _, args in counters["CPU memory"]) == found.timeline.host_bytes
    measured = with_tasks(found)
    line = [(event["ts"], event["args"]["bytes"]) for event in events(measured, "C") if event["name"] == "measured"]
    assert line == [
        (seconds * 1e6, nbytes)
        for task in measured.measured_tasks
        for seconds, nbytes in ((task.start, task.peak), (task.end, task.level))
    ]
    assert max(nbytes for _, nbytes in line) == found.timeline.peak_bytes
    times = [seconds for seconds, _ in counters["device"]]
    assert times == sorted(times) and len(set(times)) == len(times)
