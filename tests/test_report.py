"""``Attached.report``: the plan of a model that trains, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import spillway
from allocations import count_exactly
from budgets import NAMED, attached_to, budget_of, hardware, one_step, search
from spillway import Session, UsageError
from steps import MiB

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
