"""A function that does what it did before is not run again: its operators are. And where it does something else, that
is seen. See NOTE [ Tapes ] in ``regions/tape.py``."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from recompute.regions import CHOICES, Call, HiddenAttribute, HiddenList, Regions, hides, one_place
from spillway.errors import RecomputeError
from spillway.regions.tape import Tape
from spillway.regions.trial import Trial
from support import assert_identical, grads

pytestmark = one_place

HOWS = pytest.mark.parametrize("how", [how for how in CHOICES.values() if "watch" not in how])


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


class Block(nn.Module):
    """Attention and an MLP with something random, which count their calls. (Dropout writes in place on a CPU.)"""

    calls = HiddenAttribute(0)

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = dropout
        self.scale = 1.0
        self.register_buffer("bias", torch.linspace(0, 1, 16))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(-2)) * self.scale + self.bias
        kept = torch.bernoulli(torch.full_like(x, 1 - self.dropout))
        return x + self.down(functional.gelu(self.up(x * kept)))


def leaf(*sizes: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(sizes or (2, 5, 16)), generator=generator, requires_grad=True)


def gradients_of(
    regions: Regions | None, function: Callable[..., Tensor], *args: Any, seed: int = 0, **how: Any
) -> Any:
    """Loss and gradients of one call, and of what it closes over if it is a module."""
    call = Call(regions, **how)
    torch.manual_seed(seed)
    x = leaf()
    with call.context():
        loss = call(function, x * 1, *args).square().mean()
    loss.backward()
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    found = [loss.detach(), *grads(x, *(each for each in parameters if each.grad is not None))]
    for parameter in parameters:
        parameter.grad = None
    return found


def tapes_of(session: spillway.Session) -> list[Tape | None]:
    return [
        tape
        for proofs in session._proofs.values()
        for tapes in proofs.script._tapes.values()
        for tape in tapes.values()
    ]


def followed(regions: Regions, function: Callable[..., Tensor], *args: Any, **how: Any) -> None:
    """Call it as often as it takes, and be sure that there is a tape."""
    for seed in range(3):
        assert_identical(
            gradients_of(regions, function, *args, seed=seed, **how), gradients_of(None, function, *args, seed=seed)
        )
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


@HOWS
def test_a_function_is_not_run_again(regions: Regions, how: dict[str, Any]) -> None:
    block = Block()
    followed(regions, block, **how)
    for seed in range(3, 6):
        block.calls = 0
        ours = gradients_of(regions, block, seed=seed, **how)
        assert block.calls == 1
        assert_identical(ours, gradients_of(None, block, seed=seed))
    assert regions.last is not None
    assert regions.last.stats().recomputed_bytes > 0


def test_of_more_sizes_in_turn_than_there_is_room_for_the_first_keep_their_tapes(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is given up before it is used again would be written anew each time, which costs two re-runs."""
    written, write = [], Trial._tape

    def counted(self: Trial, tensors: Sequence[Tensor]) -> Tape | None:
        written.append(tensors[0].shape)
        return write(self, tensors)

    monkeypatch.setattr(Trial, "_tape", counted)
    block = Block(0.0)
    for cycle in range(4):
        for size in range(30):
            x = leaf(2, size + 2, 16)
            with regions.offload() as _:
                spillway.recompute(block, x * 1, session=regions.session).sum().backward()
        assert len(written) == len(set(written)) == (24 if cycle else 0)
    block.calls = 0
    x = leaf(2, 2, 16)
    with regions.offload() as _:
        spillway.recompute(block, x * 1, session=regions.session).sum().backward()
    assert block.calls == 1
    # Those that are not used for long make room.
    for _ in range(200):
        with regions.offload() as _:
            spillway.recompute(block, leaf(2, 31, 16) * 1, session=regions.session).sum().backward()
    assert len(written) == 25


@pytest.mark.parametrize("watch", [True, False])
def test_a_session_holds_nothing_of_a_module_that_is_gone(regions: Regions, watch: bool) -> None:
    gone = []
    for size in (4, 5, 6):
        block = Block(0.0)
        for _ in range(4):
            x = leaf(2, size, 16)
            with regions.offload() as _:
                spillway.recompute(block, x * 1, watch=watch, session=regions.session).sum().backward()
        gone += [weakref.ref(block), weakref.ref(block.bias)]
        del block
        gc.collect()
        assert len(regions.session._proofs) == 1
    assert all(each() is None for each in gone)


