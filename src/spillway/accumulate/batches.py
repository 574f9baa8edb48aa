"""A batch, cut into micro-batches along its first dimension."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from spillway.errors import UsageError

Split = tuple[int, ...]
"""Rows of each micro-batch."""

_ALL_UP_TO = 6
_MOST_PARTS = 8


def rows_of(batch: Any) -> int:
    """The length of the first dimension, which all tensors of a batch share.

    Raises:
        UsageError: if they do not, or if there is none.
    """
    lengths = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(batch)}
    if len(lengths) != 1 or 0 in lengths:
        raise UsageError(
            f"batch: got tensors of {sorted(lengths)} rows, expected a tensor, or tuples, lists and dictionaries of "
            f"them, of as many rows each"
        )
    return lengths.pop()


def cut(batch: Any, split: Split) -> list[Any]:
    """The micro-batches of a batch, as views. What is no tensor is in each of them."""
    ends = list(itertools.accumulate(split))
    return [_rows(batch, end - rows, end) for rows, end in zip(split, ends, strict=True)]


def splits_of(rows: int, count: int, seed: int) -> Iterator[Split]:
    """Ways to cut so many rows into more than one part.

    All of them (the compositions of the number) up to six rows; of more, the even halves, the single rows if they are
    not many, and others that are drawn, none twice.

    Args:
        rows: how many.
        count: the most that are drawn.
        seed: of the drawing.
    """
    if rows <= _ALL_UP_TO:
        for cuts in itertools.product((False, True), repeat=rows - 1):
            if any(cuts):
                yield _parts(rows, [place for place, is_cut in enumerate(cuts, 1) if is_cut])
        return
    chance = random.Random(seed)
    seen: set[Split] = set()
    wanted = [_parts(rows, [rows // 2])] + ([(1,) * rows] if rows <= _MOST_PARTS else [])
    for _ in range(20 * count):
        if len(seen) == count:
            return
        parts = chance.randint(2, min(rows, _MOST_PARTS))
        split = wanted.pop() if wanted else _parts(rows, sorted(chance.sample(range(1, rows), parts - 1)))
        if split not in seen:
            seen.add(split)
            yield split


def check_split(split: Sequence[int], rows: int) -> Split:
    """A split that somebody has given.

    Raises:
        UsageError: if it does not cut the batch.
    """
    parts = tuple(split)
    if not all(isinstance(part, int) and part > 0 for part in parts) or sum(parts) != rows:
        raise UsageError(f"splits: got {parts!r}, expected rows of micro-batches from 1 on that add up to {rows}")
    return parts


def _parts(rows: int, cuts: list[int]) -> Split:
    return tuple(end - start for start, end in itertools.pairwise([0, *cuts, rows]))


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from _tensors(value)


def _rows(batch: Any, start: int, end: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:end]
    if isinstance(batch, dict):
        return type(batch)({key: _rows(value, start, end) for key, value in batch.items()})
    if isinstance(batch, (tuple, list)):
        values = [_rows(value, start, end) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
