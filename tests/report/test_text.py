"""A plan in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from report.conftest import with_tasks
from spillway.planner.report.facts import Facts
from spillway.planner.report.text import to_text
from spillway.planner.tasks import TaskBytes
from spillway.units import format_bytes, format_seconds

Made = Callable[..., Facts]
GIB = 1 << 30


@pytest.mark.parametrize("gib", [15, 200])
def test_no_line_is_longer_than_the_terminal_and_all_figures_are_there(facts: Made, gib: int) -> None:
    found = facts(gib=gib)
    text = to_text(found)
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for name, value in found.figures:
        assert f"{name} {value}" in flat
    assert found.in_short in flat
    for way in found.ways:
        figures = (format_bytes(way.point.peak_bytes), format_seconds(way.point.seconds), way.distance)
        assert f"{way.name} {' '.join(figures)}" in flat
    assert all(sentence in flat for sentence in found.peak_sentences)
    assert "Note: planned again for 15.0 GiB." in flat
    assert "predicted" in flat and "+50.0%" in flat
    assert ("Compute stalls" in flat) == bool(found.stalls) == (gib == 15)


def test_equal_blocks_stand_in_one_line(facts: Made) -> None:
    found = facts()
    same = replace(found, rows=tuple(replace(found.rows[0], name=f"layers.{number}") for number in range(12)))
    lines = [line for line in to_text(same).splitlines() if line.startswith("layers.")]
    assert len(lines) == 1
    row = found.rows[0]
    assert lines[0].split("(12)")[0].strip() == "layers.0 to 11"
    assert [format_bytes(nbytes) in lines[0] for nbytes in (row.kept_bytes, row.sent_bytes, row.recomputed_bytes)]


def test_names_without_end_are_cut(facts: Made) -> None:
    found = facts()
    rows = tuple(replace(row, name="deep." * 40 + str(place), kept_bytes=place) for place, row in enumerate(found.rows))
    text = to_text(replace(found, rows=rows))
    assert max(map(len, text.splitlines())) <= 80
    assert "deep.deep" in text


def test_the_task_with_the_largest_difference_has_a_row(facts: Made) -> None:
    found = with_tasks(facts(), layers_3_backward=1, head_and_loss=2 << 30)
    [row] = [line for line in to_text(found).splitlines() if line.startswith("most apart")]
    assert row.startswith("most apart: head and loss ") and format_bytes(found.measured_tasks[7].peak) in row
    tasks = tuple(replace(task, name="deep." * 40) for task in found.program.tasks)
    long = replace(found, program=replace(found.program, tasks=tasks))
    assert long.measured is not None
    long = replace(long, measured=replace(long.measured, tasks=(TaskBytes("deep." * 40, GIB, GIB),)))
    lines = to_text(long).splitlines()
    assert any(line.startswith("most apart: deep.deep") for line in lines) and max(map(len, lines)) <= 80


def test_without_a_measurement_none_is_told(facts: Made) -> None:
    text = to_text(replace(facts(), measured=None, notes=()))
    assert "predicted" not in text and "Note" not in text
