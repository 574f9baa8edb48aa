"""Windows on two ranks: the bits of loops that are written out, and the gradients of one process with all the data."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spillway
from accumulate.loops import (
    PADDING,
    Batch,
    Trace,
    assert_same,
    averaged,
    batches,
    by_hand,
    end,
    fresh,
    local,
    plain,
    summed,
    windowed,
)
from integrations.ranks import RANKS, World
from integrations.training import Collectives
from spillway import UsageError
from support import FailsInBackward

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]

STEPS = 3
ALL = batches(2 * STEPS * RANKS)
WHOLE = [ALL[start : start + STEPS * RANKS] for start in range(0, len(ALL), STEPS * RANKS)]


def mine() -> list[Batch]:
    """Every rank's batches are its own."""
    return ALL[dist.get_rank() :: RANKS]


def my_windows() -> list[list[Batch]]:
    return [mine()[start : start + STEPS] for start in range(0, len(mine()), STEPS)]


@dataclass(frozen=True)
class Way:
    """How a model is wrapped.

    Args:
        kind: ``"ddp"`` or ``"fsdp"``.
        options: of the wrapper.
        mesh: of FSDP2.
        dtype: of the parameters.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] = (RANKS,)

    def build(self, dtype: torch.dtype = torch.float32, model: nn.Module | None = None) -> Any:
        model = fresh(dtype=dtype) if model is None else model
        if self.kind == "ddp":
            return nn.parallel.DistributedDataParallel(model, **self.options)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"mesh": init_device_mesh("cpu", self.mesh, mesh_dim_names=("replicate", "shard")[-len(self.mesh) :])}
        for name, value in self.options.items():
            options[name] = MixedPrecisionPolicy(**value) if name == "mp_policy" else value
        for child in model.children():
            fully_shard(child, **options)
        fully_shard(model, **options)
        return model


MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
WAYS: dict[str, Way] = {
    "ddp": Way("ddp"),
    "ddp, unused": Way("ddp", {"find_unused_parameters": True}),
    "ddp, bucket views": Way("ddp", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0003}),
    "fsdp": Way("fsdp"),
    "fsdp, stays": Way("fsdp", {"reshard_after_forward": False}),
    "fsdp, mixed": Way("fsdp", {"mp_policy": MIXED}),
    "hsdp of replicas": Way("fsdp", mesh=(2, 1)),
    "hsdp of shards": Way("fsdp", mesh=(1, 2)),
}
EVERY = ["ddp", "fsdp", "fsdp, mixed", "hsdp of replicas"]
"""Those in which what is reduced before the last micro-batch goes a way of its own."""
some_ways = pytest.mark.parametrize("way", ["ddp", "fsdp"])
syncs = pytest.mark.parametrize("sync", ["last", "every"])


def switched(module: Any, *, last: bool, sync: str) -> Any:
    """What somebody writes around a micro-batch's forward and backward."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext() if last or sync == "every" else module.no_sync()
    module.set_requires_gradient_sync(last or sync == "every")
    module.set_requires_all_reduce(last)
    module.set_is_last_backward(last)
    return contextlib.nullcontext()


def plain_ranks(
    module: Any,
    optimizer: torch.optim.Optimizer,
    windows: Sequence[Sequence[Batch]],
    *,
    sync: str = "last",
    max_norm: float | None = None,
    scaler: Any = None,
    steps: int | None = None,
) -> Trace:
    """The loop that somebody writes out for DDP or FSDP2; with ``steps``, the one that divides first."""
    trace = Trace()
    for window in windows:
        total, losses = torch.zeros(()), torch.zeros((), dtype=torch.float64)
        for place, batch in enumerate(window, 1):
            with switched(module, last=place == len(window), sync=sync):
                loss, words = (summed if steps is None else averaged)(module, batch)
                total += words
                losses += loss.detach()
                loss = loss if steps is None else loss / steps
                (loss if scaler is None else scaler.scale(loss)).backward()
        dist.all_reduce(total)
        dist.all_reduce(losses)
        if scaler is not None:
            scaler.unscale_(optimizer)
        for parameter in module.parameters():
            if parameter.grad is not None and steps is None:
                local(parameter.grad).mul_(RANKS / total.item())
        if max_norm is not None:
            norm: Any = nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            trace.norms.append(norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item())
        end(trace, module, optimizer, scaler, None)
        trace.losses.append((losses / (total.double() if steps is None else RANKS * len(window))).item())
    return trace


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def written_out_case(way: str, sync: str) -> None:
    for max_norm in (None, 0.05):
        module = WAYS[way].build()
        expected = plain_ranks(module, adam(module), my_windows(), sync=sync, max_norm=max_norm)
        for first in (False, True):
            module = WAYS[way].build()
            window = spillway.Accumulator(module, adam(module), steps=STEPS, sync=sync, max_norm=max_norm)
            if first:
                assert_same(by_hand(module, window, my_windows()), expected)
            else:
                assert_same(windowed(module, window, mine()), expected)
        assert window.last is not None
        assert float(window.last.weight) == sum(int((each[1] != PADDING).sum()) for each in WHOLE[-1])


