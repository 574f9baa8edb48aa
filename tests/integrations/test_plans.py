"""A budget on two ranks: one plan, the bits and collectives of plain PyTorch, and the same errors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import spillway
from allocations import count_exactly
from integrations.ranks import World
from integrations.training import TOKENS, WIDTH, Block, Collectives, Model, local
from spillway import BudgetError, Hardware, UnsupportedError, UsageError
from spillway.attaching.ranks import RankGroup, ranks_of
from support import assert_nothing_left

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]
STEPS, LENGTH = 10, 64
BUDGET = "6MiB"


def plain(model: Model) -> nn.Module:
    return model


def sharded(model: Model) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        # What is sharded in a block is gathered once more by whoever computes it again.
        fully_shard(block.up)
        fully_shard(block)
    fully_shard(model)
    return model


def replicated(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


WRAPS: dict[str, Callable[[Model], nn.Module]] = {"ddp": replicated, "fsdp": sharded, "plain": plain}


def steps(module: nn.Module, rows: int, count: int, length: int = LENGTH) -> tuple[list[torch.Tensor], Any]:
    """Losses, gradients and weights of steps with a rank's own tokens, and the collectives of the last."""
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for _ in range(count):
        tokens = torch.randint(TOKENS, (rows, length))
        with Collectives() as collectives:
            loss = functional.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        found += [loss.detach(), *(local(each.grad).clone() for each in module.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(parameter).detach().clone() for parameter in module.parameters())], collectives.counts


def budget_case(wrap: str, rows: tuple[int, int], attaches_first: bool) -> tuple[str, int]:
    """Gives the plan as JSON, and bytes that leave or are computed again."""
    count_exactly(pytest.MonkeyPatch(), lambda: 0)
    mine = rows[dist.get_rank()]
    torch.manual_seed(0)
    expected, said = steps(WRAPS[wrap](Model()), mine, STEPS)
    with spillway.Session() as session:
        torch.manual_seed(0)
        model = Model()
        how: dict[str, Any] = {"budget": BUDGET, "hardware": Hardware.named("h200"), "session": session}
        if attaches_first:
            attached = spillway.attach(model, min_bytes="4KiB", blocks=Block, **how)
            module = WRAPS[wrap](model)
        else:
            module = WRAPS[wrap](model)
            # The class of a block that was sharded is another one.
            attached = spillway.attach(module, min_bytes="4KiB", blocks=lambda _, each: isinstance(each, Block), **how)
        found, collectives = steps(module, mine, STEPS)
        assert attached.stage == "active", attached.stage
        assert attached.plan is not None
        plan = attached.plan
        attached.remove()
        del module, model, attached
        gc.collect()
        assert_nothing_left(session)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected)), "other bits than plain PyTorch's"
    assert collectives == said, "other collectives than plain PyTorch's"
    return plan.to_json(), plan.sent_bytes + int(1e9 * plan.recompute_seconds)


@pytest.mark.parametrize("attaches_first", [False, True], ids=["wrapped, attached", "attached, wrapped"])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
@pytest.mark.covered
def test_ranks_with_unequal_batches_find_one_plan(world: World, wrap: str, attaches_first: bool) -> None:
    answers = world.run(budget_case, wrap, (24, 40), attaches_first)
    assert answers[0] == answers[1]
    assert answers[0][1], "the plan does nothing: this proves nothing"


def test_ranks_that_share_nothing_find_their_own(world: World) -> None:
    (first, _), (second, _) = world.run(budget_case, "plain", (24, 40), False)
    assert first != second


class Summed(torch.autograd.Function):
    """The sum of all ranks' tensors."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Communicating(Block):
    """Normalizes by all ranks' means, which have one shape whatever the length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.tanh(x - Summed.apply(x.mean((0, 1))) / 2))