def test_a_number_that_changes_is_seen(regions: Regions) -> None:
    """As one that is annealed from step to step: the call is kept, and the next tape has it."""
    block = Block()
    followed(regions, block)
    block.scale = 0.5
    for seed in (7, 8, 9):
        assert_identical(gradients_of(regions, block, seed=seed), gradients_of(None, block, seed=seed))
    # One loss, and a tape that was written anew.
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_where_a_number_changes_in_each_call_there_is_no_tape(regions: Regions) -> None:
    block = Block()
    for number in range(12):
        block.scale = 1.0 + number
        block.calls = 0
        ours = gradients_of(regions, block, seed=number)
        assert_identical(ours, gradients_of(None, block, seed=number))
    assert tapes_of(regions.session) == []
    block.calls = 0
    gradients_of(regions, block)
    assert block.calls == 2


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
@pytest.mark.parametrize("how", [each for name, each in CHOICES.items() if name != "saved_by" and "watch" not in each])
def test_whatever_else_it_does_is_seen(regions: Regions, way: str, how: dict[str, Any]) -> None:
    model = Odd()

    def function(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    x = leaf()

    def step(regions: Regions | None) -> list[Tensor]:
        call = Call(regions, **how)
        with call.context():
            y = call(function, x * 1)
        # What it does when backward runs is neither here nor there.
        model.way, now = random.Random(0).choice(WAYS), model.way
        y.square().mean().backward()
        model.way = now
        found = [y.detach(), x.grad, *(each.grad for each in model.weights if each.grad is not None)]
        x.grad = None
        model.zero_grad()
        return [each for each in found if each is not None]

    model.way = ""
    for _ in range(2):
        # The function itself runs again: as it was.
        call = Call(regions, **how)
        with call.context():
            y = call(function, x * 1)
        y.square().mean().backward()
        x.grad = None
        model.zero_grad()
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]
    assert_identical(step(regions), step(None))
    model.way = way
    assert_identical(step(regions), step(None))


def test_a_function_that_calls_no_operator_more_or_less_reads_what_it_reads(regions: Regions) -> None:
    """Tensors from outside are those of the call, and not those of the call that the tape was written of."""
    tables = [torch.randn(16) for _ in range(6)]
    numbers = iter(range(6))
    table = tables[0]

    def function(x: Tensor) -> Tensor:
        return ((x * table).sin() + torch.tensor([float(i) for i in range(16)]).cos()).exp()

    for number in numbers:
        table = tables[number]
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_a_weight_that_is_written_before_backward_is_refused(regions: Regions) -> None:
    block = Block()
    followed(regions, block)
    with regions.offload():
        loss = spillway.recompute(block, leaf() * 1, session=regions.session).sum()
    with torch.no_grad():
        block.qkv.weight.mul_(2)
    with pytest.raises(RecomputeError, match="written in place"):
        loss.backward()


