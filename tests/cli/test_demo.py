"""``spillway demo``, as people run it: in a process of its own, at sizes that take seconds."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from rich.console import Console

from spillway.cli.app import main
from spillway.cli.bench import PeakMeter
from spillway.cli.demo import DemoError, choose_ways, compared, comparison, run_way
from spillway.cli.training import (
    GPT,
    WAYS,
    Row,
    Settings,
    Training,
    add_to_hash,
    batches,
    counted_seconds,
    load_text,
)
from spillway.errors import BudgetError, UsageError
from spillway.profiler.machine import known_hardware
from spillway.runtime.process_memory import has_mark, malloc_setting

SOURCE = Path(__file__).parents[2] / "src"
CHILDREN = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
"""What processes are told. Threads that spin for steps of a millisecond take the cores from each other."""
TINY = ["--device", "cpu", "--layers", "2", "--width", "64", "--sequence", "64", "--batch", "4", "--steps", "3"]
KEYS = {
    "way",
    "step_seconds",
    "tokens_per_second",
    "peak_bytes",
    "activation_peak_bytes",
    "moved_bytes",
    "loss",
    "identical",
}


def spillway(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "spillway", *arguments],
        env={**os.environ, **CHILDREN, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


ROW: Row = {
    "way": "baseline",
    "step_seconds": 10.04,
    "all_step_seconds": [10.04],
    "tokens_per_second": 123_456.0,
    "peak_bytes": 1023 << 20,
    "activation_peak_bytes": 1023 << 20,
    "baseline_bytes": 0,
    "peak_source": "",
    "moved_bytes": 1023 << 20,
    "loss": 5.5451,
    "losses": [5.5451],
    "identical": None,
    "fingerprint": "a",
    "counted_steps": 1,
    "note": "",
}


def table_of(*rows: Row) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        for part in comparison(rows, tiny_settings()):
            console.print(part, highlight=False)
    return capture.get()


def ended_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit code of the command run in this process, which spares an import of torch; its ways have their own."""
    monkeypatch.setattr(sys, "argv", ["spillway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def tiny_settings(**changes: object) -> Settings:
    numbers = {"layers": 2, "width": 64, "sequence": 32, "batch": 2}
    return Settings(**{"device": "cpu", **numbers, **changes})


@pytest.fixture(autouse=True)
def _children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CHILDREN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def known_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can do is known, and nothing of it is kept in the user's cache."""
    monkeypatch.setenv("SPILLWAY_CACHE", str(tmp_path / "cache"))
    known_hardware("cpu", seconds=0.2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict]:
    folder = tmp_path_factory.mktemp("demo")
    file, cache = folder / "demo.json", folder / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPILLWAY_CACHE", str(cache))
        known_hardware("cpu", seconds=0.2)
    # Asked for out of order: keep is what the others are compared with, and comes first all the same.
    ways = "optimizer,planned,offload,checkpoint,baseline"
    arguments = [*TINY, "--steps", "11", "--ways", ways, "--json", str(file)]
    done = spillway("demo", *arguments, SPILLWAY_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    return done, json.loads(file.read_text())


def test_every_way_has_a_row_with_the_promised_keys_in_the_order_of_the_registry(finished) -> None:
    rows = finished[1]["rows"]
    assert [row["way"] for row in rows] == list(WAYS) == ["baseline", "checkpoint", "offload", "planned", "optimizer"]
    assert all(row.keys() >= KEYS for row in rows)
    assert all(row["step_seconds"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert all(row["peak_bytes"] >= row["activation_peak_bytes"] >= 0 for row in rows)


def test_hardware_versions_and_settings_stand_beside_the_rows(finished) -> None:
    report = finished[1]
    assert report["versions"]["torch"] == torch.__version__
    assert report["hardware"]["cores"] >= 1
    # Planned goes on until six steps have had its plan.
    assert 11 <= report["settings"]["steps"] <= 16
    assert report["malloc"] == malloc_setting()


def test_every_way_is_bit_for_bit_keep(finished) -> None:
    rows = finished[1]["rows"]
    assert [row["identical"] for row in rows] == [True] * 5
    assert len({row["fingerprint"] for row in rows}) == 1
    assert all(row["losses"] == rows[0]["losses"] for row in rows)


def test_the_loss_falls(finished) -> None:
    losses = finished[1]["rows"][0]["losses"]
    assert losses[-1] < losses[0]


def test_progress_and_table_show_every_way(finished) -> None:
    out = finished[0].stdout
    for way in WAYS:
        assert f"{way:<11} step 11 " in out
    assert "activations: the peak minus" in out
    assert "bit for bit" in out


def test_bytes_that_offload_moved_are_in_its_row() -> None:
    # Large enough that its tensors pass the 1 MiB below which offload keeps them.
    assert Training("offload", tiny_settings(sequence=256, batch=16)).run(1)["moved_bytes"] > 2**20


def test_gradients_that_left_for_the_hosts_optimizer_are_in_the_table(finished) -> None:
    row, keep = finished[1]["rows"][-1], finished[1]["rows"][0]
    # All of them, in float32.
    parameters = GPT(layers=2, width=64, heads=1, sequence=64).parameters()
    assert row["moved_bytes"] == sum(parameter.nbytes for parameter in parameters)
    assert keep["moved_bytes"] == 0


def test_a_way_that_gains_nothing_on_the_cpu_has_to_be_asked_for_there() -> None:
    assert choose_ways(None, "cpu", 11) == ["baseline", "checkpoint", "offload", "planned"]
    assert choose_ways(None, "cuda", 11) == list(WAYS)


def test_a_way_for_which_there_are_too_few_steps_does_not_run_unasked() -> None:
    assert choose_ways(None, "cpu", 5) == choose_ways(None, "cpu", 1) == ["baseline", "checkpoint", "offload"]


def test_below_the_table_stand_the_budget_and_its_plan(finished) -> None:
    row = finished[1]["rows"][3]
    # So small a model keeps all within the memory that is left to the process.
    note = r"planned: a budget of [\d.]+ MiB. 5 steps found the plan. It leaves 2 of 2 blocks "
    assert re.match(note, row["note"])
    assert row["note"] in " ".join(finished[0].stdout.split())
    assert [other["note"] for other in finished[1]["rows"] if other is not row] == [""] * 4


@pytest.mark.parametrize(
    ("seconds", "settled", "counted"),
    [
        ([9, 1, 2, 3], "yyyy", [1, 2, 3]),
        ([9, 5, 6, 7, 3, 1], "nnnnyy", [1]),
        ([9, 5, 8], "nny", [8]),
        ([9, 4, 6], "nnn", [4, 6]),
        ([9], "y", [9]),
    ],
)
def test_steps_in_which_a_plan_is_found_are_not_counted(seconds: list[float], settled: str, counted: list[int]) -> None:
    assert counted_seconds(seconds, [each == "y" for each in settled]) == counted


def test_the_time_of_planned_is_of_five_steps_with_its_plan_at_least(finished) -> None:
    row = next(row for row in finished[1]["rows"] if row["way"] == "planned")
    assert row["counted_steps"] >= 5
    assert row["budget_bytes"] >= row["baseline_bytes"]


def test_the_table_is_whole_at_80_columns() -> None:
    text = table_of(ROW | {"identical": True}, ROW | {"way": "checkpoint", "identical": False})
    (line,) = (line for line in text.splitlines() if line.startswith("checkpoint"))
    assert line.split()[-1] == "NO"
    assert "5.5451" in line and line.count("1023.0 MiB") == 3
    assert "…" not in text


def test_a_budget_that_is_given_is_the_ways_own(known_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spillway.cli.training._EXTRA_STEPS", 0)
    row = Training("planned", tiny_settings(budget="2GiB")).run(1)
    assert row["budget_bytes"] == 2**31
    assert row["note"] == "planned: a budget of 2.0 GiB. 1 steps found no plan; give more --steps."


@pytest.mark.parametrize(
    ("most", "least", "budget"),
    [(2**32, 2**30, 5 * 2**29), (2**30 + 2**20, 2**30, 17 * 2**26)],
    ids=["half-way", "room for what resident bytes do not tell apart"],
)
def test_without_a_budget_it_is_half_way_to_the_least_with_the_optimizers_state(
    most: int, least: int, budget: int, known_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(profile: object, *, budget: int, allow: set[str] | None = None) -> SimpleNamespace:
        if budget < least:
            raise BudgetError("", budget=budget, least=least - state)
        assert allow == {"keep"}
        return SimpleNamespace(predicted_peak=most - state)

    # Two moments of each parameter, which the profile of an optimizer's first step does not have.
    state = sum(2 * parameter.nbytes for parameter in GPT(layers=2, width=64, heads=1, sequence=32).parameters())
    monkeypatch.setattr("spillway.plan", plan, raising=False)
    monkeypatch.setattr("spillway.profile", lambda model, batch: None, raising=False)
    training = Training("planned", tiny_settings())
    assert training.attached is not None
    assert training.attached.budget == budget


def test_a_budget_that_nothing_fits_is_one_sentence_that_names_the_least(known_machine: None) -> None:
    with pytest.raises(BudgetError, match=r"No plan fits .*\. The smallest .*budget.* is "):
        run_way("planned", tiny_settings(budget="1MiB"), 11, said=print)


def test_a_way_that_rounds_differently_on_an_accelerator_is_not_compared_and_the_table_says_why() -> None:
    other = ROW | {"way": "optimizer", "fingerprint": "b"}
    assert compared(ROW | {"way": "offload"}, ROW, "cuda:0")["identical"] is True
    assert compared(other, ROW, "cuda:0")["identical"] is None
    assert compared(other, ROW, "cpu")["identical"] is False
    text = " ".join(table_of(ROW, other).split())
    assert "optimizer is not compared: the CPU's kernels round differently" in text


def test_a_limit_of_time_leaves_three_steps_to_every_way_and_without_a_baseline_nothing_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "demo.json"
    arguments = [*TINY, "--steps", "50", "--seconds", "0.001", "--ways", "checkpoint,offload", "--json", str(file)]
    assert ended_here(monkeypatch, "demo", *arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [len(row["losses"]) for row in rows] == [3, 3]
    assert [row["identical"] for row in rows] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ways", "baseline,levitate"], "ways: got levitate"),
        (["--width", "200"], "width: got 200"),
        (["--device", "abacus"], "device: got 'abacus'"),
        (["--data", "no/such/place"], "data: no/such/place is neither a file nor a folder"),
        (["--window", "12 parsecs"], "window: got '12 parsecs'"),
        (["--json", "no/such/folder/demo.json"], "--json: 'no/such/folder/demo.json' cannot be written"),
        (["--steps", "0"], "--steps"),
        (["--budget", "12 parsecs"], "budget: got '12 parsecs'"),
        (["--budget", "600MiB"], "budget: got '600MiB', and the ways baseline have none. Only planned has a budget"),
        (["--ways", "baseline,planned", "--steps", "5"], "steps: planned needs at least 11, and got 5"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended_here(monkeypatch, "demo", "--ways", "baseline", *TINY, *arguments) == 2
    errors = capfd.readouterr().err
    assert sentence in errors
    assert "Traceback" not in errors


def test_text_that_is_too_short_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="got 9 B of text"):
        next(batches(b"too short", tiny_settings()))


def test_a_way_whose_process_fails_is_named_after_the_traceback(tmp_path: Path) -> None:
    # A module that cannot be imported stands for whatever may be broken in a process.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif '--multiprocessing-fork' in sys.orig_argv:\n    sys.modules['spillway.cli.training'] = None\n"
    )
    path = os.pathsep.join([str(tmp_path), str(SOURCE)])
    done = spillway("demo", "--ways", "baseline", *TINY, PYTHONPATH=path)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
    assert done.stderr.splitlines()[-1] == "error: baseline: its process ended with exit code 1"


def test_a_process_that_is_killed_is_told_by_its_signal() -> None:
    # Other tests may have processes of their own.
    others = multiprocessing.active_children()

    def kill(line: str) -> None:
        [child] = [each for each in multiprocessing.active_children() if each not in others]
        child.kill()

    with pytest.raises(DemoError, match="baseline: its process was ended by signal 9"):
        run_way("baseline", tiny_settings(), 10_000, said=kill)


def test_ctrl_c_ends_with_exit_code_130_and_leaves_no_child() -> None:
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "spillway",
            "demo",
            *TINY,
            "--ways",
            "baseline,offload",
            "--steps",
            "100000",
            "--seconds",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    while "step 1 " not in running.stdout.readline():
        pass
    children = psutil.Process(running.pid).children()
    assert children
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in errors
    assert _all_gone(children)


def test_children_end_when_their_parent_is_killed() -> None:
    running = subprocess.Popen(
        [sys.executable, "-m", "spillway", "demo", *TINY, "--ways", "baseline", "--steps", "100000", "--seconds", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert running.stdout is not None
    while "step 1 " not in running.stdout.readline():
        pass
    children = psutil.Process(running.pid).children()
    running.kill()
    running.communicate()
    assert children
    assert _all_gone(children)


def _all_gone(children: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(child.is_running() for child in children):
        time.sleep(0.05)
    return not any(child.is_running() for child in children)


def test_version_names_spillway_torch_and_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_here(monkeypatch, "version") == 0
    assert f"torch {torch.__version__}, Python 3." in capsys.readouterr().out


def test_ways_are_sorted_and_each_counts_once() -> None:
    assert choose_ways("offload,baseline,offload", "cpu", 3) == ["baseline", "offload"]
    with pytest.raises(UsageError, match="ways: got none"):
        choose_ways(",", "cpu", 3)


def test_a_different_fingerprint_is_not_identical() -> None:
    assert compared(ROW | {"way": "offload"}, ROW, "cpu")["identical"] is True
    assert compared(ROW | {"way": "offload", "fingerprint": "b"}, ROW, "cpu")["identical"] is False


def test_a_fingerprint_sees_one_bit() -> None:
    def text(value: float) -> str:
        fingerprint = hashlib.sha256()
        add_to_hash(fingerprint, [torch.tensor([1.0, value]), torch.zeros(2, 3).t().to(torch.bfloat16)])
        return fingerprint.hexdigest()

    assert text(0.0) == text(0.0)
    assert text(0.0) != text(-0.0)


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=64, heads=1, sequence=16)
    tokens = torch.randint(0, 256, (2, 16))
    gradients = []
    for model.checkpoint_blocks in (False, True):
        model.zero_grad()
        model(tokens, tokens).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_batches_are_the_same_for_the_same_seed_and_targets_are_one_ahead() -> None:
    text = bytes(range(256)) * 4
    draws = [next(batches(text, tiny_settings(batch=3, sequence=5, seed=7))) for _ in range(2)]
    assert torch.equal(draws[0][0], draws[1][0])
    tokens, targets = draws[0]
    assert torch.equal((tokens + 1) % 256, targets)


def test_text_of_a_folder_is_its_files_in_order_without_the_hidden_ones(tmp_path: Path) -> None:
    for name, content in (("b.txt", "two"), ("a.txt", "one"), (".hidden", "never")):
        (tmp_path / name).write_text(content)
    assert load_text(tmp_path) == b"onetwo"
    assert load_text(tmp_path / "b.txt") == b"two"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="found no text"):
        load_text(tmp_path / "empty")


@pytest.mark.skipif(not has_mark(), reason="this kernel keeps no high-water mark that can be reset")
def test_the_high_water_mark_sees_a_peak_that_is_gone_and_forgets_the_one_before() -> None:
    size = 64 * 2**20
    meter = PeakMeter(torch.device("cpu"))
    torch.ones(2 * size, dtype=torch.uint8)  # before the start: must not count
    before = meter.start()
    torch.ones(size, dtype=torch.uint8)
    assert size * 0.9 <= meter.peak() - before <= size * 1.5
