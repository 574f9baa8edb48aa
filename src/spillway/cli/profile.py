"""``spillway profile``: a profile of a user's own script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.run import Arguments, AsModule, Target, warn_of_misplaced_options


def profile(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    out: Annotated[Path, typer.Option("-o", "--out", help="Write the profile to this file.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to wait for, at most.")] = 16,
) -> None:
    """Run a script until one of its models is profiled, write the profile, and end the script.

    The script ends in the fourth call of its first model in training, as by sys.exit(): open files are closed, and the
    rest of the script does not run.
    """
    from spillway.cli.running.managed import run_profiled
    from spillway.cli.running.script import Script

    script = Script(target, tuple(arguments or ()), is_module=module)
    warn_of_misplaced_options(context, target, script.arguments)
    context.obj.job = lambda: run_profiled(script, out, steps=steps)
