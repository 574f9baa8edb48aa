"""Step time over peak memory: plans within a sweep of budgets, compared with other ways to save memory.

    python benchmarks/pareto.py --json pareto.json --picture pareto.svg     # 16 layers of 8b, 8192 tokens
    python benchmarks/pareto.py --shape tiny --layers 4 --seq 2048 --equality

A step is a forward and a backward over a stack of decoder layers in bfloat16, whose input is no leaf. Gradients stay
allocated, and each step sets them to zero. ``--together`` steps are timed without a synchronisation between them. A row
has the median of ``--runs`` such runs for one step, and their range. *single* is a step with a synchronisation before
and after it. *peak* is the memory that a step allocates at most, above parameters and gradients.

Each method has a process of its own, and all budgets share one. The baseline (*keep*, plain steps) is measured before
and after each row, in its process. *ratio* is that of a row's step to the mean of these two. *of best* is the
ratio of a plan to the fastest method whose peak is within the same budget, or within the plan's own peak.

A budget is a share of the baseline's peak, ``checkpoint`` (the peak of checkpointing each layer), ``least`` (the
smallest feasible one), or a size, ``20GiB``; all above parameters and gradients. On the CPU, memory is the resident
memory of the process, which fluctuates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from _picture import Point, picture
from _planned import CHECKPOINT, LEAST, Row, equal, plain_row, sweep
from _table import describe_hardware, describe_versions
from _training import ATTACHED, KEEP, WARMUP, Times, Training
from spillway.units import format_bytes
from step import METHODS

GIB = 2**30
DEFAULT = [CHECKPOINT, "spillway.offload()", "attach(inputs offloaded)", "attach(mixture)"]
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has glibc give memory back when it is freed, so that what a process has resident between steps moves less."""
BROKEN = "its process ended with"
TOLD = "told: "
"""Begins the lines in which a child tells what it found."""


def measure(options: argparse.Namespace, tell: Callable[[Row], None]) -> None:
    """One method, between two looks at plain steps."""
    training = Training(options)
    row = Row(options.child)
    before = training.plain(WARMUP)
    training.empty()
    times: Times | None = None
    try:
        with training.by(options.child) as step:
            for _ in range(WARMUP):
                step()
            times = training.times(step)
    except torch.OutOfMemoryError as error:
        row.failed = str(error)
    training.empty()
    after = training.plain()
    if times is not None:
        row.take(times, before, after)
    tell(row)
    if before is not None and after is not None:
        tell(plain_row([before, after]))


def tell(found: Any) -> None:
    print(TOLD + json.dumps(found if isinstance(found, dict) else asdict(found)), flush=True)


# The parent process runs the children, compares and writes the results.


def run_child(child: str, options: argparse.Namespace, **more: Any) -> Iterator[dict[str, Any]]:
    """Results of a child process, as they come."""
    names = ("shape", "layers", "seq", "runs", "together", "device", "window", "profile", "traces")
    given = {name: getattr(options, name) for name in names} | more
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, __file__, *words, f"--child={child}", "--budgets", *options.budgets]
    environment = {**os.environ, **(GIVES_BACK if options.device == "cpu" else {})}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for said in process.stdout:
            if said.startswith(TOLD):
                yield json.loads(said.removeprefix(TOLD))
            else:
                print(said, end="", flush=True)
    if process.returncode == 3:
        yield asdict(Row(child, failed="cannot be imported here"))
    elif process.returncode and child in ("plan", "equality"):
        raise SystemExit(f"{child}: its process ended with {process.returncode}")
    elif process.returncode:
        # The others are measured all the same.
        yield asdict(Row(child, failed=f"{BROKEN} {process.returncode}"))


def compare(row: Row, methods: list[Row]) -> None:
    """A plan with the fastest of the methods that are within the same bytes."""
    if not row.asked:
        return
    most = max(row.budget_bytes, row.peak_bytes)
    rivals = [each for each in methods if not each.failed and each.peak_bytes <= most]
    if row.failed or not rivals:
        return
    in_ratios = bool(row.of_keep) and all(each.of_keep for each in rivals)

    def cost(each: Row) -> float:
        return each.of_keep if in_ratios else each.step_seconds

    best = min(rivals, key=cost)
    row.best, row.of_best = best.way, cost(row) / cost(best)


def name_of(row: Row) -> str:
    return f"{row.way} within {row.asked}" if row.asked else row.way


def line(row: Row) -> str:
    if row.failed:
        return f"{name_of(row):<26} no figures: {row.failed}"
    cells = [
        f"{row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to {row.step_max * 1e3:.1f})",
        f"single {row.single_seconds * 1e3:.1f}",
        f"x{row.of_keep:.3f} of the baseline" if row.of_keep else "the baseline does not fit",
        f"peak {row.peak_bytes / GIB:.3f} GiB",
    ]
    if row.plan:
        plan = row.plan
        cells += [
            f"{'within' if row.within else 'OVER'} {row.budget_bytes / GIB:.3f}",
            f"x{row.of_best:.3f} of {row.best}" if row.best else "no method as small",
            f"predicted {plan['predicted_seconds'] * 1e3:.1f} ms, {plan['predicted_peak_bytes'] / GIB:.3f} GiB",
            f"offloaded {format_bytes(plan['sent_bytes'])}, recomputed {format_bytes(plan['recomputed_bytes'])}",
            f"stalls {plan['out_stall_seconds'] * 1e3:.1f} + {plan['back_stall_seconds'] * 1e3:.1f} ms",
            f"window {plan['window_bytes'] >> 20} MiB",
            f"{plan['plans']} plans in {plan['solving_seconds']:.1f} s, {plan['steps_until_holding']} steps",
            *([] if plan["held"] else ["NOT ACTIVE"]),
        ]
    return f"{name_of(row):<26}" + "  ".join(cells)


