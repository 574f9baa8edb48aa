"""Streamed parameters on a GPU: the bits of a resident model, memory to the byte, and time by the link's bound."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from adapted import Block, Scaled
from spillway import policies

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS, MiB = 1024, 6, 1 << 20
DEVICE = torch.device("cuda", 0)


def model_on(device: torch.device | str, block: Callable[[int], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(block(WIDTH) for _ in range(BLOCKS))).to(device, torch.bfloat16)


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 256, WIDTH, device=DEVICE, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        found += [loss.detach().clone(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.detach().clone() for each in model.parameters())]


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session() as made:
        yield made


@pytest.mark.parametrize("policy", [spillway.Recompute(), spillway.Recompute(save="matmul"), policies.Keep()], ids=str)
def test_bits_and_memory(session: spillway.Session, policy: Any) -> None:
    wanted = train(model_on(DEVICE))
    model = model_on("cpu")
    with spillway.attach(model, policy=policy, stream="*", device=DEVICE, min_bytes=MiB, session=session) as attached:
        for got, expected in zip(train(model), wanted, strict=True):
            assert torch.equal(got.to(DEVICE), expected)
        assert len(attached.streamed) == BLOCKS
        frozen = 2 * 4 * WIDTH * WIDTH * 2
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        level = torch.cuda.memory_allocated()
        with torch.no_grad():
            model(torch.randn(1, 1, WIDTH, device=DEVICE, dtype=torch.bfloat16))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - level
        assert 2 * frozen <= peak <= 2 * frozen + MiB
        assert torch.cuda.memory_allocated() == level
    assert all(each.device.type == "cpu" for each in model.parameters())


def test_a_frozen_parameter_at_rest_is_pinned_memory_on_the_device(session: spillway.Session) -> None:
    plain, model = model_on(DEVICE), model_on("cpu")
    with spillway.attach(model, stream="*", device=DEVICE, min_bytes=0, session=session):
        level = torch.cuda.memory_allocated()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.device == DEVICE
            assert torch.equal(ours, theirs) and torch.equal(ours.cpu(), theirs.cpu())
            assert torch.equal(ours.detach().clone(), theirs) and torch.equal(ours.float().sum(), theirs.float().sum())
            with torch.no_grad():
                ours.copy_(theirs.cpu() * 2)
                theirs.mul_(2)
            assert torch.equal(ours, theirs)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert all(torch.equal(loaded[name], each) for name, each in plain.state_dict().items())
        del loaded
        assert torch.cuda.memory_allocated() <= level + MiB


@pytest.mark.parametrize("policy", [spillway.Recompute(), policies.Keep(), policies.Offload()], ids=str)
@pytest.mark.parametrize("block", [Scaled, Block])
def test_all_parameters_and_evaluation(
    session: spillway.Session, block: Callable[[int], nn.Module], policy: Any
) -> None:
    plain, model = model_on(DEVICE, block), model_on("cpu", block)
    wanted = train(plain)
    with spillway.attach(model, policy=policy, stream="*", device=DEVICE, min_bytes=0, session=session):
        assert all(torch.equal(got.to(DEVICE), expected) for got, expected in zip(train(model), wanted, strict=True))
        # Gradients in evaluation, and of a block alone: without Spillway's hooks.
        for ours, theirs in ((model.eval(), plain.eval()), (model[1], plain[1])):
            found = []
            for call, each in ((ours, model), (theirs, plain)):
                each.zero_grad()
                call(torch.ones(4, 256, WIDTH, device=DEVICE, dtype=torch.bfloat16)).float().square().sum().backward()
                found.append([one.grad.clone() for one in each.parameters() if one.grad is not None])
            assert all(map(torch.equal, *found))


def test_a_write_right_after_a_call_is_for_the_next_one(session: spillway.Session) -> None:
    plain, model = model_on(DEVICE).eval(), model_on("cpu").eval()
    x = torch.randn(4, 256, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    with spillway.attach(model, stream="*", device=DEVICE, min_bytes=0, session=session), torch.no_grad():
        for _ in range(4):
            torch.cuda._sleep(20_000_000)
            found = []
            for each in (plain, model):
                found.append(each(x))
                for parameter in each.parameters():
                    parameter.mul_(0.5)
            assert torch.equal(*found)


def test_copies_that_are_late(session: spillway.Session) -> None:
    """A slow kernel on the copy stream: whoever does not wait reads what was there before."""
    wanted = train(model_on(DEVICE))
    model = model_on("cpu")
    with spillway.attach(model, policy=spillway.Recompute(), stream="*", device=DEVICE, session=session) as attached:
        _, back = session.runtime(DEVICE).mover.streams
        streams: Any = attached._root.streams
        fetched = streams.fetched

        def late(*args: Any, **options: Any) -> Any:
            with torch.cuda.stream(back):  # type: ignore[arg-type]
                torch.cuda._sleep(2_000_000)
            return fetched(*args, **options)

        streams.fetched = late
        assert all(torch.equal(got.to(DEVICE), expected) for got, expected in zip(train(model), wanted, strict=True))


@pytest.mark.parametrize("policy", [spillway.Recompute(), policies.Keep(), policies.Offload()], ids=str)
def test_weights_that_stay_in_their_files(session: spillway.Session, tmp_path: Path, policy: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(model_on("cpu").state_dict(), tmp_path / "model.safetensors")
    wanted, model = train(model_on(DEVICE)), model_on("meta")
    spillway.load_weights(model, tmp_path, device=DEVICE, session=session, on_disk=True)
    with spillway.attach(model, policy=policy, stream="*", device=DEVICE, min_bytes=MiB, session=session) as attached:
        assert len(attached.streamed) == BLOCKS
        large = [each for each in model.parameters() if not each.requires_grad and each.nbytes >= MiB]
        # At rest they are tensors of the CPU, and take no memory of the session.
        assert len(large) == 2 * BLOCKS and all(each.device.type == "cpu" for each in large)
        assert session.used_bytes == (0, 0)
        assert all(torch.equal(got.to(DEVICE), expected) for got, expected in zip(train(model), wanted, strict=True))
        model.eval()
        plain = model_on(DEVICE).eval()
        plain.load_state_dict(model.state_dict())
        x = torch.randn(4, 256, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        with torch.no_grad():
            for _ in range(3):
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    ours.mul_(0.5)
                    theirs.mul_(0.5)
                assert torch.equal(model(x), plain(x))
        # Blocks whose weights stay on the GPU, and stream again.
        streams: Any = attached._root.streams
        for resident in (("0", "3"), ()):
            streams.place(resident)
            assert torch.equal(model(x), plain(x))
        assert all(each.device.type == "cpu" for each in large)
    assert all(each.device.type == "cpu" for each in model.parameters())


def test_a_copy_trains_alone(session: spillway.Session) -> None:
    model = model_on("cpu")
    with spillway.attach(model, policy=spillway.Recompute(), stream="*", device=DEVICE, session=session):
        copied = copy.deepcopy(model).to(DEVICE)
        ours, theirs = train(model), train(copied)
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(ours, theirs, strict=True))
