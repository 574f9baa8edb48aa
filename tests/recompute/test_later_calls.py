"""Later calls of a function, which go by what the first one did. One that does something else must be right, too."""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily, is_in_torch_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import spillway
from recompute.regions import (
    Call,
    Changing,
    CountedBlock,
    HiddenAttribute,
    HiddenList,
    Operators,
    Regions,
    gradients_of,
    hides,
    leaf,
    one_place,
)
from spillway.checkpointing.learned import LearnedFunctions
from spillway.errors import InplaceError
from support import assert_identical, grads

pytestmark = one_place

Options = dict[str, Any]
HOWS: dict[str, Options] = {
    "nothing": {},
    "pointwise kept": {"save": ["pointwise", "random"]},
    "products kept": {"save": "matmul"},
    "most offloaded": {"offload": ["inputs", "matmul", "norm", "pointwise", "random"]},
    "saved by": {"offload": [spillway.saved_by("pointwise"), spillway.saved_by("matmul")]},
}
hows = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


# Calls that all do the same.


@hows
def test_a_function_runs_twice_in_each_call_and_is_the_same_in_every_bit(regions: Regions, how: Options) -> None:
    block = CountedBlock()
    regions.compare_often(block, **how)
    for seed in range(4, 7):
        block.calls = 0
        ours = gradients_of(regions, block, seed=seed, **how)
        assert block.calls <= 2
        assert not regions.was_whole()
        assert_identical(ours, gradients_of(None, block, seed=seed))
    assert regions.last is not None
    # What is neither kept nor offloaded is not saved by anybody where it would have to be recomputed.
    assert (regions.last.stats().recomputed_bytes > 0) == (how is not HOWS["most offloaded"])


@hows
def test_more_shapes_than_are_remembered(regions: Regions, how: Options) -> None:
    block = CountedBlock()

    def step(call: Call) -> Iterator[Tensor]:
        for cycle in range(3):
            for size in range(2, 14):
                block.zero_grad()
                torch.manual_seed(cycle)
                x = leaf(2, size, 16)
                with call.context():
                    y = call(block, x * 1)
                y.square().mean().backward()
                yield from (each.clone() for each in grads(x, *block.parameters()))

    regions(step, **how)


def test_a_policy_with_more_shapes_than_are_remembered(regions: Regions) -> None:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kinds = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD, CheckpointPolicy.PREFER_RECOMPUTE)
        return kinds[len(str(operator)) % 3]

    test_more_shapes_than_are_remembered(regions, {"policy": policy})


@hows
def test_shapes_and_strides_in_turn(regions: Regions, how: Options) -> None:
    square = torch.linspace(-1, 1, 64).view(8, 8)
    starts = [square, square.t(), square[:, :4], square[:7], square[::2], square.double().float(), square.double()]

    def step(call: Call) -> Iterator[Tensor]:
        leaves = [start.detach().requires_grad_() for start in starts * 2]
        with call.context():
            outputs = [call(lambda x: (x.exp().sin() * x).cos() @ x.t(), x) for x in leaves]
        for output in outputs:
            output.sum().backward()
        yield from grads(*leaves)

    regions(step, **how)


@pytest.mark.parametrize("how", [{}, {"save": ["aten::sin"]}, {"offload": "matmul"}], ids=str)
def test_memory_formats_change(regions: Regions, how: Options) -> None:
    form = torch.contiguous_format

    def function(x: Tensor) -> Tensor:
        y = x.sin().transpose(0, 2)
        return (y.clone(memory_format=form) @ y.transpose(1, 2).contiguous()).reshape(-1, 5).exp().tanh()

    regions.compare_often(function, **how)
    form = torch.preserve_format
    regions.compare_often(function, **how)


@hows
def test_many_calls_are_alive_in_any_order(regions: Regions, how: Options) -> None:
    blocks = [CountedBlock(), CountedBlock(0.0)]
    blocks[1].load_state_dict(blocks[0].state_dict())

    def step(call: Call) -> Iterator[Tensor]:
        xs = [leaf(seed=seed) for seed in range(4)]
        torch.manual_seed(4)
        losses = []
        for number, x in enumerate(xs):
            with call.context():
                losses.append(call(blocks[number % 2], x * 1).square().mean())
        for number in (2, 0, 3, 1):
            losses[number].backward()
        yield from grads(*xs)

    regions(step, passes=4, **how)


@hows
def test_backward_in_parts_and_twice(regions: Regions, how: Options) -> None:
    block = CountedBlock()

    def step(call: Call) -> Iterator[Tensor]:
        x = leaf()
        torch.manual_seed(5)
        with call.context():
            y = call(block, x * 1)
        yield from torch.autograd.grad(y.sum(), block.down.weight, retain_graph=True)
        yield from torch.autograd.grad(y.square().sum(), [x, block.qkv.weight], retain_graph=True)
        yield from torch.autograd.grad(y.square().sum(), [block.qkv.weight, x, block.up.bias])

    regions(step, passes=4, **how)


@hows
def test_an_output_that_nobody_asks_for(regions: Regions, how: Options) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp().tanh(), x.cos().exp().sigmoid()

    def step(call: Call) -> Iterator[Tensor]:
        for number in range(6):
            x = leaf()
            with call.context():
                first, second = call(function, x * 1)
            asked = first if number % 2 else second
            asked.sum().backward(retain_graph=True)
            if number % 3 == 0:
                asked.sum().backward(retain_graph=True)
                (first.sum() + second.sum()).backward()
            yield from grads(x)

    regions(step, **how)


