"""``spillway run``: a user's own script, whose models are managed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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
            help='Bytes that a step may have on the device, as "40GiB"; or a share, as "60%", of what a step that '
            "keeps everything has beyond what is there when it begins.",
            show_default="90% of an accelerator",
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
    hardware: Annotated[
        str | None,
        typer.Option(
            help="With a budget: what the machine can do: h200, h100, a100, rtx4090, or a file of Hardware.save().",
            show_default="this machine",
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Write what was measured for the budget to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page for people to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write what came of it to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table in the end.")] = False,
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Where nothing could be done as asked, the script's exit code stands.")
    ] = False,
) -> None:
    """Run a script, unmodified, with what its models save kept, sent away or computed again.

    What is after SCRIPT belongs to the script. In the end a table says on stderr what was saved and what it cost.

    The exit code is the script's; but 3 if that is 0, and no model was treated as was asked.
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
        hardware=hardware,
    )
    script = Script(target, tuple(arguments or ()), is_module=module)
    files = Files(profile=profile, report=report, json=json)
    if not quiet:
        point_out(context, target, script.arguments)
    context.ensure_object(Invocation).job = lambda: run_managed(
        script, asked, files, quiet=quiet, best_effort=best_effort
    )


def point_out(context: typer.Context, target: str, arguments: Sequence[str]) -> None:
    """Say on stderr which options of this command stand after the script, and so are the script's."""
    from spillway.errors import printable
    from spillway.running.files import rank_of

    own = {
        name
        for option in context.command.params
        if option.name is not None and context.params.get(option.name) == option.default
        for name in option.opts
        if name.startswith("--")
    }
    before_end = itertools.takewhile(lambda word: word != "--", arguments)
    misplaced = dict.fromkeys(name for word in before_end if (name := word.partition("=")[0]) in own)
    if misplaced and not rank_of():
        names, script = " and ".join(misplaced), printable(target)
        typer.echo(
            f"spillway: {names} after {script}: the script gets {'it' if len(misplaced) == 1 else 'them'}. Options of "
            f"spillway {context.info_name} stand before {script}.",
            err=True,
        )
