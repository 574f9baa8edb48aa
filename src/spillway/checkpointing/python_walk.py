"""The walk that finds a function's Python state. See NOTE [ Python state ] in ``python_state.py``."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import random
import sys
import threading
import types
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from itertools import chain, repeat
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.nn.parameter import is_lazy

from spillway._torch import base_of
from spillway.checkpointing.python_generators import Generator, generator_of

MISSING: Any = object()
"""Stands for the value of a name that has none."""
OF_TORCH = frozenset((*vars(Module()), "_compiled_call_impl", "__compiled_call_impl")) - {"training"}
"""Attributes of modules that belong to torch."""
OF_BLOCK = OF_TORCH | {"forward"}
"""Those of the function's own module, whose ``forward`` an attached block exchanges."""
_PARTS = "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"
"""Attributes of a module: its parts, and its hooks around forward."""
_own_parts = itemgetter(*_PARTS)
_dict_of, _form_of = attrgetter("__dict__"), attrgetter("__code__", "__defaults__", "__kwdefaults__")
_order_of = attrgetter("__mro__")
_FORWARD_HOOKS = tuple(name for name in vars(Module()) if name.startswith("_forward_"))
_PLAIN_PARAMETERS = frozenset((Parameter, type(None)))

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
_METHODS = frozenset((types.FunctionType, classmethod, staticmethod, property))
_CODE = _SIMPLE | _METHODS | {type}
"""Classes of most attributes of a class."""
_INSIDE: dict[type, Callable[[Any], Any]] = {
    ContextVar: lambda variable: variable.get(MISSING),
    memoryview: attrgetter("obj"),
    types.MappingProxyType: lambda proxy: gc.get_referents(proxy)[0],
    weakref.WeakKeyDictionary: attrgetter("data"),
    weakref.WeakValueDictionary: attrgetter("data"),
}
"""For objects that hide a container, or another object: how to get it."""
_NAMES: dict[type, str] = {
    **dict.fromkeys(_SIMPLE, "simple"),
    **dict.fromkeys(_DICTS, "dict"),
    **dict.fromkeys((list, deque, bytearray, set), "items"),
    **dict.fromkeys((tuple, frozenset), "fixed"),
    **dict.fromkeys((types.MethodType, functools.partial), "bound"),
    types.FunctionType: "function",
    array: "numbers",
    **dict.fromkeys(_INSIDE, "inside"),
}
"""How objects of these classes are read."""
_NAMES_OF_BASES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (torch.Tensor, "tensor"),
    (Module, "module"),
    (threading.local, "local"),
    ((type, types.ModuleType), "simple"),
    ((tuple, frozenset), "fixed"),
)
"""How objects of classes that are derived from these are read."""
_OPAQUE_ROOTS = frozenset(
    (
        *("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"),
        *("triton", "numba", "numpy"),
    )
)
_SHARED = frozenset(("dict", "items", "fixed", "array", "numbers", "inside", "generator"))
"""Objects that are read in classes and hooks, which also have registries of functions, models, and other objects."""
_values_of, _items_of = methodcaller("values"), methodcaller("items")
_ITERATOR = "has an iterator, or a file, whose state cannot be copied for a second run"
_LAZY = "has a lazy layer, which makes its parameters in this call"
_GRADIENT = "reads the gradient of a tensor (.grad), which may change before backward"
_WRITES = "has an embedding with max_norm, whose forward writes its weight"


Space = tuple[Any, tuple[str, ...]]
"""A namespace, and names in it."""


class _OfThread:
    """The attributes of a thread-local object, as the calling thread has them."""

    __slots__ = ("local",)

    def __init__(self, local: threading.local) -> None:
        self.local = local

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return vars(self.local)


