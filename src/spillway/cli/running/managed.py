"""``spillway run`` and ``spillway profile``: a script whose models are managed, or run until one is profiled."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing.process
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn import Module

from spillway.attaching import Attached, attach
from spillway.attaching.collector import ProfileCollector
from spillway.attaching.model import ModelCall
from spillway.cli import OFF, QUIET, variable
from spillway.cli.running.models import ManagedModel, ScriptObserver
from spillway.cli.running.options import RunOptions
from spillway.cli.running.result import RunResult, result_of, wrapped
from spillway.cli.running.script import Script, ScriptExit, is_of_script, numbered, rank_of
from spillway.errors import SpillwayError, UnsupportedError, UsageError, printable
from spillway.planner.files import check_writable, write_file
from spillway.planner.profile import lines_of
from spillway.planner.report.page import graph_objects
from spillway.runtime.cpu import set_malloc

UNMET_CODE = 3
"""Exit code of ``spillway run`` if the script ended well, but no model was treated as asked."""


_FOLDER = "SPILLWAY_RUN_FOLDER"
"""The variable with the folder of a :class:`ProcessTree`."""


class UnmetError(UnsupportedError):
    """A script has ended, and no model of it was treated as the command line asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files to write when the script has ended. Ranks other than the first add ``.rankN`` before the suffix."""

    profile: Path | None = None
    report: Path | None = None
    output: Path | None = None

    def check(self, options: RunOptions) -> None:
        """Raise :class:`~spillway.errors.UsageError` for a file that cannot be written, before hours of training."""
        for name in ("profile", "report", "output"):
            check_writable(f"--{name}", getattr(self, name))
        options.check_machine()
        for name, other in (
            ("profile", "spillway profile measures alone"),
            ("report", "spillway report draws a plan from files"),
        ):
            if getattr(self, name) is not None and not options.is_measured:
                raise UsageError(
                    f"got --{name} without a budget. Nothing is measured without one: give --budget beside it ({other})"
                )
        if self.report is not None:
            graph_objects()


def run_managed(script: Script, options: RunOptions, files: Files, *, quiet: bool, best_effort: bool) -> None:
    """Run a script, with its models attached as the options say.

    The result is printed and written when the process ends, after the script's threads and its own exit handlers.

    Raises:
        UsageError: for a missing script, or files that cannot be written.
        BudgetError: if no plan fits a model's budget.
        UnmetError: without ``best_effort``, if no model was treated as asked.
        BaseException: what the script raises.
    """
    files.check(options)
    script.check()
    process = _ManagedProcess(options, files, quiet=quiet, is_run=True)
    for name, value in options.to_environment().items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if quiet:
        os.environ[QUIET] = "1"
    try:
        script.run()
    except UsageError as error:
        if not is_of_script(error):
            process.leave()
        raise
    if process.models.fatal is not None:
        # The script caught the error, and trained on without its budget.
        raise process.models.fatal
    if best_effort or not options.option:
        return
    # Other threads may train. Python joins them when this function has returned.
    process.is_late = any(not each.daemon for each in threading.enumerate() if each is not threading.current_thread())
    if not process.is_late:
        process.check_met()


def manage(options: RunOptions, *, quiet: bool) -> Callable[[], None]:
    """Manage the models of a program that has begun, as its environment asks. Gives a function that ends it.

    The program keeps its exit code. A line on stderr says if no model of it, or of its children, was treated as asked.
    """
    options.check_machine()
    return _ManagedProcess(options, Files(), quiet=quiet, is_run=False).leave


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The place of this process among others, which tell each other what was attached, by files in one folder.

    The folder is made by ``spillway run``, or by the first program of a chain that imports torch under
    ``SPILLWAY_BUDGET``. Its name is in the environment of the processes below. Those write their results into it; it is
    removed in the end.
    """

    told: Path | None
    """The file for its result; ``None``: no process above it asks."""
    own: Path | None
    """The folder for the results of the processes below it; ``None``: they use that of the process above."""

    @classmethod
    def joined(cls, *, is_run: bool) -> ProcessTree:
        """That of the environment, or a new one. ``is_run``: it always has a folder of its own."""
        above = os.environ.get(_FOLDER)
        folder = Path(above) if above and Path(above).is_dir() else None
        told = None if folder is None else folder / f"{uuid.uuid4().hex}.json"
        if folder is not None and not is_run:
            return cls(told, None)
        own = Path(tempfile.mkdtemp(prefix="spillway-run-"))
        os.environ[_FOLDER] = str(own)
        return cls(told, own)

    def tell(self, result: RunResult) -> None:
        """Give the process above the result, unless that process has ended."""
        if self.told is not None:
            with suppress(OSError):
                self.told.write_text(result.to_json(), encoding="utf-8")

    def children(self) -> tuple[RunResult, ...]:
        """Results of the processes below, so far."""
        found = []
        for path in () if self.own is None else sorted(self.own.glob("*.json")):
            # Its process may be writing it now.
            with suppress(OSError, ValidationError):
                found.append(TypeAdapter(RunResult).validate_json(path.read_bytes()))
        return tuple(found)

    def close(self) -> None:
        if self.own is not None:
            if os.environ.get(_FOLDER) == str(self.own):
                del os.environ[_FOLDER]
            shutil.rmtree(self.own, ignore_errors=True)


