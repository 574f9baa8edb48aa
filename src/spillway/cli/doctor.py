"""``spillway doctor``: what this machine can do, and what will go wrong on it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from spillway.doctor.facts import Facts, read_facts
from spillway.doctor.findings import Finding, Severity, findings
from spillway.errors import BackendError, TierError, UsageError, printable
from spillway.planning.hardware import Hardware
from spillway.profiling.machine import known_hardware
from spillway.runtime.which_device import which_device
from spillway.units import format_bytes

WIDEST = 80
"""Columns, as every terminal has them and every bug report shows them."""

_FIRST_COLUMN = 11
_COLOURS = {Severity.STOPS: "red", Severity.COSTS: "yellow", Severity.NOTE: "cyan"}


def doctor(
    device: Annotated[str, typer.Option(help="What to look at: auto, cpu, cuda, cuda:1, ...")] = "auto",
    spill_directory: Annotated[
        Path | None, typer.Option(help="Where to spill to; else SPILLWAY_DIR or a default.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="That measuring may take.")] = 20,
    fast: Annotated[bool, typer.Option("--fast", help="Do not measure.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure anew, whatever was measured before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say it as JSON, and nothing else on stdout.")] = False,
) -> None:
    """Measure this machine, and find what will go wrong on it. Exit code 1: Spillway does not work here so."""
    if fast and fresh:
        raise UsageError("got --fast and --fresh, expected one of them: the first does not measure, the second does")
    where = which_device(None if device == "auto" else device)
    facts = read_facts(where, spill_directory)
    found = findings(facts)
    hardware = None
    if not fast and not _stopped(found):
        hardware, more = _measure(where, spill_directory, seconds, fresh=fresh, quiet=as_json)
        found = (*findings(facts, hardware), *more)
    if as_json:
        typer.echo(to_json(facts, hardware, found))
    else:
        console = Console()
        console.width = min(console.width, WIDEST)
        for part in shown(facts, hardware, found):
            console.print(part, highlight=False)
    if _stopped(found):
        raise typer.Exit(1)


def to_json(facts: Facts, hardware: Hardware | None, found: tuple[Finding, ...]) -> str:
    """All of it, for programs. Bytes, seconds and rates have no prefix: bytes in a second are bytes in a second."""
    report = {
        "works": not _stopped(found),
        "findings": [{**asdict(finding), "severity": finding.severity.value} for finding in found],
        "hardware": None if hardware is None else json.loads(hardware.to_json())["hardware"],
        "facts": asdict(facts),
    }
    return json.dumps(report, indent=2)


def shown(facts: Facts, hardware: Hardware | None, found: tuple[Finding, ...]) -> Iterator[RenderableType]:
    """The machine, what was found, and the sum of it."""
    yield _table(_machine(facts, hardware))
    if found:
        yield _table(
            (
                f"[{_COLOURS[finding.severity]}]{finding.severity.value}[/]",
                f"{_text(finding.found)}\n{_text(finding.means)}\n[bold]{_text(finding.do)}[/]",
            )
            for finding in found
        )
    stops = sum(finding.severity is Severity.STOPS for finding in found)
    costs = sum(finding.severity is Severity.COSTS for finding in found)
    if stops:
        yield f"[red]Spillway does not work here as it is: see what stops it ({stops}).[/]"
    else:
        yield f"Spillway works here.{f' What costs time or memory: {costs}.' if costs else ''}"


def _stopped(found: tuple[Finding, ...]) -> bool:
    return any(finding.severity is Severity.STOPS for finding in found)


def _measure(
    device: torch.device, directory: Path | None, seconds: float, *, fresh: bool, quiet: bool
) -> tuple[Hardware | None, tuple[Finding, ...]]:
    """What the machine can do, and what went wrong meanwhile. Progress goes to stderr."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        told = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always", UserWarning)
        status = stack.enter_context(console.status("looking")) if console.is_terminal else None

        def on_part(part: str) -> None:
            if status is not None:
                status.update(f"measuring {part}")
            elif not quiet:
                console.print(f"measuring {part}", highlight=False)

        try:
            hardware = known_hardware(device, spill_directory=directory, seconds=seconds, fresh=fresh, on_part=on_part)
        except (TierError, BackendError) as error:
            return None, (_not_measured(str(error)),)
    for warning in told:
        if not str(warning.message).startswith("spillway:"):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return hardware, tuple(
        _not_kept(message) for warning in told if (message := str(warning.message)).startswith("spillway:")
    )


def _not_measured(why: str) -> Finding:
    return Finding(
        code="not-measured",
        severity=Severity.COSTS,
        found=f"The machine could not be measured: {why}",
        means="Nothing is known of its rates.",
        do="See to that first, and measure again.",
    )


def _not_kept(warning: str) -> Finding:
    return Finding(
        code="not-kept",
        severity=Severity.NOTE,
        found=warning,
        means="Whoever wants to know what this machine can do measures it again.",
        do="Set SPILLWAY_CACHE to a directory that can be written.",
    )


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_header=False, show_lines=False)
    table.add_column(no_wrap=True, width=_FIRST_COLUMN)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    table.add_row("", "")
    return table


def _machine(facts: Facts, hardware: Hardware | None) -> Iterator[tuple[str, str]]:
    device, memory, spill = facts.device, facts.memory, facts.spill
    of_device = f"{_text(device.name)} ({device.type}), {format_bytes(device.nbytes or memory.limit)}"
    yield "device", of_device if device.count < 2 else f"{of_device}, one of {device.count}"
    limit = "" if memory.limit >= memory.machine else f" of the machine's {format_bytes(memory.machine)}"
    yield "host memory", f"{format_bytes(memory.limit)}{limit}, {format_bytes(memory.available)} free"
    if spill.directory is not None:
        how = "direct" if spill.direct else "through the page cache"
        yield "spills to", f"{_text(spill.directory)} ({spill.kind}, {how}), {format_bytes(spill.free)} free"
    yield "torch", f"{facts.torch}{'' if facts.built_for is None else f', {facts.built_for}'}; {facts.system}"
    if device.type == "cpu":
        yield "malloc", escape(facts.malloc)
    if hardware is None:
        return
    link = hardware.link()
    yield (
        "link" if device.type != "cpu" else "copies",
        f"{_rate(link.out)} out, {_rate(link.back)} back, {_rate(link.both)} both at once",
    )
    yield "memory", f"{_rate(hardware.memory_rate)} read and written"
    flops = f"{_number(hardware.flops / 1e12)} T" if hardware.flops >= 1e12 else f"{_number(hardware.flops / 1e9)} G"
    yield "compute", f"{flops}FLOP/s in bfloat16"
    if hardware.disk_write is not None and hardware.disk_read is not None:
        yield "disk", f"{_rate(hardware.disk_write)} written, {_rate(hardware.disk_read)} read"
    yield "measured", hardware.date.isoformat()


def _text(text: str) -> str:
    return escape(printable(text))


def _rate(rate: float) -> str:
    return f"{_number(rate / 1e9)} GB/s"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
