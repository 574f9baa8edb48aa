"""``spillway demo``: the same training, each way in a process of its own, side by side."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from spillway.cli.show import Progress, comparison
from spillway.demo.machine import describe_hardware, describe_versions
from spillway.demo.records import DemoError, Outcome, Report, Row, Settings, make_row
from spillway.demo.runner import MALLOC, run_way
from spillway.demo.ways import WAYS, parse_ways
from spillway.errors import UsageError
from spillway.units import parse_bytes

_CPU_SHAPE = {"layers": 8, "width": 384, "sequence": 512, "batch": 16, "steps": 8}
_ACCELERATOR_SHAPE = {"layers": 8, "width": 512, "sequence": 2048, "batch": 16, "steps": 40}
_START_SECONDS = 6.0
"""What a process needs for its imports, its text and its hashes."""

Count = Annotated[int | None, typer.Option(min=1, show_default="by device")]


def demo(
    ways: Annotated[str, typer.Option(help=f"Which ways, of {', '.join(WAYS)}.")] = ",".join(WAYS),
    steps: Count = None,
    layers: Count = None,
    width: Count = None,
    sequence: Count = None,
    batch: Count = None,
    data: Annotated[
        Path | None, typer.Option(help="File or folder to train on, instead of Python's own source.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda, cuda:1 ...")] = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Fewer steps if these would take longer; 0: no limit.")] = 150,
    window: Annotated[str | None, typer.Option(help='Bytes in flight at once for offload, as "64MiB".')] = None,
    seed: Annotated[int, typer.Option(help="Of the model's first weights and of the batches.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
) -> None:
    """Train a small GPT on real text, one way after the other, and compare time, memory and gradients."""
    names = parse_ways(ways.split(","))
    settings = _settings(
        device,
        {"steps": steps, "layers": layers, "width": width, "sequence": sequence, "batch": batch},
        {"data": data, "seed": seed, "window": window},
    )
    _check_writable(json)
    console = Console()
    rows = _run_ways(names, settings, seconds or None, console)
    report = Report(
        rows=rows,
        hardware=describe_hardware(torch.device(settings.device)),
        versions=describe_versions(),
        settings=settings.model_dump(mode="json", exclude={"way", "seconds"}),
        environment=MALLOC,
    )
    for line in comparison(report):
        console.print(line)
    if json is not None:
        json.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    unequal = [row.way for row in rows if row.identical is False]
    if unequal:
        raise DemoError(f"{', '.join(unequal)}: loss or gradients are not bit for bit those of keep; this is a bug")


def _settings(device: str, shape: dict[str, int | None], rest: dict[str, object]) -> Settings:
    where = _parse_device(device)
    defaults = _CPU_SHAPE if where.type == "cpu" else _ACCELERATOR_SHAPE
    given = {name: value for name, value in shape.items() if value is not None}
    if rest["window"] is not None:
        parse_bytes(str(rest["window"]), what="window")
    settings = Settings.model_validate({"way": "keep", "device": str(where), **defaults, **given, **rest})
    settings.check()
    return settings


def _parse_device(name: str) -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    known = {"cpu", found.type} if found else {"cpu"}
    if device is None or device.type not in known:
        raise UsageError(f"device: got {name!r}, expected auto or one of what this machine has: {', '.join(known)}")
    return device


def _check_writable(path: Path | None) -> None:
    # Asked before minutes of training rather than after.
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"json: got {path}, expected the name of a file in a folder that exists")


def _run_ways(names: list[str], settings: Settings, seconds: float | None, console: Console) -> list[Row]:
    # A limit of time is divided among the ways: the first keeps to its share, and the others run as many steps as it
    # did, or they could not be compared.
    outcomes: dict[str, Outcome] = {}
    share = None if seconds is None else _first_share(names, seconds)
    with Progress(console) as progress:
        for name in names:
            progress.begin(name, settings.steps)
            with contextlib.closing(
                run_way(settings.model_copy(update={"way": name, "seconds": None if outcomes else share}))
            ) as messages:
                for message in messages:
                    progress.show(name, message)
                    if isinstance(message, Outcome):
                        outcomes[name] = message
            settings = settings.model_copy(update={"steps": len(outcomes[name].losses)})
    return [make_row(name, outcome, outcomes.get("keep")) for name, outcome in outcomes.items()]


def _first_share(names: list[str], seconds: float) -> float:
    costs = [WAYS[name].cost for name in names]
    return max(0.0, (seconds - _START_SECONDS * len(names)) * costs[0] / sum(costs))
