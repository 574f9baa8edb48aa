"""``spillway plan``, as people run it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import spillway
from spillway.cli.app import main
from spillway.planner.hardware import Hardware
from spillway.planner.planner import parse_budget
from spillway.planner.profile import Profile
from support import run_script

LLAMA = Profile.load(Path(__file__).parents[1] / "planner" / "llama_8b_block.json")
SMALL = replace(LLAMA, calls=LLAMA.calls[:3])


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    SMALL.save(path)
    return path


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["spillway", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as exited:
        main()
    return exited.value.code


def test_a_plan_is_told_in_80_columns_and_written(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert not ended(monkeypatch, profile, "--budget", "50%", "--hardware", "h100", "-o", file)
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80 and err in ("", "planning ...\n")
    plan = spillway.Plan.load(file)
    assert plan == spillway.plan(SMALL, budget=0.5, hardware="h100")
    assert plan.budget == parse_budget(0.5, SMALL)
    assert "NVIDIA H100 SXM" in out and "layers." in out and "The peak is" in out


def test_a_plan_is_told_as_json_and_nothing_else(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--allow", "keep, recompute", "--window", "64MiB"]
    assert not ended(monkeypatch, profile, "--budget", "15.5GiB", "--hardware", "h200", "--json", *options)
    out, _ = capsys.readouterr()
    plan = spillway.Plan.from_json(out)
    assert plan == spillway.plan(SMALL, budget="15.5GiB", hardware="h200", allow={"keep", "recompute"}, window="64MiB")
    assert plan.sent_bytes == 0 and json.loads(out)["schema"] == 6


def test_weights_are_placed_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streamed = replace(SMALL, calls=tuple(replace(call, streamed=(1 << 28,)) for call in SMALL.calls))
    file = tmp_path / "streamed.json"
    streamed.save(file)
    options = ("--budget", "60GiB", "--hardware", "h200")
    assert not ended(monkeypatch, file, *options, "--stream", "auto", "--json")
    plan = spillway.Plan.from_json(capsys.readouterr().out)
    assert plan == spillway.plan(streamed, budget="60GiB", hardware="h200", stream="auto") and plan.resident
    assert not ended(monkeypatch, file, *options, "--stream", "auto")
    assert f"{len(plan.resident)} on the GPU by the plan" in capsys.readouterr().out
    assert ended(monkeypatch, file, *options, "--stream", "layers") == 2
    assert "got 'layers', expected \"auto\"" in capsys.readouterr().err


def test_a_budget_that_nothing_fits_is_told_in_one_sentence_with_the_least_one(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(spillway.BudgetError) as error:
        spillway.plan(SMALL, budget="1GiB", hardware="h200")
    assert ended(monkeypatch, profile, "--budget", "1GiB", "--hardware", "h200") == 1
    out, err = capsys.readouterr()
    assert out == ""
    # On a slow machine it first says that it is planning.
    assert err.removeprefix("planning ...\n") == f"error: {error.value}\n"
    assert str(error.value).startswith("No plan fits 1.0 GiB. The smallest ")


def test_where_the_hosts_budget_is_what_nothing_fits_it_is_said_so(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    least = spillway.plan(SMALL, budget="16GiB", hardware="h200", allow={"host"}).predicted_peak
    options = ["--budget", str(least), "--host-budget", "1KiB", "--allow", "host", "--hardware", "h200"]
    assert ended(monkeypatch, profile, *options) == 1
    assert "1.0 KiB of CPU memory. The smallest plan offloads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "a lot"], "budget: got 'a lot', expected"),
        (["--budget", "11.5"], "budget: got '11.5', expected bytes as an int, or a share"),
        (["--budget", "1GiB", "--allow", "magic"], "allow: got {'magic'}, expected"),
        (["--budget", "1GiB", "--hardware", "h9000"], "hardware: got 'h9000', expected one of h200"),
        (["--budget", "20GiB", "--window", "0"], "window"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_told_in_a_sentence(
    profile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    hardware = [] if "--hardware" in arguments else ["--hardware", "h200"]
    assert ended(monkeypatch, profile, *arguments, *hardware) == 2
    assert said in capsys.readouterr().err


def test_a_profile_that_is_none_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, tmp_path / "gone.json", "--budget", "1GiB") == 2
    assert "Give a file that Profile.save() wrote" in capsys.readouterr().err


def test_a_machine_is_read_from_a_file(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(Hardware.named("h200"), name="the one over there").save(tmp_path / "machine.json")
    assert not ended(monkeypatch, profile, "--budget", "200GiB", "--hardware", tmp_path / "machine.json")
    assert "on the one over there" in capsys.readouterr().out


def test_a_profile_of_a_device_that_is_not_here_asks_for_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(SMALL, device="xpu:7").save(tmp_path / "profile.json")
    assert ended(monkeypatch, tmp_path / "profile.json", "--budget", "200GiB") == 2
    err = capsys.readouterr().err
    assert "hardware: the profile is of xpu:7, which this machine cannot measure" in err and "--hardware" in err


def test_help_waits_for_nothing_that_plans_or_draws() -> None:
    script = (
        "import sys; sys.argv = ['spillway', 'plan', '--help']\n"
        "from spillway.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "ours = ('spillway.planner.report.facts', 'spillway.planner.report.page', 'spillway.planner.solve')\n"
        "heavy = ('scipy', 'plotly', *ours)\n"
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = run_script(script)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
    assert "--host-budget" in done.stdout
