"""A checkpointed function with its arguments, and how it is called again in a replay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.tensors import PLAIN

_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_LEAVES = PLAIN | _NUMBERS
_SEQUENCES = (tuple, list)


class Arguments:
    """The arguments of a call, which can be put together again with other tensors in them.

    Args:
        args: by place.
        kwargs: by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any] = []
        self._count = len(args)
        self._names = tuple(kwargs)
        self._makers: list[tuple[int, Callable[[list[Any]], Any]] | None] = []
        """Of each argument that is no leaf itself, how many it has, and what makes it of them."""
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind in _LEAVES:
                leaves.append(value)
                self._makers.append(None)
            elif kind in _SEQUENCES and _LEAVES.issuperset(map(type, value)):
                leaves += value
                self._makers.append((len(value), kind))
            else:
                flat, spec = tree_flatten(value)
                leaves += flat
                self._makers.append((len(flat), partial(tree_unflatten, treespec=spec)))
        self._taken: dict[int, torch.Tensor] = {}
        self._places: list[int] = []
        self._numbers: list[int] = []
        """Of each tensor, which of those that are taken it is: one may be given several times."""
        numbers: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            kind = type(leaf)
            # To ask whether something is a tensor is to ask a metaclass, in Python.
            if kind not in _NUMBERS and (kind in PLAIN or isinstance(leaf, torch.Tensor)):
                leaves[place] = None
                self._places.append(place)
                self._taken[id(leaf)] = leaf
                self._numbers.append(numbers.setdefault(id(leaf), len(numbers)))
        self._leaves = leaves

    def take(self) -> list[torch.Tensor]:
        """The tensors, each once, which are not held here any more."""
        taken, self._taken = self._taken, {}
        return list(taken.values())

    def callables(self) -> list[Any]:
        """The functions and modules among them."""
        return [leaf for leaf in self._leaves if callable(leaf)]

    def objects(self) -> list[Any]:
        """What is no tensor, number or word."""
        return [leaf for leaf in self._leaves if type(leaf) not in _NUMBERS]

    def numbers(self) -> tuple[Any, ...]:
        """The numbers, words and flags among them."""
        return tuple([(type(leaf), leaf) for leaf in self._leaves if leaf is not None and type(leaf) in _NUMBERS])

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in them."""
        leaves = list(self._leaves)
        for place, number in zip(self._places, self._numbers, strict=True):
            leaves[place] = tensors[number]
        left = iter(leaves)
        values = [next(left) if each is None else each[1](list(islice(left, each[0]))) for each in self._makers]
        return tuple(values[: self._count]), dict(zip(self._names, values[self._count :], strict=True))


_NOTHING = nullcontext()


class ReplayedFunction:
    """Runs a function again, with the Python state of its first run.

    Args:
        function: the function.
        arguments: its arguments.
        state: the Python state before the first run.
        reentrant: whether backward goes through the graph of this run.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        state: PythonState,
        *,
        reentrant: bool = False,
    ) -> None:
        self._reentrant = reentrant
        self._function = function
        self._arguments = arguments
        self._state = state
        self._as_it_is = False
        self.histories: dict[str, torch.Tensor] = {}
        """In the reentrant mode: attributes in which the latest run left a tensor with a history, and what they had."""

    @contextmanager
    def on_todays_state(self) -> Iterator[bool]:
        """A context in which the function runs on the Python state of now; gives whether that is another one.

        A function that prepares itself in its first call (quantized layers do) changes state that Spillway copies, and
        some that it does not: to go back by half would be neither.
        """
        self._as_it_is = True
        try:
            yield self._state.changes
        finally:
            self._as_it_is = False

    def __call__(self, *tensors: torch.Tensor, within: AbstractContextManager[None] = _NOTHING) -> Any:
        """Call the function.

        Args:
            tensors: those among its arguments.
            within: a context around its code, on its Python state.
        """
        args, kwargs = self._arguments.put(tensors)
        if self._as_it_is:
            with within:
                return self._function(*args, **kwargs)
        with self._state.in_force(), within:
            output = self._function(*args, **kwargs)
            if self._reentrant:
                self.histories = self._state.histories()
        return output


class _Here(threading.local):
    depth = 0


_here = _Here()


def in_rerun() -> bool:
    """Whether the calling thread runs a region again."""
    return _here.depth > 0


@contextmanager
def rerunning(depth: int = 1) -> Iterator[None]:
    """A context in which it does."""
    _here.depth += depth
    try:
        yield
    finally:
        _here.depth -= depth
