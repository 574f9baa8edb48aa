"""``spillway demo``, as people run it: in a process of its own, at sizes that take seconds."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import psutil
import pytest
import torch

from spillway.cli import bench
from spillway.cli.app import main
from spillway.cli.bench import Result, to_text
from spillway.cli.training import GPT, add_to_hash, batches, load_text, parse
from spillway.errors import SpillwayError
from spillway.profiler.machine import known_hardware
from spillway.profiler.meter import DeviceMemory
from spillway.runtime.cpu import has_mark

SOURCE = Path(__file__).parents[2] / "src"
TINY = ["--device", "cpu", "--layers", "2", "--width", "64", "--sequence", "64", "--batch", "4"]


def ended_here(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int | str | None:
    """The exit code of the command run in this process, which spares an import of torch; its ways have their own."""
    monkeypatch.setattr(sys, "argv", ["spillway", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """What a demo prints, and its report. Its ways have processes of their own, and it has none."""
    folder = tmp_path_factory.mktemp("demo")
    file, cache = folder / "demo.json", folder / "cache"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("SPILLWAY_CACHE", str(cache)), ("PYTHONPATH", str(SOURCE)), ("OMP_NUM_THREADS", "1")):
            patch.setenv(name, value)
        known_hardware("cpu", seconds=0.2)
        # So small a model keeps all within the memory that is left to the process.
        ways = "baseline,recompute,budget=2GiB"
        arguments = [*TINY, "--steps", "12", "--ways", ways, "-o", str(file)]
        with redirect_stdout(StringIO()) as said:
            assert ended_here(patch, "demo", *arguments) in (0, None)
    return said.getvalue(), json.loads(file.read_text())


def test_every_way_has_the_losses_and_gradients_of_the_baseline(finished) -> None:
    said, report = finished
    rows = {row["way"]: row["answer"] for row in report["rows"]}
    assert list(rows) == ["baseline", "recompute", "budget=2GiB"]
    assert len({row["output"] for row in rows.values()}) == 1
    assert all(row["seconds"] and row["error"] is None for row in rows.values())
    assert all(row["peak_bytes"] >= row["activation_bytes"] >= 0 for row in rows.values())
    assert rows["recompute"]["outcome"]["models"][0]["stats"]["recomputed_bytes"] > 0
    assert rows["budget=2GiB"]["outcome"]["models"][0]["stage"] == "active"
    assert [line.split()[-1] for line in said.splitlines()[1:4]] == ["same"] * 3
    assert max(map(len, said.splitlines())) <= 80


def test_other_output_is_a_bug_and_a_failed_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"baseline": Result(seconds=[1.0], output="a"), "offload": Result(seconds=[1.0], output="b")}
    assert to_text(found).splitlines()[2].split()[-1] == "other"
    monkeypatch.setattr(bench, "compare", lambda *given, **options: found)
    monkeypatch.setattr(bench, "hardware_of", lambda *given: None)
    with pytest.raises(SpillwayError, match="not bit for bit the same"):
        called(TINY)
    found["offload"] = Result(error="the script was ended by SIGKILL")
    with pytest.raises(SpillwayError, match="offload: no step was measured"):
        called(TINY)


def called(arguments: list[str]) -> None:
    class Context:
        args = arguments

    bench.demo(Context())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ways", "baseline,levitate"], "--ways: got 'levitate'"),
        (["--width", "200"], "--width: got 200"),
        (["--device", "abacus"], "--device: there is no 'abacus' here"),
        (["--data", "no/such/place"], "--data: got 0 bytes of text in regular files of 'no/such/place'"),
        (["-o", "no/such/folder/demo.json"], "--output: 'no/such/folder/demo.json' cannot be written"),
        (["--steps", "0"], "--steps"),
        (["--batch", "0"], "--batch: got 0"),
        (["--seconds", "3"], "unknown arguments: ['--seconds', '3']"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended_here(monkeypatch, "demo", "--ways", "baseline", *TINY, *arguments) == 2
    errors = capfd.readouterr().err
    assert sentence in errors
    assert "Traceback" not in errors


def test_ctrl_c_ends_with_exit_code_130_and_leaves_no_child() -> None:
    command = [sys.executable, "-m", "spillway", "demo", *TINY, "--ways", "baseline", "--steps", "1000000"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    # A terminal sends the signal to all processes of a session.
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert running.stderr is not None
    assert running.stderr.readline() == "baseline ...\n"
    while not (children := psutil.Process(running.pid).children()):
        time.sleep(0.01)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_json_is_all_that_stdout_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "_run", lambda script, way, steps: Result(seconds=[1.0], output="a"))
    assert ended_here(monkeypatch, "bench", "--ways", "baseline", "--json", __file__) in (0, None)
    out, err = capsys.readouterr()
    assert [row["way"] for row in json.loads(out)["rows"]] == ["baseline"]
    assert err == "baseline ...\n"


def test_a_fingerprint_sees_one_bit() -> None:
    def text(value: float) -> str:
        fingerprint = hashlib.sha256()
        add_to_hash(fingerprint, [torch.tensor([1.0, value]), torch.zeros(2, 3).t().to(torch.bfloat16)])
        return fingerprint.hexdigest()

    assert text(0.0) == text(0.0)
    assert text(0.0) != text(-0.0)


def test_batches_are_the_same_each_time_and_targets_are_one_ahead(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4)
    settings = parse([*TINY, "--data", str(tmp_path / "text")])
    draws = [next(batches(settings)) for _ in range(2)]
    assert torch.equal(draws[0][0], draws[1][0])
    tokens, targets = draws[0]
    assert tokens.shape == (4, 64)
    assert torch.equal((tokens + 1) % 256, targets)


def test_text_of_a_folder_is_its_files_in_order_without_the_hidden_ones(tmp_path: Path) -> None:
    for name, content in (("b.txt", "two"), ("a.txt", "one"), (".hidden", "never")):
        (tmp_path / name).write_text(content)
    assert load_text(str(tmp_path)) == b"onetwo"
    assert load_text(str(tmp_path / "b.txt")) == b"two"


def test_the_loss_falls() -> None:
    settings = parse(TINY)
    torch.manual_seed(0)
    model = GPT(2, 64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _, (tokens, targets) in zip(range(12), batches(settings), strict=False):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.skipif(not has_mark(), reason="this kernel keeps no high-water mark that can be reset")
def test_the_high_water_mark_sees_a_peak_that_is_gone_and_forgets_the_one_before() -> None:
    size = 64 * 2**20
    memory = DeviceMemory(torch.device("cpu"))
    torch.ones(2 * size, dtype=torch.uint8)  # before the start: must not count
    memory.reset_peak()
    before = memory.level()
    torch.ones(size, dtype=torch.uint8)
    assert size * 0.9 <= memory.peak() - before <= size * 1.5
