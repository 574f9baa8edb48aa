"""A re-run is not trusted: one that is not like the first run must give the same, or is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import spillway
from allocations import ExactMeter
from recompute.regions import Call, HiddenAttribute, HiddenList, Regions, gradients, hides, modes, one_place
from spillway.checkpointing.checks import fingerprint_of


def swapped_inputs(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    x, y = (x, y) if run == 1 else (y, x)
    return (x - y).sin()


def swapped_results(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    a, b = x.sin(), y.cos()
    a, b = (a, b) if run == 1 else (b, a)
    return (a - b).exp()


PAIR = torch.linspace(-1, 1, 16).view(2, 8)
PARAMETERS = [torch.nn.Parameter(torch.linspace(0, 1, 8)), torch.nn.Parameter(torch.linspace(1, 2, 8))]


def another_row(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    return (x * PAIR[int(run > 1)] + y).sin()


def another_parameter(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    return (x * PARAMETERS[int(run > 1)] + y).sin()


def rows_swapped(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    order = torch.tensor([0, 1, 2, 3]) if run == 1 else torch.tensor([1, 0, 2, 3])
    return (x.view(4, 2)[order] * y.view(4, 2).sin()).flatten()


def swapped_factors(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    """The product is the same, but what is saved of it comes in another order."""
    a, b = x.sin(), y.cos()
    return a * b if run == 1 else b * a


TWO, FOUR = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.tensor(4.0))


def swapped_scales(x: torch.Tensor, y: torch.Tensor, run: int) -> torch.Tensor:
    """The result is the same, but not what is on the way."""
    first, second = (TWO, FOUR) if run == 1 else (FOUR, TWO)
    return (x * y) * first * second


DIFFERENT = [
    *(swapped_inputs, swapped_results, another_row, another_parameter, rows_swapped),
    *(swapped_factors, swapped_scales),
]


@one_place
@pytest.mark.parametrize("different", DIFFERENT, ids=lambda function: function.__name__)
@pytest.mark.parametrize("warm", [False, True], ids=["first-step", "later-step"])
@modes
@hides
def test_a_different_re_run_beside_a_cache_is_refused(
    regions: Regions, different: Callable[..., torch.Tensor], warm: bool, reentrant: bool, hides: bool
) -> None:
    """The operators of inputs and parameters are the same, in number and kind; what they read is not."""
    runs = HiddenList([0]) if hides else [0]
    x, y = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)

    def region(x: torch.Tensor, y: torch.Tensor, differs: bool) -> torch.Tensor:
        run = 1
        if differs:
            runs[0] += 1
            run = runs[0]
        if run == 1 and differs:
            torch.zeros(3) + 1
        return different(x, y, run)

    if warm:
        # Its first run's fingerprints are not taken any more.
        for _ in range(2):
            spillway.recompute(
                region, x * 1, y * 1, False, use_reentrant=reentrant, session=regions.session
            ).sum().backward()
    out = spillway.recompute(
        region, x * 1, y * 1, True, use_reentrant=reentrant, verify="always", session=regions.session
    )
    if not hides:
        # Spillway puts the count back before the re-run.
        expected = torch.autograd.grad(different(x * 1, y * 1, 1).sum(), [x, y])
        x.grad = y.grad = None
        out.sum().backward()
        assert all(map(torch.equal, gradients(x, y), expected))
        assert runs == [1]
        return
    with pytest.raises(spillway.RecomputeError, match=r"something else than the first run|other values when"):
        out.sum().backward()
    # The engine keeps what an interrupted backward held, until the next one.
    torch.ones(1, requires_grad=True).sum().backward()


@one_place
@pytest.mark.parametrize("changes", ["shape", "dtype"])
def test_a_kernel_that_reads_unseen_what_has_another_shape_or_type(regions: Regions, changes: str) -> None:
    """What was seen to be right of one shape, or type, says nothing of another."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            tripled, out = x * 3, torch.empty_like(x)
            reads_tripled = x.shape[0] > 8 or x.dtype is torch.float64
            out.numpy()[...] = np.sin(tripled.numpy() if reads_tripled else x.numpy() * 3)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 3 * (ctx.saved_tensors[0] * 3).cos()

    function = lambda x: Sine.apply(x).exp()  # noqa: E731

    def step(call: Call) -> Iterator[torch.Tensor]:
        for number in range(6):
            size = 8 if number < 3 or changes == "dtype" else 12
            dtype = torch.float32 if number < 3 or changes == "shape" else torch.float64
            x = torch.randn(size, dtype=dtype, requires_grad=True)
            with call.context():
                loss = call(function, x * 1).sum()
            loss.backward()
            yield from gradients(x)

    regions(step, passes=1)


