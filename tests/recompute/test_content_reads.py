"""Functions whose Python code reads the content of a tensor without an operator, and that preserve some tensors."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch

import spillway

Read = Callable[[torch.Tensor], torch.Tensor]


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


READS: dict[str, Read] = {
    "tolist": lambda tensor: torch.tensor(tensor.tolist()),
    "numpy": lambda tensor: torch.from_numpy(np.sort(tensor.numpy(), 0)),
    "asarray": lambda tensor: torch.from_numpy(np.asarray(tensor) + 1),
    "saved": _saved,
    "flag": lambda tensor: torch.tensor(3.0 if (tensor.mean(1) > 0).numpy().all() else 0.5),
    "list of flags": lambda tensor: torch.tensor(3.0 if all((tensor.mean(1) > 0).tolist()) else 0.5),
    "array of flags": lambda tensor: torch.tensor(3.0 if np.asarray(tensor.mean(1) > 0).all() else 0.5),
    "DLPack": lambda tensor: torch.tensor(3.0 if np.from_dlpack((tensor.mean(1) > 0).char()).all() else 0.5),
    "comparison": lambda tensor: torch.tensor(2.0 if tensor.abs().mean().numpy() > 1.2 else 1.0),
}


@pytest.mark.parametrize("save", ["matmul", "pointwise"])
@pytest.mark.parametrize("read", READS)
def test_what_python_code_reads_is_never_memory_without_content(read: str, save: str) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = first(x).sin()
        found = READS[read](x.detach().mul(2))
        return (second(hidden * found) * first(hidden)).exp()

    for call in range(5):
        # Values as in the first calls would hide what a replay reads.
        x = torch.randn(4, 8).abs() * 0.1 if call < 2 else torch.randn(4, 8)
        x.requires_grad_()
        weights = [x, *first.parameters(), *second.parameters()]
        plain = torch.autograd.grad(function(x).sum(), weights)
        ours = torch.autograd.grad(spillway.recompute(function, x, save=save).sum(), weights)
        assert all(map(torch.equal, plain, ours)), call


def test_an_error_of_code_that_read_memory_without_content_ends_in_a_whole_replay() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    reads = torch.zeros(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        hidden = first(x).sin()
        limits = x.detach().mul(2).abs().amax(1)
        # As an extension's kernel reads: torch does not see it.
        with torch._C.DisableTorchFunction():
            sizes = [int(limit * 100) for limit in limits.tolist()]
        assert len(sizes) == len(reads)
        return (second(hidden) * first(hidden)).exp()

    for _ in range(4):
        x = torch.randn(4, 8, requires_grad=True)
        weights = [x, *first.parameters(), *second.parameters()]
        plain = torch.autograd.grad(function(x).sum(), weights)
        ours = torch.autograd.grad(spillway.recompute(function, x, save="matmul").sum(), weights)
        assert all(map(torch.equal, plain, ours))
