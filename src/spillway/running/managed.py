"""A script whose models are managed, and what is told of them when the process ends."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spillway.errors import SpillwayError, UsageError, printable
from spillway.planning.files import check_writable, write_file
from spillway.report.figures import graph_objects
from spillway.running.asked import UNMET_CODE, Asked, UnmetError
from spillway.running.files import numbered, rank_of
from spillway.running.roots import GivenUp, Root, Roots
from spillway.running.script import Script, is_of_script
from spillway.running.seeing import Seeing
from spillway.running.table import NOTHING_CALLED, table
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


def run_managed(script: Script, asked: Asked, files: Files, *, quiet: bool, best_effort: bool = False) -> None:
    """Run a script whose models are attached as asked.

    What is to be told is told when the process ends: after the script's threads and its own exit handlers.

    Args:
        script: what to run.
        asked: what to do with each model.
        files: what to write in the end.
        quiet: whether nothing is told.
        best_effort: whether it is fine that nothing was done.

    Raises:
        UsageError: for a script that is not there, or files that cannot be written.
        BudgetError: if nothing fits a model's budget.
        UnmetError: if the command line asked for something, and no model was treated so.
        BaseException: what the script raises.
    """
    script.check()
    files.check()
    asked.check_machine()
    rank = rank_of()
    measures = asked.is_measured
    if files.profile is not None and not measures:
        raise UsageError(
            "got --profile without a budget, expected --budget beside it, since without one nothing is measured; "
            "spillway profile measures alone"
        )
    if files.report is not None:
        if not measures:
            raise UsageError(
                "got --report without a budget, expected --budget beside it, since the page shows what was measured; "
                "spillway report draws a plan from files"
            )
        # Before hours of training, and not after them, it is said that plotly is missing.
        graph_objects()
    if torch.accelerator.current_accelerator() is None:
        # Before the script makes a model.
        set_malloc()
    seen = Seeing(asked.attach)
    if not quiet and rank == 0:
        seen.roots.tell = _tell_at_once
    late = threading.Event()
    # Exit handlers run from the last to the first: this one after what is told.
    atexit.register(_end_late, os.getpid(), late, asked, seen.roots, quiet)
    finish = functools.partial(_finish, os.getpid(), seen, files, rank, quiet)
    atexit.register(finish)
    try:
        script.run()
    except UsageError as error:
        if not is_of_script(error):
            atexit.unregister(finish)
        raise
    except SystemExit as ended:
        if ended.code:
            raise
    roots = seen.roots
    if roots.fatal is not None:
        # The script has caught it, and went on without its model.
        raise roots.fatal
    if best_effort or asked.is_default:
        return
    if any(not each.daemon for each in threading.enumerate() if each is not threading.current_thread()):
        # They may train. Python waits for them when this function has returned.
        late.set()
        return
    unmet = _unmet(asked, roots, quiet=quiet)
    if unmet is not None:
        raise unmet


def _end_late(process: int, late: threading.Event, asked: Asked, roots: Roots, quiet: bool) -> None:
    """End a process whose threads trained on after the script: an exit handler cannot set the exit code otherwise."""
    error = _unmet(asked, roots, quiet=quiet) if late.is_set() and os.getpid() == process else None
    if error is None:
        return
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"error: {error}\n")
    for stream in (sys.stdout, sys.stderr, sys.__stderr__):
        if stream is not None:
            stream.flush()
    logging.shutdown()
    os._exit(UNMET_CODE)


def _unmet(asked: Asked, roots: Roots, *, quiet: bool) -> UnmetError | None:
    """The error of a script in which nothing was attached, or no budget has a plan."""
    attached = roots.attached
    if attached and (asked.budget is None or any(root.attached.missing is None for root in attached)):
        return None
    if attached:
        missing = ", ".join(f"{root.kind} takes {root.attached.missing}" for root in attached)
        why = f"the script ended before there was a plan ({missing})"
    else:
        why = f"nothing was attached: {_reasons(roots) if quiet else 'the table says why'}"
    return UnmetError(
        f"{asked.option} was not met, since {why.rstrip('.')}. Give --best-effort to end with the script's exit code "
        f"all the same."
    )


def _reasons(roots: Roots) -> str:
    return "; ".join(f"{each.kind} {each.reason}" for each in roots.given_up) or NOTHING_CALLED


def _tell_at_once(given_up: GivenUp) -> None:
    """Not only at the end, which may be days later."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(f"spillway: {printable(f'{given_up.kind} is not attached: {given_up.reason}')}\n")


def _finish(process: int, seen: Seeing, files: Files, rank: int, quiet: bool) -> None:
    if os.getpid() != process:
        return
    roots = seen.roots
    outcome = seen.end(rank)
    said = [] if quiet or rank else [table(outcome)]
    try:
        if files.json is not None:
            write_file(numbered(files.json, "rank", rank), outcome.to_json(), what="--json")
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
            yield printable(f"{path}: not written, since {root.kind} was not profiled: it takes three steps")
        else:
            root.attached.profile.save(path)
    if files.report is not None:
        attached: Any = root.attached
        attached.report(numbered(numbered(files.report, "model", number), "rank", rank))