class Walk:
    """Finds everything that belongs to a function's state, breadth first.

    Args:
        roots: the function, or the module that it is a method of, and objects among its arguments.
        spaces: namespaces, with the names in them that are state.
        opens: whether to read classes and objects. Otherwise they are only found: many modules share them.
    """

    def __init__(self, roots: Sequence[Any], spaces: Sequence[Space] = (), *, opens: bool = False) -> None:
        self._opens = opens
        self.root = next((each for each in roots[:1] if isinstance(each, Module) and not opens), None)
        """The module that the function belongs to, during the walk."""
        self.has_own_module = self.root is not None
        """Whether the first module is the one that the function belongs to."""
        self.roots = roots if opens else ()
        """Held, since a part is known by their identities."""
        self.is_repeatable = not spaces
        """Whether equal contents and an equal :meth:`frame` say that another walk would find the same."""
        self.found_classes: dict[type, None] = {}
        """Classes of modules that were found, and not read."""
        self.found_objects: list[Any] = []
        self.why_kept: str | None = None
        """Why the function cannot be replayed, if it cannot."""
        self.modules: list[Module] = []
        """Without the one that the function belongs to, which is not held."""
        self.attributes: list[dict[str, Any]] = []
        """Attributes of each module, also of that one."""
        self.names: list[tuple[str, ...]] = []
        """For each module, the names of its attributes that are state."""
        self.getters: list[Callable[[Any], tuple[Any, ...]]] = []
        """For each module, a function that gets their values."""
        self.owners: list[Any] = []
        """Objects and functions whose attributes are state."""
        self.dictionaries: list[Any] = []
        self.own_parameters: list[dict[str, Any]] = []
        """Dictionaries of modules' parameters."""
        self.own_buffers: list[dict[str, Any]] = []
        self.empty: list[dict[str, Any]] = []
        """Empty dictionaries of modules: most have two."""
        self.classes: list[type] = []
        """Classes whose attributes are state."""
        self.items: list[Any] = []
        """Lists, sets and others whose values have no names."""
        self.globals: list[Space] = []
        """Namespaces with the names that a function's code uses."""
        self.hooks: list[dict[int, Any]] = []
        """Hooks of modules around their forwards."""
        self.functions: list[types.FunctionType] = []
        """Functions that were read."""
        self.other_globals: list[Space] = []
        """Namespaces with names that this code uses for no state: for classes, modules, built-in functions."""
        self.code: list[frozenset[str]] = []
        """Attributes and globals that the code of each function names."""
        self.slots: list[tuple[Any, tuple[str, ...]]] = []
        """Objects with the names of their slots."""
        self.cells: list[tuple[str, types.CellType]] = []
        """Closures' cells, with their names."""
        self.tensors: list[torch.Tensor] = []
        """All tensors."""
        self.has_other_tensors = False
        """Whether some are no parameters and no buffers."""
        self.tensor_names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        """Plain parameters of modules."""
        self.buffers: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.generators: list[Generator] = []
        self._todo: list[tuple[Any, str, int, bool]] = []
        """Objects to be read: how, their depth, and whether a class or a hook has them."""
        self._seen: set[int] = set()
        for each in roots if opens else ():
            if isinstance(each, type):
                self._read_class(each)
        self._meet(zip(repeat(""), roots), 0)
        self.globals += spaces
        for space, names in spaces:
            self._meet([(name, space[name]) for name in names if name in space], 1)
        # The list grows during the loop.
        for value, what, depth, is_shared in self._todo:
            if what == "module":
                self._read_module(value)
            else:
                self._read(value, what, depth, is_shared)
        self._read_tensors()
        self._set_maps()
        self._seen.clear()
        self._todo.clear()
        self.root = None
        # A collection of garbage would go through the empty lists of all calls.
        vars(self).update({name: () for name, value in vars(self).items() if type(value) is list and not value})

    @classmethod
    def joined(cls, walks: Sequence[Walk]) -> Walk:
        """Some walks as one."""
        joined = cls.__new__(cls)
        first, *others = map(vars, walks)
        lists = {name: value for name, value in first.items() if isinstance(value, (list, tuple))}
        vars(joined).update(first)
        vars(joined).update({name: [*value, *chain(*[each[name] for each in others])] for name, value in lists.items()})
        joined._set_maps()
        return joined

    def _set_maps(self) -> None:
        # Views of the classes' attributes: they change with these.
        self.maps = *self.dictionaries, *self.own_buffers, *self.own_parameters, *map(vars, self.classes)

    def attributes_now(self) -> list[dict[str, Any]]:
        """Attributes of all modules: a module may have got another dictionary."""
        return [*self.attributes[: self.has_own_module], *map(_dict_of, self.modules)]

    def frame(self) -> tuple[Any, ...]:
        """The rest that the walk went by, besides contents: its identities tell whether another would find the same."""
        others = [[*map(now.get, names, repeat(MISSING))] for now, names in self.other_globals]
        forwards = map(_forwards_of, self.attributes[: self.has_own_module])
        own = *forwards, map(_dict_of, self.modules), map(_order_of, self.classes)
        # Objects may get another class, and keep their identity.
        things = self.modules, self.owners, self.tensors, [each for each, _ in self.slots]
        kinds = map(type, chain(*things))
        return tuple(chain(*own, kinds, *map(_own_parts, self.attributes), *map(_form_of, self.functions), *others))

    def _meet(self, pairs: Iterable[tuple[Any, Any]], depth: int, is_shared: bool = False) -> None:
        """Take values with their names, and queue containers among them; ``is_shared``: a class or a hook has them."""
        simple, seen = _CODE if is_shared else _SIMPLE, self._seen
        for name, value in pairs:
            if type(value) in simple:
                continue
            what = (_known.get(id(type(value))) or _facts_of(type(value)))[0]
            if what == "tensor":
                self.tensors.append(value)
                self.tensor_names.append(str(name))
            elif what == "simple" or id(value) in seen or (is_shared and what not in _SHARED):
                if value is self.root or (is_shared and what == "module"):
                    # Held, it would hold itself, or a model that it belongs to.
                    self.is_repeatable = False
                continue
            elif what == "object" and not self._opens:
                seen.add(id(value))
                self.found_objects.append(value)
            elif what == "module" or depth <= (_FILE_DEPTH if what == "file" else _DEPTH):
                seen.add(id(value))
                self._todo.append((value, what, depth + 1, is_shared))

    def _read(self, value: Any, what: str, depth: int, is_shared: bool) -> None:
        if what == "dict":
            if len(value) <= _MOST_ITEMS:
                self.dictionaries.append(value)
                self._meet(value.items(), depth, is_shared)
            else:
                self.is_repeatable = False
        elif what in ("items", "fixed"):
            if len(value) > _MOST_ITEMS:
                self.is_repeatable = False
            else:
                if what == "items":
                    self.items.append(value)
                if type(value) is not bytearray:
                    self._meet(zip(repeat(f"an item of a {type(value).__name__}"), value), depth, is_shared)
        elif what == "object":
            self._read_object(value, depth)
        elif what in ("function", "helper"):
            self._read_function(value, depth, opens=what == "function")
        elif what == "bound":
            if is_partial := isinstance(value, functools.partial):
                self.dictionaries.append(value.keywords)
            parts = (
                (value.func, *value.args, *value.keywords.values()) if is_partial else (value.__self__, value.__func__)
            )
            self._meet(zip(repeat("an argument of a partial function"), parts), depth)
        elif what == "generator":
            if (generator := generator_of(value)) is not None:
                self.generators.append(generator)
            # A graph under capture has generators of its own.
            self.is_repeatable &= not isinstance(value, torch.Generator)
        elif what in ("array", "numbers"):
            if (value.nbytes if what == "array" else len(value) * value.itemsize) <= _MOST_BYTES:
                self.arrays.append(value)
            else:
                self.is_repeatable = False
        elif what == "local":
            self.is_repeatable = False
            self.owners.append(_OfThread(value))
            self._meet(vars(value).items(), depth)
        elif what == "inside":
            self.is_repeatable = False
            self._meet((("", _INSIDE[type(value)](value)),), depth, is_shared)
        else:
            self.why_kept = _ITERATOR

    # Modules.

    def _read_module(self, module: Module) -> None:
        self._meet_class(type(module))
        attributes: Any = module.__dict__
        names, getter = _names_of(tuple(attributes), is_own=module is self.root)
        if module is not self.root:
            self.modules.append(module)
        self.attributes.append(attributes)
        self.names.append(names)
        self.getters.append(getter)
        parameters, buffers, children, hooks, more_hooks = map(attributes.get, _PARTS)
        if hooks or more_hooks:
            self._read_hooks(attributes)
        self.hooks += (hooks, more_hooks)
        if type(parameters) in _DICTS:
            self.own_parameters.append(parameters)
            (self.own_buffers if buffers else self.empty).append(buffers)
            if children:
                self.dictionaries.append(children)
                own = [each for each in children.values() if each is not None]
                self.is_repeatable &= not any(each is self.root for each in own)
                new = {id(each): each for each in own if id(each) not in self._seen}
                self._seen.update(new)
                self._todo += [(each, "module", 1, False) for each in new.values()]
            else:
                self.empty.append(children)
        else:
            self.is_repeatable = False
            # A scripted module has other containers. A traced one has none, but a scripted one in an attribute.
            for each in (parameters, buffers, children) if parameters is not None else ():
                self._meet(each.items(), 0)
        if module is self.root and "forward" in attributes:
            # A user has put another one in the place of the class's.
            self._meet(zip(repeat("forward"), _forwards_of(attributes)), 1)
        values = getter(attributes)
        if not _SIMPLE.issuperset(map(type, values)):
            self._meet(zip(names, values, strict=True), 1)
        if "max_norm" in attributes and isinstance(module, (Embedding, EmbeddingBag)) and module.max_norm is not None:
            self.why_kept = self.why_kept or _WRITES

    def _read_hooks(self, attributes: dict[str, Any]) -> None:
        """Read a module's hooks around its forward, and their variables. A hook may be removed before backward."""
        own = [hooks for name in _FORWARD_HOOKS if (hooks := attributes.get(name))]
        self.dictionaries += own
        for hook in chain.from_iterable(map(_values_of, own)):
            function = getattr(hook, "__func__", getattr(hook, "func", hook))
            if _root_of(function) in _OPAQUE_ROOTS:
                continue
            if type(function) is types.FunctionType:
                self._read_function(function, 1, opens=False, is_shared=True)
            owner = getattr(hook, "__self__", hook)
            if isinstance(hook, functools.partial):
                self._meet(zip(repeat("an argument of a hook"), (*hook.args, *hook.keywords.values())), 1, True)
            elif _facts_of(type(owner))[0] == "object" and type(values := getattr(owner, "__dict__", None)) is dict:
                self.owners.append(owner)
                self._meet(values.items(), 1, is_shared=True)

    def _read_tensors(self) -> None:
        """Read parameters and buffers of all modules."""
        others = {*map(id, self.tensors)}
        own = self.own_parameters
        if not _PLAIN_PARAMETERS.issuperset(map(type, chain.from_iterable(map(_values_of, own)))):
            if any(map(is_lazy, chain.from_iterable(map(_values_of, own)))):
                self.why_kept = self.why_kept or _LAZY
            self.own_parameters = plain = [each for each in own if are_plain(each.values())]
            # A wrapper exchanges the others.
            self.is_repeatable &= len(plain) == len(own)
            own = plain
        for name, each in chain.from_iterable(map(_items_of, own)):
            if each is not None:
                self.tensor_names.append(name)
                self.parameters.append(each)
        self.tensors += self.parameters
        for name, buffer in chain.from_iterable(map(_items_of, self.own_buffers)):
            if is_lazy(buffer):
                self.why_kept = self.why_kept or _LAZY
            elif buffer is not None:
                self.tensors.append(buffer)
                self.tensor_names.append(name)
                if type(buffer) in (torch.Tensor, Parameter):
                    self.buffers.append(buffer)
        # An RNN has lists of its parameters.
        self.has_other_tensors = not others.issubset(map(id, (*self.parameters, *self.buffers)))

    def _meet_class(self, kind: type) -> None:
        if self._opens:
            self._read_class(kind)
        else:
            self.found_classes[kind] = None

    def _read_class(self, kind: type) -> None:
        """Read containers that all objects of a class share, and the state of its ``forward`` and what that calls."""
        if id(kind) in self._seen:
            return
        for function in _functions_of(kind):
            if id(function) not in self._seen:
                self._seen.add(id(function))
                self._read_cells(function, 1)
                self._add_globals(function, opens=True)
        for base in kind.__mro__:
            if id(base) in self._seen:
                continue
            self._seen.add(id(base))
            if _facts_of(base)[2]:
                content = vars(base)
                self.classes.append(base)
                if not _CODE.issuperset(map(type, content.values())):
                    self._meet([pair for pair in content.items() if pair[0][:2] != "__"], 1, is_shared=True)

    # Objects and functions.

    def _read_object(self, value: Any, depth: int) -> None:
        self._read_class(type(value))
        if type(attributes := getattr(value, "__dict__", None)) is dict:
            self.owners.append(value)
            self._meet(attributes.items(), depth)
        if names := _facts_of(type(value))[1]:
            self.slots.append((value, names))
            self._meet(zip(names, values_of_slots(value, names), strict=True), depth)

    def _read_function(self, function: types.FunctionType, depth: int, *, opens: bool, is_shared: bool = False) -> None:
        self._read_cells(function, depth, is_shared)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._meet(zip(repeat("a default of an argument"), defaults), depth, is_shared)
        if function.__kwdefaults__:
            self.dictionaries.append(function.__kwdefaults__)
        self._add_globals(function, opens=opens, is_shared=is_shared)
        self.owners.append(function)
        self._meet(vars(function).items(), depth, is_shared)

    def _read_cells(self, function: types.FunctionType, depth: int, is_shared: bool = False) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append((name, cell))
            self._meet(((name, value_of_cell(cell)),), depth, is_shared)

    def _add_globals(self, function: types.FunctionType, *, opens: bool, is_shared: bool = False) -> None:
        """Read globals that a function's code names: its state and, if it ``opens``, functions with their own state."""
        if _root_of(function) in _OPAQUE_ROOTS:
            return
        self.functions.append(function)
        self.code.append(_names_in(function.__code__))
        if _reads_gradients(function.__code__):
            self.why_kept = self.why_kept or _GRADIENT
        spaces = [(function.__globals__, _globals_in(function.__code__))]
        # The list grows during the loop.
        for now, names in spaces:
            state: dict[str, Any] = {}
            helpers: dict[str, types.FunctionType] = {}
            for name, is_written in names.items():
                value = now.get(name, MISSING)
                if value is MISSING:
                    if is_written:
                        state[name] = value
                elif type(value) is types.FunctionType:
                    if opens and now is function.__globals__ and _root_of(value) not in _OPAQUE_ROOTS:
                        helpers[name] = value
                elif isinstance(value, types.ModuleType):
                    own = vars(value)
                    if _is_open(value.__name__.partition(".")[0]) and all(own is not each for each, _ in spaces):
                        spaces.append((own, dict.fromkeys(_names_in(function.__code__), False)))
                elif isinstance(value, type):
                    if _reads_attributes(function.__code__, value):
                        self._meet_class(value)
                    else:
                        # It may get one.
                        bases = [vars(base) for base in value.__mro__ if _facts_of(base)[2]]
                        self.other_globals += [(base, tuple(_names_in(function.__code__))) for base in bases]
                elif not isinstance(value, types.BuiltinFunctionType):
                    state[name] = value
            self._meet(state.items(), 1, is_shared)
            new = [each for each in helpers.values() if id(each) not in self._seen]
            self._seen.update(map(id, new))
            self._todo += [(each, "helper", 1, False) for each in new]
            if state or helpers:
                self.globals.append((now, (*state, *helpers)))
            if others := names.keys() - state.keys() - helpers.keys():
                self.other_globals.append((now, tuple(others)))


