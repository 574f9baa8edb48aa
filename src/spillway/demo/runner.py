"""The parent's side: starts a child per way, reads what it says, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import TypeVar

from spillway.demo.records import DemoError, Order, Outcome, Refused, Settings, Started, Step, decode
from spillway.errors import UsageError

_PATIENCE = 5.0

_M = TypeVar("_M", Started, Step, Outcome)


def child_environment() -> dict[str, str]:
    """This process's environment with what every child is given; what the user has set is left alone."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}


class WayProcess:
    """One way in a process of its own, step by step. A context manager: the process is gone when it ends.

    Every method raises ``UsageError`` if the child refuses an argument, and ``DemoError`` if it ends before its time.

    Example:
        >>> with WayProcess(settings) as process:  # doctest: +SKIP
        ...     process.started()
        ...     process.step(last=True)
        ...     outcome = process.outcome()
    """

    def __init__(self, settings: Settings) -> None:
        self.way = settings.way
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by __exit__)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "spillway.demo.worker", json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=child_environment(),
        )

    def __enter__(self) -> WayProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._child.kill()
        # A child that died may have left an order unread in the pipe; closing it then fails, and that is no news.
        with contextlib.suppress(BrokenPipeError):
            self._child.communicate()
        self._errors.close()

    def started(self) -> Started:
        """Wait until it is ready for its first step."""
        return self._read(Started)

    def step(self, *, last: bool) -> Step:
        """Let it do one step, its last or not, and wait for that."""
        order = Order.LAST_STEP if last else Order.STEP
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(order.value + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._premature() from None
        return self._read(Step)

    def outcome(self) -> Outcome:
        """What came out, after the last step."""
        return self._read(Outcome)

    def _read(self, expected: type[_M]) -> _M:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise self._premature()
        message = decode(line)
        if isinstance(message, Refused):
            raise (UsageError if message.usage else DemoError)(message.message)
        if not isinstance(message, expected):
            raise DemoError(f"{self.way}: got a message {type(message).__name__}, expected {expected.__name__}")
        return message

    def _premature(self) -> DemoError:
        code = self._child.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (the system may have run out of memory; try a smaller --batch)"
        return DemoError(f"{self.way}: its process {how}: {lines[-1].strip() if lines else 'it said nothing'}")
