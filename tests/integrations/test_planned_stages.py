"""Stages of a pipeline within a budget: their plans, the bits, the bytes, and what changes on the way."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import spillway
from allocations import ExactMemory, Listener, count_exactly
from integrations.ranks import World
from integrations.test_pipelining import Plan as Schedule
from integrations.test_pipelining import in_folder, session_at, train
from recompute.regions import HiddenAttribute
from runtime.scenarios import adversary_session
from spillway.integrations.pipelining import OffloadedStages, offload_stages
from support import assert_nothing_left

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(300),
]

HARDWARE = spillway.Hardware.named("h200")
STATIC = 16 << 20
Turns = Sequence[tuple[int, int, bool]]
"""Of each: a stage, a chunk, and whether it goes back."""


class Block(nn.Module):
    """Dropout, so that random numbers must be the same in a re-run."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1)


class Stage:
    """A stage as far as it is used, in a process of its own. Its loss is its own, too."""

    is_first = False
    group_rank, group_size = 0, 1

    def __init__(self, index: int = 0, *, width: int = 16, blocks: int = 3, device: str = "cpu") -> None:
        torch.manual_seed(index)
        self.submod: nn.Module = nn.Sequential(*(Block(width) for _ in range(blocks))).to(device)
        self.stage_index = index
        self.chunks: int | None = None
        self.dw_builder: Any = None
        self.waiting: dict[int, Tensor] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Tensor, ...]) -> Tensor:
        output: Tensor = self.submod(*args)
        self.waiting[fwd_chunk_id] = output
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True) -> None:
        self.waiting.pop(bwd_chunk_id).square().mean().backward()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        raise AssertionError("no schedule here splits backwards")


def one_forward_one_backward(chunks: int, most: int, stages: int = 1) -> Turns:
    """Of each stage, up to so many chunks wait."""
    turns: list[tuple[int, int, bool]] = []
    for number in range(chunks + most - 1):
        for back, chunk in ((False, number), (True, number - most + 1)):
            if 0 <= chunk < chunks:
                turns += ((stage, chunk, back) for stage in range(stages))
    return turns


def any_order(seed: int, stages: int, chunks: int) -> Turns:
    """Forwards come before their backwards."""
    random_ = random.Random(seed)
    waiting: list[tuple[int, int]] = []
    ahead = [(stage, chunk) for stage in range(stages) for chunk in range(chunks)]
    turns = []
    while ahead or waiting:
        back = bool(waiting) and (not ahead or random_.random() < 0.5)
        these = waiting if back else ahead
        stage, chunk = these.pop(random_.randrange(len(these)))
        turns.append((stage, chunk, back))
        if not back:
            waiting.append((stage, chunk))
    return turns


def steps(
    stages: Sequence[Stage], orders: Sequence[Turns], *, rows: int | Sequence[int] = 8, gives: bool = True
) -> Iterator[list[Tensor]]:
    """One step of each order: what each chunk gave, if that is wanted, gradients, and in the end the weights."""
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    norm = stages[0].submod[0].norm.weight  # type: ignore[index, union-attr]
    for step, turns in enumerate(orders):
        torch.manual_seed(100 + step)
        count = rows if isinstance(rows, int) else rows[step]
        found = []
        for stage, chunk, back in turns:
            if back:
                stages[stage].backward_one_chunk(chunk)
            else:
                batch = torch.randn(count, norm.numel(), device=norm.device, requires_grad=True)
                output = stages[stage].forward_one_chunk(chunk, (batch,)).detach()
                if gives:
                    found.append(output.clone())
                del batch, output
        found += [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        yield found
    yield [parameter.detach().clone() for parameter in parameters]


def assert_same(got: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]) -> None:
    assert [len(each) for each in got] == [len(each) for each in wanted]
    for step, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert all(map(torch.equal, ours, theirs)), f"step {step}"


@contextlib.contextmanager
def planned(stages: Sequence[Stage], session: spillway.Session, **options: Any) -> Iterator[OffloadedStages]:
    more = {"budget": "40GiB", "allow": {"disk", "recompute"}, "min_bytes": 0, "hardware": HARDWARE, **options}
    with offload_stages(stages, session=session, **more) as offloaded:
        yield offloaded
    assert all("forward_one_chunk" not in stage.__dict__ for stage in stages)
    assert_nothing_left(session)


# Several processes.