class _ManagedProcess:
    """This process from now on: its models are managed, and the result is printed and written when it ends."""

    def __init__(self, options: RunOptions, files: Files, *, quiet: bool, is_run: bool) -> None:
        self._options, self._files, self._quiet, self._is_run = options, files, quiet, is_run
        self._rank, self._process = rank_of(), os.getpid()
        if torch.accelerator.current_accelerator() is None:
            # Before the program makes a model.
            set_malloc()
        self._observer = ScriptObserver(options.attach)
        self.models = self._observer.models
        if not quiet and self._rank == 0:
            # Not only at the end, which may be days later.
            self.models.tell = lambda line: _print_error(f"spillway: {printable(line)}\n")
        self._tree = ProcessTree.joined(is_run=is_run)
        self._result: RunResult | None = None
        self._is_over = False
        self.is_late = False
        """Whether threads may still train when the script has ended."""
        # Exit handlers run from the last to the first.
        atexit.register(self._check_late)
        atexit.register(self.finish)
        # Processes of multiprocessing run these functions, not those of atexit, and forget those of before their start.
        finalize = functools.partial(multiprocessing.util.Finalize, None, self.finish, exitpriority=0)
        multiprocessing.util.register_after_fork(self, lambda _: finalize())
        if multiprocessing.process.parent_process() is not None:
            finalize()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Manage a forked child, unless it has a model that is attached here: workers and servers fork early."""
        if os.getppid() == self._process and not self._is_over and not self.models.managed:
            _ManagedProcess(self._options, Files(), quiet=self._quiet, is_run=False)

    def leave(self) -> None:
        """Manage nothing from now on, and print no result."""
        self._observer.end()
        self.models.close()
        self._close()

    def _close(self) -> None:
        self._is_over = True
        atexit.unregister(self.finish)
        self._tree.close()

    def finish(self) -> None:
        if os.getpid() != self._process or self._is_over:
            return
        self._observer.end()
        result = self._result = result_of(self._observer, rank=self._rank, children=self._tree.children())
        if result.models or result.not_attached or result.children:
            self._tree.tell(result)
        lines = [] if self._rank else list(self._told(result))
        try:
            if self._files.output is not None:
                write_file(numbered(self._files.output, "rank", self._rank), result.to_json(), what="--output")
            for number, model in enumerate(self.models.managed):
                lines += _write(model, number, self._files, self._rank)
            for path in (self._files.profile, self._files.report):
                if path is not None and not result.models:
                    lines.append(printable(f"{path}: not written: no model was attached in this process"))
        except (SpillwayError, OSError) as error:
            # An exit handler has no caller that could catch it.
            lines.append(f"error: {error}")
        # Models stay attached: Python has ended its pools of threads, and an optimizer moves no weights without them.
        self._close()
        if lines:
            _print_error("\n" + "\n".join(lines) + "\n")

    def _told(self, result: RunResult) -> Iterator[str]:
        """The lines of the first rank."""
        if not self._quiet and (self._is_run or result.models):
            yield result.to_text()
        is_told_above = self._tree.told is not None and not (result.models or result.not_attached)
        if not self._is_run and not is_told_above and (why := self._why_unmet(result)) is not None:
            yield printable(f"spillway: {self._options.asked_for} was not met, since {why}")

    def _why_unmet(self, result: RunResult) -> str | None:
        if self.models.fatal is not None:
            return "no plan fits it"
        models = (*result.models, *result.models_below)
        if not models:
            return f"nothing was attached: {result.reasons}"
        if self._options.budget is None or any(model.missing is None for model in models):
            return None
        missing = ", ".join(f"{model.kind} takes {model.missing}" for model in models)
        return f"the script ended before there was a plan ({missing})"

    def check_met(self) -> None:
        """Raise :class:`UnmetError` if nothing was attached, or no budget has a plan."""
        result = self._result or result_of(self._observer, rank=self._rank, children=self._tree.children())
        why = self._why_unmet(result)
        if why is None:
            return
        if not self._quiet and why.startswith("nothing was attached"):
            why = "nothing was attached: the table says why"
        raise UnmetError(
            f"{self._options.asked_for} was not met, since {why.rstrip('.')}. Give --best-effort to end with the "
            f"script's exit code all the same."
        )

    def _check_late(self) -> None:
        """Set the exit code, if threads were alive after the script: an exit handler has no other way."""
        if not self.is_late or os.getpid() != self._process:
            return
        try:
            self.check_met()
        except UnmetError as error:
            _print_error(f"error: {error}\n")
            for stream in (sys.stdout, sys.stderr, sys.__stderr__):
                if stream is not None:
                    stream.flush()
            logging.shutdown()
            os._exit(UNMET_CODE)


def _print_error(text: str) -> None:
    """To the process's own stderr, whatever the script made of it."""
    if sys.__stderr__ is not None:
        sys.__stderr__.write(text)


