"""``spillway bench``: a user's own script in several ways, side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.run import Arguments, AsModule, Target, warn_of_misplaced_options
from spillway.errors import UsageError, printable


def bench(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    ways: Annotated[
        str, typer.Option(help="Separated by commas: keep, recompute, offload, ratio=0.5, budget=20GiB, plan=FILE.")
    ] = "keep,recompute,offload",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each way; the first quarter warms up.")] = 12,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
) -> None:
    """Run a script in several ways, each in its own process; compare time and memory.

    Each process ends after so many optimizer steps. Losses are not compared, since a script does not say what its
    loss is.
    """
    from spillway.cli.running.bench import run_bench
    from spillway.cli.running.script import Script
    from spillway.planner.files import check_writable, write_file

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "got bench in one of several ranks. It starts processes of its own, and runs in one process only: compare "
            "the files of `torchrun ... spillway run --json` instead"
        )
    check_writable("--json", json)
    script = Script(target, tuple(arguments or ()), is_module=module)
    names = [name for way in dict.fromkeys(ways.split(",")) if (name := way.strip())]
    warn_of_misplaced_options(context, target, script.arguments)
    result = run_bench(script, names, steps=steps, told=lambda way: typer.echo(printable(f"{way} ..."), err=True))
    typer.echo(result.to_text())
    if json is not None:
        write_file(json, result.to_json(), what="--json")
    if all(row.answer.error for row in result.rows):
        raise typer.Exit(1)
