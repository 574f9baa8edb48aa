"""What traces of regions have in common: an operator that did the same in two of them is said once, and no more."""

from __future__ import annotations

import gc
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


def test_one_call_is_there_for_many_regions(session: spillway.Session) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(each, calls.Call) for each in gc.get_objects())

    start, before = x(), alive()
    outputs = [spillway.recompute(lambda x: x.exp().sin(), start, session=session) for _ in range(5)]
    assert alive() - before == len(calls._shared) == 2
    torch.stack(outputs).sum().backward()


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
