"""The walk that finds and copies a function's Python state. See NOTE [ Python state ] in ``python_state.py``."""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
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
    Cell,
    ClassAttributes,
    Container,
    Dictionary,
    Globals,
    Items,
    Members,
    ModuleAttributes,
    Parameters,
    Slots,
    are_plain,
)

_DEPTH = 6
"""How many containers and objects deep state is copied."""
_FILE_DEPTH = 2
"""How deep a file is taken for the function's own: one that lies deeper is a logger's, say."""
_MOST_ITEMS = 4096
"""Items of a container that is copied."""
_MOST_BYTES = 1 << 16
"""Bytes of an array that is copied."""

_SIMPLE = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range))
_CODE = _SIMPLE | {types.FunctionType, classmethod, staticmethod, property, type}
"""Classes of most attributes of a class."""
_FIRST = [*vars(Module())]
_OPAQUE_ROOTS = frozenset(("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"))

_MODULE, _ATTRIBUTES, _CLASS = ModuleAttributes(), Attributes(), ClassAttributes()
_DICTIONARY, _PARAMETERS, _ITEMS, _MEMBERS = Dictionary(), Parameters(), Items(), Members()
_CELL, _GLOBALS, _SLOTS = Cell(), Globals(), Slots()


class Walk:
    """Finds all containers and copies their content, those that lie less deep first.

    Args:
        roots: the function, or the module that it is a method of, and objects among its arguments.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.has_iterators = self.is_lazy = self.writes_parameters = False
        self.attributes: list[tuple[Attributes, Any, dict[str, Any]]] = []
        """What has attributes: the kind, the object, and its content."""
        self.dictionaries: list[tuple[Dictionary, Any, dict[Any, Any]]] = []
        self.empty: list[dict[str, Any]] = []
        """Dictionaries of modules that have no content. Most modules have two."""
        self.others: list[tuple[Container, Any, Any]] = []
        """Other containers."""
        self.fixed: list[Sequence[Any]] = []
        """Containers that never change: tuples, arguments of partial functions, and such."""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        """All tensors, each with the name that it is found under."""
        self.parameters: list[Parameter] = []
        """Plain parameters of modules."""
        self.buffers: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.generators: list[Any] = []
        self._seen: set[int] = set()
        self._todo: list[tuple[Any, _Kind, int, bool]] = []
        for root in roots:
            self._meet(root, "an argument", 0)
        # It grows while it is read.
        for value, kind, depth, is_shared in self._todo:
            self._read(value, kind, depth, is_shared)

    def _meet(self, value: Any, name: Any, depth: int, is_shared: bool = False) -> None:
        """A value of a container: it is to be read.

        Args:
            value: the value.
            name: what it is called there.
            depth: how deep it lies.
            is_shared: whether a class has it. Then it is read if it is a container: there are registries of functions
                and objects, too.
        """
        kind = kind_of(type(value))
        what = kind.name
        if what == "tensor":
            self.tensors.append((str(name), value))
        elif what == "simple" or id(value) in self._seen or (is_shared and what not in _SHARED):
            return
        elif what == "module":
            self._seen.add(id(value))
            self._todo.append((value, kind, 0, False))
        elif depth <= (_FILE_DEPTH if what == "file" else _DEPTH):
            self._seen.add(id(value))
            self._todo.append((value, kind, depth, is_shared))

    def _read(self, value: Any, kind: _Kind, depth: int, is_shared: bool) -> None:
        what = kind.name
        if what == "module":
            self._read_module(value)
        elif what in _SIZED:
            if len(value) <= _MOST_ITEMS:
                self._read_container(value, what, depth + 1, is_shared)
        elif what == "object":
            self._read_object(value, kind.slots, depth + 1)
        elif what == "function":
            self._read_function(value, depth + 1, opens=True)
        elif what == "helper":
            self._read_function(value, depth + 1, opens=False)
        elif what == "bound":
            if isinstance(value, functools.partial):
                values = (value.func, *value.args, *value.keywords.values())
            else:
                values = (value.__self__, value.__func__)
            self._read_fixed(values, "an argument of a partial function", depth + 1)
        elif what == "generator":
            self.generators.append(value)
        elif what == "array":
            if value.nbytes <= _MOST_BYTES:
                self.arrays.append(value)
        else:
            self.has_iterators = True

    def _read_container(self, value: Any, what: str, depth: int, is_shared: bool = False) -> None:
        if what == "dict":
            content = value.copy() if type(value) is dict else dict(value.items())
            self.dictionaries.append((_DICTIONARY, value, content))
            self._meet_named(content, depth, is_shared)
        elif what == "list":
            items = list(value)
            self.others.append((_ITEMS, value, items))
            self._meet_all(items, "an item of a list", depth, is_shared)
        elif what == "set":
            members = value.copy()
            self.others.append((_MEMBERS, value, members))
            self._meet_all(members, "a member of a set", depth, is_shared)
        else:
            self._read_fixed(value, "an item of a tuple", depth, is_shared)

    def _read_fixed(self, values: Any, name: str, depth: int, is_shared: bool = False) -> None:
        self.fixed.append(values)
        self._meet_all(values, name, depth, is_shared)

    def _meet_all(self, values: Iterable[Any], name: str, depth: int, is_shared: bool = False) -> None:
        for value in values:
            if type(value) not in _SIMPLE:
                self._meet(value, name, depth, is_shared)

    def _meet_named(self, content: dict[Any, Any], depth: int, is_shared: bool = False) -> None:
        for name, value in content.items():
            if type(value) not in _SIMPLE:
                self._meet(value, name, depth, is_shared)

    # Modules.

    def _read_module(self, module: Module) -> None:
        if id(type(module)) not in self._seen:
            self._add_classes(type(module))
        attributes = module.__dict__.copy()
        self.attributes.append((_MODULE, module, attributes))
        if parameters := attributes["_parameters"]:
            self._read_parameters(parameters)
        else:
            self.empty.append(parameters)
        if buffers := attributes["_buffers"]:
            self._read_buffers(buffers)
        else:
            self.empty.append(buffers)
        if children := attributes["_modules"]:
            self._read_children(children)
        else:
            self.empty.append(children)
        names = [*attributes]
        if names[: len(_FIRST)] == _FIRST:
            # Most have torch's own attributes first.
            names = names[len(_FIRST) :]
        for name in names:
            value = attributes[name]
            if type(value) not in _SIMPLE and name not in INTERNAL:
                self._meet(value, name, 1)
        if "max_norm" in names and isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None:
            self.writes_parameters = True

    def _read_children(self, children: Any) -> None:
        if type(children) in DICTS:
            self._read_container(children, "dict", 0)
        else:
            # Those of a scripted module.
            self._read_fixed(list(children.values()), "a module", 0)

    def _read_parameters(self, parameters: Any) -> None:
        if type(parameters) not in DICTS:
            return
        content = parameters.copy()
        if not are_plain(content.values()):
            self.is_lazy = self.is_lazy or any(map(is_lazy, content.values()))
            return
        self.dictionaries.append((_PARAMETERS, parameters, content))
        for pair in content.items():
            if pair[1] is not None:
                self.tensors.append(pair)
                self.parameters.append(pair[1])

    def _read_buffers(self, buffers: Any) -> None:
        if type(buffers) not in DICTS:
            return
        content = buffers.copy()
        self.dictionaries.append((_DICTIONARY, buffers, content))
        for name, buffer in content.items():
            if type(buffer) is torch.Tensor:
                self.buffers.append(buffer)
            elif type(buffer) is Parameter:
                self.parameters.append(buffer)
            elif is_lazy(buffer):
                self.is_lazy = True
            self._meet(buffer, name, 1)

    def _add_classes(self, kind: type) -> None:
        """Attributes of a class and its bases: of these, ``forward`` is read, and containers that all objects share."""
        for base in kind.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            if kind_of(base).is_open:
                content = vars(base).copy()
                self.attributes.append((_CLASS, base, content))
                for name, value in content.items():
                    if type(value) not in _CODE and not name.startswith("__"):
                        self._meet(value, name, 1, True)
                forward = content.get("forward")
                if type(forward) is types.FunctionType:
                    self._add_globals(forward, opens=True)

    # Objects and functions.

    def _read_object(self, value: Any, slots: tuple[str, ...], depth: int) -> None:
        if type(attributes := getattr(value, "__dict__", None)) is dict:
            content = attributes.copy()
            self.attributes.append((_ATTRIBUTES, value, content))
            self._meet_named(content, depth)
        if slots:
            in_slots = {name: _SLOTS.get(value, name) for name in slots}
            self.others.append((_SLOTS, value, in_slots))
            self._meet_named(in_slots, depth)
        self._add_classes(type(value))

    def _read_function(self, function: types.FunctionType, depth: int, *, opens: bool) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _CELL.get(cell, name)
            self.others.append((_CELL, cell, {"a variable of an enclosing function": value}))
            self._meet(value, name, depth)
        for defaults in (function.__defaults__, (function.__kwdefaults__ or {}).values()):
            if defaults:
                self._read_fixed(tuple(defaults), "a default of an argument", depth)
        self._add_globals(function, opens=opens)
        content = function.__dict__.copy()
        self.attributes.append((_ATTRIBUTES, function, content))
        self._meet_named(content, depth)

    def _add_globals(self, function: types.FunctionType, *, opens: bool) -> None:
        """Globals that a function's code names: its state, and functions with state.

        Args:
            function: the function.
            opens: whether functions are read, too.
        """
        if _root_of(function) in _OPAQUE_ROOTS:
            return
        content, now = {}, function.__globals__
        read, written = _globals_in(function.__code__)
        for name in read:
            value = now.get(name, MISSING)
            if value is MISSING:
                if name in written:
                    content[name] = value
            elif type(value) is types.FunctionType:
                if opens and _root_of(value) not in _OPAQUE_ROOTS:
                    content[name] = value
                    if id(value) not in self._seen:
                        self._seen.add(id(value))
                        self._todo.append((value, _HELPER, 0, False))
            elif isinstance(value, Module) or not (isinstance(value, types.ModuleType) or callable(value)):
                content[name] = value
                self._meet(value, name, 1)
        if content:
            self.others.append((_GLOBALS, now, content))


class _Kind(NamedTuple):
    """What is done with the objects of a class."""

    name: str
    slots: tuple[str, ...] = ()
    """Names of their slots."""
    is_open: bool = False
    """Whether attributes of the class itself are copied."""


_SIZED = frozenset(("dict", "list", "set", "tuple"))
_SHARED = _SIZED | {"array", "generator", "tensor"}
"""Kinds of values that are read in classes."""
_HELPER = _Kind("helper")
_kinds: dict[int, tuple[_Kind, weakref.ref[type]]] = {}
"""Kinds by the identities of classes, which are not held: a class holds the globals of its methods."""


def kind_of(kind: type) -> _Kind:
    """What is done with the objects of this class."""
    known = _kinds.get(key := id(kind))
    if known is None:
        members = types.MemberDescriptorType
        slots = [name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, members)]
        root, name = _root_of(kind), _name_of_kind(kind, has_slots=bool(slots))
        is_open = root not in _OPAQUE_ROOTS and root not in sys.stdlib_module_names
        found = _Kind(name, tuple(dict.fromkeys(slots)), is_open)
        known = _kinds[key] = found, weakref.ref(kind, lambda _: _kinds.pop(key, None))
    return known[0]


def _name_of_kind(kind: type, *, has_slots: bool) -> str:
    if issubclass(kind, torch.Tensor):
        return "tensor"
    if kind in _SIMPLE or issubclass(kind, (type, types.ModuleType)):
        return "simple"
    if issubclass(kind, Module):
        return "module"
    for kinds, name in ((DICTS, "dict"), (LISTS, "list"), ((set,), "set"), ((tuple, frozenset), "tuple")):
        if kind in kinds:
            return name
    if issubclass(kind, (random.Random, torch.Generator)):
        return "generator"
    root = _root_of(kind)
    if root == "numpy":
        return "array" if kind.__name__ == "ndarray" else "generator"
    if kind is types.FunctionType:
        return "function"
    if kind is types.MethodType or kind is functools.partial:
        return "bound"
    if hasattr(kind, "__next__"):
        return "file" if root in ("io", "_io") else "iterator"
    if root in _OPAQUE_ROOTS:
        return "simple"
    return "object" if kind.__dictoffset__ or has_slots else "simple"


def _root_of(value: Any) -> str:
    """The package that a class or function is of."""
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


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