@pytest.mark.parametrize(
    ("way", "sync"),
    [
        *((way, "last") for way in WAYS),
        *((way, "every") if way in EVERY else pytest.param(way, "every", marks=pytest.mark.long) for way in WAYS),
    ],
)
def test_a_window_is_the_loop_that_somebody_writes_out(world: World, way: str, sync: str) -> None:
    world.run(written_out_case, way, sync)


def one_process_case(way: str, sync: str) -> None:
    alone = fresh(dtype=torch.float64)
    expected = plain(alone, sgd(alone), WHOLE, max_norm=0.05)
    module = WAYS[way].build(torch.float64)
    window = spillway.Accumulator(module, sgd(module), steps=STEPS, sync=sync, max_norm=0.05)
    got = windowed(module, window, mine())
    assert torch.allclose(torch.tensor(got.losses), torch.tensor(expected.losses), rtol=1e-6)
    assert torch.allclose(torch.tensor(got.norms), torch.tensor(expected.norms), rtol=1e-12)
    for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.allclose(whole, other, rtol=1e-12, atol=1e-14)


@syncs
@pytest.mark.parametrize("way", [way for way in WAYS if way != "fsdp, mixed"])
def test_two_ranks_are_one_process_with_all_of_the_data(world: World, way: str, sync: str) -> None:
    world.run(one_process_case, way, sync)


def steps_case(way: str) -> None:
    module = WAYS[way].build()
    expected = plain_ranks(module, adam(module), my_windows(), steps=STEPS)
    module = WAYS[way].build()
    window = spillway.Accumulator(module, adam(module), steps=STEPS, normalize="steps")
    assert_same(windowed(module, window, mine(), loss=averaged, weigh=None), expected)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp of replicas"])
def test_steps_is_the_loop_of_every_tutorial_for_many_ranks(world: World, way: str) -> None:
    world.run(steps_case, way)


def sum_case(way: str) -> None:
    """What the wrapper averages is a sum again."""
    alone = fresh(dtype=torch.float64)
    for batch in ALL[: STEPS * RANKS]:
        summed(alone, batch)[0].backward()
    module = WAYS[way].build(torch.float64)
    optimizer = sgd(module)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(local(each.grad).clone() for each in module.parameters()))
    window = spillway.Accumulator(module, optimizer, steps=STEPS, normalize="sum")
    windowed(module, window, mine()[:STEPS], weigh=None)
    if way == "ddp":
        for ours, parameter in zip(seen, alone.parameters(), strict=True):
            assert parameter.grad is not None and torch.allclose(ours, parameter.grad, rtol=1e-12, atol=1e-14)
    else:
        squares = torch.stack([each.square().sum() for each in seen]).sum()
        dist.all_reduce(squares)
        assert torch.allclose(squares.sqrt(), torch.nn.utils.get_total_norm([each.grad for each in alone.parameters()]))


@some_ways
def test_a_sum_is_one_over_all_ranks(world: World, way: str) -> None:
    world.run(sum_case, way)


def counts_case(way: str) -> list[dict[str, int]]:
    counts = []
    for sync in ("last", "every"):
        module = WAYS[way].build()
        window = spillway.Accumulator(module, sgd(module), steps=STEPS, sync=sync)
        windowed(module, window, mine()[:STEPS])
        with Collectives() as collectives:
            windowed(module, window, mine()[STEPS:])
        kinds = {name.split(".")[1]: count for name, count in collectives.counts.items()}
        counts.append({name: count for name, count in kinds.items() if "reduce" in name})
    return counts


