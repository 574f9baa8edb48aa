"""Plans that choose which weights are streamed: ``stream="auto"``."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import spillway
from allocations import count_exactly
from parameters.test_planned import BLOCKS, FROZEN_OR_TRAINED, HARDWARE, STATIC, Training, same, training
from runtime.scenarios import adversary_session
from spillway import BudgetError, Plan, Profile, TierFullError, UsageError
from spillway.attaching import meta_profile
from spillway.attaching import search as searching
from spillway.parameters import streamed as streaming
from spillway.parameters.homes import StreamedParameter
from spillway.parameters.streamed import StreamedModel
from spillway.planner.plan import uniform_program
from spillway.planner.planner import make_curve, make_plan, planning_rates, spread, with_weights
from spillway.planner.timeline import simulate_program
from spillway.profiler import step_trace
from spillway.saved_tensors.identity import is_streamed
from spillway.types import Decision
from support import assert_nothing_left

NAMES = tuple(f"layers.{number}" for number in range(BLOCKS))
SLOW = replace(HARDWARE, bandwidths=(replace(HARDWARE.bandwidths[0], back=1e8),))
"""A link on which copies of weights take longer than anything else."""


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that stay on the device are among the bytes that a step begins with."""
    models: weakref.WeakSet[StreamedModel] = weakref.WeakSet()
    place = StreamedModel.place

    def noted(self: StreamedModel, resident: Any) -> None:
        models.add(self)
        place(self, resident)

    monkeypatch.setattr(StreamedModel, "place", noted)
    count_exactly(monkeypatch, lambda: STATIC + sum(each.resident_bytes for each in models))


def attached_to(loop: Training, budget: int, **options: Any) -> spillway.Attached:
    return loop.attach(stream="auto", budget=budget, **{"hardware": SLOW, **options})


def profile_of(**options: Any) -> Profile:
    with training(is_trained=True, **options) as loop, attached_to(loop, 1 << 30) as attached:
        loop.search(attached)
        assert attached.profile is not None
        return attached.profile


def test_the_more_memory_there_is_the_more_weights_stay() -> None:
    profile = profile_of(width=128)
    weights = sum(profile.calls[0].streamed)
    limits: dict[str, Any] = {"window": 1 << 16, "allow": {"keep", "recompute"}}
    with pytest.raises(BudgetError) as error:
        make_plan(profile, SLOW, budget=0, **limits)
    least = error.value.least
    budgets = [least + count * weights for count in range(0, BLOCKS + 1, 2)]
    plans = [make_plan(profile, SLOW, budget=budget, places_weights=True, **limits) for budget in budgets]
    counts = [len(plan.resident) for plan in plans]
    assert counts[0] < counts[-1] == BLOCKS and len(set(counts)) > 2
    for budget, plan in zip(budgets, plans, strict=True):
        streamed = make_plan(profile, SLOW, budget=budget, **limits)
        assert plan.predicted_peak <= budget and streamed.resident == ()
        assert plan.predicted_seconds <= 1.001 * streamed.predicted_seconds
        step = spillway.simulate(profile, plan, hardware=SLOW)
        assert (step.peak_bytes, step.seconds) == (plan.predicted_peak, plan.predicted_seconds)
        assert Plan.from_json(plan.to_json()) == plan
    assert plans[-1].predicted_seconds < plans[0].predicted_seconds
    assert f"weights: those of {BLOCKS} blocks stay on the GPU" in str(plans[-1])


@FROZEN_OR_TRAINED
def test_a_profile_without_the_hardware_has_the_bytes_of_a_measured_one(
    is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_profile, "MIN_BYTES", 1 << 18)
    options: dict[str, Any] = {"hardware": HARDWARE, "optimizer": "offloaded" if is_trained else torch.optim.AdamW}
    with training(is_trained=is_trained, width=256, rows=256, window="2MiB") as loop:
        found, resident = (
            spillway.profile(loop.model, torch.empty(256, 4), device="cpu", blocks="layers.*", **options, **more)
            for more in ({"stream": "auto"}, {})
        )
        named = spillway.profile(loop.model, torch.empty(256, 4), device="cpu", stream="layers.*", **options)
        with loop.attach(stream="auto", budget=1 << 31, min_bytes=1 << 18) as attached:
            loop.search(attached)
            measured = attached.profile
    assert measured is not None and named == found
    assert [call.streamed for call in found.calls] == [call.streamed for call in measured.calls]
    assert all(call.streamed for call in found.calls) and not any(call.streamed for call in resident.calls)
    weights = sum(sum(call.streamed) for call in found.calls)
    assert resident.static_bytes - found.static_bytes == weights
    assert [each.nbytes for each in found.kinds[0].parameters] == [each.nbytes for each in measured.kinds[0].parameters]
    limits: dict[str, Any] = {"hardware": HARDWARE, "allow": {"keep", "recompute"}, "window": "2MiB"}
    kept, recomputed = (
        [spillway.plan(each, budget=each.static_bytes + (room << 20), **limits) for each in (found, measured)]
        for room in (250, 18)
    )
    for plans, off in ((kept, 0.005), (recomputed, 0.1)):
        first, second = (
            plan.predicted_peak - profile.static_bytes for plan, profile in zip(plans, (found, measured), strict=True)
        )
        assert abs(first / second - 1) < off, (first, second)
    placed = spillway.plan(found, budget=found.static_bytes + (250 << 20), stream="auto", **limits | {"hardware": SLOW})
    assert placed.resident == NAMES


