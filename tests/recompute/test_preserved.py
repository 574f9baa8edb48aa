"""What is kept or offloaded of a function's calls, from its second call on: the rest alone is computed again."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint

import spillway
from recompute.regions import (
    Block,
    Call,
    Changing,
    CountedBlock,
    HiddenList,
    Operators,
    Regions,
    gradients_of,
    leaf,
    one_place,
    operators_of_backward,
)
from spillway.checkpointing.ambient import replay_lock
from spillway.checkpointing.selectors import Planned, full_name
from spillway.planner.plan import BlockPlan, OperatorPlan
from spillway.saved_tensors.handles import in_replay
from spillway.types import Decision
from support import assert_identical, grads

pytestmark = one_place

Options = dict[str, Any]
KINDS = (
    *(Decision.RECOMPUTE, Decision.RECOMPUTE, Decision.KEEP),
    *(Decision.OFFLOAD, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK),
)


def ran_again(regions: Regions, function: Callable[..., Any], **how: Any) -> Counter[str]:
    """Operators that run in backward, beside those of backward itself, in a call that is like four earlier ones."""
    regions.compare_often(function, **how)
    again = Counter(operators_of_backward(regions, function, **how))
    assert not regions.was_whole()
    return again - Counter(operators_of_backward(None, function))


# What is computed again.


@pytest.mark.parametrize("option", ["save", "offload"])
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("matmul", ["addmm"]),
        ("norm", ["native_layer_norm"]),
        ("attention", ["_scaled_dot_product_flash_attention_for_cpu"]),
        ("random", ["bernoulli"]),
        (["matmul", "pointwise"], ["addmm", "gelu"]),
    ],
    ids=str,
)
def test_what_was_preserved_does_not_run_again(
    regions: Regions, option: str, family: str | list[str], names: list[str]
) -> None:
    block = CountedBlock()
    whole, partial = ran_again(regions, block), ran_again(regions, block, **{option: family})
    for name in names:
        assert whole[name] > 0
        assert partial[name] == 0


@pytest.mark.parametrize("option", ["save", "offload"])
def test_no_product_of_forward_runs_in_backward_from_the_second_call_on(regions: Regions, option: str) -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = x.flatten(0, 1)
            return self.down(functional.gelu(self.up(y))).tanh() @ y.t().sin()

    block = Products()
    expected = Counter(operators_of_backward(None, block))
    counts = [Counter(operators_of_backward(regions, block, **{option: "matmul"})) for _ in range(5)]
    block.zero_grad()
    assert [each["addmm"] for each in counts] == [1, 0, 0, 0, 0]
    assert counts[0]["mm"] > expected["mm"]
    assert [each["mm"] for each in counts[1:]] == [expected["mm"]] * 4


def test_nor_does_what_only_goes_into_what_was_preserved(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().exp().tanh().cos().sigmoid().exp()

    chain = ("sin", "exp", "tanh", "cos", "sigmoid")
    regions.compare_often(function, save="aten::tanh")
    names = operators_of_backward(regions, function, save="aten::tanh")
    # Of the first three, autograd asks for what they saved, and these hang on each other. The replay ends with the last
    # tensor that is wanted, which the last exponential saves.
    assert [name for name in names if name in chain][:5] == ["sin", "exp", "cos", "sigmoid", "exp"]

    def late(x: Tensor) -> Tensor:
        return ((x + 1) * 3).tanh().cos().exp()

    again = ran_again(regions, late, save="aten::tanh")
    assert again["add"] == 0
    # Of the sine of a cosine's backward there is one anyway.
    assert again["tanh"] == 0
    assert again["cos"] == again["exp"] == 1


def test_for_what_autograd_does_not_save_the_nearest_saved_tensors_are_preserved(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        # Autograd does not save the sum, and saves what is computed from it.
        total = (x.detach().abs() + 1).sqrt() + x
        return (total * 3).cos().exp() + (total - 1).tanh().exp()

    again = ran_again(regions, function, save="aten::add")
    assert again["add"] == again["sqrt"] == again["mul"] == again["sub"] == 0
    assert again["exp"] == 2


@pytest.mark.parametrize("option", ["save", "offload"])
def test_what_nobody_needs_is_left_out_with_what_is_preserved(regions: Regions, option: str) -> None:
    weight = torch.randn(16, 16)

    def useless(x: Tensor) -> Tensor:
        torch.mm(x.detach().flatten(0, 1), weight)
        return x.sin().exp().cos().tanh()

    def useful(x: Tensor) -> Tensor:
        # No gradient goes through the product's sign.
        product = torch.mm(x.detach().flatten(0, 1), weight).sign().view_as(x)
        return x.sin().exp().cos().tanh() * product

    assert ran_again(regions, useless, **{option: "aten::exp"})["mm"] == 0
    assert ran_again(regions, useful, **{option: "aten::exp"})["mm"] == 1


@pytest.mark.parametrize("option", ["save", "offload"])
def test_where_all_is_preserved_the_function_does_not_run_again(regions: Regions, option: str) -> None:
    runs = HiddenList()

    def function(x: Tensor) -> Tensor:
        runs.append(in_replay())
        return x.sin().exp().tanh()

    for number in range(5):
        runs.clear()
        gradients_of(regions, function, **{option: ["pointwise", "inputs"]})
        assert runs == [False, True][: 2 if number == 0 else 1]


def test_forward_runs_without_modes_in_every_call(regions: Regions) -> None:
    seen = HiddenList()

    def function(x: Tensor) -> Tensor:
        if not in_replay():
            seen.append((torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()))
        return x.sin().exp() @ x.mT

    for how in ({"save": "matmul"}, {"offload": "pointwise"}, {"save": lambda call: True}):
        seen.clear()
        regions_calls = 5
        for seed in range(regions_calls):
            gradients_of(regions, function, seed=seed, **how)
        assert seen == [(0, 0)] * regions_calls


@pytest.mark.parametrize(
    ("how", "kept", "gone"),
    [({"save": "matmul"}, 1, 0), ({"offload": "matmul"}, 0, 1), ({"save": "pointwise", "offload": "matmul"}, 1, 1)],
    ids=str,
)
def test_bytes_are_counted_alike_in_every_later_call(regions: Regions, how: Options, kept: int, gone: int) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.flatten(0, 1) @ WEIGHT).sin().sigmoid()[:, :8].sin()

    counted = []
    for _ in range(6):
        with regions.offload() as context:
            y = spillway.recompute(function, leaf(), session=regions.session, **how)
        regions.session.synchronize()
        y.sum().backward()
        stats = context.stats()
        counted.append((stats.saved_bytes, stats.kept_bytes, stats.offloaded_bytes + stats.reused_bytes > 0))
    assert counted[1:] == [counted[1]] * 5
    assert (counted[1][1] > 0) or not kept
    assert counted[1][2] == bool(gone)


WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("option", ["save", "offload"])
def test_an_operator_of_several_outputs_runs_for_one_of_them(regions: Regions, option: str) -> None:
    """What the norm saved is preserved: its input, mean and deviation. What it gives is not, and something reads it."""

    def function(x: Tensor) -> Tensor:
        return (functional.layer_norm((x.exp() + 1), (16,)) * 2).sin().exp()

    for _ in range(2):
        again = ran_again(regions, function, **{option: [spillway.saved_by("norm")]})
        assert again["native_layer_norm"] == 1
        assert again["add"] == 0


@pytest.mark.parametrize("option", ["save", "offload"])
def test_one_of_two_random_operators_is_preserved(regions: Regions, option: str) -> None:
    """The other one has to draw again. On a CPU, so has the first one before it."""

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp() * torch.bernoulli(torch.full_like(x, 0.5))
        return (y * torch.bernoulli(torch.full_like(x, 0.25))).exp()

    bernoullis = HiddenList()

    def first(call: spillway.OperatorCall) -> bool:
        if call.name.startswith("aten::bernoulli"):
            bernoullis.append(1)
        return call.name.startswith("aten::exp") or (call.name.startswith("aten::bernoulli") and len(bernoullis) == 1)

    again = ran_again(regions, function, **{option: [first]})
    assert again["bernoulli"] == 2
    assert again["sin"] == 0
    assert len(bernoullis) == 2, "it was not recorded anew"


@pytest.mark.parametrize("option", ["save", "offload"])
@pytest.mark.parametrize(
    "part",
    [lambda x, n: x[n : n + 10], lambda x, n: x.chunk(4)[n % 4], lambda x, n: x[:, n % 2 * 16 :][:, :16][:10]],
    ids=["rows", "chunks", "columns"],
)
def test_inputs_that_are_parts_of_one_tensor(
    regions: Regions, part: Callable[[Tensor, int], Tensor], option: str
) -> None:
    """As the parts of a batch are. In each call, the input lies elsewhere in its memory."""

    def function(x: Tensor) -> Tensor:
        return (x.sin() @ WEIGHT).cos().exp()

    def products(regions: Regions | None, number: int) -> tuple[int, Tensor]:
        x = leaf(40, 32)
        call = Call(regions, **{option: "matmul"})
        with call.context():
            loss = call(function, part(x, number)[:, :16]).sum()
        with Operators() as operators:
            loss.backward()
        assert x.grad is not None
        return operators.names.count("mm"), x.grad

    for number in range(8):
        (ours, gradient), (plain, expected) = products(regions, number), products(None, number)
        assert torch.equal(gradient, expected)
        assert ours == plain + (number == 0)


@pytest.mark.parametrize("option", ["save", "offload"])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_is_preserved_does_not_run_again(
    regions: Regions, option: str, momentum: float | None
) -> None:
    """Its statistics are written in forward alone."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16, momentum=momentum)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 1).exp()).sin().exp()

    ours, plain = Normed(), Normed()
    for seed in range(4):
        assert_identical(
            gradients_of(regions, ours, seed=seed, **{option: "norm"}), gradients_of(None, plain, seed=seed)
        )
        assert_identical(list(ours.buffers()), list(plain.buffers()))
        assert not regions.was_whole()
    assert "native_batch_norm" not in operators_of_backward(regions, ours, **{option: "norm"})


