"""A block of which all stays, in a pass that keeps whatever nobody has decided about.

NOTE [ What is left alone ]

Such a block needs no hooks: autograd holds the same without. With them it takes the host twice as long to queue it. So
they are taken off torch's stack for as long as it runs. Not so

* in its first call, by which is known how much it saves, and whether it saves what it gives: the next block may save
  that, too, and must hear that it stays;
* where what it is given was saved by the block before, which may send it away: then both have one copy;
* where somebody else's hooks are below the pass's, who would see what he did not see before, or where something was
  marked, or outputs are dropped;
* from when anything inside wants the pass to see what is saved (a region of the user's own, a mark, a group): then they
  are put back, below whatever is on the stack by then, and stay in the block's next calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spillway.capture.hooks import Pass
from spillway.capture.identity import Saved

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]

_top: Callable[[bool], _Hooks | None] = torch._C._autograd._top_saved_tensors_default_hooks
_pop: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
_push: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
_why_disabled: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


class LeftAlone:
    """The calls of one block. See NOTE [ What is left alone ]."""

    def __init__(self) -> None:
        self._nbytes: int | None = None
        """What it saves, if it was called before. That is counted as kept."""
        self._is_seen = False
        """Whether it has to be."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the function gives."""
        hooks = _top(True)
        passage = None if hooks is None else getattr(hooks[0], "__self__", None)
        if hooks is None or self._is_seen or not isinstance(passage, Pass) or not passage.keeps_the_rest:
            return function(*args, **kwargs)
        if self._nbytes is None:
            return self._run_seen(passage, function, args, kwargs)
        given = (each for each in (*args, *kwargs.values()) if type(each) is torch.Tensor and each.requires_grad)
        if any(isinstance(passage.known(each), Saved) for each in given):
            return function(*args, **kwargs)
        _pop()
        if _top(True) is not None:
            _push(*hooks)
            return function(*args, **kwargs)
        hidden = _Hidden(hooks, _here.hidden)
        _here.hidden = hidden
        try:
            output = function(*args, **kwargs)
        finally:
            hidden.end()
        if hidden.was_wanted:
            self._is_seen = True
        else:
            passage.count_kept(self._nbytes)
        return output

    def _run_seen(
        self, passage: Pass, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = passage.ledger.total().kept_bytes
        output = function(*args, **kwargs)
        self._nbytes = passage.ledger.total().kept_bytes - before
        given = (each for each in tree_leaves(output) if isinstance(each, torch.Tensor))
        self._is_seen = any(passage.known(each) is not None for each in given)
        return output


class _Hidden:
    """The hooks of a pass, which are off the stack."""

    def __init__(self, hooks: _Hooks, outer: _Hidden | None) -> None:
        self._hooks: _Hooks | None = hooks
        self._outer = outer
        self.was_wanted = False

    def end(self) -> None:
        """They are where they were: below all others."""
        if self._hooks is None:
            return
        above: list[_Hooks] = []
        while (top := _top(True)) is not None:
            above.append(top)
            _pop()
        _push(*self._hooks)
        for each in reversed(above):
            _push(*each)
        self._hooks, _here.hidden = None, self._outer


class _Here(threading.local):
    hidden: _Hidden | None = None


_here = _Here()


def see_again() -> None:
    """In a block that is left alone: the pass sees the rest of what it saves, since somebody reckons with that."""
    hidden = _here.hidden
    if hidden is not None:
        hidden.was_wanted = True
        if _why_disabled() is None:
            hidden.end()
