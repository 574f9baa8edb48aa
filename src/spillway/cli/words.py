"""Options that several commands share, and the words that a shell completes after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

POLICIES = ("offload", "recompute", "keep")
TIERS = ("keep", "host", "disk", "recompute")
MACHINES = ("h200", "h100", "a100", "rtx4090")
WAYS = ("baseline", "recompute", "offload", "ratio=", "budget=", "plan=")


def completed(*words: str, is_list: bool = False) -> Callable[[str], list[str]]:
    """Completes a word, or the last one of a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        given = before.split(",")
        return [f"{before}{comma}{word}" for word in words if word.startswith(last) and word not in given]

    return complete


HostBudget = Annotated[str | None, typer.Option(help="CPU memory that a plan may use, in bytes.")]
DiskBudget = Annotated[str | None, typer.Option(help="Disk that a plan may use, in bytes.")]
Allow = Annotated[
    str | None,
    typer.Option(
        help="Decisions that a plan may take, of keep,host,disk,recompute.",
        show_default="by device",
        autocompletion=completed(*TIERS, is_list=True),
    ),
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        help="Plan for h200, h100, a100, rtx4090, or a file of Hardware.save().",
        show_default="this machine",
        autocompletion=completed(*MACHINES),
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else on stdout.")]


def output(what: str, default: str | None = None) -> typer.models.OptionInfo:
    """The option for the file that a command writes."""
    option: typer.models.OptionInfo = typer.Option(
        "-o", "--output", help=f"Write {what} to this file.", show_default=default or False
    )
    return option
