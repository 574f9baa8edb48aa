"""A check of any training step: every split of a batch into micro-batches gives the gradients of the whole batch."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from spillway.errors import SplitError, UsageError

Split = tuple[int, ...]
"""Rows of each micro-batch."""
Gradients = dict[str, Tensor]
"""Gradients by parameter name."""

_DRAWN = 16
_ALL_UP_TO = 6
_MOST_PARTS = 8
_NOISE = 8
"""A gradient that should be 0 may be this many times the epsilon of its dtype times the norm of all gradients."""
_LARGEST_DENOMINATOR = 64


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
    """Check a training step: a batch cut into micro-batches gives the gradients of the whole batch.

    ``step`` is called with a list of micro-batches: with the whole batch as the only one, and once for each split.
    Around each call, gradients are cleared, and weights, buffers, optimizer state and torch's seed are restored. The
    gradients that the optimizer steps with are compared, or those that the model is left with.

    Dropout and batch norm mix rows, so their gradients differ between splits. Switch them off.

    Args:
        step: your training step, for any number of micro-batches.
        batch: a tensor, or tuples, lists and dictionaries of tensors, all with the same number of rows (first
            dimension).
        model: its gradients are compared.
        optimizer: ``step`` steps it, and its gradients are compared then. ``None``: those of the model, after ``step``.
        splits: rows of micro-batches, like ``[(3, 5), (1, 7)]``; or how many splits to draw for a batch of more than
            six rows. ``None``: 16, or for up to six rows all of them.
        tolerance: largest relative difference by norm. ``None``: the square root of the dtype's epsilon, since sums in
            another order round differently: 1.5e-8 for float64, 3.5e-4 for float32, 0.09 for bfloat16. Set it for
            autocast.
        exact: compare bit for bit.
        seed: of torch's random numbers, and of the splits that are drawn.

    Returns:
        The largest relative difference.

    Raises:
        SplitError: an ``AssertionError``, if gradients differ. It names the parameter, the split and the factor.
        UsageError: for invalid arguments; if ``step`` makes no gradients, or different ones for the same batch.

    Example:
        >>> def step(micro_batches):  # doctest: +SKIP
        ...     accumulator = spillway.Accumulator(model, optimizer, steps=len(micro_batches))
        ...     for tokens in accumulator(micro_batches):
        ...         accumulator.backward(loss_sum(model(tokens), tokens), weight=tokens.numel())
        >>> spillway.split_equals_whole(step, tokens, model=model, optimizer=optimizer)  # doctest: +SKIP
        3.1e-08
    """
    rows = _rows_of(batch)
    if rows < 2:
        raise UsageError("batch: it has 1 row, which cannot be split; give at least 2 rows")
    if tolerance is not None and (exact or not 0 < tolerance < math.inf):
        raise UsageError(f"tolerance: got {tolerance!r} with exact={exact}, expected a number above 0, or exact=True")
    if splits is None or isinstance(splits, int):
        wanted: Iterable[Split] = splits_of(rows, _DRAWN if splits is None else splits, seed)
    else:
        wanted = [_checked(each, rows) for each in splits]
    run = _runner(step, batch, model, optimizer, seed)
    comparison = _Comparison(run((rows,)), 0.0 if exact else tolerance)
    if comparison.difference(run((rows,)), (rows,))[1] is not None:
        raise UsageError(
            "step: it made different gradients for the same batch; make it deterministic, without state between calls"
        )
    largest = None
    for split in wanted:
        found, message = comparison.difference(run(split), split)
        if message is not None:
            raise SplitError(message)
        largest = max(largest or 0.0, found)
    if largest is None:
        raise UsageError(f"splits: got {splits!r}, expected at least one")
    return largest


def splits_of(rows: int, count: int, seed: int) -> Iterator[Split]:
    """Ways to cut rows into more than one part: all of them for up to six rows, else at most ``count`` drawn ones.

    Drawn ones begin with even halves and single rows (up to eight rows), and do not repeat.
    """
    if rows <= _ALL_UP_TO:
        for parts in range(2, rows + 1):
            yield from (_parts(rows, cuts) for cuts in itertools.combinations(range(1, rows), parts - 1))
        return
    chance = random.Random(seed)
    splits = [_parts(rows, [rows // 2]), *([(1,) * rows] if rows <= _MOST_PARTS else [])]
    for _ in range(20 * count):
        parts = chance.randint(2, min(rows, _MOST_PARTS))
        splits.append(_parts(rows, sorted(chance.sample(range(1, rows), parts - 1))))
    yield from itertools.islice(dict.fromkeys(splits), count)


def cut(batch: Any, split: Split) -> list[Any]:
    """The micro-batches of a batch, as views. Each of them has all values that are no tensors."""
    ends = itertools.accumulate(split)
    return [_mapped(itemgetter(slice(end - rows, end)), batch) for rows, end in zip(split, ends, strict=True)]


def _checked(split: Sequence[int], rows: int) -> Split:
    parts = tuple(split)
    if not all(isinstance(part, int) and part > 0 for part in parts) or sum(parts) != rows:
        raise UsageError(f"splits: got {parts!r}, expected numbers of rows, at least 1 each, whose sum is {rows}")
    return parts


def _parts(rows: int, cuts: Sequence[int]) -> Split:
    return tuple(end - start for start, end in itertools.pairwise([0, *cuts, rows]))


def _rows_of(batch: Any) -> int:
    """The length of the first dimension, which all tensors of a batch share."""
    lengths: set[int] = set()
    _mapped(lambda tensor: lengths.add(tensor.shape[0] if tensor.dim() else 0), batch)
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(
            f"batch: got tensors of {sorted(lengths)} rows, expected a tensor, or tuples, lists and dictionaries of "
            f"tensors, all with the same number of rows"
        )
    return lengths.pop()


def _mapped(function: Callable[[Tensor], Any], batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping):
        # A copy, since not every class is made from a dictionary (`defaultdict`).
        made = copy.copy(batch)
        for key, value in batch.items():
            made[key] = _mapped(function, value)
        return made
    if isinstance(batch, (tuple, list)):
        values = [_mapped(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _runner(
    step: Callable[[list[Any]], object], batch: Any, model: Module, optimizer: Optimizer | None, seed: int
) -> Callable[[Split], Gradients]:
    """A function that runs a step from the state of now with a split of the batch, and returns its gradients."""
    tensors = [*model.parameters(), *model.buffers()]
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    taken: list[Gradients] = []

    def take(*args: object) -> None:
        named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
        taken.append({name: _dense(gradient).detach().clone() for name, gradient in named if gradient is not None})

    def run(split: Split) -> Gradients:
        taken.clear()
        model.zero_grad(set_to_none=True)
        hook = None if optimizer is None else optimizer.register_step_pre_hook(take)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                step(cut(batch, split))
            if hook is None:
                take()
        finally:
            if hook is not None:
                hook.remove()
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
            for module, name, buffer in buffers:
                # `step` may have put another tensor in its place.
                setattr(module, name, buffer)
            model.zero_grad(set_to_none=True)
            if optimizer is not None and state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))
        if len(taken) != 1 or not taken[0]:
            raise UsageError(
                f"step: got {len(taken)} steps of the optimizer with gradients of "
                f"{len(taken[0]) if taken else 0} parameters, expected one step with gradients"
            )
        return taken[0]

    return run


class _Comparison:
    """Compares gradients with those of the whole batch. A tolerance of ``None`` is by dtype, of 0 bit for bit."""

    def __init__(self, whole: Gradients, tolerance: float | None) -> None:
        self._whole = whole
        self._norms = {name: _norm(gradient) for name, gradient in whole.items()}
        self._norm = math.hypot(*self._norms.values())
        self._tolerance = tolerance
        if not math.isfinite(self._norm):
            raise UsageError("step: the gradients of the whole batch are not finite; give a batch whose loss is")

    def difference(self, found: Gradients, split: Split) -> tuple[float, str | None]:
        """The largest relative difference, and an error message if one is above its tolerance."""
        compared = {name: self._compare(name, found.get(name)) for name in self._whole.keys() | found.keys()}
        largest = max((relative for relative, *_ in compared.values()), default=0.0)
        wrong = [(relative, name, allowed) for name, (relative, allowed, is_wrong) in compared.items() if is_wrong]
        if not wrong:
            return largest, None
        relative, name, allowed = max(wrong)
        how, hint = self._explained(name, found, split, relative, allowed)
        return largest, (
            f"gradients of {name!r}{f' and {len(wrong) - 1} others' if len(wrong) > 1 else ''} differ between "
            f"micro-batches of {split} rows and the whole batch: {how}. {hint}. The tolerance is "
            f"{f'{allowed:.2g}' if allowed else '0 (the same bits)'}"
        )

    def _compare(self, name: str, found: Tensor | None) -> tuple[float, float, bool]:
        """The relative difference of one gradient, the tolerance, and whether it is wrong."""
        whole = self._whole.get(name)
        if whole is None or found is None:
            # A missing gradient is not the same as zeros: an optimizer skips the parameter.
            return math.inf, 0.0, True
        if self._tolerance == 0 and torch.equal(whole, found):
            return 0.0, 0.0, False
        epsilon = torch.finfo(whole.dtype).eps
        allowed = math.sqrt(epsilon) if self._tolerance is None else self._tolerance
        difference = _norm(_flat(found) - _flat(whole))
        noise = _NOISE * epsilon * self._norm
        relative = difference / self._norms[name] if self._norms[name] > noise else 0.0
        if self._tolerance == 0:
            return relative, 0.0, True
        return relative, allowed, not difference <= max(allowed * self._norms[name], noise)

    def _explained(self, name: str, found: Gradients, split: Split, relative: float, allowed: float) -> tuple[str, str]:
        """How a gradient differs, and a likely cause."""
        factor, parts = self._factor(name, found, allowed), len(split)
        if factor is None:
            how = f"the difference is {relative:.3g} of the norm and no constant factor"
            return how, "A mean of means over micro-batches of different weight, dropout or batch norm do this"
        how = f"they are {_fraction(factor)} times as large"
        if math.isclose(factor, parts, rel_tol=max(allowed, 1e-6)):
            return how, f"The means of {parts} micro-batches are summed, but not divided by {parts}"
        if math.isclose(factor, 1 / parts, rel_tol=max(allowed, 1e-6)):
            return how, f"Normalised losses are divided by {parts} again, or only one of {parts} micro-batches counts"
        return how, "This may be a mean of means: divide sums by the count of all micro-batches"

    def _factor(self, name: str, found: Gradients, allowed: float) -> float | None:
        """The constant factor between the two gradients, if there is one."""
        if name not in found or name not in self._whole or not self._norms[name]:
            return None
        ours, whole = _flat(found[name]), _flat(self._whole[name])
        factor = float(ours @ whole) / self._norms[name] ** 2
        rest = _norm(ours - factor * whole)
        return factor if rest <= max(allowed, 1e-6) * abs(factor) * self._norms[name] else None


def _dense(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient, as a dense tensor."""
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.to_dense() if local.layout is not torch.strided else local


def _flat(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().flatten()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_flat(tensor)))


def _fraction(factor: float) -> str:
    """A factor, with the small fraction that it is close to."""
    fraction = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
    is_named = fraction.denominator > 1 and math.isclose(float(fraction), factor, rel_tol=1e-3)
    return f"{factor:.6g}" + (f" ({fraction})" if is_named else "")
