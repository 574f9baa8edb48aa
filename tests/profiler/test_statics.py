"""What of the bytes that are there when a step begins is told apart: parameters, gradients, an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import spillway
from budgets import NAMED, attached_to, one_step
from spillway import Session, UsageError
from spillway.planner.profile import Static
from spillway.profiler.meter import known_bytes, static_within

CPU = torch.device("cpu")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session


def test_each_storage_is_counted_once_and_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    # 8 x 8 and 8 + 8 numbers of 4 bytes; buffers are no parameters.
    model[1].weight = nn.Parameter(model[0].weight.data)
    assert known_bytes(model, CPU) == Static(4 * 64 + 4 * 16, 0, 0, 0)
    # A view of 4 rows of 100, whose storage is all there.
    model[0].weight.grad = torch.zeros(100, 8)[:8]
    assert known_bytes(model, CPU).gradients == 4 * 800
    # Of another device is nothing.
    assert known_bytes(model, torch.device("cuda", 0)) == Static(0, 0, 0, 0)


def test_gradients_without_a_storage_of_their_own_are_not_told_apart() -> None:
    model = nn.Embedding(8, 8, sparse=True)
    model(torch.tensor([1])).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.is_sparse
    assert known_bytes(model, CPU) == Static(4 * 64, 0, 0, 0)


def test_an_optimizers_state_is_told_apart_where_it_is_told_of() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    # Two moments for each parameter, and a step of 4 bytes.
    assert known_bytes(model, CPU, optimizer) == Static(256, 256, 2 * 256 + 4, 0)
    assert known_bytes(model, CPU) == Static(256, 256, 0, 0)


def test_more_than_there_is_is_not_told_apart() -> None:
    assert static_within(Static(3, 2, 1, 0), 10) == Static(3, 2, 1, 4)
    assert static_within(Static(3, 2, 1, 0), 6) == Static(3, 2, 1, 0)
    assert static_within(Static(3, 2, 1, 0), 5) is None


def test_a_profile_tells_weights_and_state_and_has_no_gradients(session: Session) -> None:
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, batch)
    model(batch).sum().backward()
    optimizer.step()
    known = known_bytes(model, CPU, optimizer)
    assert known.gradients == known.weights > 0
    measured = spillway.profile(model, batch, optimizer=optimizer, session=session)
    assert measured.static == static_within(Static(known.weights, 0, known.optimizer, 0), measured.static_bytes)
    assert measured.static is not None and measured.static.total == measured.static_bytes
    with pytest.raises(UsageError, match=r"optimizer: got .*expected the model's torch.optim.Optimizer"):
        spillway.profile(model, batch, optimizer="AdamW", session=session)  # type: ignore[arg-type]


def test_a_budget_counts_the_gradients_that_are_there_when_the_measured_step_begins(session: Session) -> None:
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    with attached_to(model, "8GiB", session) as attached:
        for _ in range(4):
            # No gradient is let go of: micro-batches of one step.
            model(batch).square().mean().backward()
        assert attached.profile is not None and attached.profile.static is not None
        static = attached.profile.static
    known = known_bytes(model, CPU)
    assert (static.weights, static.gradients, static.optimizer) == (known.weights, known.weights, 0)
