"""``spillway bench``: a script in several ways, each in a process of its own that measures its steps and memory.

The process of a way is ``python -m spillway.cli.running.bench ORDER``, with an :class:`Order` as JSON.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch.nn import Module

from spillway.attaching import Attached
from spillway.cli.running.observer import ScriptObserver, StepClock
from spillway.cli.running.options import PLAIN, options_of_way
from spillway.cli.running.result import RunResult, result_of, wrapped
from spillway.cli.running.script import Script, ScriptExit
from spillway.errors import BudgetError, SpillwayError, UsageError, printable
from spillway.runtime.process_memory import ResidentPeak, has_mark, set_malloc
from spillway.units import format_bytes, format_seconds

LEAST_STEPS = 3
"""One step warms up, and the end of another is the begin of the first that is measured."""
SCHEMA = 1
CHILD_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Set for each way, unless the user has set it: with it, cuBLAS is deterministic."""
_ROW = "{:<18}{:>10}{:>10}{:>10}{:>9}{:>11}{:>9}"


class PeakMeter:
    """Measures peak memory from :meth:`start` on: what torch's allocator counts, or on the CPU resident memory.

    Args:
        device: whose memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._resident = ResidentPeak() if device.type == "cpu" else None
        how = "by the kernel's high-water mark" if has_mark() else "sampled"
        self.source = (
            "bytes allocated on the device, by torch's allocator"
            if self._resident is None
            else f"resident bytes of the process, {how}"
        )
        """What is measured, for people."""

    def start(self) -> int:
        """Forget the peak. Returns the bytes in use now."""
        if self._resident is not None:
            return self._resident.restart().now
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()

    def peak(self) -> int:
        """The most bytes in use since :meth:`start`."""
        if self._resident is not None:
            return self._resident.most()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated()


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the process of a way is to do."""

    script: Script
    way: str
    steps: int
    """After which the script is ended."""
    warm_up: int
    """Steps at the begin that are not measured. Nor are those that look for a plan."""
    answer: Path
    """The file of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one way measured. Sizes are bytes."""

    seconds: tuple[float, ...] = ()
    """Of each measured step, from the end of one optimizer step to that of the next."""
    peak_bytes: int | None = None
    """In these steps, by ``peak_source``."""
    peak_source: str = ""
    reserved_bytes: int | None = None
    """Most memory that the GPU's allocator had reserved."""
    outcome: RunResult | None = None
    error: str | None = None
    """Why there is no figure, in a sentence."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way."""

    way: str
    answer: Answer

    @property
    def median(self) -> float | None:
        """Seconds."""
        return statistics.median(self.answer.seconds) if self.answer.seconds else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """Seconds."""
        if len(self.answer.seconds) < 2:
            return None
        low, _, high = statistics.quantiles(self.answer.seconds, method="inclusive")
        return low, high

    def cells(self, plain: Answer | None) -> list[str]:
        """The way in a table, relative to the plain way."""
        seconds = (self.median, *(self.quartiles or (None, None)))
        peak = self.answer.peak_bytes
        return [
            printable(self.way),
            *("-" if each is None else format_seconds(each) for each in seconds),
            _ratio(self.median, None if plain is None else Row("", plain).median),
            "-" if peak is None else format_bytes(peak),
            _ratio(peak, None if plain is None else plain.peak_bytes),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All ways of one script."""

    script: Script
    steps: int
    rows: tuple[Row, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """All of it, for programs: each step's seconds, bytes, and the result of each model."""
        text: bytes = TypeAdapter(Bench).dump_json(self, indent=1)
        return text.decode()

    def to_text(self) -> str:
        """A table of at most 80 columns, and why some ways have no figures."""
        plain = next((row.answer for row in self.rows if row.way == PLAIN), None)
        lines = [_ROW.format("way", "step", "from", "to", "of keep", "peak", "of keep")]
        lines += [_ROW.format(*row.cells(plain)) for row in self.rows]
        notes = ["step: median between optimizer steps; from, to: quartiles. Losses are not compared."]
        notes += sorted({f"peak: {row.answer.peak_source}" for row in self.rows if row.answer.peak_source})
        notes += [f"{row.way}: {row.answer.error}" for row in self.rows if row.answer.error]
        return "\n".join([*lines, "", *(line for note in notes for line in wrapped(note))])


def run_bench(script: Script, ways: Sequence[str], *, steps: int, told: Callable[[str], None]) -> Bench:
    """Run a script in each way, one after the other, each in a process of its own, for so many optimizer steps.

    Args:
        script: to run. Its output is not shown.
        ways: as :func:`~spillway.cli.running.options.options_of_way` takes them.
        steps: after which the script is ended.
        told: called with each way as it begins.

    Raises:
        UsageError: for a missing script, an unknown way, no way at all, or too few steps.
    """
    for way in ways:
        options_of_way(way)
    if not ways:
        raise UsageError("--ways: got none, expected at least one, such as keep,recompute,offload")
    script.check()
    if steps < LEAST_STEPS:
        raise UsageError(f"--steps: got {steps}, expected at least {LEAST_STEPS}, since the first ones warm up")
    rows = []
    for way in ways:
        told(way)
        rows.append(Row(way, _run(script, way, steps)))
    return Bench(script=script, steps=steps, rows=tuple(rows))


def _run(script: Script, way: str, steps: int) -> Answer:
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder, tempfile.TemporaryFile() as errors:
        answer = Path(folder) / "answer.json"
        order = Order(script=script, way=way, steps=steps, warm_up=max(1, steps // 4), answer=answer)
        done = subprocess.run(
            [sys.executable, "-m", "spillway.cli.running.bench", ORDER.dump_json(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**CHILD_ENVIRONMENT, **os.environ},
            check=False,
        )
        if answer.exists():
            found: Answer = ANSWER.validate_json(answer.read_bytes())
            return found
        errors.seek(0)
        lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        code = done.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Answer(error=f"the script {how}: {lines[-1].strip() if lines else 'it said nothing'}")


class Stopwatch:
    """Times the steps after the warm-up and the search for plans, and ends the script after the last one.

    Args:
        order: how many steps.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._last: float | None = None
        self.attached: list[Attached] = []
        """Whose plans have to be active before steps are timed."""
        self.meter: PeakMeter | None = None
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
        elif count >= self._order.warm_up and all(each.stage in (None, "active") for each in self.attached):
            self.meter = PeakMeter(_device())
            self.meter.start()
            now = time.perf_counter()
        if self.meter is not None:
            self._last = now
        if count >= self._order.steps:
            raise ScriptExit


def measure(order: Order) -> Answer:
    """Run the script in one way, in this process.

    Raises:
        BaseException: what the script raises, but for errors of a budget.
    """
    options = options_of_way(order.way)
    if torch.accelerator.current_accelerator() is None:
        # In every way, before the script makes a model.
        set_malloc()
    stopwatch = Stopwatch(order)
    # The plain way is only timed.
    clock = StepClock(stopwatch.stepped) if options is None else None
    observer = None
    if options is not None:

        def attach(model: Module) -> tuple[Attached, str]:
            attached, way = options.attach(model)
            stopwatch.attached.append(attached)
            return attached, way

        observer = ScriptObserver(attach, stopwatch.stepped)
    try:
        order.script.run()
    except SystemExit as ended:
        if ended.code:
            raise
    except BudgetError as error:
        return Answer(error=str(error))
    peak = None if stopwatch.meter is None else stopwatch.meter.peak()
    result = None
    if clock is not None:
        clock.close()
    if observer is not None:
        observer.end()
        result = result_of(observer)
        observer.models.close()
        if not result.roots:
            return Answer(error=f"nothing was attached: {result.reasons}", outcome=result)
    if stopwatch.meter is None or not stopwatch.seconds:
        return Answer(
            error=f"no step was measured in {stopwatch.count} optimizer steps: the first {order.warm_up} are not, nor "
            f"those in which a plan is looked for; give more --steps, or a script that has as many",
            outcome=result,
        )
    return Answer(
        seconds=tuple(stopwatch.seconds),
        peak_bytes=peak,
        peak_source=stopwatch.meter.source,
        reserved_bytes=torch.accelerator.max_memory_reserved() if torch.accelerator.is_available() else None,
        outcome=result,
    )


def _device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _ratio(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.2f}"


ORDER: TypeAdapter[Any] = TypeAdapter(Order)
ANSWER: TypeAdapter[Any] = TypeAdapter(Answer)


def main() -> None:
    """Do what the only argument says, and write the answer to its file."""
    order: Order = ORDER.validate_json(sys.argv[1])
    try:
        answer = measure(order)
    except SpillwayError as error:
        answer = Answer(error=str(error))
    order.answer.write_bytes(ANSWER.dump_json(answer))


if __name__ == "__main__":
    main()
