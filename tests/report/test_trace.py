"""The trace for Chrome and Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from spillway.planner.report.facts import Facts
from spillway.planner.report.page import to_trace
from spillway.planner.timeline import STREAMS

Made = Callable[..., Facts]


@pytest.fixture(params=[{}, {"slow": True}, {"slow": True, "hosted": True}], ids=["quick", "slow", "hosted"])
def found(facts: Made, request: pytest.FixtureRequest) -> Facts:
    return facts(**request.param)


def events(found: Facts, phase: str) -> list[dict[str, Any]]:
    trace = json.loads(to_trace(found))
    assert trace["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
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


def test_counters_are_bytes_by_tier_and_holder(found: Facts) -> None:
    counters = defaultdict(list)
    for event in events(found, "C"):
        counters[event["name"]].append((event["ts"], event["args"]))
    assert counters.keys() == {"device", "CPU memory", "disk"}
    assert max(sum(args.values()) for _, args in counters["device"]) == found.timeline.peak_bytes
    assert {name for _, args in counters["device"] for name in args} == {layer.name for layer in found.layers}
    assert max(args["bytes"] for _, args in counters["CPU memory"]) == found.timeline.host_bytes
    times = [seconds for seconds, _ in counters["device"]]
    assert times == sorted(times) and len(set(times)) == len(times)
