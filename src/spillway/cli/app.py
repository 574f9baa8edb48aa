"""The command ``spillway``: a command per file of this room, and one place where errors become a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer

from spillway.cli.commands import LaterGroup
from spillway.errors import BudgetError, SpillwayError, UsageError

USAGE_CODE = 2
"""Exit code for an argument that cannot be meant, as of every Unix command."""
FAILURE_CODE = 1
"""Exit code for what went wrong on the way."""

app = typer.Typer(
    cls=LaterGroup,
    help="Spillway, the training-memory manager for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@dataclass
class Invocation:
    """What a call of the command says beside its command."""

    debug: bool = False
    """Whether errors are shown with their tracebacks."""
    job: Callable[[], object] | None = None
    """What is to be done when the command line has been read: to run a script, outside of what reads it."""


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show errors with their tracebacks.")] = False,
) -> None:
    """Spillway, the training-memory manager for PyTorch."""
    context.ensure_object(Invocation).debug = debug


@app.command()
def version() -> None:
    """Say which Spillway, torch and Python these are."""
    import platform

    import torch

    import spillway

    typer.echo(f"spillway {spillway.__version__}, torch {torch.__version__}, Python {platform.python_version()}")


def main() -> None:
    """Run the command line and exit: 0, 2 for an argument that cannot be meant, 1 for what went wrong on the way.

    Of ``spillway run``, the exit code is the script's, but 3 where that is 0 and nothing was done as asked.
    """
    invocation = Invocation()
    try:
        app(prog_name="spillway", obj=invocation)
    except SpillwayError as error:
        _end(error, invocation)
    except SystemExit as ended:
        if ended.code or invocation.job is None:
            raise
    job = invocation.job
    assert job is not None
    try:
        job()
    except SpillwayError as error:
        from spillway.running.script import is_of_script

        # What a script raises is its own, with its own traceback; but for a budget, which was asked for here.
        if is_of_script(error) and not isinstance(error, BudgetError):
            raise
        _end(error, invocation)


def _end(error: SpillwayError, invocation: Invocation) -> NoReturn:
    if invocation.debug:
        raise error
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    sys.exit(_code_of(error))


def _code_of(error: SpillwayError) -> int:
    from spillway.running.asked import UNMET_CODE, UnmetError

    if isinstance(error, UnmetError):
        return UNMET_CODE
    return USAGE_CODE if isinstance(error, UsageError) else FAILURE_CODE
