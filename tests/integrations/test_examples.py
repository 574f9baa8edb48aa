"""The examples over several ranks, which compare themselves with plain loops: here on CPUs, over gloo.

What takes time is to start processes. So their ``main`` runs in ranks that are there already, and by ``torchrun`` in
``make test-all``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from integrations.ranks import RANKS, World

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]


def case(script: str, arguments: tuple[str, ...]) -> str:
    """What an example prints in this rank, on its CPU; the process group is there, and stays."""
    spec = importlib.util.spec_from_file_location(f"example_{script}", ROOT / "examples" / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch.object(dist, name))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_accelerator", return_value=None))
        stack.enter_context(mock.patch.object(sys, "argv", [script, *arguments]))
        spec.loader.exec_module(module)
        try:
            module.main()
        except SystemExit as end:
            assert not end.code, printed.getvalue()
    return printed.getvalue()


def launched(ranks: int, script: str, *arguments: str) -> str:
    """What they print under torchrun."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone", f"examples/{script}.py"]
    more = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment = {**os.environ, **more, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_steps_equal(told: str, wrap: str, ranks: int) -> None:
    found = re.findall(rf"rank (\d): {wrap}, the step on the (\w+): losses, norms and weights are equal", told)
    assert sorted(found) == [(str(rank), place) for rank in range(ranks) for place in ("cpu", "gpu")]
    assert "DIFFER" not in told


def assert_halves_equal(told: str, ranks: int) -> None:
    everybody = [str(rank) for rank in range(ranks)]
    assert sorted(re.findall(r"rank (\d): 4 losses and all weights are equal", told)) == everybody
    # Inputs of eight halves, 4 x 64 tokens of 128 floats: 128 KiB each, of which the last is held back.
    left = re.findall(r"rank (\d): 8 halves, (\d+) KiB offloaded in the last step", told)
    assert sorted(left) == [(rank, "896") for rank in everybody]


@pytest.mark.parametrize("wrap", ["fsdp", "ddp"])
def test_a_window_and_a_step_on_the_host_are_those_of_a_loop_written_out(world: World, wrap: str) -> None:
    assert_steps_equal("".join(world.run(case, "host_optimizer_many", ("--wrap", wrap))), wrap, RANKS)


def test_halves_of_a_sharded_block_are_regions_of_their_own(world: World) -> None:
    assert_halves_equal("".join(world.run(case, "fsdp_halves", ())), RANKS)


def test_blocks_under_fsdp_train_to_the_same_losses(world: World) -> None:
    told = "".join(world.run(case, "fsdp", ()))
    # Inputs of four blocks, 4 x 128 tokens of 128 floats: 256 KiB each, of which the last is held back.
    left = re.findall(r"rank (\d): (\d+) KiB offloaded in the last step", told)
    assert sorted(left) == [("0", "768"), ("1", "768")]
    assert sorted(re.findall(r"rank (\d): 5 losses are equal", told)) == ["0", "1"]


def assert_split_equal(told: str, ranks: int) -> None:
    everybody = [(str(rank), way) for rank in range(ranks) for way in ("offloaded", "recomputed")]
    assert sorted(re.findall(r"rank (\d): (\w+), losses and weights are equal", told)) == everybody
    done = re.findall(r"rank \d: (\d+) KiB offloaded, (\d+) KiB recomputed in the last step", told)
    assert len(done) == 2 * ranks
    assert all(int(left) > 0 for left, _ in done)
    assert sum(int(again) > 0 for _, again in done) == ranks


def test_a_model_whose_weights_are_split_trains_to_the_same_losses(world: World) -> None:
    assert_split_equal("".join(world.run(case, "tensor_parallel", ())), RANKS)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_examples_run_under_torchrun(ranks: int) -> None:
    for wrap in ("fsdp", "ddp"):
        assert_steps_equal(launched(ranks, "host_optimizer_many", "--wrap", wrap), wrap, ranks)
    assert_halves_equal(launched(ranks, "fsdp_halves"), ranks)
    assert launched(ranks, "fsdp").count("5 losses are equal") == ranks
    assert_split_equal(launched(ranks, "tensor_parallel"), ranks)
