"""The private names of torch in ``spillway/_torch.py`` do what their lines say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import GraphExecGroup

from spillway import UnsupportedError, _torch

# cli, integrations, compat


def test_own_call_runs_hooks_but_not_what_replaces_the_call() -> None:
    calls = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda module, args: calls.append("hook"))
    model._compiled_call_impl = lambda x: calls.append("replaced")
    model(torch.ones(2))
    assert calls == ["replaced"]
    assert torch.is_tensor(_torch.own_call(model)(torch.ones(2)))
    assert calls == ["replaced", "hook"]


def test_the_frame_of_a_call_has_the_module() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code is _torch.call_code:
                    owners.append(frame.f_locals["self"])
                frame = frame.f_back
            return x

    owners: list[nn.Module] = []
    model = nn.Sequential(Looks())
    model(torch.ones(1))
    assert owners == [model[0], model]


def test_pre_hooks_are_found() -> None:
    def hook(module: nn.Module, args: object) -> None: ...

    model = nn.Linear(2, 2)
    assert not _torch.pre_hooks_of(model)
    handle = model.register_forward_pre_hook(hook)
    assert list(_torch.pre_hooks_of(model).values()) == [hook]
    handle.remove()
    assert not _torch.pre_hooks_of(model)


def test_a_view_has_its_base() -> None:
    tensor = torch.ones(4)
    assert _torch.base_of(tensor) is None
    assert _torch.base_of(tensor[1:].view(3, 1)) is tensor


def test_the_exec_group_is_the_one_that_is_entered() -> None:
    assert _torch.exec_group() is None
    with GraphExecGroup() as group:
        assert _torch.exec_group() is group
    assert _torch.exec_group() is None


def test_leaves_come_in_order() -> None:
    assert _torch.tree_leaves(([1, {"a": 2}], (3,), 4)) == [1, 2, 3, 4]


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of this process alone."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


# optim


def test_norms_are_those_that_clipping_takes() -> None:
    tensors = [torch.randn(5), torch.randn(3, 4)]
    for order in (2.0, float("inf")):
        norms = _torch.foreach_norm(tensors, order, dtype=torch.float32)
        assert [float(norm) for norm in norms] == [float(torch.linalg.vector_norm(one, order)) for one in tensors]


def test_a_wrapper_has_a_shape_and_no_bytes() -> None:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("a shape is known without the operators")

    wrapper = _torch.make_wrapper(Wrapper, (2, 3), dtype=torch.float16, device="cpu", strides=(1, 2))
    assert (wrapper.shape, wrapper.dtype, wrapper.stride()) == ((2, 3), torch.float16, (1, 2))
    with pytest.raises(RuntimeError, match="storage"):
        wrapper.untyped_storage().data_ptr()


def test_a_schema_tells_writes_and_views() -> None:
    written = [bool(one.alias_info and one.alias_info.is_write) for one in _arguments(torch.ops.aten.mul_.Tensor)]
    assert written == [True, False]
    viewed = [one.alias_info is not None for one in _arguments(torch.ops.aten.view.default)]
    assert viewed == [True, False]


def _arguments(operator: Any) -> list[Any]:
    return list(_torch.schema_of(operator).arguments)


def test_a_version_counts_writes_that_autograd_sees() -> None:
    tensor = torch.zeros(2)
    before = _torch.version_of(tensor)
    tensor.add_(1)
    tensor.data.add_(1)
    assert _torch.version_of(tensor) == before + 1


def test_trees_are_listed_and_mapped() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    assert len(_torch.tree_leaves(tree)) == 3
    assert _torch.tree_map_only(torch.Tensor, lambda tensor: tensor.shape[0], tree) == {"a": [1, 2], "b": (1,)}


def test_a_local_part_is_the_object_itself(group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    parameter = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Replicate()])
    other = torch.full((4,), 2.0)
    _torch.set_local_part(parameter, other)
    assert _torch.local_part(parameter) is other
    local = torch.empty(4, device="meta")
    made: Any = _torch.distributed_with(local, parameter)
    assert type(made) is type(parameter) and made.placements == parameter.placements
    assert _torch.local_part(made) is local, "it stays on its own device"


# accumulate


def test_values_of_a_sparse_tensor_share_its_memory() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    _torch.sparse_values(sparse).mul_(2)
    assert sparse.to_dense().tolist() == [6.0, 0.0, 0.0]


def test_a_reducer_knows_what_is_not_reduced(group: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            used: Tensor = self.used(x)
            return used

    model = nn.parallel.DistributedDataParallel(Two())
    _torch.check_ddp(model)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError):
        _torch.check_reduced(model)
    _torch.reset_ddp(model)
    model(torch.ones(1, 2)).sum().backward()


def test_groups_of_parameters_are_found_once_and_cleared(group: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    sharded: list[Any] = [fully_shard(model), model[0], model]
    groups = _torch.fsdp_groups(sharded)
    assert sorted(len(one.fsdp_params) for one in groups) == [2, 2]
    for one in groups:
        _torch.check_fsdp(one)
    sharded[0].set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    assert all(_torch.is_idle(one) for one in sharded)
    unreduced = [each for one in groups for each in one.fsdp_params]
    assert all(each._unsharded_param.grad is not None for each in unreduced)
    for one in groups:
        _torch.drop_unreduced(one)
        assert _torch.partial_reduction(one) is None
    assert not any(each._unsharded_param.grad is not None for each in unreduced)
    _torch.reset_fsdp(sharded)
    assert _torch.is_replicated(nn.Linear(1, 1)) is False


def test_a_torch_without_the_names_is_refused() -> None:
    class Empty:
        reducer = object()

    for check, kind in ((_torch.check_ddp, "DDP"), (_torch.check_fsdp, "FSDP2")):
        with pytest.raises(UnsupportedError, match=f"{kind} of torch .* has no "):
            check(Empty())


# losses


def test_modes_of_devices_are_none_of_the_users() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        pass

    with torch.device("cpu"):
        assert not _torch.has_function_modes()
        with Mode():
            assert _torch.has_function_modes()


def test_transforms_and_batches_are_noticed() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append((_torch.is_transformed(), _torch.is_batched(x)))
        return x

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(2))
    assert seen == [(False, False), (True, True), (True, False)]


def test_a_dispatch_mode_sees_operators() -> None:
    seen = []

    class Mode(_torch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2).add(1)
    assert torch.ops.aten.add.Tensor in seen