# Functions of all kinds.


class _Two(torch.autograd.Function):
    """Saves what it was given and what it gives."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        c = a * b
        ctx.save_for_backward(a, b, c)
        return c, c.sum()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        a, b, c = ctx.saved_tensors
        return (given[0] + given[1]) * b + 0 * c, (given[0] + given[1]) * a


def _two(x: Tensor) -> Tensor:
    c, d = _Two.apply(x.exp(), x.sin())
    return c.exp() * d.sin()


def _complex(x: Tensor) -> Tensor:
    z = torch.complex(x.exp(), x.sin())
    return (z.conj() * z.exp()).abs().sin() + z.imag.exp()


def _pooled(x: Tensor) -> Tensor:
    y = functional.conv2d(x.unsqueeze(1).exp(), KERNEL, padding=1).to(memory_format=torch.channels_last)
    return functional.max_pool2d(y.relu(), 2).sin().exp()


def _looked_up(x: Tensor) -> Tensor:
    places = (x.detach().exp() * 3).long().clamp(0, 9)
    return x.exp().flatten()[places].sin() * functional.embedding(places, WEIGHT[:10]).mean(-1).exp()


def _masked(x: Tensor) -> Tensor:
    y = x.exp()
    mask = y > 1
    y = torch.where(mask, y, x.sin())
    return y.masked_fill(~mask, 0.5).tanh() * y[mask].sum().tanh().exp().log()


def _sorted(x: Tensor) -> Tensor:
    values, places = x.exp().sort(-1)
    most, _ = values.sin().topk(3, -1)
    return (x.exp().gather(-1, places) * values).sin()[..., :3] * most.exp()


def _attended(x: Tensor) -> Tensor:
    q = x.exp().unflatten(-1, (2, 8)).transpose(1, 2)
    return functional.scaled_dot_product_attention(q, q.sin(), q.tanh(), is_causal=True).exp()


def _foreach(x: Tensor) -> Tensor:
    a, b = torch._foreach_exp([x, x.sin()])
    return (a * b).sin().exp()


def _in_place(x: Tensor) -> Tensor:
    y = x.exp()
    z = y * 2
    z += y.sin()
    z.clamp_(-3, 3)
    w = torch.zeros_like(y)
    w[:, ::2] = z[:, ::2].sin()
    w[:, 1] = x[:, 1]
    return w.exp() * z.sin()


def _out(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.exp(x.detach(), out=out)
    return (x * out).sin().exp()


def _inner_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda a: a.exp().sin().exp(), x.exp(), use_reentrant=False).sin()  # type: ignore[no-any-return]


def _hooked(x: Tensor) -> Tensor:
    y = x.exp()
    y.register_hook(lambda gradient: gradient * 2)
    return y.sin().exp()


def _loop(x: Tensor) -> Tensor:
    for _ in range(Random(int(x.detach().sum() * 1e6)).randint(1, 4)):
        x = x.exp().sin()
    return x


KERNEL = torch.randn(4, 1, 3, 3, generator=torch.Generator().manual_seed(4))
LSTM = nn.LSTM(16, 8)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{each.__name__.strip("_"): each for each in (_two, _complex, _pooled, _looked_up, _masked, _sorted, _attended)},
    **{each.__name__.strip("_"): each for each in (_foreach, _in_place, _out, _inner_checkpoint, _hooked, _loop)},
    "sums": lambda x: x.exp().cumsum(-1).log().logsumexp(-1, keepdim=True) * x.softmax(-1).exp(),
    "parts": lambda x: torch.cat([x.exp(), x.sin().exp()], -1).split(8, -1)[1].exp(),
    "rows": lambda x: torch.stack([row.exp().sin() for row in x.exp().unbind(1)]).exp(),
    "recurrent": lambda x: LSTM(x.exp())[0].exp(),
    "groups": lambda x: functional.group_norm(x.exp().permute(0, 2, 1), 4).sin().exp(),
    "singular values": lambda x: torch.linalg.svdvals(x.exp()).tanh() * torch.linalg.norm(x.exp()),
    "dropout": lambda x: functional.dropout(functional.dropout(x.exp(), 0.5).sin(), 0.3).exp(),
    "a number": lambda x: (x * float(x.detach().exp().sum())).sin().exp(),
    "casts": lambda x: x.exp().half().float().sin().exp().double().tanh(),
    "sparse": lambda x: torch.sparse.mm(torch.eye(10).to_sparse(), x.exp().flatten(0, 1)).sin().exp(),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x.exp(), x.sin()).softmax(-1).exp(),
}
SAVES: list[Options] = [
    *({"save": names} for names in ("pointwise", "matmul", "random", "norm", "softmax", "aten::exp", "aten::*")),
    *({"offload": names} for names in (["inputs", "matmul"], "aten::exp", "aten::*")),
    {"save": [spillway.saved_by("pointwise")]},
]


@pytest.mark.parametrize("how", SAVES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.covered(times=2)
def test_functions_of_all_kinds(regions: Regions, function: Callable[[Tensor], Tensor], how: Options) -> None:
    regions.compare_often(function, **how)


# Any decisions.


class _Named(TorchDispatchMode):
    """Notes the names of operators by which a plan knows them. Those that make nothing have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in SAC_IGNORED_OPS:
            is_new = not func.is_view and not func._schema.is_mutable and func._schema.name != "aten::_unsafe_view"
            self.names.append(full_name(func) if is_new else "")
        return output


