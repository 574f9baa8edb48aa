"""The private names of torch in ``spillway/_torch.py`` do what their lines say."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
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
    assert not _torch.hooks_of(model)[0]
    handle = model.register_forward_pre_hook(hook)
    assert list(_torch.hooks_of(model)[0].values()) == [hook]
    handle.remove()
    assert not _torch.hooks_of(model)[0]


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
    _torch.check_names("DDP", model.reducer)
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
        _torch.check_names("FSDP2", one)
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
    assert "replicate" not in _torch.composed_with(nn.Linear(1, 1))


def test_a_torch_without_the_names_is_refused() -> None:
    for kind in ("DDP", "FSDP2"):
        with pytest.raises(UnsupportedError, match=f"{kind} of torch .* has no "):
            _torch.check_names(kind, object())


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


@pytest.fixture
def _group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Seeing(TorchDispatchMode):
    """Counts the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


# attaching, profiler


def test_a_modules_call_can_be_replaced_and_its_frame_has_the_module() -> None:
    frames = []

    def replacement(x: Tensor) -> Tensor:
        frames.append(sys._getframe(1))
        found: Tensor = _torch.own_call(model)(x)
        return found

    model = nn.Linear(2, 2)
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("hook"))
    expected = model(torch.ones(2))
    vars(model)[_torch.PLACE] = replacement
    assert torch.equal(model(torch.ones(2)), expected)
    assert calls == ["hook", "hook"]
    assert frames[0].f_code is _torch.CALLING and frames[0].f_locals["self"] is model
    assert _torch.PLACE not in vars(copy.copy(model))


def test_modules_tell_their_children_and_their_hooks() -> None:
    inner = nn.ReLU()
    model = nn.Sequential(inner, inner)
    assert list(_torch.children_of(model).items()) == [("0", inner), ("1", inner)]
    assert not any(_torch.hooks_of(model)) and not _torch.has_global_hook()
    for register in (
        lambda: model.register_forward_pre_hook(lambda *_: None),
        lambda: model.register_forward_hook(lambda *_: None),
        lambda: model.register_full_backward_pre_hook(lambda *_: None),
        lambda: model.register_full_backward_hook(lambda *_: None),
    ):
        handle = register()
        assert any(_torch.hooks_of(model))
        handle.remove()
    handle = nn.modules.module.register_module_forward_pre_hook(print)
    assert _torch.has_global_hook() and list(_torch.global_pre_hooks.values()) == [print]
    handle.remove()
    assert not _torch.has_global_hook()
    assert vars(model._replicate_for_data_parallel())[_torch.IS_REPLICA]


def test_classes_are_where_their_names_say() -> None:
    for home, name in (_torch.COMPILED_MODULE, _torch.CHECKPOINT_WRAPPER):
        assert issubclass(getattr(import_module(home), name), nn.Module)
    model = nn.Linear(2, 2)
    assert _torch.children_of(torch.compile(model, backend="eager"))["_orig_mod"] is model
    composable = import_module("torch.distributed._composable")
    assert "checkpoint" not in _torch.composed_with(model)
    composable.checkpoint(model)
    assert "checkpoint" in _torch.composed_with(model)


@pytest.mark.usefixtures("_group")
def test_the_active_ddp_is_the_one_whose_forward_runs() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            found.append(_torch.active_ddp())
            return super().forward(x)

    found: list[Any] = []
    wrapper = nn.parallel.DistributedDataParallel(Looks(2, 2))
    wrapper(torch.ones(1, 2))
    assert found == [wrapper] and _torch.active_ddp() is None


