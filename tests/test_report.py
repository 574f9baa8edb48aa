"""``Attached.report``: the plan of a model that trains, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from allocations import count_exactly
from budgets import NAMED, WIDTH, attached_to, budget_of, hardware, one_step, search
from spillway import Attached, Session, UsageError
from spillway.planner.report.facts import Facts, facts_of
from spillway.planner.report.text import to_text
from spillway.planner.tasks import in_words
from steps import Block, MiB

pytest.importorskip("plotly", reason="the page is drawn by plotly")


@pytest.fixture(autouse=True)
def resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has beside a step is the same in all of them."""
    count_exactly(monkeypatch, lambda: 16 * MiB)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session


def test_a_report_is_of_the_plan_and_of_the_step_that_was_measured(session: Session, tmp_path: Path) -> None:
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    budget = budget_of(spillway.profile(model, batch, session=session), 0.5) + 5 * MiB // 2
    page, trace = tmp_path / "plan.html", tmp_path / "step.json"
    with attached_to(model, budget, session) as attached:
        with pytest.raises(UsageError, match="report: there is no plan"):
            attached.report(page)
        assert not page.exists()
        search(model, batch, attached)
        attached.report(page, trace=trace, curve=True)
        plan, measured = attached.plan, attached.measured
    assert plan is not None and measured is not None
    text = page.read_text(encoding="utf-8")
    assert "Predicted and measured" in text and "Other budgets" in text
    for words in (f"{measured.seconds * 1e3:.1f} ms", f"{measured.peak_bytes / MiB:.1f} MiB"):
        assert words in text
    assert all(f'data-value="{block.name}"' in text for block in plan.blocks)
    # The simulation is that of the machine that was planned for.
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert max(ends) == pytest.approx(plan.predicted_seconds * 1e6)
    with pytest.raises(UsageError, match=r"path: .* cannot be written \(no such folder"):
        attached.report(tmp_path / "gone" / "plan.html")


def test_what_has_no_plan_of_its_own_has_no_report(session: Session, tmp_path: Path) -> None:
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    with spillway.attach(model, session=session) as attached, pytest.raises(UsageError, match="there is no plan"):
        attached.report(tmp_path / "plan.html")
    plan = spillway.plan(spillway.profile(model, batch, session=session), budget="1TiB", hardware=hardware())
    with spillway.attach(model, plan=plan, session=session) as attached:
        one_step(model, batch)
        with pytest.raises(UsageError, match=r"the plan was given.*spillway report profile.json plan.json"):
            attached.report(tmp_path / "plan.html")
    assert not list(tmp_path.glob("*.html"))


def facts(attached: spillway.Attached) -> Facts:
    """The numbers of its report."""
    search, plan, profile = attached._search, attached.plan, attached.profile
    assert search is not None and plan is not None and profile is not None
    return facts_of(profile, plan, search.planner.hardware, measured=attached.measured)


@contextmanager
def attached_mlp(
    session: Session, share: float, more: int = 0, allow: tuple[str, ...] = ("keep", "recompute")
) -> Iterator[tuple[nn.Module, Tensor, Attached]]:
    """A model of four blocks, within a share of its memory and ``more`` bytes."""
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    budget = budget_of(spillway.profile(model, batch, session=session), share) + 5 * MiB // 2 + more
    limits: dict[str, Any] = {"hardware": hardware(), "min_bytes": "64KiB", "allow": allow}
    with spillway.attach(model, budget=budget, session=session, **limits) as attached:
        yield model, batch, attached


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_measured_line_is_that_of_the_planned_layers(session: Session, share: float) -> None:
    with attached_mlp(session, share) as (model, batch, attached):
        search(model, batch, attached)
        found = facts(attached)
    tasks, measured = found.measured_tasks, attached.measured
    assert measured is not None and max(task.peak for task in tasks) == measured.peak_bytes
    assert [task.name for task in measured.tasks].count("after the blocks") == 1
    again = [task.name for task in tasks if task.name.endswith("recomputation")]
    assert len(again) == sum(block.recomputes for block in found.plan.blocks) and bool(again) == (share < 1)
    blocks = [block.name for block in found.plan.blocks]
    assert [task.name for task in tasks if task.name not in again] == [
        "before the blocks",
        *(f"{name} forward" for name in blocks),
        "head and loss",
        *(f"{name} backward" for name in reversed(blocks)),
        "after the blocks",
    ]
    dynamic = found.timeline.peak_bytes - 16 * MiB
    # Which part is recomputed depends on measured times. Some parts need a little more than predicted.
    off = 0.1 if share == 0.3 else 0.02
    differences = {task.name: task.difference / dynamic for task in tasks}
    assert all(abs(each) < off for each in differences.values()), differences
    # Only gradients are left: the next call of the model begins after zero_grad().
    assert abs(tasks[-1].level - 16 * MiB) < 0.02 * dynamic