def test_gradients_are_reduced_once_a_window_and_weights_by_one_small_collective(world: World) -> None:
    buckets = 1
    ddp = world.run(counts_case, "ddp")[0]
    assert ddp == [{"allreduce_": buckets + 1}, {"allreduce_": buckets * STEPS + 1}]
    groups = 3  # one for each child; the model itself has none
    fsdp = world.run(counts_case, "fsdp")[0]
    scatter = "_reduce_scatter_base_"
    assert fsdp == [{scatter: groups, "allreduce_": 1}, {scatter: groups * STEPS, "allreduce_": 1}]
    hsdp = world.run(counts_case, "hsdp of shards")[0]
    # Over replicas once a window, and the weights over both dimensions of the mesh.
    assert [each["allreduce_"] for each in hsdp] == [groups + 2] * 2
    assert [each[scatter] for each in hsdp] == [groups, groups * STEPS]


PARTIAL = STEPS + 2


def partial_case(way: str, partial: str, sync: str) -> None:
    some = mine()[:PARTIAL]
    whole = {
        "scale": [some[:STEPS], some[STEPS:]],
        "drop": [some[:STEPS], some[:STEPS]],
        "carry": [some[:STEPS], [*some[STEPS:], *some[:1]], some[1 : 1 + STEPS]],
    }
    module = WAYS[way].build()
    expected = plain_ranks(module, adam(module), whole[partial], sync=sync, max_norm=0.05)
    module = WAYS[way].build()
    window = spillway.Accumulator(module, adam(module), steps=STEPS, sync=sync, max_norm=0.05, partial=partial)
    got = windowed(module, window, some)
    if partial != "scale":
        more = windowed(module, window, some[: STEPS if partial == "drop" else 1 + STEPS])
        got.weights += more.weights
        got.norms += more.norms
    assert_same(Trace(got.weights, norms=got.norms), Trace(expected.weights, norms=expected.norms))


@syncs
@pytest.mark.parametrize("partial", ["scale", "drop", "carry"])
@some_ways
def test_partial_windows_are_reduced_in_their_last_micro_batch(world: World, way: str, partial: str, sync: str) -> None:
    world.run(partial_case, way, partial, sync)


def left_out_case(way: str) -> None:
    """A pass whose last batch gets no backward has no micro-batch that reduces."""
    module = WAYS[way].build()
    window = spillway.Accumulator(module, sgd(module), steps=STEPS)
    passing = window(mine()[:2])
    loss, words = summed(module, next(passing))
    window.backward(loss, weight=words)
    next(passing)
    with pytest.raises(
        UsageError, match="last micro-batch of the pass had no backward, so gradients of 1 of 3 micro-batches"
    ):
        next(passing)
    window.discard()
    with window.micro():
        loss, words = summed(module, mine()[0])
        window.backward(loss, weight=words)
    with pytest.raises(UsageError, match=r"open the last one by accumulator\.micro\(last=True\)"):
        window.step()
    window.discard()
    expected = WAYS[way].build()
    trace = plain_ranks(expected, sgd(expected), my_windows())
    assert_same(windowed(module, window, mine()), trace)


@some_ways
def test_gradients_that_are_not_reduced_do_not_step(world: World, way: str) -> None:
    world.run(left_out_case, way)


def forward_only_case(grad_dtype: Any) -> None:
    """DDP has made ready to reduce, and no backward comes: the next one must not be taken for it."""
    module = WAYS["ddp"].build(torch.bfloat16)
    window = spillway.Accumulator(module, sgd(module), steps=STEPS, grad_dtype=grad_dtype)
    with window.micro(last=True):
        summed(module, mine()[0])
    passing = window(mine()[:STEPS])
    for _ in range(STEPS - 1):
        with Collectives() as collectives:
            loss, words = summed(module, next(passing))
            window.backward(loss, weight=words)
        assert not collectives.counts["c10d.allreduce_.default"]
    summed(module, next(passing))
    window.discard()
    expected = WAYS["ddp"].build(torch.bfloat16)
    other = spillway.Accumulator(expected, sgd(expected), steps=STEPS, grad_dtype=grad_dtype)
    passing.close()  # type: ignore[attr-defined]
    assert_same(windowed(module, window, mine()), windowed(expected, other, mine()))


def test_a_forward_that_reduces_and_has_no_backward_is_forgotten(world: World) -> None:
    world.run(forward_only_case, None)
    world.run(forward_only_case, torch.float32)


