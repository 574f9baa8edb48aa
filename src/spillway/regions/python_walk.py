"""The walk that finds all containers of a function's Python state. See NOTE [ Python state ] in ``python_state.py``."""

from __future__ import annotations

import dis
import enum
import functools
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Embedding, EmbeddingBag, Module
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
    Parameters,
    Slots,
    Variables,
    are_plain,
)

_DEPTH = 6
"""How many containers and objects deep state is copied."""
_FILE_DEPTH = 2
"""How deep a file is taken for the function's own: one that lies deeper is a logger's, say."""
MOST_ITEMS = 4096
"""Items of a container that is copied."""

_PARTS = ("_parameters", "_buffers", "_modules")
"""Dictionaries of a module. They come first among its values."""

_SIMPLE = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range))
_OPAQUE_ROOTS = frozenset(("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"))

_MODULE, _ATTRIBUTES = ModuleAttributes(), Attributes()
_DICTIONARY, _PARAMETERS, _FOREIGN = Dictionary(), Parameters(), ForeignParameters()
_ITEMS, _MEMBERS, _FIXED, _BOUND, _CHILDREN = Items(), Members(), Container(), Bound(), Children()


class Reading(enum.IntEnum):
    """How a container is read, in the order in which those of one level are."""

    EMPTY = 0
    """It had no value when it was found. It is asked whether it still has none."""
    DICT = 1
    """It is a dictionary."""
    VARS = 2
    """Its ``vars`` are a dictionary."""
    LIST = 3
    """It can be iterated."""
    OPENED = 4
    """Its kind knows how: :meth:`Container.open`."""
    ARRAY = 5
    """It is an array, which has no values here."""
    GENERATOR = 6
    """It is a random generator, which has no values here."""
    LARGE = 7
    """It has too many items to be copied. It is asked whether it still has."""


class Place:
    """A container, by the position of the value that it is.

    Args:
        kind: what it is.
        reading: how it is read.
        parent: the container that has it as a value; ``None`` of modules, which are known by themselves.
        index: which of the parent's values it is.
    """

    __slots__ = ("count", "index", "is_shared", "keys", "kind", "level", "parent", "reading", "start")

    def __init__(self, kind: Container, reading: Reading, parent: Place | None, index: int) -> None:
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
        return self.reading < Reading.ARRAY

    @property
    def position(self) -> int:
        """Its own position in the flat list of values."""
        assert self.parent is not None
        return self.parent.start + self.index


class Walk:
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
        self._roots = Place(_FIXED, Reading.LIST, None, 0)
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
            place = self._add(value, Place(_MODULE, Reading.VARS, None, 0), 0)
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
        elif name in _SIZED and len(value) > MOST_ITEMS:
            self._add(value, Place(_FIXED, Reading.LARGE, parent, index), depth)
        else:
            self._add(value, Place(*_KINDS[name], parent, index), depth)

    def _add(self, value: Any, place: Place, depth: int) -> Place:
        self._found.setdefault(id(value), place)
        self.places.append(place)
        if place.reading in (Reading.DICT, Reading.LIST) and not value:
            place.reading = Reading.EMPTY
        elif place.has_values:
            self._todo.append((value, place, depth))
        return place

    def _add_object(self, value: Any, slots: tuple[str, ...], parent: Place, index: int, depth: int) -> None:
        if type(getattr(value, "__dict__", None)) is dict:
            self._add(value, Place(_ATTRIBUTES, Reading.VARS, parent, index), depth)
        if slots:
            self._add(value, Place(Slots(slots), Reading.OPENED, parent, index), depth)
        self._add_classes(type(value), has_methods=False)

    def _add_classes(self, kind: type, *, has_methods: bool) -> None:
        for base in kind.__mro__:
            root = _root_of(base)
            if id(base) not in self._found and root not in _OPAQUE_ROOTS and root not in sys.stdlib_module_names:
                index = self._roots.count + len(self.classes)
                self.classes.append(base)
                attributes = ClassAttributes(vars(base), has_methods=has_methods)
                self._add(base, Place(attributes, Reading.OPENED, self._roots, index), 1)

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
        self._add(value, Place(variables, Reading.OPENED, parent, index), depth)
        if not is_forward:
            self._add(value, Place(_ATTRIBUTES, Reading.VARS, parent, index), depth)

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
            self._add_part(parameters, Place(_PARAMETERS if is_plain else _FOREIGN, Reading.DICT, place, 0))
            self.is_lazy = self.is_lazy or (not is_plain and any(map(is_lazy, parameters.values())))
        if type(buffers) in DICTS:
            self.buffers.add(self._add_part(buffers, Place(_DICTIONARY, Reading.DICT, place, 1)))
            self.is_lazy = self.is_lazy or (len(buffers) > 0 and any(map(is_lazy, buffers.values())))
        # Those of a scripted module are no dictionary.
        kind, reading = (_DICTIONARY, Reading.DICT) if type(children) in DICTS else (_CHILDREN, Reading.OPENED)
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


_KINDS: dict[str, tuple[Container, Reading]] = {
    "dict": (_DICTIONARY, Reading.DICT),
    "list": (_ITEMS, Reading.LIST),
    "set": (_MEMBERS, Reading.LIST),
    "tuple": (_FIXED, Reading.LIST),
    "bound": (_BOUND, Reading.OPENED),
    "array": (_FIXED, Reading.ARRAY),
    "generator": (_FIXED, Reading.GENERATOR),
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
