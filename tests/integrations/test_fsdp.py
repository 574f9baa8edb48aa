"""FSDP2 and DDP on two ranks: the bits of plain PyTorch, as many collectives, and no parameter moves."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import spillway
from integrations.ranks import World
from integrations.training import LENGTH, ROWS, TOKENS, WAYS, WIDTH, Block, Detaching, Model, compare, local
from spillway._torch import Gathered
from spillway.integrations.fsdp import local_share
from spillway.saved_tensors.handles import KeptHandle, unpack
from spillway.saved_tensors.scopes import current_scope

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]

Built = tuple[nn.Module, Model]


def sharded(
    model: Model, *, nested: bool = False, mixed: bool = False, mesh: tuple[int, ...] = (2,), **options: Any
) -> Built:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    names = ("replicate", "shard")[-len(mesh) :]
    options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    for block in model.blocks:
        if nested:
            fully_shard(block.up, **options)
            fully_shard(block.down, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, model


def replicated(model: Model, *, hook: bool = False, **options: Any) -> Built:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, **options)
    if hook:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped, model


def fsdp_case(way: str, block: type[Block], tied: bool, options: dict[str, Any]) -> None:
    def alone() -> Built:
        model = Model(block, tied=tied)
        return (model.bfloat16() if options.get("mixed") else model), model

    # Without FSDP a detached weight is a tensor like any other, and moves. Without modules inside that gather their own
    # parameters, blocks are not recomputed whole.
    moves_more = block is Detaching or ("nested" in options and isinstance(WAYS[way].attached, spillway.Recompute))
    compare(lambda: sharded(Model(block, tied=tied), **options), WAYS[way], alone=None if moves_more else alone)


FSDP: dict[str, dict[str, Any]] = {
    "reshards": {"reshard_after_forward": True},
    "stays": {"reshard_after_forward": False},
    "mixed precision": {"mixed": True},
    "nested": {"nested": True},
    "hsdp": {"mesh": (2, 1)},
    "hsdp of one group": {"mesh": (1, 2)},
}
ways = pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
some_ways = pytest.mark.parametrize("way", ["offload", "attach, regions"])


@ways
def test_fully_shard_in_every_way(world: World, way: str) -> None:
    world.run(fsdp_case, way, Block, False, FSDP["nested"])


@some_ways
@pytest.mark.parametrize("name", FSDP)
@pytest.mark.covered
def test_fully_shard_with_every_option(world: World, name: str, way: str) -> None:
    world.run(fsdp_case, way, Block, False, FSDP[name])


@some_ways
@pytest.mark.parametrize("name", ["reshards"])
def test_fully_shard_with_tied_parameters(world: World, name: str, way: str) -> None:
    world.run(fsdp_case, way, Block, True, FSDP[name])


@pytest.mark.parametrize("way", ["offload", "recompute"])
@pytest.mark.parametrize("name", ["reshards", "stays"])
def test_a_gathered_parameter_stays_where_only_its_storage_tells(world: World, name: str, way: str) -> None:
    world.run(fsdp_case, way, Detaching, False, FSDP[name])
    world.run(detached_case, name)


def detached_case(name: str) -> None:
    """What is saved of a detached weight is the same alias, whose storage goes and comes with the parameter."""
    module, _ = sharded(Model(Detaching), **FSDP[name])
    packed: list[Any] = []

    def pack(tensor: torch.Tensor) -> Any:
        handle = current.pack(tensor)
        packed.append((tensor.shape, handle))
        return handle

    with spillway.Session(window=0) as session, spillway.offload(session=session, min_bytes=0):
        current = current_scope(session)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = module(torch.arange(8)[None]).sum()
        weights = [handle for shape, handle in packed if shape == (WIDTH, 2 * WIDTH)]
        assert weights
        assert all(isinstance(handle, KeptHandle) for handle in weights)
        sizes = {handle.unpack().untyped_storage().nbytes() for handle in weights}
        assert sizes == ({0} if name == "reshards" else {2 * WIDTH * WIDTH * 4})
        loss.backward()


class Casting(nn.Module):
    """Its first operator casts its input, as a norm does that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        result: torch.Tensor = self.linear((wide * wide.square().mean(-1, keepdim=True)).to(x.dtype))
        return result


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_the_first_block_may_get_a_leaf(world: World, reentrant: bool) -> None:
    world.run(leaf_case, reentrant)


