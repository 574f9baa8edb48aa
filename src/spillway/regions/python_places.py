"""The places where a function's Python state lies: how to find each of its containers again, and read them all.

NOTE [ Places ]

To find all containers of a function's Python state takes long; to find them again in the next call takes a third of
it. So :class:`Places` holds a recipe. Each container is found as the value at a known position of another one:

* level 0: the roots (the function, objects among its arguments, classes), and the attributes of all modules;
* level n + 1: containers among the values of level n.

The values of all containers, read in this order, are one flat list. The recipe holds, for each level, how many values
each container has, their names, and the type of each value. As long as these are the same, the same positions hold the
containers. So a changed number or tensor changes nothing; a new attribute, a moved item or a list in place of ``None``
does. Then :meth:`Places.take` gives ``None``, and the function is walked again.

Whether a container that was found at several positions still is one object is compared as well. So is the identity of
each module, which the recipe knows by a weak reference.

The recipe holds no other object of the function, and so no tensor's memory: names, types, classes and code only. It may
be held as long as one likes.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from spillway.regions.containers import (
    ForeignParameters,
    ModuleAttributes,
    OtherPlacesError,
    Parameters,
    are_identical,
    picker,
)
from spillway.regions.python_walk import MOST_ITEMS, Place, Reading, Walk

_MISSES = (KeyError, AttributeError, OtherPlacesError)
"""What is raised where an attribute is missing, a module has died, or a function has other code."""


class _Level:
    """The containers of one level, ordered by how they are read.

    First come empty ones: most modules have three. Then come dictionaries, ``vars`` of objects, lists, and others.
    Arrays, generators and large containers come last. They are found here, and have no values.
    """

    def __init__(self, places: list[Place], values: list[Any]) -> None:
        self.size = len(places)
        self.pick = picker([place.position for place in places])
        self.types = list(map(type, values))
        readings = [place.reading for place in places]
        ends = list(itertools.accumulate(map(readings.count, Reading)))
        self._empty, self._dicts, self._vars, self._lists, self._opened, _, self._large, _ = ends
        self._open = [place.kind.open for place in places[self._lists : self._opened]]
        self._counts = [place.count for place in places[self._empty : self._opened]]
        self._keys = [key for place in places[self._empty : self._vars] for key in place.keys]
        # Equal strings are the same key. Others may be equal and not the same: 1 and True, say.
        are_strings = all(type(key) is str for key in self._keys)
        self._are_same_keys: Callable[[Any, Any], bool] = operator.eq if are_strings else are_identical

    def read(self, things: Sequence[Any]) -> list[Any] | None:
        """The values of its containers, in a flat list; ``None`` if there are more, fewer, or others by name."""
        if any(things[: self._empty]):
            return None
        mappings = [*things[self._empty : self._dicts], *map(vars, things[self._dicts : self._vars])]
        lists = [*things[self._vars : self._lists]]
        for open_, thing in zip(self._open, things[self._lists : self._opened], strict=True):
            lists.append(open_(thing))
        if [*map(len, mappings), *map(len, lists)] != self._counts:
            return None
        if not self._are_same_keys([*itertools.chain.from_iterable(mappings)], self._keys):
            return None
        if any(len(thing) <= MOST_ITEMS for thing in things[self._large :]):
            return None
        return [*itertools.chain.from_iterable([each.values() for each in mappings]), *itertools.chain(*lists)]


class Places:
    """Where the Python state of a function lies. See NOTE [ Places ].

    Args:
        roots: the function, or the module that it is a method of, and objects among its arguments.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        walk = Walk(roots)
        self.has_iterators = walk.has_iterators
        """Whether the function has state that cannot be copied."""
        self.is_lazy = walk.is_lazy
        """Whether a module of the function makes its parameters or buffers when it is first called."""
        self.writes_parameters = walk.writes_parameters
        """Whether the forward of a module writes its parameters: embeddings with ``max_norm`` do."""
        self.is_reusable = walk.keys_are_simple and bool(walk.modules or not walk.classes)
        """Whether these places may be held for later calls. Keys of other types may hold anything. And a class holds
        the globals of its methods, so that it must not outlive a function without modules."""
        self._classes = walk.classes
        self._modules = [weakref.ref(module) for module in walk.modules]
        self._getters = [picker(place.keys) for place in walk.places if isinstance(place.kind, ModuleAttributes)]
        """For each module, what gives the values of its attributes."""
        self._sizes = _sizes([module.__dict__ for module in walk.modules])
        values: list[Any] = [*roots, *self._classes]
        by_level: dict[int, list[Place]] = {}
        for place in walk.places:
            by_level.setdefault(place.level, []).append(place)
        self.places = by_level.pop(0, [])
        """All containers. Those of :meth:`take` come in the same order."""
        for place in self.places:
            place.start = len(values)
            values += walk.values[place]
        self._head = list(map(type, values))
        self._levels: list[_Level] = []
        for level in sorted(by_level):
            places = sorted(by_level[level], key=operator.attrgetter("reading"))
            start = len(values)
            for place in places:
                place.start = len(values)
                values += walk.values.get(place, ())
            self._levels.append(_Level(places, values[start:]))
            self.places += places
        numbers = {place: number for number, place in enumerate(self.places)}
        self._repeated = picker([parent.start + index for parent, index, _ in walk.repeated])
        self._repeated_things = picker([numbers[place] for *_, place in walk.repeated])
        self.arrays = picker([number for place, number in numbers.items() if place.reading == Reading.ARRAY])
        """Gives the arrays among the containers; and so on."""
        self.buffers = picker([number for place, number in numbers.items() if place in walk.buffers])
        self.generators = picker([number for place, number in numbers.items() if place.reading == Reading.GENERATOR])
        owners = [place for place in self.places if isinstance(place.kind, Parameters) or place in walk.buffers]
        at = [at for place in owners for at in range(place.start, place.start + place.count)]
        strided = [each for each in at if getattr(values[each], "layout", None) is torch.strided]
        self.memory = picker([each for each in strided if type(values[each]) in (torch.Tensor, Parameter)])
        """Gives the buffers and plain parameters of modules among the values."""
        self.parameters = picker([each for each in at if type(values[each]) is Parameter])
        self.tensors = list(self._tensors(values))
        """Positions of tensors among the values, each with its name, and whether it is a parameter of a module."""

    def _tensors(self, values: list[Any]) -> Iterator[tuple[int, str, bool]]:
        for place in self.places:
            found = [i for i in range(place.count) if isinstance(values[place.start + i], torch.Tensor)]
            if found and not isinstance(place.kind, ForeignParameters):
                names = place.kind.names(place.keys, place.count)
                for index in found:
                    yield place.start + index, names[index], isinstance(place.kind, Parameters)

    def take(self, roots: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
        """All containers and their values now; ``None`` if these places are not all of the places any more.

        Args:
            roots: like those that were walked.
        """
        things: list[Any] = [module() for module in self._modules]
        try:
            values = self._read_modules(roots, things)
            if values is None or list(map(type, values)) != self._head:
                return None
            for level in self._levels:
                found = level.pick(values)
                read = level.read(found)
                if read is None or list(map(type, read)) != level.types:
                    return None
                things += found
                values += read
        except _MISSES:
            return None
        same = map(operator.is_, self._repeated(values), self._repeated_things(things))
        return (things, values) if all(same) else None

    def read(self, roots: Sequence[Any], things: Sequence[Any]) -> list[Any] | None:
        """The values of these containers now; ``None`` if there are more, fewer, or others by name."""
        start = len(self._modules)
        try:
            values = self._read_modules(roots, things[:start])
            for level in self._levels:
                read = level.read(things[start : start + level.size])
                if read is None or values is None:
                    return None
                values += read
                start += level.size
        except _MISSES:
            return None
        return values

    def _read_modules(self, roots: Sequence[Any], modules: Sequence[Any]) -> list[Any] | None:
        """The values of level 0; ``None`` if a module has more attributes, or fewer."""
        attributes = [module.__dict__ for module in modules]
        if _sizes(attributes) != self._sizes:
            return None
        found = [get(each) for get, each in zip(self._getters, attributes, strict=True)]
        return [*roots, *self._classes, *itertools.chain.from_iterable(found)]


def _sizes(attributes: Sequence[dict[str, Any]]) -> list[int]:
    """How many attributes each module has, but for those of torch's own that come and go."""
    return [len(each) - ("forward" in each) - ("_compiled_call_impl" in each) for each in attributes]
