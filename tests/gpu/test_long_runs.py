"""On an accelerator: the peak by a formula, a hundred steps, the sanitizer, memory that runs out, two processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import spillway
from support import run_script

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROWS, WIDTH, LAYERS = 2048, 2048, 24
HIDDEN = ROWS * WIDTH * 2
"""Bytes of what goes from layer to layer, in bfloat16: 8 MiB."""


class Chain(torch.nn.Module):
    """Linear layers without bias, each of which saves its input and nothing else."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("window", [0, 4 * HIDDEN])
def test_the_peak_is_that_of_the_formula_in_ten_runs(device: torch.device, tier: str, window: int) -> None:
    """Each run is a session of its own; from its third step on, the peak is one number, to the byte."""
    model = Chain(device)
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def peak(context: contextlib.AbstractContextManager[object]) -> int:
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        with context:
            loss = model(x).sum()
        loss.backward()
        return torch.accelerator.max_memory_allocated(device) - before

    keep = [peak(contextlib.nullcontext()) for _ in range(2)][-1]
    assert keep >= (LAYERS - 1) * HIDDEN
    peaks = []
    for _ in range(10):
        with spillway.Session(window=window) as session:
            peaks += [peak(spillway.offload(session=session, tier=tier, min_bytes=0)) for _ in range(5)][2:]
    assert len(set(peaks)) == 1
    # In forward: what is LEAVING; the layer's input, which waits to leave, and its output. In backward: what is
    # RETURNING; the layer's input; the gradients of its output and of its input; the gradient of its weight before it
    # is added. The two windows meet where forward turns into backward.
    weight = WIDTH * WIDTH * 2
    assert peaks[0] <= 2 * window + 3 * HIDDEN + weight + MIB


@pytest.mark.usefixtures("deterministic")
def test_a_hundred_steps_of_training_are_bit_for_bit(device: torch.device) -> None:
    """Weights after a hundred steps of AdamW over decoder layers, whose every error would add up."""

    def train(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with device:
            layers = [
                torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, norm_first=True)
                for _ in range(4)
            ]
            model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(100):
            x = torch.randn(8, 128, 256, device=device, dtype=torch.bfloat16)
            with context:
                loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    plain = train(contextlib.nullcontext())
    with spillway.Session(window=MIB) as session:
        for tier in ("host", "disk"):
            ours = train(spillway.offload(session=session, min_bytes=0, tier=tier))
            assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


TRAIN = """
    import torch, spillway
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device=device) for _ in range(8)))
    x = torch.randn(512, 512, device=device)
    wanted = None
    with spillway.Session(window={window}) as session:
        for offloaded in (False, True, True, True):
            model.zero_grad()
            if offloaded:
                with spillway.offload(session=session, min_bytes=0, tier="{tier}"):
                    loss = model(x).square().mean()
            else:
                loss = model(x).square().mean()
            loss.backward()
            torch.cuda.synchronize()
            grads = [p.grad.clone() for p in model.parameters()]
            if wanted is None:
                wanted = grads
            assert all(map(torch.equal, grads, wanted))
    print("equal")
"""


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("window", [0, 4 * MIB])
def test_the_sanitizer_of_streams_finds_nothing_in_a_models_own_kernels(tier: str, window: int) -> None:
    """Of the lanes' copies it sees nothing: they are no operators of torch's."""
    done = run_script(TRAIN.format(tier=tier, window=window), TORCH_CUDA_SANITIZER="1")
    assert "equal" in done.stdout, done.stderr
    assert "CSAN" not in done.stderr + done.stdout, done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
def test_two_processes_on_two_devices() -> None:
    source = str(Path(spillway.__file__).parent.parent)
    script = textwrap.dedent(TRAIN.format(tier="host", window=MIB))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": str(index), "LOCAL_WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    assert ["equal" in process.communicate(timeout=300)[0] for process in processes] == [True, True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_process_of_the_second_device_leaves_the_first_alone(tier: str) -> None:
    """A context costs half a gigabyte of a device that another rank trains on."""
    script = TRAIN.format(tier=tier, window=MIB).replace('torch.device("cuda", 0)', 'torch.device("cuda", 1)')
    script = (
        "    import torch; torch.cuda.set_device(1)\n" + script + "\n    print(torch._C._cuda_hasPrimaryContext(0))"
    )
    assert run_script(script).stdout.split() == ["equal", "False"]


def test_memory_that_runs_out_in_forward_leaves_nothing_behind(device: torch.device) -> None:
    """The error passes through the context while some of the pass is leaving; what was away is given back."""
    model = Chain(device)
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    model(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with spillway.Session(window=2 * HIDDEN) as session:
        before = torch.accelerator.memory_allocated(device)

        def fail() -> None:
            with spillway.offload(session=session, min_bytes=0):
                hidden = model(x)
                torch.empty(1 << 50, dtype=torch.uint8, device=device)
                hidden.sum().backward()

        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                fail()
            assert session.used_bytes == (0, 0)
            assert torch.accelerator.memory_allocated(device) - before < MIB
        model.zero_grad()
        with spillway.offload(session=session, min_bytes=0):
            loss = model(x).sum()
        loss.backward()
        assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), wanted, strict=True))  # type: ignore[arg-type]


def test_host_memory_that_cannot_be_registered_keeps_tensors_and_is_said_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    class Refusing:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
            nonlocal calls
            calls += 1
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    model = Chain(device)
    x = torch.randn(ROWS, WIDTH, device=device, dtype=torch.bfloat16)
    with spillway.Session(window=0) as session:
        for _ in range(3):
            context = spillway.offload(session=session, min_bytes=0)
            with context:
                loss = model(x).sum()
            loss.backward()
            stats = context.stats()
            assert stats.offloaded_bytes == 0
            # The last of them waited to leave when backward began.
            assert stats.kept_bytes + stats.reused_bytes == stats.saved_bytes > 0
            assert [("cudaHostRegister" in note) for note in stats.notes] == [True]
        assert calls == 1


def test_stalls_are_told_by_the_devices_own_clock(device: torch.device) -> None:
    """An offloaded chain of cheap layers waits for the link, and the host does not."""
    x = torch.randn(64 * MIB, device=device, requires_grad=True)
    with spillway.Session(window=0) as session:
        for _ in range(2):
            context = spillway.offload(session=session, min_bytes=0)
            with context:
                hidden = x * 1
                for _ in range(8):
                    hidden = hidden.sin()
            hidden.sum().backward()
        torch.accelerator.synchronize(device)
        stats = context.stats()
    # 256 MiB take at least 4 ms over any link that there is.
    assert stats.out_stall_seconds > 0.004
    assert stats.back_stall_seconds > 0.004
    assert stats.stall_seconds == stats.out_stall_seconds + stats.back_stall_seconds