def block(x: torch.Tensor, linear: torch.nn.Linear) -> torch.Tensor:
    return functional.gelu(linear(x.sin())).exp() * x


def block_with_product(x: torch.Tensor, linear: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel that no dispatcher sees reads what an operator that it does see has written, and is read by another."""
    product = linear(x.sin())
    return linear(product.cos()), product


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@one_place
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("around", ["alone", "operators-around", "output-alive", "product-alive"])
@modes
def test_compiled_code_in_a_region_is_computed_again(
    regions: Regions, backend: str, around: str, reentrant: bool
) -> None:
    """Nothing of it is held, and its buffers, which only its own kernels see, are made again."""
    linear = torch.nn.Linear(64, 64)
    compiled = torch.compile(block_with_product if around == "product-alive" else block, backend=backend)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if around == "product-alive":
            return compiled(x, linear)
        if around == "alone":
            return compiled(x, linear), torch.zeros(())
        out = compiled(x.cos(), linear)
        return out.tanh() * x, out if around == "output-alive" else torch.zeros(())

    x = torch.randn(128, 64, requires_grad=True)
    sum(each.sum() for each in function(x * 1)).backward()
    expected = [*gradients(x, linear)]
    for _ in range(3):
        x.grad = linear.weight.grad = linear.bias.grad = None
        mid = x * 1
        with regions.offload() as context:
            out, alive = spillway.recompute(function, mid, session=regions.session, use_reentrant=reentrant)
        loss = out.sum() + alive.sum()
        del out
        loss.backward()
        stats = context.stats()
        assert stats.saved_bytes <= mid.nbytes, "nothing but the region's input is held"
        if not reentrant or backend == "inductor":
            # Reentrant, the first run has no gradients, and another graph is compiled for that.
            assert stats.recomputed_bytes >= 2 * mid.nbytes, stats
            assert stats.notes == ()
        for got, want in zip(gradients(x, linear), expected, strict=True):
            assert torch.equal(got, want)
        del loss, mid, alive


@one_place
def test_what_only_an_unseen_kernel_made_and_saved_is_computed_again(regions: Regions, no_collector: None) -> None:
    """It is neither held nor taken for something from outside."""
    made: list[weakref.ref[Any]] = []

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            cosine = torch.from_dlpack(np.cos(x.numpy()))
            made.append(weakref.ref(cosine.untyped_storage()))
            ctx.save_for_backward(cosine)
            return torch.from_numpy(np.sin(x.numpy()))

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    x = torch.randn(64, requires_grad=True)
    with regions.offload():
        out = spillway.recompute(lambda x: Sine.apply(x.exp()), x, session=regions.session)
    assert made[0]() is None
    out.sum().backward()
    (got,), x.grad = gradients(x), None
    Sine.apply(x.exp()).sum().backward()
    assert torch.equal(got, *gradients(x))


@one_place
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_write_into_what_was_saved_from_outside_is_refused_as_plainly(regions: Regions, where: str) -> None:
    """The constant is seen for the first time when it is saved, and written before the region ends, or after."""
    constant = torch.full((8,), 2.0)

    def region(x: torch.Tensor) -> torch.Tensor:
        out = x * constant
        if where == "inside":
            constant.add_(1)
        return out

    for call in (region, lambda x: spillway.recompute(region, x, session=regions.session)):
        out = call(torch.randn(8, requires_grad=True))
        if where == "outside":
            constant.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|written in place"):
            out.sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()


class Scaled(torch.nn.Module):
    """As FP8 training does: inputs are scaled by the largest of the last steps, which each forward notes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.register_buffer("amax", torch.ones(4))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.copy_(8 / self.amax.max())
            self.amax.copy_(self.amax.roll(1))
            self.amax[0] = x.abs().max()
        quantized = (x * self.scale).to(torch.float8_e4m3fn).to(x.dtype) / self.scale
        return self.linear(x + (quantized - x).detach()).sin()


@pytest.mark.parametrize(
    "how",
    [{}, {"save": "matmul"}, {"offload": ["inputs", "pointwise"]}, {"use_reentrant": True, "offload": "inputs"}],
    ids=str,
)
def test_scales_that_each_forward_notes_are_noted_once(regions: Regions, how: dict[str, Any]) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        blocks, x = [Scaled() for _ in range(2)], torch.randn(4, 16, requires_grad=True)
        for _ in range(3):
            hidden = x * 1
            with call.context():
                for block in blocks:
                    hidden = call(block, hidden, **how)
            hidden.square().sum().backward()
            yield from gradients(x, *blocks)
            for block in blocks:
                yield from block.buffers()

    regions(step)


@one_place
def test_random_numbers_that_torch_does_not_know_of_are_noticed(regions: Regions) -> None:
    """What is drawn unseen is another draw each time."""
    generator = np.random.default_rng(0)

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            noise = torch.empty_like(x)
            noise.numpy()[...] = generator.random(len(x))
            ctx.save_for_backward(noise)
            return x * noise

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    context = regions.offload()
    with context:
        out = spillway.recompute(Noise.apply, torch.randn(8, requires_grad=True), session=regions.session)
    with pytest.raises(spillway.RecomputeError, match="other values when"):
        out.sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()


@one_place
def test_a_kernel_that_counts_its_calls_unseen_is_refused(regions: Regions) -> None:
    """The first run found a zero in its workspace, and every later one finds a one."""
    workspace = np.zeros(1, dtype="f")

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            factor = torch.empty_like(x)
            factor.numpy()[...] = workspace
            workspace[0] = 1
            ctx.save_for_backward(factor)
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0]

    out = spillway.recompute(Counts.apply, torch.randn(8, requires_grad=True), session=regions.session)
    with pytest.raises(spillway.RecomputeError, match="other values when"):
        out.sum().backward()
    torch.ones(1, requires_grad=True).sum().backward()