def test_gradients_that_are_offloaded_are_held_until_their_copies_end() -> None:
    peaks = []
    for bandwidth in (1e15, 1e4):
        hardware = replace(HARDWARE, bandwidths=(replace(HARDWARE.bandwidths[0], out=bandwidth),))
        with training(is_trained=True, width=512, rows=16) as loop:
            options: dict[str, Any] = {"device": "cpu", "blocks": "layers.*", "stream": "auto"}
            profile = spillway.profile(
                loop.model, torch.empty(16, 4), hardware=hardware, optimizer="offloaded", **options
            )
        with pytest.raises(spillway.BudgetError) as error:
            spillway.plan(profile, budget=1, hardware=HARDWARE)
        peaks.append(error.value.least)
    gradients = sum(each.nbytes for each in loop.model.parameters())
    # Those of the last blocks come while the activations of the first are still there.
    assert 0.4 * gradients < peaks[1] - peaks[0] <= gradients


def test_weights_are_streamed_where_copies_cost_nothing() -> None:
    fast = replace(HARDWARE, bandwidths=(replace(HARDWARE.bandwidths[0], back=1e15),))
    plan = make_plan(profile_of(), fast, budget=1 << 30, window=1 << 16, places_weights=True)
    assert plan.resident == ()


def test_blocks_that_stay_are_spread_evenly() -> None:
    assert spread(NAMES, 0) == () and spread(NAMES, BLOCKS) == NAMES
    assert spread(NAMES, 2) == ("layers.2", "layers.5")
    assert [len(spread(NAMES, count)) for count in range(BLOCKS + 1)] == list(range(BLOCKS + 1))


def test_weights_that_stay_are_counted_once_for_each_block() -> None:
    profile = profile_of()
    twice = replace(profile, calls=(*profile.calls, profile.calls[0]))
    found = with_weights(twice, ("layers.0", "layers.3"))
    weights = sum(profile.calls[0].streamed)
    assert found.static_bytes == twice.static_bytes + 2 * weights
    assert [bool(call.streamed) for call in found.calls] == [False, True, True, False, True, True, False]
    assert found.static is not None and found.static.total == found.static_bytes


def assert_weights_are_no_surprise(attached: spillway.Attached, patch: pytest.MonkeyPatch) -> None:
    """Steps begin with the weights that stay, which asks for no other plan. Any other bytes do, past the margin."""
    search, streams, controller = attached._search, attached._root.streams, attached._controller
    assert search is not None and search.profile is not None and search.plan is not None
    assert streams is not None and controller is not None
    margin = search.known_target.margin(search.plan.predicted_peak)
    level = search.profile.static_bytes + streams.resident_bytes + margin
    for more, is_planned_again in ((0, False), (1 << 20, True)):
        patch.setattr(search.memory, "level", lambda more=more: level + more)
        asked: list[Profile] = []
        with patch.context() as context:
            context.setattr(search, "replan", lambda asked=asked: asked.append(search.profile))
            assert search.step_begins(controller.collector) is is_planned_again
            assert len(asked) == is_planned_again


