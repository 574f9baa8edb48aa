"""What changes between a later call and its backward: it is put back, told, or of no account."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from recompute.regions import (
    Changing,
    CountedBlock,
    HiddenAttribute,
    HiddenList,
    Regions,
    gradients_of,
    hides,
    leaf,
    one_place,
)
from spillway.errors import InplaceError, RecomputeError
from support import assert_identical

pytestmark = one_place

Options = dict[str, Any]
HOWS: dict[str, Options] = {
    "nothing": {},
    "products kept": {"save": "matmul"},
    "pointwise kept": {"save": "pointwise"},
    "norms offloaded": {"offload": ["inputs", "norm"]},
    "most offloaded": {"offload": ["inputs", "matmul", "norm", "pointwise", "random"]},
}
hows = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


def total(out: Any) -> Tensor:
    return out.sum() if isinstance(out, Tensor) else out[0].sum()  # type: ignore[no-any-return]


def changed(
    regions: Regions,
    function: Callable[..., Any],
    change: Callable[[], object],
    how: Options,
    *,
    may_differ: bool,
    calls: int = 3,
) -> bool:
    """Whether a change between forward and backward is told. Otherwise gradients must be those of the forward.

    Args:
        regions: the session.
        function: is called ``calls`` times before.
        change: is done before backward.
        how: what is preserved. All values are compared.
        may_differ: whether the change may be told.
        calls: how many.
    """
    how = {"session": regions.session, "verify": "always", **how}
    for seed in range(calls):
        with regions.offload():
            out = spillway.recompute(function, leaf(seed=seed) * 1, **how)
        total(out).backward()
    leaves = [leaf(), *(function.parameters() if isinstance(function, nn.Module) else ())]
    torch.manual_seed(0)
    with regions.offload():
        out = spillway.recompute(function, leaves[0] * 1, **how)
    torch.manual_seed(0)
    expected = torch.autograd.grad(total(function(leaves[0] * 1)), leaves)
    change()
    try:
        found = torch.autograd.grad(total(out), leaves)
    except (RecomputeError, InplaceError):
        assert may_differ
        is_told = True
    else:
        assert_identical(list(found), list(expected))
        is_told = False
    del out
    # What a backward that failed had not come to yet, autograd holds until the next one; and the error has its frames.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    regions.assert_nothing_left()
    return is_told


class Hiding(Changing):
    """The same, where Spillway does not see it."""

    scale, eps = HiddenAttribute(1.0), HiddenAttribute(1e-5)
    kind = HiddenAttribute(0)


def scaled(block: Changing) -> None:
    block.scale = 1.0 + 2**-7


def another_eps(block: Changing) -> None:
    block.eps = 2e-5


def written(block: Changing) -> None:
    block.table[3] += 0.01


def replaced(block: Changing) -> None:
    block.table = torch.full((16,), 1e-3)


def another_way(block: Changing) -> None:
    block.kind = 1


@hides
@hows
@pytest.mark.parametrize("calls", [0, 1, 2, 5])
@pytest.mark.parametrize("change", [scaled, another_eps, written, replaced, another_way])
def test_what_a_module_reads_is_put_back_or_its_change_is_told(
    regions: Regions, change: Callable[[Changing], None], how: Options, hides: bool, calls: int
) -> None:
    block = Hiding() if hides else Changing()
    # Attributes are put back for the replay, and what was written is not.
    may_differ = change is written or (hides and change is not replaced)
    is_told = changed(regions, block, lambda: change(block), how, may_differ=may_differ, calls=calls)
    # Where something is preserved, it may be of no account.
    assert is_told == may_differ or how


@hides
@hows
def test_masks_are_compared(regions: Regions, how: Options, hides: bool) -> None:
    least = HiddenList([0.5]) if hides else [0.5]

    def function(x: Tensor) -> Tensor:
        return x.masked_fill(x.detach() > least[0], 0).sum()

    # Comparisons are no families of their own, but pointwise operators.
    is_told = changed(regions, function, lambda: least.append(least.pop() / 4), how, may_differ=hides)
    assert is_told == hides or how


@hides
@hows
@pytest.mark.parametrize(
    "function",
    [
        lambda x, scale: torch.linalg.qr(x[0] * scale)[0].sin(),
        lambda x, scale: (x + 1) * torch.ones_like((x * scale).exp()).cos() + (x * scale).exp().detach().round(),
    ],
    ids=["what is given besides", "round"],
)
def test_what_shows_in_nothing_else_is_compared(
    regions: Regions, function: Callable[[Tensor, float], Tensor], how: Options, hides: bool
) -> None:
    scale = HiddenList([1.0]) if hides else [1.0]
    is_told = changed(regions, lambda x: function(x, scale[0]), lambda: scale.insert(0, 2.0), how, may_differ=hides)
    assert is_told == hides or how


@hides
@hows
def test_a_replay_that_saves_less_is_told(regions: Regions, how: Options, hides: bool) -> None:
    ends = HiddenList([False]) if hides else [False]

    def function(x: Tensor) -> Any:
        y = x.sin()
        # Nobody goes through the second.
        return (y.exp(), y) if ends[0] else (y.exp(), y.exp().tanh().exp())

    assert changed(regions, function, lambda: ends.insert(0, True), how, may_differ=hides) == hides or how


@hides
@hows
def test_parameters_in_another_order_are_told(regions: Regions, how: Options, hides: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            experts = [nn.Linear(16, 16, bias=False) for _ in range(2)]
            self.experts = HiddenList(experts) if hides else experts
            self.inner = nn.ModuleList(self.experts)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (expert(x.sin()).tanh() for expert in self.experts)
            return (first + second).exp()

    model = Experts()
    assert changed(regions, model, model.experts.reverse, how, may_differ=hides) == hides or how


@hides
@hows
def test_a_difference_in_a_call_that_does_more_than_earlier_ones_is_told(
    regions: Regions, how: Options, hides: bool
) -> None:
    more = HiddenList()
    scale = HiddenList([1.0]) if hides else [1.0]

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        return (y * scale[0]).tanh().sigmoid() if more else y

    for seed in range(3):
        gradients_of(regions, function, seed=seed, **how)
    more.append(1)
    is_told = changed(regions, function, lambda: scale.insert(0, 1.5), how, may_differ=hides, calls=0)
    assert is_told == hides


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
    """Makes bytes. Of such a type are states of kernels, too, which are not compared."""

    number = 1

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.full((2, 5, 16), self.number, dtype=torch.int8)


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
@hows
@pytest.mark.parametrize("make", [Before, Numbers, Bytes, Half, Other, Thirds])
def test_a_number_that_goes_into_parts_of_what_is_saved(
    regions: Regions, make: type[Before | Numbers | Bytes | Half | Other | Thirds], how: Options, hides: bool
) -> None:
    function = (type("Hiding", (make,), {"number": HiddenAttribute(make.number)}) if hides else make)()
    is_told = changed(
        regions, function, lambda: setattr(function, "number", function.number + 4), how, may_differ=hides
    )
    assert is_told == hides or how


# What is written in place.


@hows
def test_a_weight_that_is_written_is_refused(regions: Regions, how: Options) -> None:
    block = CountedBlock()
    regions.compare_often(block, **how)
    with regions.offload():
        loss = spillway.recompute(block, leaf() * 1, session=regions.session, **how).sum()
    with torch.no_grad():
        block.qkv.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"written in place|modified by an inplace operation"):
        loss.backward()


@hows
@pytest.mark.parametrize("write", [lambda x: x.detach().mul_(2), lambda x: x.detach().zero_()], ids=["mul", "zero"])
def test_an_input_that_is_written_is_refused(regions: Regions, write: Callable[[Tensor], object], how: Options) -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() @ x.mT).cos().exp()

    regions.compare_often(function, **how)
    x = leaf() * 1
    with regions.offload():
        loss = spillway.recompute(function, x, session=regions.session, **how).sum()
    write(x)
    with pytest.raises(InplaceError):
        loss.backward()


@hows
def test_what_is_saved_and_escapes_is_refused_when_it_was_written(regions: Regions, how: Options) -> None:
    kept = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        kept[:] = [y]
        return y.cos().exp()

    regions.compare_often(function, **how)
    expected = torch.autograd.grad(function(x := leaf()).sum(), x)
    x = leaf()
    with regions.offload():
        loss = spillway.recompute(function, x * 1, session=regions.session, **how).sum()
    with torch.no_grad():
        kept[0].mul_(2)
    try:
        found = torch.autograd.grad(loss, x)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        # It is computed again, or was offloaded before it was written.
        assert_identical(list(found), list(expected))
    kept.clear()
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


@pytest.mark.parametrize(
    "how", [{"save": "aten::exp"}, {"save": "pointwise"}, {"save": ["aten::exp", "matmul"]}], ids=str
)
@pytest.mark.parametrize(
    "write", [lambda y: y.zero_(), lambda y: y.detach().mul_(2), lambda y: y[0].add_(1)], ids=["zero", "alias", "part"]
)
def test_a_kept_output_that_is_written_is_refused_as_plain(
    regions: Regions, write: Callable[[Tensor], object], how: Options
) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().exp()
        return (y @ y.mT).cos(), y

    def loss(regions: Regions | None) -> tuple[Tensor, Tensor]:
        x = leaf()
        if regions is None:
            return function(x * 1)
        with regions.offload():
            first, second = spillway.recompute(function, x * 1, session=regions.session, **how)
        return first, second

    for number in range(5):
        z, y = loss(regions)
        if number < 3:
            (z.sum() + y.sum()).backward()
            continue
        for out, given in ((z, y), loss(None)):
            with torch.no_grad():
                write(given)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        del z, y, out, given
        torch.ones(1, requires_grad=True).sum().backward()


@pytest.mark.parametrize("products", [1, 2])
@pytest.mark.parametrize("option", ["save", "offload"])
def test_what_is_chosen_and_not_saved_by_autograd_may_be_written(regions: Regions, products: int, option: str) -> None:
    """So writing it is nobody's mistake."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        for _ in range(products):
            y = y @ weight
        return (y + 1).sin().cos(), y

    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(3))

    def step(regions: Regions | None, writes: bool) -> list[Tensor]:
        x = leaf()
        if regions is None:
            z, y = function(x * 1, weight)
        else:
            with regions.offload():
                z, y = spillway.recompute(function, x * 1, weight, session=regions.session, **{option: "matmul"})
        loss = z.sum()
        if writes:
            with torch.no_grad():
                y.zero_()
        return [z.detach(), *torch.autograd.grad(loss, x)]

    for number in range(5):
        assert_identical(step(regions, writes=number > 2), step(None, writes=number > 2))