@hows
def test_gradients_of_gradients(regions: Regions, how: Options) -> None:
    block = Changing()

    def step(call: Call) -> Iterator[Tensor]:
        x = leaf()
        with call.context():
            loss = call(block, x * 1).square().sum()
        yield from torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x, create_graph=True)
        (third,) = torch.autograd.grad(second.square().sum(), x)
        yield from (second.detach(), third)

    regions(step, passes=4, **how)


@hows
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["autocast", "autocast that is off"])
def test_under_autocast(regions: Regions, how: Options, dtype: torch.dtype | None) -> None:
    block = CountedBlock()

    def step(call: Call) -> Iterator[Tensor]:
        x = leaf()
        torch.manual_seed(6)
        block.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
            with call.context():
                y = call(block, x * 1)
            y.float().square().mean().backward()
        yield from grads(x, *block.parameters())

    regions(step, passes=4, **how)


def test_weights_that_autocast_casts_are_not_held(regions: Regions) -> None:
    """What it cast in forward is not held until backward."""
    linear = nn.Linear(16, 16)

    def function(x: Tensor) -> Tensor:
        y: Tensor = linear(linear(x).exp()).exp()
        return linear(y.tanh()).sin()

    def storages() -> set[int]:
        gc.collect()
        size = 2 * linear.weight.numel()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        return {each.untyped_storage()._cdata for each in tensors if each.untyped_storage().nbytes() == size}

    for how in ({}, {"save": "matmul"}):
        for _ in range(4):
            x = leaf()
            before = storages()
            with torch.autocast("cpu", dtype=torch.bfloat16), regions.offload():
                y = spillway.recompute(function, x * 1, session=regions.session, **how)
            assert storages() <= before
            y.float().sum().backward()
            linear.zero_grad()


@hows
def test_another_call_inside(regions: Regions, how: Options) -> None:
    inner = CountedBlock()

    def step(call: Call) -> Iterator[Tensor]:
        for seed in range(4):
            torch.manual_seed(seed)
            inner.zero_grad()
            x = leaf()
            with call.context():
                y = call(lambda x: call(inner, x.sin()).exp(), x * 1)
            y.square().mean().backward()
            yield from (each.clone() for each in grads(x, *inner.parameters()))

    regions(step, **how)


@hows
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_within_a_checkpoint_of_torchs(regions: Regions, how: Options, reentrant: bool) -> None:
    block = CountedBlock()

    def step(call: Call) -> Iterator[Tensor]:
        torch.manual_seed(3)
        block.zero_grad()
        x = leaf()
        y = checkpoint(lambda x: call(block, x.sin()).cos(), x * 1, use_reentrant=reentrant)
        y.square().sum().backward()
        yield from grads(x, *block.parameters())

    regions(step, passes=4, **how)


def test_a_session_holds_nothing_of_a_module_that_is_gone(regions: Regions) -> None:
    gone = []
    for size, how in zip((4, 5, 6), ({}, {"save": "matmul"}, {"offload": "pointwise"}), strict=True):
        block = CountedBlock(0.0)
        for _ in range(4):
            with regions.offload():
                y = spillway.recompute(block, leaf(2, size, 16) * 1, session=regions.session, **how)
            y.sum().backward()
        gone += [weakref.ref(block), weakref.ref(block.bias)]
        del block, y
        gc.collect()
        assert len(regions.session.of(LearnedFunctions)._known) == 1
    assert all(each() is None for each in gone)


@pytest.mark.parametrize("how", [{}, {"offload": ["inputs", "matmul"]}, {"save": "pointwise"}], ids=str)
@pytest.mark.parametrize("asks", [False, True], ids=["never", "in part"])
def test_a_graph_that_is_dropped_leaves_nothing(regions: Regions, how: Options, asks: bool, no_collector: None) -> None:
    block = CountedBlock()
    regions.compare_often(block, **how)
    x = leaf()
    y = x * 1
    with regions.offload():
        loss = spillway.recompute(block, y, session=regions.session, **how).sum()
    dies = weakref.ref(y)
    del y
    if asks:
        torch.autograd.grad(loss, block.down.weight, retain_graph=True)
    del loss
    assert dies() is None
    regions.assert_nothing_left()


def test_inputs_leave_before_the_function_has_ended(regions: Regions) -> None:
    seen = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        seen.append(sum(regions.session.used_bytes))
        return y

    for _ in range(4):
        seen.clear()
        with regions.offload():
            y = leaf() * 1
            for _ in range(4):
                y = spillway.recompute(function, y, session=regions.session, offload="inputs")
        # The last ones are asked for right away, and stay.
        assert seen[1] > 0
        y.sum().backward()


# Calls that do something else than earlier ones, with the same shapes.