@FROZEN_OR_TRAINED
def test_peaks_are_within_two_percent_and_the_budget(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(budget: int) -> tuple[int, int, int]:
        with training(is_trained=is_trained, width=128) as loop, attached_to(loop, budget) as attached:
            loop.search(attached)
            plan, found = attached.plan, attached.measured
            assert plan is not None and found is not None
            assert attached.streamed == tuple(name for name in NAMES if name not in plan.resident)
            assert found.peak_bytes <= budget
            assert_weights_are_no_surprise(attached, monkeypatch)
            return len(plan.resident), plan.predicted_peak - STATIC, found.peak_bytes - STATIC

    count, predicted, most = measured(1 << 30)
    assert count == BLOCKS and abs(predicted / most - 1) < 0.02
    counts = []
    for share in (0.7, 0.5) if is_trained else (0.5, 0.4, 0.3):
        count, predicted, found = measured(STATIC + int(share * most))
        assert abs(predicted / found - 1) < 0.02, (share, count, predicted, found)
        counts.append(count)
    assert any(0 < each < BLOCKS for each in counts), counts


@pytest.mark.parametrize(
    ("is_trained", "overlaps"), [(False, False), (True, False), (True, True)], ids=["frozen", "trained", "overlapped"]
)
def test_training_has_the_bits_of_a_resident_model(is_trained: bool, overlaps: bool) -> None:
    def run(loop: Training) -> list[Tensor]:
        found: list[Tensor] = []
        if overlaps:
            loop.optimizer.overlap_forward(loop.model, blocks="layers.*")
        for number in range(9):
            found += loop.step(reads=True)
            if number % 3 == 1:
                # A second micro-batch, and an evaluation.
                loop.model(torch.ones(32, 4)).square().sum().backward()
                with torch.no_grad():
                    found.append(loop.model.eval()(torch.ones(3, 4)))
                loop.model.train()
        return found

    with adversary_session(window=1 << 16) as (_, session):
        loop = Training(session, is_trained=is_trained, rows=256)
        wanted = run(loop)
        loop.end()
    counts = set()
    for budget in (1 << 30, STATIC + (7 << 19)):
        with adversary_session(window=1 << 16) as (adversary, session):
            loop = Training(session, is_trained=is_trained, rows=256)
            with attached_to(loop, budget, allow={"keep", "host", "recompute"}) as attached:
                got = run(loop)
                adversary.check()
                assert attached.plan is not None, attached.explain()
                counts.add(len(attached.plan.resident))
            assert all(map(torch.equal, got, wanted))
            assert not any(map(is_streamed, loop.model.parameters()))
            loop.end()
            gc.collect()
            assert_nothing_left(session)
    assert max(counts) == BLOCKS


@FROZEN_OR_TRAINED
def test_two_plans_in_turn_and_larger_inputs(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger inputs stream all weights again, until there is a plan for them."""
    monkeypatch.setattr(step_trace, "queues", lambda device: True)
    placed: list[tuple[str, ...]] = []
    place = StreamedModel.place

    def noted(self: StreamedModel, resident: Any) -> None:
        placed.append(tuple(resident))
        place(self, resident)

    monkeypatch.setattr(StreamedModel, "place", noted)
    rows = [256] * 36 + [300] * 4
    with training(is_trained=is_trained) as loop:
        wanted = [loop.step(each)[0] for each in rows]
    with training(is_trained=is_trained) as loop, attached_to(loop, STATIC + (4 << 20)) as attached:
        got = [loop.step(each)[0] for each in rows]
        assert any("are larger than any before" in note for note in attached.notes)
    assert all(map(torch.equal, got, wanted))
    changes = [each for number, each in enumerate(placed) if number == 0 or placed[number - 1] != each]
    assert changes[0] == () and changes[1] and () in changes[2:]
    # Weights do not move where two plans run in turn.
    assert len(changes) < 8


@FROZEN_OR_TRAINED
def test_a_plan_that_is_given_places_weights(is_trained: bool) -> None:
    with training(is_trained=is_trained) as loop, loop.attach(budget=STATIC + (6 << 20)) as attached:
        loop.search(attached)
        assert attached.plan is not None and attached.plan.resident == ()
        plan = replace(attached.plan, resident=("layers.1", "layers.4"))
    with training(is_trained=is_trained) as loop:
        wanted = [loop.step(reads=True) for _ in range(4)]
    with training(is_trained=is_trained) as loop:
        options = {"optimizer": loop.optimizer} if is_trained else {}
        with spillway.attach(
            loop.model, plan=plan, stream="layers.*", min_bytes=0, session=loop._session, **options
        ) as attached:
            assert attached.streamed == ("layers.0", "layers.2", "layers.3", "layers.5")
            got = [loop.step(reads=True) for _ in range(4)]
    assert same(got, wanted)


def test_without_memory_for_homes_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with training(is_trained=True) as loop:
        wanted = [loop.step(reads=True) for _ in range(12)]
    with training(is_trained=True) as loop, attached_to(loop, 1 << 30) as attached:
        got = [loop.step(reads=True) for _ in range(9)]
        streams = attached._root.streams
        assert streams is not None and attached.streamed == ()
        homes = 0

        class Full(streaming.Pinned):
            def __init__(self, *options: Any) -> None:
                nonlocal homes
                homes += 1
                if homes > 6:
                    raise TierFullError("no memory")
                super().__init__(*options)

        with monkeypatch.context() as patch:
            patch.setattr(streaming, "Pinned", Full)
            with pytest.raises(TierFullError):
                streams.place(())
        assert homes == 7 and attached.streamed == () and not any(map(is_streamed, loop.model.parameters()))
        got.append(loop.step(reads=True))
        # The first block had moved when there was no more memory.
        streams.place(("layers.0",))
        assert attached.streamed == NAMES[1:]
        got += [loop.step(reads=True) for _ in range(2)]
    assert same(got, wanted)


@pytest.mark.parametrize(
    ("at", "is_trained"), [(1, True), (2, False), (9, True)], ids=["1-trained", "2-frozen", "9-trained"]
)
def test_without_memory_on_the_device_weights_are_streamed(
    at: int, is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that would place them raises, and training goes on: a plan is found once more."""
    with training(is_trained=is_trained) as loop:
        wanted = [loop.step(reads=True) for _ in range(14)]
    leave, calls, got = StreamedParameter.leave, [0], []

    def full(self: StreamedParameter, device: torch.device | None = None) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise torch.OutOfMemoryError("no memory")
        leave(self, device)

    with training(is_trained=is_trained) as loop, attached_to(loop, 1 << 30) as attached:
        monkeypatch.setattr(StreamedParameter, "leave", full)
        failed = 0
        while len(got) < 14:
            before = loop.steps
            try:
                got.append(loop.step(reads=True))
            except torch.OutOfMemoryError:
                failed += 1
                loop.steps = before
                assert attached.streamed == NAMES and attached.plan is not None and attached.missing
                loop.optimizer.zero_grad()
        assert failed == 1 and attached.streamed == () and attached.stage != "profiling operators"
        if is_trained:
            with pytest.raises(UsageError, match="divide\\(\\) of an optimizer whose parameters are streamed"):
                loop.optimizer.divide(0.5)
    assert same(got, wanted)
    assert not any(map(is_streamed, loop.model.parameters()))


def test_the_memory_of_their_homes_is_not_given_away() -> None:
    with training(is_trained=True) as loop, attached_to(loop, 1 << 30) as attached:
        loop.search(attached)
        assert attached._search is not None and attached._root.streams is not None
        streams, planner = attached._root.streams, attached._search.planner
        rooms = []
        for resident in (NAMES, ()):
            streams.place(resident)
            rooms.append((planner.limits()["host_budget"], loop._session.unused_host_bytes(torch.device("cpu"))))
        weights = sum(each.nbytes for each in loop.model.layers.parameters())
        (with_them, free), (without, left) = rooms
        assert free - with_them == weights and without == left


def test_a_curve_ends_with_all_weights_on_the_device() -> None:
    profile = profile_of(width=128)
    limits: dict[str, Any] = {"window": 1 << 16, "allow": {"keep", "recompute"}, "places_weights": True}
    plan, curve = make_plan(profile, SLOW, budget=1 << 30, **limits), make_curve(profile, SLOW, points=3, **limits)
    here = uniform_program(with_weights(profile, NAMES), Decision.KEEP)
    most = simulate_program(here, planning_rates(SLOW, 1 << 16)).peak_bytes
    assert curve[-1].peak_bytes == plan.predicted_peak <= most
    assert curve[-1].seconds == pytest.approx(plan.predicted_seconds, rel=0.01)


def test_plans_that_place_other_weights_are_not_the_same() -> None:
    plan = make_plan(profile_of(), SLOW, budget=1 << 30, window=1 << 16)
    assert searching.is_same(plan, replace(plan, predicted_peak=0))
    assert not searching.is_same(plan, replace(plan, resident=("layers.1",)))


def test_profiles_and_plans_refuse_what_they_cannot_stream() -> None:
    with training(is_trained=True) as loop:
        with pytest.raises(UsageError, match="stream='auto' is for hardware that need not be present"):
            spillway.profile(loop.model, torch.ones(2, 4), stream="auto")
        with pytest.raises(UsageError, match="optimizer: got 'offloaded'"):
            spillway.profile(loop.model, torch.ones(2, 4), optimizer="offloaded")
    with pytest.raises(UsageError, match="The profile has the streamed blocks"):
        spillway.plan(profile_of(), budget="1GiB", hardware=HARDWARE, stream="layers.*")  # type: ignore[arg-type]


def test_it_takes_a_budget() -> None:
    with training(is_trained=False) as loop:
        with pytest.raises(UsageError, match='got "auto" without a budget'):
            spillway.attach(loop.model, stream="auto", session=loop._session)
        assert not any(map(is_streamed, loop.model.parameters()))