def _forwards_of(attributes: dict[str, Any]) -> tuple[Any, Any]:
    """A module's own ``forward``, and the one that an attached block has put aside during a call with hooks."""
    forward = attributes.get("forward")
    return forward, getattr(forward, "stands_for", None)


def values_of_slots(thing: Any, names: Iterable[str]) -> list[Any]:
    """Values of an object's slots, without its own ``__getattr__``."""
    found = []
    for name in names:
        try:
            found.append(object.__getattribute__(thing, name))
        except AttributeError:
            found.append(MISSING)
    return found


def value_of_cell(cell: types.CellType) -> Any:
    """The value of a closure's cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def are_plain(parameters: Iterable[Any]) -> bool:
    """Whether a module has its own parameters, and no views of a flat one that FSDP has put there.

    Plain tensors of ``torch.func.functional_call`` belong to the state.
    """
    parameters = [*parameters]
    if _PLAIN_PARAMETERS.issuperset(map(type, parameters)):
        return True
    others = (each for each in parameters if type(each) not in _PLAIN_PARAMETERS)
    return all(type(each) is torch.Tensor and not hasattr(base_of(each), "_is_flat_param") for each in others)


@functools.lru_cache(maxsize=1024)
def _names_of(attributes: tuple[str, ...], *, is_own: bool) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """Names of a module's attributes without those that belong to torch, and a function that gets their values."""
    left_out = OF_BLOCK if is_own else OF_TORCH
    names = tuple([name for name in attributes if name not in left_out])
    # For less than two names, an `itemgetter` would return no tuple.
    return names, itemgetter(*names) if len(names) > 1 else lambda own: tuple([own[name] for name in names])


