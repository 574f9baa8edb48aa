"""Containers of Python state, by kind: how each is read, what changed in it, and how its content is put back.

The content of a container is a copy that holds its values: a dictionary where they have names, a list where they have
none. Values are compared by identity, since tensors and arrays have no truth value when they are compared.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

MISSING: Any = object()
"""Stands for the value of a name that has none."""
DICTS = (dict, OrderedDict, defaultdict, Counter)
LISTS = (list, deque, bytearray)
INTERNAL = frozenset((*vars(Module()), "_compiled_call_impl", "forward", "__compiled_call_impl")) - {"training"}
"""Attributes of modules that are torch's own business."""

_METHODS = (types.FunctionType, classmethod, staticmethod, property)

Content = Any
"""``dict[Any, Any]`` of a container with names, ``list[Any]`` of one without."""


class OtherPlacesError(Exception):
    """The state of a function lies in other places than before. Users never see it."""


class Container:
    """A kind of container, here one with content that never changes: tuples, arguments of partial functions."""

    has_names = False
    is_parameters = False
    """Whether the values are a module's parameters."""
    is_plain = False
    """Whether tensors in it may be let go: see :meth:`PythonState.release`."""

    def open(self, thing: Any) -> Any:
        """Its values; where they have names, a mapping."""
        return thing

    def content(self, keys: Sequence[Any], values: Sequence[Any]) -> Content:
        """The content of one that was read: names and values."""
        return dict(zip(keys, values, strict=True)) if self.has_names else list(values)

    def copy(self, thing: Any) -> Content:
        """The content that it has now."""
        opened = self.open(thing)
        return dict(opened.items()) if self.has_names else list(opened)

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        """Names of its values, which are the same in every call."""
        return [str(key) for key in keys] if self.has_names else ["an item of a tuple"] * count

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        """Names of what is not as in the content."""
        return iter(())

    def put_back(self, thing: Any, content: Content) -> None:
        """Give it this content."""


class Bound(Container):
    """The parts of bound methods and of partial functions."""

    def open(self, thing: Any) -> tuple[Any, ...]:
        if isinstance(thing, functools.partial):
            return (thing.func, *thing.args, *thing.keywords.values())
        return (thing.__self__, thing.__func__)

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        return ["an argument of a partial function"] * count


class Children(Container):
    """Modules in a scripted module."""

    def open(self, thing: Any) -> list[Any]:
        return list(thing.values())


class Items(Container):
    """Lists, deques and arrays of bytes."""

    is_plain = True

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        return ["an item of a list"] * count

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        if not are_identical(thing, content):
            yield f"a {type(thing).__name__}"

    def put_back(self, thing: Any, content: Content) -> None:
        if not are_identical(thing, content):
            thing.clear()
            thing.extend(content)


class Members(Container):
    """Sets."""

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        return ["a member of a set"] * count

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        if thing != set(content):
            yield "a set"

    def put_back(self, thing: Any, content: Content) -> None:
        if not are_identical(thing, content) and thing != set(content):
            thing.clear()
            thing.update(content)


class Dictionary(Container):
    """Dictionaries: their order is a part of the content."""

    has_names = is_plain = True

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        if not are_identical(thing.values(), content.values()) or not are_identical(thing, content):
            names = list(_changed_names(thing, content))
            yield from names or ["the order of a dictionary"]

    def put_back(self, thing: Any, content: Content) -> None:
        if not are_identical(thing, content):
            thing.clear()
        for name, value in content.items():
            if thing.get(name, MISSING) is not value:
                thing[name] = value


class Parameters(Dictionary):
    """A module's parameters."""

    is_parameters, is_plain = True, False

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        return super().changes(thing, content) if are_plain(thing.values()) else iter(())

    def put_back(self, thing: Any, content: Content) -> None:
        if are_plain(thing.values()):
            super().put_back(thing, content)


class ForeignParameters(Container):
    """Parameters that a wrapper (FSDP2) exchanges for its own, or that a lazy layer has yet to make."""

    has_names = is_parameters = True


