"""Two sets of gradients, compared, and what is probably wrong if they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from spillway.accumulate.batches import Split
from spillway.errors import UsageError

_NOISE = 8
"""Times the dtype's epsilon and the norm of all gradients: what a gradient that ought to be 0 may be."""
_LARGEST_DENOMINATOR = 64

Gradients = dict[str, Tensor]
"""By the parameter's name."""


@dataclass(frozen=True)
class Difference:
    """Of one parameter's gradient."""

    name: str
    relative: float
    allowed: float
    factor: float | None
    """If one is the other times this."""
    others: int
    """How many other parameters differ, too."""

    def message(self, split: Split, rows: int) -> str:
        """What is to be said about it."""
        parts = len(split)
        if self.factor is None:
            how = f"they differ by {self.relative:.3g} of their norm, and by no constant factor"
            hint = (
                "that is so for a mean of means, if micro-batches do not weigh the same, and for what depends on more "
                "than its own row (dropout, batch norm)"
            )
        else:
            how = f"they are {_named(self.factor)} times as large"
            if math.isclose(self.factor, parts, rel_tol=max(self.allowed, 1e-6)):
                hint = f"that is so if the means of {parts} micro-batches are added up, and not divided by {parts}"
            elif math.isclose(self.factor, 1 / parts, rel_tol=max(self.allowed, 1e-6)):
                hint = f"that is so if what is normalised already is divided by {parts}, or one of {parts} is left over"
            else:
                hint = "is it a mean of means? Divide sums by the count of the whole window"
        more = f", as do {self.others} others" if self.others else ""
        allowed = f"within {self.allowed:.2g}" if self.allowed else "exactly"
        return (
            f"got gradients of {self.name!r} from {rows} rows in micro-batches of {split} that are not those of the "
            f"whole batch: {how}{more}; expected them equal {allowed}; {hint}"
        )


class Comparison:
    """With the gradients of a whole batch.

    Args:
        whole: these.
        tolerance: relative to their norm; ``None``: by their dtype; 0: the same bits.
    """

    def __init__(self, whole: Gradients, tolerance: float | None) -> None:
        self._whole = whole
        self._norms = {name: _norm(gradient) for name, gradient in whole.items()}
        self._norm = math.hypot(*self._norms.values())
        self._tolerance = tolerance
        if not math.isfinite(self._norm):
            raise UsageError("step: got gradients of the whole batch that are not finite, expected that they are")

    def worst(self, split: Gradients) -> tuple[float, Difference | None]:
        """The largest relative difference, and the worst of those that are too large."""
        largest = 0.0
        wrong = []
        for name in self._whole.keys() | split.keys():
            found, allowed, is_wrong = self._compare(name, split.get(name))
            largest = max(largest, found)
            if is_wrong:
                wrong.append((found, name, allowed))
        if not wrong:
            return largest, None
        found, name, allowed = max(wrong)
        return largest, Difference(name, found, allowed, self._factor(name, split, allowed), len(wrong) - 1)

    def _compare(self, name: str, split: Tensor | None) -> tuple[float, float, bool]:
        whole = self._whole.get(name)
        if whole is None or split is None:
            # A gradient that is None is not one of zeros: optimizers leave the parameter alone.
            return math.inf, 0.0, True
        if self._tolerance == 0 and torch.equal(whole, split):
            return 0.0, 0.0, False
        epsilon = torch.finfo(whole.dtype).eps
        allowed = math.sqrt(epsilon) if self._tolerance is None else self._tolerance
        difference = _norm(_flat(split) - _flat(whole))
        noise = _NOISE * epsilon * self._norm
        relative = difference / self._norms[name] if self._norms[name] > noise else 0.0
        if self._tolerance == 0:
            return relative, 0.0, True
        return relative, allowed, not difference <= max(allowed * self._norms[name], noise)

    def _factor(self, name: str, split: Gradients, allowed: float) -> float | None:
        if name not in split or name not in self._whole or not self._norms[name]:
            return None
        ours, whole = (_flat(gradients[name]) for gradients in (split, self._whole))
        factor = float(ours @ whole) / self._norms[name] ** 2
        rest = _norm(ours - factor * whole)
        return factor if rest <= max(allowed, 1e-6) * abs(factor) * self._norms[name] else None


def _flat(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.double().flatten()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_flat(tensor)))


def _named(factor: float) -> str:
    """A factor, and the small fraction that it is, if it is one."""
    fraction = Fraction(factor).limit_denominator(_LARGEST_DENOMINATOR)
    is_named = fraction.denominator > 1 and math.isclose(float(fraction), factor, rel_tol=1e-3)
    return f"{factor:.6g}" + (f" ({fraction})" if is_named else "")
