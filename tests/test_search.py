"""The search for a plan: its steps, its lines in the log, and the comparison with torch's own checkpointing."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, cycle, groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from allocations import ExactMemory, NoMemory, count_exactly
from budgets import KINDS, NAMED, STAGES, Kind, attached_to, budget_of, hardware, one_step, search
from spillway import BudgetError, Session
from spillway.attaching import collector
from spillway.attaching import search as searching
from spillway.attaching.budget import BudgetTarget, Planner
from spillway.attaching.collector import Stage
from spillway.attaching.ranks import RankGroup
from spillway.attaching.search import PlanSearch, PlanTimer, is_same
from spillway.planner.plan import ANY_RATES, Plan, uniform_program
from spillway.planner.profile import HostTimes
from spillway.planner.timeline import simulate_program
from spillway.profiler import meter, step_trace
from spillway.profiler.step_trace import Place, StepTrace, StepTracer
from spillway.types import Decision
from spillway.units import format_bytes
from steps import Block, failing

MiB = 1 << 20
MOST_STEPS = 6


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    count_exactly(monkeypatch, lambda: 16 * MiB)


@pytest.fixture(autouse=True)
def _as_the_table_says(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a test does, a stage is followed by one that NOTE [ Stages of a search ] names. Searches may begin."""
    rows = [line.split("|")[1:4:2] for line in str(collector.__doc__).splitlines() if line.startswith("| ``")]
    named = [[re.findall("``([A-Z_]+)``", cell) for cell in row] for row in rows]
    table = {(Stage[one].value, Stage[other].value) for here, then in named for one in here for other in then}
    with caplog.at_level(logging.INFO, logger="spillway.attach"):
        yield
    said = [each.getMessage().rpartition(": ")[2] for each in caplog.get_records("call") if each.args]
    odd = {pair for pair in pairwise(said) if pair[1] != Stage.PROFILING_OPERATORS.value} - table
    assert not odd, odd


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.covered
def test_a_search_takes_at_most_six_steps_and_logs_its_stages(
    kind: Kind, share: float, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    model, batch = kind.model(), kind.batch()
    budget = budget_of(spillway.profile(model, batch, session=session), share) + 5 * MiB // 2
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="spillway.attach"), attached_to(model, budget, session) as attached:
        stages = search(model, batch, attached)
    *steps, last = stages
    assert last == "active" and len(steps) <= MOST_STEPS, stages
    said = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert [stage for stage in STAGES if stage in said] == STAGES
    assert said[:4] == STAGES[:4] and said[-1] == "active"
    assert attached.measured is not None and attached.measured.peak_bytes <= budget