def written_after_exp(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    y.mul_(w)
    return y.cos()


def written_between(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 1
    z = y.sin()
    y.mul_(w.detach())
    return y.cos() * w + z


def written_through_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    z = y.cos()
    y[1:].add_(w[1:])
    return y.sin().exp() * z.detach()


@one_place
@pytest.mark.parametrize("function", [written_after_exp, written_between, written_through_a_view])
@pytest.mark.parametrize("how", [{}, {"offload": "pointwise"}], ids=str)
def test_what_is_written_when_it_was_saved_and_is_never_asked_for_is_not_compared(
    regions: Regions, function: Callable[..., torch.Tensor], how: dict[str, Any]
) -> None:
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    w = torch.linspace(0.5, 1, 64, requires_grad=True)
    plain = torch.autograd.grad(function(x, w).sum(), w)[0]
    for _ in range(2):
        loss = spillway.recompute(function, x, w, session=regions.session, **how).sum()
        assert torch.equal(torch.autograd.grad(loss, w)[0], plain)
        loss = spillway.recompute(function, x, w, session=regions.session, **how).sum()
        with pytest.raises(spillway.InplaceError):
            torch.autograd.grad(loss, x)


# What fingerprints see


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_a_fingerprint_is_of_all_elements(dtype: torch.dtype) -> None:
    x = torch.randn(7, 13, 5, 3, generator=torch.Generator().manual_seed(1)) * 10
    x = x > 0 if dtype is torch.bool else x.to(dtype)
    expected = fingerprint_of(x)
    assert expected is not None
    for same in (torch.cat([x, x], 1)[:, :13], torch._neg_view(-x) if dtype.is_floating_point else x):
        assert fingerprint_of(same) == expected
    for at in ((0, 0, 0, 0), (3, 4, 2, 1), (6, 12, 4, 2)):
        other = x.clone()
        other[at] = not other[at] if dtype == torch.bool else other[at] + 1
        assert fingerprint_of(other) != expected
    swapped = x.clone()
    swapped[0], swapped[1] = x[1], x[0]
    assert fingerprint_of(swapped) != expected


@pytest.mark.parametrize("count", [4, 8, 16, 64])
def test_numbers_that_change_signs_have_another_fingerprint(count: int) -> None:
    """With multipliers in equal steps, one of 35 draws of eight numbers was not told apart."""
    torch.manual_seed(0)
    for _ in range(500):
        x = torch.randn(count)
        assert fingerprint_of(x) != fingerprint_of(-x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128])
def test_round_numbers_that_change_places_have_other_fingerprints(dtype: torch.dtype) -> None:
    found = set()
    for row in range(4):
        x = torch.zeros(4, 4096, dtype=dtype)
        x[row] = 1
        print_ = fingerprint_of(x)
        assert print_ is not None
        found.add(print_.item())
    assert len(found) == 4


def test_one_element_has_a_fingerprint_whatever_its_strides_say() -> None:
    one = torch.randn(1, 1, dtype=torch.float64)
    for strides in ((0, 0), (7, 3), (1, 1)):
        assert fingerprint_of(one.as_strided((1, 1), strides)) == fingerprint_of(one)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_has_no_fingerprint() -> None:
    assert fingerprint_of(torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8)) is None


