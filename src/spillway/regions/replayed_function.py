"""A recomputed function as it runs again: with its arguments put together, on the Python state of its first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from spillway.regions.arguments import Arguments
from spillway.regions.python_state import PythonState

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