@pytest.mark.usefixtures("_group")
def test_a_join_in_which_a_rank_may_end_before_others() -> None:
    wrapper = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert not _torch.may_end_early(wrapper)
    for how, expected in (({}, True), ({"throw_on_early_termination": True}, False), ({"enable": False}, False)):
        with wrapper.join(**how):
            assert _torch.may_end_early(wrapper) is expected
            wrapper(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("_group")
def test_a_collective_tells_its_group() -> None:
    from torch.distributed import _functional_collectives as functional_collectives

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in ("c10d", "_c10d_functional"):
                found.append(_torch.group_of(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    found: list[Any] = []
    group = torch.distributed.group.WORLD
    with Looks():
        torch.distributed.all_reduce(torch.ones(1))
        summed = functional_collectives.all_reduce(torch.ones(1), "sum", group)
        functional_collectives.wait_tensor(summed)
    assert found[:2] == [group, group] and not any(found[2:])


def test_tracers_are_seen() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append((_torch.tracing_state() is not None, _torch.is_fx_tracing()))
            return x + 1

    found: list[tuple[bool, bool]] = []
    Looks()(torch.ones(1))
    torch.fx.symbolic_trace(Looks())
    assert found == [(False, False), (False, True)]


@pytest.mark.filterwarnings("ignore")
def test_a_script_tracer_is_seen() -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(_torch.tracing_state() is not None)
        return x + 1

    torch.jit.trace(function, torch.ones(1), check_trace=False)
    assert found == [True] and _torch.tracing_state() is None


def test_dynamo_leaves_a_skipped_function_out() -> None:
    seen = []

    def skipped(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    _torch.skip_call(skipped)
    assert torch.equal(torch.compile(skipped, backend="eager")(torch.ones(1)), torch.full((1,), 2.0))
    assert seen == [False]


def test_modes_and_autograd_can_be_left_out() -> None:
    x = torch.ones(1, requires_grad=True)
    with Seeing() as seeing:
        with _torch.disable_dispatch():
            assert (x + 1).requires_grad
        with _torch.disable_modes():
            assert (x + 1).requires_grad
        assert seeing.count == 0
        with _torch.below_autograd():
            assert not (x + 1).requires_grad
        assert seeing.count == 1


def test_a_storage_has_one_key() -> None:
    x = torch.ones(4)
    assert _torch.storage_key(x.untyped_storage()) == _torch.storage_key(x[1:].untyped_storage())
    assert _torch.storage_key(x.untyped_storage()) != _torch.storage_key(x.clone().untyped_storage())


def test_operators_tell_their_arguments_and_run_as_composites() -> None:
    dropout = torch.ops.aten.dropout.default
    assert isinstance(dropout, _torch.Overload)
    assert [each.name for each in _torch.arguments_of(dropout)] == ["input", "p", "train"]
    assert torch.equal(_torch.composite(dropout, torch.ones(2), 0.5, False), torch.ones(2))


def test_kernels_of_a_library_end_with_it() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", lambda x, p, train: x * 3, "AutogradMeta")
    x = torch.ones(2, device="meta")
    assert "Mul" in str(torch.dropout(x.requires_grad_(), 0.5, False).grad_fn)
    _torch.end_library(library)
    assert "Mul" not in str(torch.dropout(x, 0.5, False).grad_fn)


def test_trees_have_leaves_and_are_mapped() -> None:
    tree = {"a": (1, [2]), "b": 3}
    assert _torch.tree_leaves(tree) == [1, 2, 3]
    assert _torch.tree_map(lambda leaf: leaf + 1, tree) == {"a": (2, [3]), "b": 4}


@pytest.mark.gpu
def test_an_accelerator_counts_its_bytes_and_can_sleep() -> None:
    before = _torch.device_stats(torch.accelerator.current_device_index())["allocated_bytes"]["all"]["current"]
    held = torch.empty(1 << 20, device=torch.accelerator.current_accelerator())
    after = _torch.device_stats(torch.accelerator.current_device_index())["allocated_bytes"]["all"]["current"]
    assert after - before == held.nbytes
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    _torch.sleep_on_gpu(100_000_000)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) > 10


# runtime


def test_is_profiling_tells_a_profiler() -> None:
    assert not _torch.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiling()
    assert not _torch.is_profiling()


class Seen(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_are_counted_and_can_be_disabled() -> None:
    assert _torch.dispatch_modes() == 0
    with Seen() as seen:
        assert _torch.dispatch_modes() == 1
        torch.ones(1)
        before = seen.count
        with _torch.disable_dispatch():
            torch.ones(1)
        assert seen.count == before > 0


@pytest.mark.gpu
def test_a_stream_has_the_drivers_handle_on_cuda() -> None:
    if torch.version.cuda is None:
        pytest.skip("no CUDA")
    assert _torch.current_device is not None
    assert _torch.stream_handle is not None
    assert _torch.current_device() == torch.cuda.current_device()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert _torch.stream_handle(side.device_index) == side.cuda_stream


# saved_tensors


def test_a_version_counts_writes_and_is_shared_by_views_and_detached_aliases() -> None:
    tensor = torch.ones(4)
    view, alias, data = tensor[:2], tensor.detach(), tensor.data
    before = _torch.version_of(tensor)
    view.add_(1)
    assert _torch.version_of(tensor) == _torch.version_of(view) == _torch.version_of(alias) == before + 1
    assert _torch.version_of(data) == before


def test_the_base_of_a_view_is_its_first_tensor() -> None:
    tensor = torch.ones(4)
    assert _torch.base_of(tensor) is None
    assert _torch.base_of(tensor[1:][1:]) is tensor
    assert _torch.base_of(tensor.detach()) is None


def test_a_storage_has_one_number_however_often_it_is_asked_for() -> None:
    tensor = torch.ones(4)
    number = _torch.storage_key(tensor.untyped_storage())
    gc.collect()
    assert _torch.storage_key(tensor[1:].untyped_storage()) == number
    assert _torch.storage_key(torch.ones(4).untyped_storage()) != number


def test_tensors_over_one_storage_are_aliases() -> None:
    tensor = torch.ones(4)
    assert _torch.is_alias_of(tensor, tensor.data[1:])
    assert not _torch.is_alias_of(tensor, tensor.clone())


def test_conjugate_and_negative_bits_can_be_set() -> None:
    tensor = torch.ones(2, dtype=torch.complex64)
    _torch.set_conj(tensor, True)
    assert tensor.is_conj()
    real = torch.ones(2)
    _torch.set_neg(real, True)
    assert real.is_neg()
    assert torch.equal(real.resolve_neg(), -torch.ones(2))


def test_parameters_and_buffers_are_declared() -> None:
    assert _torch.is_declared(torch.nn.Buffer(torch.ones(1)))
    assert _torch.is_declared(torch.nn.Parameter(torch.ones(1)))
    assert not _torch.is_declared(torch.ones(1))


def test_holders_of_a_tensor_are_counted() -> None:
    tensor = torch.ones(4)
    alone = _torch.holders_of(tensor)
    alias = tensor.detach()
    assert _torch.holders_of(tensor) == (alone[0] + 1, alone[1])
    del alias
    assert _torch.holders_of(tensor) == alone
    leaf = tensor.requires_grad_()
    output = leaf.exp()
    assert _torch.holders_of(leaf)[1] > alone[1]
    del output


def test_the_running_node_is_known_in_its_backward() -> None:
    nodes = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: each, lambda each: nodes.append(_torch.current_node()) or each
    ):
        y = x.sin().cos()
    y.sum().backward()
    assert [node.name() for node in nodes] == ["CosBackward0", "SinBackward0"] and nodes[0] is y.grad_fn
    assert _torch.current_node() is None
    assert _torch.node_number(nodes[0]) == _torch.node_number(nodes[1]) + 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_lists_its_sizes() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.strided)
    assert _torch.nested_size(nested) == [[2, 3], [4, 3]]


def test_leaves_of_nested_containers_come_in_order() -> None:
    assert _torch.tree_leaves([1, (2, {"a": 3})]) == [1, 2, 3]


def test_saved_tensor_hooks_form_a_stack_that_can_be_read_and_changed() -> None:
    hooks = (lambda tensor: tensor, lambda tensor: tensor)
    assert _torch.top_hooks(True) is None
    _torch.push_hooks(*hooks)
    try:
        assert _torch.top_hooks(True) == hooks
    finally:
        _torch.pop_hooks()
    assert _torch.top_hooks(True) is None
    assert _torch.why_hooks_are_disabled() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert _torch.why_hooks_are_disabled() == "not here"


def test_autograd_numbers_its_nodes_and_its_backwards() -> None:
    before = _torch.next_node()
    leaf = torch.ones(1, requires_grad=True)
    output = leaf * 2
    assert _torch.next_node() == before + 1
    assert _torch.graph_task() == -1
    tasks = []
    output.register_hook(lambda gradient: tasks.append(_torch.graph_task()))
    output.sum().backward()
    assert tasks[0] >= 0


def test_a_weak_reference_to_a_storage_lives_as_long_as_its_last_tensor() -> None:
    tensor = torch.ones(4)
    reference = weakref.ref(tensor.untyped_storage())
    view = tensor[1:]
    del tensor
    assert reference() is view.untyped_storage()
    del view
    assert reference() is None


# checkpointing


class Names(_torch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass that notes the functions that are called with it."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_trees_are_flattened_in_order_and_put_together() -> None:
    tree = {"a": [1, (2,)], "b": 3}
    leaves, structure = _torch.tree_flatten(tree)
    assert leaves == _torch.tree_leaves(tree) == [1, 2, 3]
    assert _torch.tree_unflatten([4, 5, 6], structure) == {"a": [4, (5,)], "b": 6}


def test_a_version_counts_writes_also_by_views() -> None:
    tensor = torch.zeros(4)
    assert _torch.version_of(tensor) == 0
    tensor[1:].add_(1)
    assert _torch.version_of(tensor) == 1
    with _torch.preserve_versions((tensor,)):
        tensor.zero_()
    assert _torch.version_of(tensor) == 1


def test_a_storage_has_one_key_and_a_view_its_base() -> None:
    tensor, other = torch.zeros(4), torch.zeros(4)
    view = tensor[1:].view(3, 1)
    keys = [_torch.storage_key(each.untyped_storage()) for each in (tensor, view, other)]
    assert keys[0] == keys[1] != keys[2]
    assert _torch.base_of(view) is tensor
    assert _torch.base_of(tensor) is None


def test_nodes_are_numbered_in_the_order_of_forward() -> None:
    x = torch.ones(2, requires_grad=True)
    first = _torch.next_node()
    y = x.exp()
    assert _torch.node_number(y.grad_fn) == first
    assert _torch.next_node() == first + 1


def test_operators_have_classes_names_and_a_schema() -> None:
    overload, overloads = torch.ops.aten.add.Tensor, torch.ops.aten.add
    assert isinstance(overload, _torch.Overload)
    assert isinstance(overload, _torch.AnyOperator)
    assert isinstance(overloads, _torch.Overloads)
    assert _torch.schema_of(overload).name == "aten::add"
    assert _torch.overload_of(overload) == "Tensor"


def test_modes_see_labels_and_are_counted_and_disabled() -> None:
    wrapped = torch.ones(2).as_subclass(Marked)
    assert _torch.dispatch_modes() == 0
    with Names() as mode:
        assert _torch.dispatch_modes() == 1
        with torch.profiler.record_function("label"):
            torch.ones(1)
        seen = list(mode.seen)
        with _torch.disable_dispatch():
            torch.ones(1)
        with _torch.disable_modes():
            torch.ones(1)
            assert _torch.dispatch_modes() == 0
        assert mode.seen == seen
    assert seen[0] is _torch.LABEL_BEGINS
    assert seen[-1] is _torch.LABEL_ENDS
    Marked.calls.clear()
    with _torch.disable_function(), torch.device("meta"):
        assert _torch.function_modes() == 1
        assert torch.add(wrapped, torch.ones(2)).device.type == "cpu"
    assert Marked.calls == []
    with torch.device("meta"):
        (stacked,) = _torch.function_mode_stack()
        assert isinstance(stacked, torch.utils._device.DeviceContext)
    assert _torch.function_modes() == 0


def test_an_alias_made_inside_a_mode_shares_the_version_counter() -> None:
    class Aliases(Names):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with _torch.disable_dispatch(), _torch.sharing_versions():
                self.alias = args[0].detach()
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(2)
    with Aliases() as mode:
        tensor.exp()
    tensor.add_(1)
    assert _torch.version_of(mode.alias) == _torch.version_of(tensor) == 1


def test_many_tensors_are_copied_at_once() -> None:
    targets, contents = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    _torch.copy_many(targets, contents)
    assert all(map(torch.equal, targets, contents))


def test_dynamo_s_wrapper_tells_its_function() -> None:
    def function() -> int:
        return 3

    assert _torch.without_dynamo(torch.compiler.disable(function)) is function
    assert _torch.without_dynamo(function) is function
    assert _torch.disable_dynamo(function)() == 3


@pytest.mark.parametrize("place", range(len(_torch.KERNEL_SETTINGS)))
def test_a_setting_of_kernels_is_set_to_what_was_read(place: int) -> None:
    get, put = _torch.KERNEL_SETTINGS[place]
    before = get()
    put(before)
    assert get() == before
    if isinstance(before, bool):
        put(not before)
        changed = get()
        put(before)
        # A library that this build of torch lacks stays off.
        assert changed is not before or not before
        assert get() is before


def test_hooks_from_a_number_on_are_removed() -> None:
    calls: list[str] = []
    layer = nn.Linear(2, 2)
    product = layer.weight * 1
    for name in ("first", "second"):
        number = _torch.next_hook()
        layer.weight.register_hook(lambda gradient, name=name: calls.append(f"leaf {name}"))
        layer.weight.register_post_accumulate_grad_hook(lambda each, name=name: calls.append(f"accumulated {name}"))
        product.register_hook(lambda gradient, name=name: calls.append(f"product {name}"))
        layer.register_forward_hook(lambda *each, name=name, **more: calls.append(f"module {name}"), with_kwargs=True)
    assert _torch.next_hook() == number + 4
    for owner in (layer.weight, product, layer):
        _torch.remove_hooks(owner, number)
    layer(product).sum().backward()
    assert calls == ["module first", "product first", "leaf first", "accumulated first"]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_hooks_of_a_node_from_a_number_on_are_removed(is_leaf: bool) -> None:
    calls: list[str] = []
    tensor = torch.ones(2, requires_grad=True)
    tensor = tensor if is_leaf else tensor * 1
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    for name in ("first", "second"):
        number = _torch.next_hook()
        node.register_hook(lambda *gradients, name=name: calls.append(f"hook {name}"))
        node.register_prehook(lambda gradients, name=name: calls.append(f"prehook {name}"))
    _torch.remove_hooks(tensor, number)
    tensor.sum().backward()
    assert calls == ["prehook first", "hook first"]


def test_cached_parametrizations_are_in_their_dictionary() -> None:
    layer = nn.Linear(2, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    namespace, (name,) = _torch.PARAMETRIZED
    assert not _torch.caches_parametrized() and namespace[name] == {}
    with nn.utils.parametrize.cached():
        weight = layer.weight
        assert _torch.caches_parametrized() == 1 and [*namespace[name].values()] == [weight]
    assert not _torch.caches_parametrized() and namespace[name] == {}


def test_older_precisions_follow_newer_ones() -> None:
    newer = torch.backends.cuda.matmul
    assert _torch.older_precisions_fit()
    try:
        for precision in ("tf32", "ieee"):
            newer.fp32_precision = precision
            assert not _torch.older_precisions_fit()
            _torch.fit_older_precisions()
            assert _torch.older_precisions_fit() and newer.fp32_precision == precision
            assert newer.allow_tf32 is (precision == "tf32")
            assert torch.get_float32_matmul_precision() == ("high" if precision == "tf32" else "highest")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_zero_tensors_and_dual_numbers_are_known() -> None:
    assert _torch.is_zero_tensor(torch._efficientzerotensor((2,)))
    assert not _torch.is_zero_tensor(torch.zeros(2))
    _torch.refuse_dual_numbers()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError):
        _torch.refuse_dual_numbers()