class Odd(nn.Module):
    """Does one of several things, and says so by nothing but its operators or what they read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(16, 16)) for _ in range(2)])
        self.register_buffer("fixed", torch.randn(16))
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        way = self.way
        first, second = self.weights if way != "other weight" else reversed(list(self.weights))
        if way == "one weight":
            second = first
        whole = torch.cat([x.sin(), x.cos()], 1) @ first
        y, z = whole.chunk(2, 1) if way != "swapped" else reversed(whole.chunk(2, 1))
        y = (y.exp() * z).tanh() if way != "not the other" else (y.exp() * y).tanh()
        if way == "less":
            return y
        # In either case all of these are there.
        square, other = first @ second, second @ first
        turned = square.t()
        y = y @ (square if way not in ("turned", "other value") else turned if way == "turned" else other)
        zero = 0.0 if way != "sign" else -0.0
        y = y.cos() * (3.0 if way != "number" else 4.0) * (1 / (y.detach().abs() * zero)).atan() + y
        fixed = self.fixed if way != "other constant" else self.fixed * 2
        y = (y.sigmoid() if way != "operator" else y.tanh()) @ second + fixed
        if way == "more":
            y = y.sin().sin()
        if way == "view":
            return (y.view(-1, 16).exp() * y.view(-1, 16)).view(y.shape).sin()
        if way == "in place":
            y = y * 2
            y.mul_(3)
        return (y.view(-1, 2, 8).exp() * y.view(-1, 2, 8)).view(y.shape).sin()


WAYS = [
    *("other weight", "one weight", "swapped", "not the other", "less", "other constant", "number", "sign", "operator"),
    *("more", "view", "in place", "turned", "other value"),
]


@pytest.mark.parametrize("way", WAYS)
@hows
@pytest.mark.covered(times=2)
def test_whatever_else_it_does_is_right(regions: Regions, way: str, how: Options) -> None:
    model = Odd()

    def step(call: Call) -> Iterator[Tensor]:
        for number in range(8):
            model.way = way if number in (3, 4, 6) else ""
            model.zero_grad()
            x = leaf()
            with call.context():
                y = call(model, x * 1)
            # What it would do when backward runs is neither here nor there.
            model.way = random.Random(number).choice(WAYS)
            y.square().mean().backward()
            found = [y.detach(), x.grad, *(each.grad for each in model.weights)]
            yield from (each.clone() for each in found if each is not None)

    regions(step, **how)


class Varying(nn.Module):
    """Does something else when it is told to."""

    def __init__(self, change: Callable[[Varying, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.own = torch.linspace(-1, 1, 16).as_subclass(_Own)
        self.change = change
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        hidden = self.change(self, x, hidden)
        return self.second(hidden * x.sigmoid()).tanh()


class _Own(Tensor):
    pass


@contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x * times

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.times, None


def _by_numpy(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
    hidden = hidden * 2
    if self.is_other:
        hidden.detach().numpy()[...] += 1
    return hidden.sin()


def _attention(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
    q = hidden.unflatten(-1, (2, 8)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH) if self.is_other else nullcontext():
        attended = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return attended.transpose(1, 2).flatten(-2)


def _precision(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
    get, put = torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled
    with _setting(get, put, False) if self.is_other else nullcontext():
        return self.first(hidden)


def _written(hidden: Tensor) -> Tensor:
    with torch.no_grad():
        hidden.add_(1)
    return hidden.sin()


def _written_out(hidden: Tensor) -> Tensor:
    out = torch.empty_like(hidden)
    torch.sin(hidden.detach(), out=out)
    return out + hidden


def _written_by_op(hidden: Tensor) -> Tensor:
    with torch.no_grad():
        torch.ops.aten.add_.Scalar(hidden, 1)
    return hidden.sin()


def _written_foreach(hidden: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_add_([hidden], 1)
    return hidden.sin()


def _other_data(hidden: Tensor) -> Tensor:
    hidden.data = hidden.detach() + 1
    return hidden.sin()


def _no_grad(hidden: Tensor, is_other: bool) -> Tensor:
    with torch.set_grad_enabled(not is_other):
        return hidden.sin()


def _autocast(self: Varying, hidden: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=self.is_other):
        return self.first(hidden).float()


def _generator(is_other: bool) -> torch.Generator | None:
    return torch.Generator().manual_seed(5) if is_other else None


def _on_a_device(hidden: Tensor) -> Tensor:
    with torch.device("cpu"):
        return hidden * torch.full((16,), 2.0)


def _with_dtype(hidden: Tensor, is_other: bool) -> Tensor:
    with _setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64 if is_other else torch.float32):
        return hidden * torch.ones(16).float() * torch.ones(16).sum().float()


def _ends_early(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
    product = self.first(hidden)
    after = (product + 1).sin().exp()
    # Autograd saves the product for the last sine, which comes after something that is computed from it.
    return after if self.is_other else after * product.sin()


def _branches(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
    product = self.first(hidden)
    after = (product + 1).sin().exp()
    return after.cos() if self.is_other else after * product.sin()


def _fails(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
    hidden = hidden.sin()
    try:
        return hidden.sin() @ (hidden if self.is_other else hidden.mT) @ hidden
    except RuntimeError:
        return hidden * 2


CHANGES: dict[str, Callable[[Varying, Tensor, Tensor], Tensor]] = {
    "a number": lambda self, x, hidden: hidden * (3.0 if self.is_other else 2.0),
    "a zero's sign": lambda self, x, hidden: hidden + hidden.detach() * (-0.0 if self.is_other else 0.0),
    "an int for a float": lambda self, x, hidden: hidden.pow(2 if self.is_other else 2.0),
    "a keyword": lambda self, x, hidden: torch.add(hidden, x, alpha=3 if self.is_other else 2),
    "another function": lambda self, x, hidden: hidden.sin() if self.is_other else hidden.cos(),
    "one more function": lambda self, x, hidden: hidden.sin().sin() if self.is_other else hidden.sin(),
    "one function less": lambda self, x, hidden: hidden if self.is_other else hidden.sin(),
    "another tensor of the same shape": lambda self, x, hidden: hidden * (x if self.is_other else hidden.sin()),
    "another part": lambda self, x, hidden: hidden * hidden[..., 8:9] if self.is_other else hidden * hidden[..., 7:8],
    "another part of the same place": lambda self, x, hidden: torch.cat(
        [hidden[..., 0:16:2], hidden[..., 1:16:2] if self.is_other else hidden[..., 8:16]], -1
    ),
    "places by a list": lambda self, x, hidden: hidden[..., [0, 2] * 8] if self.is_other else hidden[..., [0, 1] * 8],
    "transposed": lambda self, x, hidden: (hidden.mT if self.is_other else hidden.transpose(0, 1).mT).sum() + hidden,
    "a part that is turned round": lambda self, x, hidden: hidden * (hidden.flip(-1) if self.is_other else hidden),
    "expanded": lambda self, x, hidden: (
        hidden * (hidden[:1].expand(2, -1, -1) if self.is_other else hidden[1:].expand(2, -1, -1))
    ),
    "an order in a list": lambda self, x, hidden: torch.stack([x, hidden] if self.is_other else [hidden, x]).prod(0),
    "a buffer": lambda self, x, hidden: hidden * (self.table * 1 if self.is_other else self.table),
    "another class of tensor": lambda self, x, hidden: hidden * (self.own if self.is_other else self.table),
    "no tensor": lambda self, x, hidden: functional.linear(
        hidden, self.second.weight, None if self.is_other else self.table
    ),
    "written in place": lambda self, x, hidden: hidden.sin().mul_(2) if self.is_other else hidden.sin(),
    "written below autograd": lambda self, x, hidden: _written(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "written by out=": lambda self, x, hidden: (
        _written_out(hidden) if self.is_other else hidden.detach().sin() + hidden
    ),
    "written by torch.ops": lambda self, x, hidden: _written_by_op(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "written by foreach": lambda self, x, hidden: _written_foreach(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "written by numpy": _by_numpy,
    "other data": lambda self, x, hidden: _other_data(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "without gradients": lambda self, x, hidden: (hidden.detach() if self.is_other else hidden).sin() + hidden,
    "no gradients recorded": lambda self, x, hidden: hidden + _no_grad(hidden, self.is_other),
    "autocast": lambda self, x, hidden: _autocast(self, hidden),
    "a function of its own": lambda self, x, hidden: _Times.apply(hidden, 3.0 if self.is_other else 2.0),
    "kernels of attention": _attention,
    "kernels of products": _precision,
    "another generator": lambda self, x, hidden: hidden * torch.rand(16, generator=_generator(self.is_other)),
    "dropout": lambda self, x, hidden: functional.dropout(hidden, 0.5 if self.is_other else 0.25),
    "a device": lambda self, x, hidden: _on_a_device(hidden) if self.is_other else hidden * torch.ones(16),
    "the default dtype": lambda self, x, hidden: _with_dtype(hidden, self.is_other),
    "a transform": lambda self, x, hidden: torch.func.vmap(torch.sin)(hidden) if self.is_other else hidden.sin(),
    "it ends early": _ends_early,
    "it branches": _branches,
    "it fails within": _fails,
}


@hows
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.covered(times=2)
def test_a_call_that_does_something_else_is_right(regions: Regions, name: str, how: Options) -> None:
    block = Varying(CHANGES[name])
    regions.compare_often(block, calls=3, **how)
    for other in (True, True, False, False, True):
        block.is_other = other
        regions.compare(block, **how)
    regions.assert_nothing_left()


@pytest.mark.parametrize("how", [{}, {"save": ["matmul"]}, HOWS["pointwise kept"]], ids=str)
@pytest.mark.parametrize("reads", ["as it is", "by a view", "not any more"])
def test_what_is_written_below_torch_functions(regions: Regions, reads: str, how: Options) -> None:
    """As an extension may write, or a compiled script."""

    def change(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
        product = self.first(hidden)
        after = product.sin() if reads == "not any more" else x
        if self.is_other:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                product.add_(1)
        read = {"as it is": product, "by a view": product.view(-1).view_as(product), "not any more": after}[reads]
        return read.exp().tanh()

    block = Varying(change)
    regions.compare_often(block, **how)
    before = gradients_of(None, block)
    block.is_other = True
    if reads != "not any more":
        regions.compare(block, **how)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of(None, block)
    block.zero_grad()
    try:
        ours = gradients_of(regions, block, **how)
    except InplaceError:
        pass
    else:
        # As it was saved it may come back.
        assert_identical(ours, before)


def test_what_is_chosen_and_written_later_is_right(regions: Regions) -> None:
    """Autograd does not save the sum."""

    def change(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
        total = hidden + 1
        doubled = total * 2
        if self.is_other:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                total.add_(1)
        return doubled.sin()

    block = Varying(change)
    how: Options = {"save": [torch.ops.aten.add.Tensor]}
    regions.compare_often(block, **how)
    block.is_other = True
    regions.compare(block, **how)


class _Marks(torch.autograd.Function):
    marks = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 1
        if _Marks.marks:
            ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@hows
def test_what_needs_no_gradients_any_more(regions: Regions, monkeypatch: pytest.MonkeyPatch, how: Options) -> None:
    block = Varying(lambda self, x, hidden: torch.linalg.multi_dot([_Marks.apply(hidden[0]), hidden[0].mT, x[0]]))
    regions.compare_often(block, **how)
    monkeypatch.setattr(_Marks, "marks", True)
    regions.compare_often(block, **how)


@hows
def test_a_function_of_several_operators_that_fails_within_and_is_called_again(regions: Regions, how: Options) -> None:
    """What it had autograd save is not what the second call has it save."""
    fails: list[bool] = []

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                fails.append(len(fails) == 1)
                if fails[-1]:
                    raise RuntimeError("out of memory")
            return func(*args, **(kwargs or {}))

    def change(self: Varying, x: Tensor, hidden: Tensor) -> Tensor:
        square = hidden[0] @ hidden[0].mT
        if not self.is_other:
            return torch.linalg.multi_dot([square, square.sin(), square.cos(), x[0]]) + hidden
        fails.clear()
        try:
            with Failing():
                return torch.linalg.multi_dot([square, square.sin(), square.cos(), x[0]]) + hidden
        except RuntimeError:
            return torch.linalg.multi_dot([square, square.sin(), square.cos(), x[0]]) + hidden

    block = Varying(change)
    regions.compare_often(block, **how)
    block.is_other = True
    regions.compare_often(block, **how)


@hows
def test_an_input_whose_numbers_are_negated_when_they_are_read(regions: Regions, how: Options) -> None:
    block = CountedBlock(0.0)

    def step(call: Call) -> Iterator[Tensor]:
        for is_negated in (False, False, False, True, True, False):
            numbers = torch.randn(2, 5, 16, dtype=torch.complex64, requires_grad=True)
            with call.context():
                loss = call(block, numbers.conj().imag if is_negated else numbers.imag).square().mean()
            loss.backward()
            yield from (loss.detach(), *grads(numbers))

    regions(step, **how)


@hows
@pytest.mark.parametrize("each", [False, True], ids=["now and then", "in each call"])
def test_a_number_that_changes(regions: Regions, how: Options, each: bool) -> None:
    """As one that is annealed from step to step."""
    block = CountedBlock()
    for number in range(9):
        block.scale = 1.0 + (number if each else number // 4)
        regions.compare(block, seed=number, **how)
        assert not regions.was_whole()


@hows
def test_constants_that_compare_equal_are_not_the_same(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        for number in (0.0, -0.0, 0, False, 1, True, 1.0, -0.0, 0.0, math.nan, math.nan):
            x = leaf()
            with call.context():
                y = call(lambda x: (x.exp() * number).copysign(number).exp().sin(), x * 1)  # noqa: B023
            y.sum().backward()
            yield from (each.nan_to_num(7).view(torch.int32) for each in grads(x))

    regions(step, **how)


@hows
def test_numbers_that_an_operator_gives(regions: Regions, how: Options) -> None:
    @torch.library.custom_op("spillway_tests::sine_and_first", mutates_args=())
    def sine_and_first(x: Tensor, of: Tensor) -> tuple[Tensor, float]:
        return x.sin(), float(of[0])

    def step(call: Call) -> Iterator[Tensor]:
        for number in (0.0, -0.0, 0.0, 0.0, -0.0):
            of, x = torch.tensor([number]), leaf()
            with call.context():
                y = call(
                    lambda x, of: (x.exp().sin() * math.copysign(1, sine_and_first(x.detach() * 1, of)[1])).sin(), x, of
                )
            y.sum().backward()
            yield from grads(x)

    regions(step, **how)


@hows
def test_tensors_from_outside_are_those_of_the_call(regions: Regions, how: Options) -> None:
    tables = [torch.randn(16) for _ in range(6)]
    table = tables[0]

    def function(x: Tensor) -> Tensor:
        return ((x * table).sin() + torch.tensor([float(i) for i in range(16)]).cos()).exp()

    for each in tables:
        table = each
        regions.compare(function, **how)


@hows
def test_choices_change_from_call_to_call(regions: Regions, how: Options) -> None:
    block = CountedBlock()
    for number, other in enumerate([*HOWS.values(), how, how, *reversed(HOWS.values()), how]):
        regions.compare(block, seed=number, **other)


# Branches that are chosen by Python's random generator, or by a counter.


def _one_or_two(x: Tensor, chance: bool) -> Tensor:
    """Two saved tensors are one value, or two."""
    y, z = x.sin(), x.cos()
    return y.exp() * (z if chance else y).tanh() * y.sin() * (z if chance else y).sin()


def _input_or_made(x: Tensor, chance: bool) -> Tensor:
    """An input takes the place of what was made."""
    y = x.sin()
    return (x if chance else y).cos() * y.exp().sin()


def _input_or_made_twice(x: Tensor, chance: bool) -> Tensor:
    y = x * 2
    a = x if chance else y
    return a.sin() * a.cos() * y.tanh() + (y if chance else x).exp()


def _parameter_or_made(x: Tensor, chance: bool) -> Tensor:
    y = WEIGHT * 2
    return (x @ (WEIGHT if chance else y)).sin() @ y.exp()


def _part_or_part(x: Tensor, chance: bool) -> Tensor:
    first, second = x.exp().chunk(2, -1)
    a, b = (first, second) if chance else (second, first)
    return a.sin() * b.cos() * a.tanh()


def _turned_or_not(x: Tensor, chance: bool) -> Tensor:
    y = x[..., :5].exp()
    return (y.mT if chance else y).sin() @ y.tanh()


def _view_or_made(x: Tensor, chance: bool) -> Tensor:
    y, z = x.exp(), x.tanh()
    return y[0].sin() * (y[1] if chance else z[1]).cos() * z[0].exp()


def _outer_or_made(x: Tensor, chance: bool) -> Tensor:
    y = x.sigmoid()
    return (x * (OUTSIDE if chance else y)).sin() * y.exp()


def _outer_or_made_twice(x: Tensor, chance: bool) -> Tensor:
    y = x + 1
    return (OUTSIDE if chance else y).sin() * y.exp()


def _later_or_earlier(x: Tensor, chance: bool) -> Tensor:
    """What is preserved is saved once, and in the other case only by somebody else."""
    y, z = x.sin(), x.sin()
    return (y * 2 + z).exp() * (y if chance else z).cos()


def _order(x: Tensor, chance: bool) -> Tensor:
    y, z = x.exp(), x.sigmoid()
    return (y.sin() * z.cos()) if chance else (z.sin() * y.cos())


def _chunk_of_one_or_two(x: Tensor, chance: bool) -> Tensor:
    y, z = x.exp(), (x * 2).exp()
    parts = (y.chunk(2, -1)[0], (z if chance else y).chunk(2, -1)[1])
    return parts[0].sin() * parts[1].sin() * z[..., :8].tanh()


WEIGHT = torch.linspace(-1, 1, 256).view(16, 16).requires_grad_()
OUTSIDE = torch.linspace(-1, 1, 160).view(2, 5, 16)
BRANCHES = [
    *(_one_or_two, _input_or_made, _input_or_made_twice, _parameter_or_made, _part_or_part, _turned_or_not),
    *(_view_or_made, _outer_or_made, _outer_or_made_twice, _later_or_earlier, _order, _chunk_of_one_or_two),
]
BRANCH_HOWS: dict[str, Options] = {
    **HOWS,
    "all kept": {"save": "aten::*"},
    "all offloaded": {"offload": "aten::*"},
    "one kept": {"save": ["aten::sin", "aten::mul", "aten::add"]},
    "exponents kept": {"save": "aten::exp"},
    "the others kept": {"save": ["aten::cos", "aten::tanh"]},
}


@pytest.mark.parametrize("how", BRANCH_HOWS.values(), ids=BRANCH_HOWS)
@pytest.mark.parametrize("branch", BRANCHES, ids=[each.__name__.strip("_") for each in BRANCHES])
@pytest.mark.parametrize("by", ["random", "counter", "late", "late, the other way", "input"])
def test_a_branch_by_chance(regions: Regions, branch: Callable[[Tensor, bool], Tensor], by: str, how: Options) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            chance = {
                "random": lambda: random.random() < 0.5,
                "counter": lambda: self.count % 5 in (2, 4),
                "late": lambda: self.count in (5, 7, 8),
                "late, the other way": lambda: self.count not in (5, 7, 8),
                "input": lambda: bool(x.detach().flatten()[0] > 0),
            }[by]()
            return branch(x, chance)

    def step(call: Call) -> Iterator[Tensor]:
        block = Branch()
        random.seed(1)
        for seed in range(10):
            WEIGHT.grad = None
            x = leaf(seed=seed)
            with call.context():
                y = call(block, x * 1)
            y.square().sum().backward()
            yield from (y.detach(), *grads(x))
            if WEIGHT.grad is not None:
                yield WEIGHT.grad.clone()
        yield torch.tensor([block.count, random.random()])

    regions(step, passes=1, **how)


@pytest.mark.parametrize("how", BRANCH_HOWS.values(), ids=BRANCH_HOWS)
def test_branches_of_calls_that_are_alive_at_once(regions: Regions, how: Options) -> None:
    fixed = torch.linspace(0, 1, 160).view(2, 5, 16)

    def function(x: Tensor) -> Tensor:
        is_positive = bool(x.detach().flatten()[0] > 0)
        y = x.exp()
        z = y * 2
        if is_positive:
            z.mul_(3)
        # The same operators in the same order, on an input or on a constant.
        source = x if is_positive else fixed
        return (z.sin() * x).cos() * source.exp().sin()

    def step(call: Call) -> Iterator[Tensor]:
        signs = [1, -1, 1, 1, -1, -1]
        leaves = [(leaf(seed=number).detach().abs() * sign).requires_grad_() for number, sign in enumerate(signs)]
        with call.context():
            outputs = [call(function, x * 1) for x in leaves]
        for place in random.Random(0).sample(range(6), 6):
            outputs[place].sum().backward()
        yield from grads(*leaves)

    regions(step, passes=3, **how)


# Functions that fail.


@hows
def test_what_a_function_raises_comes_as_it_is(regions: Regions, how: Options) -> None:
    fails = False

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        if fails:
            raise ValueError("its own")
        return y.cos()

    for _ in range(3):
        regions.compare_often(function, calls=2, **how)
        fails = True
        with regions.offload(), pytest.raises(ValueError, match="its own"):
            spillway.recompute(function, leaf() * 1, session=regions.session, **how)
        gc.collect()
        regions.assert_nothing_left()
        fails = False


@hows
@pytest.mark.parametrize("late", [0, 1, 2, 3], ids=["first", "second", "third", "later"])
def test_what_was_saved_before_a_function_failed(regions: Regions, how: Options, late: int) -> None:
    """Somebody holds a part of its graph."""
    kept, fails = HiddenList(), False

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp().tanh() @ WEIGHT.detach()
        kept.append(z.sigmoid())
        if fails:
            raise ValueError
        return (y.cos() * z).sigmoid()

    def step(call: Call) -> Iterator[Tensor]:
        nonlocal fails
        for number in range(6):
            fails = number in (late, 5)
            x = leaf()
            kept.clear()
            try:
                with call.context():
                    y = call(function, x * 1)
            except ValueError:
                assert fails
                y = kept[0]
            kept.clear()
            y.square().sum().backward()
            yield from grads(x)

    regions(step, **how)


def test_what_catches_errors_in_a_function_does_not_see_that_a_replay_has_ended(regions: Regions) -> None:
    caught = HiddenList()
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)

    def function(x: Tensor) -> Tensor:
        y = functional.dropout(up(x), 0.3)
        try:
            y = functional.gelu(y)
        except Exception as error:  # noqa: BLE001
            caught.append(error)
            y = y.tanh()
        return down(y)

    # Backward wants nothing that comes after what gelu reads.
    for how in ({}, {"save": "aten::gelu"}):
        regions.compare_often(function, **how)
    assert not caught


@hows
@pytest.mark.parametrize("wraps", [False, True], ids=["as it is", "as another error"])
def test_a_gradient_inside_that_is_taken_in_one_run_only(regions: Regions, how: Options, wraps: bool) -> None:
    """It may be taken in a forward or in a replay, and the function may make an error of its own of what it is told."""

    class Sometimes(nn.Module):
        calls = HiddenAttribute(0)

        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            z = x.exp().sin()
            if self.calls == self.at:
                try:
                    torch.autograd.grad(z.sum(), x, retain_graph=True)
                except Exception as error:
                    if wraps:
                        raise ValueError("wrapped") from error
                    raise
            return z.cos()

    for at in range(1, 9):
        ours, plain = Sometimes(at), Sometimes(0)
        for seed in range(4):
            assert_identical(gradients_of(regions, ours, seed=seed, **how), gradients_of(None, plain, seed=seed))
            regions.assert_nothing_left()


# Modes of the user's, random generators.


@contextmanager
def _within_another() -> Iterator[None]:
    with Operators(), _pop_mode_temporarily():
        yield


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {"a mode": Operators, "a mode aside": _within_another}


def has_no_mode() -> bool:
    """Whether no mode is on, by its stack or by what torch's dispatcher goes by."""
    key = torch._C.DispatchKey.Python
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._dispatch_tls_is_dispatch_key_included(key)


