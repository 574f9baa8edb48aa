"""The search for a module's Python state is repeated from memory only if it would find the same again.

See NOTE [ Remembered walks ] in ``checkpointing/python_walk.py``.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.python_walk import WalkMemory


class Configuration:
    def __init__(self) -> None:
        self.scale, self.names = 2.0, ["a"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.shape = nn.Linear(8, 8), nn.BatchNorm1d(8), [1, 2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = Inner(), nn.Dropout(0.5)
        self.pruned, self.size, self.table = set[int](), (8, 8), {"a": 1}
        self.configuration = Configuration()
        self.extra: Any = None


class Other(Inner):
    shared = torch.zeros(3)


def names_of(state: PythonState) -> list[tuple[str, int]]:
    return [(name, id(tensor)) for name, tensor in state.reachable()]


def remembers(memory: WalkMemory, block: nn.Module) -> bool:
    return memory.find([block]) is not None


CHANGES: dict[str, Callable[[Block], object]] = {
    "a buffer": lambda block: block.inner.register_buffer("more", torch.zeros(2)),
    "a first buffer": lambda block: block.drop.register_buffer("more", torch.zeros(2)),
    "a parameter": lambda block: block.inner.register_parameter("more", nn.Parameter(torch.zeros(2))),
    "another parameter": lambda block: setattr(block.inner.up, "weight", nn.Parameter(torch.zeros(8, 8))),
    "a module": lambda block: setattr(block, "more", nn.Linear(2, 2)),
    "another module": lambda block: setattr(block, "inner", Inner()),
    "another class": lambda block: setattr(block.inner, "__class__", Other),
    "a tensor": lambda block: setattr(block, "extra", torch.zeros(2)),
    "a list of tensors": lambda block: setattr(block, "extra", [torch.zeros(2)]),
    "a list that grows": lambda block: block.inner.shape.append(torch.zeros(2)),  # type: ignore[arg-type]
    "a set": lambda block: block.pruned.add(3),
    "a dictionary": lambda block: block.table.update(b=torch.zeros(2)),  # type: ignore[call-overload]
    "no dictionary": lambda block: delattr(block, "table"),
    "another tuple": lambda block: setattr(block, "size", (torch.zeros(2), 8)),
    "a configuration": lambda block: setattr(block.configuration, "extra", torch.zeros(2)),
    "another configuration": lambda block: setattr(block, "configuration", Configuration()),
    "a frozen parameter": lambda block: block.inner.up.weight.requires_grad_(False),
    "other memory": lambda block: setattr(block.inner.up.weight, "data", torch.zeros(8, 8)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_searched_again(change: str) -> None:
    block, memory = Block(), WalkMemory()
    before = PythonState(block, (), memory)
    assert remembers(memory, block)
    assert names_of(PythonState(block, (), memory)) == names_of(PythonState(block))
    CHANGES[change](block)
    found, fresh = PythonState(block, (), memory), PythonState(block)
    assert names_of(found) == names_of(fresh)
    assert not found.changes
    if change == "another class":
        return
    assert before.changes
    with before.in_force():
        assert not before.changes
        assert found.changes
    assert not found.changes
    assert before.changes


@pytest.mark.parametrize("change", CHANGES)
def test_what_nothing_else_holds_may_die_between_calls(change: str) -> None:
    block, memory = Block(), WalkMemory()
    PythonState(block, (), memory)
    assert remembers(memory, block)
    CHANGES[change](block)
    gc.collect()
    assert names_of(PythonState(block, (), memory)) == names_of(PythonState(block))


def test_a_walk_is_remembered_for_its_own_module_alone() -> None:
    block, other, memory = Block(), Block(), WalkMemory()
    PythonState(block, (), memory)
    assert not remembers(memory, other)
    assert names_of(PythonState(other, (), memory)) == names_of(PythonState(other))


def test_a_value_at_the_address_of_another_one_is_seen() -> None:
    block, memory = Block(), WalkMemory()
    for step in range(40):
        # The address of the freed object is mostly used again.
        block.extra = None
        block.extra = [torch.zeros(2)] if step % 2 else [step]
        assert names_of(PythonState(block, (), memory)) == names_of(PythonState(block))


@pytest.mark.parametrize(
    "extra",
    [
        torch.zeros(2),
        [torch.zeros(2)],
        [nn.Linear(2, 2)],
        deque([nn.Linear(2, 2)]),
        (nn.Linear(2, 2),),
        functools.partial(torch.add, alpha=2),
        lambda x: x,
        {1: 2},
    ],
    ids=["tensor", "tensors", "modules", "deque", "tuple", "partial", "function", "numbered"],
)
def test_what_cannot_be_compared_safely_is_not_remembered(extra: Any) -> None:
    block, memory = Block(), WalkMemory()
    block.extra = extra
    PythonState(block, (), memory)
    assert not remembers(memory, block)


def test_the_memory_holds_no_module_and_no_tensor() -> None:
    block, memory = Block(), WalkMemory()
    PythonState(block, (), memory)
    assert remembers(memory, block)
    gone: list[weakref.ref[object]] = [weakref.ref(block), weakref.ref(block.inner.up.weight)]
    gc.disable()
    try:
        del block
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_state_that_each_call_changes_is_remembered_a_few_times_only() -> None:
    block, memory = Block(), WalkMemory()
    for step in range(9):
        block.extra = float(step)
        PythonState(block, (), memory)
    assert not remembers(memory, block)


def test_the_replay_of_a_remembered_walk_starts_from_the_state_of_forward() -> None:
    import spillway

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.inner.up(x)) * self.configuration.scale

    block, plain = Scaled(), Scaled()
    plain.load_state_dict(block.state_dict())
    for scale in (2.0, 2.0, 3.0, 5.0):
        x = torch.randn(4, 8)
        grads = []
        for model, call in ((plain, lambda *a: a[0](*a[1:])), (block, spillway.recompute)):
            model.zero_grad()
            model.configuration.scale = scale
            loss = call(model, x).sum()
            model.configuration.scale = -1.0
            loss.backward()
            grads.append(model.inner.up.weight.grad)
        assert torch.equal(*grads)
