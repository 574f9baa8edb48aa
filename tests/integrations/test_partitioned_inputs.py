"""``partition_inputs``: of an input that two ranks have, each keeps a half until the region runs again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import spillway
from integrations.ranks import World
from integrations.training import Block, Detaching, Model, Way, compare
from spillway import Recompute, UsageError
from support import assert_identical, assert_nothing_left

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]


class Gathers:
    """Counts how often parts are put together, or fingerprints given around."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Gathers:
        self._patch = pytest.MonkeyPatch()
        gather = dist.all_gather_into_tensor

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return gather(*args, **kwargs)

        self._patch.setattr(dist, "all_gather_into_tensor", counted)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def everyone() -> Any:
    return dist.group.WORLD


HOWS: dict[str, dict[str, Any]] = {
    "kept": {},
    "offloaded": {"offload": "inputs"},
    "saved": {"save": ["inputs", "matmul"]},
    "offloaded, with saved_by": {"offload": ["inputs", spillway.saved_by("matmul")]},
    "reentrant": {"use_reentrant": True},
    "reentrant, offloaded": {"use_reentrant": True, "offload": "inputs"},
}

INPUTS: dict[str, Callable[[], Tensor]] = {
    "even": lambda: torch.randn(4, 32),
    "odd": lambda: torch.randn(3, 5, 7),
    "two elements": lambda: torch.randn(2),
    "three elements": lambda: torch.randn(3),
    "transposed": lambda: torch.randn(5, 6).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "behind others": lambda: torch.randn(5, 9)[2:],
    "bfloat16": lambda: torch.randn(5, 7, dtype=torch.bfloat16),
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex128),
    "every second": lambda: torch.randn(5, 8)[:, ::2],
    "broadcast": lambda: torch.randn(5, 1).expand(5, 4),
    "one element": lambda: torch.randn(1),
}
WHOLE = {"every second", "broadcast", "one element"}


def chain(x: Tensor) -> Tensor:
    return (x.sin() * x).tanh() * 2


def step(make: Callable[[], Tensor], how: dict[str, Any] | None, session: spillway.Session) -> list[Tensor]:
    """Two functions, each a region, on one input and on what the first makes of it."""
    torch.manual_seed(0)
    leaf = make().detach().requires_grad_()
    x = leaf * 2 if leaf._base is None else leaf
    for _ in range(2):
        x = chain(x) if how is None else spillway.recompute(chain, x, session=session, **how)
    loss = x.abs().sum()
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad]


SOME_HOWS = ["offloaded", "reentrant"]


def shapes_case(name: str) -> None:
    plain = step(INPUTS[name], None, spillway.Session.default())
    with spillway.Session(window=0) as session:
        for how in HOWS.values() if name == "odd" else (HOWS[each] for each in SOME_HOWS):
            with spillway.offload(policy=spillway.policies.Keep(), min_bytes=0, session=session):
                ours = step(INPUTS[name], {**how, "partition_inputs": everyone()}, session)
            assert_identical(ours, plain)
            gc.collect()
            assert_nothing_left(session)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_any_shape_come_back_bit_for_bit(world: World, name: str) -> None:
    world.run(shapes_case, name)


def strides_case() -> None:
    """The function sees the strides and the alignment that it saw."""
    seen: list[tuple[Any, ...]] = []

    def looks(x: Tensor) -> Tensor:
        seen.append((x.shape, x.stride(), x.data_ptr() % 512, x.dtype))
        return x.sin().exp()

    for name, make in INPUTS.items():
        seen.clear()
        x = make().requires_grad_()
        y = spillway.recompute(looks, x, partition_inputs=everyone())
        with Gathers() as gathers:
            y.abs().sum().backward()
        assert seen[0] == seen[-1], name
        assert gathers.count == (name not in WHOLE), name


def test_the_re_run_sees_the_strides_and_the_alignment_of_the_first(world: World) -> None:
    world.run(strides_case)


