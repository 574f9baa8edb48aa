"""An optimizer that steps in backward: each parameter as soon as its gradient is there, which is then dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from allocations import count_exactly
from spillway import Recompute, Session
from spillway.checkpointing import learned
from spillway.policies import Keep, Offload
from steps import MiB, assert_no_hook, assert_nothing_left, small_model
from test_budget import hardware

ROWS, WIDTH = 512, 64


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(window=MiB, spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


def steps_in_backward(model: nn.Module) -> None:
    """AdamW, one for each parameter."""
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=1e-2)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


def train(model: nn.Module, steps: int) -> list[Tensor]:
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert all(parameter.grad is None for parameter in model.parameters())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "recomputed": lambda: {"policy": Recompute()},
    "some kept": lambda: {"policy": Recompute(save="matmul")},
    "what the last product reads": lambda: {"policy": Recompute(save="aten::gelu")},
    "some sent": lambda: {"policy": Recompute(offload=["inputs", "norm"])},
    "offloaded": lambda: {"policy": Offload(), "min_bytes": 0},
    "kept": lambda: {"policy": Keep()},
    "within a budget": lambda: {"budget": 19 * MiB, "hardware": hardware()},
}


@pytest.mark.parametrize("every", [64, 2], ids=["as usual", "each other call is compared"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covered
def test_it_is_that_of_plain_pytorch_in_every_bit(
    session: Session, way: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "_EVERY", every)
    count_exactly(monkeypatch, lambda: 16 * MiB)
    plain, ours = small_model(4, WIDTH), small_model(4, WIDTH)
    steps_in_backward(plain)
    steps_in_backward(ours)
    with spillway.attach(ours, session=session, **WAYS[way]()) as attached:
        found = train(ours, 7)
        assert (attached.plan is not None) == (way == "within a budget")
    expected = train(plain, 7)
    assert all(map(torch.equal, found, expected))
    assert_no_hook()
