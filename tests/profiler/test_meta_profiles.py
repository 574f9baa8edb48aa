"""A profile without the hardware: the operators, bytes and lifetimes of a measured one, and its times nearly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from allocations import Listener, count_exactly
from budgets import NAMED, Kind, budget_of
from spillway import Hardware, Profile, Session
from spillway.planner.profile import BlockProfile, Static
from spillway.profiler.meta_device import MetaDevice
from spillway.profiler.target_kernels import kernels_of
from steps import Block, assert_nothing_left

ROOT = Path(__file__).parent.parent.parent
MEASURED = Profile.load(ROOT / "tests" / "planner" / "llama_8b_block.json")
"""Of 16 blocks of Llama-8B with 8192 tokens on an H200, gradients being there already."""
H200 = Hardware.named("h200")
META, CUDA = torch.device("meta"), torch.device("cuda")


def module_of(path: str) -> Any:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(f"of_tests_{Path(path).stem}", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


llama = module_of("benchmarks/_llama.py")


class Scaled(nn.Module):
    """The stack of the benchmarks after a scale, as after an embedding, with gradients from the beginning or not."""

    def __init__(self, shape: str, layers: int, tokens: int, *, gradients: bool = False) -> None:
        super().__init__()
        self.gradients = gradients
        self.stack = llama.make_stack(shape, layers, tokens, META, torch.bfloat16)
        width = self.stack.layers[0].shape.hidden
        self.ones = nn.Parameter(torch.ones(width, device=META, dtype=torch.bfloat16))
        self.batch = torch.empty(1, tokens, width, device=META, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        if self.gradients:
            for parameter in self.parameters():
                parameter.grad = torch.empty_like(parameter)
        return self.stack(x * self.ones)

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())


def loss(y: Tensor) -> Tensor:
    return y.float().square().mean()


@functools.cache
def predicted(layers: int, tokens: int) -> tuple[Profile, int]:
    """What there is measured of an H200, and the bytes of its parameters."""
    model = Scaled("8b", layers, tokens, gradients=True)
    return spillway.profile(model, model.batch, loss=loss, hardware="h200"), model.bytes


# Against an H200.


def test_a_block_of_llama_has_the_operators_that_were_measured_on_an_h200() -> None:
    ours, theirs = predicted(16, 8192)[0].kinds[0], MEASURED.kinds[0]
    assert len(ours.operators) == 69
    times = [dataclasses.replace(each, seconds=0.0, module="", line="") for each in ours.operators]
    assert times == [dataclasses.replace(each, seconds=0.0) for each in theirs.operators]
    # The file is from before it was looked at whether autograd saves an input (this one it does not), when it saves
    # last, and whether that has a history.
    assert theirs.values[0].is_input
    values = [dataclasses.replace(value, saved_last_at=None, is_constant=False) for value in ours.values]
    assert values == [dataclasses.replace(theirs.values[0], saved_at=None), *theirs.values[1:]]


def test_what_is_around_the_blocks_has_the_bytes_that_were_measured_on_an_h200() -> None:
    profile, parameters = predicted(16, 8192)
    assert profile.device == "cuda"
    assert profile.middle.change_bytes == MEASURED.middle.change_bytes
    assert profile.middle.peak_bytes == MEASURED.middle.peak_bytes
    assert profile.after.change_bytes == MEASURED.after.change_bytes
    # Parameters and tables, the batch, and what products have for themselves.
    more = 2 * (2 << 20) + (64 << 20) + (32 << 20)
    assert profile.static_bytes == parameters + more
    assert profile.static == Static(weights=parameters, gradients=0, optimizer=0, other=more)


@pytest.mark.parametrize("stream", [None, "auto"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, "offloaded"])
def test_static_bytes_are_told_apart(optimizer: Any, stream: str | None) -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU()) for _ in range(4)]
        model, batch = nn.Sequential(*layers, nn.Linear(1024, 1024, bias=False)), torch.empty(64, 1024)
    known = {"optimizer": optimizer, "stream": stream} if stream else {"optimizer": optimizer}
    profile = spillway.profile(model, batch, loss=loss, hardware="h200", **known)
    each, is_offloaded = 1024 * 1024 * 4, optimizer == "offloaded"
    assert profile.static is not None
    # Without the offloaded optimizer, trained weights stay.
    assert profile.static.weights == each * (1 if stream and is_offloaded else 5)
    assert profile.static.gradients == 0
    assert profile.static.optimizer == pytest.approx(0 if is_offloaded else 2 * 5 * each, abs=1 << 14)
    assert profile.static.total == profile.static_bytes


def test_times_of_a_block_are_near_those_that_were_measured_on_an_h200() -> None:
    ours, theirs = predicted(16, 8192)[0].kinds[0], MEASURED.kinds[0]
    assert ours.forward_seconds == pytest.approx(theirs.forward_seconds, rel=0.1)
    assert ours.backward_seconds == pytest.approx(theirs.backward_seconds, rel=0.15)
    # Shorter ones were measured by the host, which launched them one by one.
    pairs = [(a.seconds, b.seconds) for a, b in zip(ours.operators, theirs.operators, strict=True) if a.seconds > 11e-5]
    assert len(pairs) == 8
    for a, b in pairs:
        assert a == pytest.approx(b, rel=0.2)


@pytest.mark.parametrize(
    ("file", "layers", "tokens"),
    [
        ("2026-11-20-step-8b-16-layers-h200", 16, 8192),
        ("2026-11-21-step-8b-32768-tokens-regions-paired-h200", 8, 32768),
    ],
)
def test_plain_steps_are_near_those_that_were_measured_on_an_h200(file: str, layers: int, tokens: int) -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["rows"]
    keep = next(row for row in rows if row["method"] == "keep")
    profile, parameters = predicted(layers, tokens)
    plan = spillway.plan(profile, budget="1TiB", hardware="h200")
    # The file has what is allocated beyond parameters and gradients.
    assert plan.predicted_peak - 2 * parameters == pytest.approx(keep["peak_bytes"], rel=0.01)
    forward = layers * profile.kinds[0].forward_seconds
    assert forward == pytest.approx(keep["forward_seconds"], rel=0.15)
    assert layers * profile.kinds[0].backward_seconds == pytest.approx(keep["backward_seconds"], rel=0.15)
    assert plan.predicted_seconds == pytest.approx(keep["step_seconds"], rel=0.1)


def test_a_plain_step_of_resnet_50_is_near_what_was_measured_on_an_h200() -> None:
    file = ROOT / "benchmarks" / "results" / "2026-11-21-resnet50-256-images-h200.json"
    plain = next(row for row in json.loads(file.read_text())["rows"] if row["ratio"] == "plain")
    with META:
        model = module_of("examples/resnet50.py").ResNet(contextlib.nullcontext, width=64)
        images, labels = torch.empty(256, 3, 224, 224), torch.empty(256, dtype=torch.int64)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    fake = MetaDevice(CUDA, H200)
    with kernels_of(CUDA, "cudnn"), fake:
        functional.cross_entropy(model(images), labels).backward()
    assert max(fake.levels) == pytest.approx(plain["peak_bytes"], rel=0.01)
    assert fake.seconds == pytest.approx(plain["step_seconds"], rel=0.1)


# Against the CPU.


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


class Pictures(nn.Module):
    """Patches, encoder layers of torch's own with dropout, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, stride=8)
        layers = (nn.TransformerEncoderLayer(64, 4, 128, 0.1, "gelu", batch_first=True) for _ in range(3))
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Tiny(nn.Module):
    """The stack of the benchmarks, in bfloat16 on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = llama.make_stack("tiny", 3, 256, torch.device("cpu"), torch.bfloat16)
        self.ones = nn.Parameter(torch.ones(256, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x * self.ones)


class Skipping(nn.Module):
    """What the first block is given is held until the end, and its input is more than what stays for being small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(64, 64), nn.ModuleList(Block(64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return first * x


KINDS = [
    Kind("skipping", Skipping, lambda: torch.randn(8192, 64)),
    *(NAMED[name] for name in ("mlp", "attention", "convolution", "dropout")),
    Kind("pictures", Pictures, lambda: torch.randn(8, 3, 64, 64)),
    Kind("tiny llama", Tiny, lambda: torch.randn(2, 256, 256, dtype=torch.bfloat16)),
]
LOOSE = {"convolution": 0.1, "tiny llama": 0.04}
"""Peaks that differ: what the CPU's kernels take while they run is known in part."""


def without_times(block: BlockProfile) -> list[Any]:
    return [dataclasses.replace(each, seconds=0.0) for each in block.operators]


def plain_peak(model: nn.Module, batch: Tensor) -> int:
    """Most bytes that a plain step on the CPU has allocated, beyond what is there before."""
    loss(model(batch)).backward()
    model.zero_grad()
    listener = Listener()
    loss(model(batch)).backward()
    listener.close()
    level, peak = 0, 0
    for nbytes in listener.changes:
        level += nbytes
        peak = max(peak, level)
    model.zero_grad()
    return peak


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_profile_for_the_cpu_is_the_one_that_is_measured_there(
    kind: Kind, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exactly(monkeypatch, lambda: 0)
    model, batch = kind.model(), kind.batch()
    ours = spillway.profile(model, batch, loss=loss, hardware="h200", device="cpu")
    theirs = spillway.profile(model, batch, loss=loss, session=session)
    assert ours.device == theirs.device == "cpu"
    assert [(each.name, each.kind) for each in ours.calls] == [(each.name, each.kind) for each in theirs.calls]
    for one, other in zip(ours.calls, theirs.calls, strict=True):
        # Small allocations of other code are counted in what is measured.
        assert one.backward_extra_bytes == pytest.approx(other.backward_extra_bytes, abs=512)
    for a, b in zip(ours.kinds, theirs.kinds, strict=True):
        assert without_times(a) == without_times(b)
        assert a.values == b.values
        assert a.saved_bytes > 0
    assert ours.middle.change_bytes == theirs.middle.change_bytes
    # Both know as much of what is always there.
    there = dataclasses.replace(theirs, static_bytes=ours.static_bytes)
    budget = budget_of(there, 0.5)
    plan = spillway.plan(there, budget=budget, hardware="h200")
    for each in (plan, spillway.plan(there, budget="1TiB", hardware="h200")):
        peaks = [spillway.simulate(profile, each, hardware="h200").peak_bytes for profile in (ours, there)]
        assert peaks[0] == pytest.approx(peaks[1], rel=LOOSE.get(kind.name, 0.001))
    # What is measured of a whole plain step, but for the small sums that backward makes beside saved tensors.
    plain = plain_peak(model, batch)
    for profile, loose in ((theirs, 0.001), (ours, LOOSE["convolution"])):
        keep = spillway.plan(profile, budget="1TiB", hardware="h200").predicted_peak - profile.static_bytes
        assert keep == pytest.approx(plain, rel=loose if kind.name == "convolution" else 1e-4)


class Writes(nn.Module):
    """Writes in place what it made, what it did not make, or what autograd has saved before, to no purpose."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.up, self.down = way, nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.up(x))
        if self.way == "outside":
            self.seen.add_(y.detach().mean(0))
        out = self.down(y).mul_(2)
        if self.way == "saved before":
            z = out.sin()
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.detach().mul_(1.0)
            return x + z
        out += x
        return out


@pytest.mark.parametrize("way", ["made", "outside", "saved before"])
def test_where_blocks_write_in_place_it_knows_what_they_write(way: str, session: Session) -> None:
    model = nn.Sequential(nn.Linear(64, 64), *(Writes(way) for _ in range(3)))
    batch = torch.randn(256, 64)
    ours = spillway.profile(model, batch, loss=loss, hardware="h200", device="cpu")
    theirs = spillway.profile(model, batch, loss=loss, session=session)
    for a, b in zip(ours.kinds, theirs.kinds, strict=True):
        assert without_times(a) == without_times(b)
        assert a.values == b.values
        assert any(each.writes for each in a.operators)
