"""``spillway run``, ``profile`` and ``bench`` as people call them, on a little GPT that prints its losses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import spillway
from running.scripts import RANKS, TRAINING, Folder, Server, keep_hardware
from spillway.cli import plan
from spillway.cli.app import main
from spillway.cli.bench import WAYS, Result, to_text
from spillway.cli.running.options import options_of_way
from spillway.cli.running.script import numbered, rank_of
from spillway.planner.hardware import PRESETS
from spillway.planner.plan import ALL

STEPS = 7
COMMANDS = ["run", "profile", "plan", "report", "bench", "demo", "doctor"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("scripts")
    folder = Folder(path, keep_hardware(path / "cache"))
    folder.write("train.py", TRAINING)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Folder) -> str:
    """What the script says by itself."""
    done = folder.python("train.py", STEPS)
    assert done.code == 0
    assert done.out.count("\n") == STEPS + 1
    return done.out


def test_losses_within_a_budget_are_bit_for_bit_those_of_the_script_alone(
    server: Server, folder: Folder, plain: str
) -> None:
    options = ["--budget", "3GiB", "-o", "out.json", "--profile", "profile.json"]
    done = server.spillway(folder.path, "run", *options, "train.py", STEPS)
    assert done.code == 0, done.err
    assert done.out == plain
    said = json.loads((folder.path / "out.json").read_text())
    [root] = said["models"]
    assert (root["kind"], root["blocks"], root["way"], root["stage"]) == ("GPT", 4, "budget 3GiB", "active")
    assert root["budget"] == 3 << 30
    assert 0 < root["peak"] <= 3 << 30
    assert root["predicted_peak"] > 0
    assert root["predicted_seconds"] > 0
    assert said["steps"] == STEPS
    assert said["seconds"] > 0
    assert said["not_attached"] == []
    assert len(spillway.Profile.load(folder.path / "profile.json").calls) == 4
    table = done.err[done.err.index("spillway:") :].splitlines()
    assert max(map(len, table)) <= 80
    assert table[0] == f"spillway: 1 model attached, {STEPS} optimizer steps"
    assert "  GPT: 4 blocks, budget 3GiB, active" in table
    assert [line.split()[0] for line in table[3:6]] == ["peak", "predicted", "measured"]


def test_another_rank_prints_nothing_and_writes_files_of_its_own(server: Server, folder: Folder, plain: str) -> None:
    done = server.spillway(folder.path, "run", "--ratio", "0.5", "-o", "ranks.json", "train.py", STEPS, RANK="1")
    assert (done.code, done.out, done.err) == (0, plain, "")
    assert not (folder.path / "ranks.json").exists()
    said = json.loads((folder.path / "ranks.rank1.json").read_text())
    assert said["rank"] == 1
    assert said["models"][0]["way"] == "ratio 0.5"


SWALLOWS = TRAINING.replace('finally:\n    print("finally")', 'except Exception:\n    print("went on")')


def test_a_budget_that_nothing_fits_ends_with_its_sentence_though_the_script_catches_it(
    server: Server, folder: Folder
) -> None:
    folder.write("swallows.py", SWALLOWS)
    done = server.spillway(folder.path, "run", "--quiet", "--budget", "1MiB", "swallows.py", STEPS)
    assert done.code == 1
    assert done.out.endswith("went on\n")
    assert done.err.splitlines()[-1].startswith("error: No plan fits 1.0 MiB. ")
    assert "Traceback" not in done.err


def test_the_table_after_a_budget_that_nothing_fits_promises_no_plan(server: Server, folder: Folder) -> None:
    done = server.spillway(folder.path, "run", "--budget", "1MiB", "train.py", STEPS)
    assert done.code == 1
    assert "GPT: 4 blocks, budget 1MiB, no plan fits" in done.err and "no plan yet" not in done.err


def test_a_profile_is_written_and_the_script_ended_cleanly(server: Server, folder: Folder, plain: str) -> None:
    done = server.spillway(folder.path, "profile", "-o", "alone.json", "train.py", 100)
    assert done.code == 0, done.err
    # The fourth call of the model is where all is known.
    assert done.out.splitlines() == [*plain.splitlines()[:3], "finally"]
    profile = spillway.Profile.load(folder.path / "alone.json")
    assert str(profile.calls[0].name) == "blocks.0"
    assert "4 like blocks.0" in done.err
    assert "always there" in done.err


@pytest.mark.parametrize(("options", "steps"), [(["--steps", "1"], 100), ([], 1)])
def test_without_a_profile_it_is_an_error(options: list[str], steps: int, server: Server, folder: Folder) -> None:
    done = server.spillway(folder.path, "profile", "-o", "none.json", *options, "train.py", steps)
    assert done.code == 1
    # Before it, torch's profiler may say that it did not see some memory being taken.
    assert "\nerror: got no profile of a model in 1 optimizer steps" in f"\n{done.err}"
    assert not (folder.path / "none.json").exists()


def test_a_way_is_measured_step_by_step_and_ended(server: Server, folder: Folder) -> None:
    results = {}
    for way in ("baseline", "recompute", "budget=1KiB"):
        words = ["result.json", way, "5", "train.py", "1000000"]
        done = server.run(folder.path, "from spillway.cli.bench import main; main()", "bench", *words)
        assert done.code == 0, done.err
        results[way] = Result(**json.loads((folder.path / "result.json").read_bytes()))
    for way in ("baseline", "recompute"):
        # One step warms up.
        assert len(results[way].seconds) == 4
        assert results[way].peak_bytes >= results[way].activation_bytes >= 0
        assert results[way].error is None
    assert results["baseline"].outcome is None
    assert results["recompute"].outcome["models"][0]["stats"]["recomputed_bytes"] > 0
    assert results["budget=1KiB"].error.startswith("No plan fits")
    text = to_text(results).splitlines()
    assert max(map(len, text)) <= 80
    assert text[1].split()[0] == "baseline"
    assert "1.00" in text[1]
    assert text[3].split() == ["budget=1KiB", *"-" * 6]


def test_a_row_has_the_median() -> None:
    assert Result(seconds=[1.0, 2.0, 3.0, 4.0, 50.0]).median == 3.0
    assert Result(error="no").median is None


@pytest.mark.long
def test_a_bench_runs_each_way_in_a_process_of_its_own(folder: Folder) -> None:
    folder.write("ends.py", "import sys; sys.stdin.read(); raise SystemExit(5)")
    done = folder.spillway("bench", "--ways", "baseline,recompute", "-o", "bench.json", "train.py", 1000000)
    assert done.code == 0, done.err
    said = json.loads((folder.path / "bench.json").read_text())
    # Of twelve steps, three warm up.
    assert [len(row["answer"]["seconds"]) for row in said["rows"]] == [9, 9]
    assert said["rows"][0]["answer"]["output"] == said["rows"][1]["answer"]["output"]
    failed = folder.spillway("bench", "--ways", "baseline", "ends.py")
    assert "baseline: the script ended with exit code 5" in failed.out
    assert failed.code == 1, "no way came to its end"


@pytest.mark.long
@pytest.mark.parametrize("command", [["-m", "spillway"], ["--no-python", sys.executable, "-m", "spillway"]])
def test_ranks_of_ddp_train_bit_for_bit_under_torchrun(command: list[str], folder: Folder) -> None:
    folder.write("ranks.py", RANKS)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert folder.python(*launcher, "ranks.py", "plain").code == 0
    options = ["run", "--budget", "3GiB", "-o", "ddp.json", "ranks.py", "managed"]
    done = folder.python(*launcher, *command, *options)
    assert done.code == 0, done.err
    for rank in (0, 1):
        losses = [(folder.path / f"losses.{rank}.{which}").read_text() for which in ("plain", "managed")]
        assert losses[0] == losses[1]
        assert losses[0].count("\n") == 7
        name = "ddp.json" if rank == 0 else "ddp.rank1.json"
        [root] = json.loads((folder.path / name).read_text())["models"]
        assert (root["kind"], root["stage"]) == ("GPT", "active")
    assert done.err.count("spillway: 1 model attached") == 1


def ended_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["spillway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "absent.py"], "absent.py"),
        (["run", "--budget", "1GiB", "--ratio", "0.5", "absent.py"], "got --budget and --ratio"),
        (["run", "--policy", "offloads", "absent.py"], "--policy: got 'offloads'"),
        (["run", "--ratio", "2", "absent.py"], "--ratio: got 2"),
        (["run", "--budget", "much", "absent.py"], "--budget: got 'much'"),
        (["run", "--policy", "keep", "--allow", "keep", "absent.py"], "got --allow beside --policy"),
        (["run", "--budget", "1GiB", "--allow", "keeps", "absent.py"], "allow: got"),
        (["run", "--budget", "1GiB", "--stream", "layers", "absent.py"], "--stream: got 'layers', expected auto"),
        (["run", "--stream", "auto", __file__], "got --stream without --budget"),
        (["run", "--stream", "auto", "--ratio", "0.5", "absent.py"], "got --stream beside --ratio, expected --budget"),
        (["run", "--plan", "absent.json", "absent.py"], "absent.json"),
        (["run", "--policy", "keep", "-o", "absent/out.json", __file__], "--output: 'absent/out.json' cannot be"),
        (["run", "--policy", "keep", "--profile", "out.json", __file__], "got --profile without a budget"),
        (["profile", "-o", "absent/out.json", __file__], "--output: 'absent/out.json' cannot be written"),
        (["bench", "--ways", "keeps", "absent.py"], "--ways: got 'keeps'"),
        (["bench", "--ways", "budget=x", "absent.py"], "--ways: got 'budget=x': got 'x', expected bytes"),
        (["run", "--budget", "1GiB", "--allow", "keep,foo", "absent.py"], "--allow: got 'keep,foo', expected"),
        (["bench", "--ways", ",", "absent.py"], "--ways: got none"),
        (["bench", "--steps", "2", __file__], "--steps: got 2"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_one_sentence_and_2(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_here(monkeypatch, *arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert told in said.err
    assert said.err.count("\n") == 1


def test_bench_is_refused_in_one_of_several_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ended_here(monkeypatch, "bench", __file__) == 2
    assert "got bench in one of several ranks" in capsys.readouterr().err


def test_options_of_the_environment_are_those_of_run_unless_it_has_options(
    server: Server, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = server.told(folder.path, "run", "train.py", 1, SPILLWAY_POLICY="keep")
    assert "GPT: 4 blocks, keep\n" in done.err
    done = server.told(folder.path, "run", "--ratio", "0.5", "train.py", 1, SPILLWAY_POLICY="keep")
    assert "GPT: 4 blocks, ratio 0.5\n" in done.err
    monkeypatch.setenv("SPILLWAY_BUDGET", "off")
    assert ended_here(monkeypatch, "run", __file__) == 2
    assert "got SPILLWAY_BUDGET=off in the environment and spillway run without a way" in capsys.readouterr().err


def test_debug_shows_where_an_error_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["spillway", "--debug", "run", "--ratio", "2", "absent.py"])
    with pytest.raises(spillway.UsageError, match="--ratio: got 2"):
        main()


def test_a_report_is_asked_of_each_root(server: Server, folder: Folder) -> None:
    code = """
