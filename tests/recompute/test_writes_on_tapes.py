"""Functions that write in place what they made: of these there are tapes, too. See NOTE [ Tapes ] in
``regions/tape.py``."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from recompute.regions import HiddenAttribute, HiddenList, Regions, hides, one_place
from recompute.test_tapes import gradients_of, tapes_of
from recompute.test_unwatched import told
from spillway.capture.identity import ViewRecipe
from spillway.operators import Planned, full_name
from spillway.records import Decision
from spillway.regions.following import Following
from spillway.regions.retracing import Retracing
from spillway.regions.showing import _covers
from spillway.regions.steps import Spot, Step
from spillway.regions.tape import Tape
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


def decided(tape: Tape, random: Random) -> dict[str, Any]:
    """Any decisions about what is saved of it."""
    saved = {spot.value for spot, _, _ in tape.saved if spot is not None}
    places = {
        place: (full_name(step.func), random.choice(KINDS))
        for place, step in enumerate(tape.steps)
        if not saved.isdisjoint(step.made)
    }
    return {"policy": Planned(places, random.choice((Decision.KEEP, Decision.OFFLOAD_HOST)), True)}


@pytest.mark.parametrize("watch", [True, False], ids=["followed", "unwatched"])
def test_whatever_is_kept_or_leaves_it_is_the_same_in_every_bit(regions: Regions, watch: bool) -> None:
    block = Writing()
    expected = [gradients_of(None, block, seed=seed) for seed in range(3)]
    for seed in range(3):
        assert_identical(gradients_of(regions, block, seed=seed, watch=watch), expected[seed])
    (tape,) = tapes_of(regions.session)
    assert tape is not None
    assert sum(step.writes >= 0 for step in tape.steps) >= 3
    random = Random(1)
    for _ in range(12):
        how = decided(tape, random)
        for seed in range(3):
            assert_identical(gradients_of(regions, block, seed=seed, watch=watch, **how), expected[seed])


@pytest.mark.parametrize("watch", [True, False], ids=["followed", "unwatched"])
def test_any_function_that_writes_what_it_made(regions: Regions, watch: bool) -> None:
    written = []
    functions = [Program(seed) for seed in range(PROGRAMS)]
    for seed, function in enumerate(functions):
        try:
            expected = gradients_of(None, function)
        except RuntimeError:
            # What is saved was written later, as autograd says.
            continue
        before = len(tapes_of(regions.session))
        for _ in range(3):
            assert_identical(gradients_of(regions, function, watch=watch), expected)
        (tape,) = tapes_of(regions.session)[before:]
        if tape is None or all(step.writes < 0 for step in tape.steps):
            continue
        written.append(seed)
        random = Random(seed)
        for _ in range(6):
            how = decided(tape, random)
            for _ in range(2):
                assert_identical(gradients_of(regions, function, watch=watch, **how), expected)
    assert len(written) >= PROGRAMS // 4


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
        assert_identical(gradients_of(regions, function, watch=False), gradients_of(None, function))
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


def test_what_is_written_by_what_was_left_out_is_left_out_too(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, ran = Sorted(), []
    run = Following._run

    def running(self: Following, place: int, step: Step, *args: Any) -> Any:
        if isinstance(self, Retracing):
            ran.append(full_name(step.func).split("::")[1])
        return run(self, place, step, *args)

    monkeypatch.setattr(Following, "_run", running)
    expected = gradients_of(None, function)
    for _ in range(3):
        assert_identical(gradients_of(regions, function, watch=False), expected)
    (tape,) = tapes_of(regions.session)
    assert tape is not None
    (place,) = (place for place, step in enumerate(tape.steps) if step.func is torch.ops.aten.tanh.default)
    how = {"policy": Planned({place: (full_name(torch.ops.aten.tanh.default), Decision.KEEP)}, Decision.KEEP, True)}
    for _ in range(2):
        ran.clear()
        assert_identical(gradients_of(regions, function, watch=False, **how), expected)
    assert any(name.startswith("mul.") for name in ran)
    assert not any(name.startswith(("index_add_", "argsort", "sort")) for name in ran)


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
        assert_identical(gradients_of(regions, function, watch=watch), gradients_of(None, function))
    assert any(tapes_of(regions.session))
    function.writes = False
    for _ in range(2):
        assert_identical(gradients_of(regions, function, watch=watch), gradients_of(None, function))


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


@hides
@pytest.mark.parametrize("make", [Before, Numbers, Bytes, Half, Other, Thirds])
def test_what_changes_before_backward_is_told(
    regions: Regions, make: type[Before | Numbers | Bytes | Half | Other | Thirds], hides: bool
) -> None:
    function = (type("Hiding", (make,), {"number": HiddenAttribute(make.number)}) if hides else make)()
    told(regions, function, lambda: setattr(function, "number", function.number + 4), hides=hides)
    # What a backward that failed had not come to yet, autograd holds until the next one.
    torch.ones(1, requires_grad=True).sum().backward()


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
        ours = gradients_of(regions, function, watch=watch, save="aten::tanh")
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


def test_what_is_read_or_saved_in_equal_parts_is_seen_whole(place: object) -> None:
    whole = torch.empty(4, 6, 10)

    def covers(*parts: Tensor) -> bool:
        return _covers({Spot(0, ViewRecipe.of(part)) for part in parts}, Spot(0, ViewRecipe.of(whole)))

    assert covers(whole) and covers(whole.transpose(0, 2)) and covers(whole[:, None].expand(4, 3, 6, 10))
    assert covers(whole.view(4, 60)) and covers(whole[0], whole[:, 3:], whole)
    for dim in range(3):
        assert covers(*whole.chunk(2, dim)) and covers(*(part.mT for part in whole.chunk(2, dim)))
        assert covers(*whole.unbind(dim)) and not covers(*whole.unbind(dim)[1:])
        assert not covers(whole.chunk(2, dim)[1])
    first, *_, last = whole.chunk(5, -1)
    assert not covers(whole[:2], whole[1:3]) and not covers(first, last)
    assert not covers(whole[:3], whole[3:]), "that they are all of it is true, and not seen"
    assert covers(whole[:, ::2], whole[:, 1::2]) and not covers(whole[:, ::2])


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
