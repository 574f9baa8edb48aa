"""Hazards of computing again: 28 to 31, 40, 41, 54, 58 to 62, 64 and 70."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    GraphExecGroup,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import spillway
from recompute.regions import (
    CHOICES,
    Block,
    Call,
    HiddenList,
    Regions,
    backward_place,
    choices,
    gradients,
    hides,
    loss_of,
    modes,
    one_place,
    pointwise_chain,
    push_out,
    ways,
)
from spillway import Decision, SavedTensor
from spillway.policies import Modules, Offload
from spillway.runtime.cpu import CpuBackend
from support import HOOKS_OF_SELECTIVE

Options = dict[str, Any]


# 28: nested.


def torchs(call: Call, reentrant: bool) -> Callable[..., Any]:
    """Torch's own checkpoint in the place of ours."""
    if call.regions is None:
        return lambda function, *args: function(*args)
    return lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant)


def mode(reentrant: bool, **others: Any) -> Options:
    """Options of a call in that mode; the reentrant one takes no others."""
    return {"use_reentrant": True} if reentrant else others


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("inner_reentrant", [False, True], ids=["inner", "inner-reentrant"])
@pytest.mark.parametrize("outer_reentrant", [False, True], ids=["outer", "outer-reentrant"])
@pytest.mark.parametrize("kinds", ["ours-in-ours", "torchs-in-ours", "ours-in-torchs"])
@backward_place
def test_h28_nested(regions: Regions, kinds: str, outer_reentrant: bool, inner_reentrant: bool, inside: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        inner = torchs(call, inner_reentrant)
        if kinds.startswith("ours"):
            inner = lambda f, x: call(f, x, **mode(inner_reentrant, save="softmax"))  # noqa: E731
        outer = torchs(call, outer_reentrant)
        if kinds.endswith("in-ours"):
            outer = lambda f, x: call(f, x, **mode(outer_reentrant, save="norm"))  # noqa: E731
        first, second = Block(), Block()
        x = torch.randn(3, 4, 16, requires_grad=True)

        def around(x: torch.Tensor) -> torch.Tensor:
            return pointwise_chain(inner(second, first(x.sin()))) * x

        with call.context():
            loss = outer(pointwise_chain, outer(around, x * 1)).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        yield loss
        yield from gradients(x, first, second)

    regions(step)


@pytest.mark.parametrize("inner_how", CHOICES.values(), ids=[f"inner-{name}" for name in CHOICES])
@choices
def test_h28_nested_with_choices_of_their_own(regions: Regions, how: Options, inner_how: Options) -> None:
    """What moves the bytes of the inner region is no operator of the outer one."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)

        def outer(x: torch.Tensor) -> torch.Tensor:
            return pointwise_chain(call(block, x.cos(), **inner_how))

        with call.context():
            loss = call(outer, call(outer, x * 1, **how), **how).square().mean()
        loss.backward()
        yield from gradients(x, block)

    regions(step)


@modes
@pytest.mark.parametrize("inner_reentrant", [False, True], ids=["inner", "inner-reentrant"])
def test_h28_batch_norm_in_a_nested_region_counts_once(
    regions: Regions, reentrant: bool, inner_reentrant: bool
) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        norm, x = torch.nn.BatchNorm1d(8), torch.randn(6, 8, requires_grad=True)

        def outer(x: torch.Tensor) -> torch.Tensor:
            return call(lambda x: norm(x).sin(), x.cos(), use_reentrant=inner_reentrant).exp()

        with call.context():
            loss = call(outer, x * 1, use_reentrant=reentrant).sum()
        loss.backward()
        yield from (*gradients(x, norm), *norm.buffers())

    regions(step)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@modes
def test_h28_a_reentrant_region_whose_inputs_need_no_gradient_in_a_region(regions: Regions, reentrant: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        table, x = torch.nn.Embedding(5, 8), torch.randn(4, 8, requires_grad=True)
        words = torch.tensor([0, 3, 1, 1])

        def outer(x: torch.Tensor) -> torch.Tensor:
            return (call(table, words, use_reentrant=True) * x).exp()

        with call.context():
            loss = call(outer, x * 1, use_reentrant=reentrant).sum()
        loss.backward()
        yield from gradients(x, table)

    regions(step)


@pytest.mark.parametrize("more", HOOKS_OF_SELECTIVE, ids=str)
def test_h28_with_selective_checkpoint_inside(regions: Regions, more: dict[str, bool]) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)

        def outer(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(
                block,
                x.sin(),
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default]),
                **more,
            ).cos()

        with call.context():
            loss = call(outer, x * 1).square().mean()
        loss.backward()
        yield from gradients(x, block)

    regions(step)


# 29: tensors that are no positional arguments.


@ways
def test_h29_tensors_by_keyword_and_in_structures(regions: Regions, how: Options) -> None:
    def region(pair: Any, *, gates: dict[str, Any], scale: float, nothing: None = None) -> dict[str, Any]:
        hidden, (other,) = pair
        hidden = (hidden * gates["a"]).sin() * gates["more"][0].exp() * scale + other.cos()
        return {"out": [hidden.tanh(), (other.sin(), "text")], "count": 3, "none": nothing}

    def step(call: Call) -> Iterator[torch.Tensor]:
        leaves = [torch.randn(4, 8, requires_grad=True) for _ in range(4)]
        with call.context():
            a, b, c, d = (leaf * 1 for leaf in leaves)
            out = call(region, (a, [b]), gates={"a": c, "more": [d]}, scale=0.5, **how)
            assert out["count"] == 3 and out["none"] is None and out["out"][1][1] == "text"
            loss = loss_of(out)
        loss.backward()
        yield from gradients(*leaves)

    regions(step)


@modes
def test_h29_what_is_passed_by_keyword_leaves_too(regions: Regions, no_collector: None, reentrant: bool) -> None:
    leaf, storages = torch.randn(64, requires_grad=True), []

    def made() -> torch.Tensor:
        tensor = leaf * 2
        storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with regions.offload():
        out = spillway.recompute(
            lambda a, *, b, c: (a.sin() * b + c["c"][0]).exp(),
            made(),
            b=made(),
            c={"c": [made()]},
            offload="inputs",
            use_reentrant=reentrant,
            session=regions.session,
        )
    regions.push_out()
    assert [storage() is None for storage in storages] == [True] * 3
    out.sum().backward()


# 30: compiled functions.


@one_place
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("what", ["compiled-in-region", "region-in-compiled"])
@modes
def test_h30_compiled(regions: Regions, backend: str, what: str, reentrant: bool) -> None:
    torch._dynamo.reset()

    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, norm, x = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.randn(6, 8, requires_grad=True)

        def body(x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(norm(linear(x.sin())), 0.3).exp()

        how = mode(reentrant, save="pointwise")
        with call.context():
            if what == "compiled-in-region":
                compiled = torch.compile(body, backend=backend) if call.regions else body
                loss = call(lambda x: functional.dropout(compiled(x.cos()), 0.2).tanh(), x * 1, **how).sum()
            else:
                around = lambda x: call(body, x * 1, **how).sin() * 2  # noqa: E731
                loss = (torch.compile(around, backend=backend) if call.regions else around)(x).sum()
        loss.backward()
        yield from (*gradients(x, linear, norm), *norm.buffers())

    # Reentrant, what a compiled batch norm writes is also what it computes with, and that is refused.
    (regions.right_or_refused if reentrant else regions)(step)


# 31: torch.func.


@one_place
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.func.vmap,
        torch.func.jacrev,
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        lambda f: lambda x: torch.func.vjp(f, x)[1](torch.ones(())),
    ],
    ids=["grad", "vmap", "jacrev", "jvp", "vjp"],
)
@modes
def test_h31_a_region_inside_of_a_transform_is_refused(
    regions: Regions, transform: Callable[..., Any], reentrant: bool
) -> None:
    how = {"use_reentrant": reentrant, "session": regions.session}
    with pytest.raises(spillway.UnsupportedError, match=r"torch\.func"):
        transform(lambda x: spillway.recompute(torch.sin, x, **how).sum())(torch.randn(4, 4, requires_grad=True))
    regions.assert_nothing_left()


@one_place
def test_h31_vmap_without_gradients_inside_of_a_region(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(4, 8, requires_grad=True)
        with call.context():
            loss = call(lambda x: torch.vmap(lambda row: (row * 2).sin())(x).exp(), x * 1).sum()
        loss.backward()
        yield from gradients(x)

    regions(step)


# 40: random numbers, autocast, devices and dtypes in a re-run. 58: random operators.


def draws(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random operators of each kind: in place, out of place, wanted and not."""
    nobodys = torch.rand(x.shape, generator=generator) + torch.randn_like(x)
    x = functional.dropout(x.sin(), 0.5) + torch.rand_like(x)
    x = x * torch.empty_like(x).bernoulli_(0.5, generator=generator) * torch.empty_like(x).normal_(generator=generator)
    order = torch.randperm(x.shape[-1], generator=generator)
    x = functional.gumbel_softmax(x, dim=-1)[..., order] * torch.bernoulli(torch.full_like(x, 0.7))
    return functional.dropout(functional.alpha_dropout(x, 0.2, training=True), 0.3).exp() + nobodys


@pytest.mark.parametrize(
    "random",
    [{}, {"save": "random"}, {"offload": "random"}, {"use_reentrant": True}],
    ids=["skip", "save", "offload", "reentrant"],
)
@backward_place
def test_h40_h58_random_numbers_are_drawn_again_kept_or_skipped(
    regions: Regions, random: Options, inside: bool
) -> None:
    """And what is drawn afterwards is what a plain step would have drawn."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x, generator = torch.randn(4, 8, requires_grad=True), torch.Generator().manual_seed(3)
        with call.context():
            hidden = call(draws, x * 1, generator, **random)
            hidden = call(draws, functional.dropout(hidden, 0.1), generator, **random)
            loss = functional.dropout(hidden, 0.1).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        yield from gradients(x)
        yield from (torch.rand(4), torch.rand(4, generator=generator))

    regions(step)


@one_place
@hides
def test_h40_a_users_generator_in_a_region_that_runs_again_whole(regions: Regions, hides: bool) -> None:
    """The second run finds a hidden cache that the first one filled, so it is not like the first."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x, generator = torch.randn(8, requires_grad=True), torch.Generator().manual_seed(3)
        cache: list[torch.Tensor] = HiddenList() if hides else []

        def region(x: torch.Tensor) -> torch.Tensor:
            if not cache:
                cache.append(torch.arange(8.0))
            return (x * torch.rand(8, generator=generator) + cache[0]).sin()

        with call.context():
            loss = call(region, call(region, x * 1)).sum()
        loss.backward()
        yield from (*gradients(x), torch.rand(4, generator=generator))

    (regions.right_or_refused if hides else regions)(step)


@one_place
def test_h40_a_users_generator_and_a_backward_inside_of_the_region(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x, generator = torch.randn(8, requires_grad=True), torch.Generator().manual_seed(3)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = (x * torch.rand(8, generator=generator)).sin()
            (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
            return slope.exp() * hidden

        with call.context():
            loss = call(region, x * 1).sum()
        loss.backward()
        yield from (*gradients(x), torch.rand(4, generator=generator))

    regions.right_or_refused(step)


def test_h40_without_preserving_nothing_is_promised_but_what_was_saved(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * torch.rand_like(x)).exp()

        with call.context():
            loss = call(region, x * 1, preserve_rng_state=False, save="random").sum()
        loss.backward()
        yield from (*gradients(x), torch.rand(4))

    regions(step)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@ways
@backward_place
def test_h40_h62_autocast(regions: Regions, how: Options, cache: bool, inside: bool) -> None:
    """The weights are cast once for both regions, or each time."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)
        with call.context(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            hidden = call(block, x * 1, **how)
            # Reentrant, each use of a weight has a sum of its own, and sums go in another order.
            hidden = hidden if how["use_reentrant"] else block(call(block, hidden, **how))
            loss = hidden.float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        yield loss
        yield from gradients(x, block)

    regions(step)


@one_place
def test_h62_autocast_and_a_weight_that_changes_before_backward(regions: Regions) -> None:
    """Plainly, backward uses the cast of before. A re-run casts the weight of now."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, x = torch.nn.Linear(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)
        with call.context(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(lambda x: linear(x).sin(), x * 1).float().sum()
        with torch.no_grad():
            linear.weight.add_(1)
        loss.backward()
        yield from gradients(x)

    regions.right_or_refused(step)


@modes
def test_h40_autocast_only_in_the_region_or_off_in_it(regions: Regions, reentrant: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, norm, x = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.randn(4, 8, requires_grad=True)

        def on(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return norm(linear(x)).sin()

        def off(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return linear(x.float()).exp()

        with call.context():
            hidden = call(on, x * 1, use_reentrant=reentrant)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = call(off, hidden.float(), use_reentrant=reentrant).sum()
        loss.backward()
        yield from (*gradients(x, linear, norm), *norm.buffers())

    regions(step)


@one_place
@pytest.mark.parametrize("make", [torch.rand, lambda n: torch.full((n,), 1 / 3), lambda n: torch.tensor([1 / 3] * n)])
@modes
def test_h40_the_default_dtype_of_the_first_run(regions: Regions, make: Callable[..., Any], reentrant: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True, dtype=torch.float64)
        torch.set_default_dtype(torch.float64)
        try:
            with call.context():
                loss = call(lambda x: (x + make(8)).sin(), x * 1, use_reentrant=reentrant).sum()
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()
        yield from gradients(x)

    regions.right_or_refused(step)


@one_place
def test_h40_the_device_context_of_the_first_run(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            shape = torch.empty(8)  # on no device that computes
            return (x * shape.shape[0]).sin() * x

        with call.context(), torch.device("meta"):
            out = call(region, x * 1)
        loss_of(out).backward()
        yield from gradients(x)

    regions(step)


@one_place
@pytest.mark.parametrize("first", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
@modes
def test_h40_the_attention_kernel_of_the_first_run(regions: Regions, first: SDPBackend, reentrant: bool) -> None:
    """Its choice is a context around the forward only: a re-run that takes another kernel is not the same."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(2, 2, 4, 8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x.sin(), x.cos(), x).exp()

        with call.context(), sdpa_kernel(first):
            loss = call(region, x * 1, use_reentrant=reentrant).sum()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if first is SDPBackend.MATH else SDPBackend.MATH):
            loss.backward()
        yield from gradients(x)

    regions.right_or_refused(step)


# 41: an operator that saves a buffer before its kernel writes it.


@one_place
@pytest.mark.parametrize("where", ["last", "before a sum", "before what saves it"])
@pytest.mark.parametrize("inplace", [False, True], ids=["rrelu", "rrelu_"])
@ways
def test_h41_rrelu(regions: Regions, where: str, inplace: bool, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(64, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            x = functional.rrelu(x.sin() + 0, 0.1, 0.9, training=True, inplace=inplace)
            return {"last": x, "before a sum": x + 1, "before what saves it": (x + 1).exp()}[where]

        with call.context():
            loss = call(region, x * 1, **how).sum()
        loss.backward()
        yield from gradients(x)

    regions(step)


# 54: the peak of a re-run.


class Meter(TorchDispatchMode):
    """Adds up the storages that are alive after each operator, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._alive[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


HIDDEN = 64 * 256 * 4


def wide(x: torch.Tensor) -> torch.Tensor:
    """Of many outputs, backward wants few: sums save nothing, and a list holds what nobody asks for."""
    held = [x * factor + 1 for factor in range(8)]
    x = (x + sum(held)).sin()
    for _ in range(8):
        x = x + 1
    return x.tanh() + 1


@pytest.mark.parametrize("how", [{}, {"offload": "inputs"}, {"save": ["pointwise"]}], ids=["plain", "inputs", "save"])
def test_h54_a_re_run_holds_no_more_than_torchs(no_collector: None, how: Options) -> None:
    def peak(run: Callable[..., Any]) -> int:
        leaf = torch.randn(64, 256, requires_grad=True)
        with spillway.offload(session=session, min_bytes=0, policy=spillway.policies.Keep(), tier="host"):
            out = run(wide, run(wide, leaf * 1)).sum()
        with Meter() as meter:
            out.backward()
        return meter.peak

    with spillway.Session(window=0) as session:
        ours = [peak(lambda *args: spillway.recompute(*args, session=session, **how)) for _ in range(3)]
        theirs = peak(lambda *args: checkpoint(*args, use_reentrant=False))
    assert ours[1] == ours[2] <= theirs, (ours, theirs)
    if "save" in how:
        assert ours[1] < 5 * HIDDEN


def test_h54_what_is_given_back_to_backward_dies_with_its_use(no_collector: None) -> None:
    """In a region of many layers each saved tensor dies when its layer's backward has run."""
    depth, alive, most = 8, weakref.WeakSet(), []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x.sin())
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            alive.add(saved.untyped_storage())
            most.append(len(alive))
            return gradient * saved

    def region(x: torch.Tensor) -> torch.Tensor:
        for _ in range(depth):
            x = Counts.apply(x)
        return x

    with spillway.Session(window=0) as session:
        spillway.recompute(region, torch.randn(8, requires_grad=True) * 1, session=session).sum().backward()
    assert most == [1] * depth


# 59: views, in-place operators, and outputs that are written later.


def views_and_in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x @ w
    residual = hidden.view(-1, 4).t()
    residual += 1
    hidden = hidden.add_(x).mul_(0.5).relu_()
    halves = (hidden @ w).clone()
    left, right = halves[:, :4], halves[:, 4:]
    left.copy_(right * 3)
    out = torch.cat(halves.split(4, dim=-1))
    out[0].zero_()
    return out.exp_().sin() * 2


SELECTORS = [
    "pointwise",
    "matmul",
    "aten::*",
    "aten::view",
    "aten::t",
    "aten::add_",
    "aten::relu_",
    "aten::copy_",
    ["aten::split", "aten::transpose", "aten::zero_", "aten::exp_"],
]


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("option", ["save", "offload"])
def test_h59_views_and_in_place_operators_are_named(regions: Regions, selector: Any, option: str) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        with call.context():
            loss = call(views_and_in_place, x * 1, w, **{option: selector}).sum()
        loss.backward()
        yield from gradients(x, w)

    regions(step)


@pytest.mark.parametrize("change", ["relu_", "mul_", "residual", "part"])
@pytest.mark.parametrize("how", [{"save": "matmul"}, {"offload": "matmul"}, {"use_reentrant": True}], ids=str)
def test_h59_a_kept_output_is_written_after_the_region(regions: Regions, how: Options, change: str) -> None:
    """Its own operator saves nothing of it, so plainly that is no error. The first step changes nothing."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        w = torch.randn(8, 8, requires_grad=True)

        def region(x: torch.Tensor) -> Any:
            hidden = x @ w
            return (hidden + 1).sin(), hidden

        for changes in (False, True):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                out, hidden = call(region, x * 1, **how)
            if changes and change == "relu_":
                hidden.relu_()
            elif changes and change == "residual":
                hidden += x
            elif changes and change == "mul_":
                hidden = hidden.mul_(2)
            elif changes:
                hidden[0].zero_()
            (out.sum() + hidden.sum()).backward()
            yield from gradients(x, w)

    regions.right_or_refused(step)


def test_h59_a_routers_choice_is_written_after_the_region(regions: Regions) -> None:
    """What ``topk`` gave is kept without anybody's word."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        for changes in (False, True):
            x = torch.randn(4, 8, requires_grad=True)

            def region(x: torch.Tensor) -> Any:
                _, chosen = x.detach().topk(1)
                return (x * 2 + chosen).sin(), chosen

            with call.context():
                out, chosen = call(region, x * 1)
            if changes:
                chosen.zero_()
            out.sum().backward()
            yield from gradients(x)

    regions.right_or_refused(step)


MUST = [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD]


@pytest.mark.parametrize("policy", CheckpointPolicy, ids=lambda policy: policy.name)
@pytest.mark.parametrize("writes", [False, True], ids=["out-of-place", "in-place"])
def test_h59_all_values_of_torchs_policy(regions: Regions, policy: CheckpointPolicy, writes: bool) -> None:
    asked = []

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(operator)
        return policy if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def step(call: Call) -> Iterator[torch.Tensor]:
        x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = x @ w
            hidden = hidden.add_(1) if writes else hidden + 1
            return (hidden.sin() @ w).exp()

        with call.context():
            loss = call(region, x * 1, policy=decide).sum()
        loss.backward()
        yield from gradients(x, w)

    if writes and policy in MUST:
        with pytest.raises(spillway.RecomputeError, match="must be saved"):
            regions(step)
        gc.collect()
        regions.assert_nothing_left()
    else:
        regions(step)
        assert torch.ops.aten.detach.default not in asked


# 60: other hooks inside of the region and outside. 61: early stop.


def inner_contexts(regions: Regions | None) -> dict[str, Callable[[], Any]]:
    if regions is None:
        return {}
    return {
        "offload": lambda: regions.offload(tag="inner"),
        "offload-all": lambda: regions.offload(tag="inner all", policy=None),
        "offload-modules": lambda: regions.offload(tag="inner", policy=Modules("*", Offload())),
        "keep": spillway.keep,
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
        "copies": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x),
        "identity": lambda: torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda x: x),
    }


@pytest.mark.parametrize("kind", ["offload", "offload-all", "offload-modules", "keep", "copies", "identity"])
@pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "to-the-end"])
@ways
def test_h60_h61_contexts_inside_of_the_region(regions: Regions, kind: str, early_stop: bool, how: Options) -> None:
    """What is saved differs from line to line, so that a shifted count would show."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        make = inner_contexts(call.regions).get(kind, contextlib.nullcontext)
        linear, x = torch.nn.Linear(64, 64), torch.randn(64, requires_grad=True)

        def region(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            x = x.sin() * gate.exp()
            with make():
                x = (x * gate).tanh() * linear(x.sigmoid())
            x = x.softmax(0) * gate.cos()
            with make(), make():
                x = x.exp() * gate
            return linear(x.cos()).sum() * 3

        with call.context():
            loss = call(region, x * 2, x.sin(), early_stop=early_stop, **how)
        loss.backward()
        yield from gradients(x, linear)

    regions(step)


@pytest.mark.parametrize("kind", ["offload-all", "keep", "save_on_cpu", "identity"])
@ways
def test_h60_contexts_around_the_region(regions: Regions, kind: str, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        make = inner_contexts(call.regions).get(kind, contextlib.nullcontext)
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)
        with make():
            hidden = call(block, x * 1, **how)
            with call.context():
                hidden = call(pointwise_chain, hidden, **how)
        hidden.sum().backward()
        yield from gradients(x, block)

    # Of a CPU tensor, torch's hook holds the very tensor, and so an output its own graph.
    regions(step, collect=kind == "save_on_cpu")


@pytest.mark.parametrize("around", ["ours", "torchs"])
def test_h60_a_context_that_stands_aside_from_its_second_pass_on(around: str) -> None:
    """The first run is the first pass, which moves; the re-run finds that nothing is to be gained."""

    class Roomy(CpuBackend):
        def memory_info(self) -> tuple[int, int]:
            return 1 << 40, 1 << 40

    def region(x: torch.Tensor, context: Callable[[], Any]) -> torch.Tensor:
        x = x.sin()
        with context():
            x = (x.exp() * x).tanh()
        return x.cos().exp()

    def gradient(run: Callable[..., Any], context: Callable[[], Any]) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(8, requires_grad=True)
        run(region, x * 1, context).sum().backward()
        return next(gradients(x))

    expected = gradient(lambda f, *args: f(*args), contextlib.nullcontext)
    backend = Roomy(torch.device("cpu"))
    with spillway.Session(backend=lambda device: backend) as session:
        ours = lambda f, *args: spillway.recompute(f, *args, session=session)  # noqa: E731
        theirs = lambda f, *args: checkpoint(f, *args, use_reentrant=False)  # noqa: E731
        for _ in range(3):
            run = ours if around == "ours" else theirs
            assert torch.equal(gradient(run, lambda: spillway.offload(session=session)), expected)


@pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "to-the-end"])
@choices
def test_h61_early_stop_as_torchs_global_switch_says(regions: Regions, early_stop: bool, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)
        with set_checkpoint_early_stop(early_stop), call.context():
            loss = call(block, call(block, x * 1, **how), **how).sum()
        loss.backward()
        yield from gradients(x, block)

    regions(step)


@one_place
@choices
def test_h61_a_function_that_swallows_the_end_of_a_re_run(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            out = x
            for _ in range(3):
                with contextlib.suppress(Exception):
                    out = (out.sin() * 2).exp()
            return out + 1

        with call.context():
            loss = call(region, x * 1, **how).sum()
        loss.backward()
        yield from gradients(x)

    regions(step)


def test_h61_what_was_learned_inside_is_not_forgotten(regions: Regions) -> None:
    totals: list[int | None] = []

    def policy(saved: SavedTensor) -> Decision:
        totals.append(saved.total_bytes)
        return Decision.OFFLOAD

    def region(x: torch.Tensor) -> torch.Tensor:
        with regions.offload(policy=policy, tag="region"):
            x = x.sin().exp().sin()
        return x.cos() * 2

    leaf = torch.randn(64, requires_grad=True)
    for _ in range(3):
        spillway.recompute(region, leaf * 2, session=regions.session).sum().backward()
    assert totals[0] is None and set(totals[3:]) == {totals[-1]} and totals[-1] is not None


# 64: several backwards over one region.


@choices
@pytest.mark.parametrize("backwards", ["split", "twice", "three-times", "outputs-apart", "group", "then-all"])
def test_h64_split_backwards(regions: Regions, how: Options, backwards: str) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)
        with call.context():
            first = call(lambda x: (block(x.sin()), pointwise_chain(x)), x * 1, **how)
            one, two = (each.square().mean() for each in first)
            del first
            loss = one + two
        weights = list(block.parameters())
        if backwards == "split":
            yield from torch.autograd.grad(loss, [x], retain_graph=True)
            yield from torch.autograd.grad(loss, weights)
        elif backwards == "outputs-apart":
            yield from torch.autograd.grad(one, [x, *weights], retain_graph=True)
            yield from torch.autograd.grad(two, [x])
        elif backwards == "group":
            with GraphExecGroup():
                yield from torch.autograd.grad(loss, [x, *weights])
        elif backwards == "then-all":
            yield from torch.autograd.grad(loss, [x], retain_graph=True)
            loss.backward()
            yield from gradients(x, block)
        else:
            for left in reversed(range(3 if backwards == "three-times" else 2)):
                loss.backward(retain_graph=left > 0)
                yield from [gradient.clone() for gradient in gradients(x, block)]

    regions(step)


@pytest.mark.parametrize("how", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("where", ["outside", "inside", "both"])
def test_h64_double_backward(regions: Regions, how: Options, where: str) -> None:
    """A gradient penalty, and ``torch.autograd.grad`` within the region's own function."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = linear(x.sin()).tanh()
            if where == "outside":
                return hidden.exp()
            (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
            return hidden * slope.exp()

        with call.context():
            hidden = x * 1
            loss = call(region, hidden, **how).square().mean()
            if where != "inside":
                (slope,) = torch.autograd.grad(loss, hidden, create_graph=True)
                loss = loss + slope.square().sum()
        loss.backward()
        yield loss
        yield from gradients(x, linear)

    regions(step)


@one_place
def test_h64_batch_norm_counts_once_also_with_a_backward_inside_of_the_region(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        norm, x = torch.nn.BatchNorm1d(8), torch.randn(4, 8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = norm(x).sin()
            (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
            return slope.exp() * hidden

        with call.context():
            loss = call(region, x * 1).sum()
        loss.backward()
        yield from (*gradients(x), *norm.buffers())

    regions.right_or_refused(step)


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.exp())
        return x * x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x, exp), (x_again, exp_again) = ctx.saved_tensors, ctx.saved_tensors
        assert torch.equal(x, x_again) and torch.equal(exp, exp_again)
        return gradient * (ctx.saved_tensors[1] + x * exp_again)


@ways
def test_h64_a_function_that_reads_its_saved_tensors_twice(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            return ReadsTwice.apply(x.sin()).cos() * ReadsTwice.apply(x.cos()).exp()

        with call.context():
            loss = call(region, x * 1, **how).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        yield from gradients(x)

    regions(step)


@ways
def test_h64_the_same_in_a_group_of_backwards(regions: Regions, how: Options) -> None:
    """As pipelines compute the gradients of weights: many backwards, for which torch asks a region once."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)
        w = torch.randn(8, requires_grad=True)

        def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return ReadsTwice.apply(x.sin() * w).cos()

        with call.context():
            loss = call(region, x * 1, w, **how).sum()
        if how["use_reentrant"]:
            loss.backward()
        else:
            with GraphExecGroup():
                loss.backward()
            assert GraphExecGroup._get_current_group() is None
        yield from gradients(x, w)

    regions(step)


# 70: what torch detaches when it packs.


@one_place
@ways
def test_h70_detach_is_no_operator_of_the_region(regions: Regions, how: Options) -> None:
    """Torch packs a detached alias, more or less often in a re-run. The user's own is one like it."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = linear(x).sin()
            stopped = hidden.detach() * hidden.data
            stopped.detach().mul_(2)
            rounded = hidden + (hidden.round() - hidden).detach()
            return (rounded * stopped).exp() * x.detach().requires_grad_(False)

        with call.context():
            loss = call(region, x * 1, **how).sum()
        loss.backward()
        yield from gradients(x, linear)

    regions(step)


@ways
def test_h70_no_graph_is_held_by_what_is_packed(no_collector: None, how: Options) -> None:
    """A graph dies with its last name, by reference counts, whether backward ran or not."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = (x.sin() * 2).exp()
            storages.append(weakref.ref(x.untyped_storage()))
        return x

    with spillway.Session(window=0) as session:
        for backward in (False, True, False):
            storages.clear()
            context = spillway.offload(
                session=session, min_bytes=0, policy=spillway.policies.Keep(), tier="host", window=0
            )
            with context:
                hidden = torch.randn(8, requires_grad=True) * 1
                storages.append(weakref.ref(hidden.untyped_storage()))
                loss = spillway.recompute(region, hidden, session=session, **how).sum()
                del hidden
            if backward:
                loss.backward()
            del loss
            push_out(session)
            assert [storage() is None for storage in storages] == [True] * len(storages)
            assert session.used_bytes == (0, 0)


def test_rows_that_places_chose_are_computed_again_and_those_that_a_mask_chose_are_held() -> None:
    x = torch.randn(64, 8, requires_grad=True)
    for index, held in ((torch.arange(0, 64, 2), False), (torch.arange(64) % 2 == 0, True)):
        names: list[str] = []

        def asks(call: spillway.OperatorCall, names: list[str] = names) -> bool:
            names.append(call.name)
            return False

        wanted = torch.autograd.grad((x[index].exp() * 2).sum(), x)
        got = torch.autograd.grad(
            (spillway.recompute(lambda x, index=index: x[index].exp() * 2, x, save=asks)).sum(), x
        )
        assert all(map(torch.equal, got, wanted))
        # A predicate is asked about what may be computed again.
        assert ("aten::index.Tensor" not in names) is held
