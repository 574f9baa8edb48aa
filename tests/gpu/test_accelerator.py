"""The engine on an accelerator: bit for bit, and no race that a slow lane would show."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch

import spillway
from runtime.scenarios import expect_same, step
from spillway.runtime import accelerator
from spillway.runtime.accelerator import CudaDriver
from spillway.runtime.bytes import Bytes

pytestmark = pytest.mark.gpu

MIB = 1 << 20


class Block(torch.nn.Module):
    """A decoder layer, as small as it can be: norm, attention, norm, gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = torch.nn.RMSNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.norm2 = torch.nn.RMSNorm(width)
        self.gate = torch.nn.Linear(width, 3 * width, bias=False)
        self.up = torch.nn.Linear(width, 3 * width, bias=False)
        self.down = torch.nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = self.norm2(x)
        result: torch.Tensor = x + self.down(torch.nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return result


@pytest.fixture
def model(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    with device:
        return torch.nn.Sequential(*(Block(512, 8) for _ in range(6))).to(torch.bfloat16)


@pytest.fixture
def batch(device: torch.device) -> torch.Tensor:
    return torch.randn(4, 512, 512, device=device, dtype=torch.bfloat16)


def sleep(milliseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("window", [0, 8 * MIB, 1024 * MIB])
def test_steps_are_bit_for_bit(model: torch.nn.Module, batch: torch.Tensor, tier: str, window: int) -> None:
    wanted = step(model, batch, contextlib.nullcontext())
    with spillway.Session(window=window) as session:
        offload = spillway.offload(session=session, tier=tier, min_bytes=0)
        for _ in range(4):
            expect_same(step(model, batch, offload), wanted)
        stats = offload.stats()
        if window < 1024 * MIB:
            assert stats.reloaded_bytes > 0.5 * stats.saved_bytes
        session.synchronize()
        assert session.used_bytes == (0, 0)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("slow", ["out", "back"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_slow_lanes_change_nothing(model: torch.nn.Module, batch: torch.Tensor, slow: str, tier: str) -> None:
    """Each copy of one lane is made to come late: a missing wait would read or reuse bytes too early."""
    wanted = step(model, batch, contextlib.nullcontext())
    with spillway.Session(window=4 * MIB) as session:
        backend = session.runtime(batch.device).backend
        lane = dict(zip(("out", "back"), session.runtime(batch.device).mover.streams, strict=True))[slow]
        copy = backend.copy

        def late_copy(on: object, destination: Bytes, source: Bytes) -> None:
            if on == lane:
                with lane:  # type: ignore[attr-defined]
                    sleep(0.2)
            copy(on, destination, source)  # type: ignore[arg-type]
            if on == lane:
                with lane:  # type: ignore[attr-defined]
                    sleep(0.2)

        backend.copy = late_copy  # type: ignore[method-assign]
        for _ in range(3):
            expect_same(step(model, batch, spillway.offload(session=session, tier=tier, min_bytes=0)), wanted)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("refuses", [False, True])
def test_copies_are_the_drivers_and_where_it_refuses_torchs(
    model: torch.nn.Module, batch: torch.Tensor, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[bool] = []
    copy = CudaDriver.copy

    def counted(*args: object) -> bool:
        queued.append(not refuses and copy(*args))  # type: ignore[arg-type]
        return queued[-1]

    monkeypatch.setattr(CudaDriver, "copy", counted)
    wanted = step(model, batch, contextlib.nullcontext())
    with spillway.Session(window=4 * MIB) as session:
        for _ in range(3):
            expect_same(step(model, batch, spillway.offload(session=session, min_bytes=0)), wanted)
    assert queued == [not refuses] * len(queued) and len(queued) > 100


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("refused", [None, 0, 3])
def test_what_comes_back_in_parts_by_two_streams_is_whole(
    model: torch.nn.Module, batch: torch.Tensor, refused: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is late, and the driver refuses none of them, or one of five."""
    streams: list[int] = []
    copy = CudaDriver.copy

    def late(driver: CudaDriver, device: int, stream: int, destination: int, source: int, nbytes: int) -> bool:
        streams.append(stream)
        if len(streams) % 5 == refused:
            return False
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            torch.cuda._sleep(100_000)
        return copy(driver, device, stream, destination, source, nbytes)

    monkeypatch.setattr(CudaDriver, "copy", late)
    monkeypatch.setattr(accelerator, "_PART", 96 << 10)
    wanted = step(model, batch, contextlib.nullcontext())
    for trains_with_others in (False, True):
        monkeypatch.setattr(accelerator, "many_processes", lambda there=trains_with_others: there)
        streams.clear()
        with spillway.Session(window=4 * MIB) as session:
            for _ in range(3):
                expect_same(step(model, batch, spillway.offload(session=session, min_bytes=0)), wanted)
        assert len(set(streams)) == 2 + trains_with_others


@pytest.mark.usefixtures("deterministic")
def test_slow_compute_changes_nothing(model: torch.nn.Module, batch: torch.Tensor) -> None:
    """The host runs far ahead of the device."""
    wanted = step(model, batch, contextlib.nullcontext())
    with spillway.Session(window=4 * MIB) as session:
        for _ in range(3):
            sleep(50)
            expect_same(step(model, batch, spillway.offload(session=session, min_bytes=0)), wanted)


@pytest.mark.usefixtures("deterministic")
def test_the_compute_stream_is_the_one_of_the_moment(model: torch.nn.Module, batch: torch.Tensor) -> None:
    wanted = step(model, batch, contextlib.nullcontext())
    with spillway.Session(window=4 * MIB) as session:
        for _ in range(3):
            stream = torch.Stream(device=batch.device)
            stream.wait_stream(torch.accelerator.current_stream(batch.device))
            with stream:
                sleep(5)
                got = step(model, batch, spillway.offload(session=session, min_bytes=0))
            torch.accelerator.current_stream(batch.device).wait_stream(stream)
            expect_same(got, wanted)


def test_the_peak_falls_and_is_the_same_in_every_step(model: torch.nn.Module, batch: torch.Tensor) -> None:
    device = batch.device

    def peak(context: contextlib.AbstractContextManager[object]) -> int:
        model.zero_grad(set_to_none=False)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        with context:
            loss = model(batch).square().mean()
        loss.backward()
        return torch.accelerator.max_memory_allocated(device) - before

    step(model, batch, contextlib.nullcontext())
    keep = peak(contextlib.nullcontext())
    with spillway.Session(window=4 * MIB) as session:
        offload = spillway.offload(session=session, min_bytes=0)
        peaks = [peak(offload) for _ in range(12)][2:]
    assert len(set(peaks)) == 1
    assert peaks[0] < 0.5 * keep


def test_nothing_stays_on_the_device(model: torch.nn.Module, batch: torch.Tensor) -> None:
    device = batch.device
    step(model, batch, contextlib.nullcontext())
    model.zero_grad()
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    with spillway.Session(window=4 * MIB) as session:
        for _ in range(2):
            with spillway.offload(session=session, min_bytes=0):
                loss = model(batch).square().mean()
            del loss
            assert torch.accelerator.memory_allocated(device) - before < 4 * MIB
            assert session.used_bytes == (0, 0)


def test_out_of_memory_in_unpack_can_be_survived(
    model: torch.nn.Module, batch: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = step(model, batch, contextlib.nullcontext())
    with spillway.Session(window=0) as session:
        backend = session.runtime(batch.device).backend
        model.zero_grad()
        with spillway.offload(session=session, min_bytes=0):
            loss = model(batch).square().mean()

        def no_memory(nbytes: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(backend, "empty", no_memory)
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert torch.equal(loss.detach(), wanted[0])
        assert all(torch.equal(p.grad, want) for p, want in zip(model.parameters(), wanted[1], strict=True))


def test_host_memory_is_registered(device: torch.device) -> None:
    with spillway.Session() as session:
        block = session.runtime(device).arena.allocate(3 * MIB)
        assert block.tensor().is_pinned()
        assert block.address % 4096 == 0


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("window", [0, 1 << 40])
def test_what_a_side_stream_saved_leaves_after_that_stream_has_written_it(device: torch.device, window: int) -> None:
    """It is sent by a later pack on another stream, which has not waited for the first."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    leaf = torch.randn(1 << 24, device=device, requires_grad=True)

    def forward(context: contextlib.AbstractContextManager[object]) -> torch.Tensor:
        side.wait_stream(main)
        with context:
            with torch.cuda.stream(side):
                sleep(100)
                hidden = (leaf * 1).sin()
            on_main = leaf.cos()
        main.wait_stream(side)
        hidden.record_stream(main)
        return hidden.sum() + on_main.sum()

    (wanted,) = torch.autograd.grad(forward(contextlib.nullcontext()), leaf)
    torch.cuda.synchronize()
    with spillway.Session(window=window) as session:
        for _ in range(3):
            loss = forward(spillway.offload(session=session, min_bytes=0))
            torch.cuda.synchronize()
            for stream in (main, side):
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        torch.full_like(leaf, 7.0)
            (got,) = torch.autograd.grad(loss, leaf)
            assert torch.equal(got, wanted)


def test_a_batch_from_a_stream_that_the_mover_never_saw(device: torch.device) -> None:
    """Only autograd would have kept it until backward: let go earlier, it goes to a stream that waited for nobody."""
    main, load = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    weight = torch.randn(1 << 24, device=device, requires_grad=True)

    def gradient(context: contextlib.AbstractContextManager[object]) -> torch.Tensor:
        with torch.cuda.stream(load):
            data = torch.full((1 << 24,), 1.0, device=device)
        main.wait_stream(load)
        with context:
            sleep(100)
            hidden = weight * data
            del data
            hidden = hidden.sin().sin().sin()
        with torch.cuda.stream(load):
            following = [torch.full((1 << 24,), 5.0, device=device) for _ in range(4)]
        (got,) = torch.autograd.grad(hidden.sum(), weight)
        load.wait_stream(main)
        del following
        return got

    wanted = gradient(contextlib.nullcontext())
    torch.cuda.synchronize()
    with spillway.Session(window=0) as session:
        for _ in range(3):
            got = gradient(spillway.offload(session=session, min_bytes=0))
            torch.cuda.synchronize()
            assert torch.equal(got, wanted)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is known on Linux only")
def test_a_process_is_brought_near_to_its_device_or_told_why_not() -> None:
    here = os.sched_getaffinity(0)
    with spillway.bind_to_device() as affinity:
        assert affinity.device == torch.device("cuda", torch.accelerator.current_device_index())
        assert affinity.before == here and os.sched_getaffinity(0) == affinity.after
        assert (affinity.why_not is None) is (affinity.after < affinity.before)
        if affinity.why_not is None:
            assert affinity.node is not None
    assert os.sched_getaffinity(0) == here


def test_copies_go_by_streams_of_the_users(device: torch.device) -> None:
    streams = {"out": torch.Stream(device=device), "back": torch.Stream(device=device)}
    x = torch.randn(1 << 20, device=device, requires_grad=True)
    (plain,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with spillway.Session(window=0, streams=streams) as session:
        with spillway.offload(session=session, min_bytes=0):
            loss = x.exp().sin().sum()
        assert session.runtime(device).mover.streams == (streams["out"], streams["back"])
        (ours,) = torch.autograd.grad(loss, x)
    assert torch.equal(ours, plain)
