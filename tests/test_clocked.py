"""The engine does what the simulated step says: the same bytes, in the same time."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import allocations
import spillway
from allocations import count_exactly
from clocked import ClockedBackend, scaled
from integrations.test_planned_stages import Stage, one_forward_one_backward
from integrations.test_planned_stages import steps as step_by_step
from spillway import Hardware, Plan, Profile, StepStats
from spillway.attaching import meta_profile
from spillway.integrations.pipelining import offload_stages
from spillway.planner.plan import program_of
from spillway.planner.planner import USABLE
from spillway.planner.profile import HostTimes
from spillway.planner.timeline import storages_of
from spillway.profiler import meter
from spillway.runtime import mover as movers
from spillway.runtime.arena import Arena
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.entry import ByteCounters, Entry
from spillway.runtime.mover import Mover
from spillway.runtime.queues import PrefetchQueue
from spillway.runtime.tiers import HostTier
from spillway.saved_tensors.order import AccessOrder

ROOT = Path(__file__).parent.parent
LAYERS, TOKENS, WIDTH = 6, 512, 128
LEAST = 2048
"""Bytes of what leaves."""
OF_LARGE = 4096 * 32768 / (WIDTH * TOKENS)
"""How many times more bytes a layer of Llama-8B's shape has, with 32768 tokens."""
# Small tensors count less here than there.
HARDWARE = scaled(Hardware.named("h200"), nbytes=OF_LARGE, flops=OF_LARGE * 4096 / WIDTH)
KIB = 1024
STATIC = 16 << 20
SUMS = TOKENS * 16 * 4
"""Bytes that attention saves beside its result: the smallest that leave by themselves."""