def lengths_case(wrap: str) -> str:
    """One rank has other lengths in each of the first steps, and hence measures calls that the other one does not."""
    count_exactly(pytest.MonkeyPatch(), lambda: 0)
    lengths = [LENGTH - step * dist.get_rank() for step in range(4)] + 8 * [LENGTH]
    found: list[list[torch.Tensor]] = []
    with spillway.Session() as session:
        for budget in (None, "3.2MiB"):
            torch.manual_seed(0)
            module = WRAPS[wrap](Model(Communicating))
            if budget is not None:
                attached = spillway.attach(
                    module,
                    budget=budget,
                    min_bytes="4KiB",
                    blocks=lambda _, each: isinstance(each, Block),
                    hardware=Hardware.named("h200"),
                    session=session,
                )
            found.append([])
            for length in lengths:
                torch.manual_seed(length + dist.get_rank())
                found[-1] += steps(module, 24, 1, length)[0]
        assert attached.stage == "active", attached.stage
        assert attached.plan is not None
        assert any(block.recomputes for block in attached.plan.blocks), "the plan does nothing: this proves nothing"
        assert all(map(torch.equal, *found)), "other bits than plain PyTorch's"
        return attached.plan.to_json()


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_ranks_that_measure_other_calls_repeat_no_collective_for_it(world: World, wrap: str) -> None:
    first, second = world.run(lengths_case, wrap)
    assert first == second


def communicating_case() -> str:
    """Ranks share no parameters, and communicate inside of blocks. One of them has less memory left."""
    count_exactly(pytest.MonkeyPatch(), lambda: dist.get_rank() * 2**19)
    torch.manual_seed(0)
    expected, _ = steps(Model(Communicating), 24, STEPS)
    with spillway.Session() as session:
        torch.manual_seed(0)
        model = Model(Communicating)
        how: dict[str, Any] = {"budget": "4MiB", "hardware": Hardware.named("h200"), "session": session}
        attached = spillway.attach(model, min_bytes="4KiB", blocks=Block, **how)
        found, _ = steps(model, 24, STEPS)
        assert attached.stage == "active", attached.stage
        assert all(map(torch.equal, found, expected)), "other bits than plain PyTorch's"
        assert attached.plan is not None
        assert any(block.recomputes for block in attached.plan.blocks), "the plan does nothing: this proves nothing"
        return attached.plan.to_json()


def test_ranks_that_communicate_inside_of_blocks_find_one_plan(world: World) -> None:
    first, second = world.run(communicating_case)
    assert first == second


def too_small_case() -> None:
    count_exactly(pytest.MonkeyPatch(), lambda: 0)
    model = nn.parallel.DistributedDataParallel(Model())
    with spillway.Session() as session:
        how = {"hardware": Hardware.named("h200"), "session": session}
        with spillway.attach(model, budget="10KiB", blocks=Block, **how), pytest.raises(BudgetError):  # type: ignore[arg-type]
            steps(model, 8, STEPS)


def test_a_budget_that_nothing_fits_is_an_error_on_each_rank(world: World) -> None:
    world.run(too_small_case)


def uneven_case() -> str:
    """One rank calls the model more often, without the other ones: within ``no_sync``, and without the wrapper."""
    count_exactly(pytest.MonkeyPatch(), lambda: 0)
    torch.manual_seed(0)
    model = Model()
    module = nn.parallel.DistributedDataParallel(model)
    first = dist.get_rank() == 0

    def call(each: nn.Module) -> None:
        each(torch.randint(TOKENS, (24, LENGTH))).square().mean().backward()

    with spillway.Session() as session:
        how: dict[str, Any] = {"budget": BUDGET, "hardware": Hardware.named("h200"), "session": session}
        with spillway.attach(model, min_bytes="4KiB", blocks=Block, **how) as attached:
            # Before it was called by its wrapper, it was alone.
            call(model)
            for _ in range(9):
                with module.no_sync():
                    for _ in range(2 if first else 1):
                        call(module)
                call(module)
                if first:
                    call(model)
                module.zero_grad()
            assert attached.stage == "active"
            assert attached.plan is not None
            for number in range(70 if first else 0):
                with module.no_sync():
                    call(module if number % 2 else model)
            return attached.plan.to_json()


