"""Attaches a stack within one budget after the other, waits for an active plan, and measures it."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

import spillway
from _training import KEEP, WARMUP, Times, Training
from spillway.attaching import budget
from spillway.errors import BudgetError
from spillway.profiler.machine import known_hardware
from step import write_trace

Found = TypeVar("Found")

CHECKPOINT, LEAST = "checkpoint", "least"
"""Budgets by name: the peak of checkpointing each layer, and the smallest feasible budget."""
HELD = "active"
MOST_STEPS = 60
"""Steps until a plan is active. A search that takes longer has failed."""
MOST_RAISES = 4
"""Raises of the smallest budget, if steps are larger than planned."""
SLACK = 1 << 20
"""Bytes by which a raise exceeds the need."""
AT_FIRST = 64 << 20
"""Bytes by which a first plan stays below its budget, or a two-hundredth if that is less."""


@dataclass
class Row:
    """One way, within a budget or without one. Bytes are above parameters and gradients."""

    way: str
    asked: str = ""
    """The budget, as it was given."""
    failed: str = ""
    """Why there are no figures."""
    step_seconds: float = 0.0
    step_min: float = 0.0
    step_max: float = 0.0
    single_seconds: float = 0.0
    peak_bytes: int = 0
    keep_seconds: float = 0.0
    """Seconds of the baseline step before and after it, in the same process; 0 if that does not fit."""
    of_keep: float = 0.0
    budget_bytes: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    """The plan, and the cost of the search for it."""
    best: str = ""
    """The fastest of the other methods whose peak is within the budget."""
    of_best: float = 0.0

    def take(self, times: Times, before: Times | None, after: Times | None) -> None:
        """Take the measurements, made between two measurements of the baseline."""
        for name, value in asdict(times).items():
            setattr(self, name, value)
        looks = [look.step_seconds for look in (before, after) if look is not None]
        if looks:
            self.keep_seconds = sum(looks) / len(looks)
            self.of_keep = self.step_seconds / self.keep_seconds

    @property
    def within(self) -> bool:
        """Whether the budget was met."""
        return not self.failed and self.peak_bytes <= self.budget_bytes


def plain_row(looks: list[Times]) -> Row:
    """The looks at plain steps as a row."""
    return Row(
        KEEP,
        step_seconds=statistics.median(look.step_seconds for look in looks),
        step_min=min(look.step_min for look in looks),
        step_max=max(look.step_max for look in looks),
        single_seconds=statistics.median(look.single_seconds for look in looks),
        peak_bytes=looks[0].peak_bytes,
        of_keep=1.0,
    )


class Solving:
    """Counts plans as they are made, and seconds that this takes."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        make_plan = budget.make_plan

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return make_plan(*args, **kwargs)
            finally:
                self.count += 1
                self.seconds += time.perf_counter() - begin

        budget.make_plan = timed
        try:
            yield
        finally:
            budget.make_plan = make_plan


def held(training: Training, attached: spillway.Attached) -> int:
    """Steps until one goes by a plan that holds, itself not counted; raises BudgetError if that is not to be had."""
    for count in range(MOST_STEPS):
        training.step()
        if attached.stage == HELD:
            return count
    raise BudgetError(f"no plan is active after {MOST_STEPS} steps", budget=0, least=0)


def planned(training: Training, row: Row, static: int, keep: Callable[[Any], None]) -> Times:
    """Attach within the row's budget, and measure.

    Args:
        static: bytes that are there when a step begins.
        keep: given the profile that was measured on the way.
    """
    solving = Solving()
    begin = time.perf_counter()
    with solving.counted(), spillway.attach(training.stack, budget=static + row.budget_bytes) as attached:
        try:
            steps = held(training, attached)
            until = time.perf_counter() - begin
            times = training.times(training.step)
            if attached.stage != HELD:
                steps += held(training, attached)
                times = training.times(training.step)
        finally:
            keep(attached.profile)
        stats, plan, profile = attached.stats(), attached.plan, attached.profile
        assert plan is not None
        assert profile is not None
        if training.device.type == "cpu":
            static = profile.static_bytes
        folder = training.options.traces
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_trace(folder / f"{row.asked}.trace.json", training.step)
            (folder / f"{row.asked}.plan.json").write_text(plan.to_json())
            profile.save(folder / f"{row.asked}.profile.json")
        row.plan = {
            "predicted_seconds": plan.predicted_seconds,
            "predicted_peak_bytes": plan.predicted_peak - static,
            "predicted_stall_seconds": plan.stall_seconds,
            "window_bytes": plan.window,
            "plain_blocks": sum(block.plain for block in plan.blocks),
            "steps_until_holding": steps,
            "seconds_until_holding": until,
            "solving_seconds": solving.seconds,
            "plans": solving.count,
            "held": attached.stage == HELD,
            "sent_bytes": stats.offloaded_bytes,
            "recomputed_bytes": stats.recomputed_bytes,
            "out_stall_seconds": stats.out_stall_seconds,
            "back_stall_seconds": stats.back_stall_seconds,
            "explained": attached.explain(),
        }
    return times


