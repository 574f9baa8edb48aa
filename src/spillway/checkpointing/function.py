"""A checkpointed function with its arguments, and its calls in replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch

from spillway._torch import tree_flatten, tree_unflatten
from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.python_walk import WalkMemory
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided, whole_view_of

_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_LEAVES = PLAIN | _NUMBERS
_SEQUENCES = (tuple, list)


class Arguments:
    """The arguments of a call, in which tensors can be replaced."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any] = []
        self._count = len(args)
        self._names = tuple(kwargs)
        self._makers: list[tuple[int, Callable[[list[Any]], Any]] | None] = []
        """Number of leaves, and their constructor, for each argument that is not a leaf itself."""
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
        """Index of each tensor among the taken ones: an argument may be passed several times."""
        numbers: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            kind = type(leaf)
            # By class first: isinstance() with torch.Tensor calls a metaclass, in Python.
            if kind not in _NUMBERS and (kind in PLAIN or isinstance(leaf, torch.Tensor)):
                leaves[place] = None
                self._places.append(place)
                self._taken[id(leaf)] = leaf
                self._numbers.append(numbers.setdefault(id(leaf), len(numbers)))
        self._leaves = leaves

    def take(self) -> list[torch.Tensor]:
        """The tensors, each once. They are not held here any more."""
        taken, self._taken = self._taken, {}
        return list(taken.values())

    def callables(self) -> list[Any]:
        return [leaf for leaf in self._leaves if callable(leaf)]

    def objects(self) -> list[Any]:
        """Arguments that are neither tensors, numbers nor strings."""
        return [leaf for leaf in self._leaves if type(leaf) not in _NUMBERS]

    def numbers(self) -> tuple[Any, ...]:
        """The numbers, strings and booleans among the arguments."""
        return tuple([(type(leaf), leaf) for leaf in self._leaves if leaf is not None and type(leaf) in _NUMBERS])

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors."""
        leaves = list(self._leaves)
        for place, number in zip(self._places, self._numbers, strict=True):
            leaves[place] = tensors[number]
        left = iter(leaves)
        values = [next(left) if each is None else each[1](list(islice(left, each[0]))) for each in self._makers]
        return tuple(values[: self._count]), dict(zip(self._names, values[self._count :], strict=True))


_NOTHING = nullcontext()


class ReplayedFunction:
    """Calls a function again, with the Python state of its first call."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        memory: WalkMemory | None = None,
        around: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.around = nullcontext if around is None else around
        """A context for each replay: the function's parameters are on the device inside."""
        self.state = PythonState(function, arguments.objects(), memory)
        self.label = label_of(function)
        self._function, self._arguments = function, arguments
        self._keeps_state = False

    def reachable_now(self) -> list[torch.Tensor]:
        """The tensors that the function can reach now, besides tensors among its arguments."""
        return [tensor for _, tensor in PythonState(self._function, self._arguments.objects()).reachable()]

    @contextmanager
    def on_current_state(self) -> Iterator[bool]:
        """A context in which the function keeps the current Python state. Yields whether that state is another one.

        A function may prepare itself in its first call, as quantized layers do. Spillway copies only a part of the
        state that it then changes, and cannot go back.
        """
        self._keeps_state = True
        try:
            yield self.state.changes
        finally:
            self._keeps_state = False

    def __call__(
        self, *tensors: torch.Tensor, within: AbstractContextManager[None] = _NOTHING, is_stateless: bool = False
    ) -> Any:
        """Call the function on these tensors, with a context around its code, inside its Python state.

        ``is_stateless``: it was not seen to change that state.
        """
        args, kwargs = self._arguments.put(tensors)
        if self._keeps_state:
            with within:
                return self._function(*args, **kwargs)
        with self.state.in_force(is_stateless=is_stateless), within:
            return self._function(*args, **kwargs)


def module_of(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that the function is, or is a method of."""
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def label_of(function: Callable[..., Any]) -> str:
    """Name of a function in errors."""
    module = module_of(function)
    return type(module).__name__ if module is not None else getattr(function, "__qualname__", repr(function))


def replay_argument(tensor: torch.Tensor, requires_grad: bool, is_written: bool) -> torch.Tensor:
    """One of the function's tensors for a replay: it shares its memory, and has no history."""
    with below_modes(tensor), torch.enable_grad():
        leaf = tensor.detach().requires_grad_(requires_grad)
        if is_written:
            # Neither a leaf nor a view of one can be written in place. The next replay needs the original.
            return leaf.clone()  # type: ignore[no-untyped-call, unused-ignore]
        if not requires_grad or (tensor.requires_grad and tensor.is_leaf) or not is_strided(leaf):
            return leaf
        # It was no leaf. Casts of leaves are taken for casts of autocast.
        return whole_view_of(leaf)
