"""The commands by their names, imported only when they are called: ``spillway --help`` does not wait for torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
import typer.core


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    place: str
    """Module of this room and function, as ``"demo:demo"``."""
    help: str
    """First sentences of the function's docstring: a test holds that."""
    takes_script: bool = False
    """Whether all after the first argument belongs to a script."""


COMMANDS = (
    Command(
        "run",
        "run:run",
        "Run a script, unmodified, with what its models save kept, sent away or computed again.",
        takes_script=True,
    ),
    Command(
        "profile",
        "profile:profile",
        "Run a script until a model of it is profiled, write the profile, and end the script.",
        takes_script=True,
    ),
    Command(
        "plan",
        "plan:plan",
        "Plan a step within a budget, and say what is kept, sent away and computed again.",
    ),
    Command(
        "report",
        "report:report",
        "Write what a plan does to one HTML file, which is opened without a network.",
    ),
    Command(
        "bench",
        "bench:bench",
        "Run a script in several ways, each in its own process; compare time and memory.",
        takes_script=True,
    ),
    Command(
        "demo",
        "demo:demo",
        "Train a small GPT on real text, each way in its own process; compare time, memory, gradients.",
    ),
    Command(
        "doctor",
        "doctor:doctor",
        "Measure this machine, and find what will go wrong on it. Exit code 1: Spillway does not work here so.",
    ),
)


def function_of(command: Command) -> Callable[..., Any]:
    """The function of a command.

    Raises:
        UnsupportedError: if torch is too old.
    """
    if not command.takes_script:
        # First: it says so if torch is too old for what follows. (The others ask when they are called.)
        importlib.import_module("spillway.requirements")
    module, _, name = command.place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"spillway.cli.{module}"), name)
    return function


class LaterCommand(typer.core.TyperCommand):
    """Stands for a command until it is called.

    Args:
        command: which.
    """

    def __init__(self, command: Command) -> None:
        super().__init__(name=command.name, help=command.help, rich_markup_mode=None)
        self._command = command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the command itself."""
        own = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        settings = {"allow_interspersed_args": False} if self._command.takes_script else None
        own.command(self._command.name, context_settings=settings)(function_of(self._command))
        return typer.main.get_command(own).make_context(info_name, args, parent=parent, **extra)


class LaterGroup(typer.core.TyperGroup):
    """The group of all commands, those that are imported later first."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        later = {command.name: LaterCommand(command) for command in COMMANDS}
        self.commands = {**later, **self.commands}
