"""The parent's side of ``spillway bench``: a child per way, and a row of what it measured."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spillway.demo.runner import child_environment
from spillway.errors import UsageError, printable
from spillway.running.measured import ANSWER, ORDER, Answer, Order
from spillway.running.script import Script
from spillway.running.table import wrapped
from spillway.running.ways import PLAIN, Way
from spillway.units import format_bytes, format_seconds

LEAST_STEPS = 3
"""One to warm up, and one whose end is the begin of the first that is measured."""
SCHEMA = 1
_HEADINGS = ("way", "step", "from", "to", "of keep", "peak", "of keep")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All ways of one script."""

    script: Script
    steps: int
    rows: tuple[Row, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """All of it, for programs: each step's seconds, bytes, and what came of each model."""
        text: bytes = _BENCH.dump_json(self, indent=1)
        return text.decode()

    def to_text(self) -> str:
        """A table of at most 80 columns, and what was not measured."""
        plain = next((row for row in self.rows if row.way == PLAIN), None)
        lines = ["{:<18}{:>10}{:>10}{:>10}{:>9}{:>11}{:>9}".format(*_HEADINGS)]
        lines += ["{:<18}{:>10}{:>10}{:>10}{:>9}{:>11}{:>9}".format(*_cells(row, plain)) for row in self.rows]
        sources = {row.answer.peak_source for row in self.rows if row.answer.peak_source}
        said = ["step: median between optimizer steps; from, to: quartiles. Losses are not compared."]
        said += [f"peak: {source}" for source in sorted(sources)]
        said += [f"{row.way}: {row.answer.error}" for row in self.rows if row.answer.error]
        return "\n".join([*lines, "", *(line for text in said for line in wrapped(text))])


def run_bench(script: Script, ways: Sequence[Way], *, steps: int, told: Callable[[str], None]) -> Bench:
    """Run a script in each way, one after the other, each in a process of its own, for so many optimizer steps.

    Args:
        script: what to run. What it writes is not shown.
        ways: how.
        steps: after which it is ended.
        told: of each way as it begins.

    Raises:
        UsageError: for a script that is not there, or too few steps.
    """
    script.check()
    if steps < LEAST_STEPS:
        raise UsageError(f"--steps: got {steps}, expected at least {LEAST_STEPS}, since the first ones warm up")
    rows = []
    for way in ways:
        told(way.name)
        rows.append(Row(way.name, _run(script, way, steps)))
    return Bench(script=script, steps=steps, rows=tuple(rows))


def _run(script: Script, way: Way, steps: int) -> Answer:
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder, tempfile.TemporaryFile() as said:
        answer = Path(folder) / "answer.json"
        order = Order(script=script, way=way, steps=steps, warm_up=max(1, steps // 4), answer=answer)
        done = subprocess.run(
            [sys.executable, "-m", "spillway.running.measured", ORDER.dump_json(order).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=child_environment(),
            check=False,
        )
        if answer.exists():
            found: Answer = ANSWER.validate_json(answer.read_bytes())
            return found
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        code = done.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Answer(error=f"the script {how}: {lines[-1].strip() if lines else 'it said nothing'}")


def _cells(row: Row, plain: Row | None) -> list[str]:
    low, high = row.quartiles or (None, None)
    reference = None if plain is None else plain.median
    bytes_of_plain = None if plain is None else plain.answer.peak_bytes
    peak = row.answer.peak_bytes
    return [
        printable(row.way),
        *("-" if each is None else format_seconds(each) for each in (row.median, low, high)),
        _share(row.median, reference),
        "-" if peak is None else format_bytes(peak),
        _share(peak, bytes_of_plain),
    ]


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.2f}"


_BENCH: TypeAdapter[Any] = TypeAdapter(Bench)
