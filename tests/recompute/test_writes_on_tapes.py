"""Functions that write in place what they made: of these there are tapes, too. See NOTE [ Tapes ] in
``regions/tape.py``."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recompute.regions import HiddenAttribute, HiddenList, Regions, one_place
from recompute.test_tapes import gradients_of, tapes_of
from spillway.records import Decision
from support import assert_identical

pytestmark = one_place

KINDS = (Decision.RECOMPUTE, Decision.KEEP, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK)
PROGRAMS = 150


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


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


class Into(nn.Module):
    """What autograd saves goes into what is written by an operator that hides differences, and saved after it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        z = y + 1
        z.relu_()
        return z.sin()


def test_what_goes_into_a_value_by_a_write_is_compared_itself(regions: Regions) -> None:
    function = Into()
    for _ in range(3):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    (tape,) = tapes_of(regions.session)
    assert tape is not None
    names = [tape.saved[place].spot.value for place in sorted(tape.showing.last)]
    made = [spot.value for step in tape.steps for _, spot in step.makes]
    assert names == [made[0], made[1]]


class Sorted(nn.Module):
    """What is handed in hangs on what is written by indices that nobody computes again."""

    def forward(self, x: Tensor) -> Tensor:
        order = x.detach().mean((0, 1)).argsort()
        y = x.detach() + 1
        y.index_add_(-1, order, x.detach())
        scale = (y.mean() + x.mean()).tanh()
        return (x * scale).sin()


class Omits(nn.Module):
    """Does not write any more what it wrote when its tape was written, and saves it all the same."""

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


@pytest.mark.parametrize("make", [Omits, Normed])
@pytest.mark.parametrize("watch", [True, False], ids=["followed", "unwatched"])
def test_a_call_that_leaves_out_a_write_is_lost(
    regions: Regions, make: Callable[[], Omits | Normed], watch: bool
) -> None:
    function = make()
    for _ in range(3):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))
    assert any(tapes_of(regions.session))
    function.writes = False
    for _ in range(2):
        assert_identical(gradients_of(regions, function), gradients_of(None, function))


class Before(nn.Module):
    """Reads a value before it writes it, and saves it after that."""

    number = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5
        z = y + 1
        y.mul_(self.number)
        return y.sin() + z.cos()


class Numbers(nn.Module):
    """Writes whole numbers that were drawn."""

    number = 1

    def forward(self, x: Tensor) -> Tensor:
        index = torch.randint(0, 8, (2, 5, 8))
        index.add_(self.number)
        return x.gather(2, index)


class Bytes(nn.Module):
    """Makes bytes, which are no state of a kernel."""

    number = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.full((2, 5, 16), self.number, dtype=torch.uint8)


class Half(nn.Module):
    """Of a value that is saved, half goes into what is saved at last."""

    number = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x * self.number, x], 1)
        z = y.sin()
        end = y[:, 5:] + 1
        return z[:, :5] + z[:, 5:] + end.cos()


class Other(nn.Module):
    """What is saved goes into another half than the one that is saved after it."""

    number = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([(x * self.number).exp(), x], 1)
        return y[:, 5:].sin() + y[:, :5]


class Thirds(nn.Module):
    """Of a value, three parts are saved."""

    number = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x * self.number, x], -1)
        first, second, third = y.chunk(3, -1)
        return first.sin() + second.sin() + third.sin()


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


@pytest.mark.parametrize("watch", [True, False], ids=["followed", "unwatched"])
@pytest.mark.parametrize("make", [Looks, Keeps])
def test_what_was_left_unwritten_is_read_by_nobody(
    regions: Regions, make: Callable[[], nn.Module], watch: bool
) -> None:
    function, plain = make(), make()
    for _ in range(5):
        ours = gradients_of(regions, function, save="aten::tanh")
        assert_identical(ours, gradients_of(None, plain))
        if isinstance(function, Keeps) and isinstance(plain, Keeps):
            assert_identical([function.last], [plain.last])


class Refused(nn.Module):
    """Writes what there is no tape of."""

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
        return y.sin() + y


@pytest.mark.parametrize("way", ["outside", "at random", "its shape", "given", "saved before"])
def test_of_other_writes_there_is_no_tape(regions: Regions, way: str) -> None:
    function, plain = Refused(way), Refused(way)
    for seed in range(4):
        assert_identical(gradients_of(regions, function, seed=seed), gradients_of(None, plain, seed=seed))
    assert not any(tapes_of(regions.session))
    assert torch.equal(function.seen, plain.seen)


def test_what_no_tape_can_tell_is_seen_before_the_function_runs_for_one(regions: Regions) -> None:
    runs = HiddenList()

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        # On a CPU, numbers are drawn into what was made for them.
        return functional.dropout((x * 2).sin(), 0.25)

    seen = []
    for seed in range(3):
        gradients_of(regions, block, seed=seed)
        seen.append(len(runs))
        runs.clear()
    assert tapes_of(regions.session) == [None]
    # Forward, and again for backward; the first time, one run is compared with another.
    assert seen == [3, 2, 2]
