"""``spillway report``, as people run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import spillway
from spillway.cli.app import main
from spillway.planner import planner
from spillway.planner.hardware import Hardware
from spillway.planner.planner import Point
from spillway.planner.profile import Profile

LLAMA = Profile.load(Path(__file__).parents[1] / "planner" / "llama_8b_block.json")
SMALL = replace(LLAMA, calls=LLAMA.calls[:2])
Run = Callable[..., int | str | None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command for a plan, in an empty directory; gives its exit code."""
    SMALL.save(tmp_path / "profile.json")
    spillway.plan(SMALL, budget="200GiB", hardware="h200").save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)

    def ran(*arguments: str) -> int | str | None:
        monkeypatch.setattr(
            sys, "argv", ["spillway", "report", "profile.json", "plan.json", "--hardware", "h200", *arguments]
        )
        with pytest.raises(SystemExit) as exited:
            main()
        return exited.value.code

    return ran


def test_a_page_and_a_trace_are_written_without_a_curve(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly", reason="the page is drawn by plotly")
    assert not run("-o", "out.html", "--trace", "trace.json", "--no-curve")
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "A plan for Stack" in page and "Other budgets" not in page
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert capsys.readouterr().out.splitlines() == ["wrote out.html", "wrote trace.json"]


def test_the_curve_is_drawn_with_what_it_costs_shown(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly", reason="the page is drawn by plotly")
    asked = []

    def make_curve(
        profile: Profile, hardware: Hardware, *, on_point: Callable[[int, int], None], **more: object
    ) -> tuple[Point, ...]:
        asked.append((profile, more["allow"]))
        on_point(1, 2)
        on_point(2, 2)
        return (Point(15 << 30, 0.1),)

    monkeypatch.setattr(planner, "make_curve", make_curve)
    assert not run()
    assert asked == [(SMALL, {"keep", "host", "recompute"})]
    page = tmp_path / "report.html"
    assert "Other budgets" in page.read_text(encoding="utf-8")
    assert capsys.readouterr().err.splitlines() == ["other budgets: 1/2", "other budgets: 2/2"]


def test_the_same_is_told_in_the_terminal_and_nothing_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Plotly is for pages.
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert not run("--text")
    out = capsys.readouterr().out
    assert "The peak is" in out and "layers.0" in out and max(map(len, out.splitlines())) <= 80
    assert {each.name for each in tmp_path.iterdir()} == {"profile.json", "plan.json"}


def test_a_page_without_plotly_is_refused_before_anything_is_done(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert run("-o", "out.html", "--trace", "trace.json") == 2
    assert "pip install 'spillway[report]'" in capsys.readouterr().err
    assert not (tmp_path / "trace.json").exists()


def test_a_place_where_nothing_can_be_written_is_refused_first(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-o", "nowhere/out.html") == 2
    assert "output: 'nowhere/out.html' cannot be written" in capsys.readouterr().err


def test_a_plan_of_another_profile_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA.save("profile.json")
    assert run("--text") == 2
    assert "the profile has the 16 blocks of Stack" in capsys.readouterr().err