def said_of(told: dict[str, Any]) -> str:
    """A comparison of gradients in words."""
    if told["failed"]:
        return str(told["failed"])
    if not told["compared"]:
        return "not compared: nothing is recomputed or offloaded"
    return f"{told['compared']} tensors, loss and gradients, are {'equal' if told['equal'] else 'NOT EQUAL'}"


def summary(rows: list[Row]) -> str:
    """A table of all rows."""
    plain = next((row.peak_bytes for row in rows if row.way == KEEP), 0)
    lines = [f"{'way':<32}{'ratio':>9}{'peak GiB':>10}{'ratio':>9}{'within':>8}{'of best':>9}  best"]
    for row in rows:
        if row.failed:
            lines.append(f"{name_of(row):<32}{'-':>9}")
            continue
        within = ("yes" if row.within else "NO") if row.asked else ""
        lines.append(
            f"{name_of(row):<32}"
            + (f"{row.of_keep:9.3f}" if row.of_keep else f"{'-':>9}")
            + f"{row.peak_bytes / GIB:10.3f}"
            + (f"{row.peak_bytes / plain:9.1%}" if plain else f"{'-':>9}")
            + f"{within:>8}"
            + (f"{row.of_best:9.3f}  {row.best}" if row.best else "")
        )
    return "\n".join(lines)


def drawn(rows: list[Row]) -> str:
    """Ratios over peaks as SVG; seconds, where plain steps do not fit."""
    figures = [row for row in rows if not row.failed]
    in_ratios = all(row.of_keep for row in figures)
    points = [
        Point(
            row.asked or row.way,
            row.peak_bytes / GIB,
            row.of_keep if in_ratios else row.step_seconds,
            joined=bool(row.asked),
        )
        for row in figures
    ]
    return picture(
        points,
        across="peak of activations, GiB",
        up="step, of one that keeps everything" if in_ratios else "step, seconds",
        joined="plans, by their budgets",
        others="other methods",
    )


def write(options: argparse.Namespace, rows: list[Row], equality: list[dict[str, Any]]) -> None:
    if options.json:
        hidden = ("json", "picture", "profile", "traces", "child", "checkpoint_peak")
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": describe_versions(),
            "hardware": describe_hardware(torch.device(options.device)),
            "options": {name: value for name, value in vars(options).items() if name not in hidden},
            "rows": [asdict(row) for row in rows],
            "equality": equality,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    if options.picture and any(not row.failed for row in rows):
        options.picture.write_text(drawn(rows))


def parser() -> argparse.ArgumentParser:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    small = accelerator is None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny" if small else "8b", help="tiny, 1b, 8b or 70b")
    parser.add_argument("--layers", type=int, default=4 if small else 16)
    parser.add_argument("--seq", type=int, default=1024 if small else 8192)
    parser.add_argument("--together", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--runs", type=int, default=3, help="such runs, to take the median of")
    parser.add_argument("--window", help="of the session, in bytes or as 512MiB")
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument(
        "--methods",
        nargs="*",
        default=DEFAULT,
        choices=[name for name in (*ATTACHED, *METHODS) if name != KEEP],
        metavar="METHOD",
        help="beside keep: those of step.py (save_on_cpu, say), and " + ", ".join(ATTACHED),
    )
    parser.add_argument(
        "--budgets",
        nargs="*",
        default=["0.3", "0.5", CHECKPOINT, "1.1", LEAST],
        metavar="BUDGET",
        help="shares of the baseline's peak, checkpoint, least, or sizes",
    )
    parser.add_argument("--equality", action="store_true", help="compare gradients of a smaller stack, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write the profile that plans are made of to FILE")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="write a trace of two steps of each plan, it, and what it was made of",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the figures")
    parser.add_argument("--checkpoint-peak", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace) -> None:
    begin = time.perf_counter()
    methods: list[Row] = []
    plain: list[Row] = []
    plans: list[Row] = []
    equality: list[dict[str, Any]] = []
    needed = [CHECKPOINT] if CHECKPOINT in options.budgets else []
    for method in dict.fromkeys((*needed, *options.methods)):
        for told in run_child(method, options):
            row = Row(**told)
            (plain if row.way == KEEP else methods).append(row)
            print(line(row), flush=True)
        write(options, [*plain[:1], *methods], equality)
    checkpoint_peak = next((row.peak_bytes for row in methods if row.way == CHECKPOINT), 0)
    if options.budgets:
        for told in run_child("plan", options, checkpoint_peak=checkpoint_peak):
            row = Row(**told)
            compare(row, [*plain[:1], *methods])
            (plain if row.way == KEEP else plans).append(row)
            print(line(row), flush=True)
            write(options, [*plain[:1], *methods, *plans], equality)
    if options.equality:
        for told in run_child("equality", options):
            equality.append(told)
            print(f"gradients, plan within {told['asked']}: {said_of(told)}", flush=True)
    rows = [*(plain[:1] or [Row(KEEP, failed="does not fit")]), *methods, *plans]
    write(options, rows, equality)
    print(f"\n{time.perf_counter() - begin:.0f} s for all of it\n\n{summary(rows)}", flush=True)
    if any(row.failed.startswith(BROKEN) for row in rows):
        raise SystemExit(1)


def main() -> None:
    options = parser().parse_args()
    if options.child == "plan":
        sweep(options, tell)
    elif options.child == "equality":
        equal(options, tell)
    elif options.child:
        measure(options, tell)
    else:
        run(options)


if __name__ == "__main__":
    main()