def joined_case(planned: bool) -> bool:
    """The first rank has fewer inputs than the second one."""
    count_exactly(pytest.MonkeyPatch(), lambda: 0)
    torch.manual_seed(0)
    model, other = Model(), Model()
    other.load_state_dict(model.state_dict())
    how: dict[str, Any] = {"budget": BUDGET, "hardware": Hardware.named("h200"), "min_bytes": "4KiB", "blocks": Block}
    modules = [nn.parallel.DistributedDataParallel(each) for each in (model, other)]
    with spillway.Session() as session, spillway.attach(model, session=session, **how) as attached:
        for module in modules:
            train(module, 70 if planned else 0)
        with modules[1].join():
            train(modules[1], 2 + dist.get_rank())
        with (
            contextlib.nullcontext() if planned else pytest.raises(UsageError, match=r"join\(\) while its ranks search")
        ):
            with modules[0].join():
                train(modules[0], 2 + dist.get_rank())
            assert attached.stage == "active"
        if not planned:
            # As many inputs for both, and an error on both if not.
            with modules[0].join(throw_on_early_termination=True):
                train(modules[0], 9)
        return all(map(torch.equal, model.parameters(), other.parameters()))


def train(module: nn.Module, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        module(torch.randint(TOKENS, (24, LENGTH), generator=generator)).square().mean().backward()
        with torch.no_grad():
            for each in module.parameters():
                each.sub_(each.grad, alpha=0.1)
        module.zero_grad()


@pytest.mark.parametrize("planned", [False, True])
def test_ranks_of_uneven_inputs(planned: bool, world: World) -> None:
    assert world.run(joined_case, planned) == [planned, planned]


def test_ranks_may_call_the_model_as_often_as_they_like_where_they_do_not_reduce(world: World) -> None:
    first, second = world.run(uneven_case)
    assert first == second


def other_error_case() -> None:
    peers = RankGroup([dist.group.WORLD])

    def fails_on_one() -> int:
        assert dist.get_rank() == 0, "no error of Spillway's"
        return 0

    kind, match = (AssertionError, "no error") if dist.get_rank() == 1 else (UnsupportedError, "not Spillway's")
    with pytest.raises(kind, match=match):
        peers.share("this", fails_on_one)
    assert peers.share("rank", dist.get_rank) == [0, 1]


def test_the_others_hear_of_any_error(world: World) -> None:
    world.run(other_error_case)


def sharing_case() -> None:
    peers = RankGroup([dist.group.WORLD])
    assert not peers.alone
    assert peers.share("rank", dist.get_rank) == [0, 1]

    def fails_on_one() -> int:
        if dist.get_rank() == 1:
            raise spillway.UsageError("got this, expected that")
        return 0

    kind = spillway.UsageError if dist.get_rank() == 1 else UnsupportedError
    with pytest.raises(kind, match="got this, expected that"):
        peers.share("this", fails_on_one)
    assert peers.share("rank", dist.get_rank) == [0, 1], "all of them are still in step"
    with pytest.raises(spillway.UsageError, match="different places of its training"):
        peers.share(f"step {dist.get_rank()}", lambda: 0)


def test_what_fails_on_one_rank_is_known_to_all(world: World) -> None:
    world.run(sharing_case)


def mesh_case() -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(0)]))
    return ranks_of(model).share("rank", dist.get_rank)


def test_those_on_a_mesh_are_peers_in_each_of_its_dimensions(world: World) -> None:
    assert world.run(mesh_case) == [[0, 1], [0, 1]]


def test_without_a_process_group_a_model_has_no_peers() -> None:
    assert ranks_of(nn.Linear(2, 2)).alone
    assert ranks_of(nn.Linear(2, 2)).share("three", lambda: 3) == [3]