_known: dict[int, tuple[str, tuple[str, ...], bool, weakref.ref[type]]] = {}
"""Facts by the identities of classes. Classes are not held: they hold the globals of their methods."""


def _facts_of(kind: type) -> tuple[str, tuple[str, ...], bool, weakref.ref[type]]:
    """For a class: how its objects are read, their slots, and whether attributes of the class are copied."""
    known = _known.get(key := id(kind))
    if known is None:
        members = types.MemberDescriptorType
        slots = [name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, members)]
        root = _root_of(kind)
        facts = _name_of(kind, root, has_slots=bool(slots)), tuple(slots), _is_open(root)
        known = _known[key] = (*facts, weakref.ref(kind, lambda _: _known.pop(key, None)))
    return known


def _name_of(kind: type, root: str, *, has_slots: bool) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    for bases, name in _NAMES_OF_BASES:
        if issubclass(kind, bases):
            return name
    if any((each.__module__, each.__name__) == ("numpy", "ndarray") for each in kind.__mro__):
        return "array"
    if root == "numpy" or issubclass(kind, (random.Random, torch.Generator)):
        return "generator"
    if hasattr(kind, "__next__"):
        return "file" if root in ("io", "_io") else "iterator"
    return "object" if root not in _OPAQUE_ROOTS and (kind.__dictoffset__ or has_slots) else "simple"


