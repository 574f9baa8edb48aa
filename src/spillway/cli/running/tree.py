"""A process and the managed processes below it tell each other what was attached, by files in one folder.

The folder is made by ``spillway run``, or by the first program of a chain that imports torch under ``SPILLWAY_BUDGET``.
Its name is in the environment of the processes below. Those write their results into it; it is removed in the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from spillway.cli.running.result import RunResult

_FOLDER = "SPILLWAY_RUN_FOLDER"


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """The place of this process among others."""

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