def infinite_case(way: str, sync: str) -> None:
    """One rank alone has an infinity, in its first micro-batch."""

    def poisoned(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss, words = summed(module, batch)
        return (loss * float("inf") if batch is ALL[0] else loss), words

    def things() -> tuple[Any, Any, Any]:
        module = WAYS[way].build()
        return module, adam(module), torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)

    module, optimizer, scaler = things()
    before = [local(parameter).detach().clone() for parameter in module.parameters()]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    window = spillway.Accumulator(
        module, optimizer, steps=STEPS, scaler=scaler, scheduler=schedule, max_norm=0.05, sync=sync
    )
    trace = windowed(module, window, mine(), loss=poisoned)
    assert trace.skipped == [True, False]
    assert scaler.get_scale() == 64.0 and schedule.last_epoch == 1
    assert all(map(torch.equal, before, trace.weights[0]))
    module, optimizer, scaler = things()
    scaler.update(32.0) if scaler._scale is not None else scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0})
    expected = plain_ranks(module, optimizer, my_windows()[1:], scaler=scaler, max_norm=0.05, sync=sync)
    assert_same(Trace(trace.weights[1:]), Trace(expected.weights))


@syncs
@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp of replicas"])
def test_an_infinity_of_one_rank_skips_the_window_on_all(world: World, way: str, sync: str) -> None:
    world.run(infinite_case, way, sync)


# Parameters that are used in some micro-batches only.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.early, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, early: bool) -> Tensor:
        x = self.trunk(x)
        out: Tensor = self.head(self.early(x) if early else x)
        return out


def branches(dtype: torch.dtype = torch.float64) -> Branches:
    torch.manual_seed(0)
    return Branches().to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1 + place % 3, 4, generator=generator).to(dtype) for place in range(2 * RANKS)]


def early_case(way: str, sync: str, grad_dtype: Any = None, dtype: torch.dtype = torch.float64) -> None:
    """A branch that only the first micro-batch of a window uses."""
    alone = branches(dtype)
    for place, x in enumerate(inputs(dtype)):
        alone(x, place < RANKS).float().square().sum().backward()
    rows = sum(map(len, inputs(dtype)))
    module = WAYS[way].build(model=branches(dtype))
    optimizer = sgd(module)
    seen: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(each.grad.clone() for each in module.parameters()))
    window = spillway.Accumulator(module, optimizer, steps=2, sync=sync, grad_dtype=grad_dtype)
    for place, x in enumerate(window(inputs(dtype)[dist.get_rank() :: RANKS])):
        window.backward(module(x, place == 0).float().square().sum(), weight=len(x))
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    for ours, parameter in zip(seen, alone.parameters(), strict=True):
        whole: Any = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        expected = parameter.grad / rows
        assert (whole - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    ("way", "sync"),
    [
        ("ddp, unused", "last"),
        ("ddp, unused", "every"),
        ("fsdp", "last"),
        ("fsdp", "every"),
        ("hsdp of replicas", "last"),
    ],
)
def test_what_only_an_early_micro_batch_uses_is_reduced(world: World, way: str, sync: str) -> None:
    world.run(early_case, way, sync)


def test_what_only_an_early_micro_batch_uses_is_reduced_from_float32_sums(world: World) -> None:
    world.run(early_case, "ddp, unused", "last", torch.float32, torch.bfloat16)
    world.run(early_case, "ddp, unused", "every", torch.float32, torch.bfloat16)
    world.run(early_case, "fsdp", "every", torch.float32, torch.bfloat16)


def unreduced_case(way: str, sync: str, words: str) -> None:
    module = WAYS[way].build(model=branches())
    optimizer = sgd(module)
    before = [local(each).detach().clone() for each in module.parameters()]
    window = spillway.Accumulator(module, optimizer, steps=2, sync=sync)
    mine = inputs()[dist.get_rank() :: RANKS]

    def run() -> None:
        for place, x in enumerate(window(mine)):
            window.backward(module(x, place == 0).square().sum(), weight=len(x))

    with pytest.raises(UsageError, match=words):
        run()
    assert all(map(torch.equal, before, (local(each) for each in module.parameters())))
    window.discard()
    # It goes on where all are used.
    for x in window(mine):
        window.backward(module(x, True).square().sum(), weight=len(x))
    assert window.stepped


