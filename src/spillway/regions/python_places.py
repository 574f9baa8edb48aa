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

import dis
import functools
import itertools
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy

from spillway.regions.containers import (
    DICTS,
    INTERNAL,
    LISTS,
    MISSING,
    Attributes,
    Bound,
    Children,
    ClassAttributes,
    Container,
    Dictionary,
    ForeignParameters,
    Globals,
    Items,
    Members,
    ModuleAttributes,
    OtherPlacesError,
    Parameters,
    Slots,
    Variables,
    are_identical,
    are_plain,
    picker,
)

_DEPTH = 6
"""How many containers and objects deep state is copied."""
_FILE_DEPTH = 2
"""How deep a file is taken for the function's own: one that lies deeper is a logger's, say."""
_MOST_ITEMS = 4096
"""Items of a container that is copied."""

_PARTS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module. They come first among its values."""

_SIMPLE = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range))
_OPAQUE_ROOTS = frozenset(("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"))

_MODULE, _ATTRIBUTES = ModuleAttributes(), Attributes()
_DICTIONARY, _PARAMETERS, _FOREIGN = Dictionary(), Parameters(), ForeignParameters()
_ITEMS, _MEMBERS, _FIXED, _BOUND, _CHILDREN = Items(), Members(), Container(), Bound(), Children()

_EMPTY, _DICT, _VARS, _LIST, _OPENED, _ARRAY, _GENERATOR, _LARGE = range(8)
"""How a container is read: see :class:`_Level`."""


_MISSES = (KeyError, AttributeError, OtherPlacesError)
"""What is raised where an attribute is missing, a module has died, or a function has other code."""


class Place:
    """A container, by the position of the value that it is.

    Args:
        kind: what it is.
        reading: how it is read.
        parent: the container that has it as a value; ``None`` of modules, which are known by themselves.
        index: which of the parent's values it is.
    """

    __slots__ = ("count", "index", "is_shared", "keys", "kind", "level", "parent", "reading", "start")

    def __init__(self, kind: Container, reading: int, parent: Place | None, index: int) -> None:
        self.kind, self.reading = kind, reading
        self.parent, self.index = parent, index
        self.level: int = 0 if parent is None else parent.level + 1
        self.is_shared: bool = isinstance(kind, ClassAttributes) or (
            parent is not None and parent.is_shared and not isinstance(kind, Variables)
        )
        """Whether it is a class, or a container that a class has. Of what lies there, containers alone are read:
        registries of functions and objects are there, too."""
        self.keys: tuple[Any, ...] = ()
        self.start = self.count = 0
        """Its values are so many in the flat list, beginning there."""

    @property
    def has_values(self) -> bool:
        """Whether it is read: not an array, a generator or a large container."""
        return self.reading < _ARRAY

    @property
    def position(self) -> int:
        """Its own position in the flat list of values."""
        assert self.parent is not None
        return self.parent.start + self.index


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
        ends = list(itertools.accumulate(readings.count(reading) for reading in range(_LARGE + 1)))
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
        if any(len(thing) <= _MOST_ITEMS for thing in things[self._large :]):
            return None
        return [*itertools.chain.from_iterable([each.values() for each in mappings]), *itertools.chain(*lists)]


class Places:
    """Where the Python state of a function lies. See NOTE [ Places ].

    Args:
        roots: the function, or the module that it is a method of, and objects among its arguments.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        walk = _Walk(roots)
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
        self._getters = [picker(place.keys) for place in walk.places if place.kind is _MODULE]
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
        self.arrays = picker([number for place, number in numbers.items() if place.reading == _ARRAY])
        """Gives the arrays among the containers; and so on."""
        self.generators = picker([number for place, number in numbers.items() if place.reading == _GENERATOR])
        owners = [place for place in self.places if place.kind is _PARAMETERS or place in walk.buffers]
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
            if found and place.kind is not _FOREIGN:
                names = place.kind.names(place.keys, place.count)
                for index in found:
                    yield place.start + index, names[index], place.kind is _PARAMETERS

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


