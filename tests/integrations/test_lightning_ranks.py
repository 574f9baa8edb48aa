"""The callback of Lightning on two ranks: DDP and FSDP2, each the same bits as the same strategy without it.

``FSDPStrategy`` wants an accelerator, and is not run here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

pytest.importorskip("lightning")

from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

import spillway
from integrations.fits import WAYS, Gan, Own, Recorded, assert_untouched, fit
from integrations.ranks import World
from spillway.integrations.lightning import SpillwayCallback
from steps import assert_nothing_left

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]


class Here(ClusterEnvironment):
    """The ranks that are there already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "localhost"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        assert size == dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        assert rank == dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Parts(Recorded):
    """Shards itself, as ``ModelParallelStrategy`` wants it."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class ByHand(Own):
    """Its own forward is the model, and its step has the backward in it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        for part in batch.chunk(2):
            loss = super().training_step(part, index)
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


MAKES: dict[str, type[Recorded]] = {"child": Recorded, "own": Own, "gan": Gan, "parts": Parts, "by hand": ByHand}


def strategy(name: str) -> Strategy:
    here: dict[str, Any] = {"cluster_environment": Here(), "process_group_backend": "gloo"}
    if name == "fsdp2":
        made = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        made.cluster_environment = Here()
        return made
    return DDPStrategy(find_unused_parameters=name == "ddp, unused", **here)


def case(name: str, make: str, way: str, options: dict[str, Any]) -> list[str]:
    def trained(*callbacks: Any) -> Any:
        return fit(MAKES[make], *callbacks, strategy=strategy(name), devices=2, use_distributed_sampler=True, **options)

    with spillway.Session(window=1024) as session:
        ours = SpillwayCallback(session=session, min_bytes=0, **WAYS[way])
        course, plain = trained(ours), trained()
        assert course == plain
        stats = [each.stats() for each in ours.attached.values()]
        assert all(each.offloaded_bytes > 0 for each in stats) or way == "budget"
        assert_untouched(course.module)
        found = list(ours.attached)
        del course, plain
        assert_nothing_left(session)
    return found


FOUND = {"child": ["net"], "own": [""], "gan": ["critic", "generator"], "parts": ["net"], "by hand": [""]}


@pytest.mark.parametrize(
    ("name", "make", "way", "options"),
    [
        ("ddp", "child", "regions", {"accumulate_grad_batches": 2}),
        pytest.param("ddp", "own", "budget", {"max_epochs": 4, "num_sanity_val_steps": 0}, marks=pytest.mark.long),
        ("ddp, unused", "gan", "regions", {}),
        ("ddp", "by hand", "budget", {"max_epochs": 4}),
        pytest.param("ddp", "by hand", "regions", {}, marks=pytest.mark.long),
        ("fsdp2", "parts", "regions", {}),
        pytest.param("ddp", "by hand", "offload", {}, marks=pytest.mark.long),
        pytest.param("ddp", "child", "budget", {"max_epochs": 4}, marks=pytest.mark.long),
        pytest.param("ddp", "own", "regions", {"precision": "bf16-mixed"}, marks=pytest.mark.long),
        pytest.param("ddp", "own", "offload", {}, marks=pytest.mark.long),
        pytest.param("ddp, unused", "gan", "offload", {}, marks=pytest.mark.long),
        pytest.param("fsdp2", "parts", "offload", {"precision": "bf16-true"}, marks=pytest.mark.long),
        pytest.param("fsdp2", "parts", "budget", {"max_epochs": 4}, marks=pytest.mark.long),
    ],
)
def test_two_ranks_train_to_the_same_bits(
    name: str, make: str, way: str, options: dict[str, Any], world: World
) -> None:
    found = world.run(case, name, make, way, options)
    assert [sorted(each) for each in found] == [FOUND[make]] * 2