from pathlib import Path
from spillway.attaching import Attached
Attached.report = lambda self, path, *, trace=None: Path(path).write_text(repr(self))
from spillway.cli.app import main
main()
"""
    arguments = ["run", "--quiet", "--budget", "3GiB", "--best-effort", "--report", "page.html", "train.py", "1"]
    done = server.run(folder.path, code, "spillway", *arguments)
    assert done.code == 0, done.err
    assert "Attached to GPT" in (folder.path / "page.html").read_text()


def test_names_of_files_have_the_rank_before_their_suffix() -> None:
    assert numbered(Path("a/plan.json"), "rank", 0) == Path("a/plan.json")
    assert numbered(Path("a/plan.json"), "rank", 3) == Path("a/plan.rank3.json")


def test_the_rank_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert rank_of() == 0
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert rank_of() == 2
    monkeypatch.setenv("RANK", "1")
    assert rank_of() == 1
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(spillway.UsageError, match="RANK: got 'first'"):
        rank_of()


IMPORTED = """
import contextlib, io, json, sys
from spillway.cli.app import main
said = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["spillway", *words]
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        main()
    said.append(text.getvalue())
print(json.dumps({"said": said, "imported": sorted(name.partition(".")[0] for name in sys.modules)}))
"""


def test_help_waits_for_nothing_that_is_slow(folder: Folder) -> None:
    folder.write("imported.py", IMPORTED)
    asked = [[*words, option] for words in ([], *([name] for name in COMMANDS)) for option in ("--help", "-h")]
    found = json.loads(folder.python("imported.py", json.dumps([*asked, ["--version"]])).out)
    *helps, version = found["said"]
    for each, said in zip(asked, helps, strict=True):
        assert f"Usage: {' '.join(['spillway', *each[:-1]])}" in said
    listed = helps[0].partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed if line] == COMMANDS
    assert not [line for line in listed if line.endswith("...")], "a description is cut off"
    assert version.startswith(f"spillway {spillway.__version__}, torch {torch.__version__}, Python 3.")
    # Typer looks for pydantic itself.
    assert not {"torch", "numpy", "scipy", "psutil"} & set(found["imported"])


def test_names_of_commands_and_options_are_completed(folder: Folder) -> None:
    variables = {"_SPILLWAY_COMPLETE": "complete_bash"}
    names = folder.spillway(**variables, COMP_WORDS="spillway ", COMP_CWORD="1").out.split()
    assert set(names) >= set(COMMANDS)
    assert folder.spillway(**variables, COMP_WORDS="spillway run --bud", COMP_CWORD="2").out.split() == ["--budget"]


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("run --policy ", ["offload", "recompute", "keep"]),
        ("run --hardware h", ["h200", "h100"]),
        ("plan --allow keep,re", ["keep,recompute"]),
        ("bench --ways baseline,o", ["baseline,offload"]),
        ("doctor --device c", ["cpu", "cuda"]),
    ],
)
def test_values_of_options_are_completed(line: str, completed: list[str], folder: Folder) -> None:
    variables = {"_SPILLWAY_COMPLETE": "complete_bash", "COMP_WORDS": f"spillway {line}", "COMP_CWORD": "3"}
    assert folder.spillway(**variables).out.split() == completed


def test_completed_words_are_all_that_there_are() -> None:
    assert set(plan.MACHINES) == set(PRESETS)
    assert set(plan.TIERS) == ALL
    for way in (*WAYS.split(","), "ratio=", "budget=", "plan="):
        value = {"ratio=": "0.5", "budget=": "1GiB"}.get(way, "")
        if way != "plan=":
            options_of_way(f"{way}{value}")


def test_a_budget_is_told_as_it_was_given(server: Server, folder: Folder) -> None:
    done = server.told(folder.path, "run", "--budget", "3221225472", "train.py", 1)
    assert "budget 3221225472, " in done.err
    assert "error: --budget 3221225472 was not met" in done.err


def test_files_of_models_that_there_are_not_are_told(server: Server, folder: Folder) -> None:
    folder.write("idle.py", "import torch\n")
    done = server.told(folder.path, "run", "--budget", "3GiB", "--profile", "idle.json", "idle.py")
    assert done.code == 3
    assert "idle.json: not written: no model was attached in this process" in done.err


def test_a_profiled_script_is_told_how_far_it_is(server: Server, folder: Folder) -> None:
    done = server.told(folder.path, "profile", "-o", "progress.json", "train.py", 100)
    assert [line for line in done.err.splitlines() if line.startswith("profiling ")] == [
        f"profiling GPT, call {number}" for number in (1, 2, 3)
    ]


def test_work_of_more_than_a_second_says_so_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "_SHORT", 0.05)
    with plan.working("planning"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "planning ...\n"
    with plan.working("curve") as tell:
        tell("curve: 1/2")
        time.sleep(0.2)
    assert capsys.readouterr().err == "curve: 1/2\n"
    monkeypatch.setattr(plan, "_SHORT", 60)
    with plan.working("planning"):
        pass
    assert capsys.readouterr().err == ""
