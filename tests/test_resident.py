"""Budgets on a CPU are of the process's resident bytes: real processes, measured from outside."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import spillway
from budgets import NAMED, attached_to, hardware, one_step
from spillway import Session
from spillway.runtime import cpu
from spillway.runtime.cpu import MAPPED_BYTES, ResidentPeak, malloc_setting, resident_bytes
from steps import MiB

SOURCE = Path(__file__).parents[1] / "src"
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc and of Linux's marks")

TRAINING = """
    import json, sys, torch, spillway
    from spillway.runtime.cpu import set_malloc
    from torch import nn

    def say(**what):
        print(json.dumps(what), flush=True)
        sys.stdin.readline()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)
        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    torch.set_num_threads(1)
    torch.manual_seed(0)
    set_malloc()
    model = nn.Sequential(nn.Linear(16, 16), *(Block() for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4096, 16)
    attached, stage = None, "plain"
    def step():
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()
    say(stage="started", loss=0.0)
    if sys.argv[1] != "plain":
        attached = spillway.attach(model, budget=int(sys.argv[1]), hardware=spillway.Hardware.named("h200"))
    for _ in range(int(sys.argv[2])):
        stage = attached.stage if attached else "plain"
        try:
            loss = step()
        except spillway.BudgetError as error:
            say(stage=attached.stage, loss=0.0, error=str(error))
            break
        say(stage=stage, loss=loss, malloc=attached.stats().malloc if attached else "",
            measured=attached.measured.peak_bytes if attached and attached.measured else 0)
"""


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **more}


class Watch(threading.Thread):
    """Sees the most resident bytes of a process, from outside."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process = psutil.Process(process)
        self.most = 0

    def run(self) -> None:
        with suppress(psutil.NoSuchProcess):
            while self.process.status() != psutil.STATUS_ZOMBIE:
                self.most = max(self.most, self.process.memory_info().rss)
                time.sleep(0.001)


@functools.cache
def trained(budget: int | str, steps: int) -> tuple[list[dict[str, Any]], str]:
    """What a process says of each step, with the most resident bytes meanwhile as they are seen from here; stderr."""
    said = []
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINING), str(budget), str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        watch = Watch(child.pid)
        watch.start()
        for line in child.stdout:
            said.append({**json.loads(line), "peak": watch.most})
            watch.most = 0
            child.stdin.write("\n")
            child.stdin.flush()
        stderr = child.stderr.read()
    watch.join()
    assert child.returncode == 0, stderr
    return said, stderr


@LINUX
def test_a_process_keeps_to_its_budget_and_its_search_to_what_plain_training_takes() -> None:
    (start, *plain), _ = trained("plain", 3)
    most = max(step["peak"] for step in plain)
    assert most > start["peak"] + 96 * MiB
    budget = (most + start["peak"]) // 2 + 40 * MiB
    (_, *steps), stderr = trained(budget, 9)
    assert steps[-1]["stage"] == "active", steps[-1]
    assert [step["loss"] for step in steps[:3]] == [step["loss"] for step in plain]
    assert steps[-1]["malloc"] == malloc_setting()
    held = [step for step in steps if step["stage"] == "active"]
    assert max(step["peak"] for step in held) <= budget
    assert steps[-1]["measured"] == pytest.approx(max(step["peak"] for step in held), rel=0.05)
    # All of the search, too.
    assert max(step["peak"] for step in steps) <= 1.05 * max(most, budget)
    for words in ("Memory block of unknown size", "Leaked callback"):
        assert words not in stderr


@LINUX
def test_a_budget_that_resident_bytes_do_not_keep_to_is_an_error_and_not_held() -> None:
    (start, *_), _ = trained("plain", 3)
    (_, *steps), _ = trained(start["peak"] + 4 * MiB, 9)
    assert "error" in steps[-1]
    assert all(step["stage"] != "active" for step in steps)


class Kineto:
    """Torch's profiler, as a user's loop has it."""

    @staticmethod
    def around() -> Any:
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


class Legacy:
    """The older one."""

    @staticmethod
    def around() -> Any:
        return torch.autograd.profiler.profile(use_kineto=False)


@pytest.mark.parametrize("kind", [Kineto, Legacy])
def test_a_users_profiler_works_in_any_step_of_a_search(kind: Any, tmp_path: Path) -> None:
    model, plain, batch = NAMED["mlp"].model(), NAMED["mlp"].model(), NAMED["mlp"].batch()
    expected = one_step(plain, batch)
    with Session(spill_directory=tmp_path) as session, attached_to(model, "8GiB", session) as attached:
        stages = set()
        for _ in range(8):
            stages.add(attached.stage)
            with kind.around() as profiler:
                assert all(map(torch.equal, one_step(model, batch), expected))
            names = {event.key for event in profiler.key_averages()}
            assert {"aten::addmm", "aten::mm"} <= names
            assert not torch.autograd._profiler_enabled()
        assert {"profiling operators", "profiling memory", "profiling time", "active"} <= stages


