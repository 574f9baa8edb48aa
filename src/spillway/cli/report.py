"""``spillway report``: a plan as a page, as a trace, or in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spillway.cli.plan import HardwareName, hardware_of, notes_of, working
from spillway.errors import printable

if TYPE_CHECKING:
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile


def report(
    profile: Annotated[Path, typer.Argument(help="A file of Profile.save().", show_default=False)],
    plan: Annotated[Path, typer.Argument(help="A file of Plan.save(), of this profile.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page to this file.", show_default="report.html")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write the simulated step to this file, for Chrome and Perfetto.", show_default=False),
    ] = None,
    hardware: HardwareName = None,
    curve: Annotated[
        bool, typer.Option("--curve/--no-curve", help="Also plan for other budgets, which takes a minute.")
    ] = True,
    text: Annotated[
        bool, typer.Option("--text", help="Print the plan here; write a page only if -o names one.")
    ] = False,
) -> None:
    """Write what a plan does to one HTML file, which needs no network."""
    import spillway
    from spillway.planner.files import check_writable, write_file
    from spillway.planner.planner import make_curve
    from spillway.planner.report.facts import facts_of
    from spillway.planner.report.page import graph_objects, to_page
    from spillway.planner.report.text import to_text
    from spillway.planner.report.trace import to_trace
    from spillway.planning import WINDOW

    page = output if output is not None or text else Path("report.html")
    check_writable("--output", page)
    check_writable("--trace", trace)
    if page is not None:
        # Fails before planning if plotly is missing.
        graph_objects()
    measured, found = spillway.Profile.load(profile), spillway.Plan.load(plan)
    machine = hardware_of(hardware, measured.device)
    notes = notes_of(measured, machine, is_named=hardware is not None)
    facts = facts_of(measured, found, machine, notes=notes)
    if text:
        typer.echo(to_text(facts), nl=False)
    if page is not None:
        if curve:
            with working("other budgets") as tell:
                points = make_curve(
                    measured,
                    machine,
                    window=WINDOW,
                    may_grow=True,
                    allow=_allowed(measured, found),
                    on_point=lambda done, total: tell(f"other budgets: {done}/{total}"),
                )
            facts = facts_of(measured, found, machine, notes=notes, curve=points)
        write_file(page, to_page(facts))
        typer.echo(printable(f"wrote {page}"), err=text)
    if trace is not None:
        write_file(trace, to_trace(facts))
        typer.echo(printable(f"wrote {trace}"), err=text)


def _allowed(profile: Profile, plan: Plan) -> set[str]:
    """The decisions that are allowed by default, and those that the plan takes beside them."""
    import torch

    from spillway.attaching.budget import allowed

    tiers = {"host": plan.host_bytes, "disk": plan.disk_bytes}
    return {*allowed(torch.device(profile.device), None), *(tier for tier, nbytes in tiers.items() if nbytes)}
