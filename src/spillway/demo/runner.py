"""The parent's side: starts a child per way, reads what it says, and leaves none behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import IO

from pydantic import ValidationError

from spillway.demo.records import MESSAGE, DemoError, Message, Outcome, Refused, Settings
from spillway.errors import UsageError

MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""How glibc's malloc is set in every child, for every way alike.

Left alone, malloc raises its mmap threshold to 32 MiB as a program frees large blocks; from then on tensors lie in its
heap, where what is freed between two living blocks stays resident: what a process holds then says little of what the
training needs. With a fixed threshold every tensor of 1 MiB or more is a mapping of its own that goes when it is freed,
in huge pages (the second setting), so that this costs no time. Other C libraries ignore both.
"""

_PATIENCE = 5.0


def child_environment() -> dict[str, str]:
    """This process's environment with what every child is given; what the user has set is left alone."""
    return {**MALLOC, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}


def run_way(settings: Settings) -> Generator[Message, None, None]:
    """Run one way in a process of its own and give its messages as they come; the last is its :class:`Outcome`.

    The child is gone when the iterator is, however it ends.

    Raises:
        UsageError: if the child refused an argument.
        DemoError: if it ended otherwise before its time.
    """
    with tempfile.TemporaryFile() as errors, _child(settings, errors) as child:
        assert child.stdout is not None
        outcome = None
        for line in child.stdout:
            message = _parse(settings.way, line)
            if isinstance(message, Refused):
                raise (UsageError if message.usage else DemoError)(message.message)
            if isinstance(message, Outcome):
                outcome = message
            yield message
        code = child.wait()
        if code or outcome is None:
            errors.seek(0)
            raise DemoError(_last_words(settings.way, code, errors.read().decode(errors="replace")))


@contextlib.contextmanager
def _child(settings: Settings, errors: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "spillway.demo.worker", settings.model_dump_json()]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=child_environment()
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_PATIENCE)
                child.kill()


def _parse(way: str, line: str) -> Message:
    try:
        return MESSAGE.validate_json(line)
    except ValidationError as error:
        raise DemoError(f"{way}: got {line.strip()!r} from its process, expected one of the demo's messages") from error


def _last_words(way: str, code: int, stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.strip()]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if code == -9:
        how += " (the system may have run out of memory)"
    return f"{way}: its process {how}: {lines[-1].strip() if lines else 'it said nothing'}"
