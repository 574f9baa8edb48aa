"""What traces of regions have in common: an operator that did the same in two of them is said once, and no more."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

import spillway
from spillway.regions import calls

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
    start = x()
    before = len(calls._shared)
    outputs = [spillway.recompute(lambda x: x.exp().sin(), start, session=session) for _ in range(5)]
    assert len(calls._shared) - before == 2
    torch.stack(outputs).sum().backward()


def test_a_table_that_is_full_begins_anew(session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_SHARED", 7)

    def times(number: float) -> Region:
        return lambda x: (x * number).exp().sin()

    assert check(session, [times(number) for number in range(20)]) == ()
    assert len(calls._shared) <= 7