@pytest.mark.parametrize(
    ("way", "sync", "words"),
    [
        ("ddp", "last", "find_unused_parameters=True"),
        ("ddp", "every", "find_unused_parameters=True"),
        ("hsdp of replicas", "every", "use different parameters of .*Linear, .* say sync='last'"),
    ],
)
def test_what_would_not_be_reduced_is_an_error(world: World, way: str, sync: str, words: str) -> None:
    world.run(unreduced_case, way, sync, words)


class Two(nn.Module):
    """Two weights of one group of FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = x @ self.one
        return x @ self.other if both else x


def buffers_case() -> None:
    """FSDP2 would add the first weight's gradient to whatever is in its place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    module: Any = fully_shard(Two(), mesh=mesh)
    window = spillway.Accumulator(module, sgd(module), steps=2, sync="every")
    with window.micro(weight=1), pytest.raises(UsageError, match=r"use different parameters of .*Two"):
        window.backward(module(torch.ones(1, 4), False).sum())


def test_a_buffer_without_all_parameters_is_an_error(world: World) -> None:
    world.run(buffers_case)


# Float32 sums.


def float32_case(way: str, sync: str) -> None:
    """DDP reduces in bfloat16; between its reductions nothing is rounded."""
    module = WAYS[way].build(torch.bfloat16)
    optimizer = sgd(module)
    trace = Trace()
    parameters = list(module.parameters())
    for each in my_windows():
        total = torch.zeros(())
        sums: list[Any] = [None] * len(parameters)
        for place, batch in enumerate(each, 1):
            last = place == len(each)
            with switched(module, last=last, sync=sync):
                loss, words = summed(module, batch)
                total += words
                if last and sync == "last":
                    for parameter, so_far in zip(parameters, sums, strict=True):
                        parameter.grad = so_far.bfloat16()
                    sums = [None] * len(parameters)
                loss.backward()
            for place_, parameter in enumerate(parameters):
                if parameter.grad is not None:
                    wide = parameter.grad.float()
                    sums[place_] = wide if sums[place_] is None else sums[place_] + wide
                    parameter.grad = None
        dist.all_reduce(total)
        for parameter, so_far in zip(parameters, sums, strict=True):
            parameter.grad = (so_far * (RANKS / total.item())).bfloat16()
        end(trace, module, optimizer, None, None)
    module = WAYS[way].build(torch.bfloat16)
    window = spillway.Accumulator(module, sgd(module), steps=STEPS, sync=sync, grad_dtype=torch.float32)
    assert_same(windowed(module, window, mine()), Trace(trace.weights))


@pytest.mark.parametrize(
    ("way", "sync"),
    [("ddp", "last"), ("ddp, bucket views", "last"), ("ddp, unused", "last"), ("ddp", "every"), ("fsdp", "every")],
)
def test_float32_sums_of_reduced_gradients(world: World, way: str, sync: str) -> None:
    world.run(float32_case, way, sync)


def fsdp_dtype_case() -> None:
    for way in (WAYS["fsdp"], Way("fsdp", {"mp_policy": {"param_dtype": torch.bfloat16}})):
        module = way.build(torch.bfloat16 if not way.options else torch.float32)
        with pytest.raises(
            UsageError, match=r"sums gradients between reductions, in .*bfloat16 .*MixedPrecisionPolicy\(reduce_dtype"
        ):
            spillway.Accumulator(module, sgd(module), steps=STEPS, grad_dtype=torch.float32)
    policy = {"mp_policy": {"reduce_dtype": torch.float32}}
    module = Way("fsdp", policy).build(torch.bfloat16)
    expected = plain_ranks_narrow(module)
    module = Way("fsdp", policy).build(torch.bfloat16)
    window = spillway.Accumulator(module, sgd(module), steps=STEPS, grad_dtype=torch.float32)
    assert_same(windowed(module, window, mine()), Trace(expected.weights))


def plain_ranks_narrow(module: Any) -> Trace:
    """FSDP2 adds up in float32 itself; what it gives is normalised in float32, too."""
    trace, optimizer = Trace(), sgd(module)
    for window in my_windows():
        total = torch.zeros(())
        for place, batch in enumerate(window, 1):
            with switched(module, last=place == len(window), sync="last"):
                loss, words = summed(module, batch)
                total += words
                loss.backward()
        dist.all_reduce(total)
        for parameter in module.parameters():
            wide = local(parameter.grad).float() * (RANKS / total.item())
            local(parameter.grad).copy_(wide)
        end(trace, module, optimizer, None, None)
    return trace


