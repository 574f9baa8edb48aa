"""The walk that finds and copies a function's Python state. See NOTE [ Python state ] in ``python_state.py``.

NOTE [ Remembered walks ]

A walk is remembered if all that it found are modules with plain parameters and buffers, objects, and lists and tuples
of numbers. It is right again if all containers have the same names and values. Values are compared by identity, and an
object that is gone may leave its address to another one. So numbers, lists and tuples are held, and the rest is known
by weak references: with the first one that dies, the walk is forgotten.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy

from spillway.checkpointing.python_containers import (
    ATTRIBUTES,
    CELL,
    CLASS,
    DICTIONARY,
    INTERNAL,
    ITEMS,
    MISSING,
    PARAMETERS,
    SLOTS,
    Container,
    Generator,
    are_plain,
    generator_of,
)

_DEPTH = 6
"""Depth of containers and objects to which state is copied."""
_FILE_DEPTH = 2
"""Depth to which a file belongs to the function. A deeper one may belong to a logger."""
_MOST_ITEMS = 4096
"""Most items of a container that is copied."""
_MOST_BYTES = 1 << 16
"""Most bytes of an array that is copied."""

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_SIMPLE: frozenset[type] = frozenset(
    (int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
)
_CODE = _SIMPLE | {types.FunctionType, classmethod, staticmethod, property, type}
"""Classes of most attributes of a class."""
_NAMES: dict[type, str] = {
    **dict.fromkeys(_SIMPLE, "simple"),
    **dict.fromkeys(_DICTS, "dict"),
    **dict.fromkeys((list, deque, bytearray, set), "items"),
    **dict.fromkeys((tuple, frozenset), "fixed"),
    **dict.fromkeys((types.MethodType, functools.partial), "bound"),
    types.FunctionType: "function",
}
"""How objects of these classes are read."""
_OPAQUE_ROOTS = frozenset(("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"))
_STRINGS = frozenset((str,))
_SHARED = frozenset(("dict", "items", "fixed", "array", "generator"))
"""Objects that are read in classes. Classes also have registries of functions and other objects."""

_HELD = frozenset((list, tuple, set, frozenset))
_MOST_WALKS = 4
"""Walks of one function that are remembered, one after the other."""

Contents = list[tuple[Container, Any, Any]]
"""Containers: the kind, the object, and its content."""
Entry = tuple[Any, str, int, bool]
"""An object to be read, how it is read, its depth, and whether a class has it."""
Part = tuple[tuple[int, ...], Callable[[], Sequence[Entry]]]
"""Identities of a part's classes or objects, with their classes and depths, and a function that returns the objects."""


class Content(NamedTuple):
    """The content of all containers of a walk, one after the other."""

    lengths: list[int]
    """Numbers of all attributes of each module, then of the values of each container."""
    names: list[str]
    """Names in containers other than modules."""
    values: tuple[Any, ...]


