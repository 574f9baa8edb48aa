"""The Python state that a recomputed function reads and changes: attributes, containers, closures, random generators.

NOTE [ Python state ]

A recomputed function runs more often than in plain training. Its Python state must not show that. So
:class:`PythonState` takes a shallow copy before the first run. Each replay starts from that copy. After the replay,
the state from before the replay is put back.

The copy has, of every module that the function is, belongs to or closes over (with all submodules):

* attributes, buffers, submodules and parameters, by identity. Hooks are left out, and parameters that FSDP exchanges;
* attributes of their classes;
* the content of lists, dictionaries, sets, deques and small arrays, and attributes of plain objects, some levels deep;

and the function's closure cells, the globals that its code names (and those that functions among them
name), and the states of random generators: those of
``random`` and NumPy, and what objects of these kinds the function has. Objects of torch's own classes are never opened:
they hold the state of hooks, streams and process groups.

An iterator, or a file, cannot be copied. A function that has one is not recomputed: :attr:`PythonState.has_iterators`.
Neither is one of which a layer makes its parameters in this call: :attr:`PythonState.is_lazy`.

Other state (C extensions) is not seen. There the checks of the replay decide: equal values,
or a :class:`~spillway.errors.RecomputeError`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import pickle
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

_DEPTH = 6
"""How many containers and objects deep state is copied."""
_FILE_DEPTH = 2
"""How deep a file is taken for the function's own: what lies deeper is a logger's, say."""
_MOST_ITEMS = 4096
"""Items of a container that is copied."""
_MOST_BYTES = 1 << 16
"""Bytes of an array that is copied."""
_WORDS = 625 * 4
"""Bytes of the state of a Mersenne Twister: 624 words, and a position."""

_INTERNAL = frozenset((*vars(Module()), "_compiled_call_impl", "forward", "__compiled_call_impl")) - {"training"}
"""Attributes of modules that are torch's own business."""

_SIMPLE = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range))
_OPAQUE_ROOTS = frozenset(("torch", "spillway", "builtins", "_thread", "threading", "weakref", "logging", "functools"))
_GLOBAL = 2
"""Random generators that every function has: Python's and NumPy's."""
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_MISSING: Any = object()


class _Kinds(dict[type, str]):
    """What is done with a value, by its class."""

    def __missing__(self, kind: type) -> str:
        self[kind] = found = _kind_of(kind)
        return found


def _kind_of(kind: type) -> str:
    if kind in _SIMPLE or issubclass(kind, (torch.Tensor, type, types.ModuleType)):
        return "simple"
    if issubclass(kind, Module):
        return "module"
    if kind in _DICTS:
        return "dict"
    if kind in (list, deque, bytearray):
        return "list"
    if kind is set:
        return "set"
    if kind is tuple:
        return "tuple"
    if issubclass(kind, (random.Random, torch.Generator)):
        return "generator"
    if kind.__module__.partition(".")[0] == "numpy":
        return "array" if kind.__name__ == "ndarray" else "generator"
    if kind is types.FunctionType:
        return "function"
    if kind is types.MethodType or kind is functools.partial:
        return "bound"
    root = kind.__module__.partition(".")[0]
    if hasattr(kind, "__next__"):
        return "file" if root in ("io", "_io") else "iterator"
    if root in _OPAQUE_ROOTS:
        return "simple"
    return "object" if kind.__dictoffset__ or _slots[kind] else "simple"


class _Slots(dict[type, tuple[str, ...]]):
    """Names of attributes that lie in slots, by an object's class."""

    def __missing__(self, kind: type) -> tuple[str, ...]:
        slots = types.MemberDescriptorType
        names = (name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, slots))
        self[kind] = found = tuple(dict.fromkeys(names))
        return found


_slots = _Slots()
_kinds = _Kinds()