class Attributes(Container):
    """Attributes of a plain object, or of a function."""

    has_names = is_plain = True

    def open(self, thing: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = vars(thing)
        return found

    def copy(self, thing: Any) -> Content:
        return dict(vars(thing))

    def is_left_out(self, name: Any) -> bool:
        """Whether an attribute is none of the function's state."""
        return False

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        return (name for name in _changed_names(vars(thing), content) if not self.is_left_out(name))

    def put_back(self, thing: Any, content: Content) -> None:
        now = vars(thing)
        for name in [name for name in now if name not in content and not self.is_left_out(name)]:
            self._delete(thing, name)
        for name, value in content.items():
            if now.get(name, MISSING) is not value and not self.is_left_out(name):
                self._set(thing, name, value)

    def _delete(self, thing: Any, name: str) -> None:
        del vars(thing)[name]

    def _set(self, thing: Any, name: str, value: Any) -> None:
        # A setter of the object's own would do more.
        vars(thing)[name] = value


class ModuleAttributes(Attributes):
    """Attributes of a module but for torch's own."""

    def is_left_out(self, name: Any) -> bool:
        return name in INTERNAL


class ClassAttributes(Attributes):
    """Attributes of a class. Of a module's class, its methods are among them: somebody may replace one.

    Args:
        attributes: all of the class's attributes.
        has_methods: whether methods are read, too.
    """

    is_plain = False

    def __init__(self, attributes: Mapping[str, Any], *, has_methods: bool) -> None:
        self.names_read = [
            name
            for name, value in attributes.items()
            if not name.startswith("__") and (has_methods or not isinstance(value, _METHODS))
        ]
        self._left_out = attributes.keys() - self.names_read
        self._get = picker(self.names_read)
        self._size = len(attributes)

    def open(self, thing: Any) -> Any:
        attributes = vars(thing)
        if len(attributes) != self._size:
            raise OtherPlacesError
        return self._get(attributes)

    def is_left_out(self, name: Any) -> bool:
        return name in self._left_out or str(name).startswith("__")

    def _delete(self, thing: Any, name: str) -> None:
        delattr(thing, name)

    def _set(self, thing: Any, name: str, value: Any) -> None:
        setattr(thing, name, value)


class Slots(Container):
    """What lies in an object's slots.

    Args:
        names: names of the slots.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def open(self, thing: Any) -> list[Any]:
        return [_in_slot(thing, name) for name in self._names]

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        return self._names

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        now = self.open(thing)
        return (name for name, a, b in zip(self._names, now, content, strict=True) if a is not b)

    def put_back(self, thing: Any, content: Content) -> None:
        for name, now, value in zip(self._names, self.open(thing), content, strict=True):
            if now is not value:
                if value is MISSING:
                    object.__delattr__(thing, name)
                else:
                    object.__setattr__(thing, name, value)


class Variables(Container):
    """What a function reads besides its arguments: closure cells, defaults, and globals by their names.

    Args:
        code: the function's code.
        globals_: names of the globals.
        helpers: how many of them, the last ones, are functions.
    """

    def __init__(self, code: types.CodeType, globals_: Sequence[str], helpers: int) -> None:
        self.code = code
        self.globals = globals_
        self.helpers = helpers

    def open(self, thing: Any) -> list[Any]:
        if thing.__code__ is not self.code:
            raise OtherPlacesError
        return self.copy(thing)

    def copy(self, thing: Any) -> list[Any]:
        # Most functions have little of this.
        found = [content_of(cell) for cell in thing.__closure__] if thing.__closure__ else []
        if thing.__defaults__:
            found += thing.__defaults__
        if thing.__kwdefaults__:
            found += thing.__kwdefaults__.values()
        return found + self._values_of_globals(thing) if self.globals else found

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        cells = self.code.co_freevars
        defaults = ["a default of an argument"] * (count - len(cells) - len(self.globals))
        return [*cells, *defaults, *self.globals]

    def changes(self, thing: Any, content: Content) -> Iterator[str]:
        for cell, value in zip(self._cells(thing), content, strict=False):
            if content_of(cell) is not value:
                yield "a variable of an enclosing function"
        for name, value in self._of_globals(content):
            if thing.__globals__.get(name, MISSING) is not value:
                yield name

    def put_back(self, thing: Any, content: Content) -> None:
        for cell, value in zip(self._cells(thing), content, strict=False):
            if content_of(cell) is not value:
                if value is MISSING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = value
        for name, value in self._of_globals(content):
            if value is MISSING:
                thing.__globals__.pop(name, None)
            elif thing.__globals__.get(name, MISSING) is not value:
                thing.__globals__[name] = value

    def _of_globals(self, content: Content) -> Iterable[tuple[str, Any]]:
        return zip(self.globals, content[len(content) - len(self.globals) :], strict=True)

    def _cells(self, thing: Any) -> Sequence[Any]:
        return thing.__closure__ or ()

    def _values_of_globals(self, thing: Any) -> list[Any]:
        now = thing.__globals__
        return [now.get(name, MISSING) for name in self.globals]


class Globals(Variables):
    """Globals that the forward of a class reads."""

    def copy(self, thing: Any) -> list[Any]:
        return self._values_of_globals(thing) if self.globals else []

    def names(self, keys: Sequence[Any], count: int) -> list[str]:
        return list(self.globals)

    def _cells(self, thing: Any) -> Sequence[Any]:
        return ()


def picker(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Make what gives the values with these keys, or at these positions."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    return (lambda _: ()) if not keys else (lambda values: (values[keys[0]],))


def _in_slot(thing: Any, name: str) -> Any:
    try:
        # Without a `__getattr__` of the object's own.
        return object.__getattribute__(thing, name)
    except AttributeError:
        return MISSING


def content_of(cell: Any) -> Any:
    """What is in a closure's cell."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def are_plain(parameters: Iterable[Any]) -> bool:
    """Whether no wrapper (FSDP2) exchanges these parameters for its own."""
    return all(value is None or type(value) is torch.nn.Parameter for value in parameters)


def are_identical(a: Any, b: Any) -> bool:
    """Whether two collections have the very same values in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _changed_names(now: Mapping[Any, Any], content: Mapping[Any, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*content, *now)):
        if now.get(name, MISSING) is not content.get(name, MISSING):
            yield str(name)
