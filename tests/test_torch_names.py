"""The contracts of torch's private names: a new torch that breaks one fails here, by its name."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway import _torch

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
    number = _torch.storage_number(tensor.untyped_storage())
    gc.collect()
    assert _torch.storage_number(tensor[1:].untyped_storage()) == number
    assert _torch.storage_number(torch.ones(4).untyped_storage()) != number


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
