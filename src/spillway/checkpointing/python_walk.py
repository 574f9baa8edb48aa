"""The walk that finds and copies a function's Python state. See NOTE [ Python state ] in ``python_state.py``."""

from __future__ import annotations

import dis
import functools
import operator
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy

from spillway.checkpointing.python_containers import (
    ATTRIBUTES,
    CELL,
    CLASS,
    DICTIONARY,
    GLOBALS,
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
_STRINGS = frozenset((str,))
_OPAQUE_ROOTS = frozenset(("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"))
_SHARED = frozenset(("dict", "items", "fixed", "array", "generator"))
"""Objects that are read in classes. Classes also have registries of functions and other objects."""

Contents = list[tuple[Container, Any, Any]]
"""Containers: the kind, the object, and its content."""
Entry = tuple[Any, str, int, bool]
"""An object to be read, how it is read, its depth, and whether a class has it."""


class Layout:
    """The names of a module's attributes.

    Args:
        all_names: all names, also those of torch's own attributes.
    """

    __slots__ = ("all_names", "get", "has_max_norm", "names")

    def __init__(self, all_names: tuple[str, ...]) -> None:
        self.all_names = all_names
        self.names = tuple([name for name in all_names if name not in INTERNAL])
        """Names that belong to the state."""
        self.has_max_norm = "max_norm" in all_names
        self.get: Callable[[dict[str, Any]], tuple[Any, ...]] = self._get
        """Returns the values that belong to the state."""
        if len(self.names) > 1:
            self.get = operator.itemgetter(*self.names)

    def _get(self, attributes: dict[str, Any]) -> tuple[Any, ...]:
        return tuple([attributes[name] for name in self.names])


@functools.lru_cache(maxsize=1024)
def layout_of(all_names: tuple[str, ...]) -> Layout:
    """The layout of modules with these names."""
    return Layout(all_names)


class Walk:
    """Finds all containers, breadth first, and copies their content.

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
        # Modules, with their attributes; other objects with attributes; dictionaries with names; other containers.
        self._modules: list[tuple[Module, Layout, tuple[Any, ...]]] = []
        self._owners, self._dictionaries, self._others = Contents(), Contents(), Contents()
        # Empty dictionaries of modules: most have two.
        self._empty: list[dict[str, Any]] = []
        # Containers that never change: tuples, arguments of partial functions.
        self._fixed: list[Iterable[Any]] = []
        # All tensors with their names; plain parameters of modules; buffers.
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._parameters: list[torch.Tensor] = []
        self._buffers: list[torch.Tensor] = []
        self._of_buffers: list[dict[str, torch.Tensor | None]] = []
        """Dictionaries in which modules have their buffers."""
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Generator, Any]] = []
        self._todo: list[Entry] = [*entries]
        self._seen = {id(value) for value, what, *_ in self._todo if what != "class"}
        # Classes and objects, which many modules share, are read as parts of their own.
        self._is_part = bool(self._todo)
        self._classes: list[type] = []
        self._objects: list[Entry] = []
        self._meet(zip(repeat(""), roots), 0)
        # The list grows during the loop.
        for value, what, depth, is_shared in self._todo:
            if what == "module":
                self._read_module(value)
            else:
                self._read(value, what, depth, is_shared)
        # Scripted modules have no dictionaries.
        self._empty = [each for each in self._empty if type(each) in _DICTS]
        del self._seen, self._todo

    def _meet(self, pairs: Iterable[tuple[Any, Any]], depth: int, is_shared: bool = False) -> None:
        """Take values with their names, and queue containers among them.

        Args:
            pairs: the names and values.
            depth: how deep they lie.
            is_shared: whether a class has them.
        """
        simple, seen = _CODE if is_shared else _SIMPLE, self._seen
        for name, value in pairs:
            if type(value) in simple:
                continue
            what = (_known.get(id(type(value))) or _facts_of(type(value)))[0]
            if what == "tensor":
                self._tensors.append((str(name), value))
            elif what == "simple" or id(value) in seen or (is_shared and what not in _SHARED):
                continue
            elif what == "module" or depth <= (_FILE_DEPTH if what == "file" else _DEPTH):
                seen.add(id(value))
                todo = self._objects if what == "object" and not self._is_part else self._todo
                todo.append((value, what, depth + 1, is_shared))

    def _read(self, value: Any, what: str, depth: int, is_shared: bool) -> None:
        if what in ("dict", "items", "fixed"):
            if len(value) <= _MOST_ITEMS:
                self._read_container(value, what, depth, is_shared)
        elif what == "object":
            self._read_object(value, depth)
        elif what == "class":
            self._add_classes(value)
        elif what in ("function", "helper"):
            self._read_function(value, depth, opens=what == "function")
        elif what == "bound":
            is_partial = isinstance(value, functools.partial)
            parts = (
                (value.func, *value.args, *value.keywords.values()) if is_partial else (value.__self__, value.__func__)
            )
            self._read_fixed(parts, "an argument of a partial function", depth)
        elif what == "generator":
            if (generator := generator_of(value)) is not None:
                self._generators.append((generator, generator.get()))
        elif what == "array":
            if value.nbytes <= _MOST_BYTES:
                self._arrays.append((value, value.copy()))
        else:
            self.has_iterators = True

    def _read_container(self, value: Any, what: str, depth: int, is_shared: bool = False) -> None:
        if what == "dict":
            content = value.copy() if type(value) is dict else dict(value.items())
            # Keys of other types may be equal and not the same, as 1 and True.
            found = self._dictionaries if _STRINGS.issuperset(map(type, content)) else self._others
            found.append((DICTIONARY, value, content))
            self._meet(content.items(), depth, is_shared)
        elif what == "items":
            items = list(value)
            self._others.append((ITEMS, value, items))
            self._meet(zip(repeat(f"an item of a {type(value).__name__}"), items), depth, is_shared)
        else:
            self._read_fixed(value, "an item of a tuple", depth, is_shared)

    def _read_fixed(self, values: Any, name: str, depth: int, is_shared: bool = False) -> None:
        self._fixed.append(values)
        self._meet(zip(repeat(name), values), depth, is_shared)

    # Modules.

    def _read_module(self, module: Module) -> None:
        kind = type(module)
        if id(kind) not in self._seen:
            if self._is_part:
                self._add_classes(kind)
            else:
                self._seen.add(id(kind))
                self._classes.append(kind)
        attributes = module.__dict__
        layout = layout_of(tuple(attributes))
        values = layout.get(attributes)
        self._modules.append((module, layout, values))
        parameters, buffers, children = attributes["_parameters"], attributes["_buffers"], attributes["_modules"]
        if not parameters:
            self._empty.append(parameters)
        elif type(parameters) in _DICTS:
            self._read_parameters(parameters)
        if not buffers:
            self._empty.append(buffers)
        elif type(buffers) in _DICTS:
            self._read_buffers(buffers)
        if not children:
            self._empty.append(children)
        elif type(children) in _DICTS:
            self._read_container(children, "dict", 0)
        else:
            # Submodules of a scripted module.
            self._read_fixed([*children.values()], "a module", 0)
        if not _SIMPLE.issuperset(map(type, values)):
            self._meet(zip(layout.names, values, strict=True), 1)
        if layout.has_max_norm and isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None:
            self.writes_parameters = True

    def _read_parameters(self, parameters: Any) -> None:
        content = parameters.copy()
        if not are_plain(content.values()):
            self.is_lazy = self.is_lazy or any(map(is_lazy, content.values()))
            return
        self._dictionaries.append((PARAMETERS, parameters, content))
        for pair in content.items():
            if pair[1] is not None:
                self._tensors.append(pair)
                self._parameters.append(pair[1])

    def _read_buffers(self, buffers: Any) -> None:
        self._read_container(buffers, "dict", 1)
        self._of_buffers.append(buffers)
        for buffer in [*buffers.values()]:
            if type(buffer) in (torch.Tensor, Parameter):
                self._buffers.append(buffer)
            elif is_lazy(buffer):
                self.is_lazy = True

    def _add_classes(self, kind: type) -> None:
        """Read ``forward`` of a class and its bases, and containers that all objects share."""
        for base in kind.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            if _facts_of(base)[2]:
                content = vars(base).copy()
                self._owners.append((CLASS, base, content))
                if not _CODE.issuperset(map(type, content.values())):
                    self._meet([pair for pair in content.items() if pair[0][:2] != "__"], 1, is_shared=True)
                forward = content.get("forward")
                if type(forward) is types.FunctionType:
                    self._add_globals(forward, opens=True)

    # Objects and functions.

    def _read_object(self, value: Any, depth: int) -> None:
        self._add_classes(type(value))
        if type(attributes := getattr(value, "__dict__", None)) is dict:
            content = attributes.copy()
            self._owners.append((ATTRIBUTES, value, content))
            self._meet(content.items(), depth)
        if names := _facts_of(type(value))[1]:
            in_slots = SLOTS.copy(value, names)
            self._others.append((SLOTS, value, in_slots))
            self._meet(in_slots.items(), depth)

    def _read_function(self, function: types.FunctionType, depth: int, *, opens: bool) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = CELL.copy(cell, (name,))
            self._others.append((CELL, cell, content))
            self._meet(content.items(), depth)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._read_fixed(defaults, "a default of an argument", depth)
        self._add_globals(function, opens=opens)
        attributes = vars(function).copy()
        self._owners.append((ATTRIBUTES, function, attributes))
        self._meet(attributes.items(), depth)

    def _add_globals(self, function: types.FunctionType, *, opens: bool) -> None:
        """Read globals that a function's code names: its state and, if it ``opens``, functions with their own state."""
        if _root_of(function) in _OPAQUE_ROOTS:
            return
        state, helpers, now = {}, {}, function.__globals__
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
            self._others.append((GLOBALS, now, state | helpers))


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
