"""``spillway demo``: the same training in several ways, side by side, each in a process of its own."""

from __future__ import annotations

import json as json_module
import multiprocessing
import os
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import spillway
from spillway.cli.plan import hardware_of, working
from spillway.errors import SpillwayError, UsageError
from spillway.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from spillway.cli.training import Row, Settings

_CPU_SHAPE = {"layers": 8, "width": 256, "sequence": 512, "batch": 8, "steps": 11}
_ACCELERATOR_SHAPE = {"layers": 8, "width": 512, "sequence": 2048, "batch": 16, "steps": 40}
_START_SECONDS = 8.0
"""Time of one way that is not spent in steps: imports, text, hashes."""
_HEADINGS = ["way", "step\ntime", "of\nbase", "\ntok/s", "\npeak", "activa-\ntions", "of\nbase", "\nmoved", "\nloss"]
_HEADINGS += ["iden-\ntical"]

Count = Annotated[int | None, typer.Option(min=1, show_default="by device")]


class DemoError(SpillwayError, RuntimeError):
    """The process of a way ended early, or its numbers differ from the baseline's."""


def demo(
    ways: Annotated[
        str | None,
        typer.Option(
            help="Which ways, separated by commas: baseline, checkpoint, offload, planned, optimizer.",
            show_default="by device",
        ),
    ] = None,
    steps: Count = None,
    layers: Count = None,
    width: Count = None,
    sequence: Count = None,
    batch: Count = None,
    data: Annotated[
        Path | None, typer.Option(help="File or folder to train on.", show_default="Python's own source")
    ] = None,
    device: Annotated[str, typer.Option(help="The device: auto, cpu, cuda, cuda:1, ...")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Do fewer steps if these take longer; 0: no limit.")] = 165,
    window: Annotated[str | None, typer.Option(help='In-flight limit of offload, as "64MiB".')] = None,
    budget: Annotated[
        str | None,
        typer.Option(help='Memory budget of planned, as "600MiB".', show_default="half-way to the smallest"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
) -> None:
    """Train a small GPT on real text, each way in its own process; compare time, memory, gradients."""
    from rich.console import Console

    spillway._require_torch()
    from spillway.cli.training import WAYS, Settings
    from spillway.planner.files import check_writable, write_file
    from spillway.runtime.system import which_device

    where = which_device(None if device == "auto" else device)
    shape = _CPU_SHAPE if where.type == "cpu" else _ACCELERATOR_SHAPE
    given = {"steps": steps, "layers": layers, "width": width, "sequence": sequence, "batch": batch}
    numbers = {name: given[name] or default for name, default in shape.items()}
    planned_steps = numbers.pop("steps")
    names = choose_ways(ways, where.type, planned_steps)
    text = None if data is None else str(data)
    settings = Settings(device=str(where), data=text, window=window, budget=budget, seed=seed, **numbers)
    if "planned" in names:
        if planned_steps < WAYS["planned"]:
            raise UsageError(
                f"steps: planned needs at least {WAYS['planned']}, and got {planned_steps}: its first steps find the "
                f"plan. Give more --steps, or --ways without it"
            )
    elif budget is not None:
        raise UsageError(
            f"budget: got {budget!r}, and the ways {', '.join(names)} have none. Only planned has a budget: add it to "
            f"--ways, with at least {WAYS['planned']} --steps"
        )
    check_writable("--json", json)
    if "planned" in names:
        # Before processes start that would disturb it.
        hardware_of(None, settings.device)
    with working("starting", stderr=False) as said:
        rows = compare(names, settings, planned_steps, seconds=seconds, said=said)
    console = Console()
    for line in comparison(rows, settings):
        console.print(line, highlight=False)
    if json is not None:
        write_file(json, to_json(rows, settings), what="--json")
    different = [row["way"] for row in rows if row["identical"] is False]
    if different:
        raise DemoError(
            f"{', '.join(different)}: loss or gradients are not bit for bit the baseline's. This is a bug; report it"
        )


def choose_ways(names: str | None, device: str, steps: int) -> list[str]:
    """Ways by their names with commas between, in the order of the table.

    ``None``: those for which so many steps are enough. On the CPU, ``optimizer`` is not among them: it gains nothing.
    """
    from spillway.cli.training import WAYS

    if names is None:
        enough = [way for way, fewest in WAYS.items() if fewest <= max(steps, WAYS["baseline"])]
        return [way for way in enough if way != "optimizer" or device != "cpu"]
    wanted = set(names.split(",")) - {""}
    if not wanted or wanted - WAYS.keys():
        got = ", ".join(sorted(wanted - WAYS.keys())) or "none"
        raise UsageError(f"ways: got {got}, expected some of {', '.join(WAYS)}; write --ways baseline,offload")
    return [way for way in WAYS if way in wanted]


def compare(
    ways: Sequence[str], settings: Settings, steps: int, *, seconds: float = 0, said: Callable[[str], object]
) -> list[Row]:
    """Train in each way, one after the other, and compare with the baseline if it is among them.

    ``planned`` runs first, since it may need more steps; the others then make as many. If all of it would take longer
    than ``seconds``, fewer are made; 0: no limit. ``said`` is called with a line for each step.
    """
    rows: dict[str, Row] = {}
    limit = seconds / len(ways) - _START_SECONDS if seconds else None
    for way in sorted(ways, key=lambda way: way != "planned"):
        rows[way] = run_way(way, settings, steps, limit, said=said)
        steps, limit = len(rows[way]["losses"]), None
    return [compared(rows[way], rows.get("baseline"), settings.device) for way in ways]


def run_way(
    way: str, settings: Settings, steps: int, limit: float | None = None, *, said: Callable[[str], object]
) -> Row:
    """Train in one way, in a process of its own. No process is left behind.

    Raises:
        SpillwayError: what Spillway raises in the process; :class:`DemoError` if it ends early.
    """
    from spillway.cli.training import train

    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(other, way, settings, steps, limit), daemon=True)
    process.start()
    other.close()
    try:
        while isinstance(message := connection.recv(), str):
            said(message)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        memory = " (the system may have run out of memory; try a smaller --batch)" if code == -signal.SIGKILL else ""
        raise DemoError(f"{way}: its process {how}{memory}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(message, SpillwayError):
        raise message
    return message  # type: ignore[no-any-return]


def compared(row: Row, baseline: Row | None, device: str) -> Row:
    """A row that tells whether its bits are those of the baseline, where they have to be."""
    if baseline is None or (row["way"] == "optimizer" and device != "cpu"):
        return row
    return {**row, "identical": row["fingerprint"] == baseline["fingerprint"]}


def comparison(rows: Sequence[Row], settings: Settings) -> Iterator[RenderableType]:
    """The table of the ways, and what its columns mean."""
    import torch
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "way" else "right", vertical="bottom", no_wrap=True)
    baseline = next((row for row in rows if row["way"] == "baseline"), None)
    for row in rows:
        table.add_row(*_cells(row, baseline))
    hardware = describe_hardware(torch.device(settings.device))
    yield from ("", table, "")
    yield (
        f"{hardware['device']}, {hardware['threads']} threads, torch {torch.__version__}; {settings.layers} layers of "
        f"{settings.width}, {settings.batch} x {settings.sequence} tokens, {len(rows[0]['losses'])} steps."
    )
    yield (
        f"peak: {rows[0]['peak_source']}. activations: the peak minus the memory in use before the first step, with "
        f"gradients and optimizer state. step time: median without the first step; of planned, of steps with its plan. "
        f"of base: relative to baseline. moved: bytes offloaded in one step. identical: every loss, and all gradients "
        f"of the first and last step, are bit for bit the baseline's."
    )
    for row in rows:
        if row["note"]:
            yield row["note"]
        if baseline is not None and row["identical"] is None:
            yield (
                f"{row['way']} is not compared: the CPU's kernels round differently from the GPU's, so its losses are "
                f"only close to the baseline's."
            )


def _cells(row: Row, baseline: Row | None) -> list[str]:
    def share(name: str) -> str:
        return f"{row[name] / baseline[name]:.0%}" if baseline and baseline[name] else "-"

    speed = row["tokens_per_second"]
    return [
        row["way"],
        format_seconds(row["step_seconds"]),
        share("step_seconds"),
        f"{speed:.0f}" if speed < 1000 else f"{speed / 1000:.1f}k" if speed < 100_000 else f"{speed / 1000:,.0f}k",
        format_bytes(row["peak_bytes"]),
        format_bytes(row["activation_peak_bytes"]),
        share("activation_peak_bytes"),
        format_bytes(row["moved_bytes"]) if row["moved_bytes"] else "-",
        f"{row['loss']:.4f}",
        {True: "yes", False: "NO", None: "-"}[row["identical"]],
    ]


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """The device, the processor with the cores that this process may use, the memory in bytes, the system."""
    import psutil
    import torch

    from spillway.runtime.system import cpu_name, device_name

    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of Spillway, torch and Python."""
    import torch

    return {"spillway": spillway.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def to_json(rows: Sequence[Row], settings: Settings) -> str:
    """All that was measured, with the machine, the versions and the settings."""
    import torch

    from spillway.runtime.process_memory import malloc_setting

    device = torch.device(settings.device)
    report = {
        "rows": rows,
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "settings": {**asdict(settings), "steps": len(rows[0]["losses"])},
        "malloc": malloc_setting() if device.type == "cpu" else "",
    }
    return json_module.dumps(report, indent=2) + "\n"
