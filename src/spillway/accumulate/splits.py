"""A check of anybody's training step: every split of a batch gives the gradient of the whole."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from spillway.accumulate.batches import Split, check_split, cut, rows_of, splits_of
from spillway.accumulate.comparison import Comparison, Gradients
from spillway.errors import SplitError, UsageError

_DRAWN = 16


def split_equals_whole(
    step: Callable[[list[Any]], object],
    batch: Any,
    *,
    model: Module,
    optimizer: Optimizer | None = None,
    splits: int | Iterable[Sequence[int]] | None = None,
    tolerance: float | None = None,
    exact: bool = False,
    seed: int = 0,
) -> float:
    """Check a training step: cut into any micro-batches, a batch gives the gradients of the whole.

    ``step`` is called with a list of micro-batches: with the whole batch as the only one, and once for each split.
    Before each call weights, buffers, the optimizer's state, gradients and torch's seed are what they were. Compared
    are the gradients that the optimizer steps with, or that the model is left with.

    What depends on more than a row by itself differs between splits, and rightly so: dropout, batch norm. Switch it
    off.

    Args:
        step: your training step, of any number of micro-batches.
        batch: a tensor, or tuples, lists and dictionaries of tensors, with as many rows (first dimension) each.
        model: whose gradients are compared.
        optimizer: what ``step`` steps; its gradients are taken when it does. ``None``: they are taken afterwards, from
            the model.
        splits: rows of micro-batches, like ``[(3, 5), (1, 7)]``; or how many to draw of a batch of more than six rows.
            ``None``: all that there are of up to six rows, else 16.
        tolerance: the largest difference, by norm, relative to that of the whole batch's gradient. ``None``: the
            square root of the gradient's own epsilon, which is 1.5e-8 for float64, 3.5e-4 for float32, 0.09 for
            bfloat16: sums in another order round otherwise. Under autocast say what its narrower type needs.
        exact: no tolerance: the same bits.
        seed: of torch's random numbers, and of what is drawn.

    Returns:
        The largest relative difference that was found.

    Raises:
        SplitError: an ``AssertionError``, if a split's gradients differ: it names the parameter, the split, and by what
            factor.
        UsageError: for arguments that cannot be meant; if ``step`` gives no gradients, or other ones for the same
            batch.

    Example:
        >>> def step(micro_batches):  # doctest: +SKIP
        ...     window = spillway.Accumulator(model, optimizer, steps=len(micro_batches))
        ...     for tokens in window(micro_batches):
        ...         window.backward(loss_sum(model(tokens), tokens), weight=tokens.numel())
        >>> spillway.split_equals_whole(step, tokens, model=model, optimizer=optimizer)  # doctest: +SKIP
        3.1e-08
    """
    rows = rows_of(batch)
    if rows < 2:
        raise UsageError("batch: got one of 1 row, expected at least 2, since this one cannot be split")
    if tolerance is not None and (exact or not 0 < tolerance < math.inf):
        raise UsageError(f"tolerance: got {tolerance!r} with exact={exact}, expected a number above 0, or exact=True")
    if splits is None or isinstance(splits, int):
        count = _DRAWN if splits is None else splits
        wanted: Iterable[Split] = splits_of(rows, count, seed)
    else:
        wanted = [check_split(each, rows) for each in splits]
    run = _Run(step, model, optimizer, seed)
    whole = run((rows,), batch)
    comparison = Comparison(whole, 0.0 if exact else tolerance)
    _, difference = comparison.worst(run((rows,), batch))
    if difference is not None:
        raise UsageError(
            "step: got other gradients when it was called with the same batch again, expected the same; it keeps "
            "something from call to call, or is not deterministic"
        )
    largest = 0.0
    compared = 0
    for split in wanted:
        found, difference = comparison.worst(run(split, batch))
        if difference is not None:
            raise SplitError(difference.message(split, rows))
        largest = max(largest, found)
        compared += 1
    if not compared:
        raise UsageError(f"splits: got {splits!r}, expected at least one")
    return largest


class _Run:
    """Runs a step from where everything was, and takes the gradients that it makes."""

    def __init__(
        self, step: Callable[[list[Any]], object], model: Module, optimizer: Optimizer | None, seed: int
    ) -> None:
        self._step = step
        self._model = model
        self._optimizer = optimizer
        self._seed = seed
        self._tensors = [tensor for _, tensor in (*model.named_parameters(), *model.named_buffers())]
        self._before = [tensor.detach().clone() for tensor in self._tensors]
        self._state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())

    def __call__(self, split: Split, batch: Any) -> Gradients:
        taken: list[Gradients] = []
        hook = None
        if self._optimizer is not None:
            hook = self._optimizer.register_step_pre_hook(lambda *_: taken.append(self._gradients()))
        self._model.zero_grad(set_to_none=True)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                self._step(cut(batch, split))
            if self._optimizer is None:
                taken.append(self._gradients())
        finally:
            if hook is not None:
                hook.remove()
            self._restore()
        if len(taken) != 1 or not taken[0]:
            raise UsageError(
                f"step: got {len(taken)} steps of the optimizer with gradients of "
                f"{len(taken[0]) if taken else 0} parameters, expected one, with gradients"
            )
        return taken[0]

    def _gradients(self) -> Gradients:
        named = [(name, parameter.grad) for name, parameter in self._model.named_parameters()]
        return {name: _local(gradient).detach().clone() for name, gradient in named if gradient is not None}

    @torch.no_grad()
    def _restore(self) -> None:
        for tensor, before in zip(self._tensors, self._before, strict=True):
            tensor.copy_(before)
        self._model.zero_grad(set_to_none=True)
        if self._optimizer is not None and self._state is not None:
            self._optimizer.load_state_dict(copy.deepcopy(self._state))


def _local(gradient: Tensor) -> Tensor:
    """What this rank has of it, without the holes of a sparse one."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.to_dense() if local.layout is not torch.strided else local
