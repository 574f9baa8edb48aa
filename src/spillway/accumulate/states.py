"""Where a window stands, and what is open in it."""

from __future__ import annotations

import enum
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

Weight = float | Tensor


class State(enum.Enum):
    """Where a window stands between its micro-batches."""

    EMPTY = "empty"
    """No micro-batch has had its backward."""
    FILLING = "filling"
    """Some have, and the last one has not."""
    FULL = "full"
    """The last one has: a step is due."""
    SPOILED = "spoiled"
    """A backward or a step has failed halfway: the gradients are those of nothing."""
    CLOSED = "closed"
    """The accumulator is closed."""


@dataclass(eq=False)
class MicroBatch:
    """One that is open."""

    weight: Weight | None
    """What it weighs, if that is known already."""
    last: bool
    """Whether it ends its window."""
    in_loop: bool
    """Whether a loop over a loader opened it: then its window steps by itself."""
    dropped: bool = False
    """Whether its window is to be dropped when it ends."""
    had_backward: bool = False
    switches: ExitStack = field(default_factory=ExitStack)
    """What gives back the wrappers' switches."""
