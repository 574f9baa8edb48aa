"""``spillway bench``: a user's own script in several ways, side by side; ``spillway demo``: that of ``training.py``.

The process of a way is ``python -m spillway.cli.bench FILE WAY STEPS SCRIPT ARGUMENTS...``, which writes a
:class:`Result` to the file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import spillway
from spillway.cli import OFF, variable
from spillway.cli.plan import AsJson, completed, hardware_of, output
from spillway.cli.run import Arguments, AsModule, Target, warn_of_misplaced_options
from spillway.errors import BudgetError, SpillwayError, UsageError, printable
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

    from spillway.cli.running.models import ManagedModel
    from spillway.cli.running.script import Script
    from spillway.profiler.meter import DeviceMemory

LEAST_STEPS = 3
"""One step warms up, and the end of another is the start of the first that is measured."""
CHILD_ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Set for each way, unless the user has set it: with it, cuBLAS is deterministic."""
WAYS = "baseline,recompute,offload"
Ways = Annotated[
    str,
    typer.Option(
        help="Separated by commas: baseline, recompute, offload, ratio=0.5, budget=20GiB, plan=FILE.",
        autocompletion=completed(*WAYS.split(","), "ratio=", "budget=", "plan=", is_list=True),
    ),
]
Steps = Annotated[int, typer.Option(help="Optimizer steps of each way; the first quarter warms up.")]
Output = Annotated[Path | None, output("the table, as JSON,")]
_ROW = "{:<17}{:>10}{:>9}{:>11}{:>13}{:>9}{:>10}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The measurement of one way. Sizes are bytes."""

    seconds: list[float] = field(default_factory=list)
    """Time of each measured step, from the end of one optimizer step to that of the next."""
    peak_bytes: int | None = None
    """In these steps: allocated on a GPU, resident memory of the process on the CPU."""
    activation_bytes: int | None = None
    """The peak minus the memory in use just before these steps."""
    outcome: dict[str, Any] | None = None
    """As ``spillway run --output`` writes it."""
    output: str | None = None
    """SHA-256 of what the script printed."""
    error: str | None = None
    """Why there is no figure, in a sentence."""

    @property
    def median(self) -> float | None:
        """Seconds."""
        return statistics.median(self.seconds) if self.seconds else None


def bench(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    ways: Ways = WAYS,
    steps: Steps = 12,
    out: Output = None,
    as_json: AsJson = False,
) -> None:
    """Run a script in several ways, and compare them.

    Each way is a process, which ends after so many optimizer steps. Compared are time, memory and output.
    """
    from spillway.cli.running.script import Script

    script = Script(target, tuple(arguments or ()), is_module=module)
    warn_of_misplaced_options(context, target, script.arguments)
    if all(result.error for result in compare(script, ways, steps, out, as_json=as_json).values()):
        raise typer.Exit(1)


def compare(script: Script, ways: str, steps: int, out: Path | None, *, as_json: bool) -> dict[str, Result]:
    """Run a script in several ways, print the table or its JSON, and write that to a file.

    Raises:
        UsageError: for a wrong argument, before anything runs.
    """
    from spillway.cli.running.options import options_of_way
    from spillway.planner.files import check_writable, write_file

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "got bench in one of several ranks. It starts processes of its own, and runs in one process only: compare "
            "the files of `torchrun ... spillway run --output` instead"
        )
    check_writable("--output", out)
    names = [name for way in dict.fromkeys(ways.split(",")) if (name := way.strip())]
    for way in names:
        options_of_way(way)
    if not names:
        raise UsageError(f"--ways: got none, expected at least one, such as {WAYS}")
    script.check()
    if steps < LEAST_STEPS:
        raise UsageError(f"--steps: got {steps}, expected at least {LEAST_STEPS}, since the first ones warm up")
    results: dict[str, Result] = {}
    for way in names:
        typer.echo(printable(f"{way} ..."), err=True)
        results[way] = _run(script, way, steps)
    rows = [{"way": way, "answer": asdict(result)} for way, result in results.items()]
    report = json.dumps({"script": asdict(script), "steps": steps, "rows": rows, "schema": 1}, indent=1)
    typer.echo(report if as_json else to_text(results))
    if out is not None:
        write_file(out, report, what="--output")
    return results


def to_text(results: dict[str, Result]) -> str:
    """A table of at most 80 columns, and why some ways have no figures."""
    from spillway.cli.running.options import BASELINE
    from spillway.cli.running.result import wrapped

    def share(part: float | None, whole: float | None) -> str:
        return "-" if part is None or not whole else f"{part / whole:.2f}"

    baseline = results.get(BASELINE, Result())
    lines = [_ROW.format("way", "step", "of base", "peak", "activations", "of base", "output")]
    for way, each in results.items():
        same = "-" if not baseline.output else "same" if each.output == baseline.output else "other"
        cells = (
            "-" if each.median is None else format_seconds(each.median),
            share(each.median, baseline.median),
            "-" if each.peak_bytes is None else format_bytes(each.peak_bytes),
            "-" if each.activation_bytes is None else format_bytes(each.activation_bytes),
            share(each.activation_bytes, baseline.activation_bytes),
            "-" if each.error else same,
        )
        lines.append(_ROW.format(printable(way), *cells))
    notes = [
        "step: median between optimizer steps. peak: memory allocated on a GPU, or resident memory of the process on "
        "the CPU. activations: the peak minus the memory in use between steps. output: whether the script printed the "
        "same as in baseline.",
    ]
    notes += [f"{way}: {each.error}" for way, each in results.items() if each.error]
    return "\n".join([*lines, "", *(line for note in notes for line in wrapped(note))])


