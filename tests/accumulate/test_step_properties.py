"""What must hold for windows of any size, over loaders of any length, tried on those that hypothesis thinks of."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spillway
from accumulate.loops import Trace, assert_same
from integrations.ranks import RANKS, World

QUICK = settings(derandomize=True, deadline=None, max_examples=100, database=None)
FEW = settings(derandomize=True, deadline=None, max_examples=20, database=None)


class Micro(NamedTuple):
    """One micro-batch."""

    rows: int
    """It weighs as much."""
    known_first: bool
    used: bool
    """Whether it gets a backward."""


class Plan(NamedTuple):
    """Passes over a loader."""

    passes: list[list[Micro]]
    steps: int
    partial: str
    normalize: str
    narrow: bool


MICRO = st.builds(Micro, rows=st.integers(0, 3), known_first=st.booleans(), used=st.integers(0, 4).map(bool))
PLANS = st.builds(
    Plan,
    passes=st.lists(st.lists(MICRO, max_size=9), min_size=1, max_size=3),
    steps=st.integers(1, 5),
    partial=st.sampled_from(["scale", "drop", "carry"]),
    normalize=st.sampled_from(["tokens", "steps", "sum"]),
    narrow=st.booleans(),
)


def windows_of(plan: Plan) -> list[list[Micro]]:
    """What steps, said otherwise: in order, as many at a time as fit."""
    passes = [[micro for micro in each if micro.used] for each in plan.passes]
    if plan.partial == "carry":
        passes = [[micro for each in passes for micro in each]]
    windows = []
    for some in passes:
        windows += [some[start : start + plan.steps] for start in range(0, len(some), plan.steps)]
    return windows if plan.partial == "scale" else [each for each in windows if len(each) == plan.steps]


def model_of(plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(
        torch.bfloat16 if plan.narrow else torch.float32
    )


def loss_of(model: nn.Module, micro: Micro, plan: Plan, rank: int = 0) -> Tensor:
    seed = 17 * micro.rows + 5 * micro.known_first + rank
    x = torch.randn(micro.rows, 3, generator=torch.Generator().manual_seed(seed))
    out: Tensor = model(x.to(torch.bfloat16 if plan.narrow else torch.float32))
    return out.float().square().sum()


def expected_of(plan: Plan) -> Trace:
    trace, model = Trace(), model_of(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for window in windows_of(plan):
        for micro in window:
            loss = loss_of(model, micro, plan)
            (loss / plan.steps if plan.normalize == "steps" else loss).backward()
        factor = {
            "tokens": 1 / (sum(micro.rows for micro in window) or float("inf")),
            "steps": plan.steps / len(window),
            "sum": 1.0,
        }[plan.normalize]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        trace.note(model)
    return trace


@QUICK
@given(PLANS)
def test_any_windows_over_any_passes_are_those_of_a_plain_loop(plan: Plan) -> None:
    trace, model = Trace(), model_of(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    window = spillway.Accumulator(model, optimizer, steps=plan.steps, partial=plan.partial, normalize=plan.normalize)
    # A window whose last batches have no backward steps when its pass ends.
    optimizer.register_step_post_hook(lambda *_: trace.note(model))
    for each in plan.passes:
        if each and not any(micro.used for micro in each):
            continue
        for micro in window(each):
            if micro.used:
                weight: Any = micro.rows if micro.known_first else torch.tensor(micro.rows)
                window.backward(loss_of(model, micro, plan), weight=weight)
    expected = expected_of(plan)
    assert len(trace.weights) == len(expected.weights)
    if expected.weights:
        assert_same(trace, expected)


def ranks_case(plan: Plan, way: str, sync: str) -> None:
    """Every rank has other rows, and as many micro-batches."""
    rank = dist.get_rank()
    plan = plan._replace(
        passes=[
            [micro._replace(rows=(micro.rows + place * rank) % 4, used=True) for place, micro in enumerate(each)]
            for each in plan.passes
        ],
        narrow=False,
    )

    def wrapped() -> Any:
        model = model_of(plan).double()
        if way == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        return fully_shard(model)

    def loss(model: Any, micro: Micro) -> Tensor:
        x = torch.randn(micro.rows, 3, generator=torch.Generator().manual_seed(17 * micro.rows + rank)).double()
        out: Tensor = model(x)
        return out.square().sum()

    module = wrapped()
    window = spillway.Accumulator(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        steps=plan.steps,
        partial=plan.partial,
        sync=sync,
        normalize=plan.normalize,
    )
    for each in plan.passes:
        for micro in window(each):
            window.backward(loss(module, micro), weight=micro.rows)
    # One process that reduces by hand what each rank has.
    alone = model_of(plan).double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for some in windows_of(plan):
        total = torch.zeros((), dtype=torch.float64)
        for micro in some:
            total += micro.rows
            loss(alone, micro).backward()
        dist.all_reduce(total)
        divisor = {"tokens": float(total) or float("inf"), "steps": RANKS * len(some), "sum": 1}[plan.normalize]
        for parameter in alone.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(divisor)
        optimizer.step()
        optimizer.zero_grad()
    for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.allclose(whole, other, rtol=1e-11, atol=1e-13)


@pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_any_windows_of_two_ranks_are_those_of_one_process(world: World, way: str) -> None:
    @FEW
    @given(PLANS, st.sampled_from(["last", "every"]))
    def run(plan: Plan, sync: str) -> None:
        world.run(ranks_case, plan, way, sync)

    run()


@QUICK
@given(st.integers(2, 6), st.integers(1, 3), st.sampled_from(["tokens", "steps"]))
def test_every_split_of_any_batch_gives_the_gradient_of_the_whole(rows: int, width: int, normalize: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(width, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(rows, width, dtype=torch.float64)

    def step(micro_batches: list[Tensor]) -> None:
        window = spillway.Accumulator(model, optimizer, steps=len(micro_batches), normalize=normalize)
        for x in window(micro_batches):
            losses = model(x).square().sum(1)
            if normalize == "tokens":
                window.backward(losses.sum(), weight=len(x))
            else:
                window.backward(losses.mean())

    uneven = {(rows // 2, rows - rows // 2), (rows - 1, 1)} - {(rows // 2,) * 2}
    if normalize == "tokens":
        assert spillway.split_equals_whole(step, batch, model=model, optimizer=optimizer) < 1e-13
    else:
        # A mean of means is right for even splits, and for no others.
        spillway.split_equals_whole(step, batch, model=model, optimizer=optimizer, splits=[(1,) * rows])
        if uneven and rows > 2:
            with pytest.raises(spillway.SplitError):
                spillway.split_equals_whole(step, batch, model=model, optimizer=optimizer, splits=sorted(uneven))
