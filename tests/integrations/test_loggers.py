"""Numbers for loggers, and that TensorBoard's own writer and W&B take them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import spillway
from integrations.llama import HARDWARE
from spillway import GroupStats, OptimizerStats, Session, StepStats, UsageError
from spillway.integrations.loggers import log, scalars
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


class Run:
    """A W&B run, as far as it logs."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((data, step))


class Html:
    """``wandb.Html``, which reads the file as it is made."""

    def __init__(self, data: str, inject: bool = True) -> None:
        self.html = Path(data).read_text(encoding="utf-8")


@pytest.fixture
def planned() -> Iterator[spillway.Attached]:
    model = torch.nn.Sequential(*(Block(16) for _ in range(2)))
    with Session() as session, spillway.attach(model, budget="100GiB", hardware=HARDWARE, session=session) as attached:
        for _ in range(6):
            model(torch.randn(4, 16)).sum().backward()
        assert attached.plan is not None
        yield attached


def test_one_line_logs_to_tensorboard(tmp_path: Path, planned: spillway.Attached) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        log(STATS, writer, 3)
        log(STATS, writer, 4)
        log(planned, writer, 5, prefix="model/", report=True)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {*scalars(STATS), *scalars(planned, prefix="model/")}
    group = events.Scalars("spillway/group/mlp/saved_bytes")
    assert [(event.step, event.value) for event in group] == [(3, 4.0), (4, 4.0)]
    [report] = events.Tensors("model/report/text_summary")
    assert report.step == 5
    text = report.tensor_proto.string_val[0].decode()
    assert all(line.startswith("    ") for line in text.splitlines() if line)
    assert [line.removeprefix("    ") for line in text.splitlines()] == planned.explain().splitlines()


def test_one_line_logs_to_a_run_of_wandb(planned: spillway.Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    wandb = ModuleType("wandb")
    wandb.Html = Html  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = Run()
    log(STATS, run, 3)
    log(STATS, run)
    log(planned, run, 5, prefix="model/", report=True)
    assert run.logged[:2] == [(scalars(STATS), 3), (scalars(STATS), None)]
    numbers, step = run.logged[2]
    page = numbers.pop("model/report")
    expected = scalars(planned, prefix="model/")
    # On the CPU the peak is the process's, which has drawn a page meanwhile.
    assert [each.pop("model/peak_bytes") > 0 for each in (numbers, expected)] == [True, True]
    assert (numbers, step) == (expected, 5)
    assert page.html.startswith("<!DOCTYPE html>") and "Spillway" in page.html


def test_a_logger_or_a_report_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"to: got .*expected a SummaryWriter"):
        log(STATS, print)
    run = Run()
    with pytest.raises(UsageError, match=r"report=True: got StepStats"):
        log(STATS, run, report=True)
    with Session() as session, spillway.attach(torch.nn.Sequential(Block(16), Block(16)), session=session) as attached:
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(UsageError, match="install wandb"):
            log(attached, run, report=True)
        wandb = ModuleType("wandb")
        wandb.Html = Html  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        with pytest.raises(UsageError, match="there is no plan"):
            log(attached, run, report=True)
    assert run.logged == []
