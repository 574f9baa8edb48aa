"""``spillway demo``: the same training in several ways, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spillway.cli.plan import hardware_of, working

if TYPE_CHECKING:
    from rich.console import RenderableType

    from spillway.cli.running.demo import Row, Settings

_CPU_SHAPE = {"layers": 8, "width": 256, "sequence": 512, "batch": 8, "steps": 11}
_ACCELERATOR_SHAPE = {"layers": 8, "width": 512, "sequence": 2048, "batch": 16, "steps": 40}
_HEADINGS = (
    "way",
    "step\ntime",
    "of\nkeep",
    "\ntok/s",
    "\npeak",
    "activa-\ntions",
    "of\nkeep",
    "\nmoved",
    "\nloss",
    "iden-\ntical",
)

Count = Annotated[int | None, typer.Option(min=1, show_default="by device")]


def demo(
    ways: Annotated[
        str | None,
        typer.Option(
            help="Which ways, separated by commas: keep, checkpoint, offload, planned, optimizer.",
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
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda, cuda:1, ...")] = "auto",
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

    from spillway.cli.running.demo import WAYS, DemoError, Settings, choose_ways, compare, to_json
    from spillway.errors import UsageError
    from spillway.planner.files import check_writable, write_file
    from spillway.runtime.system import which_device
    from spillway.units import parse_bytes

    where = which_device(None if device == "auto" else device)
    shape = _CPU_SHAPE if where.type == "cpu" else _ACCELERATOR_SHAPE
    given = {"steps": steps, "layers": layers, "width": width, "sequence": sequence, "batch": batch}
    numbers = {name: given[name] or default for name, default in shape.items()}
    planned_steps = numbers.pop("steps")
    names = choose_ways(ways, where.type, planned_steps)
    if "planned" in names and planned_steps < WAYS["planned"]:
        raise UsageError(
            f"steps: planned needs at least {WAYS['planned']}, and got {planned_steps}: its first steps find the plan. "
            f"Give more --steps, or --ways without it"
        )
    if window is not None:
        parse_bytes(window, what="window")
    if budget is not None:
        parse_bytes(budget, what="budget")
        if "planned" not in names:
            raise UsageError(
                f"budget: got {budget!r}, and the ways {', '.join(names)} have none. Only planned has a budget: add it "
                f"to --ways, with at least {WAYS['planned']} --steps"
            )
    settings = Settings(
        device=str(where),
        data=None if data is None else str(data),
        window=window,
        budget=budget,
        seed=seed,
        **numbers,
    )
    check_writable("--json", json)

    console = Console()
    if "planned" in names:
        # Before processes start that would disturb it.
        hardware_of(None, settings.device)
    with working("starting", stderr=False) as said:
        rows = compare(names, settings, planned_steps, seconds=seconds, said=said)
    for line in comparison(rows, settings):
        console.print(line, highlight=False)
    if json is not None:
        write_file(json, to_json(rows, settings), what="--json")
    different = [row.way for row in rows if row.identical is False]
    if different:
        raise DemoError(
            f"{', '.join(different)}: loss or gradients are not bit for bit those of keep. This is a bug; report it"
        )


def comparison(rows: Sequence[Row], settings: Settings) -> Iterator[RenderableType]:
    """The table of the ways, and what its columns mean."""
    import torch
    from rich import box
    from rich.table import Table

    from spillway.cli.running.demo import NOT_COMPARED, describe_hardware

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "way" else "right", vertical="bottom", no_wrap=True)
    reference = next((row for row in rows if row.way == "keep"), None)
    for row in rows:
        table.add_row(*_cells(row, reference))
    hardware = describe_hardware(torch.device(settings.device))
    yield from ("", table, "")
    yield (
        f"{hardware['device']}, {hardware['threads']} threads, torch {torch.__version__}; {settings.layers} layers of "
        f"{settings.width}, {settings.batch} x {settings.sequence} tokens, {len(rows[0].losses)} steps."
    )
    yield (
        f"peak: {rows[0].peak_source}. activations: the peak minus the memory in use before the first step, with "
        f"gradients and optimizer state. step time: median without the first step; of planned, of steps with its plan. "
        f"moved: bytes offloaded in one step. identical: every loss, and all gradients of the first and last step, are "
        f"bit for bit those of keep."
    )
    yield from (row.note for row in rows if row.note)
    yield from (
        f"{row.way} is not compared: {NOT_COMPARED}." for row in rows if reference is not None and row.identical is None
    )


def _cells(row: Row, reference: Row | None) -> list[str]:
    from spillway.units import format_bytes, format_seconds

    def share(part: float, whole: float | None) -> str:
        return f"{part / whole:.0%}" if whole else "-"

    speed = row.tokens_per_second
    return [
        row.way,
        format_seconds(row.step_seconds),
        share(row.step_seconds, reference.step_seconds if reference else None),
        f"{speed:.0f}" if speed < 1000 else f"{speed / 1000:.1f}k" if speed < 100_000 else f"{speed / 1000:,.0f}k",
        format_bytes(row.peak_bytes),
        format_bytes(row.activation_peak_bytes),
        share(row.activation_peak_bytes, reference.activation_peak_bytes if reference else None),
        format_bytes(row.moved_bytes) if row.moved_bytes else "-",
        f"{row.loss:.4f}",
        {True: "yes", False: "NO", None: "-"}[row.identical],
    ]
