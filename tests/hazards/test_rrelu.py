"""Hazard 41: an operator that saves a buffer before its kernel writes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.utils.checkpoint
from torch.nn import functional

from support import Context, Trial, grads


@pytest.mark.parametrize("inplace", [False, True], ids=["rrelu", "rrelu_"])
@pytest.mark.parametrize("place", ["first", "middle", "last", "backward-inside", "checkpointed"])
def test_h41_rrelu(trial: Trial, place: str, inplace: bool) -> None:
    """It saves its noise, and its input, before its kernel writes the noise; no version tells."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(512, requires_grad=True)
        with context():
            hidden = leaf * 2 if place == "first" else (leaf * 2).sin() * 3
            hidden = functional.rrelu(hidden + 0, 0.1, 0.9, training=True, inplace=inplace)
            if place not in ("last", "backward-inside"):
                hidden = functional.rrelu(hidden.cos() * 3, 0.1, 0.9, training=True).exp()
            if place == "checkpointed":
                hidden = torch.utils.checkpoint.checkpoint(
                    lambda x: functional.rrelu(x - 2, training=True).exp(), hidden, use_reentrant=False
                )
            loss = hidden.sum()
            if place == "backward-inside":
                loss.backward()
        trial.push_out()
        del hidden
        if place != "backward-inside":
            loss.backward()
        yield loss.detach()
        yield from grads(leaf)

    trial(step, moves=place != "backward-inside")
