"""``spillway demo``: the same training, each way in a process of its own, side by side."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from spillway.cli.show import Progress, comparison
from spillway.demo.machine import describe_hardware, describe_versions
from spillway.demo.records import DemoError, Outcome, Report, Row, Settings, make_row
from spillway.demo.runner import WayProcess
from spillway.demo.ways import WAYS, Planned, parse_ways, ways_for
from spillway.errors import UsageError
from spillway.planning.files import check_writable, write_file
from spillway.profiling.machine import known_hardware
from spillway.runtime.malloc import malloc_setting
from spillway.units import parse_bytes

_CPU_SHAPE = {"layers": 8, "width": 256, "sequence": 512, "batch": 16, "steps": 11}
_ACCELERATOR_SHAPE = {"layers": 8, "width": 512, "sequence": 2048, "batch": 16, "steps": 40}

_START_SECONDS = 8.0
"""What one way needs beside its steps: imports, text, hashes."""

_MOST_MORE = 16
"""Steps beyond ``--steps`` that a way may take to find its plan."""

Count = Annotated[int | None, typer.Option(min=1, show_default="by device")]


def demo(
    ways: Annotated[
        str | None,
        typer.Option(help=f"Which ways, with commas between: {', '.join(WAYS)}.", show_default="by device"),
    ] = None,
    steps: Count = None,
    layers: Count = None,
    width: Count = None,
    sequence: Count = None,
    batch: Count = None,
    data: Annotated[Path | None, typer.Option(help="File or folder to train on; else Python's own source.")] = None,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda, cuda:1, ...")] = "auto",
    in_turn: Annotated[
        bool | None,
        typer.Option(
            "--in-turn/--one-by-one",
            help="Ways take turns step by step, so that all see the same machine, or run one after the other.",
            show_default="in turn on the CPU",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Do fewer steps if these take longer; 0: no limit.")] = 165,
    window: Annotated[str | None, typer.Option(help='Bytes in flight at once for offload, as "64MiB".')] = None,
    budget: Annotated[
        str | None,
        typer.Option(help='Bytes that planned may have at most, as "600MiB".', show_default="half-way to the least"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and of the batches.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
) -> None:
    """Train a small GPT on real text, each way in its own process; compare time, memory, gradients."""
    names = None if ways is None else parse_ways(ways.split(","))
    where = _parse_device(device)
    shape = _CPU_SHAPE if where.type == "cpu" else _ACCELERATOR_SHAPE
    given = {"steps": steps, "layers": layers, "width": width, "sequence": sequence, "batch": batch}
    numbers = {name: given[name] or default for name, default in shape.items()}
    planned = numbers.pop("steps")
    names = names or ways_for(where, planned)
    _check_steps(names, planned)
    if window is not None:
        parse_bytes(window, what="window")
    if budget is not None:
        _check_budget(names, budget)
    settings = Settings(
        way="keep",
        device=str(where),
        data=None if data is None else str(data),
        window=window,
        budget=budget,
        seed=seed,
        **numbers,
    )
    settings.check()
    check_writable("--json", json)

    console = Console()
    all_at_once = where.type == "cpu" if in_turn is None else in_turn
    if all_at_once and Planned.name in names:
        _know_hardware(where, console)
    outcomes = _run_ways(
        [names] if all_at_once else [[name] for name in names], settings, planned, seconds, Progress(console)
    )
    report = _report(outcomes, settings)
    for line in comparison(report):
        console.print(line, highlight=False)
    if json is not None:
        write_file(json, report.to_json(), what="--json")
    unequal = [row.way for row in report.rows if row.identical is False]
    if unequal:
        raise DemoError(f"{', '.join(unequal)}: loss or gradients are not bit for bit those of keep; this is a bug")


def _run_ways(
    groups: list[list[str]], settings: Settings, steps: int, seconds: float, progress: Progress
) -> dict[str, Outcome]:
    """Run group after group, the ways of a group in turn, all for as many steps as the first group had time for."""
    outcomes: dict[str, Outcome] = {}
    everything = sum(WAYS[name].cost for group in groups for name in group)
    with progress:
        for group in groups:
            share = sum(WAYS[name].cost for name in group) / everything
            limit = seconds * share - _START_SECONDS * len(group) if seconds and not outcomes else None
            outcomes.update(_run_in_turn(group, settings, steps, limit, progress))
            steps = len(outcomes[group[0]].losses)
    return outcomes


def _run_in_turn(
    names: list[str], settings: Settings, steps: int, limit: float | None, progress: Progress
) -> dict[str, Outcome]:
    with ExitStack() as stack:
        for name in names:
            progress.begin(name, steps)
        processes = [stack.enter_context(WayProcess(replace(settings, way=name))) for name in names]
        for process in processes:
            progress.show(process.way, process.started())
        fewest = max(WAYS[name].fewest_steps for name in names)
        settled = dict.fromkeys(names, 0)
        begin = time.perf_counter()
        for index in range(steps + _MOST_MORE):
            # Another round after this one would take until then, if it takes as long as those before did.
            done = index + 1
            end = (time.perf_counter() - begin) / max(index, 1) * (done + 1)
            is_late = limit is not None and done >= fewest and end > limit
            are_settled = all(settled[name] >= WAYS[name].fewest_settled for name in names)
            last = done == steps + _MOST_MORE or ((done >= steps or is_late) and are_settled)
            for process in processes:
                step = process.step(last=last)
                settled[process.way] += step.settled
                progress.show(process.way, step)
            if last:
                break
        outcomes = {process.way: process.outcome() for process in processes}
    for name, outcome in outcomes.items():
        progress.show(name, outcome)
    return outcomes


def _report(outcomes: dict[str, Outcome], settings: Settings) -> Report:
    settings_of_all = {**asdict(settings), "steps": len(next(iter(outcomes.values())).losses)}
    del settings_of_all["way"]
    device = torch.device(settings.device)
    return Report(
        rows=_rows(outcomes, device),
        hardware=describe_hardware(device),
        versions=describe_versions(),
        settings=settings_of_all,
        malloc=malloc_setting() if device.type == "cpu" else "",
    )


def _rows(outcomes: dict[str, Outcome], device: torch.device) -> list[Row]:
    reference = outcomes.get("keep")
    return [
        make_row(name, outcome, None if device.type != "cpu" and WAYS[name].not_compared else reference)
        for name, outcome in outcomes.items()
    ]


def _parse_device(name: str) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return found or torch.device("cpu")
    known = ["cpu", found.type] if found else ["cpu"]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in known:
        raise UsageError(f"device: got {name!r}, expected auto or one of what this machine has: {', '.join(known)}")
    return device


def _check_steps(names: list[str], steps: int) -> None:
    for name in names:
        # Of the others, few steps say little, but not nothing.
        if name == Planned.name and steps < WAYS[name].fewest_steps:
            raise UsageError(
                f"steps: got {steps} with the way {name}, expected at least {WAYS[name].fewest_steps}, since the first "
                f"ones find its plan; give more --steps, or --ways without it"
            )


def _check_budget(names: list[str], budget: str) -> None:
    parse_bytes(budget, what="budget")
    if Planned.name not in names:
        raise UsageError(
            f"budget: got {budget!r} with the ways {', '.join(names)}, expected {Planned.name} among them, which is "
            f"the one that has a budget; give it in --ways, and at least {Planned.fewest_steps} --steps"
        )


def _know_hardware(device: torch.device, console: Console) -> None:
    """Measure the machine, if it never was, before processes start that would disturb it. Planning wants to know."""
    told: list[str] = []

    def tell(part: str) -> None:
        if not told:
            console.print("measuring this machine, once (spillway doctor shows what it can do)", highlight=False)
        told.append(part)

    known_hardware(device, on_part=tell)