def _write(model: ManagedModel, number: int, files: Files, rank: int) -> Iterator[str]:
    """Write the files of a model. Those of the second model and later ones have its number in their names."""
    if files.profile is not None:
        path = numbered(numbered(files.profile, "model", number), "rank", rank)
        if model.attached.profile is None:
            yield printable(f"{path}: not written: {model.kind} was not profiled, which takes three steps")
        else:
            model.attached.profile.save(path)
    if files.report is not None:
        model.attached.report(numbered(numbered(files.report, "model", number), "rank", rank))


def run_profiled(script: Script, path: Path, *, steps: int) -> None:
    """Run a script until the first of its models is profiled, write the profile, and end the script there.

    It also ends after so many optimizer steps without a profile.

    Raises:
        UsageError: for a missing script, or a file that cannot be written.
        UnsupportedError: if no model was profiled.
        BaseException: what the script raises.
    """
    script.check()
    check_writable("--output", path)
    os.environ[variable("budget")] = OFF
    collectors: list[_EndingCollector] = []

    def attach_collector(model: Module) -> tuple[Attached, str, list[str]]:
        collector = _EndingCollector(model, None)
        attached = attach(model)
        ModelCall.of(model).hand_to(collector)
        collectors.append(collector)
        return attached, "profile", []

    def stepped(count: int) -> None:
        if count >= steps:
            raise ScriptExit

    observer = ScriptObserver(attach_collector, stepped)
    script.run()
    observer.end()
    for collector in collectors:
        if all(each.profile is None for each in collectors):
            # The last step ended with the script.
            collector.finish()
    observer.models.close()
    profile = next((collector.profile for collector in collectors if collector.profile is not None), None)
    if profile is None:
        result = result_of(observer)
        reasons = result.reasons if result.not_attached else "run a script that trains in this process"
        raise UnsupportedError(
            f"got no profile of a model in {result.steps} optimizer steps. A profile takes three passes through a "
            f"model, forward and backward: {reasons}, or give more --steps"
        )
    rank = rank_of()
    profile.save(numbered(path, "rank", rank))
    if not rank:
        first, *others = lines_of(profile)
        lines = [*wrapped(first), *(line for other in others for line in wrapped(other, "  "))]
        _print_error("\n".join(["", *lines, printable(f"written to {path}"), ""]))


class _EndingCollector(ProfileCollector):
    """Profiles and plans nothing. It ends the script in the call of the model in which the profile is complete."""

    _calls = 0

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: the step before has ended."""
        super().begin(model, args, kwargs)
        if self.profile is not None:
            raise ScriptExit
        self._calls += 1
        if not rank_of():
            _print_error(printable(f"profiling {type(model).__name__}, call {self._calls}") + "\n")