class _Walk:
    """Finds all containers, those that lie less deep first."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self.has_iterators = self.is_lazy = self.writes_parameters = False
        self.keys_are_simple = True
        self.modules: list[Module] = []
        self.classes: list[type] = []
        self.places: list[Place] = []
        self.values: dict[Place, list[Any]] = {}
        self.buffers: set[Place] = set()
        """Places of modules' buffers."""
        self.repeated: list[tuple[Place, int, Place]] = []
        """Values that are known containers: of which container, which value, and the place."""
        self._found: dict[int, Place] = {}
        """Places by the identities of their objects."""
        self._todo: deque[tuple[Any, Place, int]] = deque()
        """Containers that are to be read, and how deep they lie."""
        self._roots = Place(_FIXED, _LIST, None, 0)
        self._roots.count = len(roots)
        for index, value in enumerate(roots):
            self._meet(value, self._roots, index, 0)
        while self._todo:
            self._read(*self._todo.popleft())

    def _meet(self, value: Any, parent: Place, index: int, depth: int) -> None:
        """A value of a container, which may be another one."""
        kind = _kind_of(type(value))
        name = kind.name
        if name == "simple" or (parent.is_shared and name not in _SHARED):
            return
        known = self._found.get(id(value))
        if known is not None:
            self.repeated.append((parent, index, known))
        elif name == "module":
            place = self._add(value, Place(_MODULE, _VARS, None, 0), 0)
            self.modules.append(value)
            self.repeated.append((parent, index, place))
            self._add_classes(type(value), has_methods=True)
        elif depth > _DEPTH or (name == "file" and depth > _FILE_DEPTH):
            return
        elif name in ("iterator", "file"):
            self.has_iterators = True
        elif name == "function":
            self._add_function(value, parent, index, depth)
        elif name == "object":
            self._add_object(value, kind.slots, parent, index, depth)
        elif name in _SIZED and len(value) > _MOST_ITEMS:
            self._add(value, Place(_FIXED, _LARGE, parent, index), depth)
        else:
            self._add(value, Place(*_KINDS[name], parent, index), depth)

    def _add(self, value: Any, place: Place, depth: int) -> Place:
        self._found.setdefault(id(value), place)
        self.places.append(place)
        if place.reading in (_DICT, _LIST) and not value:
            place.reading = _EMPTY
        elif place.has_values:
            self._todo.append((value, place, depth))
        return place

    def _add_object(self, value: Any, slots: tuple[str, ...], parent: Place, index: int, depth: int) -> None:
        if type(getattr(value, "__dict__", None)) is dict:
            self._add(value, Place(_ATTRIBUTES, _VARS, parent, index), depth)
        if slots:
            self._add(value, Place(Slots(slots), _OPENED, parent, index), depth)
        self._add_classes(type(value), has_methods=False)

    def _add_classes(self, kind: type, *, has_methods: bool) -> None:
        for base in kind.__mro__:
            root = _root_of(base)
            if id(base) not in self._found and root not in _OPAQUE_ROOTS and root not in sys.stdlib_module_names:
                index = self._roots.count + len(self.classes)
                self.classes.append(base)
                attributes = ClassAttributes(vars(base), has_methods=has_methods)
                self._add(base, Place(attributes, _OPENED, self._roots, index), 1)

    def _add_function(
        self, value: Any, parent: Place, index: int, depth: int, *, opens: bool = True, is_forward: bool = False
    ) -> None:
        """A function.

        Args:
            value: the function.
            parent: what has it as a value.
            index: as which value.
            depth: how deep it lies.
            opens: whether functions among the globals that it names are read, too.
            is_forward: whether it is the forward of a class: then its globals alone are read.
        """
        names: tuple[str, ...] = ()
        helpers: list[str] = []
        if _root_of(value) not in _OPAQUE_ROOTS:
            names, helpers = _state_and_helpers(value)
        kind = Globals if is_forward else Variables
        variables = kind(value.__code__, (*names, *helpers), len(helpers)) if opens else kind(value.__code__, names, 0)
        self._add(value, Place(variables, _OPENED, parent, index), depth)
        if not is_forward:
            self._add(value, Place(_ATTRIBUTES, _VARS, parent, index), depth)

    def _read(self, thing: Any, place: Place, depth: int) -> None:
        kind = place.kind
        if kind is _MODULE:
            self._read_module(thing, place)
            return
        if isinstance(kind, ClassAttributes):
            self._read_class(thing, place, kind)
            return
        opened = kind.open(thing)
        values = self._hold(place, opened if kind.has_names else None, opened)
        if isinstance(kind, Variables):
            self._read_function(kind, place, values, depth)
        else:
            for index, value in enumerate(values):
                if type(value) not in _SIMPLE:
                    self._meet(value, place, index, depth + 1)

    def _hold(self, place: Place, mapping: Any, values: Any) -> list[Any]:
        if mapping is not None:
            place.keys = tuple(mapping)
            self.keys_are_simple = self.keys_are_simple and _SIMPLE.issuperset(map(type, place.keys))
            values = mapping.values()
        found = self.values[place] = list(values)
        place.count = len(found)
        return found

    def _read_module(self, module: Module, place: Place) -> None:
        attributes = module.__dict__
        names = (*_PARTS, *[name for name in attributes if name not in INTERNAL])
        values = self._hold(place, {name: attributes[name] for name in names}, None)
        parameters, buffers, children = values[:3]
        if type(parameters) in DICTS:
            is_plain = are_plain(parameters.values())
            self._add_part(parameters, Place(_PARAMETERS if is_plain else _FOREIGN, _DICT, place, 0))
            self.is_lazy = self.is_lazy or (not is_plain and any(map(is_lazy, parameters.values())))
        if type(buffers) in DICTS:
            self.buffers.add(self._add_part(buffers, Place(_DICTIONARY, _DICT, place, 1)))
            self.is_lazy = self.is_lazy or (len(buffers) > 0 and any(map(is_lazy, buffers.values())))
        # Those of a scripted module are no dictionary.
        kind, reading = (_DICTIONARY, _DICT) if type(children) in DICTS else (_CHILDREN, _OPENED)
        self._add_part(children, Place(kind, reading, place, 2))
        if isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None:
            self.writes_parameters = True
        for index in range(len(_PARTS), place.count):
            if type(values[index]) not in _SIMPLE:
                self._meet(values[index], place, index, 1)

    def _add_part(self, part: Any, place: Place) -> Place:
        known = self._found.get(id(part))
        if known is None:
            return self._add(part, place, 0)
        assert place.parent is not None
        self.repeated.append((place.parent, place.index, known))
        return known

    def _read_class(self, thing: type, place: Place, kind: ClassAttributes) -> None:
        """Of a class, ``forward`` is read, and containers that all its objects share."""
        values = self._hold(place, {name: vars(thing)[name] for name in kind.names_read}, None)
        for index, (name, value) in enumerate(zip(place.keys, values, strict=True)):
            if name == "forward" and type(value) is types.FunctionType:
                if id(value) in self._found:
                    self.repeated.append((place, index, self._found[id(value)]))
                else:
                    self._add_function(value, place, index, 1, is_forward=True)
            else:
                self._meet(value, place, index, 1)

    def _read_function(self, kind: Variables, place: Place, values: list[Any], depth: int) -> None:
        first_global, first_helper = place.count - len(kind.globals), place.count - kind.helpers
        for index, value in enumerate(values):
            if index < first_helper:
                self._meet(value, place, index, depth + 1 if index < first_global else 1)
            elif id(value) in self._found:
                self.repeated.append((place, index, self._found[id(value)]))
            else:
                self._add_function(value, place, index, 1, opens=False)