def test_what_is_saved_and_written_is_refused(regions: Regions) -> None:
    kept = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        kept[:] = [y]
        return y.cos().exp()

    for _ in range(2):
        gradients_of(regions, function)
    with regions.offload():
        loss = spillway.recompute(function, leaf() * 1, session=regions.session).sum()
    with torch.no_grad():
        kept[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("products", [1, 2])
def test_what_is_preserved_and_written_is_computed_again(regions: Regions, products: int) -> None:
    """Autograd did not save it: so writing it is nobody's mistake. Of a product of a product nobody holds the first."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        for _ in range(products):
            y = y @ weight
        return (y + 1).sin().cos(), y

    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))

    def step(regions: Regions | None, writes: bool) -> list[Tensor]:
        call = Call(regions, save="matmul")
        x = leaf()
        with call.context():
            z, y = call(function, x * 1, weight)
        loss = z.sum()
        if writes:
            with torch.no_grad():
                y.zero_()
        loss.backward()
        return [z.detach(), *grads(x)]

    for number in range(5):
        assert_identical(step(regions, writes=number > 2), step(None, writes=number > 2))
    (tape,) = tapes_of(regions.session)
    assert tape is not None
    assert len(tape.handed) == 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda y: y.zero_(),
    "an alias": lambda y: y.detach().mul_(2),
    "foreach": lambda y: torch._foreach_mul_([y], 2.0),
    "out": lambda y: torch.add(y, 1, out=y),
}


@pytest.mark.parametrize("how", [{"save": "matmul"}, {"offload": "matmul"}, {}], ids=["save", "offload", "all again"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_preserved_and_written_by_a_lost_call_is_as_it_was(
    regions: Regions, write: str, how: dict[str, Any]
) -> None:
    """Autograd did not save it, and the tape has read it."""

    class Writing(nn.Module):
        writes = False

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            # Of two dimensions: autograd knows all names of what comes of it.
            y = x.flatten(0, 1) @ weight
            z = (y + 1).sin().cos()
            if self.writes:
                with torch.no_grad():
                    WRITES[write](y)
            return z

    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    function = Writing()
    followed(regions, function, weight, **how)
    for seed in range(3, 6):
        function.writes = seed == 4
        assert_identical(
            gradients_of(regions, function, weight, seed=seed, **how), gradients_of(None, function, weight, seed=seed)
        )


def test_a_generator_of_ones_own_is_where_it_was(regions: Regions) -> None:
    """To write a tape, the function would have to run: it would draw once more."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)).sin().exp()

    ours, plain = Drawing(), Drawing()
    for seed in range(4):
        assert_identical(gradients_of(regions, ours, seed=seed), gradients_of(None, plain, seed=seed))
        assert torch.equal(ours.generator.get_state(), plain.generator.get_state())


@hides
def test_a_graph_that_is_left_behind_when_a_tape_is_written_can_be_gone_through(regions: Regions, hides: bool) -> None:
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

    def step(regions: Regions | None, function: Leaving, seed: int) -> list[Tensor]:
        call = Call(regions)
        x = leaf(seed=seed)
        function.weight.grad = None
        with call.context():
            z = call(function, x * 1)
        z.sum().backward(retain_graph=True)
        first = grads(x, function.weight)
        function.aux.backward()
        return [*(each.clone() for each in first), *grads(x, function.weight)]

    make = Hiding if hides else Leaving
    ours, plain = make(), make()
    for seed in range(1, 5):
        if seed > 1 or not hides:
            assert_identical(step(regions, ours, seed), step(None, plain, seed))
        else:
            # In the first step there is a trial, which leaves one, too: see docs/recompute.md.
            gradients_of(regions, ours)
    # A function that is seen to change Python state gets no tape.
    assert [tape is not None for tape in tapes_of(regions.session)] == [True] * hides


@pytest.mark.parametrize("wraps", [False, True])
def test_a_backward_inside_that_comes_in_one_run_only(regions: Regions, wraps: bool) -> None:
    """It may come in a trial, in a re-run, or when a tape is written; and the function may make an error of its own of
    what it is told."""

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

    for at in range(2, 9):
        ours, plain = Sometimes(at), Sometimes(0)
        for seed in range(4):
            assert_identical(gradients_of(regions, ours, seed=seed), gradients_of(None, plain, seed=seed))
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
def test_what_is_preserved_is_held_for_those_only_who_need_it(regions: Regions, saved: bool) -> None:
    """It comes after all that runs again: when autograd has done with it, it is gone."""
    alive: list[bool] = []
    memory = HiddenList()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        z = x.exp()
        y = z @ weight
        memory.append(weakref.ref(y.untyped_storage()))
        z.register_hook(lambda _: alive.append(memory[-1]() is not None))
        return y.sin() if saved else y + 1

    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    for number in range(4):
        call = Call(regions, save="matmul")
        x = leaf()
        with call.context():
            loss = call(function, x * 1, weight).sum()
        # The function runs again in the first two.
        del memory[:-1]
        assert (memory[-1]() is not None) == saved, number
        loss.backward()
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]
    assert alive[-1] is False


def test_a_kernel_that_nobody_sees_is_on_no_tape(regions: Regions) -> None:
    """It writes what an operator gave: by the tape, that would be anything."""

    class Unseen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out.numpy()[...] = np.sin(x.numpy())
            ctx.save_for_backward(x)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0].cos()

    def function(x: Tensor) -> Tensor:
        return Unseen.apply(x.cos()).exp().tanh()

    for _ in range(4):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    assert tapes_of(regions.session) == [None]


def test_what_is_written_unseen_is_on_no_tape(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.detach().numpy()[...] *= 2
        return y.exp().tanh()

    for _ in range(4):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    assert tapes_of(regions.session) == [None]


def test_backward_in_parts_and_twice(regions: Regions) -> None:
    block = Block()
    followed(regions, block)

    def step(regions: Regions | None) -> list[Tensor]:
        call = Call(regions)
        x = leaf()
        torch.manual_seed(5)
        with call.context():
            y = call(block, x * 1)
        found = [*torch.autograd.grad(y.sum(), block.down.weight, retain_graph=True)]
        found += torch.autograd.grad(y.square().sum(), [x, block.qkv.weight], retain_graph=True)
        found += torch.autograd.grad(y.square().sum(), [block.qkv.weight, x, block.up.bias])
        return found

    assert_identical(step(regions), step(None))


def test_gradients_of_gradients(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * x).exp().tanh()

    def step(regions: Regions | None) -> list[Tensor]:
        call = Call(regions)
        x = leaf()
        with call.context():
            y = call(function, x * 1)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), *grads(x)]

    for _ in range(4):
        assert_identical(step(regions), step(None))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_many_calls_in_any_order(regions: Regions) -> None:
    blocks = [Block(), Block(0.0)]
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

    regions(step, passes=4)


