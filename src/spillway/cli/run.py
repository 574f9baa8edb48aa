"""``spillway run``, an unmodified script under a memory budget or with a policy; ``spillway profile``, its profile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.plan import POLICIES, Allow, DiskBudget, HardwareName, HostBudget, completed, output

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
            help='Memory budget of a step on the GPU, as "40GiB"; or a share, as "60%", of the memory that a step '
            "without Spillway adds to what is in use when it begins.",
            show_default="90% of an accelerator",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Instead of a budget: offload, recompute or keep.",
            show_default="offload on the CPU",
            autocompletion=completed(*POLICIES),
        ),
    ] = None,
    ratio: Annotated[float | None, typer.Option(help="Offload this share of the saved bytes.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Use the plan in this file.")] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            help="With a budget, auto: frozen weights of blocks may be in CPU memory, as the plan decides.",
            show_default="all weights on the GPU",
            autocompletion=completed("auto"),
        ),
    ] = None,
    host_budget: HostBudget = None,
    disk_budget: DiskBudget = None,
    allow: Allow = None,
    hardware: HardwareName = None,
    profile: Annotated[Path | None, typer.Option(help="With a budget: write the profile to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="With a budget: write an HTML page to this file.")] = None,
    out: Annotated[Path | None, output("the result, as JSON,")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no table in the end.")] = False,
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Keep the script's exit code if nothing could be done as asked.")
    ] = False,
) -> None:
    """Run an unmodified script within a memory budget.

    Spillway keeps, offloads or recomputes the activations that its models save, and those of its child processes.

    All words after SCRIPT are the script's. In the end, a table on stderr says what was saved and what it cost.

    Without options, the variables SPILLWAY_BUDGET, SPILLWAY_POLICY and so on are read, if there are any.

    The exit code is the script's, or 3 if that is 0 and no model was treated as asked.
    """
    from spillway.cli.running.managed import Files, run_managed
    from spillway.cli.running.options import RunOptions, split_words
    from spillway.cli.running.script import Script

    options = RunOptions(
        budget=budget,
        policy=policy,
        ratio=ratio,
        plan=plan,
        stream=stream,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=None if allow is None else split_words(allow),
        hardware=hardware,
    )
    if options == RunOptions():
        options = RunOptions.of_environment()
    script = Script(target, tuple(arguments or ()), is_module=module)
    files = Files(profile=profile, report=report, output=out)
    if not quiet:
        warn_of_misplaced_options(context, target, script.arguments)
    context.obj.job = lambda: run_managed(script, options, files, quiet=quiet, best_effort=best_effort)


def profile(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    out: Annotated[Path, output("the profile", "profile.json")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to wait for, at most.")] = 16,
) -> None:
    """Run a script until one of its models is profiled.

    The profile is written, and the script ends.

    The script ends in the fourth call of its first model in training, as by sys.exit(): open files are closed, and the
    rest of the script does not run.
    """
    from spillway.cli.running.managed import run_profiled
    from spillway.cli.running.script import Script

    script = Script(target, tuple(arguments or ()), is_module=module)
    warn_of_misplaced_options(context, target, script.arguments)
    context.obj.job = lambda: run_profiled(script, out, steps=steps)


def warn_of_misplaced_options(context: typer.Context, target: str, arguments: Sequence[str]) -> None:
    """Say on stderr which options of this command stand after the script, and so go to the script."""
    from spillway.cli.running.script import rank_of
    from spillway.errors import printable

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