class _Kind(NamedTuple):
    """What is done with the objects of a class, and the names of their slots."""

    name: str
    slots: tuple[str, ...] = ()


_KINDS: dict[str, tuple[Container, int]] = {
    "dict": (_DICTIONARY, _DICT),
    "list": (_ITEMS, _LIST),
    "set": (_MEMBERS, _LIST),
    "tuple": (_FIXED, _LIST),
    "bound": (_BOUND, _OPENED),
    "array": (_FIXED, _ARRAY),
    "generator": (_FIXED, _GENERATOR),
}
_SIZED = frozenset(("dict", "list", "set", "tuple"))
_SHARED = _SIZED | {"array", "generator"}
"""Kinds of values that are read in classes."""
_kinds: dict[int, tuple[_Kind, weakref.ref[type]]] = {}
"""Kinds by the identities of classes, which are not held: a class holds the globals of its methods."""


def _kind_of(kind: type) -> _Kind:
    known = _kinds.get(key := id(kind))
    if known is None:
        known = _kinds[key] = _classify(kind), weakref.ref(kind, lambda _: _kinds.pop(key, None))
    return known[0]


def _classify(kind: type) -> _Kind:
    if kind in _SIMPLE or issubclass(kind, (torch.Tensor, type, types.ModuleType)):
        return _Kind("simple")
    if issubclass(kind, Module):
        return _Kind("module")
    for kinds, name in ((DICTS, "dict"), (LISTS, "list"), ((set,), "set"), ((tuple, frozenset), "tuple")):
        if kind in kinds:
            return _Kind(name)
    if issubclass(kind, (random.Random, torch.Generator)):
        return _Kind("generator")
    root = _root_of(kind)
    if root == "numpy":
        return _Kind("array" if kind.__name__ == "ndarray" else "generator")
    if kind is types.FunctionType:
        return _Kind("function")
    if kind is types.MethodType or kind is functools.partial:
        return _Kind("bound")
    if hasattr(kind, "__next__"):
        return _Kind("file" if root in ("io", "_io") else "iterator")
    if root in _OPAQUE_ROOTS:
        return _Kind("simple")
    members = types.MemberDescriptorType
    slots = [name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, members)]
    return _Kind("object", tuple(dict.fromkeys(slots))) if kind.__dictoffset__ or slots else _Kind("simple")


