"""A script that is measured in one way: the child of ``spillway bench``. It writes what it measured to a file.

Run as ``python -m spillway.running.measured ORDER``, with an :class:`Order` as JSON.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.nn import Module

from spillway.attaching import Attached
from spillway.demo.measure import Meter, meter_for
from spillway.errors import BudgetError, SpillwayError
from spillway.running.asked import Treated
from spillway.running.clock import Clock
from spillway.running.outcome import RunOutcome
from spillway.running.script import Ended, Script
from spillway.running.seeing import Seeing
from spillway.running.ways import Way
from spillway.runtime.malloc import set_malloc


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the child is to do."""

    script: Script
    way: Way
    steps: int
    """After which the script is ended."""
    warm_up: int
    """Steps at the begin that are not measured. While a plan is looked for, nothing is."""
    answer: Path
    """Where the answer goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one way was measured to do."""

    seconds: tuple[float, ...] = ()
    """Of each measured step, from the end of one optimizer step to that of the next."""
    peak_bytes: int | None = None
    """Most bytes in these steps, by ``peak_source``."""
    peak_source: str = ""
    reserved_bytes: int | None = None
    """Most bytes that the accelerator's allocator had reserved."""
    outcome: RunOutcome | None = None
    error: str | None = None
    """Why there is no figure, in a sentence."""


class Stopwatch:
    """Times steps once all is as it will be, and ends the script after so many.

    Args:
        order: how many.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self.attached: list[Attached] = []
        """Whose plans have to be held first."""
        self._last: float | None = None
        self.meter: Meter | None = None
        self.seconds: list[float] = []
        self.count = 0

    def stepped(self, count: int) -> None:
        """An optimizer has made a step."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        self.count = count
        if self._last is not None:
            self.seconds.append(now - self._last)
        elif count >= self._order.warm_up and self._is_steady():
            self.meter = meter_for(_device())
            self.meter.start()
            now = time.perf_counter()
        if self.meter is not None:
            self._last = now
        if count >= self._order.steps:
            raise Ended

    def _is_steady(self) -> bool:
        return all(each.stage in (None, "holding") for each in self.attached)


def measure(order: Order) -> Answer:
    """Run the script. What it raises goes on."""
    asked = order.way.asked
    if torch.accelerator.current_accelerator() is None:
        # For every way alike, before the script makes a model.
        set_malloc()
    stopwatch = Stopwatch(order)

    def treat(model: Module) -> Treated:
        assert asked is not None
        treated = asked.attach(model)
        stopwatch.attached.append(treated.attached)
        return treated

    # A plain way is only timed.
    clock = Clock(stopwatch.stepped) if asked is None else None
    seen = None if asked is None else Seeing(treat, stopwatch.stepped)
    try:
        order.script.run()
    except Ended:
        pass
    except SystemExit as ended:
        if ended.code:
            raise
    except BudgetError as error:
        return Answer(error=str(error))
    peak = None if stopwatch.meter is None else stopwatch.meter.peak()
    outcome = None
    if clock is not None:
        clock.close()
    if seen is not None:
        outcome = seen.end(rank=0)
        seen.close()
    if outcome is not None and not outcome.roots:
        reasons = "; ".join(f"{each.kind} {each.reason}" for each in outcome.not_attached)
        return Answer(error=f"nothing was attached: {reasons or 'no module was called in training'}", outcome=outcome)
    if not stopwatch.seconds:
        return Answer(
            error=f"no step was measured in {stopwatch.count} optimizer steps: the first {order.warm_up} are not, nor "
            f"those in which a plan is looked for; give more --steps, or a script that has as many",
            outcome=outcome,
        )
    device = _device()
    return Answer(
        seconds=tuple(stopwatch.seconds),
        peak_bytes=peak,
        peak_source="" if stopwatch.meter is None else stopwatch.meter.source,
        reserved_bytes=None if device.type == "cpu" else torch.accelerator.max_memory_reserved(),
        outcome=outcome,
    )


def _device() -> torch.device:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")  # type: ignore[return-value]


ORDER: TypeAdapter[Any] = TypeAdapter(Order)
ANSWER: TypeAdapter[Any] = TypeAdapter(Answer)


def main() -> None:
    """Do what the only argument says."""
    order: Order = ORDER.validate_json(sys.argv[1])
    try:
        answer = measure(order)
    except SpillwayError as error:
        answer = Answer(error=str(error))
    order.answer.write_bytes(ANSWER.dump_json(answer))


if __name__ == "__main__":
    main()
