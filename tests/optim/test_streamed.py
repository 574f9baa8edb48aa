"""State in pinned memory that is stepped on the device: memory here and there, and what happens when there is none."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW

import spillway
from optim.store_loops import Loop, net, same, session, small_pieces
from spillway import OffloadedOptimizer, TierFullError
from spillway.runtime.arena import PAGE, pages
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import CpuBackend

CPU = torch.device("cpu")
BF16 = torch.bfloat16
KiB = 1024


class Counting(CpuBackend):
    """Counts the bytes that the runtime allocates on the device."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now = 0
        self.peak = 0

    def serve(self, _: torch.device) -> CpuBackend:
        return self

    def empty(self, nbytes: int) -> Bytes:
        memory = super().empty(nbytes)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(memory.storage, self._gone, nbytes)
        return memory

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.fixture
def backend() -> Counting:
    return Counting()


def wide(dtype: torch.dtype = BF16) -> nn.Sequential:
    """Some 200,000 elements in four matrices, and small ones between them."""
    torch.manual_seed(0)
    layers = [nn.Linear(33, 256), *(nn.Linear(256, 256) for _ in range(3)), nn.Linear(256, 4)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh()))).to(dtype)


def elements(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("window", [64 * KiB, 256 * KiB])
def test_the_device_has_no_more_than_the_window(
    backend: Counting, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    small_pieces(monkeypatch)
    model = wide()
    with spillway.Session(backend=backend.serve, window=window) as where:
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, step_on="gpu", lr=1e-2, fused=True)
        Loop(steps=3, dtype=BF16).run(model, optimizer)
        # Of 2.8 MB of masters and states. It is used, too: a load is a 64th of it in elements, of 14 bytes.
        assert window * 3 // 4 < backend.peak <= window
        assert 12 * elements(model) > 9 * window
        assert backend.now == 0
        optimizer.close()


def test_what_cannot_be_cut_comes_whole_and_alone(backend: Counting) -> None:
    model = wide()
    with spillway.Session(backend=backend.serve, window=8 * KiB) as where:
        optimizer = OffloadedOptimizer(model.parameters(), Adafactor, session=where, step_on="gpu")
        Loop(steps=3, dtype=BF16).run(model, optimizer)
        # A master of a matrix of 256 x 256, its row and column, and its gradient, each in a line of its own.
        state = 4 * 256 * 256 + 2 * 4 * 256
        assert backend.peak == -(-state // 512) * 512 + 2 * 256 * 256
        optimizer.close()


def test_the_host_has_what_the_state_needs(backend: Counting) -> None:
    model = wide()
    with spillway.Session(backend=backend.serve, window=64 * KiB) as where:
        optimizer = OffloadedOptimizer(
            model.parameters(), AdamW, session=where, step_on="gpu", lr=1e-2, fused=True, offload_gradients=False
        )
        Loop(steps=2, dtype=BF16).run(model, optimizer)
        # 12 bytes an element, and less than a page for each tensor that has pages of its own.
        state = 12 * elements(model)
        assert state <= where.used_bytes[0] < state + 3 * 5 * PAGE
        optimizer.close()
        assert where.used_bytes == (0, 0)


def test_without_masters_or_state_nothing_is_on_the_host(backend: Counting) -> None:
    model = wide(torch.float32)
    with spillway.Session(backend=backend.serve) as where:
        optimizer = OffloadedOptimizer(
            model.parameters(), SGD, session=where, step_on="gpu", lr=0.1, offload_gradients=False
        )
        Loop(steps=2).run(model, optimizer)
        assert (backend.peak, where.used_bytes) == (0, (0, 0))
        optimizer.close()


@pytest.fixture
def tight(tmp_path: Path) -> Iterator[spillway.Session]:
    """A session with 64 pages of host memory."""
    with session(tmp_path, host_budget=64 * PAGE) as where:
        yield where


def fill(where: spillway.Session) -> Any:
    """Take what host memory is left; calling what this gives gives it back."""
    arena = where.runtime(CPU).arena  # type: ignore[attr-defined]
    blocks = []
    while True:
        try:
            blocks.append(arena.allocate(PAGE))
        except TierFullError:
            break

    def give_back() -> None:
        for block in blocks:
            arena.free(block)

    return give_back


def test_without_room_nothing_is_stepped_and_nothing_lost(tight: spillway.Session) -> None:
    model, plain = net(BF16), net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=tight, step_on="gpu", lr=1e-2, fused=True)
    batch = torch.randn(8, 33, dtype=BF16)
    model(batch).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    give_back = fill(tight)
    before = [one.detach().clone() for one in model.parameters()]
    for _ in range(2):
        with pytest.raises(TierFullError, match="host memory: got a request for"):
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    assert not any(one.grad is None for one in model.parameters())
    give_back()
    optimizer.step()
    expected = Loop(steps=0)
    masters = [nn.Parameter(one.detach().float()) for one in plain.parameters()]
    gradients = torch.autograd.grad(plain(batch).square().mean(), list(plain.parameters()))
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient.float()
    assert torch.equal(nn.utils.clip_grad_norm_(masters, 0.01), norm)
    AdamW(masters, lr=1e-2, fused=True).step()
    assert all(torch.equal(one, master.to(BF16)) for one, master in zip(model.parameters(), masters, strict=True))
    assert expected.norms == []
    optimizer.close()
    assert tight.used_bytes == (0, 0)


def test_a_state_that_was_not_foreseen_stays_until_there_is_room(tight: spillway.Session) -> None:
    # Momentum from the second step on, when there is no room for it.
    models = net(), net()
    optimizer = OffloadedOptimizer(
        models[0].parameters(), SGD, session=tight, step_on="gpu", lr=0.1, fused=True, offload_gradients=False
    )
    reference = SGD(models[1].parameters(), lr=0.1, fused=True)
    batches = torch.randn(4, 8, 33)

    def step(index: int) -> None:
        for model, one in zip(models, (optimizer, reference), strict=True):
            one.zero_grad()
            model(batches[index]).square().mean().backward()
        reference.step()
        optimizer.step()

    step(0)
    for one in (optimizer, reference):
        one.param_groups[0]["momentum"] = 0.9
    give_back = fill(tight)
    with pytest.raises(TierFullError):
        step(1)
    # All of them are in one load, and were stepped.
    assert same(*models)
    found = optimizer.state_dict()["state"]
    assert all(
        torch.equal(found[index]["momentum_buffer"], state["momentum_buffer"])
        for index, state in reference.state_dict()["state"].items()
    )
    del found
    # Now it is foreseen.
    with pytest.raises(TierFullError):
        optimizer.step()
    assert same(*models)
    give_back()
    step(2)
    assert same(*models)
    assert tight.used_bytes[0] == pages(sum(-(-4 * one.numel() // 64) * 64 for one in models[0].parameters()))
    optimizer.close()


def test_gradients_that_are_there_are_used_as_they_are(backend: Counting) -> None:
    model = net()
    with spillway.Session(backend=backend.serve) as where:
        optimizer = OffloadedOptimizer(
            model.parameters(), AdamW, session=where, step_on="gpu", lr=1e-2, offload_gradients=False
        )
        Loop(steps=2).run(model, optimizer)
        state = 8 * elements(model)
        assert state <= optimizer.stats().received_bytes <= state + 4096
        optimizer.close()


def test_autograd_refuses_to_go_back_through_what_was_stepped(tmp_path: Path) -> None:
    for dtype in (torch.float32, BF16):
        model = net(dtype)
        with session(tmp_path) as where:
            optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, step_on="gpu")
            Loop(steps=1, dtype=dtype).run(model, optimizer)
            loss = model(torch.randn(8, 33, dtype=dtype)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            optimizer.close()


@pytest.mark.parametrize("options", [{"tier": "disk"}, {"step_on": "gpu"}], ids=["disk", "gpu"])
def test_without_memory_for_master_weights_nothing_steps(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that was saved without master weights needs memory for them in the next step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))).bfloat16()
    with spillway.Session() as session:
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, lr=0.01, session=session, **options)
        model(torch.ones(4, 1024).bfloat16()).sum().backward()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            del state["master"]
        optimizer.load_state_dict(saved)
        tier = type(optimizer._placement.stores[0].tier)
        reserve, left = tier.reserve, [1]

        def refuse(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise TierFullError("full")
            return reserve(*args)

        monkeypatch.setattr(tier, "reserve", refuse)
        before = copy.deepcopy(model.state_dict())
        model(torch.ones(4, 1024).bfloat16()).sum().backward()
        with pytest.raises(TierFullError):
            optimizer.step()
        monkeypatch.undo()
        optimizer.synchronize()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        optimizer.step()
        optimizer.close()
