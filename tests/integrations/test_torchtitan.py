"""torchtitan's own model, sharded by its own function, with Spillway in the place of activation checkpointing."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import spillway
from integrations.ranks import RANKS, World
from spillway.attaching.call import PLACE

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    # It imports what warns of itself.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(240),
]

ROWS, LENGTH, TOKENS = 2, 128, 2048


def sharded(checkpointing: Any, *, compiles: bool) -> torch.nn.Module:
    """The debug model over all ranks, as torchtitan's trainer makes it."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.models.llama3.parallelize import parallelize_llama

    config = model_registry("debugmodel").model
    for layer in config.layers:
        # Flexible attention has no backward on a CPU.
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    backend = "partial_dtensor"
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=dist.get_world_size(),
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=dist.get_world_size(),
        spmd_backend=backend,
    )
    # Without an accelerator it takes CUDA for granted.
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims.build_mesh()
    with torch.device("meta"):
        model = config.build()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=ROWS, seq_len=LENGTH, mixed_precision_param="bfloat16"),
        parallelism=ParallelismConfig(spmd_backend=backend),
        compile_config=CompileConfig(enable=compiles, backend="aot_eager"),
        ac_config=checkpointing,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gloo cannot multiply before it adds.
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def course(checkpointing: Any, steps: int, *, compiles: bool = False) -> tuple[list[torch.Tensor], torch.nn.Module]:
    """Losses, gradients and weights of this rank."""
    torch.manual_seed(0)
    model = sharded(checkpointing, compiles=compiles)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (ROWS, LENGTH))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        found += [loss.detach(), *(each.grad.to_local().clone() for each in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.detach().to_local() for each in model.parameters())], model


WAYS: dict[str, dict[str, Any]] = {
    "regions": {},
    "regions that offload": {"offload": ["inputs"], "save": ["attention"], "min_bytes": "1KiB"},
    "budget": {"budget": "1TiB"},
}


def case(way: str, compiles: bool, cache: str) -> list[str]:
    """What each of the ranks runs; gives the blocks that were attached."""
    from spillway.integrations.torchtitan import SpillwayAC
    from spillway.profiler.machine import known_hardware

    made: list[SpillwayAC] = []

    class Noted(SpillwayAC):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(SpillwayAC.Config):
            pass

        def __init__(self, config: Any, dump_folder: str = "") -> None:
            super().__init__(config, dump_folder)
            made.append(self)

    with mock.patch.dict(os.environ, SPILLWAY_CACHE=cache):
        if "budget" in way:
            known_hardware("cpu", seconds=0.2)
        steps = 5 if "budget" in way else 2
        plain, _ = course(None, steps, compiles=compiles)
        ours, model = course(Noted.Config(**WAYS[way]), steps, compiles=compiles)
    attached = made[0].attached
    assert attached is not None
    assert all(map(torch.equal, ours, plain))
    stats = attached.stats()
    assert ("budget" in way) == (attached.stage == "active")
    assert (stats.recomputed_bytes > 0) == ("budget" not in way)
    names = list(attached.blocks)
    attached.remove()
    assert compiles or not [each for each in model.modules() if PLACE in each.__dict__]
    return names


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_its_model_trains_to_the_same_bits(way: str, world: World, tmp_path: Path) -> None:
    expected = [f"layers.{number}" for number in range(6)]
    assert world.run(case, way, False, str(tmp_path)) == [expected] * RANKS


@pytest.mark.long
def test_its_compiled_blocks_are_regions_too(world: World, tmp_path: Path) -> None:
    expected = [f"layers.{number}" for number in range(6)]
    assert world.run(case, "regions", True, str(tmp_path)) == [expected] * RANKS


def test_its_configuration_says_what_is_attached(tmp_path: Path) -> None:
    from spillway.integrations.torchtitan import SpillwayAC

    for options, match in (
        ({"budget": "1GiB", "save": ["attention"]}, "got a policy, .* beside a budget or a plan"),
        ({"host_budget": "1GiB"}, "got host_budget without a budget"),
        ({"debug": True}, "say debug=False"),
        ({"offload": ["nothing"]}, "nothing"),
        ({"determinism_check": "some"}, "determinism_check"),
    ):
        with pytest.raises(spillway.UsageError, match=match):
            SpillwayAC.Config(**options).build(dump_folder="")
    with pytest.raises(spillway.UsageError, match="without layers"):
        SpillwayAC.Config().build(dump_folder="").apply(torch.nn.Linear(1, 1))


def test_a_model_that_is_not_trained_is_not_touched() -> None:
    from spillway.integrations.torchtitan import SpillwayAC

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict({str(n): torch.nn.Sequential(torch.nn.Linear(4, 4)) for n in range(2)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = layer(x)
            return x

    model = Model()
    way = SpillwayAC.Config(budget="not a size").build(dump_folder="")
    way.apply(model)
    model.eval()(torch.ones(1, 4))
    with torch.no_grad():
        model.train()(torch.ones(1, 4))
    assert way.attached is None
    with pytest.raises(spillway.SizeError, match="not a size"):
        model(torch.ones(1, 4))
