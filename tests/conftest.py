"""What all tests share."""

from __future__ import annotations

import gc
import os
from itertools import combinations
from pathlib import Path
from typing import Any

# Before torch: threads that spin at the end of each small kernel take the cores from those that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Here, and not at the end of a run: what its plugins register (trio's, where selenium is installed) must not be frozen.
import hypothesis  # noqa: F401
import pytest
import torch


def pytest_configure() -> None:
    # What is small is slow in several threads, if others want the cores.
    torch.set_num_threads(1)
    if not torch.accelerator.is_available():
        # Of devices that are not there, torch writes down where each seed came from: three stacks for a manual_seed.
        for absent in (torch.cuda, torch.mtia, torch.xpu):
            absent.manual_seed_all = lambda seed: None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Tests collect garbage all the time, and need not go through torch and all that ran before each time for it.
    gc.collect()
    gc.freeze()


PAIRWISE = Path(__file__).parent / "recompute"
"""Matrices of three axes and more run pairwise here: each pair of values occurs."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run a part of large matrices. ``make test-all`` runs all of them.

    Of a matrix that is marked ``covered``, so much runs that each value of each axis occurs.
    """
    matrices: dict[tuple[Any, str], list[pytest.Function]] = {}
    for item in items:
        is_short = item.get_closest_marker("long") is None
        if is_short and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            matrices.setdefault((item.parent, item.originalname), []).append(item)
    for matrix in matrices.values():
        # Values by identity: all items of a matrix share them. Axes without a choice do not count.
        rows = {item: [(name, id(value)) for name, value in sorted(item.callspec.params.items())] for item in matrix}
        axes = sum(len(set(axis)) > 1 for axis in zip(*rows.values(), strict=True))
        together = 1 if matrix[0].get_closest_marker("covered") else 2 if axes > 2 and _is_pairwise(matrix[0]) else axes
        if together >= axes:
            continue
        rest = {item: set(combinations(row, together)) for item, row in rows.items()}
        missing = set[Any]().union(*rest.values())
        while missing:
            best = max(rest, key=lambda item: len(rest[item] & missing))
            missing -= rest.pop(best)
        for item in rest:
            item.add_marker("long")


def _is_pairwise(item: pytest.Item) -> bool:
    return PAIRWISE in item.path.parents
