"""Functions that write in place what they made, whatever is kept or offloaded of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

import spillway
from recompute.regions import Call, HiddenAttribute, Regions, gradients_of, leaf, one_place, operators_of_backward
from spillway.errors import InplaceError, RecomputeError
from support import assert_identical, grads

pytestmark = one_place

Options = dict[str, Any]
HOWS: dict[str, Options] = {
    "nothing": {},
    "pointwise kept": {"save": ["pointwise", "random"]},
    "products kept": {"save": "matmul"},
    "most offloaded": {"offload": ["inputs", "matmul", "norm", "pointwise"]},
    "all kept": {"save": "aten::*"},
}
hows = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
POLICIES = (
    CheckpointPolicy.PREFER_SAVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD,
    CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE,
)


def policy(seed: int) -> Options:
    """Any decisions about what operators give."""
    random = Random(seed)

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return random.choice(POLICIES)

    return {"policy": decide}


class Writing(nn.Module):
    """An RMS norm that writes as torch's own does on a CPU, an activation in place, a write through a view, sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mid, self.down = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.rms_norm(x, (16,), self.weight, 1e-5)
        hidden = self.up(y)
        before = hidden.mean().detach()
        hidden.mul_(1.5)
        hidden = self.mid(functional.silu(hidden) * before)
        hidden[..., :8].add_(y[..., 8:])
        out = x + hidden.sin()
        out += self.down(hidden.cos())
        return out.tanh()


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda a, b: a.add_(b),
    "scale": lambda a, _: a.mul_(0.75),
    "relu": lambda a, _: a.relu_(),
    "copy": lambda a, b: a[:, :2].copy_(b[:, 2:4]),
    "add to a view": lambda a, b: a.transpose(0, 1)[1:3].add_(b[:, 2:4].transpose(0, 1)),
    "fill": lambda a, _: a[..., 3].fill_(0.25),
}
MAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "difference": torch.sub,
    "half": lambda a, _: a * 0.5,
    "mean": lambda a, b: a + b.mean(),
    "tanh": lambda a, _: a.tanh(),
    "product": torch.mul,
    "matrices": lambda a, b: a @ b.mT @ b,
}


class Program(nn.Module):
    """Any small function, of which a good part writes in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = Random(seed)
        self.steps = [
            (random.choice([*WRITES, *MAKES]), random.randrange(count), random.randrange(count))
            for count in range(1, random.randint(5, 14))
        ]

    @property
    def writes(self) -> bool:
        return any(name in WRITES for name, *_ in self.steps)

    def forward(self, x: Tensor) -> Tensor:
        values = [x * 0.5]
        for name, first, second in self.steps:
            a, b = values[first], values[second]
            if name in WRITES:
                WRITES[name](a, b)
                values.append(a)
            else:
                values.append(MAKES[name](a, b))
        return torch.stack([value.sin() for value in values[-3:]])


@hows
def test_a_block_that_writes_what_it_made(regions: Regions, how: Options) -> None:
    block = Writing()
    regions.compare_often(block, calls=5, **how)
    assert not regions.was_whole()


def test_a_block_that_writes_what_it_made_with_any_decisions(regions: Regions) -> None:
    block = Writing()
    for seed in range(12):
        regions.compare_often(block, calls=3, **policy(seed))
        assert not regions.was_whole()


@pytest.mark.parametrize("programs", [50, pytest.param(150, marks=pytest.mark.long)])
def test_any_function_that_writes_what_it_made(regions: Regions, programs: int) -> None:
    written, whole = [], set()
    for seed in range(programs):
        function = Program(seed)
        try:
            expected = gradients_of(None, function)
        except RuntimeError:
            # What is saved was written later, as autograd says.
            continue
        for how in (*HOWS.values(), *(policy(10 * seed + number) for number in range(4))):
            for _ in range(3):
                assert_identical(gradients_of(regions, function, **how), expected)
                if regions.was_whole():
                    whole.add(seed)
        if function.writes:
            written.append(seed)
    assert len(written) >= programs // 4
    # What is saved, for a gradient that nobody takes, and written at once, has the fingerprint of what was written.
    assert len(whole) <= programs // 50


class Sorted(nn.Module):
    """What is kept is computed from what is written by indices that nobody else needs."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().mean((0, 1)).argsort()
        y = x.detach() + 1
        y.index_add_(-1, order, x.detach())
        scale = (y.mean() + x.mean()).tanh()
        return (x * scale).sin()


def test_a_write_is_left_out_with_what_is_written(regions: Regions) -> None:
    block = Sorted()
    regions.compare_often(block, calls=3, save="aten::tanh")
    whole, partial = (operators_of_backward(regions, block, **how) for how in ({}, {"save": "aten::tanh"}))
    assert "mul" in partial
    for name in ("index_add_", "sort"):
        assert name in whole
        assert name not in partial


class Omits(nn.Module):
    """Does not write any more what it wrote in earlier calls, and saves it all the same."""

    writes = True

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5
        if self.writes:
            y.mul_(3.0)
        return y.sin()


class Normed(nn.Module):
    """The same, of a sum that is normalised."""

    writes = True

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5
        if self.writes:
            y += x
        return functional.rms_norm(y, (16,))