def halves_case(name: str, context: bool) -> None:
    """Inputs die with their last name, of 4 KiB each rank holds 2, and one gather brings one back."""
    width, rows = 32, 32
    how = {**HOWS[name], "partition_inputs": everyone()}
    blocks = [Block() for _ in range(3)]
    for _ in range(2):
        leaf = torch.randn(rows, width, requires_grad=True)
        storages = []
        with spillway.Session(window=0) as session:
            around = spillway.offload(
                policy=spillway.policies.Keep() if not context else None, min_bytes=0, session=session
            )
            with around:
                x = leaf * 2
                for block in blocks:
                    storages.append(weakref.ref(x.untyped_storage()))
                    x = spillway.recompute(block, x, session=session, **how)
            del block
            assert [storage() for storage in storages] == [None] * 3
            session.synchronize()
            if "offloaded" in name and "norm" not in str(how):
                halves = 3 * rows * width * 4 // 2
                moved = around.stats().offloaded_bytes
                assert moved >= halves if context or "saved_by" in name else moved == halves, (moved, halves)
            with Gathers() as gathers:
                x.sum().backward()
            # The trial of a function that is new in a session runs on the same gathered inputs.
            assert gathers.count == 3
            del x, around
            gc.collect()
            assert_nothing_left(session)


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("name", HOWS)
def test_each_rank_holds_a_half_of_each_input(world: World, name: str, context: bool) -> None:
    world.run(halves_case, name, context)


def tensor_parallel_case(name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def steps(how: dict[str, Any] | None, session: spillway.Session) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), *(Block() for _ in range(3)))
        for block in model[1:]:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if how is not None:
            policy = Recompute(**how, partition_inputs=mesh)
            spillway.attach(model, policy=policy, blocks=Block, min_bytes=0, session=session)
        seen = []
        for _ in range(2):
            x = torch.randn(5, 32, requires_grad=True)
            loss = model(x).square().mean()
            model.zero_grad()
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            seen += [loss.detach(), x.grad, *(getattr(each, "_local_tensor", each).clone() for each in gradients)]
        return seen

    plain = steps(None, spillway.Session.default())
    with spillway.Session(window=0) as session:
        assert_identical(steps(HOWS[name], session), plain)
        gc.collect()
        assert_nothing_left(session)


@pytest.mark.parametrize("name", HOWS)
def test_blocks_that_are_split_over_ranks(world: World, name: str) -> None:
    world.run(tensor_parallel_case, name)


def differing_case() -> None:
    rank = dist.get_rank()
    x = torch.randn(4, 4, requires_grad=True)
    with spillway.Session() as session:
        other = torch.randn(4, 4 + rank, requires_grad=True)
        with pytest.raises(UsageError, match="other shapes, strides or dtypes in rank 1"):
            spillway.recompute(chain, other, partition_inputs=everyone(), session=session)
        other = (x.detach() + rank).requires_grad_()
        with pytest.raises(UsageError, match="another content in rank 1"):
            spillway.recompute(chain, other, partition_inputs=everyone(), session=session)
        spillway.recompute(chain, x, partition_inputs=everyone(), session=session)
        with pytest.raises(UsageError, match="another content in rank 1"):
            spillway.recompute(chain, other, partition_inputs=everyone(), check_partition=True, session=session)
        with Gathers() as gathers:
            spillway.recompute(chain, x, partition_inputs=everyone(), session=session)
        assert not gathers.count


def test_inputs_that_differ_between_ranks_are_refused_on_all_of_them(world: World) -> None:
    world.run(differing_case)