def test_fsdp_must_hold_what_it_holds_in_float32(world: World) -> None:
    world.run(fsdp_dtype_case)


# Errors.


class Failing(nn.Module):
    """Fails in the middle, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fresh()
        self.where = "nowhere"

    def forward(self, words: Tensor) -> Tensor:
        x = self.inner.hidden(self.inner.words(words))
        if self.where == "forward":
            raise KeyError("on purpose")
        out: Tensor = self.inner.head(FailsInBackward.apply(x) if self.where == "backward" else x)
        return out


def wrapped_failing(way: str) -> tuple[Any, Failing]:
    torch.manual_seed(0)
    model = Failing()
    if way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for child in model.inner.children():
            fully_shard(child)
        return fully_shard(model), model
    return nn.parallel.DistributedDataParallel(model), model


def assert_switched_back(module: Any) -> None:
    for each in module.modules():
        if isinstance(each, nn.parallel.DistributedDataParallel):
            assert each.require_backward_grad_sync
        elif hasattr(each, "_get_fsdp_state"):
            state = each._get_fsdp_state()
            assert state._state_ctx.is_last_backward
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
                assert group is None or (group.reduce_grads and group.all_reduce_grads)


def error_case(way: str, where: str, which: int) -> None:
    module, model = wrapped_failing(way)
    expected = plain_ranks(module, adam(module), my_windows())
    module, model = wrapped_failing(way)
    window = spillway.Accumulator(module, adam(module), steps=STEPS)

    def run() -> None:
        for place, batch in enumerate(window(mine())):
            model.where = where if place == which else "nowhere"
            loss, words = summed(module, batch)
            window.backward(loss, weight=words)

    with pytest.raises(KeyError):
        run()
    model.where = "nowhere"
    assert_switched_back(module)
    if where == "backward" or way == "fsdp":
        with pytest.raises(UsageError, match="a backward or step of this accumulation step failed"):
            window(mine())
    window.discard()
    assert_switched_back(module)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert_same(windowed(module, window, mine()), expected)


@pytest.mark.parametrize("which", [0, 1, STEPS - 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
@some_ways
def test_an_error_leaves_no_switch_behind_and_a_window_can_be_begun_anew(
    world: World, way: str, where: str, which: int
) -> None:
    if way == "fsdp" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("FSDP2 itself recovers from torch 2.13 on")
    world.run(error_case, way, where, which)


def flags_case() -> None:
    """What FSDP2 is told in each of three micro-batches: reduces, over replicas too, is the last one."""
    expected = {
        ("last", None): [(False, False, False), (False, False, False), (True, True, True)],
        ("every", None): [(True, False, False), (True, False, False), (True, True, True)],
        # Gradients are read after each reduction, for which FSDP2 waits only where it is told that it is the last.
        ("every", torch.float32): [(True, False, True), (True, False, True), (True, True, True)],
    }
    for (sync, grad_dtype), flags in expected.items():
        module = Way("fsdp", {"mp_policy": {"reduce_dtype": torch.float32}}, (2, 1)).build(torch.bfloat16)
        window = spillway.Accumulator(module, sgd(module), steps=STEPS, sync=sync, grad_dtype=grad_dtype)
        seen = []
        for batch in window(mine()[:STEPS]):
            state = module.head._get_fsdp_state()
            (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            seen.append((group.reduce_grads, group.all_reduce_grads, state._state_ctx.is_last_backward))
            loss, words = summed(module, batch)
            window.backward(loss, weight=words)
        assert seen == flags
        assert_switched_back(module)


def test_fsdp_is_told_which_micro_batch_it_is_in(world: World) -> None:
    world.run(flags_case)


def left_case(way: str) -> None:
    module = WAYS[way].build()
    window = spillway.Accumulator(module, sgd(module), steps=STEPS)
    for batch in window(mine()):
        summed(module, batch)[0].backward()
        break
    assert_switched_back(module)
    window.discard()
    held = iter(window(mine()))
    next(held)
    window.discard()
    assert_switched_back(module)
    with window.micro(weight=1):
        pass
    assert_switched_back(module)


@some_ways
def test_a_loop_that_is_left_leaves_no_switch_behind(world: World, way: str) -> None:
    world.run(left_case, way)


# Wrappers.


def static_case() -> None:
    """A static graph is learned in a first iteration that must be reduced."""
    alone = fresh(dtype=torch.float64)
    expected = plain(alone, sgd(alone), WHOLE)
    module = Way("ddp", {"static_graph": True}).build(torch.float64)
    window = spillway.Accumulator(module, sgd(module), steps=STEPS)
    windowed(module, window, mine()[:STEPS])
    with Collectives() as collectives:
        got = windowed(module, window, mine()[STEPS:])
    for ours, other in zip(got.weights[-1], expected.weights[-1], strict=True):
        assert torch.allclose(ours, other, rtol=1e-12, atol=1e-14)
    # The one bucket, and the weights.
    assert collectives.counts["c10d.allreduce_.default"] == 2
    module = Way("ddp", {"static_graph": True}).build(torch.bfloat16)
    window = spillway.Accumulator(module, sgd(module), steps=STEPS, grad_dtype=torch.float32)
    narrow = windowed(module, window, mine())
    for ours, other in zip(narrow.weights[-1], expected.weights[-1], strict=True):
        assert torch.allclose(ours.double(), other, atol=0.03)


def test_ddps_static_graph(world: World) -> None:
    world.run(static_case)


def divided_case() -> None:
    """FSDP2 may be told to divide by something else, or by nothing."""
    for said in (1.0, 7.0):
        module = WAYS["fsdp"].build(torch.float64)
        for each in module.modules():
            if hasattr(each, "set_gradient_divide_factor"):
                each.set_gradient_divide_factor(said)
                each.set_force_sum_reduction_for_comms(True)
        window = spillway.Accumulator(module, sgd(module), steps=STEPS)
        got = windowed(module, window, mine())
        alone = fresh(dtype=torch.float64)
        plain(alone, sgd(alone), WHOLE)
        for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(parameter.full_tensor(), other, rtol=1e-12, atol=1e-14)
        module = WAYS["fsdp"].build(torch.float64)
        for each in module.modules():
            if hasattr(each, "set_gradient_divide_factor"):
                each.set_gradient_divide_factor(said)
                each.set_force_sum_reduction_for_comms(True)
        window = spillway.Accumulator(module, sgd(module), steps=STEPS, normalize="steps")
        other_way = WAYS["fsdp"].build(torch.float64)
        expected = plain_ranks(other_way, sgd(other_way), my_windows(), steps=STEPS)
        means = windowed(module, window, mine(), loss=averaged, weigh=None)
        for ours, theirs in zip(means.weights[-1], expected.weights[-1], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_what_fsdp_divides_by_is_multiplied_again(world: World) -> None:
    world.run(divided_case)


def tensor_parallel_case() -> None:
    """Ranks that share a model's layers have the same data: it counts once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()

    rows = [torch.randn(1 + place, 4, generator=torch.Generator().manual_seed(place)).double() for place in range(3)]

    def train(model: nn.Module) -> Any:
        window = spillway.Accumulator(model, sgd(model), steps=3, max_norm=0.05)
        for x in window(rows):
            window.backward(model(x).square().sum(), weight=len(x))
        return window.last

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    alone = build()
    ours, expected = train(model), train(alone)
    assert float(ours.weight) == 6
    assert torch.allclose(ours.gradient_norm.tensor, expected.gradient_norm.tensor, rtol=1e-12)
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(parameter.full_tensor(), other, rtol=1e-12)  # type: ignore[attr-defined]