class Adds(nn.Module):
    """The same, where what is written was kept."""

    writes = True

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ x.mT).sigmoid() @ x
        if self.writes:
            y[..., :4].mul_(2)
        return y.exp().sin() * y.cos()


@hows
@pytest.mark.parametrize("first", [True, False], ids=["leaves out", "adds"])
@pytest.mark.parametrize("make", [Omits, Normed, Adds])
def test_a_call_that_leaves_out_or_adds_a_write(
    regions: Regions, make: Callable[[], Omits | Normed | Adds], how: Options, first: bool
) -> None:
    function = make()
    function.writes = first
    regions.compare_often(function, **how)
    function.writes = not first
    regions.compare_often(function, calls=2, **how)
    function.writes = first
    regions.compare_often(function, calls=3, **how)


LATE_WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda y: y.zero_(),
    "an alias": lambda y: y.detach().mul_(2),
    "foreach": lambda y: torch._foreach_mul_([y], 2.0),
    "out": lambda y: torch.add(y, 1, out=y),
}


@pytest.mark.parametrize("how", [{"save": "matmul"}, {"offload": "matmul"}, {}], ids=["save", "offload", "nothing"])
@pytest.mark.parametrize("write", LATE_WRITES)
def test_what_is_chosen_is_written_in_one_call_at_its_end(regions: Regions, write: str, how: Options) -> None:
    """Autograd did not save it."""

    class Ending(nn.Module):
        writes = False

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            # Of two dimensions: autograd knows all names of what comes of it.
            y = x.flatten(0, 1) @ weight
            z = (y + 1).sin().cos()
            if self.writes:
                with torch.no_grad():
                    LATE_WRITES[write](y)
            return z

    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))
    function = Ending()
    for seed in range(8):
        function.writes = seed in (4, 5)
        regions.compare(function, weight, seed=seed, **how)


class Looks(nn.Module):
    """Reads what it wrote for nobody after the last that is needed, by an index which only that write makes good."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        index = (x.detach().abs() * 100).long()
        product = (x @ x.mT).tanh()
        y = product @ (index.float() * 1e-3)
        del product
        index.clamp_(0, 3)
        end = y.exp()
        found = self.table[index]
        return end.cos() + found


class Keeps(nn.Module):
    """Keeps what it wrote, for its caller."""

    last = HiddenAttribute(None)

    def forward(self, x: Tensor) -> Tensor:
        product = (x @ x.mT).tanh()
        y = x.detach() * 0.5
        z = product @ (y + 1)
        y.mul_(3.0)
        self.last = y
        return z.exp().cos()


class KeepsWhatItMakes(nn.Module):
    """Comes to keep what it made, for its caller."""

    last = HiddenAttribute(None)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        self.calls += 1
        self.last = y.detach() if self.calls > 3 else None
        return self.down(y.relu()).tanh().exp()


@pytest.mark.parametrize(
    "how", [{}, {"save": "aten::tanh"}, {"offload": "aten::tanh"}, {"save": "aten::relu"}, {"save": "matmul"}], ids=str
)
@pytest.mark.parametrize("make", [Looks, Keeps, KeepsWhatItMakes])
def test_what_was_left_out_is_read_by_nobody(regions: Regions, make: Callable[[], nn.Module], how: Options) -> None:
    function, plain = make(), make()
    for seed in range(7):
        ours = gradients_of(regions, function, seed=seed, **how)
        assert_identical(ours, gradients_of(None, plain, seed=seed))
        if not isinstance(function, Looks):
            mine, theirs = (getattr(each, "last") for each in (function, plain))  # noqa: B009
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)


class Unusual(nn.Module):
    """Writes what is not its own, or in an unusual way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh() + 1
        if self.way == "outside":
            self.seen.add_(y.detach().mean((0, 1)))
        elif self.way == "at random":
            y.mul_(2).bernoulli_(0.5)
        elif self.way == "its shape":
            y.unsqueeze_(0).squeeze_(0)
        elif self.way == "given":
            x.detach().mul_(1)
        elif self.way == "saved before":
            z = y.sin()
            with torch.autograd._unsafe_preserve_version_counter(y):
                y.detach().mul_(1.0)
            return z
        elif self.way == "by numpy":
            y.detach().numpy()[...] *= 2
        elif self.way == "out":
            torch.mul(y.detach(), 3, out=y.detach())
        elif self.way == "set data":
            y.data = y.detach() * 2
        return y.sin() + y


@hows
@pytest.mark.parametrize(
    "way", ["outside", "at random", "its shape", "given", "saved before", "by numpy", "out", "set data"]
)
def test_other_writes(regions: Regions, way: str, how: Options) -> None:
    function, plain = Unusual(way), Unusual(way)
    for seed in range(5):
        ours = gradients_of(regions, function, seed=seed, **how)
        assert_identical(ours, gradients_of(None, plain, seed=seed))
    assert torch.equal(function.seen, plain.seen)


