"""What is brought, stepped and taken back at once: a piece of a large parameter, or several small ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from spillway.optim.held import CHUNK, Held
from spillway.optim.layout import Layout, Place, State
from spillway.runtime.bytes import Bytes

_LEAST = 1 << 16
_BYTES_AN_ELEMENT = 16
_IN_FLIGHT = 4


class Part(NamedTuple):
    """Elements of a held parameter, in the order in which they lie."""

    held: Held
    start: int
    numel: int

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of tensors that belong to it: the parameter's own, or of a flat piece."""
        return self.held.form if self.numel == self.held.numel else ((self.numel,), (1,))

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter's own that it has."""
        return self.numel * self.held.local().itemsize

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that lies in memory as the parameter does."""
        return whole.as_strided(*self.form, int(whole.storage_offset()) + self.start)


class Load:
    """Parts that move together, with their states and masters.

    A tensor of a state that is *away* is a :class:`~spillway.optim.layout.Place` in it. A tensor that is there itself
    is where it is stepped: it could not be taken away, and is used from there the next time.

    Args:
        parts: all of a piece of one parameter, or all of several.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.states: list[State] = [{} for _ in parts]
        """Of each part, with its master."""
        self.begun = [False] * len(parts)
        """Which have a state of the class's."""
        self.layout = Layout()
        """Of what is away."""
        self.place: Any = None
        """Where that is: its carrier's to know."""
        self.target: tuple[Layout, Any] | None = None
        """How it is expected to lie after the next step, and a place for that, if that is another."""

    @property
    def is_cut(self) -> bool:
        """Whether it is a piece of a parameter."""
        return self.parts[0].numel < self.parts[0].held.numel

    @property
    def is_away(self) -> bool:
        """Whether there is something to be brought."""
        return any(isinstance(value, Place) for state in self.states for value in state.values())

    def opened(self, memory: Bytes | None) -> list[State]:
        """The states with all their tensors, of which those that were away are in memory now."""

        def found(value: Any) -> Any:
            if not isinstance(value, Place):
                return value
            assert memory is not None
            return value.view(memory)

        return [{name: found(value) for name, value in state.items()} for state in self.states]

    def shut(self, states: Sequence[State], layout: Layout, place: Any) -> None:
        """These are the states now, and their tensors are away."""
        away = {(each.part, each.name): each for each in layout.places}
        self.layout, self.place, self.target = layout, place, None
        self.states = [
            {name: away.get((index, name), value) for name, value in state.items()}
            for index, state in enumerate(states)
        ]


def most_elements(window: int) -> int:
    """How many elements a load has at most, so that a few of them fit a window; but for what cannot be cut."""
    return min(CHUNK, max(_LEAST, window // (_IN_FLIGHT * _BYTES_AN_ELEMENT)))


def formed(held: Iterable[Held], most: int) -> list[Load]:
    """Loads for parameters: those that may be cut are, and small ones that follow each other and are alike go together.

    Args:
        held: the parameters, in the order of the model.
        most: elements of a load; a parameter that has more, and may not be cut, is one all the same.
    """
    loads: list[Load] = []
    together: list[Part] = []
    for one in held:
        if together and (
            _kind(one) != _kind(together[0].held) or sum(part.numel for part in together) + one.numel > most
        ):
            loads.append(Load(together))
            together = []
        if one.cut and one.numel > most:
            starts = range(0, one.numel, most)
            loads += [Load([Part(one, start, min(most, one.numel - start))]) for start in starts]
        else:
            together.append(Part(one, 0, one.numel))
    if together:
        loads.append(Load(together))
    return loads


def _kind(held: Held) -> tuple[object, ...]:
    return held.group, held.work_dtype, held.has_master, id(held.shared)