def test_a_profiler_that_runs_over_all_steps_sees_the_search(tmp_path: Path) -> None:
    model, batch = NAMED["mlp"].model(), NAMED["mlp"].batch()
    with (
        Session(spill_directory=tmp_path) as session,
        attached_to(model, "8GiB", session) as attached,
        Kineto.around() as profiler,
    ):
        for _ in range(8):
            one_step(model, batch)
        assert attached.stage == "active"
    (forward,) = (each for each in profiler.key_averages() if each.key == "aten::addmm")
    assert forward.count >= 8 * 6


def test_no_profiler_runs_between_steps(tmp_path: Path) -> None:
    model, batch = NAMED["mlp"].model(), NAMED["mlp"].batch()
    with Session(spill_directory=tmp_path) as session, attached_to(model, "8GiB", session) as attached:
        while attached.stage != "active":
            loss = model(batch).square().mean()
            assert not torch.autograd._profiler_enabled()
            loss.backward()
            assert not torch.autograd._profiler_enabled()


# Peaks


def test_one_peak_does_not_make_another_forget() -> None:
    first = ResidentPeak()
    before = first.restart().now
    gone = torch.ones(48 * MiB, dtype=torch.uint8)
    second = ResidentPeak()
    del gone
    now = second.restart().now
    assert first.most() - before >= 40 * MiB
    assert second.most() - now < 24 * MiB


def test_without_the_kernels_mark_a_thread_sees_what_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_mark", lambda: False)
    peak = ResidentPeak()
    before = peak.restart().now
    gone = torch.ones(48 * MiB, dtype=torch.uint8)
    time.sleep(0.1)
    del gone
    assert peak.most() - before >= 40 * MiB
    del peak
    gc.collect()


# malloc

HOLES = """
    import sys, torch
    from spillway.runtime.cpu import set_malloc
    from spillway.runtime.cpu import resident_bytes
    torch.set_num_threads(1)
    print(set_malloc())
    before, pins = resident_bytes(), []
    for _ in range(60):
        tensors = [torch.ones(1 << 18) for _ in range(8)]
        pins.append(torch.ones(1 << 10))
        del tensors[1::2]
        pins.append(torch.ones((1 << 18) + (len(pins) << 8)).sum())
        del tensors
    print(resident_bytes() - before)
"""


def of_holes(**variables: str) -> tuple[str, int]:
    """What is said of malloc in a process that frees tensors between small ones, and bytes that stay resident."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HOLES)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said, stays = found.stdout.splitlines()
    return said, int(stays)


@LINUX
def test_what_is_freed_between_small_tensors_is_not_resident() -> None:
    said, stays = of_holes()
    assert said == f"Spillway sets glibc's mmap threshold to {MAPPED_BYTES >> 10} KiB"
    assert stays < 16 * MiB


@LINUX
def test_a_users_own_setting_of_malloc_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_holes(MALLOC_MMAP_THRESHOLD_=str(1 << 30))[0] == "left alone: MALLOC_MMAP_THRESHOLD_ is set"
    for variable, value, says in (
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1073741824", "left alone: GLIBC_TUNABLES is set"),
        ("LD_PRELOAD", "/nowhere/libjemalloc.so.2", "left alone: LD_PRELOAD names jemalloc"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert cpu._left_alone() == says


def test_without_glibc_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.sys, "platform", "darwin")
    assert cpu._left_alone() == "left alone: the C library is not glibc"


def test_stats_say_how_malloc_is_set(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    with Session(spill_directory=tmp_path) as session:
        context = spillway.offload(session=session)
        with context:
            loss = model(torch.randn(8, 64)).sum()
        loss.backward()
        assert context.stats().malloc == malloc_setting() != ""


def test_a_budgets_share_is_of_resident_bytes(tmp_path: Path) -> None:
    model, batch = NAMED["mlp"].model(), NAMED["mlp"].batch()
    with Session(spill_directory=tmp_path) as session:
        profile = spillway.profile(model, batch, session=session)
    assert profile.static_bytes == pytest.approx(resident_bytes(), rel=0.1)
    plan = spillway.plan(profile, budget="100%", hardware=hardware())
    assert profile.static_bytes < plan.budget < profile.static_bytes + 64 * MiB
