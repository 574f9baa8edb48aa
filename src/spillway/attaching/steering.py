"""What a block and who says how it is treated know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.nn import Module

from spillway.checkpointing.observer import Observer

if TYPE_CHECKING:
    from spillway.planning.profile import OptimizerProfile


class Steered(Protocol):
    """The call of a block, to who steers it."""

    name: str
    """The module's, dotted."""
    observer: Observer | None
    """Who watches its next call."""


class Steers(Protocol):
    """Who says how blocks are treated, and wants to know of each call."""

    def block_begins(self, call: Steered, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """A block is called; gives the number of its call in the pass, or -1 if nobody is watching."""
        ...

    def block_ended(self, number: int, output: Any) -> None:
        """It has returned."""
        ...

    def block_ran(self, number: int, seconds: float) -> None:
        """Its own code has run in forward, which took the host so long."""
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
