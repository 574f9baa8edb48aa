"""What traces of regions have in common: an operator that did the same in two of them is said once, and no more."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import spillway
from spillway.regions import calls
from spillway.regions.schema import facts_of
from spillway.regions.tensors import are_same

Region = Callable[[Tensor], Tensor]


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    calls._shared.clear()
    with spillway.Session() as session:
        yield session


def x() -> Tensor:
    return torch.linspace(-1, 1, 64).requires_grad_()


def check(session: spillway.Session, functions: Sequence[Region]) -> tuple[str, ...]:
    """All of them alive at once, against plain PyTorch, in any order; what was noted."""
    for _ in range(2):
        start = x()
        outputs = [spillway.recompute(function, start, session=session) for function in functions]
        order = list(range(len(functions)))
        random.Random(0).shuffle(order)
        for place in order:
            mine = torch.autograd.grad(outputs[place].sum(), start)[0]
            plain = torch.autograd.grad(functions[place](start).sum(), start)[0]
            assert torch.equal(mine.view(torch.int32), plain.view(torch.int32)), place
    return session.stats().notes


def test_constants_that_compare_equal_are_not_the_same(session: spillway.Session) -> None:
    def times(number: float) -> Region:
        return lambda x: (x * number).copysign(number).exp().sin()

    assert check(session, [times(number) for number in (0.0, -0.0, 1, True, 1.0, math.nan, 0, False)]) == ()


def test_numbers_that_compare_equal_are_not_the_same_output(session: spillway.Session) -> None:
    @torch.library.custom_op("spillway_tests::sine_and_first", mutates_args=())
    def sine_and_first(x: Tensor, of: Tensor) -> tuple[Tensor, float]:
        return x.sin(), float(of[0])

    def signed(of: Tensor) -> Region:
        return lambda x: (x.exp().sin() * math.copysign(1, sine_and_first(x.detach() * 1, of)[1])).sin()

    assert check(session, [signed(torch.tensor([number])) for number in (0.0, -0.0)]) == ()


def test_functions_that_differ_in_one_thing_alone_are_told_apart(session: spillway.Session) -> None:
    table = torch.arange(64.0)
    functions: list[Region] = [
        lambda x: (x.exp() * x.sin()).cos(),
        lambda x: (x.sin() * x.exp()).cos(),
        lambda x: (x.exp() * x.exp()).cos(),
        lambda x: (x.exp() * table.sin()).cos(),
        lambda x: (x.exp() * x.double().sin().float()).cos(),
        lambda x: (x.cos() * 1).mul_(2).sin().cos(),
        lambda x: (x.cos() * 1).mul_(3).sin().cos(),
        lambda x: x.exp().view(8, 8).sin().sum(0).cos(),
        lambda x: x.exp().view(8, 8).sin().sum(1).cos(),
    ]
    assert check(session, functions) == ()


def test_a_table_that_is_full_begins_anew(session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_SHARED", 7)

    def times(number: float) -> Region:
        return lambda x: (x * number).exp().sin()

    assert check(session, [times(number) for number in range(20)]) == ()
    assert len(calls._shared) <= 7


@pytest.mark.parametrize(
    "other",
    [
        {"func": torch.ops.aten.cos.default},
        {"constants": (-0.0,)},
        {"constants": (0,)},
        {"constants": (False,)},
        {"reads": (1,)},
        {"writes": (0,)},
        {"makes": (3,)},
        {"forms": (calls.Form(torch.Size([2]), (1,), torch.float64, torch.device("cpu")),)},
        {"depends": True},
        {"plain": True},
        {"aliases": True},
        {"single": False},
    ],
    ids=str,
)
def test_what_differs_in_anything_is_not_shared(session: spillway.Session, other: dict[str, Any]) -> None:
    def call(**differs: Any) -> calls.Call:
        call = calls.Call(torch.ops.aten.sin.default, facts_of(torch.ops.aten.sin.default), (0,), (0.0,))
        call.makes = (2,)
        call.forms = (calls.Form(torch.Size([2]), (1,), torch.float32, torch.device("cpu")),)
        for name, value in differs.items():
            setattr(call, name, value)
        return call

    assert call().shared() is call().shared()
    assert call(**other).shared() is not call().shared()
    for own in ({"decision": spillway.Decision.KEEP}, {"given": []}, {"before": 0}, {"constants": ([],)}):
        assert call(**own).shared() is not call(**own).shared()


# What the last region of a function did is looked at first. See NOTE [ What is remembered ].


def rounds(session: spillway.Session, region: Region, starts: Sequence[Tensor], **how: Any) -> None:
    """One function again and again, all its regions alive at once, against plain PyTorch bit for bit."""
    starts = [start.detach().requires_grad_() for start in starts]
    mine = [spillway.recompute(region, start, session=session, **how) for start in starts]
    for start, output in zip(starts, mine, strict=True):
        plain = region(start)
        assert torch.equal(output.view(torch.int32), plain.view(torch.int32))
        expected = torch.autograd.grad(plain.sum(), start)[0]
        got = torch.autograd.grad(output.sum(), start)[0]
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


SAVES: list[dict[str, Any]] = [{}, {"save": "aten::exp"}, {"offload": "aten::exp"}, {"save": lambda call: True}]


@pytest.mark.parametrize("how", SAVES, ids=["again", "kept", "sent", "asked"])
def test_regions_of_one_function_take_turns_at_two_branches(session: spillway.Session, how: dict[str, Any]) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        return (y.sin() * y).cos() if x.detach()[0] > 0 else (y.cos() * x).sin().sin()

    rounds(session, region, [x(), -x(), x(), -x(), x(), x()], **how)
    assert session.stats().notes == ()


@pytest.mark.parametrize("how", SAVES, ids=["again", "kept", "sent", "asked"])
def test_regions_of_one_function_have_other_shapes_and_strides(session: spillway.Session, how: dict[str, Any]) -> None:
    def region(x: Tensor) -> Tensor:
        return (x.exp().sin() * x).cos()

    square = torch.linspace(-1, 1, 64).view(8, 8)
    rounds(session, region, [x(), x()[:7], square, square.t(), square[:, :4], x(), square.double().float()], **how)
    assert session.stats().notes == ()


@pytest.mark.parametrize("how", SAVES, ids=["again", "kept", "sent", "asked"])
def test_a_constant_changes_from_region_to_region(session: spillway.Session, how: dict[str, Any]) -> None:
    numbers = (0.0, -0.0, 0, False, 1, True, 1.0, -0.0, 0.0, math.nan, math.nan)
    for number in numbers:

        def region(x: Tensor, number: float = number) -> Tensor:
            return (x.exp() * number).copysign(number).exp().sin()

        start = x()
        mine = spillway.recompute(region, start, session=session, **how)
        assert torch.equal(
            torch.autograd.grad(mine.sum(), start)[0].nan_to_num(7).view(torch.int32),
            torch.autograd.grad(region(start).sum(), start)[0].nan_to_num(7).view(torch.int32),
        )


def test_what_is_written_in_one_region_alone(session: spillway.Session) -> None:
    def region(x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        if x.detach()[0] > 0:
            z.mul_(3)
        return (z.sin() * x).cos()

    for how in ({}, {"save": "aten::mul.Tensor"}, {"offload": "aten::mul.Tensor"}):
        rounds(session, region, [x(), -x(), x(), x(), -x(), -x()], **how)


def test_a_choice_changes_from_region_to_region(session: spillway.Session) -> None:
    def region(x: Tensor) -> Tensor:
        return (x.exp().sin() * x).cos()

    start = x()
    outputs = [spillway.recompute(region, start, session=session, **how) for how in (*SAVES, *reversed(SAVES))]
    expected = torch.autograd.grad(region(start).sum(), start)[0]
    for output in outputs:
        assert torch.equal(torch.autograd.grad(output.sum(), start)[0], expected)


def test_what_depends_on_an_input_in_one_region_alone(session: spillway.Session) -> None:
    fixed = torch.linspace(0, 1, 64)

    def region(x: Tensor) -> Tensor:
        # The same operators in the same order, on an input or on a constant.
        source = x if x.detach()[0] > 0 else fixed
        return source.exp().sin() * x.cos()

    rounds(session, region, [x(), -x(), x(), -x()])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0.0,), (-0.0,)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((0,), (False,)),
        (((1, 0.0),), ((1, -0.0),)),
        (((1, 2),), ((1, True),)),
        ((complex(0.0, 1),), (complex(-0.0, 1),)),
        ((1, 2), (1,)),
        (("a",), ("b",)),
        ((torch.float32,), (torch.float64,)),
        ((torch.device("cpu"),), (torch.device("meta"),)),
        ((None,), (0,)),
    ],
    ids=repr,
)
def test_words_are_compared_to_the_letter(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert not are_same(a, b)
    assert not are_same(b, a)
    assert are_same(a, (*a,))
    assert are_same(b, (*b,))


def test_a_shared_call_never_changes(session: spillway.Session) -> None:
    def region(x: Tensor) -> Tensor:
        return (x.exp().sin() * x).cos()

    for how in (*SAVES, {"offload": [spillway.saved_by("aten::sin")]}, *SAVES):
        start = x()
        spillway.recompute(region, start, session=session, **how).sum().backward()
    assert calls._shared
    for call in calls._shared.values():
        assert call.is_shared
        assert not call.is_own
        assert (call.held, call.given, call.like, call.must) == (None, None, None, False)
