"""Pipelines, FSDP2 and DDP over several accelerators: the examples, which compare themselves with plain runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators"),
]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def launched(ranks: int, script: str, *arguments: str) -> list[str]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return sorted(run(*torchrun, f"examples/{script}", *arguments).splitlines())


RANKS = [pytest.param(ranks, id=f"{ranks} ranks") for ranks in (2, 4)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_pipeline_is_the_same_in_every_bit(schedule: str, ranks: int) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip("needs more accelerators")
    lines = launched(ranks, "pipelining.py", "--schedule", schedule, "--micro-batches", str(2 * ranks))
    assert len(lines) == ranks
    assert all(line.endswith("losses and weights are equal") for line in lines), lines


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_pipeline_within_a_budget_is_the_same_in_every_bit(schedule: str, ranks: int) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip("needs more accelerators")
    more = ("--micro-batches", str(2 * ranks), "--budget", "2GiB", "--steps", "7")
    lines = launched(ranks, "pipelining.py", "--schedule", schedule, *more)
    assert sum(line.endswith("losses and weights are equal") for line in lines) == ranks, lines
    assert sum("(active)" in line for line in lines) == ranks, lines


@pytest.mark.parametrize("ranks", RANKS)
def test_fsdp_is_the_same_in_every_bit(ranks: int) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip("needs more accelerators")
    lines = launched(ranks, "fsdp.py")
    assert sum(line.endswith("losses are equal") for line in lines) == ranks, lines
    assert not any("DIFFER" in line for line in lines)


@pytest.mark.parametrize("ranks", RANKS)
def test_weights_that_are_split_over_ranks_train_to_the_same_in_every_bit(ranks: int) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip("needs more accelerators")
    lines = launched(ranks, "tensor_parallel.py")
    assert sum(line.endswith("losses and weights are equal") for line in lines) == 2 * ranks, lines


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_a_window_and_a_step_of_the_optimizer_are_those_of_a_loop_written_out(wrap: str, ranks: int) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip("needs more accelerators")
    lines = launched(ranks, "host_optimizer_many.py", "--wrap", wrap)
    for place in ("cpu", "gpu"):
        told = [line for line in lines if f"the step on the {place}:" in line]
        assert len(told) == ranks
        assert all(line.endswith("losses, norms and weights are equal") for line in told), told


@pytest.mark.parametrize("ranks", RANKS)
def test_halves_of_blocks_that_are_sharded_as_a_whole_are_the_same_in_every_bit(ranks: int) -> None:
    if torch.accelerator.device_count() < ranks:
        pytest.skip("needs more accelerators")
    lines = launched(ranks, "fsdp_halves.py")
    assert sum(line.endswith("losses and all weights are equal") for line in lines) == ranks, lines


def test_the_benchmark_finds_no_difference(tmp_path: Path) -> None:
    file = tmp_path / "parallel.json"
    sizes = ["--shape=tiny", "--layers=2", "--sharded-layers=2", "--seq=2048", "--steps=2", "--warmup=1"]
    run("benchmarks/parallel.py", "--ranks=2", *sizes, "--window=1MiB", f"--json={file}")
    result = json.loads(file.read_text())
    rows = result["rows"]
    assert not result["failed"]
    assert len(rows) > 6
    for part in ("pipeline", "fsdp"):
        assert len({row["digest"] for row in rows if row["part"] == part}) == 1
