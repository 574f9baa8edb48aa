"""``spillway plan``: from a profile and a budget to a plan; ``spillway report``: a plan as a page, a trace or text.

Options and helpers that other commands share are here, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from spillway.errors import BackendError, UsageError, printable

if TYPE_CHECKING:
    from spillway.planner.hardware import Hardware
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile

_SHORT = 1.0
"""Seconds that a user waits without a word."""
POLICIES = ("offload", "recompute", "keep")
TIERS = ("keep", "host", "disk", "recompute")
MACHINES = ("h200", "h100", "a100", "rtx4090")


def completed(*words: str, is_list: bool = False) -> Callable[[str], list[str]]:
    """Completes a word, or the last one of a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        given = before.split(",")
        return [f"{before}{comma}{word}" for word in words if word.startswith(last) and word not in given]

    return complete


HostBudget = Annotated[str | None, typer.Option(help="CPU memory that a plan may use, in bytes.")]
DiskBudget = Annotated[str | None, typer.Option(help="Disk that a plan may use, in bytes.")]
Allow = Annotated[
    str | None,
    typer.Option(
        help="Decisions that a plan may take, of keep,host,disk,recompute.",
        show_default="by device",
        autocompletion=completed(*TIERS, is_list=True),
    ),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        help="Plan for h200, h100, a100, rtx4090, or a file of Hardware.save().",
        show_default="this machine",
        autocompletion=completed(*MACHINES),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else on stdout.")]


def output(what: str, default: str | None = None) -> typer.models.OptionInfo:
    """The option for the file that a command writes."""
    option: typer.models.OptionInfo = typer.Option(
        "-o", "--output", help=f"Write {what} to this file.", show_default=default or False
    )
    return option


def plan(
    profile: Annotated[Path, typer.Argument(help="A file of Profile.save().", show_default=False)],
    budget: Annotated[
        str,
        typer.Option(
            help='Memory budget on the GPU, as "40GiB"; or a share, as 0.5 or "50%", of the memory that a step without '
            "Spillway adds to what is in use when it begins.",
            show_default=False,
        ),
    ],
    host_budget: HostBudget = None,
    disk_budget: DiskBudget = None,
    allow: Allow = None,
    hardware: HardwareName = None,
    window: Annotated[str | None, typer.Option(help="In-flight limit, in bytes.", show_default="the best one")] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            help="auto: streamed blocks of the profile may have their weights on the GPU all the time.",
            show_default="all are streamed",
            autocompletion=completed("auto"),
        ),
    ] = None,
    out: Annotated[Path | None, output("the plan")] = None,
    as_json: AsJson = False,
) -> None:
    """Plan a step within a memory budget, from a profile.

    It says what the plan keeps, offloads and recomputes. Nothing is run.
    """
    import spillway
    from spillway.planner.files import check_writable
    from spillway.planner.report.facts import facts_of
    from spillway.planner.report.text import to_text

    check_writable("--output", out)
    measured = spillway.Profile.load(profile)
    machine = hardware_of(hardware, measured.device)
    with working("planning"):
        found = spillway.plan(
            measured,
            budget=budget,
            host_budget=host_budget,
            disk_budget=disk_budget,
            allow=None if allow is None else {each.strip() for each in allow.split(",")},
            hardware=machine,
            window=window,
            stream=cast("Literal['auto'] | None", stream),
        )
    if out is not None:
        found.save(out)
    notes = notes_of(measured, machine, is_named=hardware is not None)
    if as_json:
        for note in notes:
            typer.echo(f"note: {printable(note)}", err=True)
        typer.echo(found.to_json())
    else:
        typer.echo(to_text(facts_of(measured, found, machine, notes=notes)), nl=False)


def hardware_of(name: str | None, device: str) -> Hardware:
    """The hardware to plan for: a GPU or a file by its name, or this machine, which is measured if it never was.

    Raises:
        UsageError: for an unknown name; without a name, if this machine does not have the profiled device.
    """
    import torch

    from spillway.planner.hardware import PRESETS, Hardware
    from spillway.profiler.machine import known_hardware
    from spillway.runtime.system import local_ranks

    if name is not None:
        return Hardware.of(name).shared_by(local_ranks())
    try:
        with working("measuring this machine, once") as tell:
            found = known_hardware(torch.device(device), on_part=lambda part: tell(f"measuring {part}"))
            return found.shared_by(local_ranks())
    except (UsageError, BackendError) as error:
        raise UsageError(
            f"hardware: the profile is of {device}, which this machine cannot measure ({error}). Give --hardware: a "
            f"name ({', '.join(PRESETS)}) or a file of Hardware.save()"
        ) from error


def notes_of(profile: Profile, hardware: Hardware, *, is_named: bool) -> tuple[str, ...]:
    """A warning, if a plan mixes the operators' times of a CPU with the bandwidths of a GPU that the user named."""
    is_cpu = profile.device.partition(":")[0] == "cpu"
    if not is_named or not is_cpu or hardware.source.startswith("measured on cpu"):
        return ()
    return (
        f"the times of operators are this profile's, which a CPU took; only the bandwidths are those of "
        f"{hardware.name}. For its times, profile with spillway.profile(model, batch, hardware=...)",
    )


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr that something takes a while. Gives a function that shows its progress.

    Without a terminal, progress is a line each time, and ``what`` is one if it takes longer than a second.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what) as status:
            yield status.update
        return

    def tell(text: str) -> None:
        late.cancel()
        console.print(text, highlight=False, soft_wrap=True)

    late = threading.Timer(_SHORT, tell, [f"{what} ..."])
    late.daemon = True
    late.start()
    try:
        yield tell
    finally:
        late.cancel()


def report(
    profile: Annotated[Path, typer.Argument(help="A file of Profile.save().", show_default=False)],
    plan: Annotated[Path, typer.Argument(help="A file of Plan.save(), of this profile.", show_default=False)],
    out: Annotated[Path | None, output("the page", "report.html")] = None,
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
    """Write a plan as an HTML page, which needs no network."""
    import spillway
    from spillway.planner.files import check_writable, write_file
    from spillway.planner.planner import make_curve
    from spillway.planner.report.facts import facts_of
    from spillway.planner.report.page import graph_objects, to_page, to_trace
    from spillway.planner.report.text import to_text
    from spillway.planning import WINDOW

    page = out if out is not None or text else Path("report.html")
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
                    places_weights=bool(found.resident),
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