@hows
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("where", ["inside", "around", "around forward", "around backward"])
def test_a_mode_of_the_users_own(
    regions: Regions, how: Options, mode: Callable[[], AbstractContextManager[Any]], where: str
) -> None:
    before = is_in_torch_dispatch_mode(), is_in_torch_dispatch_mode(include_infra_modes=False)

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().tanh().cos() * 2
        with mode() if where == "inside" else nullcontext():
            y = y.cos().exp() @ WEIGHT.detach()
        return (y.exp().cos() * y).sigmoid().exp()

    def step(call: Call) -> Iterator[Tensor]:
        for _ in range(5):
            x = leaf()
            with mode() if where == "around" else nullcontext():
                with call.context(), mode() if where == "around forward" else nullcontext():
                    loss = call(function, x * 1).square().sum()
                with mode() if where == "around backward" else nullcontext():
                    loss.backward()
            assert has_no_mode()
            yield from (loss.detach(), *grads(x))

    regions(step, **how)
    assert before == (is_in_torch_dispatch_mode(), is_in_torch_dispatch_mode(include_infra_modes=False))


@hows
def test_a_mode_of_the_users_sees_all_operators(regions: Regions, how: Options) -> None:
    block = CountedBlock(0.0)
    regions.compare_often(block, **how)
    seen = []
    for region in (regions, None):
        call = Call(region, **how)
        with Operators() as operators, call.context():
            call(block, leaf() * 1)
        seen.append([name for name in operators.names if name != "detach"])
    assert seen[0] == seen[1]


