"""The benchmark of plans within budgets beside other methods: what it prints, writes and draws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import spillway

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of the benchmarks, which import each other by their plain names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sweep_prints_writes_and_draws_each_method_and_each_budget(
    tmp_path: Path, benchmark: Callable[[str], ModuleType]
) -> None:
    file, profile, drawing = tmp_path / "pareto.json", tmp_path / "profile.json", tmp_path / "pareto.svg"
    sizes = ["--device=cpu", "--shape=tiny", "--layers=3", "--seq=512", "--runs=1", "--together=1", "--equality"]
    files = [f"--json={file}", f"--profile={profile}", f"--picture={drawing}"]
    what = ["--methods", "attach(mixture)", "--budgets", "1GiB", "least", "1B"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "pareto.py"), *sizes, *files, *what],
        env={
            **os.environ,
            "PYTHONPATH": str(BENCHMARKS.parent / "src"),
            "OMP_NUM_THREADS": "1",
            "SPILLWAY_CACHE": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert {"date", "versions", "hardware", "options", "rows", "equality"} == set(result)
    keep, mixture, ample, least, none = result["rows"]
    assert [keep["way"], mixture["way"]] == ["keep", "attach(mixture)"]
    assert [ample["asked"], least["asked"], none["asked"]] == ["1GiB", "least", "1B"]

    # Less is held, and what is not held is computed again.
    assert ample["plan"]["recomputed_bytes"] == 0 < least["plan"]["recomputed_bytes"]
    assert least["plan"]["plain_blocks"] < ample["plan"]["plain_blocks"] == 3
    assert 0 < least["peak_bytes"] < 0.8 * keep["peak_bytes"]
    assert 0 < mixture["peak_bytes"] < 0.8 * keep["peak_bytes"]
    assert ample["peak_bytes"] == pytest.approx(keep["peak_bytes"], rel=0.1)
    assert ample["best"] in ("keep", "attach(mixture)")
    for row in (ample, least):
        assert row["plan"]["held"]
        assert row["plan"]["steps_until_holding"] > 2
        assert row["plan"]["solving_seconds"] > 0
        assert row["of_keep"] == pytest.approx(row["step_seconds"] / row["keep_seconds"])
    assert "fits" in none["failed"]
    assert none["step_seconds"] == 0

    assert [each["asked"] for each in result["equality"]] == ["least", "half way"]
    assert all(each["equal"] and each["compared"] > 2 for each in result["equality"]), result["equality"]
    assert len(spillway.Profile.load(profile).calls) == 3
    names = [text.text for text in ElementTree.parse(drawing).iter(f"{SVG}text")]
    assert {"keep", "attach(mixture)", "1GiB", "least"} < set(names)
    assert "1B" not in names
    table = [line.split(" | ")[0] for line in benchmark("_table").lines(result)[2:]]
    assert table[2:] == ["| `keep`", "| `attach(mixture)`", "| plan within 1GiB", "| plan within least"]
    summary = done.stdout.splitlines()[-5:]
    assert [line.split("  ")[0] for line in summary][:2] == ["keep", "attach(mixture)"]
    assert summary[-1].split() == ["plan", "within", "1B", "-"]


def test_a_plan_is_compared_with_the_fastest_that_is_as_small(benchmark: Callable[[str], ModuleType]) -> None:
    pareto, row_of = benchmark("pareto"), benchmark("_planned").Row
    methods = [
        row_of("keep", step_seconds=1.0, of_keep=1.0, peak_bytes=100),
        row_of("slow", step_seconds=2.0, of_keep=2.0, peak_bytes=20),
        row_of("quick", step_seconds=1.5, of_keep=1.5, peak_bytes=40),
        row_of("absent", failed="cannot be imported here"),
    ]

    def best(**given: object) -> tuple[str, float]:
        row = row_of("plan", "0.4", step_seconds=1.2, of_keep=1.2, **given)
        pareto.compare(row, methods)
        return row.best, round(row.of_best, 9)

    assert best(budget_bytes=40, peak_bytes=39) == ("quick", 0.8)
    assert best(budget_bytes=39, peak_bytes=30) == ("slow", 0.6)
    # Over its budget, it is compared with what it took.
    assert best(budget_bytes=30, peak_bytes=100) == ("keep", 1.2)
    assert best(budget_bytes=10, peak_bytes=10) == ("", 0.0)


def test_a_method_whose_process_breaks_is_a_row_and_the_last_word_is_a_failure(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pareto = benchmark("pareto")
    monkeypatch.setattr(sys, "argv", ["pareto.py", "--device=cpu", "--shape=unknown", "--methods", "save_on_cpu"])
    options = pareto.parser().parse_args()
    options.budgets = []
    with pytest.raises(SystemExit) as raised:
        pareto.run(options)
    assert raised.value.code == 1
    assert "save_on_cpu                no figures: its process ended with 1\n" in capsys.readouterr().out


def test_a_budget_is_a_share_a_name_or_a_size(benchmark: Callable[[str], ModuleType]) -> None:
    sized = benchmark("_planned").sized
    assert sized("0.25", 1000, 300) == 250
    assert sized("checkpoint", 1000, 300) == 300
    assert sized("2KiB", 1000, 300) == 2048
    assert sized("0.25", 0, 300) == 0
    with pytest.raises(spillway.UsageError, match="--budgets"):
        sized("some", 1000, 300)


def test_a_least_budget_is_raised_by_what_was_missing_and_not_for_ever(
    benchmark: Callable[[str], ModuleType],
) -> None:
    planned = benchmark("_planned")
    row, tried = planned.Row("plan", "least", budget_bytes=100), []

    def work() -> str:
        tried.append(row.budget_bytes)
        if len(tried) == 1:
            raise spillway.BudgetError("too little", budget=90, least=95)
        return "found"

    assert planned.attempted(row, work, raises=True) == "found"
    assert tried == [100, 105 + planned.SLACK]

    def never() -> None:
        tried.append(row.budget_bytes)
        raise spillway.BudgetError("too little", budget=90, least=95)

    for raises, most in ((False, 1), (True, planned.MOST_RAISES + 1)):
        tried.clear()
        assert planned.attempted(row, never, raises=raises) is None
        assert len(tried) == most
        assert row.failed == "too little"


def test_names_in_a_picture_do_not_cover_each_other(benchmark: Callable[[str], ModuleType]) -> None:
    drawn = benchmark("_picture")
    points = [drawn.Point(f"name {number}", 5 + number / 50, 1.0, joined=number % 2 == 0) for number in range(6)]
    points += [drawn.Point("a < b", 40.0, 3.0, joined=False)]
    root = ElementTree.fromstring(drawn.picture(points, across="x", up="y", joined="one", others="others"))
    names = {text.text: (float(text.get("x")), float(text.get("y"))) for text in root.iter(f"{SVG}text")}
    placed = [names[point.name] for point in points]
    for number, (x, y) in enumerate(placed):
        assert 0 < x < drawn.WIDTH and 0 < y < drawn.HEIGHT
        assert all(abs(y - v) >= 12 or abs(x - u) >= 6 * drawn.LETTER for u, v in placed[:number])
    # Two in the heading beside the points, and what is larger is further right and higher up.
    circles = [(float(each.get("cx")), float(each.get("cy"))) for each in root.iter(f"{SVG}circle")][2:]
    assert len(circles) == 7
    assert circles[0][0] < circles[1][0] < circles[-1][0]
    assert circles[-1][1] < circles[0][1] == circles[1][1]


@pytest.mark.parametrize("memory", [10**9, 90_000], ids=["enough", "less than the longest wants"])
@pytest.mark.parametrize(("flat", "each"), [(37_000, 1_880), (0, 1_000), (60_000, 250)])
def test_the_longest_that_fits_is_found_by_few_runs(
    benchmark: Callable[[str], ModuleType], flat: int, each: int, memory: int
) -> None:
    ran: list[int] = []

    def peak(units: int) -> int | None:
        ran.append(units)
        found = max(flat, 20_000 + units * each)
        return found if found <= memory else None

    found = benchmark("longest").longest_of(peak, 74_000)
    fits = 54_000 // each
    # Within 3 %.
    assert fits / 1.04 - 1 <= found <= fits
    assert len(ran) <= 8, ran