def llama() -> Any:
    """The layers of the benchmarks."""
    spec = importlib.util.spec_from_file_location("of_tests_llama", ROOT / "benchmarks" / "_llama.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        room = llama()
        shape = room.Shape(WIDTH, 16, 4, 7 * WIDTH // 2)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(room.Layer(shape) for _ in range(LAYERS))
        angles = torch.randn(TOKENS, shape.head)
        self.cos, self.sin = (nn.Buffer(each.to(torch.bfloat16)) for each in (angles.cos(), angles.sin()))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x


@functools.cache
def model_and_batch() -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    model = Stack()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad = torch.zeros_like(parameter)
    return model, torch.randn(1, TOKENS, WIDTH).to(torch.bfloat16)


def loss(y: Tensor) -> Tensor:
    return y.float().square().mean()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are what large ones are, and what leaves goes to host memory."""
    monkeypatch.setattr(meta_profile, "MIN_BYTES", LEAST)
    monkeypatch.setattr(movers, "MOST_BATCH_BYTES", LEAST)
    tier = DeviceRuntime.tier
    monkeypatch.setattr(DeviceRuntime, "tier", lambda self, name: tier(self, "host" if name == "auto" else name))


OPTIONS: dict[str, Any] = {"hardware": HARDWARE, "allow": {"keep", "host", "recompute"}}


@functools.cache
def measured() -> tuple[Profile, int]:
    """The model's profile, and its peak where all is kept."""
    model, batch = model_and_batch()
    profile = spillway.profile(model, batch, loss=loss, hardware=HARDWARE, device="cpu")
    return profile, spillway.plan(profile, budget="1TiB", **OPTIONS).predicted_peak


@functools.cache
def planned(share: float, window: int) -> tuple[Profile, Plan]:
    profile, most = measured()
    budget = profile.static_bytes + int(share * (most - profile.static_bytes))
    return profile, spillway.plan(profile, budget=budget, window=window, **OPTIONS)


def steps(plan: Plan, count: int = 4) -> Iterator[tuple[float, StepStats]]:
    """Seconds of steps that a plan is applied to, and what was counted."""
    model, batch = model_and_batch()
    backend = ClockedBackend(HARDWARE)
    with (
        spillway.Session(backend=backend.serve, window=plan.window) as session,
        spillway.attach(model, plan=plan, session=session, min_bytes=LEAST) as attached,
        backend.computing(),
    ):
        for _ in range(count):
            begin = backend.clock.now
            loss(model(batch)).backward()
            yield backend.clock.now - begin, attached.stats()


def check(share: float, window: int) -> None:
    profile, plan = planned(share, window * KIB)
    storages, _ = storages_of(program_of(profile, plan), plan.window)
    sizes = [storage.sent.nbytes for storage in storages]
    back = sum(storage.sent.nbytes for storage in storages if not storage.is_reused)
    *_, before, (seconds, stats) = steps(plan)
    # Of two that are sent one after the other, either may be the last that there is room for.
    loose = SUMS
    assert stats.reloaded_bytes == pytest.approx(back, abs=loose)
    # By then it is known what is asked for first, which is not copied.
    assert stats.offloaded_bytes == stats.reloaded_bytes
    assert stats.reused_bytes + stats.reloaded_bytes == sum(sizes)
    assert seconds == pytest.approx(before[0], rel=1e-6)
    # Sums of what is computed again are taken, which no plan counts.
    assert seconds == pytest.approx(plan.predicted_seconds, rel=0.01)
    assert stats.stall_seconds == pytest.approx(plan.stall_seconds, abs=0.003 * seconds)


CASES = [(0.6, 640), (0.5, 2560), (0.36, 2560), (0.34, 1280)]
"""Of what a step holds that keeps everything; the window."""


@pytest.mark.parametrize(
    ("share", "window"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in ((0.5, 640), (0.4, 1280)))]
)
def test_a_step_moves_the_bytes_and_takes_the_time_that_were_simulated(share: float, window: int) -> None:
    check(share, window)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_of_any_budget_and_window(seed: int) -> None:
    drawn = random.Random(seed)
    check(drawn.uniform(0.29, 0.9), drawn.choice([300, 480, 640, 900, 1280, 1800, 2560, 4000]))


def test_of_another_plan_that_sends_as_many_all_is_learned_anew() -> None:
    """Else what the first plan had learned not to send would be what its second had to wait for."""
    known: dict[int, tuple[Profile, Plan]] = {}
    # These two send as many, when this is written.
    for share in (52, 56, *range(36, 62, 2)):
        profile, plan = planned(share / 100, 2560 * KIB)
        count = len(storages_of(program_of(profile, plan), plan.window)[0])
        if count in known and known[count][1].blocks != plan.blocks:
            before = known[count][1]
            break
        known[count] = profile, plan
    model, batch = model_and_batch()
    for first, second in ((before, plan), (plan, before)):
        stalls = {}
        for plans in ((second,), (first, second)):
            backend = ClockedBackend(HARDWARE)
            with (
                spillway.Session(backend=backend.serve, window=2560 * KIB) as session,
                spillway.attach(model, plan=plans[0], session=session, min_bytes=LEAST) as attached,
                backend.computing(),
            ):
                for number in range(4 * len(plans)):
                    if number == 4:
                        attached._root.controller.applied.apply(second)
                    begin = backend.clock.now
                    loss(model(batch)).backward()
                assert backend.clock.now - begin == pytest.approx(second.predicted_seconds, rel=0.01)
                stalls[plans] = attached.stats().stall_seconds
        assert stalls[first, second] == pytest.approx(stalls[second,], abs=1e-4)


def with_host(profile: Profile, host: HostTimes | None) -> Profile:
    return replace(profile, kinds=tuple(replace(kind, host=host) for kind in profile.kinds))


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> ClockedBackend:
    """A backend by whose clock steps are measured, too; what a process has beside a step is always the same."""
    backend = ClockedBackend(HARDWARE)
    clock = SimpleNamespace(perf_counter=lambda: backend.clock.now)
    for module in (allocations, meter):
        monkeypatch.setattr(module, "time", clock)
    count_exactly(monkeypatch, lambda: STATIC)
    return backend


@pytest.mark.parametrize("share", [*(pytest.param(share, marks=pytest.mark.long) for share in (0.8, 0.5)), 0.36])
def test_a_budget_finds_a_plan_whose_step_takes_what_is_foretold(share: float, clocked: ClockedBackend) -> None:
    model, batch = model_and_batch()
    with spillway.Session(backend=clocked.serve) as session, clocked.computing():
        profile = spillway.profile(model, batch, loss=loss, session=session)
        keep = spillway.plan(profile, budget="1TiB", **OPTIONS)
    budget = profile.static_bytes + int(share * (keep.predicted_peak - profile.static_bytes))
    with (
        spillway.Session(backend=clocked.serve, window=2560 * KIB) as session,
        spillway.attach(model, budget=budget, session=session, min_bytes=LEAST, **OPTIONS) as attached,
        clocked.computing(),
    ):
        for _ in range(16):
            loss(model(batch)).backward()
            model.zero_grad(set_to_none=False)
            if attached.stage == "active":
                break
        assert attached.stage == "active"
        assert attached.plan is not None and attached.measured is not None
        assert attached.measured.peak_bytes <= budget
        assert attached.measured.seconds == pytest.approx(attached.plan.predicted_seconds, rel=1e-4)
        assert attached.plan.predicted_seconds < 1.15 * keep.predicted_seconds


@pytest.mark.parametrize("share", [0.9, 0.6, 0.5])
@pytest.mark.parametrize("most", [1, 3, 6])
@pytest.mark.covered
def test_micro_batches_of_a_pipeline_take_what_is_foretold(
    most: int, share: float, monkeypatch: pytest.MonkeyPatch, clocked: ClockedBackend
) -> None:
    """One after the other, three of them alive, or all forwards first."""
    hardware = scaled(Hardware.named("h200"), nbytes=1024, flops=4096)
    clocked.is_now(hardware)
    turns = one_forward_one_backward(min(most + 2, 6), most)

    def train(budget: int | str) -> tuple[int, Plan, float, StepStats]:
        stage = Stage(0, width=64, blocks=4)
        options: dict[str, Any] = {"hardware": hardware, "allow": {"keep", "host", "recompute"}, "min_bytes": LEAST}
        with (
            spillway.Session(backend=clocked.serve, window=1024 * KIB) as session,
            offload_stages([stage], budget=budget, session=session, **options) as offloaded,
            clocked.computing(),
        ):
            ends, held = [0.0], 0
            for _ in step_by_step([stage], [turns] * 18, rows=1024, gives=False):
                ends.append(clocked.clock.now)
                held = held + 1 if offloaded.stage == "active" else 0
                if held == 4:
                    break
            assert held == 4 and offloaded.measured is not None
            stats = offloaded.stats()
            stage.waiting.clear()
            return offloaded.measured, offloaded.plans[0], ends[-1] - ends[-2], stats

    most_bytes, keep, plain, _ = train("1TiB")
    optimizer = plain - keep.predicted_seconds
    budget = STATIC + int(share * (most_bytes - STATIC))
    peak, plan, seconds, stats = train(budget)
    assert peak <= budget
    assert seconds - optimizer == pytest.approx(plan.predicted_seconds, rel=0.01)
    assert stats.stall_seconds == pytest.approx(plan.stall_seconds, abs=0.003 * seconds)


def test_what_was_fetched_ahead_is_not_waited_for_to_the_last() -> None:
    sizes = [1 << 20, 1 << 20, 4 << 20]
    backend = ClockedBackend(HARDWARE)
    mover = Mover(backend, window=sum(sizes))
    tier = HostTier(backend, Arena(backend.host_slab, capacity=1 << 26), out=mover.streams[0], back=mover.streams[1])
    ledger = ByteCounters()
    entries = [
        Entry(number, torch.zeros(size, dtype=torch.uint8).untyped_storage(), 0, size, ledger)
        for number, size in enumerate(sizes)
    ]
    mover.put(entries, tier)
    mover.release(entries)
    begin = backend.clock.now
    mover.fetch(entries)
    mover.take(entries[0], -1)
    # Its own copy alone.
    took = (backend.clock.now - begin) * HARDWARE.bandwidths[0].back * USABLE
    assert took == pytest.approx(sizes[0])


def slowed(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, other: Any) -> float:
    """How much longer a step takes that way."""
    _, plan = planned(0.5, 2560 * KIB)
    *_, (asits, _) = steps(plan)
    monkeypatch.setattr(owner, name, other)
    *_, (slow, _) = steps(plan)
    return slow / asits


def test_without_fetching_ahead_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slowed(monkeypatch, PrefetchQueue, "prefetch", lambda self, order, compute, window, batch: None) > 1.1


def test_in_an_order_that_is_not_learned_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(self: AccessOrder) -> Iterator[Any]:
        return iter(list(upcoming(self))[::-1])

    upcoming = AccessOrder.upcoming
    assert slowed(monkeypatch, AccessOrder, "upcoming", backward) > 1.02