def in_place_case() -> None:
    x = torch.randn(4, 4, requires_grad=True) * 1
    y = spillway.recompute(chain, x, partition_inputs=everyone())
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        y.sum().backward()

    def writes(x: Tensor) -> Tensor:
        return x.mul_(2).sin().exp()

    def gradient(call: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(0)
        leaf = torch.randn(4, 4, requires_grad=True)
        call(leaf * 1).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    ours = gradient(lambda x: spillway.recompute(writes, x, partition_inputs=everyone()))
    assert torch.equal(ours, gradient(writes))


def test_inputs_that_are_written(world: World) -> None:
    world.run(in_place_case)


def twice_case() -> None:
    x = torch.randn(5, 3, requires_grad=True)
    plain = chain(chain(x)).sum()
    (wanted,) = torch.autograd.grad(plain, x)
    y = chain(spillway.recompute(chain, x * 1, partition_inputs=everyone())).sum()
    for retain in (True, False):
        (got,) = torch.autograd.grad(y, x, retain_graph=retain)
        assert torch.equal(got, wanted)


def test_a_graph_that_is_used_twice(world: World) -> None:
    world.run(twice_case)


def nested_case(inner: dict[str, Any], outer: dict[str, Any]) -> None:
    from torch.utils.checkpoint import checkpoint

    def both(x: Tensor) -> Tensor:
        return chain(spillway.recompute(chain, x.cos(), partition_inputs=everyone(), **inner))

    x = torch.randn(5, 3, requires_grad=True)
    (wanted,) = torch.autograd.grad(chain(chain(x.cos())).sum(), x)
    for call in (
        lambda x: spillway.recompute(both, x, **outer),
        lambda x: checkpoint(both, x, use_reentrant=False),
    ):
        (got,) = torch.autograd.grad(call(x).sum(), x)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("inner", [{}, {"save": "inputs"}, {"offload": "inputs"}])
def test_regions_in_regions(world: World, inner: dict[str, Any]) -> None:
    world.run(nested_case, inner, {})


def dropped_case() -> None:
    x = torch.randn(6, 32, requires_grad=True)
    first, second = Block(), Block()
    (wanted,) = torch.autograd.grad(second(first(x)).sum(), x)
    with spillway.offload(policy=spillway.policies.Keep(), min_bytes=0):
        y = spillway.recompute(first, x, partition_inputs=everyone(), drop_output=True)
        y = spillway.recompute(second, y, partition_inputs=everyone())
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, wanted)


def test_beside_an_output_that_is_dropped(world: World) -> None:
    world.run(dropped_case)


def shards_case(reshards: bool, block: type[Block], options: dict[str, Any]) -> None:
    """All ranks have the same tokens here, so that FSDP2's own group may split inputs as well."""
    from torch.distributed.fsdp import fully_shard

    def build() -> tuple[nn.Module, Model]:
        model = Model(block)
        for each in model.blocks:
            fully_shard(each, reshard_after_forward=reshards)
        fully_shard(model, reshard_after_forward=reshards)
        return model, model

    how = Recompute(partition_inputs=everyone(), **options)
    compare(build, Way(offloads={}, regions=how), same=True)
    compare(build, Way(attached=how), same=True) if options.get("offload") else None


@pytest.mark.parametrize(
    ("reshards", "block", "options"),
    [
        (True, Block, {"offload": "inputs"}),
        (True, Detaching, {"use_reentrant": True}),
        (False, Block, {"use_reentrant": True}),
        (False, Detaching, {"offload": "inputs"}),
    ],
)
def test_beside_fully_shard(world: World, reshards: bool, block: type[Block], options: dict[str, Any]) -> None:
    world.run(shards_case, reshards, block, options)


def groups_case() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mine = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(UsageError, match="a group that rank 1 is not in"):
            Recompute(partition_inputs=mine)
    else:
        # In a group of one there is nothing to split.
        x = torch.randn(4, 4, requires_grad=True)
        with Gathers() as gathers:
            spillway.recompute(chain, x, partition_inputs=mine).sum().backward()
        assert not gathers.count
    with pytest.raises(UsageError, match="a mesh of 2 dimensions"):
        Recompute(partition_inputs=init_device_mesh("cpu", (1, 2)))
    with pytest.raises(UsageError, match="got 'tp', expected a torch"):
        Recompute(partition_inputs="tp")  # type: ignore[arg-type]


def test_groups_that_cannot_be_meant(world: World) -> None:
    world.run(groups_case)


def test_without_any_group() -> None:
    with pytest.raises(UsageError, match="not initialized"):
        Recompute(partition_inputs="tp")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="without partition_inputs"):
        Recompute(check_partition=True)
