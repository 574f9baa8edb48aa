"""What a block and who says how it is treated know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.nn import Module

from spillway.regions.observer import Observer

if TYPE_CHECKING:
    from spillway.planning.profile import OptimizerProfile


class Steered(Protocol):
    """The call of a block, to who steers it."""

    name: str
    """The module's, dotted."""
    observer: Observer | None
    """Who watches its next region."""
    writes_tape: bool | None
    """Whether a tape is to be written when that runs again: at once, not now, or if its arguments came before."""
    watches: bool | None
    """Whether its operators are looked at; ``None``: as its options say."""


class Steers(Protocol):
    """Who says how blocks are treated, and wants to know of each call."""

    def block_begins(self, call: Steered, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """A block is called; gives the number of its call in the pass, or -1 if nobody is watching."""
        ...

    def block_ended(self, number: int, output: Any) -> None:
        """It has returned."""
        ...

    def rerun_begins(self, number: int) -> None:
        """A block runs again."""
        ...

    def rerun_ended(self, number: int) -> None:
        """That is over."""
        ...


class Divided(Protocol):
    """An optimizer that steps a part of its elements on the host, to who says which part."""

    def divide(self, fraction: float) -> None:
        """From the next step on, so many of all elements are stepped on the host."""
        ...

    def profile(self) -> OptimizerProfile | None:
        """What it costs to step all of them there; ``None``: not enough steps were seen."""
        ...