def operators_of(block: nn.Module) -> list[str]:
    """The operators of a block, by their places."""
    x = leaf() * 1
    with _Named() as named:
        block(x)
    return named.names


def decided(names: list[str], seed: int, **options: Any) -> Options:
    """Any decisions about what these operators give."""
    random = Random(seed)
    decisions = {place: (name, random.choice(KINDS)) for place, name in enumerate(names) if name}
    decisions = {place: each for place, each in decisions.items() if each[1] is not Decision.RECOMPUTE}
    inputs = random.choice((Decision.KEEP, Decision.OFFLOAD, Decision.OFFLOAD_HOST))
    return {"policy": Planned(decisions, inputs, **options)}


BLOCKS: dict[str, Callable[[], nn.Module]] = {"attention": CountedBlock, "mlp": Changing, "another": Block}


@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_any_decisions_about_a_block(regions: Regions, make: Callable[[], nn.Module]) -> None:
    """More of them than are remembered."""
    torch.manual_seed(0)
    block = make()
    names = operators_of(block)
    assert len(names) > 8
    for number in range(40):
        how = decided(names, number)
        regions.compare_often(block, calls=3, **how)
        assert not regions.was_whole()
        assert regions.last is not None
        assert not any("decided nothing" in note for note in regions.last.stats().notes)


