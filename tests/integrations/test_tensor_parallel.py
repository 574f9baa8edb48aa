"""Tensor parallel through DTensor, sequence parallel, FSDP2 on top: the bits of plain PyTorch; no parameter moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import spillway
from integrations.ranks import World
from integrations.training import PLAIN, WAYS, Block, Model, Outcome, Way, compare, local, train
from spillway import Recompute

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]


class Local(Block):
    """Computes with the local parts of its weights, as grouped experts do."""

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up.weight, self.down.weight
        if isinstance(up, DTensor) and isinstance(down, DTensor):
            up, down = up.to_local(), down.to_local()
        return x + functional.gelu(self.norm(x) @ up.t()) @ down.t()


def parallel(block: type[Block], *, sequence: bool = False, shard: bool = False) -> tuple[nn.Module, Model]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = Model(block)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        split = {"use_local_output": True}
        plan = {
            "norm": SequenceParallel(**split),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        outer = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor"], outer)
    for each in model.blocks:
        parallelize_module(each, mesh["tensor"], plan)
        if shard:
            fully_shard(each, mesh=mesh["data"])
    if shard:
        fully_shard(model, mesh=mesh["data"])
    return model, model


def case(way: str, options: dict[str, Any]) -> None:
    again = WAYS[way].regions is not None or isinstance(WAYS[way].attached, Recompute)
    compare(lambda: parallel(Block, **options), WAYS[way], same=True, talks_again=again)


KINDS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "sequence": {"sequence": True},
    "tensor and shards": {"shard": True},
    "sequence and shards": {"sequence": True, "shard": True},
}


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_tensor_parallel_in_every_way(world: World, way: str) -> None:
    world.run(case, way, KINDS["sequence and shards"])


@pytest.mark.parametrize("way", ["offload", "attach, regions"])
@pytest.mark.parametrize("kind", ["tensor", "sequence", "tensor and shards"])
def test_tensor_parallel_of_every_kind(world: World, kind: str, way: str) -> None:
    world.run(case, way, KINDS[kind])


def local_case(way: str, options: dict[str, Any]) -> None:
    def alone() -> tuple[nn.Module, Model]:
        """Parameters that are as they are on one rank, and tensors no more."""
        _, model = parallel(Local, **options)
        lone = Model(Local)
        for mine, theirs in zip(lone.parameters(), model.parameters(), strict=True):
            mine.data = local(theirs.data)
        return lone, lone

    # What is saved is as large as it would be on one rank with parameters of these shapes, of which none may move.
    compare(lambda: parallel(Local, **options), WAYS[way], same=True, alone=alone)


@pytest.mark.parametrize("way", ["offload", "recompute"])
@pytest.mark.parametrize("kind", ["tensor", "tensor and shards"])
def test_a_parameter_stays_where_only_its_local_part_is_used(world: World, kind: str, way: str) -> None:
    world.run(local_case, way, KINDS[kind])


def kept_collectives_case() -> None:
    def run(way: Way) -> Outcome:
        return train(lambda: parallel(Block, sequence=True), way, spillway.Session.default(), same=True)

    def gathers(outcome: Outcome) -> int:
        return outcome.collectives["_c10d_functional.all_gather_into_tensor.default"]

    plain = run(PLAIN)
    kept = run(Way(offloads={}, regions=Recompute(save=["_c10d_functional::*"])))
    again = run(Way(offloads={}, regions=Recompute()))
    assert all(map(torch.equal, kept.tensors, plain.tensors))
    assert gathers(kept) == gathers(plain) < gathers(again)


def test_what_collectives_gave_can_be_kept(world: World) -> None:
    world.run(kept_collectives_case)


def frozen_case() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = nn.Parameter(
        distribute_tensor(torch.randn(64, 32), init_device_mesh("cpu", (2,)), [Shard(0)]), requires_grad=False
    )
    x = torch.randn(4, 32, requires_grad=True)
    with spillway.Session(window=0) as session:
        spillway.keep_tensor(weight, session=session)
        with spillway.offload(session=session, min_bytes=0) as context:
            y = functional.linear(x, weight.to_local()).sum()
        y.backward()
        assert context.stats().offloaded_bytes == 0


def test_a_frozen_local_part_stays_when_it_is_marked(world: World) -> None:
    world.run(frozen_case)


def test_a_view_of_an_input_that_requires_grad_is_no_parameter() -> None:
    x = torch.randn(16, 16, requires_grad=True)
    with spillway.Session(window=0) as session:
        with spillway.offload(session=session, min_bytes=0) as context:
            y = x.view(8, 32).sin().sum()
        y.backward()
        assert context.stats().offloaded_bytes == x.nbytes
