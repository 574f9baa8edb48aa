"""``spillway bench``: a user's own script in several ways, side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.run import Arguments, AsModule, Target, point_out


def bench(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    ways: Annotated[
        str, typer.Option(help="With commas between: keep, recompute, offload, ratio=0.5, budget=20GiB, plan=FILE.")
    ] = "keep,recompute,offload",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each way; the first quarter warms up.")] = 12,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file, too.")] = None,
) -> None:
    """Run a script in several ways, each in its own process; compare time and memory.

    Each process ends after so many optimizer steps. Losses are not compared: nobody knows which number is one.
    """
    from spillway.errors import UsageError, printable
    from spillway.planning.files import check_writable, write_file
    from spillway.running.bench import run_bench
    from spillway.running.script import Script
    from spillway.running.ways import parse_ways

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "got bench in one of several ranks, expected one process; compare the files of `torchrun ... spillway run "
            "--json` instead"
        )
    check_writable("--json", json)
    script = Script(target, tuple(arguments or ()), is_module=module)
    chosen = parse_ways(ways.split(","))
    point_out(context, target, script.arguments)
    found = run_bench(script, chosen, steps=steps, told=lambda way: typer.echo(printable(f"{way} ..."), err=True))
    typer.echo(found.to_text())
    if json is not None:
        write_file(json, found.to_json(), what="--json")
    if all(row.answer.error for row in found.rows):
        raise typer.Exit(1)