class _Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.Tensor.tanh else output


@hows
def test_a_mode_that_changes_what_functions_give(regions: Regions, how: Options) -> None:
    block = CountedBlock(0.0)

    def doubled(x: Tensor) -> Tensor:
        with _Twice():
            return block(x).tanh()

    regions.compare_often(doubled, **how)

    def step(call: Call) -> Iterator[Tensor]:
        for number in range(5):
            x = leaf()
            with _Twice() if number in (2, 4) else nullcontext():
                with call.context():
                    y = call(lambda x: block(x).tanh().sin(), x * 1)
                y.sum().backward()
            yield from grads(x)

    regions(step, **how)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@hows
def test_what_is_mapped_by_a_transform(regions: Regions, how: Options, compiles: bool) -> None:
    def rows(row: Tensor) -> Tensor:
        return row.cos().exp().sin()

    mapped = torch.func.vmap(rows)
    if compiles:
        mapped = torch.compile(mapped, backend="eager")

    def function(x: Tensor) -> Tensor:
        y = (x.detach().sin() + x).tanh() * 2
        return mapped(y * 2).sigmoid()  # type: ignore[no-any-return]

    regions.compare_often(function, **how)
    assert has_no_mode()


@hows
def test_a_generator_of_ones_own_is_where_it_was(regions: Regions, how: Options) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)).sin().exp()

    ours, plain = Drawing(), Drawing()
    for seed in range(5):
        assert_identical(gradients_of(regions, ours, seed=seed, **how), gradients_of(None, plain, seed=seed))
        assert torch.equal(ours.generator.get_state(), plain.generator.get_state())


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "before and after": lambda x: (
        (x.sin() * torch.bernoulli(torch.full_like(x, 0.5)) * x.detach()).exp()
        * torch.bernoulli(torch.full_like(x, 0.5))
    ),
    "at the end": lambda x: (x.sin() * torch.bernoulli(torch.full_like(x, 0.5))).exp() * 2,
    "at the beginning": lambda x: ((x * torch.rand_like(x)).sin() * torch.bernoulli(torch.full_like(x, 0.5))).exp(),
    "dropout": lambda x: functional.dropout(functional.dropout(x.sin(), 0.3).exp(), 0.5).cos(),
    "noise": lambda x: functional.rrelu(x.sin(), training=True).exp() * torch.randn(16),
}