def test_a_first_block_whose_input_has_no_gradient_ends_with_the_step(session: Session) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Block(WIDTH) for _ in range(3))), torch.randn(1024, WIDTH)
    limits: dict[str, Any] = {"hardware": hardware(), "min_bytes": "64KiB", "allow": ("recompute",)}
    with spillway.attach(model, blocks="*", budget="1GiB", session=session, **limits) as attached:
        search(model, batch, attached)
        tasks = facts(attached).measured_tasks
    assert [task.name for task in tasks[-3:]] == ["0 recomputation", "0 backward", "after the blocks"]
    assert tasks[-1].peak == tasks[-1].level == tasks[-2].level


def test_the_measured_line_shows_a_tensor_that_a_block_holds_beside_the_plan(session: Session) -> None:
    held: list[Tensor] = []
    more = 4 * MiB
    with attached_mlp(session, 1.0, more) as (model, batch, attached):
        block = model.get_submodule("2")

        def hold(*_: object) -> None:
            if attached.stage == "validating":
                held.append(torch.empty(more, dtype=torch.uint8))

        def release(*_: object) -> None:
            held.clear()

        with block.register_forward_hook(hold), block.register_full_backward_hook(release):
            search(model, batch, attached)
        found = facts(attached)
    names = [task.name for task in found.measured_tasks]
    first, last = names.index("2 forward"), names.index("1 backward")
    dynamic = found.timeline.peak_bytes - 16 * MiB
    for place, task in enumerate(found.measured_tasks):
        # The forward's own peak may have come before its end, when the hook runs.
        if place == first:
            assert task.level > found.measured_tasks[place - 1].level + more
        elif place not in range(last - 2, last + 1):
            extra = more if first < place < last else 0
            assert abs(task.difference - extra) < 0.02 * dynamic, task
    assert found.worst_task is not None and found.worst_task.name in names[first + 1 : last]
    assert f"most apart: {in_words(found.worst_task.name)}" in " ".join(to_text(found).split())


def test_a_second_backward_has_no_measured_line(session: Session) -> None:
    with attached_mlp(session, 1.0, allow=("recompute",)) as (model, batch, attached):
        while attached.stage != "active":
            loss = model(batch).square().mean()
            loss.backward(retain_graph=attached.stage == "validating")
            if attached.stage == "validating":
                loss.backward()
            model.zero_grad()
        found = facts(attached)
    assert found.measured is not None and found.measured.tasks and not found.measured_tasks
    assert "had other tasks than the plan" in found.measured_sentences[1]


def test_micro_batches_and_an_evaluation_between_steps_are_no_part_of_the_line(session: Session) -> None:
    with attached_mlp(session, 1.0, 8 * MiB) as (model, batch, attached):
        large = batch.repeat(8, 1)
        while attached.stage != "active":
            for part in batch.chunk(2):
                model(part).square().mean().backward()
            model.zero_grad()
            model.eval()
            with torch.no_grad():
                model(large)
            model.train()
        found = facts(attached)
    assert found.measured_tasks[-1].name == "after the blocks"
    dynamic = found.timeline.peak_bytes - 16 * MiB
    assert all(abs(task.difference) < 0.05 * dynamic for task in found.measured_tasks), found.measured_tasks


def test_only_the_active_plan_has_its_measured_step_in_the_report(session: Session, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    with attached_mlp(session, 0.5) as (model, batch, attached):
        search(model, batch, attached)
        attached.report(page)
        assert "Predicted and measured" in page.read_text(encoding="utf-8")
        # Larger inputs have another plan, which is not measured yet.
        one_step(model, batch[:1].expand(2100, -1))
        assert attached.stage == "warming up" and attached.measured is not None
        attached.report(page)
        assert "Predicted and measured" not in page.read_text(encoding="utf-8")


def test_a_step_with_a_measured_line_has_the_bits_and_the_hooks_of_another_one(session: Session) -> None:
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    wanted = [one_step(model, batch) for _ in range(8)]
    with attached_mlp(session, 0.3) as (model, batch, attached):
        got = [one_step(model, batch) for _ in range(8)]
        assert facts(attached).measured_tasks
        tracing = attached._controller.collector.tracing  # type: ignore[union-attr]
        assert tracing.tracer is None
    assert all(torch.equal(*pair) for pairs in zip(got, wanted, strict=True) for pair in zip(*pairs, strict=True))
