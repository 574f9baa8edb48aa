"""Arguments of a region's call: what they are put together to again, and what tells calls apart."""

from __future__ import annotations

import threading
from collections import namedtuple
from typing import Any

import pytest
import torch

from spillway.checkpointing import function as own
from spillway.checkpointing.function import Arguments, Kind

Pair = namedtuple("Pair", ["first", "second"])
A, B, C = torch.ones(2), torch.zeros(2, 3), torch.full((), 2.0)


def kind_of(*args: Any, **kwargs: Any) -> Kind | None:
    arguments = Arguments(args, kwargs)
    return arguments.kind(arguments.take())


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((A, 1, None), {"x": B}),
        ((), {}),
        (((A, B), [C, A], 2.5), {"x": (1, "two", None), "y": ()}),
        ((Pair(A, [B, (C, None)]),), {"z": {"a": A, "b": Pair(1, B)}}),
        (([A, [B, A]],), {"x": torch.float32}),
    ],
)
def test_they_are_what_they_were_with_other_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def swapped(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(new for old, new in zip(taken, others, strict=True) if old is value)
        if isinstance(value, Pair):
            return Pair(*map(swapped, value))
        if isinstance(value, (tuple, list)):
            return type(value)(map(swapped, value))
        return {key: swapped(each) for key, each in value.items()} if isinstance(value, dict) else value

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, (tuple, list)):
            return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return a is b if isinstance(a, torch.Tensor) else a == b

    arguments = Arguments(args, kwargs)
    taken = arguments.take()
    assert len({id(each) for each in taken}) == len(taken)
    assert arguments.take() == []
    others = [each + 1 for each in taken]
    assert same(arguments.put(others), (swapped(args), swapped(kwargs)))


def test_calls_of_one_kind_have_one_object_and_others_another() -> None:
    one = kind_of(A, 1, x=(B, None))
    assert one is not None
    assert kind_of(A + 1, 1, x=(B + 1, None)) is one
    others = [
        kind_of(A, True, x=(B, None)),
        kind_of(A, 1.0, x=(B, None)),
        kind_of(A, 2, x=(B, None)),
        kind_of(B, 1, x=(A, None)),
        kind_of(A.double(), 1, x=(B, None)),
        kind_of(A, 1, x=(B.t().contiguous().t(), None)),
        kind_of(A.clone().requires_grad_(), 1, x=(B, None)),
        kind_of(B, 1, x=(B, None)),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        others.append(kind_of(A, 1, x=(B, None)))
    assert len({id(each) for each in (one, *others)}) == len(others) + 1
    assert kind_of(torch.eye(2).to_sparse()) is None


def test_threads_that_meet_a_kind_at_once_have_the_same_one() -> None:
    for number in range(200):
        found: list[Kind] = []
        start = threading.Barrier(4)

        def meet(number: int = number, found: list[Kind] = found, start: threading.Barrier = start) -> None:
            start.wait(60)
            found.append(own._kinds.of(("threads", number)))

        threads = [threading.Thread(target=meet) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(each) for each in found}) == 1


def test_kinds_that_nobody_has_are_forgotten_and_the_others_stay_the_same() -> None:
    kinds = own._Kinds()
    kept = [kinds.of(("kept", number)) for number in range(10)]
    for number in range(5000):
        kinds.of(("gone", number))
    assert len(kinds._known) <= own._FIRST_SWEEP + 10
    assert [kinds.of(("kept", number)) for number in range(10)] == kept
