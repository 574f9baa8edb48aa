"""Trainable parameters that are streamed on a GPU: the bits of a resident model, whatever is late."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from adapted import FeedForward
from spillway import policies
from spillway.optim.offloaded_gradient import OffloadedGradient

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS, MiB = 1024, 6, 1 << 20
DEVICE = torch.device("cuda", 0)
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
WAYS: dict[str, dict[str, Any]] = {
    "on the CPU": {"step_on": "cpu"},
    "on the GPU": {"step_on": "gpu"},
    "on both": {"step_on": "auto", "cpu_share": 0.5},
    "on the GPU, no masters": {"step_on": "gpu", "master_dtype": None},
}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(FeedForward(WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 8)
        self.times = times
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        y: Tensor = self.head(x)
        return y


def train(
    model: nn.Module, optimizer: Any, *, steps: int = 4, micro: int = 2, clip: bool = True, reads: bool = True
) -> list[Tensor]:
    """Losses, gradients and norms, and what the CPU reads of the parameters right after each step."""
    found: list[Tensor] = []
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        for number in range(micro):
            torch.manual_seed(10 * step + number)
            loss = model(torch.randn(4, 256, WIDTH, device=DEVICE, dtype=dtype)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        if reads:
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        if clip:
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        if reads:
            found += [each.detach().cpu().clone() for each in model.parameters()]
        optimizer.zero_grad()
    return [*found, *(each.clone() for each in model.state_dict().values())]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        torch.equal(one.cpu(), other.cpu()) for one, other in zip(got, wanted, strict=True)
    )


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session() as made:
        yield made


def run(
    session: spillway.Session,
    make: Callable[[], nn.Module],
    *,
    is_streamed: bool,
    policy: Any = None,
    overlaps: bool = False,
    loop: dict[str, Any],
    **options: Any,
) -> list[Tensor]:
    model = make()
    if not is_streamed:
        model.to(DEVICE)
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW, **options)
    if is_streamed:
        attached = spillway.attach(
            model, policy=policy, stream="layers.*", device=DEVICE, min_bytes=0, session=session, optimizer=optimizer
        )
        assert len(attached.streamed) == BLOCKS
        assert all(each.device == DEVICE for each in model.parameters())
    if overlaps:
        optimizer.overlap_forward(model)
    found = train(model, optimizer, **loop)
    if is_streamed:
        attached.remove()
    optimizer.close()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [spillway.Recompute(), policies.Keep(), policies.Offload()], ids=["r", "k", "o"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits(session: spillway.Session, dtype: torch.dtype, policy: Any, way: str) -> None:
    loop: dict[str, Any] = {}
    wanted = run(session, lambda: Model(dtype), is_streamed=False, loop=loop, **WAYS[way])
    assert same(run(session, lambda: Model(dtype), is_streamed=True, policy=policy, loop=loop, **WAYS[way]), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_steps_in_the_next_forward(session: spillway.Session, way: str) -> None:
    loop = {"reads": False}
    make = lambda: Model(torch.bfloat16)  # noqa: E731
    wanted = run(session, make, is_streamed=False, loop=loop, overlaps=True, **WAYS[way])
    assert same(run(session, make, is_streamed=True, loop=loop, overlaps=True, **WAYS[way]), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("times", [1, 2])
def test_steps_in_backward(session: spillway.Session, times: int, way: str) -> None:
    loop = {"reads": False, "clip": False, "micro": 1}
    make = lambda: Model(torch.bfloat16, times)  # noqa: E731
    wanted = run(session, make, is_streamed=False, loop=loop, step_in_backward=True, **WAYS[way])
    assert same(run(session, make, is_streamed=True, loop=loop, step_in_backward=True, **WAYS[way]), wanted)


@pytest.mark.parametrize("way", ["on the CPU", "on the GPU"])
def test_a_block_that_is_called_twice(session: spillway.Session, way: str) -> None:
    make = lambda: Model(torch.bfloat16, 2)  # noqa: E731
    wanted = run(session, make, is_streamed=False, loop={}, **WAYS[way])
    assert same(run(session, make, is_streamed=True, loop={}, **WAYS[way]), wanted)


def penalized(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """The loss reads parameters at rest, and the loop writes them there."""
    found: list[Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 256, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        penalty = torch.stack([each.float().square().sum() for each in model.parameters()]).sum()
        loss = model(x).float().square().mean() + 1e-6 * penalty
        found += torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch.cuda._sleep(10_000_000)
            for each in model.parameters():
                each.clamp_(-0.05, 0.05)
                each.data.mul_(0.999)
        found += [each.detach().cpu() for each in model.parameters()]
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("times", [1, 2])
def test_parameters_are_used_at_rest(session: spillway.Session, times: int, way: str) -> None:
    found = []
    for is_streamed in (False, True):
        model = Model(torch.bfloat16, times)
        model.to("cpu" if is_streamed else DEVICE)
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, session=session, **ADAMW, **WAYS[way]
        )
        if is_streamed:
            attached = spillway.attach(
                model, stream="layers.*", device=DEVICE, min_bytes=0, session=session, optimizer=optimizer
            )
        found.append(penalized(model, optimizer))
        if is_streamed:
            attached.remove()
            assert all(each.device.type == "cpu" for each in model.parameters())
        optimizer.close()
    assert same(*found)


def test_the_bits_of_torch(session: spillway.Session) -> None:
    plain, model = Model(torch.float32).to(DEVICE), Model(torch.float32)
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), micro=1)
    optimizer = spillway.OffloadedOptimizer(
        model.parameters(), torch.optim.AdamW, step_on="gpu", session=session, **ADAMW
    )
    with spillway.attach(model, stream="layers.*", device=DEVICE, min_bytes=0, session=session, optimizer=optimizer):
        assert same(train(model, optimizer, micro=1), wanted)
    optimizer.close()


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_copies_that_are_late(session: spillway.Session, way: str, overlaps: bool) -> None:
    """Slow kernels on the streams of copies: whoever does not wait reads what was there before."""
    loop = {"reads": not overlaps, "steps": 3}
    make = lambda: Model(torch.bfloat16)  # noqa: E731
    wanted = run(session, make, is_streamed=False, loop=loop, overlaps=overlaps, **WAYS[way])
    backend = session.runtime(DEVICE).backend
    copied = backend.copy

    def late(stream: Any, *memory: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
        copied(stream, *memory)

    backend.copy = late  # type: ignore[method-assign]
    try:
        assert same(run(session, make, is_streamed=True, loop=loop, overlaps=overlaps, **WAYS[way]), wanted)
    finally:
        backend.copy = copied  # type: ignore[method-assign]


@pytest.mark.parametrize("way", WAYS)
def test_memory_and_gradients(way: str) -> None:
    model = Model(torch.bfloat16)
    block = sum(each.nbytes for each in model.layers[0].parameters())
    # Gradients that were offloaded are kept until the limit asks for their memory.
    session = spillway.Session(window=block)
    optimizer = spillway.OffloadedOptimizer(
        model.parameters(), torch.optim.AdamW, session=session, **ADAMW, **WAYS[way]
    )
    with spillway.attach(
        model, policy=spillway.Recompute(), stream="layers.*", device=DEVICE, session=session, optimizer=optimizer
    ):
        train(model, optimizer, steps=2, reads=False)
        torch.cuda.synchronize()
        level = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(4, 256, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        torch.cuda.synchronize()
        assert all(isinstance(each.grad, OffloadedGradient) for each in model.layers.parameters())
        assert all(each.grad.device == DEVICE for each in model.layers.parameters())  # type: ignore[union-attr]
        # Weights and gradients of two blocks, activations of six blocks, and norms.
        assert torch.cuda.max_memory_allocated() - level <= 4 * block + 40 * x.nbytes + 2**20
        assert torch.cuda.memory_allocated() - level <= 2 * block + x.nbytes
        copied = copy.deepcopy(model)
        assert all(torch.equal(one, other) for one, other in zip(copied.parameters(), model.parameters(), strict=True))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    session.close()