class AttributeNames:
    """Names of a module's attributes that are state. Modules with the same names share them."""

    __slots__ = ("get", "names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        # For less than two names, an `itemgetter` would return no tuple.
        self.get: Callable[[Any], tuple[Any, ...]] = itemgetter(*names) if len(names) > 1 else self.values
        """Their values, in order. Raises a ``KeyError`` if a name has none any more."""

    @classmethod
    def of(cls, attributes: Any) -> AttributeNames:
        """The names of these attributes, without those that belong to torch."""
        return _shared_names(tuple([name for name in attributes if name not in INTERNAL]))

    def values(self, attributes: Any) -> tuple[Any, ...]:
        """As ``get``, also if a name has no value any more."""
        return tuple([attributes.get(name, MISSING) for name in self.names])


_shared_names = functools.lru_cache(maxsize=1024)(AttributeNames)


class Walk:
    """Finds everything that belongs to a function's state, breadth first.

    Args:
        roots: the function, or the module that it is a method of, and objects among its arguments.
        entries: objects to be read instead, for a part of a state.
    """

    def __init__(self, roots: Iterable[Any], entries: Iterable[Entry] = ()) -> None:
        self.has_iterators = False
        """Whether the function has state that cannot be copied."""
        self.is_lazy = False
        """Whether a module of the function makes its parameters or buffers when it is first called."""
        self.writes_parameters = False
        """Whether the forward of a module writes its parameters: embeddings with ``max_norm`` do."""
        self.modules: list[Module] = []
        self.names: list[AttributeNames] = []
        """For each module."""
        self.owners: list[tuple[Container, Any]] = []
        """Objects whose attributes are state."""
        self.dictionaries: list[tuple[Container, Any]] = []
        """Dictionaries, and classes."""
        self.items: list[tuple[Container, Any]] = []
        """Lists, sets and others whose values have no names."""
        self.globals: list[tuple[types.FunctionType, tuple[str, ...]]] = []
        """Functions with the globals that their code names."""
        self.others: Contents = []
        """Cells and slots, of which certain names are state, and dictionaries whose names are no strings."""
        self.empty: list[dict[str, Any]] = []
        """Empty dictionaries of modules: most have two."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """All tensors, with their names."""
        self.parameters: list[torch.Tensor] = []
        """Plain parameters of modules."""
        self.buffers: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.generators: list[Generator] = []
        self._todo: list[Entry] = [*entries]
        self._seen = {id(value) for value, what, *_ in self._todo if what != "class"}
        # Classes and objects, which many modules share, are read as parts of their own.
        self._is_part = bool(self._todo)
        self.classes: list[Entry] = []
        self.objects: list[Entry] = []
        self._meet(zip(repeat(""), roots), 0)
        # The list grows during the loop.
        for value, what, depth, is_shared in self._todo:
            if what == "module":
                self._read_module(value)
            else:
                self._read(value, what, depth, is_shared)
        self._seen.clear()
        self._todo.clear()

    @property
    def parts(self) -> list[Part]:
        """The classes, and each object. See NOTE [ Parts of a state ] in ``python_state.py``."""
        parts = (self.classes, *([each] for each in self.objects))
        return [(_key_of(each), partial(list, each)) for each in parts if each]

    @property
    def why_kept(self) -> str | None:
        """Why the function cannot be replayed, if it cannot."""
        if self.has_iterators:
            return "has an iterator, or a file, whose state cannot be copied for a second run"
        if self.is_lazy:
            return "has a lazy layer, which makes its parameters in this call"
        return "has an embedding with max_norm, whose forward writes its weight" if self.writes_parameters else None

    def _meet(self, pairs: Iterable[tuple[Any, Any]], depth: int, is_shared: bool = False) -> None:
        """Take values with their names, and queue containers among them; ``is_shared``: a class has them."""
        simple, seen = _CODE if is_shared else _SIMPLE, self._seen
        for name, value in pairs:
            if type(value) in simple:
                continue
            what = (_known.get(id(type(value))) or _facts_of(type(value)))[0]
            if what == "tensor":
                self.tensors.append((str(name), value))
            elif what == "simple" or id(value) in seen or (is_shared and what not in _SHARED):
                continue
            elif what == "module" or depth <= (_FILE_DEPTH if what == "file" else _DEPTH):
                seen.add(id(value))
                todo = self.objects if what == "object" and not self._is_part else self._todo
                todo.append((value, what, depth + 1, is_shared))

    def _read(self, value: Any, what: str, depth: int, is_shared: bool) -> None:
        if what in ("dict", "items", "fixed"):
            if len(value) <= _MOST_ITEMS:
                self._read_container(value, what, depth, is_shared)
        elif what == "object":
            self._read_object(value, depth)
        elif what == "class":
            self._read_classes(value)
        elif what in ("function", "helper"):
            self._read_function(value, depth, opens=what == "function")
        elif what == "bound":
            is_partial = isinstance(value, functools.partial)
            parts = (
                (value.func, *value.args, *value.keywords.values()) if is_partial else (value.__self__, value.__func__)
            )
            self._meet(zip(repeat("an argument of a partial function"), parts), depth)
        elif what == "generator":
            if (generator := generator_of(value)) is not None:
                self.generators.append(generator)
        elif what == "array":
            if value.nbytes <= _MOST_BYTES:
                self.arrays.append(value)
        else:
            self.has_iterators = True

    def _read_container(self, value: Any, what: str, depth: int, is_shared: bool = False) -> None:
        if what == "dict":
            if _STRINGS.issuperset(map(type, value)):
                self.dictionaries.append((DICTIONARY, value))
            else:
                # Keys of other types may be equal and not the same, as 1 and True.
                self.others.append((DICTIONARY, value, dict(value.items())))
            self._meet(value.items(), depth, is_shared)
            return
        if what == "items":
            self.items.append((ITEMS, value))
        if type(value) is not bytearray:
            self._meet(zip(repeat(f"an item of a {type(value).__name__}"), value), depth, is_shared)

    # Modules.

    def _read_module(self, module: Module) -> None:
        kind = type(module)
        if id(kind) not in self._seen:
            if self._is_part:
                self._read_classes(kind)
            else:
                self._seen.add(id(kind))
                self.classes.append((kind, "class", 0, True))
        attributes: Any = module.__dict__
        names = AttributeNames.of(attributes)
        self.modules.append(module)
        self.names.append(names)
        parameters, buffers, children = map(attributes.get, ("_parameters", "_buffers", "_modules"))
        if type(parameters) not in _DICTS:
            # A scripted module has other containers. A traced one has none, but a scripted one in an attribute.
            for each in (parameters, buffers, children) if parameters is not None else ():
                self._meet(each.items(), 0)
        else:
            self.empty += [each for each in (parameters, buffers, children) if not each]
            if parameters:
                self._read_parameters(parameters)
            if buffers:
                self._read_buffers(buffers)
            if children:
                self.dictionaries.append((DICTIONARY, children))
                self._meet(children.items(), 0)
        if more := [(name, value) for name in names.names if type(value := attributes[name]) not in _SIMPLE]:
            self._meet(more, 1)
        if "max_norm" in attributes and isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None:
            self.writes_parameters = True

    def _read_parameters(self, parameters: Any) -> None:
        if are_plain(parameters.values()):
            self.dictionaries.append((PARAMETERS, parameters))
            found = [pair for pair in parameters.items() if pair[1] is not None]
            self.tensors += found
            self.parameters += [each for _, each in found]
        else:
            self.is_lazy = self.is_lazy or any(map(is_lazy, parameters.values()))

    def _read_buffers(self, buffers: Any) -> None:
        self._read_container(buffers, "dict", 1)
        for buffer in buffers.values():
            if type(buffer) in (torch.Tensor, Parameter):
                self.buffers.append(buffer)
            elif is_lazy(buffer):
                self.is_lazy = True

    def _read_classes(self, kind: type) -> None:
        """Read ``forward`` of a class and its bases, and containers that all objects share."""
        for base in kind.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            if _facts_of(base)[2]:
                content = vars(base)
                self.dictionaries.append((CLASS, base))
                if not _CODE.issuperset(map(type, content.values())):
                    self._meet([pair for pair in content.items() if pair[0][:2] != "__"], 1, is_shared=True)
                forward = content.get("forward")
                if type(forward) is types.FunctionType:
                    self._add_globals(forward, opens=True)

    # Objects and functions.

    def _read_object(self, value: Any, depth: int) -> None:
        self._read_classes(type(value))
        if type(attributes := getattr(value, "__dict__", None)) is dict:
            self.owners.append((ATTRIBUTES, value))
            self._meet(attributes.items(), depth)
        if names := _facts_of(type(value))[1]:
            self._add_other(SLOTS, value, SLOTS.copy(value, names), depth)

    def _read_function(self, function: types.FunctionType, depth: int, *, opens: bool) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add_other(CELL, cell, CELL.copy(cell, (name,)), depth)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._meet(zip(repeat("a default of an argument"), defaults), depth)
        self._add_globals(function, opens=opens)
        self.owners.append((ATTRIBUTES, function))
        self._meet(vars(function).items(), depth)

    def _add_other(self, kind: Container, thing: Any, content: dict[str, Any], depth: int) -> None:
        self.others.append((kind, thing, content))
        self._meet(content.items(), depth)

    def _add_globals(self, function: types.FunctionType, *, opens: bool) -> None:
        """Read globals that a function's code names: its state and, if it ``opens``, functions with their own state."""
        if _root_of(function) in _OPAQUE_ROOTS:
            return
        state: dict[str, Any] = {}
        helpers: dict[str, types.FunctionType] = {}
        now = function.__globals__
        for name, is_written in _globals_in(function.__code__).items():
            value = now.get(name, MISSING)
            if value is MISSING:
                if is_written:
                    state[name] = value
            elif type(value) is types.FunctionType:
                if opens and _root_of(value) not in _OPAQUE_ROOTS:
                    helpers[name] = value
            elif isinstance(value, Module) or not (isinstance(value, types.ModuleType) or callable(value)):
                state[name] = value
        self._meet(state.items(), 1)
        new = [each for each in helpers.values() if id(each) not in self._seen]
        self._seen.update(map(id, new))
        self._todo += [(each, "helper", 1, False) for each in new]
        if state or helpers:
            self.globals.append((function, (*state, *helpers)))


Reference = Callable[[], Any]


class RememberedWalk:
    """A walk of an earlier call of a module. The next call need not search again. See NOTE [ Remembered walks ].

    Raises:
        NotRememberedError: for a walk that cannot be remembered.
    """

    def __init__(self, walk: Walk, content: Content) -> None:
        self._lengths, self._contained = content.lengths, content.names
        self._identities = [*map(id, content.values)]
        self._dead: list[object] = []
        """References to what has died since."""
        modules = walk.modules
        places = {
            id(value): (place, name)
            for place, module in enumerate(modules)
            for name, value in module.__dict__.items()
            if type(value) in _DICTS
        }
        containers = {id(each) for _, each in walk.dictionaries}
        tensors = {id(each) for each in (*walk.parameters, *walk.buffers)}
        if (
            (walk.owners or walk.others or walk.globals or walk.arrays or walk.why_kept is not None)
            or not modules
            or not places.keys() >= {*containers, *map(id, walk.empty)}
            # Parameters that FSDP has exchanged are not among them.
            or not containers >= {id(own) for each in modules if (own := each.__dict__.get("_parameters"))}
            or not {*self._identities} >= tensors >= {id(each) for _, each in walk.tensors}
            or not all(_is_simple(each) for _, each in walk.items)
        ):
            raise NotRememberedError
        self._modules = [*map(self._refer, modules)]
        self._names = walk.names
        self._classes = [*map(id, map(type, modules))]
        self._dictionaries = [(kind, *places[id(each)]) for kind, each in walk.dictionaries]
        self._empty = [places[id(each)] for each in walk.empty]
        self._items = walk.items
        at = {identity: place for place, identity in enumerate(self._identities)}
        self._tensors = [(name, at[id(each)]) for name, each in walk.tensors]
        self._parameters = [at[id(each)] for each in walk.parameters]
        self._buffers = [at[id(each)] for each in walk.buffers]
        self.parts: list[Part] = []
        """The parts of the walk, without references to their objects."""
        for key, entries in walk.parts:
            known = [(self._refer(each), what, depth, is_shared) for each, what, depth, is_shared in entries()]
            self.parts.append((key, partial(_alive, known)))
        values = [
            value for each, names in zip(modules, walk.names, strict=True) for value in names.values(each.__dict__)
        ]
        values += [value for _, each in walk.dictionaries for value in each.values()]
        # Dictionaries are found by their names, and compared by their contents.
        values = [*(value for value in values if id(value) not in containers), *map(type, modules)]
        self._held = [value if _is_simple(value) else self._refer(value) for value in values]

    def _refer(self, value: Any) -> Reference:
        if isinstance(value, functools.partial):
            raise NotRememberedError
        try:
            return weakref.ref(value, self._dead.append)
        except TypeError:
            raise NotRememberedError from None

    def walk(self, root: Any) -> Walk | None:
        """The walk from this root; ``None`` if it is another one now. :meth:`is_right` tells the rest."""
        if self._dead:
            return None
        modules = [reference() for reference in self._modules]
        if modules[0] is not root or [*map(id, map(type, modules))] != self._classes:
            return None
        attributes = [module.__dict__ for module in modules]
        dictionaries = [(kind, attributes[place].get(name)) for kind, place, name in self._dictionaries]
        empty = [attributes[place].get(name) for place, name in self._empty]
        if any(empty) or not _DICTS.issuperset([type(each) for _, each in dictionaries]):
            return None
        walk = Walk(())
        walk.modules, walk.names = modules, self._names
        walk.dictionaries, walk.empty, walk.items = dictionaries, empty, self._items
        return walk

    def is_right(self, walk: Walk, content: Content) -> bool:
        """Whether all containers have the content of the earlier call. Then the walk gets its tensors."""
        lengths, names, values = content
        if lengths != self._lengths or names != self._contained or [*map(id, values)] != self._identities or self._dead:
            return False
        walk.tensors = [(name, values[place]) for name, place in self._tensors]
        walk.parameters = [values[place] for place in self._parameters]
        walk.buffers = [values[place] for place in self._buffers]
        return True


def _key_of(entries: Sequence[Entry]) -> tuple[int, ...]:
    return tuple([each for value, _, depth, _ in entries for each in (id(value), id(type(value)), depth)])


def _alive(entries: Sequence[tuple[Reference, str, int, bool]]) -> list[Entry]:
    return [(reference(), *how) for reference, *how in entries]


class NotRememberedError(Exception):
    """A walk has found something that is known by neither its value nor a weak reference."""


class WalkMemory:
    """The walk of a function's last call."""

    def __init__(self) -> None:
        self._known: RememberedWalk | None = None
        self._count = 0

    def find(self, roots: Sequence[Any]) -> tuple[RememberedWalk, Walk] | None:
        """The remembered walk, and the same walk from these roots."""
        known = self._known
        walk = None if known is None or len(roots) != 1 else known.walk(roots[0])
        return None if known is None or walk is None else (known, walk)

    def keep(self, roots: Sequence[Any], walk: Walk, content: Content) -> None:
        """Remember a walk, if it can be remembered."""
        self._known = None
        # State that changes with each call would be remembered each time.
        self._count += 1
        if self._count <= _MOST_WALKS and len(roots) == 1:
            with suppress(NotRememberedError):
                self._known = RememberedWalk(walk, content)


def _is_simple(value: Any) -> bool:
    """Whether it can be held: a number or a string, or a list, tuple or set of such."""
    return type(value) in _SIMPLE or (type(value) in _HELD and all(map(_is_simple, value)))


_known: dict[int, tuple[str, tuple[str, ...], bool, weakref.ref[type]]] = {}
"""Facts by the identities of classes. Classes are not held: they hold the globals of their methods."""


def _facts_of(kind: type) -> tuple[str, tuple[str, ...], bool, weakref.ref[type]]:
    """For a class: how its objects are read, their slots, and whether attributes of the class are copied."""
    known = _known.get(key := id(kind))
    if known is None:
        members = types.MemberDescriptorType
        slots = [name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, members)]
        root = _root_of(kind)
        is_open = root not in _OPAQUE_ROOTS and root not in sys.stdlib_module_names
        facts = _name_of(kind, root, has_slots=bool(slots)), tuple(slots), is_open
        known = _known[key] = (*facts, weakref.ref(kind, lambda _: _known.pop(key, None)))
    return known


def _name_of(kind: type, root: str, *, has_slots: bool) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    for base, name in ((torch.Tensor, "tensor"), (Module, "module"), (type, "simple"), (types.ModuleType, "simple")):
        if issubclass(kind, base):
            return name
    if root == "numpy" or issubclass(kind, (random.Random, torch.Generator)):
        return "array" if kind.__name__ == "ndarray" else "generator"
    if hasattr(kind, "__next__"):
        return "file" if root in ("io", "_io") else "iterator"
    return "object" if root not in _OPAQUE_ROOTS and (kind.__dictoffset__ or has_slots) else "simple"


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


@functools.lru_cache(maxsize=1024)
def _globals_in(code: types.CodeType) -> dict[str, bool]:
    """Globals that a function's code names, also in inner functions, and whether each is written."""
    found: dict[str, bool] = {}
    for each in dis.get_instructions(code):
        if "GLOBAL" in each.opname or each.opname == "LOAD_NAME":
            found[each.argval] = found.get(each.argval, False) or each.opname == "STORE_GLOBAL"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            for name, is_written in _globals_in(constant).items():
                found[name] = found.get(name, False) or is_written
    return found