def least_of(training: Training, keep: Callable[[Any], None]) -> tuple[int, int]:
    """Bytes in use when a step begins, and the bytes that the smallest feasible budget has above them."""
    with spillway.attach(training.stack, budget=1) as attached:
        try:
            held(training, attached)
        except BudgetError as error:
            profile = attached.profile
            if profile is None:
                raise
            keep(profile)
            # A plan stays a little below its budget.
            least = min(error.least + AT_FIRST, error.least * 200 // 199 + 200)
            static = profile.static_bytes if training.device.type == "cpu" else training.static_bytes
            return static, least - static
    raise AssertionError("got a plan within one byte, expected none")


def sized(asked: str, keep_peak: int, checkpoint_peak: int) -> int:
    """A budget beyond parameters and gradients, in bytes; 0 if what it is a share of is not known."""
    if asked == CHECKPOINT:
        return checkpoint_peak
    try:
        return int(float(asked) * keep_peak)
    except ValueError:
        return spillway.units.parse_bytes(asked, what="--budgets")


def sweep(options: argparse.Namespace, tell: Callable[[Row], None]) -> None:
    """A row of plain steps, if they fit, and one for each budget, told as they come."""
    training = Training(options)

    def keep(profile: Any) -> None:
        if options.profile and profile is not None:
            profile.save(options.profile)

    known_hardware(training.device)
    before = training.plain(WARMUP)
    peak = 0
    if before is not None:
        peak = before.peak_bytes
        tell(plain_row([before]))
    for asked in options.budgets:
        row = Row("plan", asked)
        training.empty()
        times = met(training, row, peak, keep)
        training.empty()
        after = training.plain()
        if times is not None:
            row.take(times, before, after)
        tell(row)
        before = after


def met(training: Training, row: Row, keep_peak: int, keep: Callable[[Any], None]) -> Times | None:
    """Times within a row's budget. ``None`` if no plan fits; the row has the reason."""
    static = training.static_bytes
    if row.asked != LEAST:
        row.budget_bytes = sized(row.asked, keep_peak, training.options.checkpoint_peak)
    # The resident memory of a process grows: on the CPU it is measured each time.
    if row.asked == LEAST or training.device.type == "cpu":
        static, least = least_of(training, keep)
        if row.asked == LEAST:
            row.budget_bytes = least
    if not row.budget_bytes:
        row.failed = f"{row.asked!r} is a share of a step that does not fit, or was not measured"
        return None
    return attempted(row, lambda: planned(training, row, static, keep), raises=row.asked == LEAST)


def attempted(row: Row, work: Callable[[], Found], *, raises: bool) -> Found | None:
    """The result of some work within the row's budget. ``None`` if no plan fits; the row has the reason.

    Args:
        raises: whether the budget may be raised if steps turn out to be larger than their plan, and there is no other.
    """
    for tried in itertools.count(1):
        try:
            return work()
        except BudgetError as error:
            if not raises or tried > MOST_RAISES or error.least <= error.budget:
                row.failed = str(error)
                return None
            row.budget_bytes += error.least - error.budget + SLACK
        except torch.OutOfMemoryError as error:
            row.failed = str(error)
            return None
    raise AssertionError("got here, expected never to")


def equal(options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Gradients of a smaller stack by plans and without one, with deterministic algorithms.

    The budgets are the smallest one, and one half-way from there to the baseline's peak. A step that recomputes and
    offloads nothing is not compared, since it would be compared with itself.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    training = Training(options, layers=2, tokens=min(options.seq, 4096))
    for _ in range(3):
        loss = training.step()
    expected = [loss, *(gradient.clone() for gradient in training.gradients)]
    # The expected tensors take memory all the time, too.
    training.static_bytes = training.allocated()
    most = training.times(training.step, runs=1, singles=1).peak_bytes
    static, least = least_of(training, lambda profile: None)
    for asked, nbytes in ((LEAST, least), ("half way", (least + most) // 2)):
        row = Row("plan", asked, budget_bytes=nbytes)
        found = attempted(row, partial(compared, training, row, static, expected), raises=True)
        tell({"asked": asked, "budget_bytes": row.budget_bytes, "failed": row.failed, **(found or {})})


def compared(training: Training, row: Row, static: int, expected: list[Tensor]) -> dict[str, Any]:
    """How many tensors of a planned step were compared with those expected, and whether they are equal."""
    with spillway.attach(training.stack, budget=static + row.budget_bytes) as attached:
        held(training, attached)
        got = [training.step(), *training.gradients]
        stats = attached.stats()
    if not stats.offloaded_bytes + stats.recomputed_bytes:
        return {"compared": 0, "equal": False}
    return {"compared": len(got), "equal": all(itertools.starmap(torch.equal, zip(got, expected, strict=True)))}
