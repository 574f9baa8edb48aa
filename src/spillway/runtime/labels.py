"""Names for what the runtime does, in a profiler's trace.

Under ``torch.profiler`` they are spans of ``record_function``; under ``torch.autograd.profiler.emit_nvtx`` torch makes
NVTX ranges of them. While nobody profiles they cost a call of C.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch

_is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def label(name: str) -> AbstractContextManager[object]:
    """What is done inside shows in a trace as ``spillway.<name>``."""
    return torch.profiler.record_function(f"spillway.{name}") if _is_profiling() else nullcontext()


def labelled(name: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A decorator: calls of the function show in a trace as ``spillway.<name>``."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if not _is_profiling():
                return function(*args, **kwargs)
            with label(name):
                return function(*args, **kwargs)

        return call

    return decorate
