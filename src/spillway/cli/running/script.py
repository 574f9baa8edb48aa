"""Runs a script or a module in this process, as Python itself would.

NOTE [ As Python would ]

``__main__`` is a new module, so that the script's classes can be pickled, and found by spawned processes. It stays
until the process ends: threads, exit handlers and pickles may need it then. ``sys.argv`` holds the script's arguments,
and ``sys.path`` begins with its folder. An exception of the script reaches Python, which prints it with the
``sys.excepthook`` that the script has set, and ends with the right code. The traceback omits frames of this package,
unless the error is from inside of it.
"""

from __future__ import annotations

import io
import itertools
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from spillway.errors import UsageError
from spillway.runtime.system import number_of_launcher

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Set by torchrun, Open MPI, MPICH and Intel MPI, and Slurm."""


class ScriptExit(SystemExit):
    """Ends the script where it is, as ``sys.exit()`` does: its ``finally`` blocks and exit handlers run."""


def rank_of() -> int:
    """The rank that the launcher gave this process; 0 without a launcher."""
    return number_of_launcher(_RANKS, "the rank of this process", 0)


def numbered(path: Path, what: str, number: int) -> Path:
    """The path for one of several: number 0 has the name itself, others ``plan.rank1.json`` and so on."""
    return path.with_name(f"{path.stem}.{what}{number}{path.suffix}") if number else path


@dataclass(frozen=True, slots=True)
class Script:
    """A script, with its arguments."""

    target: str
    """Path of a script, or of a folder or an archive with a ``__main__.py``; or the name of a module."""
    arguments: Sequence[str] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raise :class:`~spillway.errors.UsageError` if there is no such file."""
        if self.is_module:
            if not all(self.target.split(".")):
                raise UsageError(
                    f"got -m {self.target!r}, expected the full name of a module, such as 'package.module'; leave out "
                    f"-m for a file"
                )
        elif not Path(self.target).exists():
            raise UsageError(
                f"got the script {self.target!r}, which does not exist; give -m {self.target} if it is a module"
            )

    def run(self) -> None:
        """Run it, until it ends, exits with code 0, or raises. See NOTE [ As Python would ]."""
        main = ModuleType("__main__")
        before, sys.modules["__main__"] = sys.modules["__main__"], main
        # Multiprocessing gave the module this name. Children find what the script defines by it.
        if "__mp_main__" in sys.modules:
            sys.modules["__mp_main__"] = main
        main.__dict__["__builtins__"] = sys.modules["builtins"]
        # The code that runs now is in it.
        _kept.append(before)
        sys.argv = [self.target, *self.arguments]
        try:
            exec(self._load(main), main.__dict__)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return
            _hide_frames(error)
            raise

    def _load(self, main: ModuleType) -> CodeType:
        """The code, which ``main`` is named after from now on."""
        try:
            # What Python's own -m, and its tools that run modules, find code with.
            if self.is_module:
                _put_first(str(Path.cwd()))
                _, spec, code = runpy._get_module_details(self.target)  # type: ignore[attr-defined]
                sys.argv[0] = spec.origin
            elif pkgutil.get_importer(self.target) is not None:
                # A folder, or an archive.
                _put_first(os.path.abspath(self.target))
                _, spec, code = runpy._get_main_module_details()  # type: ignore[attr-defined]
            else:
                return self._load_file(main)
        except ImportError as error:
            option = "-m " if self.is_module else ""
            raise UsageError(f"got {option}{self.target!r}, expected code that Python finds: {error}") from error
        main.__dict__.update(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
        return code  # type: ignore[no-any-return]

    def _load_file(self, main: ModuleType) -> CodeType:
        path = os.path.abspath(self.target)
        _put_first(os.path.dirname(os.path.realpath(self.target)))
        main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            raise UsageError(f"got the script {self.target!r} ({error}), expected a file that can be read") from error
        return compile(source, path, "exec", dont_inherit=True)


_kept: list[ModuleType] = []
"""The former ``__main__``, for as long as the process."""


def _put_first(folder: str) -> None:
    """Python finds the script's own modules there."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def is_of_script(error: BaseException) -> bool:
    """Whether an error came from code of a script, and not from this package alone."""
    return not all(map(_is_ours, _entries(error.__traceback__)))


def _hide_frames(error: BaseException) -> None:
    """Show ``sys.excepthook`` an error without the frames of this package."""
    hook = sys.excepthook
    entries = _entries(error.__traceback__)
    # An error that Spillway raised in the script is shown with all frames but those that started the script. An
    # interrupt may come anywhere.
    is_own = isinstance(error, Exception) and len(entries) > 1 and _is_ours(entries[-1])
    kept = itertools.dropwhile(_is_ours, entries) if is_own else itertools.filterfalse(_is_ours, entries)
    shown: TracebackType | None = None
    for each in reversed(list(kept)):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is error:
            trace = shown
            value.with_traceback(trace)
        hook(kind, value, trace)

    sys.excepthook = excepthook


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    return entries


def _is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)