def schedule_within_a_budget(schedule: Schedule, path: Path) -> None:
    # Another number of micro-batches once a plan is held, and the first one again.
    numbers = (*[schedule.micro_batches] * 6, 2 * schedule.micro_batches, schedule.micro_batches)
    plain = list(train(schedule, numbers, *schedule.make()))
    with session_at(path) as session:
        stages, make = schedule.make()
        options: dict[str, Any] = {"budget": "40GiB", "allow": {"disk", "recompute"}, "hardware": HARDWARE}
        with offload_stages(stages, min_bytes=0, session=session, **options) as offloaded:
            got = list(train(schedule, numbers, stages, make))
            label = f"{schedule} rank {dist.get_rank()}: {offloaded.stage} {offloaded.explain()}"
            assert set(offloaded.plans) == {stage.stage_index for stage in stages}, label
            assert offloaded.measured is not None and "other turns" in offloaded.explain(), label
            # Nothing may stay: so it was planned, and not left alone.
            assert not any(block.plain for plan in offloaded.plans.values() for block in plan.blocks), label
            assert offloaded.stats().offloaded_bytes + offloaded.stats().recomputed_bytes > 0, label
        assert len(got) == len(plain) and all(map(torch.equal, got, plain)), label
        assert_nothing_left(session)


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(Schedule("GPipe", "one"), marks=pytest.mark.long),
        Schedule("1F1B", "one"),
        Schedule("Interleaved1F1B", "loop"),
        Schedule("ZBVZeroBubble", "v", fused=True),
    ],
    ids=lambda schedule: schedule.name,
)
def test_a_schedule_within_a_budget_trains_as_without(world: World, tmp_path: Path, schedule: Schedule) -> None:
    world.run(in_folder, str(tmp_path), partial(schedule_within_a_budget, schedule))


class Summing(Block):
    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        return super().forward(all_reduce(x))  # type: ignore[no-any-return, no-untyped-call]


def communicating_case(path: Path) -> None:
    with session_at(path) as session:
        stage = Stage()
        stage.submod = nn.Sequential(*(Summing(16) for _ in range(3)))
        with planned([stage], session, blocks=Block):
            refused = pytest.raises(spillway.UnsupportedError, match="whose blocks communicate with other ranks")
            with refused as caught:
                list(steps([stage], [one_forward_one_backward(2, 1)] * 3))
            del caught


def test_stages_whose_blocks_communicate_are_refused(world: World, tmp_path: Path) -> None:
    world.run(in_folder, str(tmp_path), communicating_case)


# One process.