class PythonState:
    """A copy of a function's Python state, taken now. See NOTE [ Python state ].

    Args:
        function: the function, method or module.
        objects: objects among its arguments: generators, modules and others whose state it may change.
        numpy_draws: whether the function was seen to draw from NumPy's global generator. To copy all of its state takes
            40 us, so that otherwise its words alone are copied, without the second number of a pair of normal ones.
    """

    __slots__ = (
        *("_arrays", "_attributes", "_buffers", "_cells", "_classes", "_dicts", "_generators", "_lists", "_names"),
        *("_flags", "_live", "_parameters", "_reachable", "_seen", "_sets", "_slots", "has_iterators", "is_lazy"),
    )

    def __init__(self, function: Any, objects: Sequence[Any] = (), *, numpy_draws: bool = False) -> None:
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Modules' attributes, each with its copy."""
        self._parameters: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._slots: list[tuple[Any, dict[str, Any]]] = []
        """Objects with slots, each with a copy of what is in them."""
        self._flags: list[tuple[torch.Tensor, bool]] = []
        """Parameters, and whether they require grad."""
        self._cells: list[tuple[Any, Any]] = []
        self._names: list[tuple[dict[str, Any], str, Any]] = []
        """Globals: the dictionary, the name, and the value."""
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Buffers and plain parameters, each with an alias: ``.data`` may be given other memory."""
        self.has_iterators = False
        """Whether the function has state that cannot be copied."""
        self.is_lazy = False
        """Whether a module of the function makes its parameters or buffers when it is first called."""
        self._generators: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []
        """Random generators: how to set the state, how to get it, and the state."""
        self._live: tuple[list[Any], list[Any], list[int]] | None = None
        """Views of all containers, what they had, and addresses of tensors: see :meth:`_places_are_current`."""
        self._reachable: list[tuple[str, torch.Tensor]] | None = None
        self._seen: set[int] | None = set()
        self._add_generator(_set_python, _python_words)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._add_generator(*(_whole(numpy) if numpy_draws else _raw(numpy)))
        owner = getattr(function, "__self__", None)
        self._add(owner if isinstance(owner, Module) else function, 0)
        for each in objects:
            self._add(each, 0)
        self._seen = None

    @property
    def numpy_draws(self) -> bool:
        """Whether NumPy's global generator was drawn from since."""
        return (
            len(self._generators) > 1
            and "numpy.random" in sys.modules
            and self._generators[1][1]() != self._generators[1][2]
        )

    @property
    def changes(self) -> bool:
        """Whether the state is another one now."""
        return next(self.changed(), None) is not None

    def changed_names(self) -> str:
        """Names of attributes, globals and generators that are not what they were, for messages."""
        names = dict.fromkeys(self.changed())
        shown = list(names)[:4]
        return ", ".join(shown) + (" and more" if len(names) > len(shown) else "")

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context that begins with the copied state, and ends with the state from before the context."""
        # Nothing of this is the function's own: no mode is to see it.
        with torch._C.DisableTorchFunction():
            is_current = self._is_current()
            before = self if is_current else self.again()
            if not is_current:
                self._restore()
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction():
                if not (is_current and self._is_current()):
                    before._restore()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that the copy holds: a replay finds them where they were."""
        copies = (copy.values() for _, copy in (*self._attributes, *self._dicts, *self._classes))
        lists = (kept for _, kept in self._lists)
        single = ([value for _, value in self._cells], [value for *_, value in self._names])
        for values in (*copies, *lists, *single):
            yield from (value for value in values if isinstance(value, torch.Tensor))

    def reachable(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors and plain parameters that the function can reach, each once, if they have versions."""
        if self._reachable is None:
            found = {}
            for _, copy in (*self._attributes, *self._dicts, *self._classes, *self._parameters):
                found.update((id(v), (str(k), v)) for k, v in copy.items() if isinstance(v, torch.Tensor))
            for _, kept in self._lists:
                found.update((id(v), ("an item", v)) for v in kept if isinstance(v, torch.Tensor))
            single = (*(("a variable", value) for _, value in self._cells), *((n, v) for _, n, v in self._names))
            found.update((id(v), (k, v)) for k, v in single if isinstance(v, torch.Tensor))
            self._reachable = [pair for pair in found.values() if not pair[1].is_inference()]
        return self._reachable

    @property
    def is_shareable(self) -> bool:
        """Whether later calls may have this very copy: what it holds has no history, and is compared at once."""
        is_simple = not (self._arrays or self.has_iterators or self.is_lazy) and len(self._generators) <= _GLOBAL
        return is_simple and all(tensor.is_leaf for tensor in self.tensors())

    def renewed(self) -> PythonState | None:
        """A copy that is taken now, in short, if nothing but random generators has changed; ``None`` otherwise."""
        if not self._places_are_current():
            return None
        states = [get() for _, get, _ in self._generators]
        if all(state == known for state, (*_, known) in zip(states, self._generators, strict=True)):
            return self
        other = shallow_copy(self)
        other._generators = [(put, get, state) for state, (put, get, _) in zip(states, self._generators, strict=True)]
        return other

    def _is_current(self) -> bool:
        return self._places_are_current() and all(get() == state for _, get, state in self._generators)

    def _places_are_current(self) -> bool:
        """Whether all is as it was but for random generators, as :attr:`changes` says it, in a fifth of its time."""
        if self._live is None:
            dicts = (*self._attributes, *self._dicts, *self._parameters)
            views: list[Any] = [place.values() for place, _ in dicts]
            values = [value for _, kept in dicts for value in kept.values()]
            for items, kept in self._lists:
                views.append(items)
                values += kept
            self._live = views, values, [alias.data_ptr() for _, alias in self._buffers if _has_address(alias)]
        views, values, addresses = self._live
        now = list(itertools.chain.from_iterable(views))
        if len(now) != len(values) or not all(map(operator.is_, now, values)):
            return False
        return (
            [buffer.data_ptr() for buffer, alias in self._buffers if _has_address(alias)] == addresses
            and all(names.get(name, _MISSING) is value for names, name, value in self._names)
            and all(_content(cell) is content for cell, content in self._cells)
            and all(members == kept for members, kept in self._sets)
            and all(parameter.requires_grad is flag for parameter, flag in self._flags)
            and all(_are_the_same(_in_slots(value), kept) for value, kept in self._slots)
            and all(_are_the_same(_attributes_of(kind), kept) for kind, kept in self._classes)
            and all(array.tobytes() == content.tobytes() for array, content in self._arrays)
        )

    def histories(self) -> list[str]:
        """Names of attributes that had a tensor which the function read, and now have one that needs gradients."""
        return [
            name
            for place, copy in (*self._attributes, *self._dicts)
            for name in _names_of_changes(place, copy, _INTERNAL)
            if _is_read_tensor(copy.get(name)) and getattr(place.get(name), "requires_grad", False)
        ]

    def release(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        """Hold no longer a tensor that was replaced in the first run, and whose bytes were never read.

        It may be of an earlier step. A stand-in takes its place, since the function may have asked for its shape.
        """
        for place, copy in (*self._attributes, *self._dicts):
            for name, value in copy.items():
                # A subclass may say more of itself than a stand-in does.
                is_plain = type(value) is torch.Tensor and value.layout is torch.strided
                if is_plain and place.get(name, _MISSING) is not value and not is_read(value):
                    copy[name] = _stand_in(value)

    def again(self) -> PythonState:
        """A copy of the same places, taken now."""
        other = PythonState.__new__(PythonState)
        other._attributes = [(place, place.copy()) for place, _ in self._attributes]
        other._dicts = [(place, place.copy()) for place, _ in self._dicts]
        other._parameters = [(place, place.copy()) for place, _ in self._parameters]
        other._lists = [(place, list(place)) for place, _ in self._lists]
        other._sets = [(place, place.copy()) for place, _ in self._sets]
        other._slots = [(place, _in_slots(place)) for place, _ in self._slots]
        other._flags = [(parameter, parameter.requires_grad) for parameter, _ in self._flags]
        other._cells = [(cell, _content(cell)) for cell, _ in self._cells]
        other._names = [(place, name, place.get(name, _MISSING)) for place, name, _ in self._names]
        other._classes = [(kind, _attributes_of(kind)) for kind, _ in self._classes]
        other._arrays = [(array, array.copy()) for array, _ in self._arrays]
        other._buffers = [(buffer, _alias_of(buffer)) for buffer, _ in self._buffers]
        other.has_iterators, other.is_lazy = self.has_iterators, self.is_lazy
        other._generators = [(put, get, get()) for put, get, _ in self._generators]
        other._seen = other._live = other._reachable = None
        return other

    # What is copied.

    def _add(self, value: Any, depth: int) -> None:
        kind = _kinds[type(value)]
        if kind == "simple" or self._knows(value):
            return
        if kind == "module":
            self._add_module(value)
        elif depth > _DEPTH:
            return
        elif kind == "function":
            self._add_function(value, depth)
        elif kind == "bound":
            inner = (value.__self__, value.__func__) if isinstance(value, types.MethodType) else _parts_of(value)
            for each in inner:
                self._add(each, depth + 1)
        elif kind == "generator":
            self._add_random(value)
        elif kind == "array":
            if value.nbytes <= _MOST_BYTES:
                self._arrays.append((value, value.copy()))
        elif kind == "iterator" or (kind == "file" and depth <= _FILE_DEPTH):
            self.has_iterators = True
        elif kind == "file":
            return
        elif kind == "object":
            if type(value).__dictoffset__:
                self._add_dict(value.__dict__, depth)
            if _slots[type(value)]:
                self._slots.append((value, _in_slots(value)))
                for each in self._slots[-1][1].values():
                    self._add(each, depth + 1)
        else:
            self._add_container(value, kind, depth)

    def _add_module(self, module: Module) -> None:
        stack, seen = [module], self._seen
        assert seen is not None
        while stack:
            each = stack.pop()
            self._add_class(type(each))
            attributes = each.__dict__
            self._attributes.append((attributes, attributes.copy()))
            # Those of a scripted module are no dictionaries.
            if type(attributes["_modules"]) in _DICTS:
                self._dicts.append((attributes["_modules"], attributes["_modules"].copy()))
            parameters = attributes["_parameters"]
            if type(parameters) in _DICTS:
                if _are_plain(parameters):
                    self._parameters.append((parameters, parameters.copy()))
                    for each_parameter in parameters.values():
                        if each_parameter is not None:
                            self._flags.append((each_parameter, each_parameter.requires_grad))
                            if each_parameter.layout is torch.strided:
                                self._buffers.append((each_parameter, _alias_of(each_parameter)))
                else:
                    self.is_lazy = self.is_lazy or any(map(is_lazy, parameters.values()))
            buffers = attributes["_buffers"]
            if type(buffers) in _DICTS:
                self._dicts.append((buffers, buffers.copy()))
                for buffer in buffers.values():
                    if type(buffer) is not torch.Tensor:
                        self.is_lazy = self.is_lazy or is_lazy(buffer)
                    elif buffer.layout is torch.strided:
                        self._buffers.append((buffer, _alias_of(buffer)))
            for name, value in attributes.items():
                if name not in _INTERNAL and _kinds[type(value)] != "simple":
                    self._add(value, 1)
            for child in attributes["_modules"].values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    stack.append(child)

    def _add_class(self, kind: type) -> None:
        if self._knows(kind):
            return
        for base in kind.__mro__:
            if base.__module__.partition(".")[0] in _OPAQUE_ROOTS:
                continue
            self._classes.append((base, _attributes_of(base)))
            self._add_names(vars(base).get("forward"))

    def _add_function(self, function: types.FunctionType, depth: int, *, opens: bool = True) -> None:
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._cells.append((cell, content))
            self._add(content, depth + 1)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._add(value, depth + 1)
        self._add_names(function, opens=opens)
        wrapped = function.__dict__.get("__wrapped__", function.__dict__.get("_torchdynamo_orig_callable"))
        if wrapped is not None:
            self._add(wrapped, depth + 1)

    def _add_names(self, function: Any, *, opens: bool = True) -> None:
        """What a function reads and writes by names of globals, and what the functions among them hold."""
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", None)
        if code is None or names is None or id(code) in (seen := self._seen or set()):
            return
        seen.add(id(code))
        state, helpers = _names_of_state(code, _Globals(names))
        for name in state:
            value = names.get(name, _MISSING)
            self._names.append((names, name, value))
            self._add(value, 1)
        for name in helpers if opens else ():
            helper = names.get(name)
            if isinstance(helper, types.FunctionType) and not self._knows(helper):
                if helper.__dict__:
                    self._add_dict(helper.__dict__, 1)
                self._add_function(helper, 1, opens=False)

    def _add_container(self, value: Any, kind: str, depth: int) -> None:
        if len(value) > _MOST_ITEMS:
            return
        if kind == "dict":
            self._add_dict(value, depth)
            return
        if kind == "set":
            self._sets.append((value, value.copy()))
            return
        if kind == "list":
            self._lists.append((value, list(value)))
        for each in value:
            if _kinds[type(each)] != "simple":
                self._add(each, depth + 1)

    def _add_dict(self, value: dict[Any, Any], depth: int) -> None:
        self._dicts.append((value, value.copy()))
        for each in value.values():
            if _kinds[type(each)] != "simple":
                self._add(each, depth + 1)

    def _add_random(self, value: Any) -> None:
        if isinstance(value, random.SystemRandom):
            # The system's source has no state.
            return
        if isinstance(value, random.Random):
            self._add_generator(value.setstate, value.getstate)
            return
        if isinstance(value, torch.Generator):
            if value.device.type == "cpu":
                # A tensor of its own: as bytes, it can be compared.
                self._add_generator(_setting(value), lambda: _bytes_of(value))
            return
        if hasattr(value, "get_state"):
            # Of normal numbers, NumPy's older generators hold the second one of a pair.
            self._add_generator(
                lambda state: value.set_state(pickle.loads(state)), lambda: pickle.dumps(value.get_state(legacy=False))
            )
            return
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if bits is not None:
            # A dictionary of numbers and arrays: its bytes can be compared.
            self._add_generator(
                lambda state: setattr(bits, "state", pickle.loads(state)), lambda: pickle.dumps(bits.state)
            )

    def _add_generator(self, put: Callable[[Any], object], get: Callable[[], Any]) -> None:
        self._generators.append((put, get, get()))

    def _knows(self, value: Any) -> bool:
        assert self._seen is not None
        if id(value) in self._seen:
            return True
        self._seen.add(id(value))
        return False

    # What is compared, and put back.

    def changed(self) -> Iterator[str]:
        """Names of what is not what it was."""
        for place, copy in self._attributes:
            if not _are_the_same(place, copy):
                yield from _names_of_changes(place, copy, _INTERNAL)
        for place, copy in self._dicts:
            if not _are_the_same(place, copy):
                yield from _names_of_changes(place, copy, frozenset())
        for place, copy in self._parameters:
            if _are_plain(place) and not _are_the_same(place, copy):
                yield from _names_of_changes(place, copy, frozenset())
        for kind, copy in self._classes:
            if not _are_the_same(_attributes_of(kind), copy):
                yield from _names_of_changes(_attributes_of(kind), copy, frozenset())
        for value, copy in self._slots:
            if not _are_the_same(now := _in_slots(value), copy):
                yield from _names_of_changes(now, copy, frozenset())
        if any(parameter.requires_grad is not flag for parameter, flag in self._flags):
            yield "whether a parameter requires grad"
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                yield "an array"
        for buffer, alias in self._buffers:
            if buffer.untyped_storage() is not alias.untyped_storage():
                yield "the memory of a parameter or buffer"
        for items, kept in self._lists:
            if len(items) != len(kept) or any(a is not b for a, b in zip(items, kept, strict=True)):
                yield f"a {type(items).__name__}"
        for members, kept_members in self._sets:
            if members != kept_members:
                yield "a set"
        for cell, content in self._cells:
            if _content(cell) is not content:
                yield "a variable of an enclosing function"
        for names, name, value in self._names:
            if names.get(name, _MISSING) is not value:
                yield name
        for _, get, state in self._generators:
            if get() != state:
                yield "the state of a Python or NumPy random generator"

    def _restore(self) -> None:
        for place, copy in self._attributes:
            if not _are_the_same(place, copy):
                _put_back(place, copy, _INTERNAL)
        for place, copy in self._dicts:
            if not _are_the_same(place, copy):
                _put_back(place, copy, frozenset())
        for place, copy in self._parameters:
            if _are_plain(place) and not _are_the_same(place, copy):
                _put_back(place, copy, frozenset())
        for kind, copy in self._classes:
            now = _attributes_of(kind)
            for name in now.keys() - copy.keys():
                delattr(kind, name)
            for name, value in copy.items():
                if now.get(name, _MISSING) is not value:
                    setattr(kind, name, value)
        for value, copy in self._slots:
            now = _in_slots(value)
            for name in now.keys() - copy.keys():
                delattr(value, name)
            for name, each in copy.items():
                if now.get(name, _MISSING) is not each:
                    object.__setattr__(value, name, each)
        for parameter, flag in self._flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                array[...] = content
        for buffer, alias in self._buffers:
            if buffer.untyped_storage() is not alias.untyped_storage() and alias.untyped_storage().nbytes():
                buffer.data = alias
        for items, kept in self._lists:
            if len(items) != len(kept) or any(a is not b for a, b in zip(items, kept, strict=True)):
                items.clear()
                items.extend(kept)
        for members, kept_members in self._sets:
            if members != kept_members:
                members.clear()
                members.update(kept_members)
        for cell, content in self._cells:
            if content is _MISSING:
                if _content(cell) is not _MISSING:
                    del cell.cell_contents
            elif _content(cell) is not content:
                cell.cell_contents = content
        for names, name, value in self._names:
            if value is _MISSING:
                names.pop(name, None)
            else:
                names[name] = value
        for put, get, state in self._generators:
            if get() != state:
                put(state)


def _are_plain(parameters: dict[str, Any]) -> bool:
    """Whether no wrapper (FSDP2) exchanges these parameters for its own."""
    return all(value is None or type(value) is torch.nn.Parameter for value in parameters.values())


def _are_the_same(place: dict[Any, Any], copy: dict[Any, Any]) -> bool:
    # By identity: tensors and arrays have no truth value when they are compared.
    return place.keys() == copy.keys() and all(map(operator.is_, place.values(), copy.values()))


def _names_of_changes(place: dict[Any, Any], copy: dict[Any, Any], ignored: frozenset[str]) -> Iterator[str]:
    for name in dict.fromkeys((*copy, *place)):
        if name not in ignored and place.get(name, _MISSING) is not copy.get(name, _MISSING):
            yield str(name)


def _put_back(place: dict[Any, Any], copy: dict[Any, Any], ignored: frozenset[str]) -> None:
    for name in [name for name in place if name not in copy and name not in ignored]:
        del place[name]
    for name, value in copy.items():
        if name not in ignored and place.get(name, _MISSING) is not value:
            place[name] = value


def _in_slots(value: Any) -> dict[str, Any]:
    """What is in an object's slots."""
    found = ((name, getattr(value, name, _MISSING)) for name in _slots[type(value)])
    return {name: each for name, each in found if each is not _MISSING}


def _attributes_of(kind: type) -> dict[str, Any]:
    """A class's attributes, its methods among them: somebody may replace one."""
    attributes = vars(kind)
    return {name: attributes[name] for name in _names_of_class(kind, len(attributes)) if name in attributes}


@functools.lru_cache(maxsize=1024)
def _names_of_class(kind: type, count: int) -> tuple[str, ...]:
    return tuple(name for name in vars(kind) if not name.startswith("__"))


def _alias_of(buffer: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return buffer.data


def _has_address(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own, by an address."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def _setting(generator: torch.Generator) -> Callable[[Any], object]:
    def put(state: bytes) -> None:
        # A fake mode would make this a fake tensor.
        with _disable_current_modes():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return put


def _bytes_of(generator: torch.Generator) -> bytes:
    with _disable_current_modes():
        return bytes(generator.get_state().numpy())


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and device, with the memory of one element."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        stand_in = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        stand_in.__dict__["_is_stand_in"] = True
        return stand_in


def _is_read_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "_is_stand_in")


def _parts_of(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return (partial.func, *partial.args, *partial.keywords.values())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


class _Globals:
    """A function's globals, known by the dictionary."""

    __slots__ = ("names",)

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and self.names is other.names

    def __hash__(self) -> int:
        return id(self.names)


@functools.lru_cache(maxsize=1024)
def _names_of_state(code: types.CodeType, module: _Globals) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of globals in a function's code: of values that are no functions, classes or modules; and of functions."""
    found, helpers = [], []
    for name in _names_in(code):
        value = module.names.get(name, _MISSING)
        is_code = isinstance(value, types.ModuleType) or (callable(value) and not isinstance(value, Module))
        if value is not _MISSING and not is_code:
            found.append(name)
        root = (getattr(value, "__module__", None) or "").partition(".")[0]
        if isinstance(value, types.FunctionType) and root not in _OPAQUE_ROOTS:
            helpers.append(name)
    return tuple(found), tuple(helpers)


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names in a function's code, and in the functions inside."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_in(each))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _whole(numpy: types.ModuleType) -> tuple[Callable[[Any], object], Callable[[], Any]]:
    """How to set, and to get, all of the state of NumPy's global generator."""
    return lambda state: numpy.set_state(pickle.loads(state)), lambda: pickle.dumps(numpy.get_state(legacy=False))


def _words_of_python() -> Callable[[], Any]:
    """How to get the state of Python's global generator: by its memory, in a tenth of the time, if that is as known."""
    owner: Any = getattr(random, "_inst", None)
    address = id(owner) + object.__basicsize__

    def peek() -> Any:
        # An index, and the words of a Mersenne Twister: ``RandomObject`` in CPython.
        return ctypes.string_at(address, _WORDS), owner.gauss_next

    def as_known() -> bool:
        words = ctypes.string_at(address, _WORDS)
        numbers = [int.from_bytes(words[at : at + 4], sys.byteorder) for at in range(0, _WORDS, 4)]
        return bool((*numbers[1:], numbers[0]) == random.getstate()[1])

    is_known = sys.implementation.name == "cpython" and type(owner) is random.Random and as_known()
    return peek if is_known else random.getstate


def _set_python(state: Any) -> None:
    if len(state) == 3:
        random.setstate(state)
        return
    words, gauss_next = state
    numbers = [int.from_bytes(words[at : at + 4], sys.byteorder) for at in range(0, _WORDS, 4)]
    random.setstate((3, (*numbers[1:], numbers[0]), gauss_next))


_python_words = _words_of_python()


def _raw(numpy: types.ModuleType) -> tuple[Callable[[Any], object], Callable[[], Any]]:
    """The same of its words alone, which lie at an address that NumPy tells for this purpose."""
    bits = numpy.get_bit_generator()
    if type(bits).__name__ != "MT19937":
        return _whole(numpy)
    address = bits.ctypes.state_address
    return lambda words: ctypes.memmove(address, words, _WORDS), lambda: ctypes.string_at(address, _WORDS)