def _is_open(root: str) -> bool:
    """Whether attributes of the classes and modules of a package are copied."""
    return root not in _OPAQUE_ROOTS and root not in sys.stdlib_module_names


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").partition(".")[0]


def _functions_of(kind: type) -> list[types.FunctionType]:
    """``forward`` of a class, and its methods and properties that are named there, or in another one of these."""
    found: dict[int, types.FunctionType] = {}
    names, done = ["forward"], {"forward"}
    # The list grows during the loop.
    for name in names:
        for base in kind.__mro__:
            value = vars(base).get(name) if _facts_of(base)[2] else None
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            for function in _with_wrapped(value) if type(value) is types.FunctionType else ():
                found[id(function)] = function
                new = _names_in(function.__code__) - done
                done |= new
                names += new
    return [*found.values()]


def _with_wrapped(function: types.FunctionType) -> list[types.FunctionType]:
    """A function, and those that it wraps as their decorator."""
    found = [function]
    # The list grows during the loop.
    for each in found:
        inner = [value_of_cell(cell) for cell in each.__closure__ or ()]
        found += [
            one
            for one in inner
            if type(one) is types.FunctionType and one not in found and _root_of(one) not in _OPAQUE_ROOTS
        ]
    return found


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Attributes and globals that a function's code names, also in inner functions."""
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _reads_attributes(code: types.CodeType, kind: type) -> bool:
    """Whether a function's code may read attributes of a class, and not only call it."""
    names = {name for base in kind.__mro__ if _facts_of(base)[2] for name in _names_in(code).intersection(vars(base))}
    return any(type(inspect.getattr_static(kind, name)) not in _METHODS for name in names)


@functools.lru_cache(maxsize=1024)
def _reads_gradients(code: types.CodeType) -> bool:
    """Whether a function's code reads an attribute ``grad``, also in inner functions. It may call such a function."""
    # Python calls a method of an object by the same instruction, with a mark.
    return any(
        each.opname == "LOAD_ATTR" and each.argval == "grad" and "NULL" not in each.argrepr
        for each in dis.get_instructions(code)
    ) or any(_reads_gradients(each) for each in code.co_consts if isinstance(each, types.CodeType))


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