def leaf_case(reentrant: bool) -> None:
    """FSDP2 hands a block an alias of its input in forward, and the input itself, a leaf, in the second run."""
    from torch.distributed.fsdp import fully_shard

    def gradients(call: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(Casting() for _ in range(2))
        for block in blocks:
            fully_shard(block)
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        hidden = x
        for block in blocks:
            hidden = call(block, hidden)
        hidden.float().sum().backward()
        assert x.grad is not None
        return [x.grad, *(local(parameter.grad) for parameter in blocks.parameters() if parameter.grad is not None)]

    plain = gradients(lambda block, x: block(x))
    with spillway.Session(window=0) as session:
        for _ in range(2):
            ours = gradients(lambda block, x: spillway.recompute(block, x, use_reentrant=reentrant, session=session))
            assert len(ours) == len(plain) == 5
            assert all(map(torch.equal, ours, plain))


def inside_case() -> None:
    """Only what the block's norm saves is recomputed, after FSDP2 has freed the parameters of the module behind it."""
    from torch.distributed.fsdp import fully_shard

    def trained(frozen: str, save: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or " "))
        for block in model.blocks:
            fully_shard(block.up)
            fully_shard(block)
        fully_shard(model)
        if save is not None:
            spillway.attach(model, policy=spillway.Recompute(save=save), blocks=lambda _, each: isinstance(each, Block))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        torch.manual_seed(dist.get_rank())
        found = []
        for _ in range(5):
            tokens = torch.randint(TOKENS, (ROWS, LENGTH))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            found += [loss.detach(), *(local(each.grad) for each in model.parameters() if each.grad is not None)]
            optimizer.step()
        return [*found, *map(local, model.parameters())]

    everything_but_norms = [spillway.saved_by("matmul"), spillway.saved_by("pointwise"), "c10d::*"]
    for frozen, save in (("", everything_but_norms), ("blocks.1", "matmul")):
        assert all(map(torch.equal, trained(frozen, save), trained(frozen, None)))


def test_modules_inside_of_a_block_that_gather_their_own_parameters(world: World) -> None:
    world.run(inside_case)


DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "communication hook": {"hook": True},
}


def ddp_case(way: str, options: dict[str, Any], micro: int) -> None:
    def alone() -> Built:
        model = Model()
        # Nobody calls it.
        model.unused = nn.Linear(2, 2) if "find_unused_parameters" in options else None
        return model, model

    compare(lambda: replicated(alone()[1], **options), WAYS[way], micro=micro, alone=alone if micro == 1 else None)


@some_ways
@pytest.mark.parametrize("name", DDP)
def test_ddp(world: World, name: str, way: str) -> None:
    world.run(ddp_case, way, DDP[name], 1)


@some_ways
def test_ddp_without_synchronization_in_all_but_the_last_backward(world: World, way: str) -> None:
    world.run(ddp_case, way, DDP["gradients in buckets"], 2)


def attached_before_case(kind: str) -> None:
    wrap = sharded if kind == "fsdp" else replicated
    torch.manual_seed(0)
    plain, _ = wrap(Model())
    torch.manual_seed(0)
    model = Model()
    with spillway.Session(window=0) as session:
        policy = WAYS["attach, regions"].attached
        attached = spillway.attach(model, policy=policy, blocks=Block, min_bytes=0, session=session)
        wrapped, _ = wrap(model)
        tokens = torch.randint(TOKENS, (ROWS, LENGTH))
        for each in (plain, wrapped):
            each(tokens).square().mean().backward()
        assert attached.stats().offloaded_bytes > 0
        for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
            assert torch.equal(local(ours.grad), local(theirs.grad))


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_attached_before_the_model_is_wrapped(world: World, kind: str) -> None:
    world.run(attached_before_case, kind)


def test_a_torch_whose_fsdp_keeps_other_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parameter:
        all_gather_outputs = ()

    parameter = Parameter()
    monkeypatch.setattr("spillway._torch._parameters", lambda: [parameter])
    with pytest.raises(spillway.UnsupportedError, match="whose FSDP2 keeps no _unsharded_inner_tensors"):
        Gathered()


GiB = 1 << 30


def test_a_ranks_share_is_what_the_launcher_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert local_share("64GiB") == 64 * GiB
    alone = spillway.Session()._host_budget
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert local_share(1001) == 500
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_share("64GiB") == 8 * GiB
    assert spillway.Session()._host_budget == alone // 8
    for nonsense in ("0", "eight", "-1", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", nonsense)
        with pytest.raises(spillway.UsageError, match=f"LOCAL_WORLD_SIZE: got '{nonsense}' in the environment"):
            local_share("64GiB")
    with pytest.raises(spillway.SizeError, match="total: got '12 parsecs'"):
        local_share("12 parsecs")


def share_case() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "7"
    try:
        assert local_share("64GiB", group=dist.group.WORLD) == 32 * GiB
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    mine = dist.new_group([0])
    if dist.get_rank() == 0:
        assert local_share(100, group=mine) == 100
    else:
        with pytest.raises(spillway.UsageError, match="this process is not in"):
            local_share(100, group=mine)


def test_a_groups_ranks_on_a_host_are_counted(world: World) -> None:
    world.run(share_case)