def test_decisions_change_with_each_call(regions: Regions) -> None:
    block = CountedBlock()
    names = operators_of(block)
    hows = [decided(names, seed) for seed in range(6)]
    for number in range(30):
        regions.compare(block, seed=number, **Random(number).choice(hows))
        assert not regions.was_whole()


def test_a_block_of_which_nothing_is_recomputed(regions: Regions) -> None:
    block = CountedBlock()
    names = operators_of(block)
    for number in range(10):
        how = decided(names, number, recomputes=False)
        for seed in range(3):
            block.calls = 0
            ours = gradients_of(regions, block, seed=seed, **how)
            calls = block.calls
            assert_identical(ours, gradients_of(None, block, seed=seed))
        assert calls == 1


@pytest.mark.parametrize("recomputes", [True, False], ids=["some recomputed", "nothing recomputed"])
def test_a_block_that_changes_under_a_plan(regions: Regions, recomputes: bool) -> None:
    block = Changing()
    names = operators_of(block)
    for number in range(4):
        how = decided(names, number, recomputes=recomputes)
        block.kind, block.scale = 0, 1.0
        regions.compare_often(block, calls=3, **how)
        block.scale = 0.5
        regions.compare_often(block, calls=2, **how)
        block.kind = 1
        regions.compare_often(block, calls=3, **how)


