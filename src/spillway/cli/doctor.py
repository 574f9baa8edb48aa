"""``spillway doctor``: facts about this machine, its bandwidths, and what will go wrong on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import spillway
from spillway.cli.plan import AsJson, completed, output, working
from spillway.errors import BackendError, TierError, UsageError, printable
from spillway.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from spillway.cli.findings import Facts, Finding
    from spillway.planner.hardware import Hardware

_COLOURS = {"stops": "red", "costs": "yellow", "note": "cyan"}


def doctor(
    device: Annotated[
        str,
        typer.Option(help="The device: auto, cpu, cuda, cuda:1, ...", autocompletion=completed("auto", "cpu", "cuda")),
    ] = "auto",
    spill_directory: Annotated[
        Path | None,
        typer.Option(help="Directory of the spill file; else SPILLWAY_DIR or a default.", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Longest time for measuring.")] = 20,
    fast: Annotated[bool, typer.Option("--fast", help="Do not measure.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if the machine is known.")] = False,
    out: Annotated[Path | None, output("all of it, as JSON,")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine, and find problems with it.

    Exit code 1: Spillway does not work here as it is.
    """
    from rich.console import Console

    spillway._require_torch()
    from spillway.cli.findings import findings, read_facts
    from spillway.planner.files import check_writable, write_file
    from spillway.planner.report.text import WIDTH
    from spillway.profiler.machine import known_hardware
    from spillway.runtime.system import which_device

    check_writable("--output", out)
    if fast and fresh:
        raise UsageError("got --fast and --fresh, expected one of them: --fast does not measure, --fresh does")
    where = which_device(None if device == "auto" else device)
    facts = read_facts(where, spill_directory)
    found = findings(facts)
    hardware = None
    if not fast and not _stops(found):
        with working("looking") as tell:
            try:
                hardware = known_hardware(
                    where,
                    spill_directory=spill_directory,
                    seconds=seconds,
                    fresh=fresh,
                    on_part=lambda part: tell(f"measuring {part}"),
                )
            except (TierError, BackendError) as error:
                facts.measuring_error = str(error)
        found = findings(facts, hardware)
    if out is not None:
        write_file(out, to_json(facts, hardware, found), what="--output")
    if as_json:
        typer.echo(to_json(facts, hardware, found))
    else:
        console = Console()
        console.width = min(console.width, WIDTH)
        for part in shown(facts, hardware, found):
            console.print(part, highlight=False)
    if _stops(found):
        raise typer.Exit(1)


def to_json(facts: Facts, hardware: Hardware | None, found: tuple[Finding, ...]) -> str:
    """All of it, for programs, in bytes, seconds, and bytes per second."""
    report = {
        "works": not _stops(found),
        "findings": [asdict(finding) for finding in found],
        "hardware": None if hardware is None else json.loads(hardware.to_json()),
        "facts": asdict(facts),
    }
    return json.dumps(report, indent=2)


def shown(facts: Facts, hardware: Hardware | None, found: tuple[Finding, ...]) -> Iterator[RenderableType]:
    """The machine, the findings, and a summary."""
    yield _table(_machine(facts, hardware))
    if found:
        yield _table(
            (
                f"[{_COLOURS[finding.severity]}]{finding.severity}[/]",
                f"{_text(finding.found)}\n{_text(finding.means)}\n[bold]{_text(finding.do)}[/]",
            )
            for finding in found
        )
    costs = sum(finding.severity == "costs" for finding in found)
    if stops := _stops(found):
        yield f"[red]Spillway does not work here as it is: see what stops it ({stops}).[/]"
    else:
        yield f"Spillway works here.{f' Findings that cost time or memory: {costs}.' if costs else ''}"


def _stops(found: tuple[Finding, ...]) -> int:
    """How many findings stop Spillway."""
    return sum(finding.severity == "stops" for finding in found)


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_header=False, show_lines=False)
    table.add_column(no_wrap=True, width=11)
    table.add_column(overflow="fold")
    for row in (*rows, ("", "")):
        table.add_row(*row)
    return table


def _machine(facts: Facts, hardware: Hardware | None) -> Iterator[tuple[str, str]]:
    count = "" if facts.device_count < 2 else f", one of {facts.device_count}"
    size = format_bytes(facts.device_bytes or facts.limit)
    yield "device", f"{_text(facts.device_name)} ({facts.device}), {size}{count}"
    limit = "" if facts.limit >= facts.machine_bytes else f" of the machine's {format_bytes(facts.machine_bytes)}"
    yield "CPU memory", f"{format_bytes(facts.limit)}{limit}, {format_bytes(facts.available)} free"
    if facts.spill_directory is not None:
        how = "direct" if facts.spill_direct else "through the page cache"
        place = f"{_text(facts.spill_directory)} ({facts.spill_kind}, {how})"
        yield "spills to", f"{place}, {format_bytes(facts.spill_free)} free"
    yield "torch", f"{facts.torch}{'' if facts.built_for is None else f', {facts.built_for}'}; {facts.system}"
    if facts.device == "cpu":
        yield "malloc", _text(facts.malloc)
    if hardware is None:
        return
    link = hardware.bandwidth()
    yield "copies", f"{_rate(link.out)} out, {_rate(link.back)} back, {_rate(link.both)} both at once"
    yield "memory", f"{_rate(hardware.memory_bandwidth)} read and written"
    flops = f"{_number(hardware.flops / 1e12)} T" if hardware.flops >= 1e12 else f"{_number(hardware.flops / 1e9)} G"
    yield "compute", f"{flops}FLOP/s in bfloat16"
    if hardware.disk_write is not None and hardware.disk_read is not None:
        yield "disk", f"{_rate(hardware.disk_write)} written, {_rate(hardware.disk_read)} read"
    yield "measured", hardware.date.isoformat()


def _text(text: str) -> str:
    from rich.markup import escape

    return escape(printable(text))


def _rate(rate: float) -> str:
    return f"{_number(rate / 1e9)} GB/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
