"""The child of the demo: ``python -m spillway.demo.worker SETTINGS``.

Settings come as JSON, orders on stdin, a line each; messages go to stdout, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TextIO

from spillway.demo.records import Message, Order, Refused, Settings, encode
from spillway.demo.training import train
from spillway.errors import SpillwayError, UsageError

ABANDONED = 3
"""Exit code of a child whose parent is gone: no orphan trains on."""


def main(arguments: list[str]) -> int:
    """Run one way. Returns the exit code: 0, or 2 if Spillway refused; what is unforeseen ends in a traceback."""
    channel = _claim_stdout()

    def say(message: Message) -> None:
        channel.write(encode(message) + "\n")
        channel.flush()

    def hear() -> Order:
        line = sys.stdin.readline()
        if not line:
            sys.exit(ABANDONED)
        return Order(line.strip())

    try:
        train(Settings(**json.loads(arguments[0])), say, hear)
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