@pytest.mark.parametrize(
    "how",
    [*HOWS.values(), {"save": "aten::bernoulli"}, {"save": "aten::mul"}, {"offload": "aten::exp"}, {"save": "random"}],
    ids=str,
)
@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
def test_what_draws_random_numbers(regions: Regions, function: Callable[[Tensor], Tensor], how: Options) -> None:
    for seed in range(4):
        regions.compare(function, seed=seed, **how)
        # Where the default generator is, too.
        states = []
        for region in (regions, None):
            gradients_of(region, function, seed=seed, **how)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)


# Kernels that nobody sees.


class _Unseen(torch.autograd.Function):
    """Writes its result by way of numpy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy()[...] = np.sin(x.numpy())
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def _writes_unseen(x: Tensor) -> Tensor:
    y = x.sin()
    y.detach().numpy()[...] *= 2
    return y.exp().tanh()


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "reads what is left out": lambda x: _Unseen.apply(x.cos() * 1 + 1).exp().tanh().sin(),
    "reads what is kept": lambda x: _Unseen.apply(x.cos()).exp().tanh(),
    "reads an input": lambda x: _Unseen.apply(x).exp().tanh().sin(),
    "twice": lambda x: _Unseen.apply(_Unseen.apply(x.exp()).tanh() * 1).sin().exp(),
    "writes": _writes_unseen,
}


@pytest.mark.parametrize(
    "how",
    [
        *HOWS.values(),
        *({"save": f"aten::{name}"} for name in ("cos", "exp", "tanh", "sin")),
        {"offload": ["aten::cos", "aten::exp"]},
        {"save": "aten::*"},
    ],
    ids=str,
)
@pytest.mark.parametrize("function", UNSEEN.values(), ids=UNSEEN)
def test_an_unseen_kernel(regions: Regions, function: Callable[[Tensor], Tensor], how: Options) -> None:
    regions.compare_often(function, **how)


def test_a_partial_replay_that_an_unseen_kernel_makes_wrong_is_not_used(regions: Regions) -> None:
    """What it reads seems to be needed by nobody, and so does what it writes."""
    whole = []
    runs = HiddenList()

    def function(x: Tensor) -> Tensor:
        runs.append(1)
        hidden = (x + 1).detach()
        out = torch.empty_like(x)
        # What was left out has NaN in it when the replay is compared. Torch functions are off: NumPy would be seen.
        with torch._C.DisableTorchFunction():
            out.numpy()[...] = np.sin(hidden.numpy())
        return (x.sin().exp() * out).tanh().exp()

    for _ in range(6):
        runs.clear()
        regions.compare(function, save="aten::exp")
        whole.append(regions.was_whole())
        # Of ours, one is the plain one's.
        assert len(runs) == 3 + whole[-1]
    assert whole == [False, True, False, False, False, False]


@hides
@hows
def test_a_graph_that_is_left_behind(regions: Regions, how: Options, hides: bool) -> None:
    """It can be gone through where Spillway sees who has it. Otherwise it may be refused."""

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))

        def forward(self, x: Tensor) -> Tensor:
            z = (x @ self.weight).tanh().sin()
            self.aux = z.mean()
            return z

    class Hiding(Leaving):
        aux = HiddenAttribute(None)

    make = Hiding if hides else Leaving

    def step(call: Call) -> Iterator[Tensor]:
        function = make()
        for seed in range(4):
            x = leaf(seed=seed)
            function.weight.grad = None
            with call.context():
                z = call(function, x * 1)
            z.sum().backward(retain_graph=True)
            yield from (each.clone() for each in grads(x, function.weight))
            function.aux.backward()
            yield from grads(x, function.weight)

    (regions.right_or_refused if hides else regions)(step, **how)


@hows
def test_a_weight_that_gets_other_memory_is_as_it_was(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        linear = nn.Linear(16, 16, bias=False)
        for number in range(5):
            x = leaf()
            linear.zero_grad()
            with call.context():
                loss = call(lambda x: linear(x.sin().exp()).sin().cos(), x * 1).sum()
            if number > 1:
                linear.weight.data = linear.weight.data * 2
            loss.backward()
            yield from grads(x)

    regions(step, **how)


def test_functions_that_differ_in_one_thing_alone_are_told_apart(regions: Regions) -> None:
    table = torch.arange(16.0)
    functions: Sequence[Callable[[Tensor], Tensor]] = [
        lambda x: (x.exp() * x.sin()).cos(),
        lambda x: (x.sin() * x.exp()).cos(),
        lambda x: (x.exp() * x.exp()).cos(),
        lambda x: (x.exp() * table.sin()).cos(),
        lambda x: (x.exp() * x.double().sin().float()).cos(),
        lambda x: (x.cos() * 1).mul_(2).sin().cos(),
        lambda x: (x.cos() * 1).mul_(3).sin().cos(),
        lambda x: x.exp().view(10, 16).sin().sum(0).cos(),
        lambda x: x.exp().view(10, 16).sin().sum(1).cos(),
    ]

    def step(call: Call) -> Iterator[Tensor]:
        def any_of(x: Tensor, place: int = 0) -> Tensor:
            return functions[next(places)](x)

        for how in HOWS.values():
            order = random.Random(0).choices(range(9), k=20)
            leaves = []
            outputs = []
            for number in order:
                places = itertools.repeat(number)
                leaves.append(leaf())
                with call.context():
                    outputs.append(call(functions[number], leaves[-1] * 1, **how))
            for output in reversed(outputs):
                output.sum().backward()
            yield from grads(*leaves)

    regions(step)