def _root_of(value: Any) -> str:
    """The package that a class or function is of."""
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def _state_and_helpers(function: Any) -> tuple[tuple[str, ...], list[str]]:
    """Names of globals in a function's code: of values that are no functions, classes or modules; and of functions."""
    found, helpers, names = [], [], function.__globals__
    read, written = _globals_in(function.__code__)
    for name in read:
        value = names.get(name, MISSING)
        if value is MISSING:
            if name in written:
                found.append(name)
        elif isinstance(value, types.FunctionType):
            if _root_of(value) not in _OPAQUE_ROOTS:
                helpers.append(name)
        elif isinstance(value, Module) or not (isinstance(value, types.ModuleType) or callable(value)):
            found.append(name)
    return tuple(found), helpers


@functools.lru_cache(maxsize=1024)
def _globals_in(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of globals in a function's code, and in the functions inside; and those among them that it writes."""
    found: dict[str, None] = {}
    written: set[str] = set()
    for each in dis.get_instructions(code):
        if "GLOBAL" in each.opname or each.opname == "LOAD_NAME":
            found[each.argval] = None
            if each.opname == "STORE_GLOBAL":
                written.add(each.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names, more = _globals_in(constant)
            found.update(dict.fromkeys(names))
            written |= more
    return tuple(found), frozenset(written)


def _sizes(attributes: Sequence[dict[str, Any]]) -> list[int]:
    """How many attributes each module has, but for those of torch's own that come and go."""
    return [len(each) - ("forward" in each) - ("_compiled_call_impl" in each) for each in attributes]
