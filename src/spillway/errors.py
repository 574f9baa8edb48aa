"""Everything that Spillway raises on purpose.

The tree of classes, each with its other base:

- ``SpillwayError``
    - ``UsageError`` (``ValueError``): an invalid argument
        - ``SizeError``: "12 parsecs" in place of a size
        - ``PolicyError``: a policy returned no decision
    - ``UnsupportedError`` (``RuntimeError``): torch is too old, or the code runs inside ``torch.func``
        - ``BackendError``: a device that no backend serves
    - ``SessionError`` (``RuntimeError``): a session that is closed, or that belongs to another process
    - ``RecomputeError`` (``RuntimeError``): a recomputation that differs from the first computation
    - ``InplaceError`` (``RuntimeError``): a saved tensor was changed in place; autograd's own message
    - ``BudgetError`` (``RuntimeError``): no plan fits the budget
    - ``ParkedError`` (``RuntimeError``): a parked tensor was used, or the GPU has no memory to reload it
    - ``SplitError`` (``AssertionError``): micro-batches whose gradients are not those of the whole batch
    - ``RaceError`` (``RuntimeError``): two accesses without an order (the checking backend only)
    - ``TierError`` (``RuntimeError``): bytes that could not be stored or reloaded
        - ``TierFullError``: a budget or the disk is full
        - ``SpillPathError``: a path where no spill file can be made
        - ``TransferError``: a copy, a read or a write failed
        - ``CorruptError``: the reloaded bytes are not the stored ones

A message says what happened, why it cannot work, and what to do. Spillway never logs an error and goes on: it raises
it at the step that needed the bytes.
"""

from __future__ import annotations

import functools


def printable(text: str) -> str:
    r"""The text with control and invisible characters escaped, as Python writes them.

    Users name modules, files and groups: an escape sequence in one could repaint the terminal.

    Example:
        >>> printable("layers.\x1b[2J0")
        'layers.\\x1b[2J0'
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class SpillwayError(Exception):
    """The root: ``except spillway.SpillwayError`` catches all that Spillway raises on purpose, and nothing else.

    Its text has no control characters but the ends of its lines: see :func:`printable`.
    """

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class UsageError(SpillwayError, ValueError):
    """An invalid argument."""


class SizeError(UsageError):
    """A size that is neither a number of bytes nor a number with a unit."""


class PolicyError(UsageError):
    """A policy returned something other than a :class:`~spillway.types.Decision`."""


class UnsupportedError(SpillwayError, RuntimeError):
    """Spillway cannot work here: torch is too old, or the code runs inside ``torch.func`` transforms."""


class BackendError(UnsupportedError):
    """A device that no backend serves."""


class SessionError(SpillwayError, RuntimeError):
    """A session that is closed, or that belongs to the process this one was forked from."""


class RecomputeError(SpillwayError, RuntimeError):
    """A recomputation differs from the first computation, or cannot be made."""


class InplaceError(SpillwayError, RuntimeError):
    """A tensor that backward needs was changed in place after autograd saved it.

    It is a ``RuntimeError`` with autograd's own words, since this is autograd's own check. Saved-tensor hooks disable
    that check, and Spillway makes it again.
    """


class BudgetError(SpillwayError, RuntimeError):
    """No plan fits the budget.

    Args:
        message: the text.
        budget: most bytes that may be allocated on the device.
        least: bytes of the smallest peak that was found.
    """

    def __init__(self, message: str, *, budget: int, least: int) -> None:
        super().__init__(message)
        self.budget = budget
        self.least = least

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), budget=self.budget, least=self.least), self.args


class ParkedError(SpillwayError, RuntimeError):
    """A parked tensor, module or optimizer was used, or the GPU has no memory to reload it."""


class SplitError(SpillwayError, AssertionError):
    """A split of a batch gave other gradients than the whole; raised by ``spillway.split_equals_whole`` only."""


class RaceError(SpillwayError, RuntimeError):
    """Two accesses to the same bytes that no event orders; raised by the adversary backend only."""


class TierError(SpillwayError, RuntimeError):
    """Bytes could not be stored or reloaded."""


class TierFullError(TierError):
    """A tier's budget, or the disk, is full."""


class SpillPathError(TierError):
    """A path where no spill file can be made."""


class TransferError(TierError):
    """A copy, a read or a write failed."""


class CorruptError(TierError):
    """The reloaded bytes are not the stored ones."""
