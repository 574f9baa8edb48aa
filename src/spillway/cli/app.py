"""The command ``spillway``, with the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer

from spillway.cli.bench import bench, demo
from spillway.cli.doctor import doctor
from spillway.cli.plan import plan, report
from spillway.cli.run import profile, run
from spillway.cli.startup import disarm
from spillway.errors import BudgetError, SpillwayError, UsageError

USAGE_CODE = 2
"""Exit code for a wrong argument, as of every Unix command."""
FAILURE_CODE = 1
"""Exit code for every other error."""

app = typer.Typer(
    help="Spillway, the training-memory manager for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass
class Invocation:
    """One call of the command line."""

    debug: bool = False
    """Whether errors are shown with their tracebacks."""
    job: Callable[[], object] | None = None
    """Runs the user's script when the command line has been read, so that no frame of a parser is around it."""


def _print_version(is_asked: bool) -> None:
    """Print the versions without importing torch, which takes seconds."""
    import platform
    from importlib import metadata

    import spillway

    if is_asked:
        torch = metadata.version("torch")
        typer.echo(f"spillway {spillway.__version__}, torch {torch}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show errors with their tracebacks.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions, and exit.",
        ),
    ] = False,
) -> None:
    """Spillway, the training-memory manager for PyTorch."""
    context.ensure_object(Invocation).debug = debug


# All words after the script are the script's own.
_OF_SCRIPT = {"allow_interspersed_args": False}
app.command(context_settings=_OF_SCRIPT)(run)
app.command(context_settings=_OF_SCRIPT)(profile)
app.command()(plan)
app.command()(report)
app.command(context_settings=_OF_SCRIPT)(bench)
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(demo)
app.command()(doctor)


def main() -> None:
    """Run the command line and exit: 0, 2 for a wrong argument, 1 for every other error.

    ``spillway run`` exits with the script's code, or with 3 if that is 0 and nothing was done as asked.
    """
    disarm()
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
        from spillway.cli.running.managed import UNMET_CODE, UnmetError
        from spillway.cli.running.script import is_of_script

        # The script's own errors keep their tracebacks. The budget is an option of this command.
        if is_of_script(error) and not isinstance(error, BudgetError):
            raise
        _end(error, invocation, UNMET_CODE if isinstance(error, UnmetError) else None)


def _end(error: SpillwayError, invocation: Invocation, code: int | None = None) -> NoReturn:
    if invocation.debug:
        raise error
    from rich.console import Console
    from rich.markup import escape

    Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    if code is None:
        code = USAGE_CODE if isinstance(error, UsageError) else FAILURE_CODE
    sys.exit(code)