def test_where_the_cpu_is_timed_a_step_begins_on_an_idle_device(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(meter.Meter, "wait", lambda self: waits.append(1))
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    with attached_to(model, "8GiB", session) as attached:
        told = []
        while attached.stage != "active":
            before = len(waits)
            one_step(model, batch)
            told.append((str(attached.stage), len(waits) - before))
    # The stage is that of the step that has just been made.
    assert {stage for stage, count in told if count} == {"profiling time"}, told


@pytest.mark.parametrize(("own", "plain"), [(2.0, 2.0), (9.0, 5.0)], ids=["as measured", "no longer than with ours"])
def test_the_cpu_time_of_a_block_is_that_of_its_fastest_call(
    own: float, plain: float, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    kind = NAMED["mlp"]
    spans = {"forward": 5.0, "again": 6.0, "back": 0.5, "ran": 1.5}

    def host_seconds(self: StepTrace, since: Place, until: Place) -> float:
        what, number = since
        number = self.replays[number] if what in ("again", "ran") else number
        return spans.get(what, 0.0) + 0.001 * number

    monkeypatch.setattr(StepTrace, "host_seconds", host_seconds)
    ran = StepTracer.block_ran
    monkeypatch.setattr(StepTracer, "block_ran", lambda self, number, _: ran(self, number, own + 0.001 * number))
    host = spillway.profile(kind.model(), kind.batch(), session=session).kinds[0].host
    # The first call is the fastest. Its backward comes before and after its replay.
    assert host == HostTimes(plain=plain, checkpointed=5.0, replay=6.0, backward=0.5 + 1.5)


@pytest.mark.parametrize("is_weighed_shorter", [True, False])
def test_the_shorter_cpu_time_of_two_steps_counts(
    is_weighed_shorter: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of them the CPU may have waited for a full queue."""
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    # Only the step whose memory is measured notes what backward asks for.
    monkeypatch.setattr(
        StepTrace, "host_seconds", lambda self, since, until: 1.0 if bool(self.asked) is is_weighed_shorter else 50.0
    )
    kind = NAMED["mlp"]
    profile = spillway.profile(kind.model(), kind.batch(), session=session)
    host = profile.kinds[0].host
    assert host is not None
    assert 0 < profile.middle.host_seconds < 50 and 0 < profile.before.host_seconds < 50
    assert all(0 < seconds < 50 for seconds in (host.checkpointed, host.replay, host.backward))


# Torch's own checkpointing


def test_torchs_checkpointing_may_take_the_whole_budget_and_be_predicted_a_hundredth_above_it(
    session: Session,
) -> None:
    profile = spillway.Profile.load(Path(__file__).parent / "planner" / "llama_8b_block.json")
    profile = replace(profile, calls=profile.calls[:8])
    peak = simulate_program(uniform_program(profile, Decision.RECOMPUTE), ANY_RATES).peak_bytes
    planner = Planner(torch.device("cpu"), session, "h200", allow={"keep", "recompute"})
    plan = planner.checkpointing_plan(profile, peak, RankGroup())
    assert plan is not None
    assert plan.predicted_peak == peak
    assert all(block.recomputes for block in plan.blocks)
    close = planner.checkpointing_plan(profile, math.ceil(peak / 1.01), RankGroup())
    assert close is not None
    assert close.predicted_peak == peak > close.budget == math.ceil(peak / 1.01)
    assert planner.checkpointing_plan(profile, int(peak / 1.011), RankGroup()) is None
    # Plans that offload leave some of the budget.
    failing(BudgetError, lambda: planner.plan(profile, BudgetTarget(peak), RankGroup()))
    only_keeps = Planner(torch.device("cpu"), session, "h200", allow={"keep", "host"})
    assert only_keeps.checkpointing_plan(profile, peak, RankGroup()) is None


def deep() -> tuple[nn.Module, Tensor]:
    """A model whose blocks' inputs are most of what checkpointing keeps, and a batch."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(12))), torch.randn(2048, 64)


def attached_deep(model: nn.Module, budget: int, session: Session, **options: Any) -> spillway.Attached:
    options = {"blocks": Block, "hardware": hardware(), "min_bytes": "64KiB", "session": session, **options}
    return spillway.attach(model, budget=budget, **options)


class Between(nn.Module):
    """A part of the model that is no block, and saves many times its input."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(16):
            x = x.sin()
        return x


def parted() -> tuple[nn.Module, Tensor]:
    """Large blocks before small ones, between two of which the model saves more, and a batch."""
    torch.manual_seed(0)
    large, small = ([Block(64) for _ in range(count)] for count in (4, 6))
    return nn.Sequential(nn.Linear(64, 64), *large, Part(), *small[:4], Between(), *small[4:]), torch.randn(8192, 64)


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1024].clone()


def checkpointing_peaks(
    session: Session, make: Callable[[], tuple[nn.Module, Tensor]] = deep, room: float = 1.02
) -> tuple[int, int]:
    """The predicted and the measured peak of a step of a model under checkpointing."""
    model, batch = make()
    profile = spillway.profile(model, batch, blocks=Block, session=session)
    predicted = simulate_program(uniform_program(profile, Decision.RECOMPUTE), ANY_RATES).peak_bytes
    with attached_deep(model, int(room * predicted), session, allow={"keep", "recompute"}) as attached:
        search(model, batch, attached)
        assert attached.plan is not None and all(block.recomputes for block in attached.plan.blocks)
        assert attached.measured is not None
        return predicted, attached.measured.peak_bytes


@functools.cache
def deep_peak() -> int:
    """The larger of the two of :func:`deep`."""
    with Session() as session:
        return max(checkpointing_peaks(session))


def test_what_is_saved_between_two_blocks_is_released_between_their_backwards(session: Session) -> None:
    predicted, measured = checkpointing_peaks(session, parted, room=1.004)
    assert predicted == pytest.approx(measured, rel=0.02)


def test_a_budget_of_checkpointings_peak_is_met_by_checkpointing(session: Session) -> None:
    # Steps differ by a few small tensors.
    budget = deep_peak() + 1024
    model, batch = deep()
    expected = one_step(deep()[0], batch)
    with attached_deep(model, budget, session, allow={"keep", "recompute"}) as attached:
        search(model, batch, attached)
        assert attached.plan is not None and attached.measured is not None
        assert all(block.recomputes for block in attached.plan.blocks)
        # More than other plans may take.
        assert BudgetTarget(budget).nbytes < attached.plan.predicted_peak
        assert attached.measured.peak_bytes <= budget
        assert all(map(torch.equal, one_step(model, batch), expected))


def test_if_checkpointing_takes_more_than_predicted_the_next_plan_is_for_the_same_bytes(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = int(1.2 * deep_peak())
    validate = PlanSearch.validate

    def is_checkpointing(self: PlanSearch) -> bool:
        assert self.plan is not None
        return all(block.recomputes and not block.operators for block in self.plan.blocks)

    def above(self: PlanSearch, peak: int, trace: StepTrace | None, *, learned: bool) -> Stage | None:
        assert self.budget is not None
        peak = int(1.01 * self.budget) if is_checkpointing(self) else min(peak, self.budget)
        return validate(self, peak, trace, learned=learned)

    monkeypatch.setattr(PlanSearch, "validate", above)
    model, batch = deep()
    expected = one_step(deep()[0], batch)
    with attached_deep(model, budget, session, allow={"keep", "recompute"}) as attached:
        # It costs nothing in prediction, and all else does.
        monkeypatch.setattr(searching, "_CLOSE", 1e9)
        while attached.stage != "active":
            assert all(map(torch.equal, one_step(model, batch), expected))
        found = attached._search
        assert found is not None
        assert not is_checkpointing(found)
        assert found.target is not None and found.target.nbytes == BudgetTarget(budget).nbytes
        assert [note for note in attached.notes if "another plan next" in note]
        assert all(map(torch.equal, one_step(model, batch), expected))


@pytest.mark.parametrize(("above", "is_taken"), [(1 / 1001, True), (1 / 999, False)])
def test_checkpointing_may_be_above_the_budget_by_the_rounding_of_cached_blocks(
    above: float, is_taken: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(NoMemory, "free_cached", lambda self: (freed.append(True), True)[1])
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    validate = PlanSearch.validate

    def rounded(self: PlanSearch, peak: int, trace: StepTrace | None, *, learned: bool) -> Stage | None:
        assert self.budget is not None
        if self._is_latest(self._checkpointing(self._profiled)):
            peak = self.budget + int(self.budget * above)
        return validate(self, peak, trace, learned=learned)

    monkeypatch.setattr(PlanSearch, "validate", rounded)
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    budget = budget_of(spillway.profile(model, batch, session=session), 0.6) + MiB
    with attached_to(model, budget, session) as attached:
        assert len(search(model, batch, attached)) - 1 <= MOST_STEPS
        found = attached._search
        assert found is not None
        assert (found.timer is not None) is is_taken
        assert freed == [True] * is_taken
        assert any("took more than the budget" in note for note in attached.notes) is not is_taken


@pytest.mark.parametrize(
    ("part", "other_steps", "stays"),
    [(1001, 20, True), (1001, 3, False), (999, 20, False)],
    ids=["seldom", "soon again", "by more"],
)
def test_an_active_plan_of_checkpointing_may_be_above_the_budget_by_the_rounding_of_cached_blocks(
    part: int, other_steps: int, stays: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    monkeypatch.setattr(NoMemory, "free_cached", lambda self: (freed.append(True), True)[1])
    budget = deep_peak() + 1024
    model, batch = deep()
    expected = one_step(deep()[0], batch)
    with attached_deep(model, budget, session, allow={"keep", "recompute"}) as attached:
        search(model, batch, attached)
        plan, above = attached.plan, budget + budget // part
        assert plan is not None and all(block.recomputes for block in plan.blocks)
        one_step(model, batch)
        for peak in (above, *([0] * other_steps), above, 0):
            monkeypatch.setattr(NoMemory, "peak", lambda self, peak=peak: peak)
            if stays:
                assert all(map(torch.equal, one_step(model, batch), expected))
                continue
            try:
                assert all(map(torch.equal, one_step(model, batch), expected))
            except BudgetError:
                # No plan takes less.
                break
        assert any("cached blocks were freed" in note for note in attached.notes) is (part == 1001)
        said = [note for note in attached.notes if "over the budget" in note]
        assert bool(said) is not stays, said
        assert len(freed) == (0 if part == 999 else 2 if stays else 1)


@pytest.mark.parametrize("over", [False, True], ids=["within the budget", "over the budget"])
def test_on_an_accelerator_torchs_checkpointing_is_validated_beside_a_plan(
    over: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    expected = one_step(kind.model(), batch)
    budget = budget_of(spillway.profile(model, batch, session=session), 0.6) + MiB
    with attached_to(model, budget, session) as attached:
        plans, stages = [], []
        while attached.stage != "active":
            found = attached._search
            assert found is not None
            target = found.target
            assert target is not None
            with monkeypatch.context() as patch:
                if over and len(plans) == 2 and stages[-1] == "validating":
                    # The step that has just been made is judged when the next one begins.
                    patch.setattr(target, "budget", 1)
                assert all(map(torch.equal, one_step(model, batch), expected))
            stages.append(attached.stage)
            if attached.plan is not None and attached.plan not in plans:
                plans.append(attached.plan)
        first, checkpointing = plans
        assert attached.plan is first
        assert all(block.recomputes for block in checkpointing.blocks)
        assert attached._search is not None and (attached._search.timer is None) is over
        notes = [note for note in attached.notes if "torch's own checkpointing" in note]
        assert ["took more than the budget" in note for note in notes] == [True] * over
        assert len(stages) - 1 <= MOST_STEPS, stages
        for _ in range(3):
            assert all(map(torch.equal, one_step(model, batch), expected))
        assert attached.stage == "active"


def runs_as_torch_does(found: PlanSearch) -> bool:
    """Whether the latest plan is that of torch's own checkpointing."""
    assert found.plan is not None
    return all(block.recomputes and not block.operators for block in found.plan.blocks)


@contextmanager
def timed_in_turn(
    session: Session, monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, float]
) -> Iterator[tuple[Any, nn.Module, Any]]:
    """A model with an active plan. ``seconds`` of a step by it and by torch's checkpointing."""
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    budget = budget_of(spillway.profile(model, batch, session=session), 0.6) + MiB
    clock = [0.0]
    monkeypatch.setattr(PlanTimer, "_now", lambda self: clock[0])
    with attached_to(model, budget, session) as attached:
        search(model, batch, attached)
        found = attached._search
        assert found is not None and found.timer is not None

        def passes(*_: object) -> None:
            clock[0] += seconds[runs_as_torch_does(found)]

        model.register_forward_hook(passes)
        yield attached, model, batch


@pytest.mark.parametrize("seconds", [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)], ids=str)
@pytest.mark.covered
def test_two_plans_are_timed_in_turn_while_one_is_active(
    seconds: tuple[float, float], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_step(NAMED["mlp"].model(), NAMED["mlp"].batch())
    with timed_in_turn(session, monkeypatch, seconds) as (attached, model, batch):
        found = attached._search
        plans = []
        for _ in range(24):
            assert all(map(torch.equal, one_step(model, batch), expected))
            assert attached.stage == "active"
            plans.append(runs_as_torch_does(found))
        first = plans[0]
        faster = first if seconds[0] == seconds[1] else seconds[1] < seconds[0]
        runs = [len(list(run)) for _, run in groupby(plans)]
        # The search ends with the first step of the first run. The last run is by the other plan.
        assert len(runs) == (5 if faster is first else 4), runs
        assert runs[0] >= 3 and all(run >= 4 for run in runs[1:]), runs
        assert found.timer is None and plans[-4:] == [faster] * 4
        assert [note for note in attached.notes if "in turn took" in note]
        assert attached.measured.peak_bytes <= found.budget


def test_steps_of_another_size_are_not_compared(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_in_turn(session, monkeypatch, (1.0, 1.0)) as (attached, model, batch):
        found = attached._search
        smaller = batch[: len(batch) // 2]
        for number in range(searching._MOST_TIMED + 1):
            one_step(model, smaller if number % 3 == 2 else batch)
            assert not runs_as_torch_does(found)
        assert found.timer is None
        assert not [note for note in attached.notes if "in turn took" in note]


def test_a_step_above_the_budget_ends_the_comparison(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    with timed_in_turn(session, monkeypatch, (1.0, 1.0)) as (attached, model, batch):
        found = attached._search
        one_step(model, batch)
        with monkeypatch.context() as patch:
            patch.setattr(found.memory, "peak", lambda: found.budget + 1)
            one_step(model, batch)
        assert found.timer is None


def test_if_an_active_plan_of_checkpointing_is_above_the_budget_it_is_not_taken_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    monkeypatch.setattr(searching, "_CLOSE", 1e9)
    budget = int(1.2 * deep_peak())
    model, batch = deep()
    with attached_deep(model, budget, session, allow={"keep", "recompute"}) as attached:
        search(model, batch, attached)
        found = attached._search
        assert found is not None
        first = found.plan
        assert first is not None and all(block.recomputes and not block.operators for block in first.blocks)
        with monkeypatch.context() as patch:
            # The next step judges the one before.
            patch.setattr(found.memory, "peak", lambda: budget + 1)
            one_step(model, batch)
        for _ in range(8):
            one_step(model, batch)
        assert attached.stage == "active"
        assert found.plan is not None and not is_same(found.plan, first)
        assert found.target is not None and found.target.nbytes == BudgetTarget(budget).nbytes


@pytest.mark.parametrize(
    ("worth", "above", "plans", "smaller"), [(1.05, 2, 3, 2), (1e-9, 9, 5, 3), (1e9, 9, 3, 1)], ids=str
)
def test_after_two_plans_above_the_budget_a_smaller_one_or_torchs_checkpointing_is_next(
    session: Session, monkeypatch: pytest.MonkeyPatch, worth: float, above: int, plans: int, smaller: int
) -> None:
    """``above``: plans that are above the budget, if they are not torch's own checkpointing.

    Of those that back off, ``smaller`` ran. One that never ran leaves neither a note nor a smaller target.
    """
    validate = PlanSearch.validate
    tried: list[Plan] = []

    def recomputes_all(plan: Plan) -> bool:
        return all(block.recomputes and not block.operators for block in plan.blocks)

    def judged(self: PlanSearch, peak: int, trace: StepTrace | None, *, learned: bool) -> Stage | None:
        assert self.budget is not None and self.plan is not None
        if all(self.plan is not each for each in tried):
            tried.append(self.plan)
        is_above = len(tried) <= above and not recomputes_all(self.plan)
        return validate(self, self.budget + 1 if is_above else min(peak, self.budget), trace, learned=learned)

    monkeypatch.setattr(PlanSearch, "validate", judged)
    monkeypatch.setattr(searching, "_WORTH", worth)
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    expected = one_step(kind.model(), batch)
    budget = budget_of(spillway.profile(model, batch, session=session), 0.7) + 4 * MiB
    with attached_to(model, budget, session) as attached:
        while attached.stage != "active":
            assert all(map(torch.equal, one_step(model, batch), expected))
        assert len(tried) == plans
        assert attached.plan == tried[-1]
        ends_so = ["torch's own checkpointing next" in note for note in attached.notes]
        assert recomputes_all(tried[-1]) is ends_so[-1] is (above > 2)
        assert sum(ends_so) == (above > 2)
        assert sum("planned again for" in note for note in attached.notes) == smaller
        assert attached._search is not None and attached._search.target is not None  # type: ignore[union-attr]
        assert attached._search.target.corrections == smaller


@pytest.mark.parametrize(("share", "is_noted"), [(1.0, True), (0.8, False)])
def test_a_plan_that_fills_a_gpu_is_noted(
    session: Session, monkeypatch: pytest.MonkeyPatch, share: float, is_noted: bool
) -> None:
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    budget = budget_of(spillway.profile(model, batch, session=session), 0.7) + 4 * MiB
    for memory in (ExactMemory, NoMemory):
        monkeypatch.setattr(memory, "total", lambda self: int(budget / share))
    with attached_to(model, budget, session) as attached:
        search(model, batch, attached)
        assert attached.stage == "active"
        filled = [note for note in attached.notes if "the plan fills" in note]
        assert len(filled) == is_noted
        assert not filled or f"a budget of {format_bytes(int(0.9 * int(budget / share)))}" in filled[0]


def test_a_plan_that_recomputes_nothing_is_not_timed_beside_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    kind = NAMED["mlp"]
    model, batch = kind.model(), kind.batch()
    with attached_to(model, "8GiB", session) as attached:
        assert len(search(model, batch, attached)) == MOST_STEPS
        # Stages after the first keep it: blocks that are told again forget the order of backward.
        assert attached._root.controller is not None and attached._root.controller.applied.count == 1
        assert attached.plan is not None and all(block.plain for block in attached.plan.blocks)


class Slower(RankGroup):
    """Two ranks, of which the other one takes so many seconds for a step by each of two plans, in turn."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = cycle(seconds)
        self.learns = True

    def share(self, what: str, make: Callable[[], Any]) -> list[Any]:
        mine = make()
        if what == "seconds":
            return [mine, next(self.seconds)]
        self.learns, learns = False, self.learns
        return [mine, (mine[0], learns)]


def test_of_several_ranks_the_slowest_decides_which_plan_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Any = (("first", None), ("second", None))
    for seconds, faster in (((3.0, 1.0), "second"), ((1.0, 3.0), "first")):
        clock = count()
        monkeypatch.setattr(PlanTimer, "_now", lambda self, clock=clock: float(next(clock)))
        found = PlanTimer(plans, torch.device("cpu"), Slower(*seconds))
        steps = 0
        while not found.is_done:
            found.step_ended(64, learned=False)
            steps += 1
        assert found.chosen[0] == faster
        # In the first step the other rank learned.
        assert steps == 17
