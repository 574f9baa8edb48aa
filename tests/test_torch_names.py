"""The private names of torch in ``spillway/_torch.py`` do what their lines say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spillway import _torch

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
    with _torch.disable_subclass_function():
        torch.add(wrapped, 1)
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


def test_code_of_a_subclass_runs_inside_a_mode_where_told_to() -> None:
    class Detaches(Names):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with _torch.dispatch_to_subclasses(), _torch.disable_modes():
                self.alias = args[0].detach()
            return func(*args, **(kwargs or {}))

    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(2)
    with Detaches() as mode:
        fake.exp()
    assert isinstance(fake, _torch.FakeTensor)
    assert isinstance(mode.alias, _torch.FakeTensor)


def test_many_tensors_are_copied_at_once() -> None:
    targets, contents = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    _torch.copy_many(targets, contents)
    assert all(map(torch.equal, targets, contents))


def test_a_backward_is_plain_and_calls_back_at_its_end() -> None:
    notes: list[Any] = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _torch.at_end_of_backward(lambda: notes.append("end"))
            notes.append(_torch.is_plain_backward())
            return grads[0]

    x = torch.ones(1, requires_grad=True)
    Notes.apply(x).backward()  # type: ignore[no-untyped-call]
    torch.autograd.grad(Notes.apply(x), x)  # type: ignore[no-untyped-call]
    assert notes == [True, "end", False, "end"]


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
