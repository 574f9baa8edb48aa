"""Calls are compared by the functions of torch's that they call, and where one does something else, that is seen. See
NOTE [ Outlines ] in ``regions/outline.py``."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from recompute.regions import CHOICES, Call, HiddenList, Regions, one_place
from recompute.test_tapes import Block, gradients_of, leaf, tapes_of
from spillway.errors import InplaceError, RecomputeError
from spillway.regions import skimmed
from spillway.regions.following import Following
from spillway.regions.outline import Outline
from spillway.regions.proofs import sums
from spillway.regions.skimmed import Skimmed
from spillway.regions.skimming import Skimming
from support import assert_identical, grads

pytestmark = one_place

HOWS = pytest.mark.parametrize("how", [how for how in CHOICES.values() if "watch" not in how])
Calls = list[bool]
KEPT = {"save": ["pointwise", "random"]}


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


@pytest.fixture(autouse=True)
def _nothing_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By other tests in this process."""
    for module in ("spillway.recomputing", "spillway.regions.draft"):
        monkeypatch.setattr(f"{module}.has_compiled", lambda: False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Of each call that was compared so, whether it did what is on its tape."""
    made: Calls = []
    called = Skimmed._called

    def counted(self: Skimmed, *args: Any) -> tuple[Any, bool]:
        output, is_whole = called(self, *args)
        made.append(is_whole)
        return output, is_whole

    monkeypatch.setattr(Skimmed, "_called", counted)
    return made


def outlines_of(session: spillway.Session) -> list[Outline | None]:
    return [None if tape is None else tape.outline for tape in tapes_of(session)]


def known(regions: Regions, function: Callable[..., Tensor], *args: Any, **how: Any) -> None:
    """Call it as often as it takes until it has an outline."""
    for seed in range(2):
        ours = gradients_of(regions, function, *args, seed=seed, **how)
        assert_identical(ours, gradients_of(None, function, *args, seed=seed))
    assert [outline is not None for outline in outlines_of(regions.session)] == [True]


def same(regions: Regions, function: Callable[..., Tensor], *args: Any, seed: int = 7, **how: Any) -> None:
    ours = gradients_of(regions, function, *args, seed=seed, **how)
    assert_identical(ours, gradients_of(None, function, *args, seed=seed))


def often(regions: Regions, function: Callable[..., Tensor], **how: Any) -> None:
    """Four calls: the first two write the tape."""
    for seed in range(4):
        same(regions, function, seed=seed, **how)


@HOWS
def test_nobody_looks_at_operators_and_all_is_the_same_in_every_bit(
    regions: Regions, calls: Calls, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    block = Block()
    known(regions, block, **how)
    monkeypatch.setattr(Following, "__init__", lambda *_: pytest.fail("operators are looked at"))
    for seed in range(2, 6):
        block.calls = 0
        same(regions, block, seed=seed, **how)
    assert calls == [True] * 4
    assert block.calls == 2, "ours and the plain one's"
    assert regions.last is not None
    assert regions.last.stats().recomputed_bytes > 0


class Changing(nn.Module):
    """Does something else when it is told to."""

    def __init__(self, change: Callable[[Changing, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.change = change
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.first(x))
        hidden = self.change(self, x, hidden)
        return self.second(hidden * x.sigmoid()).tanh()


@contextmanager
def _setting(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, times: float) -> Tensor:
        ctx.times = times
        return x * times

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.times, None


def _by_numpy(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
    hidden = hidden * 2
    if self.is_other:
        hidden.detach().numpy()[...] += 1
    return hidden.sin()


def _attention(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
    q = hidden.unflatten(-1, (2, 8)).transpose(1, 2)
    with sdpa_kernel(SDPBackend.MATH) if self.is_other else nullcontext():
        attended = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return attended.transpose(1, 2).flatten(-2)


def _precision(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
    get, put = torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled
    with _setting(get, put, False) if self.is_other else nullcontext():
        return self.first(hidden)


CHANGES: dict[str, Callable[[Changing, Tensor, Tensor], Tensor]] = {
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
    "written in place": lambda self, x, hidden: hidden.sin().mul_(2) if self.is_other else hidden.sin(),
    "written below autograd": lambda self, x, hidden: _written(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "written by out=": lambda self, x, hidden: (
        _written_out(hidden) if self.is_other else hidden.detach().sin() + hidden
    ),
    "written by torch.ops": lambda self, x, hidden: _written_by_op(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "written by foreach": lambda self, x, hidden: _written_foreach(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "other data": lambda self, x, hidden: _other_data(hidden * 2) if self.is_other else (hidden * 2).sin(),
    "without gradients": lambda self, x, hidden: _without(hidden) if self.is_other else hidden.sin() + hidden,
    "no gradients recorded": lambda self, x, hidden: hidden + _no_grad(hidden, self.is_other),
    "autocast": lambda self, x, hidden: _autocast(self, hidden),
    "a function of its own": lambda self, x, hidden: _Doubles.apply(hidden, 3.0 if self.is_other else 2.0),
    "kernels of attention": _attention,
    "kernels of products": _precision,
    "another generator": lambda self, x, hidden: hidden * torch.rand(16, generator=_generator(self.is_other)),
    "dropout": lambda self, x, hidden: functional.dropout(hidden, 0.5 if self.is_other else 0.25),
    "a device": lambda self, x, hidden: _on_a_device(hidden) if self.is_other else hidden * torch.ones(16),
    "the default dtype": lambda self, x, hidden: _with_dtype(hidden, self.is_other),
}


UNTOLD = ("another generator", "dropout", "autocast", "places by a list")
"""Of which there is no tape, or no outline."""


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


def _without(hidden: Tensor) -> Tensor:
    return hidden.detach().sin() + hidden


def _no_grad(hidden: Tensor, is_other: bool) -> Tensor:
    with torch.set_grad_enabled(not is_other):
        return hidden.sin()


def _autocast(self: Changing, hidden: Tensor) -> Tensor:
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


@pytest.mark.parametrize("kept", [{}, KEPT], ids=["all again", "some kept"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_does_something_else_is_right(
    regions: Regions, change: Callable[[Changing, Tensor, Tensor], Tensor], kept: dict[str, Any]
) -> None:
    block = Changing(change)
    often(regions, block, **kept)
    for other in (True, True, False, False, True):
        block.is_other = other
        same(regions, block, **kept)


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in UNTOLD])
def test_what_changes_was_known_by_its_outline(name: str, regions: Regions, calls: Calls) -> None:
    """Or the test above would prove nothing of it."""
    block = Changing(CHANGES[name])
    often(regions, block)
    assert calls == [True, True]
    block.is_other = True
    same(regions, block)
    # Where it is no line, what reads it shows it.
    assert calls == [True, True, False]


def test_memory_that_numpy_writes_is_not_told(regions: Regions, calls: Calls) -> None:
    """Who asks where bytes are may write them, and nothing would tell."""
    block = Changing(_by_numpy)
    block.is_other = True
    often(regions, block)
    assert not calls


@pytest.mark.parametrize("kept", [{}, {"save": ["matmul"]}, KEPT], ids=["all again", "products kept", "some kept"])
@pytest.mark.parametrize("reads", ["as it is", "by a view", "not any more"])
def test_what_is_written_where_nobody_sees_it_shows_by_its_version(
    regions: Regions, reads: str, kept: dict[str, Any]
) -> None:
    """As an extension may write, or a compiled script."""

    def change(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
        product = self.first(hidden)
        after = product.sin() if reads == "not any more" else x
        if self.is_other:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                product.add_(1)
        read = {"as it is": product, "by a view": product.view(-1).view_as(product), "not any more": after}[reads]
        return read.exp().tanh()

    block = Changing(change)
    often(regions, block, **kept)
    block.is_other = True
    try:
        expected = gradients_of(None, block, seed=7)
    except RuntimeError as error:
        # What autograd has saved was written. As it was saved it may come back.
        assert "modified by an inplace operation" in str(error)
        with suppress(InplaceError):
            gradients_of(regions, block, seed=7, **kept)
    else:
        assert_identical(gradients_of(regions, block, seed=7, **kept), expected)


def test_what_is_held_for_the_second_run_alone_and_written_unseen_is_computed_again(
    regions: Regions, calls: Calls
) -> None:
    def change(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
        total = hidden + 1
        doubled = total * 2
        if self.is_other:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                total.add_(1)
        return doubled.sin()

    block = Changing(change)
    how: dict[str, Any] = {"save": [torch.ops.aten.add.Tensor]}
    often(regions, block, **how)
    assert calls == [True, True]
    block.is_other = True
    same(regions, block, **how)
    assert calls == [True, True, True], "nothing of it is read any more"


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


def test_what_needs_no_gradients_any_more_is_seen(regions: Regions, calls: Calls) -> None:
    block = Changing(lambda self, x, hidden: torch.linalg.multi_dot([_Marks.apply(hidden[0]), hidden[0].mT, x[0]]))
    often(regions, block)
    try:
        _Marks.marks = True
        for _ in range(2):
            same(regions, block)
    finally:
        _Marks.marks = False
    assert calls[:2] == [True, True]


def test_a_function_of_several_operators_that_fails_within_and_is_called_again(
    regions: Regions, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had autograd save is not what the second call has it save."""
    fails: list[bool] = []

    class Failing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                fails.append(len(fails) == 1)
                if fails[-1]:
                    raise RuntimeError("out of memory")
            return func(*args, **(kwargs or {}))

    def change(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
        square = hidden[0] @ hidden[0].mT
        if not self.is_other:
            return torch.linalg.multi_dot([square, square.sin(), square.cos(), x[0]]) + hidden
        fails.clear()
        try:
            with Failing():
                return torch.linalg.multi_dot([square, square.sin(), square.cos(), x[0]]) + hidden
        except RuntimeError:
            return torch.linalg.multi_dot([square, square.sin(), square.cos(), x[0]]) + hidden

    block = Changing(change)
    often(regions, block)
    assert calls == [True, True]
    block.is_other = True
    same(regions, block)
    assert calls == [True, True, False]


def test_an_input_whose_numbers_are_negated_when_they_are_read(regions: Regions) -> None:
    block = Block(0.0)

    def gradient(region: Regions | None, is_negated: bool, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        numbers = torch.randn(2, 5, 16, dtype=torch.complex64, requires_grad=True)
        call = Call(region)
        with call.context():
            loss = call(block, numbers.conj().imag if is_negated else numbers.imag).square().mean()
        loss.backward()
        assert numbers.grad is not None
        return [loss.detach(), numbers.grad]

    for is_negated in (False, False, False, False, True, True):
        assert_identical(gradient(regions, is_negated, 3), gradient(None, is_negated, 3))


def test_none_where_a_tensor_was(regions: Regions, calls: Calls) -> None:
    block = Changing(
        lambda self, x, hidden: functional.linear(hidden, self.second.weight, None if self.is_other else self.table)
    )
    often(regions, block)
    block.is_other = True
    same(regions, block)
    assert calls == [True, True, False]


@pytest.mark.parametrize("how", [{}, {"save": ["matmul"]}, {"offload": ["matmul"]}], ids=str)
@pytest.mark.parametrize("what", ["ends early", "branches"])
def test_a_call_that_does_not_come_to_what_it_would_keep(regions: Regions, how: dict[str, Any], what: str) -> None:
    def change(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
        product = self.first(hidden)
        after = (product + 1).sin().exp()
        if self.is_other and what == "ends early":
            return after
        # Autograd saves the product for the last sine, which comes after something that hangs on it.
        return after.cos() if self.is_other else after * product.sin()

    block = Changing(change)
    often(regions, block, **how)
    block.is_other = True
    for _ in range(2):
        same(regions, block, **how)


@pytest.mark.parametrize("first", [False, True], ids=["later", "always"])
def test_what_torch_transforms_is_not_compared_so(regions: Regions, first: bool) -> None:
    block = Changing(
        lambda self, x, hidden: torch.func.vmap(torch.sin)(hidden) if self.is_other or first else hidden.sin()
    )
    often(regions, block)
    block.is_other = True
    for _ in range(2):
        same(regions, block)


def test_what_leaves_is_not_held_by_the_mode(regions: Regions, calls: Calls, no_collector: None) -> None:
    how: dict[str, Any] = {"offload": ["inputs", "matmul"]}
    made = HiddenList()

    def change(self: Changing, x: Tensor, hidden: Tensor) -> Tensor:
        product = self.first(hidden)
        made.append(weakref.ref(product.untyped_storage()))
        return (product + 1).sin()

    block = Changing(change)
    often(regions, block, **how)
    call = Call(regions, **how)
    with call.context():
        loss = call(block, leaf() * 1).square().mean()
    regions.session.synchronize()
    assert calls[-1]
    assert made[-1]() is None
    loss.backward()


class _Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.Tensor.tanh else output


def test_a_mode_around_that_changes_what_functions_give(regions: Regions, calls: Calls) -> None:
    block = Block(0.0)
    known(regions, block)

    def doubled(x: Tensor) -> Tensor:
        with _Twice():
            return block(x).tanh()

    often(regions, doubled)

    def plain(x: Tensor) -> Tensor:
        return block(x).tanh().sin()

    often(regions, plain)
    count = len(calls)
    with _Twice():
        x, y = leaf(), leaf()
        call = Call(regions)
        with call.context():
            call(plain, x * 1).sum().backward()
        plain(y * 1).sum().backward()
    assert_identical([*grads(x)], [*grads(y)])
    assert len(calls) == count, "functions may do anything there"
    assert torch._C._len_torch_function_stack() == 0


class _Own(Tensor):
    pass


def test_another_class_of_tensors_is_no_plain_one(regions: Regions, calls: Calls) -> None:
    block = Changing(lambda self, x, hidden: hidden * (self.own if self.is_other else self.table))
    block.own = torch.linspace(-1, 1, 16).as_subclass(_Own)
    often(regions, block)
    block.is_other = True
    same(regions, block)
    assert calls == [True, True, False]


def test_an_error_leaves_no_mode_and_a_call_that_was_caught_is_right(regions: Regions, calls: Calls) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.fails = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x).sin()
            try:
                return hidden.sin() @ (hidden.mT if not self.fails else hidden) @ hidden
            except RuntimeError:
                return hidden * 2

    block = Failing()
    often(regions, block)
    assert calls == [True, True]
    block.fails = True
    same(regions, block)
    assert calls == [True, True, False]
    assert torch._C._len_torch_function_stack() == 0
    block.fails = False
    block.linear.register_forward_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        gradients_of(regions, block)
    assert torch._C._len_torch_function_stack() == 0


def test_what_is_compiled_is_left_alone(regions: Regions, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(0.0)
    known(regions, block)
    monkeypatch.setattr("spillway.recomputing.has_compiled", lambda: True)
    same(regions, block)
    assert not calls


def test_all_is_compared_now_and_then(regions: Regions, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """What functions of torch's do is taken to hang on what they are given: one that does not is found out."""
    monkeypatch.setattr("spillway.regions.script._EACH", 1)
    block = Changing(lambda self, x, hidden: hidden.sin().cos())
    often(regions, block)
    assert calls == [True, True]
    found: Any = sums
    numbers = itertools.count()
    monkeypatch.setattr(skimmed, "sums", lambda tensor: found(tensor) + next(numbers))

    def three() -> None:
        for seed in range(3):
            gradients_of(regions, block, seed=seed)

    with pytest.raises(RecomputeError, match="other values when Changing ran again"):
        three()


def test_nothing_of_a_call_outlives_its_graph(regions: Regions, calls: Calls, no_collector: None) -> None:
    block = Block()
    known(regions, block, **KEPT)
    made: list[weakref.ref[Any]] = []
    called = Skimmed._called

    def noted(self: Skimmed, *args: Any) -> tuple[Any, bool]:
        made.append(weakref.ref(self))
        output, is_whole = called(self, *args)
        made.append(weakref.ref(self._mode))
        return output, is_whole

    Skimmed._called, before = noted, called  # type: ignore[method-assign]
    try:
        call = Call(regions, **KEPT)
        x = leaf()
        with call.context():
            loss = call(block, x * 1).square().mean()
        assert made[0]() is not None
        assert made[1]() is None, "autograd has the hooks, and not the mode"
        loss.backward()
        del loss
        assert [each() for each in made] == [None, None]
    finally:
        Skimmed._called = before  # type: ignore[method-assign]
    gc.collect()


def test_a_mode_of_the_users_sees_all_operators(regions: Regions, calls: Calls) -> None:
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    block = Block(0.0)
    known(regions, block)
    counts = []
    for region in (regions, None):
        with Counting() as counting:
            call = Call(region)
            with call.context():
                call(block, leaf() * 1)
        counts.append(counting.seen)
    assert calls == [True]
    assert counts[0] >= counts[1]


def test_a_function_that_gives_another_kind_of_tensor_is_an_error(
    regions: Regions, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Block(0.0)
    known(regions, block)
    take = Skimming._take

    def narrowed(self: Skimming, line: Any, output: Any) -> None:
        take(self, line, output[..., :1] if line.single and output.dim() == 3 else output)

    monkeypatch.setattr(Skimming, "_take", narrowed)
    with pytest.raises(RecomputeError, match="as it gave before for the same arguments"):
        gradients_of(regions, block)
    assert torch._C._len_torch_function_stack() == 0
