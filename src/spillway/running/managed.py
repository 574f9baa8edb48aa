"""A script whose models are managed, and what is told of them when the process ends."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spillway.errors import SpillwayError, UsageError
from spillway.running.asked import Asked
from spillway.running.files import check_writable, numbered, rank_of
from spillway.running.roots import GivenUp, Root
from spillway.running.script import Script, is_of_script
from spillway.running.seeing import Seeing
from spillway.running.table import table
from spillway.runtime.malloc import set_malloc


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What is written when the script has ended. Of ranks but the first, names have ``.rankN`` before their suffix."""

    profile: Path | None = None
    """The profile of each root."""
    report: Path | None = None
    """A page of each root."""
    json: Path | None = None
    """What came of it."""

    def check(self) -> None:
        """Raise :class:`~spillway.errors.UsageError` if one cannot be written."""
        for name in ("profile", "report", "json"):
            check_writable(f"--{name}", getattr(self, name))


def run_managed(script: Script, asked: Asked, files: Files, *, quiet: bool) -> None:
    """Run a script whose models are attached as asked.

    What is to be told is told when the process ends: after the script's threads and its own exit handlers.

    Raises:
        UsageError: for a script that is not there, or files that cannot be written.
        BudgetError: if nothing fits a model's budget.
        BaseException: what the script raises.
    """
    script.check()
    files.check()
    asked.check_machine()
    rank = rank_of()
    if files.profile is not None and (asked.is_default or asked.budget is not None) is False:
        raise UsageError(
            "got --profile without a budget, expected --budget beside it, since without one nothing is measured; "
            "spillway profile measures alone"
        )
    if torch.accelerator.current_accelerator() is None:
        # Before the script makes a model.
        set_malloc()
    seen = Seeing(asked.attach)
    if not quiet and rank == 0:
        seen.roots.tell = _tell_at_once
    finish = functools.partial(_finish, os.getpid(), seen, files, rank, quiet)
    atexit.register(finish)
    try:
        script.run()
    except UsageError as error:
        if not is_of_script(error):
            atexit.unregister(finish)
        raise
    roots = seen.roots
    if roots.fatal is not None:
        # The script has caught it, and went on without its model.
        raise roots.fatal


def _tell_at_once(given_up: GivenUp) -> None:
    """Not only at the end, which may be days later."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"spillway: {given_up.kind} is not attached: {given_up.reason}\n")


def _finish(process: int, seen: Seeing, files: Files, rank: int, quiet: bool) -> None:
    if os.getpid() != process:
        return
    roots = seen.roots
    outcome = seen.end(rank)
    said = [] if quiet or rank else [table(outcome)]
    try:
        if files.json is not None:
            numbered(files.json, "rank", rank).write_text(outcome.to_json(), encoding="utf-8")
        for number, root in enumerate(roots.attached):
            said += _write(root, number, files, rank)
    except (SpillwayError, OSError) as error:
        # Nobody is there any more who could catch it.
        said.append(f"error: {error}")
    seen.close()
    if said and sys.__stderr__ is not None:
        sys.__stderr__.write("\n" + "\n".join(said) + "\n")


def _write(root: Root, number: int, files: Files, rank: int) -> Iterator[str]:
    """Of the first root by the names given, of others with their number."""
    if files.profile is not None:
        path = numbered(numbered(files.profile, "model", number), "rank", rank)
        if root.attached.profile is None:
            yield f"{path}: not written, since {root.kind} was not profiled: it takes three steps"
        else:
            root.attached.profile.save(path)
    if files.report is not None:
        attached: Any = root.attached
        attached.report(numbered(numbered(files.report, "model", number), "rank", rank))
