"""What can be chosen of a window, as words."""

from __future__ import annotations

import enum
from typing import TypeVar

from spillway.errors import UsageError


class Normalize(enum.Enum):
    """What the gradients of a window are divided by."""

    TOKENS = "tokens"
    """The tokens of the window, over all ranks. Losses are sums."""
    SAMPLES = "samples"
    """The samples of the window, over all ranks. Losses are sums."""
    STEPS = "steps"
    """The micro-batches of the window, and the ranks. Losses are means, and each is divided before its backward."""
    SUM = "sum"
    """Nothing: losses are added up as they are, over all ranks."""

    @property
    def weighs(self) -> bool:
        """Whether each micro-batch must say its weight."""
        return self in (Normalize.TOKENS, Normalize.SAMPLES)


class Partial(enum.Enum):
    """What becomes of a window that a pass over a loader leaves unfilled."""

    SCALE = "scale"
    """It steps, normalised by what there is."""
    DROP = "drop"
    """Its gradients are cleared, and nothing steps."""
    CARRY = "carry"
    """It stays, and the next pass fills it up."""


class Sync(enum.Enum):
    """Which micro-batches reduce gradients over ranks."""

    LAST = "last"
    """The window's last."""
    EVERY = "every"
    """Each: what FSDP2 holds between micro-batches is then a shard."""


Option = TypeVar("Option", bound=enum.Enum)


def chosen(kind: type[Option], value: object, *, what: str) -> Option:
    """The option of this name.

    Raises:
        UsageError: if there is none.
    """
    try:
        return kind(value)
    except ValueError:
        words = " or ".join(repr(option.value) for option in kind)
        raise UsageError(f"{what}: got {value!r}, expected {words}") from None