def test_the_search_of_a_plan_has_its_stages_and_the_bits_are_those_of_plain_steps(tmp_path: Path) -> None:
    turns = one_forward_one_backward(5, 3)
    plain = list(steps([Stage()], [turns] * 7))
    with session_at(tmp_path) as session:
        stages = [Stage()]
        with planned(stages, session) as offloaded:
            with pytest.raises(spillway.UsageError, match="before there are plans"):
                offloaded.explain()
            found, got = [], []
            for each in steps(stages, [turns] * 7):
                got.append(each)
                found.append((offloaded.stage, bool(offloaded.plans)))
            # A step ends when the next one begins.
            assert [stage for stage, _ in found[:6]] == [
                "profiling operators",
                "profiling memory",
                "profiling time",
                "warming up",
                "validating",
                "active",
            ]
            assert [there for _, there in found[:4]] == [False, False, False, True]
            (plan,) = offloaded.plans.values()
            assert [block.name for block in plan.blocks] == ["0", "1", "2"]
            assert offloaded.explain().startswith("stage 0: ")
            assert offloaded.stats().offloaded_bytes > 0
        assert_same(got, plain)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_any_order_of_two_stages_under_the_adversary(seed: int) -> None:
    turns = any_order(seed, 2, 3)
    plain = list(steps([Stage(0), Stage(1)], [turns] * 7))
    with adversary_session(window=1024) as (_, session):
        stages = [Stage(0), Stage(1)]
        with planned(stages, session, allow={"host", "recompute"}) as offloaded:
            assert_same(list(steps(stages, [turns] * 7)), plain)
            assert offloaded.stage == "active" and set(offloaded.plans) == {0, 1}
            assert offloaded.stats().reloaded_bytes > 0


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Listens throughout, so that torch's profiler knows the size of each block of memory.

    The profiler knows blocks by their addresses. If one is freed unheard, the profiler keeps its size, and counts it
    when another block at that address is freed.
    """
    found = Listener()
    yield found
    found.close()


WIDE, ROWS = 64, 1024
OUTPUT = ROWS * WIDE * 4


@pytest.mark.usefixtures("listener")
@pytest.mark.parametrize(
    ("most", "count", "allow", "share"),
    [(1, 1, "recompute", 0.9), (3, 1, "recompute", 0.6), (2, 2, "disk", 0.6), (4, 1, "disk", 0.4)],
)
def test_peaks_are_foreseen_and_budgets_are_kept_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, count: int, allow: str, share: float
) -> None:
    """Of a step that keeps everything, and of a share of what that has beyond what is there anyway."""
    # What a process has beside a step, weights included, is the same.
    count_exactly(monkeypatch, lambda: STATIC)
    # Of more chunks one after the other, each would have an input that nobody saw come.
    turns = one_forward_one_backward(most + 2 if most > 1 else 1, most, count)
    peaks: list[int] = []
    budget: int | str = "40GiB"
    for _ in range(2):
        with session_at(tmp_path) as session:
            stages = [Stage(index, width=WIDE) for index in range(count)]
            options = {"budget": budget, "allow": {"keep", allow}, "min_bytes": "16KiB"}
            with planned(stages, session, **options) as offloaded:
                for _ in steps(stages, [turns] * 20, rows=ROWS, gives=False):
                    if offloaded.stage == "active":
                        break
                assert offloaded.stage == "active" and offloaded.measured is not None, offloaded.explain()
                plan = offloaded.plans[0]
                profiles = [stage.profile for stage in offloaded._rank.stages]  # type: ignore[union-attr]
                # Regions hold generators' states, which matter where blocks are this small.
                off = 0.02 if peaks else 0.002
                # The first chunk's input is there when a step begins, so that it counts as static. If there are several
                # chunks, it is gone when the peak comes.
                gone = OUTPUT if most > 1 else 0
                most_bytes, foreseen = offloaded.measured + gone - STATIC, plan.predicted_peak - STATIC
                assert most_bytes <= (1 + off) * foreseen
                # A CPU has offloaded before the step goes on.
                assert allow == "disk" or most_bytes >= (1 - off) * foreseen
                assert not peaks or offloaded.measured <= int(budget) < peaks[0]
                peaks.append(offloaded.measured)
                for stage in stages:
                    stage.waiting.clear()
        # What a block gives is its own. The next chunk's input is there by then.
        held = [profile.held_bytes for profile in profiles if profile is not None]
        assert held == [0 if most == 1 else OUTPUT] * count
        budget = STATIC + int((peaks[0] - STATIC) * share)


def test_larger_inputs_and_more_chunks_are_planned_for_anew(tmp_path: Path) -> None:
    few, many = one_forward_one_backward(3, 2), one_forward_one_backward(5, 4)
    orders = [*[few] * 6, *[many] * 3, *[few] * 15]
    rows = [*[8] * 12, *[16] * 6, *[24] * 6]
    plain = list(steps([Stage()], orders, rows=rows))
    with session_at(tmp_path) as session:
        stages = [Stage()]
        with planned(stages, session) as offloaded:
            got, seen = [], []
            for each in steps(stages, orders, rows=rows):
                got.append(each)
                seen.append(offloaded.stage)
            assert "a step had other turns" in offloaded.explain()
            assert "inputs of 1.0 KiB are larger than any before (512 B)" in offloaded.explain()
            assert "inputs of 1.5 KiB are larger than any before (1.0 KiB)" in offloaded.explain()
            # That plan does for fewer. Inputs are seen at once: a plan is enlarged to twice its inputs.
            assert seen[5:12] == [*["active"] * 2, "warming up", "validating", *["active"] * 3]
            assert seen[12:16] == ["warming up", "warming up", "validating", "active"]
            assert seen[18:20] == ["profiling operators"] * 2
            assert seen[20:23] == ["profiling memory", "profiling time", "warming up"]
        assert_same(got, plain)


def test_of_several_orders_of_turns_the_one_that_needs_the_most_is_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exactly(monkeypatch, lambda: STATIC)
    few, many = one_forward_one_backward(4, 2), one_forward_one_backward(4, 4)
    with session_at(tmp_path) as session:
        stages = [Stage(width=WIDE)]
        with planned(stages, session, allow={"keep", "recompute"}) as offloaded:
            for _ in steps(stages, [few] * 6, rows=ROWS, gives=False):
                pass
            assert offloaded.measured is not None
            budget = offloaded.measured + 6 * OUTPUT
    with session_at(tmp_path) as session:
        stages = [Stage(width=WIDE)]
        found, seen = [], []
        with planned(stages, session, budget=budget, allow={"keep", "recompute"}) as offloaded:
            for _ in steps(stages, [*[few] * 6, *[many, few] * 6], rows=ROWS, gives=False):
                found.append(offloaded.plans.get(0))
                seen.append(offloaded.stage)
            # All that is kept of two chunks fits, and of four does not. A step is known when it is over.
            first, second = found[6], found[7]
            assert first is not None and all(block.plain for block in first.blocks)
            assert second is not None and not all(block.plain for block in second.blocks)
            # That plan does for both.
            assert found[7:] == [second] * len(found[7:]) and seen[-1] == "active", offloaded.explain()


def test_a_stage_that_is_frozen_is_left_alone(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2, 2)

    class Frozen(Stage):
        def __init__(self) -> None:
            super().__init__(0)
            self.submod.requires_grad_(False)

        def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Tensor, ...]) -> Tensor:
            return super().forward_one_chunk(fwd_chunk_id, (args[0].detach(),))

        def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True) -> None:
            self.waiting.pop(bwd_chunk_id)

    plain = list(steps([Frozen(), Stage(1)], [turns] * 8))
    with session_at(tmp_path) as session:
        stages = [Frozen(), Stage(1)]
        with planned(stages, session) as offloaded:
            assert_same(list(steps(stages, [turns] * 8)), plain)
            assert offloaded.stage == "active" and set(offloaded.plans) == {1}
            assert "stage 0, which is left alone" in offloaded.explain()


def test_where_later_chunks_are_larger_they_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_exactly(monkeypatch, lambda: STATIC)
    turns = one_forward_one_backward(3, 3)
    peaks = []
    for first in (ROWS, ROWS // 4):
        with session_at(tmp_path) as session:
            stage = Stage(width=WIDE)
            with planned([stage], session, allow={"keep", "recompute"}) as offloaded:
                for _ in range(5):
                    for _, chunk, back in turns:
                        if back:
                            stage.backward_one_chunk(chunk)
                        else:
                            stage.forward_one_chunk(chunk, (torch.randn(ROWS if chunk else first, WIDE),))
                    stage.submod.zero_grad()
                peaks.append(offloaded.plans[0].predicted_peak - STATIC)
    # What does not grow is taken to grow, too.
    assert peaks[0] <= peaks[1] <= 1.1 * peaks[0]


def test_steps_in_threads_of_their_own_train_as_ever(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2)
    plain = list(steps([Stage()], [turns] * 8))
    with session_at(tmp_path) as session:
        stage = Stage()
        with planned([stage], session) as offloaded:
            got: list[list[Tensor]] = []
            course = steps([stage], [turns] * 8)
            for _ in range(9):
                thread = threading.Thread(target=lambda: got.append(next(course)))
                thread.start()
                thread.join()
            assert offloaded.stage == "active"
        assert_same(got, plain)


def test_an_evaluation_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_exactly(monkeypatch, lambda: STATIC)
    turns = one_forward_one_backward(2, 1)
    with session_at(tmp_path) as session:
        stage = Stage(width=WIDE)
        with planned([stage], session, allow={"keep", "recompute"}) as offloaded:
            for _ in steps([stage], [turns] * 8, rows=ROWS, gives=False):
                with torch.no_grad():
                    # Of each, much more is needed.
                    stage.forward_one_chunk(0, (torch.randn(16 * ROWS, WIDE),))
                stage.waiting.clear()
                if offloaded.stage == "validating":
                    # The step's peak was read before the evaluation.
                    assert offloaded._rank is not None and offloaded._rank.monitor.peak is not None
            assert offloaded.stage == "active" and offloaded.measured is not None
            assert offloaded.measured < STATIC + 90 * OUTPUT


def test_a_refused_back_off_names_the_budget_and_leaves_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exactly(monkeypatch, lambda: STATIC)
    turns = one_forward_one_backward(3, 2)
    budget = STATIC + (16 << 20)
    with session_at(tmp_path) as session:
        stage = Stage()
        with planned([stage], session, budget=budget, allow={"keep", "recompute"}) as offloaded:
            course = steps([stage], [turns] * 12)
            while offloaded.stage != "warming up":
                next(course)
            with monkeypatch.context() as patch:
                patch.setattr(ExactMemory, "peak", lambda _: 10 * budget)
                next(course)
                assert offloaded.stage == "validating"
                with pytest.raises(spillway.BudgetError, match="and its prediction") as caught:
                    next(course)
            assert caught.value.budget == budget < caught.value.least
            plan = offloaded.plans[0]
            del caught, course
            stage.waiting.clear()
            for _ in steps([stage], [turns, one_forward_one_backward(4, 2), turns, turns]):
                pass
            assert offloaded.plans[0] is plan and offloaded.stage == "active"


def test_a_step_in_which_a_stage_has_no_chunk_says_nothing(tmp_path: Path) -> None:
    both = one_forward_one_backward(3, 2, 2)
    first = one_forward_one_backward(3, 2)
    orders = [both, first, both, both, both, first, both, both, first, both, both]
    plain = list(steps([Stage(0), Stage(1)], orders))
    with session_at(tmp_path) as session:
        stages = [Stage(0), Stage(1)]
        with planned(stages, session) as offloaded:
            assert_same(list(steps(stages, orders)), plain)
            assert offloaded.stage == "active" and "other turns" not in offloaded.explain()


class Skipping(nn.Module):
    """Of its blocks one is called at times, or its output is not used."""

    # Spillway would put back what it sees.
    calls = HiddenAttribute(0)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.how = how

    def __getitem__(self, place: int) -> nn.Module:
        return self.blocks[place]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first, second, third = self.blocks
        x = first(x)
        if self.how == "aside":
            self.other = second(x)
        elif self.calls % 3:
            x = second(x)
        output: Tensor = third(x)
        return output


def skipping(how: str) -> Stage:
    stage = Stage()
    torch.manual_seed(0)
    stage.submod = Skipping(how)
    return stage


def test_blocks_that_are_skipped_at_times_take_the_least(tmp_path: Path) -> None:
    turns = one_forward_one_backward(4, 2)
    plain = list(steps([skipping("drop")], [turns] * 9))
    with session_at(tmp_path) as session:
        stage = skipping("drop")
        with planned([stage], session) as offloaded:
            assert_same(list(steps([stage], [turns] * 9)), plain)
            assert offloaded.stage == "active"


def test_a_block_without_a_backward_is_refused_before_a_step_begins(tmp_path: Path) -> None:
    with session_at(tmp_path) as session:
        stage = skipping("aside")
        with planned([stage], session):
            course = steps([stage], [one_forward_one_backward(3, 2)] * 6)
            # Its operators are measured in the second step, since no replay came in the first.
            for _ in range(4):
                next(course)
            with pytest.raises(spillway.UnsupportedError, match="had no backward") as caught:
                next(course)
            assert not stage.waiting
            del caught, course
            stage.submod.other = None  # type: ignore[assignment]


def test_a_stage_that_is_unfrozen_is_measured_anew(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2)

    def course(stage: Stage) -> Iterator[list[Tensor]]:
        stage.submod[0].requires_grad_(False)  # type: ignore[index, operator]
        yield from steps([stage], [turns] * 6)
        stage.submod[0].requires_grad_(True)  # type: ignore[index, operator]
        yield from steps([stage], [turns] * 8)

    plain = list(course(Stage()))
    with session_at(tmp_path) as session:
        stage = Stage()
        with planned([stage], session) as offloaded:
            got, seen = [], []
            for each in course(stage):
                got.append(each)
                seen.append(offloaded.stage)
            assert_same(got, plain)
            # After the sixth come the weights.
            assert seen[5] == seen[6] == seen[-1] == "active" and seen[7] == "profiling operators", seen
            assert "other parameters are trained" in offloaded.explain()


def test_a_backward_that_comes_twice_is_measured_once(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2)

    class Twice(Stage):
        def backward_one_chunk(self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True) -> None:
            self.waiting[bwd_chunk_id].square().mean().backward(retain_graph=True)
            super().backward_one_chunk(bwd_chunk_id)

    plain = list(steps([Twice()], [turns] * 7))
    with session_at(tmp_path) as session:
        stages = [Twice()]
        with planned(stages, session) as offloaded:
            assert_same(list(steps(stages, [turns] * 7)), plain)
            assert offloaded.stage == "active"


def test_a_step_that_fails_counts_for_nothing_and_evaluation_is_as_ever(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2)
    plain = list(steps([Stage()], [turns] * 9))
    with session_at(tmp_path) as session:
        stage = Stage()
        with planned([stage], session) as offloaded:
            got = []
            for number, each in enumerate(steps([stage], [turns] * 9)):
                got.append(each)
                with torch.no_grad():
                    stage.forward_one_chunk(0, (torch.randn(8, 16),))
                stage.waiting.clear()
                if number in (1, 4, 7):
                    # The first chunk goes forward, and the second one fails.
                    stage.forward_one_chunk(0, (torch.randn(8, 16),))
                    with pytest.raises(RuntimeError):
                        stage.forward_one_chunk(1, (torch.randn(8, 17),))
                    stage.waiting.clear()
                    session.synchronize()
            assert offloaded.stage == "active" and "other turns" not in offloaded.explain()
        assert_same(got, plain)


def test_it_can_be_taken_off_at_any_time(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2)
    for after in range(7):
        with session_at(tmp_path) as session:
            stage = Stage()
            own = dict(stage.__dict__)
            plain = list(steps([Stage()], [turns] * (after + 2)))
            with planned([stage], session) as offloaded:
                found = steps([stage], [turns] * (after + 2))
                got = [next(found) for _ in range(after)]
                # Chunks that wait can still go back.
                offloaded.remove()
                got += found
            assert_same(got, plain)
            assert stage.__dict__.keys() == own.keys()


def test_a_budget_that_no_plan_is_within_is_refused_with_the_least_one(tmp_path: Path) -> None:
    turns = one_forward_one_backward(3, 2)
    with session_at(tmp_path) as session:
        stage = Stage()
        with planned([stage], session, budget="1MiB") as offloaded:
            found = steps([stage], [turns] * 5)
            for _ in range(3):
                next(found)
            with pytest.raises(spillway.BudgetError, match="stage 0") as caught:
                next(found)
            assert caught.value.least > 1 << 20
            del caught, found
            assert not offloaded.plans
            stage.waiting.clear()


def test_a_backward_in_halves_is_refused(tmp_path: Path) -> None:
    with session_at(tmp_path) as session:
        stage = Stage()
        with planned([stage], session):
            stage.forward_one_chunk(0, (torch.randn(8, 16),))
            for halves in ({"full_backward": False}, {}):
                with pytest.raises(spillway.UnsupportedError, match="dw_builder"):
                    stage.backward_one_chunk(0, *([] if halves else [None, False]), **halves)
            stage.dw_builder = lambda: lambda: None
            stage.backward_one_chunk(0, full_backward=False)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"budget": "1GiB", "ratio": 0.5}, "ratio beside a budget"),
        ({"budget": "1GiB", "tier": "host", "recompute": spillway.Recompute()}, "recompute and tier beside"),
        ({"budget": "much"}, "budget"),
        ({"budget": "1GiB", "host_budget": "much"}, "host_budget"),
        ({"budget": "1GiB", "allow": {"everything"}}, "allow"),
        ({"budget": "1GiB", "hardware": "h2000"}, "hardware: got 'h2000'"),
        ({"budget": "1GiB", "blocks": "layers.*"}, "layers"),
        ({"allow": {"keep"}}, "without a budget"),
        ({"hardware": HARDWARE, "host_budget": 1}, "hardware and host_budget without"),
    ],
)
def test_what_cannot_be_meant_is_said_at_once(options: dict[str, Any], what: str) -> None:
    stage = Stage()
    with pytest.raises(spillway.UsageError, match=what):
        offload_stages(stage, **options)
    assert "forward_one_chunk" not in stage.__dict__
    assert "_compiled_call_impl" not in stage.submod.__dict__


def test_stages_without_parameters_are_refused() -> None:
    stage = Stage()
    stage.submod = nn.Sequential(nn.ReLU(), nn.ReLU())
    with pytest.raises(spillway.UsageError, match="no parameters"):
        offload_stages(stage, budget="1GiB")


def test_who_gives_attach_what_offload_stages_is_for_is_told(tmp_path: Path) -> None:
    with session_at(tmp_path) as session:
        model = Stage().submod
        batch = torch.randn(8, 16)
        with spillway.attach(model, budget="40GiB", hardware=HARDWARE, session=session) as attached:
            for _ in range(16):
                model(batch).square().mean().backward()
            assert attached.notes == ()
            outputs = [model(batch) for _ in range(18)]
            assert attached.notes == ()
        with spillway.attach(model, budget="40GiB", hardware=HARDWARE, session=session) as attached:
            outputs += [model(batch) for _ in range(18)]
            (note,) = attached.notes
            assert "offload_stages(budget=...)" in note
        del outputs
        assert_nothing_left(session)
