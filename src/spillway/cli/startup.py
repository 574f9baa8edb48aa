"""Decides whether a process is managed that is not ``spillway run`` itself: a child of one, or any Python program.

An installation of Spillway has ``spillway.pth``, a line of Python that runs whenever a Python of its environment
starts, also with ``-I``, and before any ``sitecustomize``. Without a variable of a way it does nothing.
Otherwise it calls :func:`arm`: the program's models are managed once it has imported torch.

No other place decides. The commands of ``spillway`` call :func:`disarm` first, and decide for themselves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from spillway.cli import QUIET, asked


def arm() -> None:
    """Manage this process once it has imported torch, if the environment asks for that."""
    if not asked():
        return
    if "torch" in sys.modules:
        _manage()
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def disarm() -> None:
    """Leave this process alone: it is a command of ``spillway``, which decides for itself."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    while _ends:
        _ends.pop()()


_ends: list[Callable[[], None]] = []
"""Ends the management of this process, if it has begun."""


def _manage() -> None:
    from spillway.errors import SpillwayError

    try:
        import spillway

        spillway._require_torch()
        from spillway.cli.running.managed import manage
        from spillway.cli.running.options import RunOptions

        _ends.append(manage(RunOptions.of_environment(), quiet=bool(os.environ.get(QUIET))))
    except SpillwayError as error:
        # As for a wrong option. An exception could be caught by a program that does without torch.
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


class _TorchFinder(MetaPathFinder):
    """Finds torch as the other finders do, and begins to manage this process when torch has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Torch's spec. A program may ask for it without importing torch."""
        if name != "torch":
            return None
        others = (each for each in sys.meta_path if each is not self)
        spec = next((found for each in others if (found := each.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader, execute = spec.loader, spec.loader.exec_module

            def execute_and_manage(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _manage()

            loader.exec_module = execute_and_manage  # type: ignore[method-assign]
        return spec


_finder = _TorchFinder()
