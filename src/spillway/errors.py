"""Everything that Spillway raises on purpose.

::

    SpillwayError
    ├── UsageError (ValueError)            an argument that cannot be meant
    │   ├── SizeError                      "12 parsecs" where a size belongs
    │   └── PolicyError                    a policy answered with something that is no decision
    ├── UnsupportedError (RuntimeError)    a place where Spillway cannot work: torch too old, torch.func
    │   └── BackendError                   a device that no backend serves
    ├── SessionError (RuntimeError)        a session that is closed, or that belongs to another process
    ├── RecomputeError (RuntimeError)      a region that cannot be run again with the same outcome
    ├── InplaceError (RuntimeError)        a saved tensor was changed in place: autograd's own message
    ├── BudgetError (RuntimeError)         no choice of what to keep, send and compute again fits the budget
    ├── SplitError (AssertionError)        micro-batches whose gradients are not those of the whole batch
    ├── RaceError (RuntimeError)           an access without a happens-before edge (the checking backend only)
    └── TierError (RuntimeError)           bytes that could not be stored or brought back
        ├── TierFullError                  the cap, or the device behind the tier, is full
        ├── SpillPathError                 a path where no spill file can be made
        ├── TransferError                  a copy, a read or a write failed
        └── CorruptError                   what came back is not what was stored

Every message says what was got, what was expected and what to do. Nothing here is ever raised and then only logged:
it reaches the caller at the step that needed the bytes.
"""

from __future__ import annotations

import functools


def printable(text: str) -> str:
    r"""A text in which characters that a terminal obeys, or does not show, stand as Python writes them.

    Names of modules, files and groups come from others: an escape sequence in one could repaint the terminal.

    Example:
        >>> printable("layers.\x1b[2J0")
        'layers.\\x1b[2J0'
    """
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class SpillwayError(Exception):
    """The root: ``except spillway.SpillwayError`` catches what Spillway raises on purpose, and nothing else.

    As text it has no characters that a terminal obeys, but for the ends of its lines: see :func:`printable`.
    """

    def __str__(self) -> str:
        return "\n".join(map(printable, super().__str__().split("\n")))


class UsageError(SpillwayError, ValueError):
    """An argument that cannot be meant."""


class SizeError(UsageError):
    """A size that is neither a number of bytes nor a number with a unit."""


class PolicyError(UsageError):
    """A policy answered with something that is no :class:`~spillway.types.Decision`."""


class UnsupportedError(SpillwayError, RuntimeError):
    """A place where Spillway cannot work: too old a torch, inside ``torch.func`` transforms."""


class BackendError(UnsupportedError):
    """A device that no backend serves."""


class SessionError(SpillwayError, RuntimeError):
    """A session that is closed, or that belongs to the process this one was forked from."""


class RecomputeError(SpillwayError, RuntimeError):
    """A recomputed region that cannot be run again with the same outcome."""


class InplaceError(SpillwayError, RuntimeError):
    """A tensor that backward needs was changed in place after it was saved.

    It is a ``RuntimeError`` with autograd's own words, since this is autograd's own check: saved-tensor hooks switch
    it off, and Spillway makes it again.
    """


class BudgetError(SpillwayError, RuntimeError):
    """No choice of what to keep, to send and to compute again fits the budgets.

    Args:
        message: what was got, what was expected, what to do.
        budget: bytes that may be allocated on the device at most.
        least: bytes of the smallest peak that was found.
    """

    def __init__(self, message: str, *, budget: int, least: int) -> None:
        super().__init__(message)
        self.budget = budget
        self.least = least

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), budget=self.budget, least=self.least), self.args


class SplitError(SpillwayError, AssertionError):
    """A split of a batch gave other gradients than the whole; raised by ``spillway.split_equals_whole`` only."""


class RaceError(SpillwayError, RuntimeError):
    """Two accesses to the same bytes with nothing that orders them; raised by the adversary backend only."""


class TierError(SpillwayError, RuntimeError):
    """Bytes that could not be stored or brought back."""


class TierFullError(TierError):
    """The byte cap of a tier, or the device behind it, is full."""


class SpillPathError(TierError):
    """A path where no spill file can be made."""


class TransferError(TierError):
    """A copy, a read or a write failed."""


class CorruptError(TierError):
    """What came back from a tier is not what was stored there."""
