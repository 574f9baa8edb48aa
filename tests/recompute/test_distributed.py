"""Regions under DDP and FSDP2, on two processes: the same gradients, and no all-gather more than without."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import spillway
from integrations.ranks import World
from integrations.training import Collectives

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]

HOWS: list[dict[str, Any]] = [
    {},
    {"offload": ["matmul"]},
    {"save": ["norm"], "offload": ["inputs"]},
    {"use_reentrant": True, "offload": ["inputs"]},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.call: Any = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def steps(kind: str, reshard: bool, how: dict[str, Any] | None) -> tuple[list[Tensor], Counter[str]]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model: Any = Model()
    if how is not None:
        model.call = partial(spillway.recompute, **how)
    if kind == "fsdp":
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    else:
        model = DistributedDataParallel(model)
    torch.manual_seed(dist.get_rank())
    seen: list[Tensor] = []
    mode = Collectives()
    for _ in range(4):
        x = torch.randn(4, 16, requires_grad=True)
        model.zero_grad()
        with mode:
            loss = model(x).square().mean()
            loss.backward()
        seen += [loss.detach(), x.grad]  # type: ignore[list-item]
        for parameter in model.parameters():
            assert parameter.grad is not None
            seen.append(getattr(parameter.grad, "_local_tensor", parameter.grad).clone())
    return seen, mode.counts


def attached_case() -> None:
    """Regions within the blocks, which gather before them."""
    from torch.distributed.fsdp import fully_shard

    def losses(how: spillway.Recompute | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        attached = None if how is None else spillway.attach(model, policy=how)
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = []
        for _ in range(5):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        if attached is not None:
            attached.remove()
        return found

    plain, ours = losses(None), losses(spillway.Recompute())
    assert all(map(torch.equal, ours, plain))


def case(kind: str, reshard: bool) -> None:
    plain, gathers = steps(kind, reshard, None)
    for how in HOWS:
        ours, ours_gathers = steps(kind, reshard, how)
        assert all(map(torch.equal, ours, plain)), how
        assert ours_gathers == gathers, how


def test_blocks_of_a_sharded_model_are_recomputed(world: World) -> None:
    world.run(attached_case)


@pytest.mark.parametrize(("kind", "reshard"), [("fsdp", True), ("fsdp", False), ("ddp", False)])
def test_two_ranks_get_the_same_gradients_with_as_many_collectives(world: World, kind: str, reshard: bool) -> None:
    world.run(case, kind, reshard)
