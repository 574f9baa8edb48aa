"""Recomputed regions on an accelerator: models, late copies, operators, compiled blocks, memory."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway
from operator_bench import IGNORED, first_dtype, name_of
from recompute.models import HOWS, MODELS, plainly, recomputed, steps
from recompute.region_bench import RegionBench, few_samples
from recompute.regions import HiddenAttribute
from spillway.checkpointing.call import CheckpointedCall
from spillway.checkpointing.partial_replay import PartialReplay
from spillway.errors import RecomputeError
from spillway.runtime.accelerator import AcceleratorBackend
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.device import backend_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = [
    pytest.mark.gpu,
    *IGNORED,
    pytest.mark.filterwarnings("ignore:.*defaults to a non-deterministic algorithm:UserWarning"),
]

DEVICE = "cuda"
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def as_deterministic_as_can_be() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session(window=KIB) as session:
        yield session
        session.synchronize()
        assert session.used_bytes == (0, 0)


class LateBackend(AcceleratorBackend):
    """Every copy starts milliseconds after it could."""

    def copy(self, lane: Stream, destination: Bytes, source: Bytes) -> None:
        with lane:  # type: ignore[attr-defined]
            torch.cuda._sleep(1_000_000)
        super().copy(lane, destination, source)


@pytest.fixture
def late_session() -> Iterator[spillway.Session]:
    make = lambda device: LateBackend(device) if device.type == DEVICE else backend_for(device)  # noqa: E731
    with spillway.Session(window=0, backend=make) as session:
        yield session
        session.synchronize()
        assert session.used_bytes == (0, 0)


def compare(
    session: spillway.Session, name: str, how: dict[str, Any], *, dropout: float = 0.3, autocast: bool = False
) -> None:
    run = partial(steps, name, dropout=dropout, autocast=autocast, device=DEVICE)
    keep = partial(spillway.offload, policy=spillway.policies.Keep(), min_bytes=0, session=session)
    plain, again = run(plainly, keep), run(plainly, keep)
    if not all(map(torch.equal, plain, again)):
        pytest.skip("plain PyTorch gives other bits from run to run")
    ours = run(recomputed(session=session, **how), keep)
    assert [torch.equal(a, b) for a, b in zip(ours, plain, strict=True)] == [True] * len(plain)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "how",
    [*HOWS.values(), {"use_reentrant": True}, {"use_reentrant": True, "offload": "inputs"}],
    ids=[*HOWS, "reentrant", "reentrant-inputs"],
)
@pytest.mark.parametrize("autocast", [False, True], ids=["full", "autocast"])
def test_a_model_is_the_same_in_every_bit(
    session: spillway.Session, name: str, how: dict[str, Any], autocast: bool
) -> None:
    compare(session, name, how, autocast=autocast)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", HOWS)
def test_late_copies_change_no_bit(late_session: spillway.Session, name: str, how: str) -> None:
    compare(late_session, name, HOWS[how])


class Scaled(nn.Module):
    # Spillway would put back what it sees.
    scale, calls = HiddenAttribute(1.0), HiddenAttribute(0)

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(functional.gelu(self.up(x * self.scale)))


def test_a_re_run_that_made_something_else_is_refused() -> None:
    """Before that, another number in both runs is right, bit by bit."""
    torch.manual_seed(0)
    block = Scaled().to(DEVICE)
    x = torch.randn(8, 64, device=DEVICE, requires_grad=True)
    session = spillway.Session(window=KIB)

    def loss_of(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        return call(block, x * 1).square().sum()

    def ours(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = spillway.recompute(block, x, session=session, verify="always")
        return y

    for scale in (1.0, 1.0, 1.0, 1.5, 1.25):
        block.scale = scale
        (expected,) = torch.autograd.grad(loss_of(lambda block, x: block(x)), x)
        block.calls = 0
        (found,) = torch.autograd.grad(loss_of(ours), x)
        assert torch.equal(found, expected)
    assert block.calls == 2, "it ran again, and its operators did not run alone"
    loss = loss_of(ours)
    block.scale = 2.0
    with pytest.raises(RecomputeError, match="Scaled gave other values when"):
        torch.autograd.grad(loss, x)
    session.close()


class Attention(nn.Module):
    """With dropout inside of the kernel, whose seed and offset are among its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).movedim(-3, 0).transpose(-2, -3).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return x + functional.dropout(attended.transpose(1, 2).flatten(2), 0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", HOWS)
def test_attention_draws_what_it_drew(session: spillway.Session, how: str, dtype: torch.dtype) -> None:
    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(Attention() for _ in range(3)).to(DEVICE, dtype)
        x = torch.randn(2, 128, 64, device=DEVICE, dtype=dtype, requires_grad=True)
        hidden = x * 1
        for block in model:
            hidden = call(block, hidden)
        hidden.float().square().sum().backward()
        after = torch.rand(4, device=DEVICE)
        return [after, *(leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None)]

    plain, again = gradients(plainly), gradients(plainly)
    if not all(map(torch.equal, plain, again)):
        pytest.skip("plain PyTorch gives other bits from run to run")
    for _ in range(2):
        ours = gradients(partial(spillway.recompute, session=session, **HOWS[how]))
        assert [torch.equal(a, b) for a, b in zip(ours, plain, strict=True)] == [True] * len(plain)


class Layer(nn.Module):
    """Attention that draws nothing, though by its schema it may, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).movedim(-3, 0).transpose(-2, -3).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


@pytest.mark.parametrize("sums", [True, False], ids=["sums-too", "attention"])
@pytest.mark.parametrize("leaves", [True, False], ids=["offload", "save"])
def test_what_attention_gave_is_handed_in(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch, leaves: bool, sums: bool
) -> None:
    replays = 0
    make = PartialReplay.__init__

    def counted(self: PartialReplay, *args: Any, **kwargs: Any) -> None:
        nonlocal replays
        replays += 1
        make(self, *args, **kwargs)

    monkeypatch.setattr(PartialReplay, "__init__", counted)
    torch.manual_seed(0)
    model = nn.ModuleList(Layer() for _ in range(3)).to(DEVICE, torch.bfloat16)

    def gradients(call: Callable[..., Any], seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        x = torch.randn(2, 128, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        hidden = x * 1
        for block in model:
            hidden = call(block, hidden)
        hidden.float().square().sum().backward()
        found = [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    chosen = ["attention", *(["aten::add.Tensor"] if sums else [])]
    how: dict[str, Any] = {"offload": ["inputs", *chosen]} if leaves else {"save": chosen}
    for seed in range(5):
        ours = gradients(partial(spillway.recompute, session=session, **how), seed)
        expected = gradients(plainly, seed)
        assert [torch.equal(a, b) for a, b in zip(ours, expected, strict=True)] == [True] * len(expected)
    # But for the first call of each block, which is recorded.
    assert replays == 3 * 4


@pytest.mark.parametrize("how", [{}, {"save": "pointwise"}], ids=["nothing", "some"])
def test_seeds_of_attention_that_no_kernel_wrote_are_compared_in_no_size(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    model, numbers, tried = nn.ModuleList(Layer() for _ in range(3)).to(DEVICE, torch.bfloat16), itertools.count(), []
    runs = CheckpointedCall._replay_once

    def after_others(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Whoever asks for so little memory next finds something else in it each time.
        left = [torch.full((), next(numbers), dtype=torch.int64, device=DEVICE) for _ in range(256)]
        left.clear()
        tried.append(True)
        return runs(self, *args, **kwargs)

    monkeypatch.setattr(CheckpointedCall, "_replay_once", after_others)
    for tokens in (64, 128, 192, 256):
        x = torch.randn(2, tokens, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        with spillway.offload(session=session) as context:
            hidden = x * 1
            for block in model:
                hidden = spillway.recompute(block, hidden, session=session, **how)
        hidden.float().square().sum().backward()
        assert not [note for note in context.stats().notes if "whole" in note]
    assert tried


DIFFERENTIABLE = [
    each for each in invocations.op_db if each.supports_autograd and first_dtype(each.supported_backward_dtypes(DEVICE))
]


@pytest.fixture(scope="module")
def bench() -> Iterator[RegionBench]:
    before = spillway.Session._default
    bench = RegionBench(DEVICE)
    yield bench
    bench.session.close()
    spillway.Session._default = before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=name_of)
def test_an_operator_in_a_region_is_the_same_in_every_bit(operator: Any, bench: RegionBench) -> None:
    if name_of(operator) == "nn_functional_pad_reflect":
        pytest.skip("its gradient changes with what lies beside it in memory: see test_gpu_operators.py")
    dtype = first_dtype(operator.supported_backward_dtypes(DEVICE))
    bench.check(name_of(operator), lambda: few_samples(operator, dtype, DEVICE), errors=True)


WIDTH, ROWS = 1024, 4096


def blocks(count: int) -> nn.ModuleList:
    """Each saves its input and three results of 16 MiB."""
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(count)
    ).to(DEVICE)


def peak(model: nn.ModuleList, call: Callable[..., Any]) -> tuple[int, list[torch.Tensor]]:
    """Of the second step; with the gradients."""
    for _ in range(3):
        # Gradients that are there already are not part of the peak.
        model.zero_grad(set_to_none=False)
        torch.manual_seed(0)
        hidden = torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for block in model:
            hidden = call(block, hidden)
        hidden.square().mean().backward()
        del hidden
        torch.cuda.synchronize()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cuda.max_memory_allocated() - before, gradients


def test_regions_take_what_checkpointing_takes_and_less_if_inputs_leave() -> None:
    model, one = blocks(8), ROWS * WIDTH * 4
    by_torch, expected = peak(model, lambda block, x: checkpoint(block, x, use_reentrant=False))
    with spillway.Session(window=one) as session:
        ours, got = peak(model, partial(spillway.recompute, session=session))
        away, got_away = peak(model, partial(spillway.recompute, session=session, offload="inputs"))
    for gradients in (got, got_away):
        assert all(map(torch.equal, gradients, expected))
    # The sums of what a region gave are small.
    assert ours <= by_torch + MIB
    # Of the inputs of eight regions, at most what is on its way out, what is on its way back, and the one in use stay.
    assert away <= by_torch - 4 * one


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_block_in_a_region_is_computed_again(backend: str) -> None:
    torch._dynamo.reset()
    model = blocks(4)
    compiled = nn.ModuleList(torch.compile(block, backend=backend) for block in model)
    plain_bytes, expected = peak(compiled, plainly)
    with spillway.Session() as session:
        our_bytes, got = peak(compiled, partial(spillway.recompute, session=session))
        assert session.stats().notes == ()
    torch._dynamo.reset()
    assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * len(expected)
    assert our_bytes < plain_bytes - 3 * ROWS * WIDTH * 4
