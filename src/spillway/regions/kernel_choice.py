"""Functions of torch that take another kernel under a dispatch mode.

NOTE [ Kernels under a mode ]

Some of torch's functions look whether a dispatch mode is active. Then they take the kernel that autograd would need,
also for tensors that need no gradient: ``max_pool1d`` gives other strides, singular values and eigenvalues have other
bits. A recomputed function that is traced must give what it gives without the trace. So :class:`KernelChoice` runs
these functions with Spillway's modes off. For the trace, their result comes from outside. A replay is handed it.

Where somebody else's dispatch mode is active too, plain PyTorch takes the other kernel as well, and nothing is done.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from spillway.regions.mode import OperatorMode
from spillway.regions.tensors import PLAIN
from spillway.regions.trace import Trace

_CHOOSERS = frozenset(
    (
        torch.max_pool1d,
        torch.nuclear_norm,
        torch.norm,
        torch.Tensor.norm,
        torch.linalg.cond,
        torch.linalg.eigvals,
        torch.linalg.eigvalsh,
        torch.linalg.matrix_norm,
        torch.linalg.matrix_rank,
        torch.linalg.norm,
        torch.linalg.svdvals,
    )
)


class KernelChoice(TorchFunctionMode):
    """See NOTE [ Kernels under a mode ].

    Args:
        reentrant: whether the function is recomputed in the reentrant mode.
        results: the functions that were run with modes off, each with its result, in order. ``None``: this is the first
            run, which collects them in :attr:`results`.
    """

    def __init__(self, *, reentrant: bool, results: list[tuple[Any, Any]] | None = None) -> None:
        super().__init__()
        self._is_reentrant = reentrant
        self._given = None if results is None else iter(results)
        self.results: list[tuple[Any, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CHOOSERS or not self._may_choose(args, kwargs):
            return func(*args, **kwargs)
        if self._given is not None and not _need_grad(args, kwargs):
            known, result = next(self._given, (None, None))
            if known is func:
                return result
        with _disable_current_modes():
            result = func(*args, **kwargs)
        self.results.append((func, result))
        return result

    def _may_choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs.get("out") is not None or any(type(tensor) not in PLAIN for tensor in _tensors_in(args, kwargs)):
            return False
        # In the reentrant mode the first run is without gradients, and decides which kernel gives the values.
        if not self._is_reentrant and _need_grad(args, kwargs):
            return False
        return all(isinstance(mode, OperatorMode) for mode in _get_current_dispatch_mode_stack())


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _need_grad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors_in(args, kwargs))


def choosing(trace: Trace) -> AbstractContextManager[object]:
    """A context for a run that is like the one of this trace."""
    return KernelChoice(reentrant=trace.reentrant, results=trace.chosen) if trace.chosen else nullcontext()
