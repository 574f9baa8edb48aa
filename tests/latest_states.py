"""Compares each state that is used again with what a walk finds then: see NOTE [ States that stay the same ]."""

from __future__ import annotations

import types
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from torch.nn import Module

from spillway._torch import disable_function
from spillway.checkpointing.python_state import LatestState
from spillway.checkpointing.python_walk import Walk
from spillway.checkpointing.replayable import ReplayedFunction, module_of

_IGNORED = {"roots", "is_repeatable", "found_classes", "found_objects", "why_kept", "generators", "_seen", "root"}


def compare_with_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on in this test."""
    of_now = LatestState.of_now

    def compared(self: LatestState, module: Module | None) -> Any:
        found = of_now(self, module)
        if found is not None:
            assert module is not None
            found_else = differences(found.walk, walked(module))
            assert not found_else, found_else
        return found

    monkeypatch.setattr(LatestState, "of_now", compared)


def walked(module: Module) -> Walk:
    with disable_function():
        own = Walk((module,))
        shared = [*own.found_classes], *([each] for each in own.found_objects)
        assert own.is_repeatable and own.why_kept is None
        return Walk.joined([own, *(Walk(each, opens=True) for each in shared if each)])


def differences(a: Walk, b: Walk) -> list[str]:
    """Names of what differs. Objects are the same only if they are identical."""
    return [name for name in vars(b) if name not in _IGNORED and not same(vars(a)[name], vars(b)[name])]


def same(a: Any, b: Any) -> bool:
    if type(a) in (list, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, types.MappingProxyType):
        # A class gives another one each time.
        return isinstance(b, types.MappingProxyType) and a == b
    return a is b or (isinstance(a, str) and a == b)


def keep_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that are no attached blocks have a latest state, too."""
    begin, states = ReplayedFunction.__init__, WeakKeyDictionary[Module, LatestState]()

    def begun(
        self: ReplayedFunction, function: Any, arguments: Any, around: Any = None, latest: LatestState | None = None
    ) -> None:
        module = module_of(function)
        if latest is None and module is not None:
            latest = states.setdefault(module, LatestState())
        begin(self, function, arguments, around, latest)

    monkeypatch.setattr(ReplayedFunction, "__init__", begun)