def test_a_fingerprint_takes_little_memory() -> None:
    """The device may be full. Only a tensor with gaps is copied."""
    x = torch.zeros(2048, 3, 1024)
    for tensor in (x, x.transpose(0, 2)):
        measuring = ExactMeter(0)
        measuring.mark()
        fingerprint_of(tensor)
        measuring.mark()
        readings = measuring.finish()
        assert readings is not None
        assert readings[1].peak - readings[0].level < 1 << 21


@one_place
@hides
def test_what_a_function_comes_to_keep_is_written(regions: Regions, hides: bool) -> None:
    """When its partial replays have been trusted long since, what they leave out is in nobody's hands."""

    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.keeps = False
            self.seen: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            if self.keeps:
                self.seen = y.detach()
            return self.down(y.relu()).tanh().exp()

    class Hiding(Keeps):
        seen = HiddenAttribute(None)

    def relu(call: spillway.OperatorCall) -> bool:
        return "relu" in call.name

    make = Hiding if hides else Keeps
    ours, plain = make(), make()
    notes: list[str] = []
    for number in range(6):
        ours.keeps = plain.keeps = number >= 3
        x = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        with regions.offload():
            y = spillway.recompute(ours, x * 1, session=regions.session, save=[relu])
        found = torch.autograd.grad(y.sum(), [x, *ours.parameters()])
        expected = torch.autograd.grad(plain(x * 1).sum(), [x, *plain.parameters()])
        assert all(map(torch.equal, found, expected))
        if plain.seen is not None:
            assert ours.seen is not None
            assert torch.equal(ours.seen, plain.seen)
        assert regions.last is not None
        notes += regions.last.stats().notes
    # State that Spillway sees is put back after the re-run, so that nothing of that is in anybody's hands.
    assert any("was recomputed whole" in note for note in notes) == hides