class Model(nn.Module):
    """Blocks of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Changing(), Changing(), CountedBlock(), CountedBlock(), Changing()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(6))
def test_any_plan_of_a_model(regions: Regions, seed: int) -> None:
    ours, plain = Model(), Model()

    def step(model: Model, number: int) -> list[Tensor]:
        torch.manual_seed(number)
        loss = model(leaf()).square().sum()
        loss.backward()
        found = [loss.detach(), *(each.clone() for each in grads(*model.parameters()))]
        model.zero_grad(set_to_none=True)
        return found

    profile = spillway.profile(ours, leaf(), loss=lambda y: y.square().sum(), blocks="blocks.*", hardware="h200")
    made = spillway.plan(profile, budget="1TiB", hardware="h200")
    random = Random(seed)
    blocks = [
        _planned(block, profile.kinds[call.kind], random)
        for block, call in zip(made.blocks, profile.calls, strict=True)
    ]
    plan = spillway.Plan.from_json(replace(made, blocks=tuple(blocks)).to_json())
    with spillway.attach(ours, plan=plan, blocks="blocks.*", session=regions.session):
        for number in range(4):
            assert_identical(step(ours, number), step(plain, number))
    gc.collect()


def _planned(block: BlockPlan, kind: Any, random: Random) -> BlockPlan:
    operators = []
    for place, operator in enumerate(kind.operators):
        decision = random.choice(KINDS)
        if decision is not Decision.RECOMPUTE and operator.makes:
            operators.append(OperatorPlan(place, operator.name, decision, 0, "by chance"))
    recomputes = random.random() < 0.75
    inputs = random.choice((Decision.KEEP, Decision.OFFLOAD))
    return replace(block, plain=False, operators=tuple(operators), inputs=inputs, recomputes=recomputes)


# How long what is preserved lives.


Storages = list[Any]


def alive(storages: Storages) -> list[bool]:
    return [each() is not None for each in storages]


@pytest.mark.parametrize("how", [{"save": "aten::*"}, {"save": "pointwise"}], ids=str)
def test_what_is_kept_dies_when_its_node_has_run(regions: Regions, how: Options, no_collector: None) -> None:
    """Each is saved by its own node alone, and nothing has to be computed again."""
    storages, seen = HiddenList(), HiddenList()

    def function(x: Tensor) -> Tensor:
        storages.clear()
        for place in range(4):
            x = x.exp() if place % 2 else x.tanh()
            storages.append(weakref.ref(x.untyped_storage()))
            # Comes when the nodes after it have run.
            x.register_hook(lambda _: seen.append(alive(storages)))
        return x * 2

    for _ in range(4):
        seen.clear()
        with regions.offload():
            loss = spillway.recompute(function, leaf() * 1, session=regions.session, **how).sum()
        before = alive(storages)
        loss.backward()
        after = alive(storages)
    del loss
    assert before == [True] * 4
    assert seen == [[True] * count + [False] * (4 - count) for count in (4, 3, 2, 1)]
    assert after == [False] * 4


def test_what_comes_after_all_that_runs_again_dies_when_its_node_has_run(regions: Regions, no_collector: None) -> None:
    storages, seen = HiddenList(), HiddenList()

    def function(x: Tensor, weight: Tensor) -> Tensor:
        z = x.exp()
        y = z @ weight
        if not in_replay():
            storages[:] = [weakref.ref(z.untyped_storage()), weakref.ref(y.untyped_storage())]
            z.register_hook(lambda _: seen.append(alive(storages)))
        return y.sin()

    for number in range(4):
        seen.clear()
        with regions.offload():
            loss = spillway.recompute(function, leaf() * 1, WEIGHT, session=regions.session, save="matmul").sum()
        if number:
            assert alive(storages) == [False, True]
        loss.backward()
    assert seen == [[False, False]]


def test_what_a_replay_is_handed_dies_when_its_node_has_run(regions: Regions, no_collector: None) -> None:
    """The replay comes with the last node, and is handed the exponential, which the first nodes saved."""
    storages, seen = HiddenList(), HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp()
        if not in_replay():
            storages[:] = [weakref.ref(z.untyped_storage())]
            y.register_hook(lambda _: seen.append(alive(storages)))
        return z.cos().tanh()

    for number in range(4):
        seen.clear()
        with regions.offload():
            loss = spillway.recompute(function, leaf() * 1, session=regions.session, save="aten::exp").sum()
        assert alive(storages) == [number > 0]
        loss.backward()
        assert alive(storages) == [False]
    assert seen == [[False]]


@pytest.mark.parametrize("ends", ["backward", "dropped", "an error", "an error in backward"])
@pytest.mark.parametrize("how", [{"save": "pointwise"}, {"save": "aten::exp"}, {"offload": "pointwise"}], ids=str)
def test_nothing_is_left_of_what_was_preserved(regions: Regions, how: Options, ends: str, no_collector: None) -> None:
    storages = HiddenList()
    fails = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        storages.append(weakref.ref(y.untyped_storage()))
        z = y.cos().tanh()
        storages.append(weakref.ref(z.untyped_storage()))
        if fails and (ends == "an error" or in_replay()):
            raise ValueError
        return z.exp()

    def call(*, goes_back: bool) -> None:
        with regions.offload():
            loss = spillway.recompute(function, leaf() * 1, session=regions.session, **how).sum()
        if goes_back:
            loss.backward()

    for _ in range(3):
        call(goes_back=True)
    storages.clear()
    if ends.startswith("an error"):
        fails.append(1)
    with contextlib.suppress(ValueError):
        call(goes_back=ends != "dropped")
    if ends == "an error in backward":
        # What a backward that failed had not come to yet, autograd holds until the next one.
        torch.ones(1, requires_grad=True).sum().backward()
    regions.push_out()
    assert not any(alive(storages))
    regions.assert_nothing_left()


def test_what_was_offloaded_is_not_held(regions: Regions, no_collector: None) -> None:
    storages = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.flatten(0, 1) @ WEIGHT
        if not in_replay():
            storages[:] = [weakref.ref(y.untyped_storage())]
        return (y + 1).sin() * y.cos()

    for _ in range(4):
        with regions.offload():
            loss = spillway.recompute(function, leaf() * 1, session=regions.session, offload=["inputs", "matmul"]).sum()
        regions.push_out()
        assert alive(storages) == [False]
        loss.backward()


def test_a_graph_is_forgotten_while_another_one_of_the_function_lives(regions: Regions, no_collector: None) -> None:
    storages = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.exp()
        if not in_replay():
            storages.append(weakref.ref(y.untyped_storage()))
        return y.sin() * 2

    for _ in range(3):
        gradients_of(regions, function, save="pointwise")
    storages.clear()
    outputs = [
        spillway.recompute(function, leaf() * 1, session=regions.session, save="pointwise").sum() for _ in range(3)
    ]
    assert alive(storages) == [True] * 3
    outputs[1].backward()
    assert alive(storages) == [True, False, True]
    outputs.pop(0)
    assert alive(storages) == [False, False, True]
    outputs.clear()
    assert alive(storages) == [False] * 3


# Several threads.


@pytest.mark.parametrize("how", [{}, {"save": "matmul"}, {"offload": ["norm", "matmul"]}, {"save": "random"}], ids=str)
def test_forwards_and_backwards_in_several_threads(regions: Regions, how: Options) -> None:
    block = CountedBlock()
    torch.manual_seed(0)
    expected = []
    for seed in range(4):
        x = leaf(seed=seed)
        expected.append(torch.autograd.grad(Changing()(x * 1).square().sum(), x)[0])
    shared = Changing()
    found: dict[tuple[int, int], Tensor] = {}
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for number in range(6):
                x = leaf(seed=seed)
                y = spillway.recompute(shared, x * 1, session=regions.session, **how)
                found[seed, number] = torch.autograd.grad(y.square().sum(), x)[0]
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for (seed, _), each in found.items():
        assert torch.equal(each, expected[seed])
    assert len(found) == 24
    # What was drawn beside threads is another matter.
    regions.compare_often(block, **how)


def test_a_write_that_a_replay_in_another_thread_takes_back_is_none(regions: Regions) -> None:
    shared, x = Changing(), leaf()
    (expected,) = torch.autograd.grad(Changing()(x * 1).square().sum(), x)
    y = spillway.recompute(shared, x * 1, session=regions.session)
    written = threading.Event()

    def replay() -> None:
        with replay_lock:
            version = shared.table._version
            shared.table.add_(0)
            written.set()
            time.sleep(0.2)
            torch._C._autograd._unsafe_set_version_counter((shared.table,), (version,))

    thread = threading.Thread(target=replay)
    thread.start()
    written.wait()
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
    thread.join()


# Casts.


@pytest.mark.parametrize("how", [{"save": "aten::exp"}, {"offload": "aten::exp"}, {"save": "matmul"}], ids=str)
def test_casts_of_what_a_function_is_given_are_operators_like_others(regions: Regions, how: Options) -> None:
    """As in most norms. It is no leaf in the replay either, of which autocast may have made a cast."""

    def function(x: Tensor) -> Tensor:
        y = x.double()
        return (y * y.square().mean().rsqrt()).float().sin().exp().tanh()

    for is_leaf in (True, False):

        def step(call: Call, is_leaf: bool = is_leaf) -> Iterator[Tensor]:
            for _ in range(5):
                x = leaf()
                with call.context():
                    y = call(function, x if is_leaf else x * 1)
                y.sum().backward()
                yield from grads(x)

        regions(step, **how)
        assert not regions.was_whole()


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("how", [{"save": "matmul"}, {"offload": "matmul"}, {"save": "pointwise"}], ids=str)
def test_casts_of_weights_come_and_go(regions: Regions, how: Options, cache: bool) -> None:
    """Autocast remembers them until its outermost context exits."""
    block = Changing()

    def step(call: Call) -> Iterator[Tensor]:
        for number in range(6):
            block.zero_grad()
            x = leaf()
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                if number % 2:
                    block.up(x.detach())
                with call.context():
                    y = call(block, x * 1)
                if number > 3:
                    y.float().sum().backward()
            if number <= 3:
                y.float().sum().backward()
            yield from (each.clone() for each in grads(x, *block.parameters()))

    regions(step, **how)
    assert not regions.was_whole()