@pytest.mark.parametrize("how", [{"save": ["aten::sin", "inputs"]}, {"offload": "aten::sin"}, {}], ids=str)
def test_what_is_chosen_is_written_between_two_backwards(regions: Regions, how: Options) -> None:
    shown = HiddenList()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        shown[:] = [y.detach()]
        return (y + 1).exp().tanh(), (y + 2).cos().sigmoid()

    def run(regions: Regions | None, write: bool) -> list[Tensor]:
        x = leaf()
        if regions is None:
            first, second = function(x * 1)
        else:
            with regions.offload():
                first, second = spillway.recompute(function, x * 1, session=regions.session, **how)
        (before,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        if write:
            shown[0].zero_()
        return [before, *torch.autograd.grad(second.sum(), x)]

    for number in range(6):
        assert_identical(run(regions, number > 2), run(None, False))


# What the replay alone does.


OnlyAgain = Callable[[list[Tensor], Tensor], Tensor]


class Again(nn.Module):
    """Has something handed in, and may do something in its second run alone: while it holds that, or later."""

    runs = HiddenAttribute(0)

    def __init__(self, early: OnlyAgain | None, late: OnlyAgain | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(256.0).reshape(16, 16) / 256)
        self.early, self.late = early, late
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        is_other = self.is_other and self.runs > 1
        held = [(x.detach().sum().sin() + self.scale).tanh()]
        z = (held[0] * 1).cos().exp()
        if is_other and self.early is not None:
            z = self.early(held, z)
        held.clear()
        z = z.cos().exp() * 2
        if is_other and self.late is not None:
            z = self.late(held, z)
        return z.sigmoid()


def writes(held: list[Tensor], z: Tensor) -> Tensor:
    held[0].detach().zero_()
    return z


def transposes(held: list[Tensor], z: Tensor) -> Tensor:
    # What lies in memory is the same.
    return z.t()


WEIGHT = torch.ones(3, requires_grad=True)
SINE = WEIGHT.sin()


def goes_back(held: list[Tensor], z: Tensor) -> Tensor:
    torch.autograd.grad(SINE, WEIGHT, torch.ones(3), create_graph=True, retain_graph=True)
    return z


@pytest.mark.parametrize("how", [{"save": "aten::tanh"}, {"offload": "aten::tanh"}, {"save": "pointwise"}, {}], ids=str)
@pytest.mark.parametrize(
    ("early", "late"),
    [(writes, None), (transposes, None), (None, transposes), (goes_back, None), (None, goes_back)],
    ids=["writes", "transposes", "transposes late", "goes back", "goes back late"],
)
def test_what_only_the_replay_does_is_told_or_of_no_account(
    regions: Regions, early: OnlyAgain | None, late: OnlyAgain | None, how: Options
) -> None:
    def gradients(regions: Regions | None) -> list[Tensor]:
        x = leaf()
        block.runs = 0
        if regions is None:
            y = block(x * 1)
        else:
            with regions.offload():
                y = spillway.recompute(block, x * 1, session=regions.session, verify="always", **how)
        return [*torch.autograd.grad(y.square().sum(), list(block.parameters()))]

    block = Again(early, late)
    for _ in range(4):
        assert_identical(gradients(regions), gradients(None))
    expected = gradients(None)
    block.is_other = True
    for _ in range(3):
        try:
            found = gradients(regions)
        except (RecomputeError, InplaceError):
            torch.ones(1, requires_grad=True).sum().backward()
        else:
            assert_identical(found, expected)
        gc.collect()
        regions.assert_nothing_left()


class Holds(nn.Module):
    """Holds what a replay leaves out, and may read it there in the end."""

    runs = HiddenAttribute(0)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        held = x.detach().sin()
        z = (held + self.weight + x * 0).tanh().cos().exp()
        return (z * (held if self.runs > 1 and self.reads else 1)).sigmoid()


@pytest.mark.parametrize("verify", ["sampled", "always"])
def test_what_was_left_out_is_not_read(regions: Regions, verify: str) -> None:
    block = Holds()
    how: Options = {"save": "aten::tanh", "verify": verify}
    for seed in range(4):
        block.runs = 0
        regions.compare(block, seed=seed, **how)
    assert not regions.was_whole()
    block.reads = True
    block.runs = 0
    if verify == "always":
        with pytest.raises(RecomputeError):
            gradients_of(regions, block, **how)
    else:
        # It is replayed whole, and not compared: but nobody has read what has no content.
        assert all(each.isfinite().all() for each in gradients_of(regions, block, **how))
        assert regions.was_whole()


@hides
@pytest.mark.parametrize("how", [*HOWS.values(), {"save": "aten::exp"}], ids=str)
def test_a_sampled_call_is_compared(
    regions: Regions, monkeypatch: pytest.MonkeyPatch, how: Options, hides: bool
) -> None:
    monkeypatch.setattr("spillway.checkpointing.learned._EVERY", 4)
    runs = HiddenList([0]) if hides else [0]
    gate = torch.zeros(16, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        runs[0] += 1
        # Nothing of it shows in what is computed, behind the gate.
        return (x + gate * (x * max(runs[0], 0)).log1p().asinh()).exp()

    # What is recorded, and what is compared in full, does not differ.
    runs[0] = -8

    def calls(count: int) -> None:
        for _ in range(count):
            with regions.offload():
                y = spillway.recompute(function, leaf().abs() * 1, session=regions.session, **how)
            y.sum().backward()

    calls(3)
    if hides and how not in (HOWS["pointwise kept"], HOWS["most offloaded"]):
        with pytest.raises(RecomputeError):
            calls(8)
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
    else:
        # Nothing that differs is computed again.
        calls(8)
