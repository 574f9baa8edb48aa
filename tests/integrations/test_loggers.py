"""Numbers for loggers, and that TensorBoard's own writer takes them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import spillway
from integrations.llama import HARDWARE
from spillway import GroupStats, OptimizerStats, Session, StepStats, UsageError
from spillway.integrations.loggers import scalars
from steps import Block

NO_NUMBERS = {"groups", "malloc"}
"""Fields of a step's record that a logger takes no number from by that name."""
STATS = StepStats(
    saved_bytes=10, offloaded_bytes=7, stall_seconds=0.5, notes=("one",), groups=(GroupStats("mlp", saved_bytes=4),)
)


def test_a_record_is_a_flat_dictionary_of_floats() -> None:
    found = scalars(STATS)
    assert found["spillway/saved_bytes"] == 10.0
    assert found["spillway/offloaded_bytes"] == 7.0
    assert found["spillway/stall_seconds"] == 0.5
    assert found["spillway/notes"] == 1.0
    assert found["spillway/group/mlp/saved_bytes"] == 4.0
    assert all(type(name) is str and type(number) is float for name, number in found.items())
    numbers = {name.removeprefix("spillway/") for name in found if "/group/" not in name}
    assert numbers == set(StepStats.__dataclass_fields__) - NO_NUMBERS


def test_the_prefix_is_the_users() -> None:
    assert set(scalars(StepStats(), prefix="")) == set(StepStats.__dataclass_fields__) - NO_NUMBERS
    assert scalars(OptimizerStats(stepped_on_host=3), prefix="optimizer/")["optimizer/stepped_on_host"] == 3.0


def test_what_has_no_statistics_is_refused() -> None:
    with pytest.raises(UsageError, match=r"give its stats\(\)"):
        scalars(spillway.offload())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="prefix"):
        scalars(STATS, prefix=None)  # type: ignore[arg-type]


def test_what_is_attached_has_its_plan_as_soon_as_there_is_one() -> None:
    model = torch.nn.Sequential(*(Block(16) for _ in range(2)))
    with Session() as session, spillway.attach(model, budget="100GiB", hardware=HARDWARE, session=session) as attached:
        seen = []
        for _ in range(6):
            model(torch.randn(4, 16)).sum().backward()
            seen.append(scalars(attached))
        assert attached.plan is not None and attached.measured is not None
        assert "spillway/plan/budget_bytes" not in seen[0] and seen[0]["spillway/plan/active"] == 0.0
        last = seen[-1]
        assert last["spillway/plan/active"] == 1.0
        assert last["spillway/plan/predicted_peak_bytes"] == attached.plan.predicted_peak
        assert last["spillway/plan/checked_peak_bytes"] == attached.measured.peak_bytes
        assert last["spillway/plan/checked_seconds"] == attached.measured.seconds
        assert all(math.isfinite(number) for number in last.values())
    with Session() as session, spillway.attach(model, session=session) as attached:
        assert not [name for name in scalars(attached) if "plan" in name]


def test_tensorboards_writer_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2):
            for name, number in scalars(STATS).items():
                writer.add_scalar(name, number, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(scalars(STATS))
    assert [event.value for event in events.Scalars("spillway/group/mlp/saved_bytes")] == [4.0, 4.0]
