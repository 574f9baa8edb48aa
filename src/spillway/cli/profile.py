"""``spillway profile``: what a step of a user's own script does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spillway.cli.run import Arguments, AsModule, Target, point_out


def profile(
    context: typer.Context,
    target: Target,
    arguments: Arguments = None,
    module: AsModule = False,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where to write it.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to wait for, at most.")] = 16,
) -> None:
    """Run a script until a model of it is profiled, write the profile, and end the script.

    The fourth call of the first model in training is where the script ends, as by sys.exit(): what it has open is
    closed, and what it would have done from there on is not done.
    """
    from spillway.cli.app import Invocation
    from spillway.running.profiled import run_profiled
    from spillway.running.script import Script

    script = Script(target, tuple(arguments or ()), is_module=module)
    point_out(context, target, script.arguments)
    context.ensure_object(Invocation).job = lambda: run_profiled(script, out, steps=steps)
