"""What is known of machines: what the planner is given of it, presets, and files."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import UsageError
from spillway.planner.hardware import PRESETS, Bandwidth, Hardware
from spillway.planner.tasks import Rates

H200 = Hardware.named("h200")
WINDOW = 512 << 20


def changed(**fields: object) -> str:
    """The text of a file in which something of the hardware is another."""
    file = json.loads(H200.to_json())
    file.update(fields)
    return json.dumps(file)


def test_the_rates_are_those_of_one_device_unless_more_are_active() -> None:
    assert H200.rates(WINDOW) == Rates(out=55.4e9, back=55.5e9, disk_write=3.4e9, disk_read=3.7e9, window=WINDOW)


@pytest.mark.parametrize(
    ("active", "out", "back"),
    [(1, 55.4e9, 55.5e9), (2, 44e9, 44e9), (3, 30e9, 37e9), (4, 30e9, 37e9), (5, 30e9, 37e9), (64, 30e9, 37e9)],
)
def test_the_rates_of_several_devices_are_of_the_next_number_measured_or_the_last(
    active: int, out: float, back: float
) -> None:
    rates = H200.shared_by(active).rates(WINDOW)
    assert (rates.out, rates.back) == (out, back)


def test_bandwidths_may_be_given_in_any_order() -> None:
    assert replace(H200, bandwidths=H200.bandwidths[::-1]) == H200


def test_rates_of_no_window_or_no_device_are_refused() -> None:
    with pytest.raises(UsageError, match=r"window: got 0, expected at least 1"):
        H200.rates(0)
    with pytest.raises(UsageError, match=r"active: got 0, expected at least 1"):
        H200.shared_by(0)


def test_without_a_disk_its_rates_are_so_small_that_no_plan_wants_it() -> None:
    rates = replace(H200, disk_write=None, disk_read=None).rates(WINDOW)
    assert 0 < rates.disk_write <= 1
    assert 0 < rates.disk_read <= 1


def test_a_disk_that_is_only_written_is_refused() -> None:
    with pytest.raises(UsageError, match="expected both or None for both"):
        replace(H200, disk_read=None)


@pytest.mark.parametrize("name", ["flops", "memory_bandwidth", "disk_write", "disk_read"])
@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(name: str, rate: float) -> None:
    with pytest.raises(UsageError, match=f"{name}: got {rate}, expected a positive number"):
        replace(H200, **{name: rate})


@pytest.mark.parametrize("name", ["out", "back", "both"])
def test_a_bandwidth_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: got 0, expected a positive number"):
        Bandwidth(**{"active": 1, "out": 1.0, "back": 1.0, "both": 1.0, name: 0})


@pytest.mark.parametrize("counts", [(), (2,), (1, 2, 2)])
def test_bandwidths_without_one_gpu_or_with_a_number_twice_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="bandwidths: got those of"):
        replace(H200, bandwidths=tuple(Bandwidth(active=count, out=1.0, back=1.0, both=1.0) for count in counts))


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "disk_bytes"])
def test_a_negative_size_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}: got -1"):
        replace(H200, **{name: -1})


def test_a_record_can_be_a_key_and_go_to_another_process() -> None:
    assert {H200: 1}[pickle.loads(pickle.dumps(H200))] == 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_rates_and_says_where_they_are_from(name: str) -> None:
    preset = Hardware.named(name)
    assert ("measured" in preset.source) is (name == "h200")
    assert name == "h200" or preset.source.startswith("data sheet")
    for link in preset.bandwidths:
        # Both ways together carry more than one, and not more than both by themselves.
        assert max(link.out, link.back) < link.both <= link.out + link.back
    assert preset.rates(WINDOW).disk_write < preset.bandwidths[0].out < preset.memory_bandwidth < preset.flops


def test_a_name_that_is_no_preset_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"'b200' is not one of h200, h100, a100, rtx4090. Measure another machine"):
        Hardware.named("b200")


rates_ = st.floats(min_value=1e-3, max_value=1e18)
sizes = st.none() | st.integers(min_value=0, max_value=2**60)


@given(
    name=st.text(),
    link=st.lists(rates_, min_size=3, max_size=3),
    disk=st.none() | st.tuples(rates_, rates_),
    sizes=st.tuples(sizes, sizes),
)
def test_what_is_written_is_read_again_exactly(
    name: str,
    link: list[float],
    disk: tuple[float, float] | None,
    sizes: tuple[int | None, int | None],
) -> None:
    hardware = replace(
        H200,
        name=name,
        bandwidths=(Bandwidth(active=1, out=link[0], back=link[1], both=link[2]), *H200.bandwidths[1:]),
        disk_write=disk and disk[0],
        disk_read=disk and disk[1],
        host_bytes=sizes[0],
        disk_bytes=sizes[1],
    )
    assert Hardware.from_json(hardware.to_json()) == hardware


def test_a_file_is_read_again(tmp_path: Path) -> None:
    H200.save(tmp_path / "machine.json")
    assert Hardware.load(tmp_path / "machine.json") == H200


def test_a_file_that_cannot_be_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read .*Give a file that Hardware\.save\(\) wrote"):
        Hardware.load(tmp_path / "absent.json")
    with pytest.raises(UsageError, match=r"cannot be written .*Give the name of a file in a folder"):
        H200.save(tmp_path / "no folder" / "machine.json")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Invalid JSON"),
        ("{}", "schema: Field required"),
        (changed(schema=1), "has a Hardware of version 1, and this Spillway reads version 2"),
        (json.dumps({key: value for key, value in json.loads(H200.to_json()).items() if key != "name"}), "name: Field"),
        (changed(colour="red"), "colour: "),
        (changed(flops="fast"), "flops: "),
        (changed(flops=-1), "flops: got -1"),
        (changed(flops=math.nan), "flops: got nan"),
        (changed(bandwidths=[]), "bandwidths: got those of"),
        (changed(host_bytes=1.5), "host_bytes: "),
        (changed(date="yesterday"), "date: "),
    ],
)
def test_a_bad_file_is_told_with_what_is_wrong_in_it(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        Hardware.load(file)
    message = str(refused.value)
    assert message.startswith(str(file))
    assert told in message
    assert message.endswith("Measure the machine again (spillway doctor --fresh).")
    assert "\n" not in message
