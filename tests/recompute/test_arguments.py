"""Arguments of a checkpointed function: how they are put together again around other tensors."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from spillway.checkpointing.replayable import Arguments

Pair = namedtuple("Pair", ["first", "second"])
A, B, C = torch.ones(2), torch.zeros(2, 3), torch.full((), 2.0)


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
    taken = arguments.pop_tensors()
    assert len({id(each) for each in taken}) == len(taken)
    assert arguments.pop_tensors() == []
    others = [each + 1 for each in taken]
    assert same(arguments.put(others), (swapped(args), swapped(kwargs)))
