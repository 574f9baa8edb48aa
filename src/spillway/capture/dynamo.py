"""Keeps ``torch.compile`` out of the code here.

Below a compiled frame, Dynamo looks at every Python function that runs eagerly, hooks and finalisers too, and would
compile them. Where Dynamo is loaded, it is told once that the files of this package are not to be looked at; loading it
for that would take seconds.

To switch Dynamo off for a call takes the host longer than many of the calls here do. Where it is off, it need not be.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined, unused-ignore]
"""What Dynamo does with frames of the calling thread: ``None``, nothing."""
_disable: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined, unused-ignore]
_PACKAGE = __name__.partition(".")[0]


class _Told:
    done = False


def keep_out() -> None:
    """Tell Dynamo, if it is loaded and was not told."""
    if _Told.done:
        return
    # Another thread may be loading it just now.
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and hasattr(rules, "_recompile_re"):
        rules.add(_PACKAGE)
        _Told.done = True


def untraced(function: Function) -> Function:
    """A function that Dynamo does not look into, nor at what it calls.

    For what is called from a hook, or from code that is not traced itself: Dynamo, tracing the caller, would have to
    be told by ``torch._disable_dynamo`` alone.
    """
    disabled = _disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if callback() is None else disabled)(*args, **kwargs)

    return call  # type: ignore[return-value]
