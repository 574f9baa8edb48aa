"""A checkpointed function with its arguments, and how it is called again in a replay."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.tensors import PLAIN, is_strided

_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_LEAVES = PLAIN | _NUMBERS
_SEQUENCES = (tuple, list)
_FIRST_SWEEP = 1024


class Kind:
    """What tells calls apart that do other things. Of each there is one, told from others by what it is.

    It is looked up several times in each call, and the hash of what it says takes as long as all that.
    """

    __slots__ = ("__weakref__", "said")

    def __init__(self, said: Hashable) -> None:
        self.said = said


class _Kinds:
    """Those that somebody has."""

    def __init__(self) -> None:
        self._known: dict[Hashable, weakref.ref[Kind]] = {}
        self._sweep_at = _FIRST_SWEEP
        self._lock = threading.Lock()

    def of(self, said: Hashable) -> Kind:
        """The one that says this."""
        reference = self._known.get(said)
        kind = None if reference is None else reference()
        return self._new(said) if kind is None else kind

    def _new(self, said: Hashable) -> Kind:
        with self._lock:
            reference = self._known.get(said)
            kind = None if reference is None else reference()
            if kind is not None:
                # Another thread has made it.
                return kind
            if len(self._known) >= self._sweep_at:
                self._known = {each: kept for each, kept in self._known.items() if kept() is not None}
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._known))
            kind = Kind(said)
            self._known[said] = weakref.ref(kind)
            return kind


_kinds = _Kinds()


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

    def kind(self, tensors: Sequence[torch.Tensor]) -> Kind | None:
        """What tells calls apart: forms of tensors, and numbers. ``None``: it cannot be said."""
        said: list[Any] = []
        for tensor in tensors:
            if type(tensor) not in PLAIN or not is_strided(tensor) or tensor.is_neg() or tensor.is_conj():
                return None
            said += tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad
        said += self._numbers
        for leaf in self._leaves:
            if leaf is not None:
                kind = type(leaf)
                said += (kind, leaf) if kind in _NUMBERS else (kind,)
        if torch._C._is_any_autocast_enabled():
            devices = {"cpu", *(tensor.device.type for tensor in tensors)}
            said += [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]
        return _kinds.of(tuple(said))

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
        is_first: whether the first call of this object is the first run, which changes the state as usual.
        reentrant: whether backward goes through the graph of this run.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        state: PythonState,
        *,
        is_first: bool = False,
        reentrant: bool = False,
    ) -> None:
        self._reentrant = reentrant
        self._function = function
        self._arguments = arguments
        self._state = state
        self._is_first = is_first
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
        is_first, self._is_first = self._is_first, False
        if is_first or self._as_it_is:
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