def _run(script: Script, way: str, steps: int) -> Result:
    """Run a script in one way, in a process of its own. Its output is not shown."""
    with (
        tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder,
        tempfile.TemporaryFile() as errors,
        tempfile.TemporaryFile() as output,
    ):
        file = Path(folder) / "result.json"
        module = ["-m"] if script.is_module else []
        words = [str(file), way, str(steps), *module, script.target, *script.arguments]
        done = subprocess.run(
            [sys.executable, "-m", "spillway.cli.bench", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env={**CHILD_ENVIRONMENT, **os.environ, variable("budget"): OFF},
            check=False,
        )
        output.seek(0)
        if file.exists():
            digest = hashlib.file_digest(output, "sha256").hexdigest()
            return replace(Result(**json.loads(file.read_bytes())), output=digest)
        errors.seek(0)
        lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
        code = done.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Result(error=f"the script {how}: {lines[-1].strip() if lines else 'it said nothing'}")


class Stopwatch:
    """Times the steps after the warm-up and the search for plans, and ends the script after the last one."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.device = device
        self.steps, self.warm_up = steps, max(1, steps // 4)
        self.models: Sequence[ManagedModel] = ()
        """Their plans have to be active before steps are timed."""
        self.memory: DeviceMemory | None = None
        """Its peak is that of the measured steps."""
        self.bytes_before = 0
        """In use when they began."""
        self.ends: list[float] = []

    def stepped(self, count: int) -> None:
        import torch

        from spillway.cli.running.script import ScriptExit
        from spillway.profiler.meter import DeviceMemory

        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if self.ends:
            self.ends.append(now)
        elif count >= self.warm_up and all(each.attached.stage in (None, "active") for each in self.models):
            self.memory = DeviceMemory(self.device)
            self.bytes_before = self.memory.reset_peak().now
            self.ends.append(time.perf_counter())
        if count >= self.steps:
            raise ScriptExit


def measure(script: Script, way: str, steps: int) -> Result:
    """Run the script in one way, in this process, and end it after so many optimizer steps.

    Raises:
        BaseException: what the script raises, except errors of a budget.
    """
    import torch

    from spillway.cli.running.models import ScriptObserver, StepClock
    from spillway.cli.running.options import options_of_way
    from spillway.cli.running.result import result_of
    from spillway.runtime.cpu import set_malloc

    options = options_of_way(way)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type == "cpu":
        # In every way, before the script makes a model.
        set_malloc()
    watch = Stopwatch(steps, device)
    # The baseline is only timed.
    clock = StepClock(watch.stepped) if options is None else ScriptObserver(options.attach, watch.stepped)
    if isinstance(clock, ScriptObserver):
        watch.models = clock.models.managed
    try:
        script.run()
    except BudgetError as error:
        return Result(error=str(error))
    peak, outcome = 0 if watch.memory is None else watch.memory.peak(), None
    clock.end()
    if isinstance(clock, ScriptObserver):
        result = result_of(clock)
        outcome = json.loads(result.to_json())
        clock.models.close()
        if not result.models:
            return Result(error=f"nothing was attached: {result.reasons}", outcome=outcome)
    if len(watch.ends) < 2:
        return Result(
            error=f"no step was measured in {clock.count} optimizer steps: the first {watch.warm_up} are not, nor "
            f"those in which a plan is looked for; give more --steps, or a script that has as many",
            outcome=outcome,
        )
    return Result(
        seconds=[end - begin for begin, end in itertools.pairwise(watch.ends)],
        peak_bytes=peak,
        activation_bytes=peak - watch.bytes_before,
        outcome=outcome,
    )


def demo(
    context: typer.Context,
    ways: Ways = "baseline,recompute,offload,budget=60%",
    steps: Steps = 16,
    out: Output = None,
    as_json: AsJson = False,
) -> None:
    """Train a small GPT in several ways, and compare them.

    It learns real text. Compared are time, memory, losses and gradients.

    Other options are the training's: --device, --layers, --width, --sequence, --batch and --data.
    """
    spillway._require_torch()
    from spillway.cli.running.script import Script
    from spillway.cli.training import parse

    settings = parse(context.args)
    if "budget=" in ways:
        # Before processes start that would disturb it.
        hardware_of(None, settings.device)
    results = compare(Script("spillway.cli.training", context.args, is_module=True), ways, steps, out, as_json=as_json)
    outputs = {result.output for result in results.values() if not result.error}
    if failed := [way for way, result in results.items() if result.error]:
        raise SpillwayError(f"{', '.join(failed)}: no step was measured. The table says why")
    if len(outputs) > 1:
        raise SpillwayError("losses or gradients are not bit for bit the same in all ways. This is a bug; report it")


def main() -> None:
    """Run one way, and write its result to a file: see the top of this file."""
    from spillway.cli.running.script import Script

    file, way, steps, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    target, *arguments = words[is_module:]
    try:
        result = measure(Script(target, arguments, is_module=is_module), way, int(steps))
    except SpillwayError as error:
        result = Result(error=str(error))
    Path(file).write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
