"""The private names of torch in ``spillway/_torch.py`` do what their lines say."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spillway import _torch


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
    assert not _torch.is_composed(model)
    composable.checkpoint(model)
    assert _torch.is_composed(model)


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