def test_a_graph_that_is_dropped_leaves_nothing(regions: Regions) -> None:
    block = Block()
    followed(regions, block, offload=["inputs", "matmul"])
    for asks in (False, True):
        x = leaf()
        y = x * 1
        with regions.offload():
            loss = spillway.recompute(block, y, session=regions.session, offload=["inputs", "matmul"]).sum()
        dies = weakref.ref(y)
        del y
        if asks:
            torch.autograd.grad(loss, block.down.weight, retain_graph=True)
        gc.disable()
        try:
            del loss
            assert dies() is None
        finally:
            gc.enable()


def test_under_autocast(regions: Regions) -> None:
    block = Block()

    def step(call: Call) -> Iterator[Tensor]:
        x = leaf()
        torch.manual_seed(6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with call.context():
                y = call(block, x * 1)
            y.float().square().mean().backward()
        yield from grads(x)

    regions(step, passes=5)
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_weights_that_autocast_casts_are_cast_again(regions: Regions) -> None:
    """What it cast in forward is not held until backward."""
    linear = torch.nn.Linear(16, 16)

    def function(x: Tensor) -> Tensor:
        y: Tensor = linear(linear(x).exp()).exp()
        return linear(y.tanh()).sin()

    def storages() -> set[int]:
        gc.collect()
        size = 2 * linear.weight.numel()
        tensors = [each for each in gc.get_objects() if type(each) is Tensor]
        return {each.untyped_storage()._cdata for each in tensors if each.untyped_storage().nbytes() == size}

    for number in range(5):
        x = leaf()
        before = storages()
        with torch.autocast("cpu", dtype=torch.bfloat16), regions.offload():
            y = spillway.recompute(function, x * 1, session=regions.session)
        assert number < 3 or storages() <= before
        y.float().sum().backward()
        linear.zero_grad()
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_another_region_inside(regions: Regions) -> None:
    inner, calls = Block(), HiddenList()

    def outer(x: Tensor) -> Tensor:
        calls.append(1)
        return spillway.recompute(inner, x.sin(), session=regions.session).exp()

    for seed in range(5):
        ours = gradients_of(regions, outer, seed=seed)
        torch.manual_seed(seed)
        x = leaf()
        inner((x * 1).sin()).exp().square().mean().backward()
        assert torch.equal(ours[1], x.grad if x.grad is not None else x)
    assert len(calls) > 5


def test_many_sizes_cost_nothing_more(regions: Regions) -> None:
    """Of sizes that do not come again no tape is written."""
    for size in range(20, 40):
        x = leaf(size)
        with regions.offload():
            spillway.recompute(lambda x: x.sin().cos().exp(), x * 1, session=regions.session).sum().backward()
    assert tapes_of(regions.session) == []


@pytest.mark.parametrize("how", [{}, {"save": ["aten::sin"]}], ids=["nothing", "save"])
def test_memory_formats_are_told(regions: Regions, how: dict[str, Any]) -> None:
    """As of most attention: heads are brought together in memory of their own."""
    form = torch.contiguous_format

    def function(x: Tensor) -> Tensor:
        y = x.sin().transpose(0, 2)
        return (y.clone(memory_format=form) @ y.transpose(1, 2).contiguous()).reshape(-1, 5).exp().tanh()

    followed(regions, function, **how)
    form = torch.preserve_format
    for seed in range(3):
        assert_identical(gradients_of(regions, function, seed=seed, **how), gradients_of(None, function, seed=seed))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_a_function_that_fails_half_way(regions: Regions) -> None:
    fails = False

    def function(x: Tensor) -> Tensor:
        y = x.sin().cos()
        if fails:
            raise ValueError("half-way")
        return y.exp().tanh()

    for _ in range(3):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    fails = True
    with pytest.raises(ValueError, match="half-way"):
        gradients_of(regions, function)
    fails = False
    assert_identical(gradients_of(regions, function), gradients_of(None, function))
