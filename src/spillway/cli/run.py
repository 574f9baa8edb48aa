"""``spillway run``: a user's own script, whose models are managed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or with -m the module.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The script's own.", show_default=False)
]
AsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as with python -m.")]


def run(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    budget: Annotated[
        str | None,
        typer.Option(
            help='Bytes that a step may have on the device, as "40GiB".', show_default="90% of an accelerator"
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="offload, recompute or keep, with no budget.", show_default="offload on the CPU"),
    ] = None,
    ratio: Annotated[float | None, typer.Option(help="Offload this share of the bytes that are saved.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Hold this plan: a file.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="With a budget: bytes of host memory to use.")] = None,
    disk_budget: Annotated[str | None, typer.Option(help="With a budget: bytes of disk to use.")] = None,
    allow: Annotated[
        str | None, typer.Option(help="With a budget: what may be done: keep,host,disk,recompute.")
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Write what was measured for the budget to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page for people to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write what came of it to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table in the end.")] = False,
) -> None:
    """Run a script, unmodified, with what its models save kept, sent away or computed again.

    What is after SCRIPT belongs to the script. In the end a table says on stderr what was saved and what it cost.
    """
    from spillway.cli.app import Invocation
    from spillway.running.asked import Asked
    from spillway.running.managed import Files, run_managed
    from spillway.running.script import Script

    held = None
    if plan is not None:
        from spillway.planning.plan import Plan

        held = Plan.load(plan)
    asked = Asked(
        budget=budget,
        policy=policy,
        ratio=ratio,
        plan=held,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=None if allow is None else tuple(each.strip() for each in allow.split(",")),
    )
    script = Script(target, tuple(arguments or ()), is_module=module)
    files = Files(profile=profile, report=report, json=json)
    context.ensure_object(Invocation).job = lambda: run_managed(script, asked, files, quiet=quiet)