@hows
def test_a_buffer_that_comes_to_be_written_is_written_once(regions: Regions, how: Options) -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(16, 16)
            self.register_buffer("mean", torch.zeros(16))
            self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x).tanh()
            if self.writes:
                with torch.no_grad():
                    self.mean.lerp_(y.detach().mean((0, 1)), 0.1)
            return (y + self.mean).exp()

    ours, plain = Averages(), Averages()
    for seed in range(8):
        ours.writes = plain.writes = seed >= 3
        assert_identical(gradients_of(regions, ours, seed=seed, **how), gradients_of(None, plain, seed=seed))
        assert torch.equal(ours.mean, plain.mean)


@hows
def test_a_slice_that_leaves_first_is_not_taken_for_the_whole(regions: Regions, how: Options) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        some, every = y[:1].cos(), y.sin()
        return some.sum() + every.sum() + torch.where(y.detach() > 0.5, x, x * 3).sum()

    regions.compare_often(function, calls=5, **how)
    regions.compare_often(function, calls=5, offload="aten::mul")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a view of what was written": lambda y: _viewed(y),
    "in place": lambda y: (y * 2).sin_(),
    "views of one": lambda y: _parts(y),
    "a view that is written": lambda y: _half(y),
}


def _viewed(y: Tensor) -> Tensor:
    base = y * 2
    part = base[0]
    base.mul_(3)
    # A view of what was written gets a new node where it is read.
    return part * part


def _parts(y: Tensor) -> Tensor:
    first, second, third, fourth = y.exp().chunk(4, -1)
    return first.sin() * second.cos() + third.tanh() * fourth.exp() * first.sigmoid()


def _half(y: Tensor) -> Tensor:
    base = y * 2
    base[..., 8:].mul_(3)
    return base.sin() * base[..., :1].cos()


@hows
@pytest.mark.parametrize("reads", VIEWS.values(), ids=VIEWS)
def test_views_are_read_and_written(regions: Regions, reads: Callable[[Tensor], Tensor], how: Options) -> None:
    def function(x: Tensor) -> Tensor:
        return reads(x.sin().exp().tanh().cos() * 2).sigmoid().exp()

    regions.compare_often(function, calls=5, **how)


@hows
@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_input_is_written(regions: Regions, how: Options, late: int) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        writes = False

        def function(x: Tensor, table: Tensor) -> Tensor:
            y = (x + table).sin()
            if writes:
                table.add_(1)
            return (y * table.detach().clone()).cos()

        for number in range(6):
            writes = number >= late
            x, table = leaf(), torch.ones(16)
            with call.context():
                y = call(function, x * 1, table)
            y.sum().backward()
            yield from (*grads(x), table)

    # A later call that writes what earlier ones did not may be refused.
    (regions if late == 0 else regions.right_or_refused)(step, **how)


def test_a_policy_that_commands_to_save_what_is_written_is_refused(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(2)
        return y.sin()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.add.Tensor else CheckpointPolicy.PREFER_SAVE

    # The policy is asked when the first call is replayed. From then on, its answers are known in forward.
    for _ in range(3):
        with pytest.raises(RecomputeError, match="writes into it in place"):
            gradients_of(regions, function, policy=policy)
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
        regions.assert_nothing_left()


class Codes(nn.Module):
    """Codes that follow what forward computes: a buffer, or a parameter without gradients."""

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, codes = nn.Linear(16, 16), torch.randn(8, 16)
        if as_buffer:
            self.register_buffer("codes", codes)
        else:
            self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        nearest = self.codes[torch.cdist(hidden.detach(), self.codes).argmin(-1)]
        self.codes.data.lerp_(hidden.detach().mean(0), 0.1)
        return hidden * nearest


def test_codes_that_forward_writes_are_right_as_a_buffer_and_refused_as_a_parameter(regions: Regions) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        block = Codes(as_buffer=True)
        for _ in range(3):
            x = torch.randn(4, 16)
            with call.context():
                call(block, x).square().sum().backward()
            yield from (*grads(*block.parameters()), block.codes)

    regions(step)
    block = Codes(as_buffer=False)
    with regions.offload(), pytest.raises(RecomputeError, match="make that parameter a buffer"):
        spillway.recompute(block, torch.randn(4, 16), session=regions.session).square().sum().backward()


def test_an_offloaded_input_that_a_later_call_writes_first_is_refused(regions: Regions, tmp_path: Path) -> None:
    """Its entry has the bytes from before. The copy has ended: nothing but the version tells."""

    writes = [False]

    def first(x: Tensor) -> Tensor:
        hidden = x.exp().tanh()
        if writes[0]:
            with torch.no_grad():
                x.mul_(2)
        return x.sin() * hidden.exp()

    with spillway.Session(window=0, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        for step in range(4):
            writes[0] = step == 3
            x = torch.randn(64, 64, requires_grad=True)
            with spillway.offload(policy=spillway.policies.Keep(), min_bytes=0, session=session):
                options: Any = {"session": session, "offload": ["inputs", lambda call: True]}
                y = spillway.recompute(first, x * 1, **options)
                z = spillway.recompute(lambda y: y.sin().exp().sin(), y, **options)
            del y
            with pytest.raises(InplaceError) if step == 3 else nullcontext():
                z.sum().backward()
