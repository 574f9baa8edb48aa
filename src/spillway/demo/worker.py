"""The child of the demo: ``python -m spillway.demo.worker SETTINGS``, with settings in JSON and messages on stdout."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from spillway.demo.records import Message, Refused, Settings
from spillway.demo.training import train
from spillway.errors import SpillwayError, UsageError


def main(arguments: list[str]) -> int:
    """Run one way. Returns the exit code: 0, or 2 if Spillway refused; what is unforeseen ends in a traceback."""
    channel = _claim_stdout()

    def say(message: Message) -> None:
        channel.write(message.model_dump_json() + "\n")
        channel.flush()  # to a parent that is gone, this raises BrokenPipeError: no orphan trains on

    try:
        train(Settings.model_validate_json(arguments[0]), say)
    except SpillwayError as error:
        say(Refused(message=str(error), usage=isinstance(error, UsageError)))
        return 2
    return 0


def _claim_stdout() -> TextIO:
    # Whatever else writes to stdout, a library or a stray print, goes to stderr and does not garble the messages.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return channel


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
