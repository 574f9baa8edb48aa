"""Hazard 54: the peak of a step may sit in the logits, or in a block's recompute, and must fall there too."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import spillway

ROWS, WIDTH, LAYERS, VOCABULARY = 64, 1024, 12, 8192
HIDDEN = ROWS * WIDTH * 4
"""Bytes of what goes from layer to layer: 256 KiB."""
WINDOW = HIDDEN


class Meter(TorchDispatchMode):
    """Adds up the storages that are alive, after each operator, and remembers the most. Those of tiers are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage() for tensor in pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in given:
                self._alive[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


def peak(function: Callable[[], object]) -> int:
    """Most bytes that were alive at once of what the function made."""
    with Meter() as meter:
        function()
    return meter.peak


def assert_at_most(peaks: list[int], most: int) -> None:
    """In the first step the order is not known; afterwards the peak is the same, however fast a thread or a disk is."""
    assert max(peaks) <= most
    assert len(set(peaks[1:])) == 1


@pytest.fixture(params=["host", "disk"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    with spillway.Session(window=WINDOW, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        yield lambda: spillway.offload(session=session, min_bytes=0, tier=request.param)


@pytest.fixture
def weight() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 32)
    weight.grad = torch.zeros_like(weight)
    return weight


def test_h54_peak_in_the_logits(
    offload: Callable[[], AbstractContextManager[object]], weight: torch.nn.Parameter
) -> None:
    targets = torch.randint(VOCABULARY, (ROWS,))
    batch = torch.randn(ROWS, WIDTH)

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.t(), targets)

    def step(context: AbstractContextManager[object]) -> None:
        with context:
            hidden = batch.clone().requires_grad_() * 1
            for _ in range(LAYERS):
                hidden = hidden.sin()
            loss = head(hidden)
        del hidden
        loss.backward()

    head_alone = peak(lambda: head(batch.clone().requires_grad_()).backward())
    assert peak(lambda: step(contextlib.nullcontext())) >= head_alone + (LAYERS - 1) * HIDDEN
    peaks = [peak(lambda: step(offload())) for _ in range(4)]
    # Beside the head: what may be leaving, what may have been fetched ahead, and the tensor at hand.
    assert_at_most(peaks, head_alone + 2 * WINDOW + HIDDEN)


def test_h54_peak_in_a_recompute(offload: Callable[[], AbstractContextManager[object]]) -> None:
    batch = torch.randn(ROWS, WIDTH)

    def block(hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            hidden = hidden.sin()
        return hidden

    def step(context: AbstractContextManager[object], blocks: int) -> None:
        with context:
            hidden = batch.clone().requires_grad_() * 1
            for _ in range(blocks):
                hidden = checkpoint(block, hidden, use_reentrant=False)
            loss = hidden.sum()
        del hidden
        loss.backward()

    one_block = peak(lambda: step(contextlib.nullcontext(), 1))
    assert one_block >= 8 * HIDDEN
    assert peak(lambda: step(contextlib.nullcontext(), LAYERS)) >= one_block + (LAYERS - 1) * HIDDEN
    peaks = [peak(lambda: step(offload(), LAYERS)) for _ in range(4)]
    assert_at_most(peaks, one_block + 2 * WINDOW + HIDDEN)


def test_h54_the_peak_of_a_plain_chain_is_the_window(offload: Callable[[], AbstractContextManager[object]]) -> None:
    batch = torch.randn(ROWS, WIDTH)

    def step(context: AbstractContextManager[object], layers: int) -> None:
        with context:
            hidden = batch.clone().requires_grad_() * 1
            for _ in range(layers):
                hidden = hidden.sin()
            loss = hidden.sum()
        del hidden
        loss.backward()

    assert peak(lambda: step(contextlib.nullcontext(), 40)) >= 40 * HIDDEN
    peaks = [peak(lambda: step(offload(), 40)) for _ in range(4)]
    # The leaf; input and output of a layer; its gradient and the one before; and the windows, out or back.
    assert_at_most(peaks, 5 * HIDDEN + 2 * WINDOW)
