"""The command ``spillway``: a command per file of this room, and one place where errors become a sentence."""

from __future__ import annotations

import platform
import sys

import torch
import typer
from rich.console import Console
from rich.markup import escape

import spillway
from spillway.cli.demo import demo
from spillway.cli.doctor import doctor
from spillway.cli.plan import plan
from spillway.cli.report import report
from spillway.errors import SpillwayError, UsageError

USAGE_CODE = 2
"""Exit code for an argument that cannot be meant, as of every Unix command."""
FAILURE_CODE = 1
"""Exit code for what went wrong on the way."""

app = typer.Typer(
    help="Spillway, the training-memory manager for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _root() -> None:
    # With a callback typer wants the name of a command even while there are few of them.
    """Spillway, the training-memory manager for PyTorch."""


app.command()(demo)
app.command()(doctor)
app.command()(plan)
app.command()(report)


@app.command()
def version() -> None:
    """Say which Spillway, torch and Python these are."""
    typer.echo(f"spillway {spillway.__version__}, torch {torch.__version__}, Python {platform.python_version()}")


def main() -> None:
    """Run the command line and exit: 0, 2 for an argument that cannot be meant, 1 for what went wrong on the way."""
    try:
        app(prog_name="spillway")
    except SpillwayError as error:
        Console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(USAGE_CODE if isinstance(error, UsageError) else FAILURE_CODE)