def test_ranks_that_share_their_data_count_it_once(world: World) -> None:
    world.run(tensor_parallel_case)


def group_case() -> None:
    """Of a model that nothing wraps, gradients are this rank's, normalised by what all weigh."""
    from torch.distributed.device_mesh import init_device_mesh

    for group in (dist.group.WORLD, init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))):
        for partial in (False, True):
            model = fresh()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            window = spillway.Accumulator(model, optimizer, steps=STEPS + partial, group=group)
            for batch in mine()[:STEPS]:
                with window.micro():
                    loss, words = summed(model, batch)
                    window.backward(loss, weight=words)
            record = window.step()
            words = sum(int((batch[1] != PADDING).sum()) for batch in WHOLE[0])
            assert float(record.weight) == words
            alone = fresh()
            for batch in mine()[:STEPS]:
                summed(alone, batch)[0].backward()
            for parameter, was, other in zip(model.parameters(), before, alone.parameters(), strict=True):
                assert torch.equal(parameter, was - other.grad.mul_(1 / words))
    outside = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(UsageError, match="group: this process is not in it"):
            spillway.Accumulator(fresh(), sgd(fresh()), steps=1, group=outside)


def test_a_group_may_be_given(world: World) -> None:
    world.run(group_case)


def mixture_case() -> None:
    """Torch clips no plain gradients together with sharded ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def build() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(5)).double()
    alone = build()
    alone(x).square().sum().backward()
    for parameter in alone.parameters():
        parameter.grad.mul_(1 / 5)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    model = build()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(each.grad for each in model.parameters()))
    window = spillway.Accumulator(model, optimizer, steps=1, max_norm=0.1)
    for batch in window([x]):
        # Both ranks have the same rows, so what each of them weighs is a half of all.
        window.backward(model(batch).square().sum(), weight=5)
    assert window.last is not None and window.last.gradient_norm is not None
    plain_part = [each for each in seen if not hasattr(each, "full_tensor")]
    assert len(plain_part) == 2
    # What nobody reduces has the gradient of one rank of two.
    sharded = [alone[0].weight, alone[0].bias, alone[1].weight, alone[1].bias]
    factor = None
    for ours, other in zip(seen, sharded, strict=False):
        found = ours.full_tensor() / other.grad
        factor = found.flatten()[0] if factor is None else factor
        assert torch.allclose(found, factor.expand_as(found), rtol=1e-10)
    assert 0.1 < float(window.last.gradient_norm) < norm


def test_gradients_on_several_meshes_are_clipped_by_one_norm(world: World) -> None:
    world.run(mixture_case)


def nothing_case(way: str) -> None:
    """A rank whose micro-batch has no words."""
    words, following = ALL[0]
    nothing = words, torch.full_like(following, PADDING)
    module = WAYS[way].build(torch.float64)
    window = spillway.Accumulator(module, sgd(module), steps=2)
    windowed(module, window, [nothing, nothing] if dist.get_rank() else mine()[:2])
    alone = fresh(dtype=torch.float64)
    plain(alone, sgd(alone), [ALL[0 : 2 * RANKS : RANKS]])
    for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.allclose(whole, other, rtol=1e-12, atol=1e-14)


@some_ways
def test_a_rank_without_words_takes_part(world: World, way: str) -> None:
    world.run(nothing_case, way)


def refused_case() -> None:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = fresh()
    optimizer = sgd(model)
    with pytest.raises(spillway.UnsupportedError, match="is the first generation of FSDP"):
        spillway.Accumulator(
            FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True), optimizer, steps=1
        )
    model = fresh()
    replicate(model)
    with pytest.raises(spillway.UnsupportedError, match=r"was wrapped by replicate\(\)"):
        spillway.Accumulator(model, sgd(model), steps=1)


def test_a_join_in_which_a_rank_may_end_before_others_is_refused(world: World) -> None:
    world.run(join_case)


def join_case() -> None:
    module = WAYS["ddp"].build()
    window = spillway.Accumulator(module, sgd(module), steps=STEPS)
    with module.join(), pytest.raises(UsageError, match=r"join\(throw_on_early_termination=True\)"):
        windowed(module, window, mine()[:STEPS])
    window = spillway.Accumulator(module, sgd(module), steps=STEPS)
    with module.join(throw_on_early_termination=True):
        windowed(module, window, mine()[:STEPS])
    assert window.last is not None


def test_other_wrappers_are_refused(world: World) -> None:
    world.run(refused_case)


def offloaded_case(way: str) -> None:
    """What the micro-batches save leaves, and nothing else changes."""
    module = WAYS[way].build()
    expected = plain_ranks(module, adam(module), my_windows(), max_norm=0.05)
    module = WAYS[way].build()
    with spillway.Session(window=0) as session:
        context = spillway.offload(min_bytes=0, session=session)
        window = spillway.Accumulator(module, adam(module), steps=STEPS, max_norm=0.05)
        assert_same(windowed(module, window, mine(), autocast=lambda: context), expected)
        assert context.stats().offloaded_bytes > 0


@some_ways
def test_h57_offloading_on_several_ranks_counts_every_micro_batch_once(world: World, way: str) -> None:
    world.run(offloaded_case, way)
