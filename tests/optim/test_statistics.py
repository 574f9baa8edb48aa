"""What a step counts: bytes both ways, from the end of the step before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spillway import OffloadedOptimizer


@pytest.mark.parametrize("offload_gradients", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_gradients_that_left_in_backward_are_counted_with_the_step(offload_gradients: bool, micro: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients)
    for _ in range(3):
        for _ in range(micro):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = optimizer.stats()
        # What accumulates on the device leaves once; and each parameter is read.
        assert stats.sent_bytes == nbytes * (micro if offload_gradients else 1) + nbytes
        # In the masters' type, which the device converts.
        assert stats.received_bytes == 2 * nbytes
        assert stats.stepped_on_host * 2 == nbytes
