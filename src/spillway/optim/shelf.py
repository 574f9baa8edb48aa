"""Where masters and states of held parameters lie between steps, and how they are stepped from there.

NOTE [ Shelves ]

Three places are had, each a shelf:

* memory of the host, where the host steps them as they lie (``memory_shelf.py``);
* pinned memory, from which they come to the device to be stepped there (``streamed_shelf.py``);
* the session's spill file, from which they come to host memory to be stepped there (``disk_shelf.py``).

For the last two, which have ``load_shelf.py`` in common, what moves at once is a *load* (``loads.py``): a piece of a
large parameter, or several small ones, masters and states side by side. A *carrier* knows the place and the way: pinned
memory and two lanes (``device_carrier.py``), extents and host tasks (``disk_carrier.py``). A *trip* is one load's way
to the step and back; a *belt* (``belt.py``) has some trips come ahead of the one that is stepped, and some leave behind
it, with all their memory within a window.

What is on a shelf is there once. While a load is away, its states hold places instead of tensors; numbers (counts of
steps) stay, they are small. A load that could not be put back, since the disk is full or failed, stays where it was
stepped, whoever asks is told, and the next step uses it from there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from spillway.optim.held import Held
from spillway.optim.host_step import Turn
from spillway.optim.layout import State
from spillway.optim.tally import Tally

Settings = Callable[[Held], dict[str, Any]]
"""The settings of a held parameter's group, as they are for where it is stepped."""


class Loading(NamedTuple):
    """A state that is loaded."""

    held: Held
    state: Mapping[Any, Any]
    """As it was saved; its master among it, if it has one."""


class Shelf(ABC):
    """Where masters and states lie. See NOTE [ Shelves ]."""

    steps_on_device: bool = False
    """Whether parameters are stepped there, so that a gradient that is there is to stay."""

    @abstractmethod
    def add(self, held: Held) -> None:
        """A parameter that is held."""

    @abstractmethod
    def prepare(self, held: Iterable[Held]) -> None:
        """Have room for what the next step of these parameters makes.

        Raises:
            TierFullError: if there is none. Nothing was stepped then, and no gradient touched.
            UsageError: if a parameter is no longer what it was.
        """

    @abstractmethod
    def tally(self) -> Tally:
        """A new one, for the next step."""

    @abstractmethod
    def step(self, turns: Sequence[Turn], now: Tally, *, overlapped: bool) -> None:
        """Step parameters, or queue that.

        Args:
            turns: the parameters, and their gradients.
            now: counts what that costs.
            overlapped: whether the next forward runs meanwhile.
        """

    @abstractmethod
    def shown(self, held: Held) -> State | None:
        """A parameter's state, with places for tensors that lie elsewhere; ``None`` if there is none."""

    @abstractmethod
    def opened(self, held: Held) -> State:
        """All of a parameter's state, on the host; what is written there is what the next step begins with."""

    @abstractmethod
    def whole(self, held: Sequence[Held]) -> list[State]:
        """All of the parameters' states, masters among them, on the host."""

    @abstractmethod
    def put(self, loading: Sequence[Loading]) -> None:
        """Parameters' states are these."""

    @abstractmethod
    def begin(self, held: Sequence[Held]) -> None:
        """Parameters that were never stepped get the states that the class's constructor makes."""

    @abstractmethod
    def refresh(self, held: Held) -> None:
        """The next step takes a parameter's master from the parameter, whatever both say."""

    def written(self) -> dict[int, dict[str, Any]]:
        """What the class has put into its groups since this was asked for last, by their index."""
        return {}

    @abstractmethod
    def discard(self, held: Held) -> None:
        """A parameter that is held no more: its state is gone."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""
