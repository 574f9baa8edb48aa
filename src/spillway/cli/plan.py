"""``spillway plan``: from a profile and a budget to a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spillway.errors import BudgetError, printable
from spillway.units import format_bytes


def plan(
    profile: Annotated[Path, typer.Argument(help="A file of Profile.save().", show_default=False)],
    budget: Annotated[
        str,
        typer.Option(
            help='Bytes on the device, as "40GiB"; or a share, as 0.5 or "50%", of what a step that keeps everything '
            "has beyond what is there when it begins.",
            show_default=False,
        ),
    ],
    host_budget: Annotated[
        str | None, typer.Option(help="Bytes of host memory that may be used.", show_default="any")
    ] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Bytes of disk that may be used.", show_default="any")] = None,
    allow: Annotated[
        str | None,
        typer.Option(help="Of keep, host, disk, recompute, with commas between.", show_default="by device"),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="h200, h100, a100, rtx4090, or a file of Hardware.save().", show_default="this machine"),
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="Bytes that may be on their way at once.", show_default="what is best")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say the plan as JSON, and nothing else on stdout.")] = False,
) -> None:
    """Plan a step within a budget, and say what is kept, sent away and computed again."""
    # What plans takes a while to import, and `spillway --help` does without.
    import spillway
    from spillway.cli.machines import hardware_of, note_of, working
    from spillway.planning.files import check_writable
    from spillway.report.facts import facts_of
    from spillway.report.text import to_text
    from spillway.runtime.host_memory import local_ranks

    check_writable("--output", output)
    measured = spillway.Profile.load(profile)
    machine = hardware_of(hardware, measured.device)
    try:
        with working("planning"):
            found = spillway.plan(
                measured,
                budget=budget,
                host_budget=host_budget,
                disk_budget=disk_budget,
                allow=None if allow is None else {each.strip() for each in allow.split(",")},
                hardware=machine,
                window=window,
            )
    except BudgetError as error:
        if error.least <= error.budget:
            # The host's or the disk's budget is the one that is too small, as the message says.
            raise
        raise BudgetError(
            f"no plan fits {format_bytes(error.budget)}: the least budget that one was found for is "
            f"{format_bytes(error.least)} ({error.least} bytes)",
            budget=error.budget,
            least=error.least,
        ) from error
    if output is not None:
        found.save(output)
    notes = note_of(measured, machine, is_named=hardware is not None)
    if as_json:
        for note in notes:
            typer.echo(f"note: {printable(note)}", err=True)
        typer.echo(found.to_json())
    else:
        typer.echo(to_text(facts_of(measured, found, machine, active=local_ranks(), notes=notes)), nl=False)
