"""The optimizer on the host for a model on an accelerator: the bits of a plain loop with the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.optim.options import alternating

pytestmark = pytest.mark.gpu

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
WIDTH, LAYERS, STEPS, MAX_NORM = 512, 6, 6, 0.5
SHARE = 0.4


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session(window="2MiB") as session:
        yield session
        assert session.used_bytes == (0, 0)


def make(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)
    ]
    return nn.Sequential(*layers).to(device, dtype)


def batches(device: torch.device, dtype: torch.dtype, micro: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator(device).manual_seed(1)
    for _ in range(STEPS):
        yield [torch.randn(64, WIDTH, device=device, generator=generator).to(dtype) for _ in range(micro)]


def plainly(
    device: torch.device, dtype: torch.dtype, *, micro: int, clipped: bool, step_on: str = "cpu"
) -> list[Tensor]:
    """Masters, sums and the step, all written out."""
    model = make(device, dtype)
    share = {"cpu": 1.0, "gpu": 0.0, "auto": SHARE}[step_on]
    on_cpu = alternating([parameter.numel() for parameter in model.parameters()], share)
    places = [torch.device("cpu") if here else device for here in on_cpu]
    masters = [
        nn.Parameter(parameter.detach().to(place, torch.float32, copy=True))
        for parameter, place in zip(model.parameters(), places, strict=True)
    ]
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)
    for several in batches(device, dtype, micro):
        sums: list[Tensor] = []
        for batch in several:
            model.zero_grad()
            model(batch).float().square().mean().backward()
            # One gradient is measured where it is, several where they are added.
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            # By the kernel that clip_grad_norm_ takes on a device.
            norms = [*torch._foreach_norm(gradients, 2.0, dtype=torch.float32)]
            new = [gradient.to(place).float() for gradient, place in zip(gradients, places, strict=True)]
            sums = [one + other for one, other in zip(sums, new, strict=True)] if sums else new
        if micro > 1:
            norms = [torch.linalg.vector_norm(total).to(device) for total in sums]
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        if clipped:
            norm = torch.linalg.vector_norm(torch.stack(norms))
            coefficient = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0).cpu()
            for master in masters:
                assert master.grad is not None
                master.grad.mul_(coefficient)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
@pytest.mark.parametrize("clipped", [False, True], ids=["as they are", "clipped"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_run_is_bit_for_bit_the_one_written_out(
    device: torch.device, session: spillway.Session, dtype: torch.dtype, micro: int, clipped: bool, overlap: bool
) -> None:
    expected = plainly(device, dtype, micro=micro, clipped=clipped)
    model = make(device, dtype)
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW)
    if overlap:
        optimizer.overlap_forward(model)
    # Where a norm is taken is learned in the first step; let it be known.
    for shared in optimizer._placement.contexts.values():
        shared.norms.add(2.0)
    for several in batches(device, dtype, micro):
        for batch in several:
            model(batch).float().square().mean().backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for one, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(one, other)
    optimizer.close()


@pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"step_in_backward": True},
        {"step_on": "gpu", "fused": True},
        {"step_on": "gpu", "fused": True, "step_in_backward": True},
        {"step_on": "auto", "cpu_share": SHARE, "fused": True},
        {"step_on": "auto", "cpu_share": SHARE, "fused": True, "step_in_backward": True},
        {"tier": "disk"},
    ],
    ids=["in backward", "streamed", "streamed in backward", "split", "split in backward", "disk"],
)
def test_a_run_with_state_elsewhere_is_the_one_written_out(
    device: torch.device,
    session: spillway.Session,
    options: dict[str, Any],
    dtype: torch.dtype,
    micro: int,
    overlap: bool,
) -> None:
    if micro > 1 and "step_in_backward" in options:
        pytest.skip("one gradient before each step")
    expected = plainly(device, dtype, micro=micro, clipped=False, step_on=options.get("step_on", "cpu"))
    model = make(device, dtype)
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **options, **ADAMW)
    if overlap:
        optimizer.overlap_forward(model)
    for several in batches(device, dtype, micro):
        for batch in several:
            model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    for one, other in zip(model.parameters(), expected, strict=True):
        assert torch.equal(one, other)
    optimizer.close()


@pytest.mark.parametrize("early", [False, True])
def test_the_share_of_the_cpu_is_measured(device: torch.device, session: spillway.Session, early: bool) -> None:
    model = make(device, torch.bfloat16)
    optimizer = spillway.OffloadedOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        session=session,
        step_on="auto",
        step_in_backward=early,
        fused=True,
        **ADAMW,
    )
    optimizer.overlap_forward(model)
    batch = torch.randn(64, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(30):
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert optimizer._moves._tuner is None, "it was chosen"
    assert 0 <= optimizer.cpu_share <= 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    optimizer.close()


def test_streamed_state_passes_the_device_within_the_window(device: torch.device) -> None:
    window = 4 << 20
    with spillway.Session(window=window) as session:
        model = make(device, torch.float32)
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, session=session, step_on="gpu", fused=True, **ADAMW
        )
        batch = torch.randn(1, WIDTH, device=device)
        peaks = []
        for _ in range(4):
            model(batch).square().mean().backward()
            torch.accelerator.synchronize(device)
            before = torch.accelerator.memory_allocated(device)
            torch.accelerator.reset_peak_memory_stats(device)
            optimizer.step()
            torch.accelerator.synchronize(device)
            peaks.append(torch.accelerator.max_memory_allocated(device) - before)
            optimizer.zero_grad()
        # The first step makes the state. It is 24 MiB in all.
        assert max(peaks[1:]) <= window + WIDTH * WIDTH * 4
        optimizer.close()


def test_the_device_holds_parameters_and_a_window_of_gradients(device: torch.device) -> None:
    window = 1 << 20
    with spillway.Session(window=window) as session:
        model = make(device, torch.float32)
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW)
        batch = torch.randn(1, WIDTH, device=device)
        # Norms of the first step, which it takes for a clipping that may come, are there until the next one.
        norms = 512 * len(list(model.parameters()))
        peaks = []
        for number in range(4):
            torch.accelerator.synchronize(device)
            before = torch.accelerator.memory_allocated(device)
            torch.accelerator.reset_peak_memory_stats(device)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.accelerator.synchronize(device)
            assert torch.accelerator.memory_allocated(device) - before == {0: norms, 1: -norms}.get(number, 0)
            peaks.append(torch.accelerator.max_memory_allocated(device) - before)
        # A gradient that is being computed, the window, one that does not fit it any more, and small change.
        assert max(peaks) <= 2 * WIDTH * WIDTH * 4 + window + (1 << 18)
        optimizer.close()


def test_a_scaler_skips_a_step_with_an_infinity(device: torch.device, session: spillway.Session) -> None:
    model = make(device, torch.float32)
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    for bad in (False, True, False):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.autocast(device.type, dtype=torch.float16):
            loss = model(torch.randn(8, WIDTH, device=device)).float().square().mean()
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)]
        assert all(same) if bad else not any(same)
    assert scaler.get_scale() == 512.0
    optimizer.close()
