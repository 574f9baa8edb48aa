"""Containers of Python state, by kind: what changed in each, and how its content is put back.

The content of a container is a copy that holds its values: a dictionary where they have names, a list or a set where
they have none. Values are compared by identity, since tensors and arrays have no truth value when they are compared.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module

MISSING: Any = object()
"""Stands for the value of a name that has none."""
DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
LISTS = frozenset((list, deque, bytearray))
INTERNAL = frozenset((*vars(Module()), "_compiled_call_impl", "forward", "__compiled_call_impl")) - {"training"}
"""Attributes of modules that are torch's own business."""

_PLAIN_PARAMETERS = frozenset((torch.nn.Parameter, type(None)))

Content = Any
"""``dict[Any, Any]``, ``list[Any]`` or ``set[Any]``."""


class Container:
    """A kind of container whose values have names, and that is told to have some."""

    is_parameters = False
    """Whether the values are a module's parameters."""
    is_plain = False
    """Whether tensors in it may be let go: see :meth:`PythonState.release`."""

    def copy(self, thing: Any, content: Content) -> Content:
        """The content now, of one that had this content."""
        return {name: self.get(thing, name) for name in content}

    def changes(self, thing: Any, content: Content) -> list[str]:
        """Names of values that are not as in the content."""
        return [str(name) for name, value in content.items() if self.get(thing, name) is not value]

    def put_back(self, thing: Any, content: Content) -> None:
        """Give it this content."""
        for name, value in content.items():
            if self.get(thing, name) is not value:
                self.set(thing, name, value)

    def get(self, thing: Any, name: Any) -> Any:
        """The value of a name, or ``MISSING``."""
        raise NotImplementedError

    def set(self, thing: Any, name: Any, value: Any) -> None:
        """Give a name this value, or none."""
        raise NotImplementedError


class Cell(Container):
    """The cell of a closure: one variable of an enclosing function."""

    def get(self, thing: Any, name: Any) -> Any:
        try:
            return thing.cell_contents
        except ValueError:
            return MISSING

    def set(self, thing: Any, name: Any, value: Any) -> None:
        if value is MISSING:
            del thing.cell_contents
        else:
            thing.cell_contents = value


class Globals(Container):
    """Some names of a function's globals."""

    def get(self, thing: Any, name: Any) -> Any:
        return thing.get(name, MISSING)

    def set(self, thing: Any, name: Any, value: Any) -> None:
        if value is MISSING:
            del thing[name]
        else:
            thing[name] = value


class Slots(Container):
    """What lies in an object's slots."""

    def get(self, thing: Any, name: Any) -> Any:
        try:
            # Without a `__getattr__` of the object's own.
            return object.__getattribute__(thing, name)
        except AttributeError:
            return MISSING

    def set(self, thing: Any, name: Any, value: Any) -> None:
        if value is MISSING:
            object.__delattr__(thing, name)
        else:
            object.__setattr__(thing, name, value)


class Attributes(Globals):
    """Attributes of a plain object, or of a function. Unlike above, the content has all names."""

    is_plain = True

    def open(self, thing: Any) -> Mapping[Any, Any]:
        """Its names and values now."""
        found: Mapping[Any, Any] = vars(thing)
        return found

    def is_left_out(self, name: Any) -> bool:
        """Whether an attribute is none of the function's state."""
        return False

    def copy(self, thing: Any, content: Content) -> Content:
        return dict(self.open(thing).items())

    def changes(self, thing: Any, content: Content) -> list[str]:
        return [str(name) for name in self._changed_names(thing, content)]

    def put_back(self, thing: Any, content: Content) -> None:
        for name in self._changed_names(thing, content):
            self.set(thing, name, content.get(name, MISSING))

    def set(self, thing: Any, name: Any, value: Any) -> None:
        # A setter of the object's own would do more.
        super().set(self.open(thing), name, value)

    def _changed_names(self, thing: Any, content: Content) -> list[Any]:
        now = self.open(thing)
        names = [name for name in dict.fromkeys((*content, *now)) if not self.is_left_out(name)]
        return [name for name in names if now.get(name, MISSING) is not content.get(name, MISSING)]


class ModuleAttributes(Attributes):
    """Attributes of a module but for torch's own."""

    def is_left_out(self, name: Any) -> bool:
        return name in INTERNAL


class ClassAttributes(Attributes):
    """Attributes of a class, its methods among them: somebody may replace one."""

    is_plain = False

    def is_left_out(self, name: Any) -> bool:
        return str(name).startswith("__")

    def set(self, thing: Any, name: Any, value: Any) -> None:
        if value is MISSING:
            delattr(thing, name)
        else:
            setattr(thing, name, value)


class Dictionary(Attributes):
    """Dictionaries: their order is a part of the content."""

    def open(self, thing: Any) -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = thing
        return found

    def changes(self, thing: Any, content: Content) -> list[str]:
        names = super().changes(thing, content)
        return names if names or are_identical(thing, content) else ["the order of a dictionary"]

    def put_back(self, thing: Any, content: Content) -> None:
        if not are_identical(thing, content):
            thing.clear()
        super().put_back(thing, content)


class Parameters(Dictionary):
    """A module's parameters, as long as no wrapper has exchanged them."""

    is_parameters, is_plain = True, False

    def changes(self, thing: Any, content: Content) -> list[str]:
        return super().changes(thing, content) if are_plain(thing.values()) else []

    def put_back(self, thing: Any, content: Content) -> None:
        if are_plain(thing.values()):
            super().put_back(thing, content)


class Items(Container):
    """Lists, deques and arrays of bytes."""

    def copy(self, thing: Any, content: Content) -> Content:
        return list(thing)

    def changes(self, thing: Any, content: Content) -> list[str]:
        return [] if are_identical(thing, content) else [f"a {type(thing).__name__}"]

    def put_back(self, thing: Any, content: Content) -> None:
        if not are_identical(thing, content):
            thing.clear()
            thing.extend(content)


class Members(Container):
    """Sets."""

    def copy(self, thing: Any, content: Content) -> Content:
        return thing.copy()

    def changes(self, thing: Any, content: Content) -> list[str]:
        return [] if thing == content else ["a set"]

    def put_back(self, thing: Any, content: Content) -> None:
        if thing != content:
            thing.clear()
            thing.update(content)


def are_plain(parameters: Iterable[Any]) -> bool:
    """Whether no wrapper (FSDP2) exchanges these parameters for its own."""
    return _PLAIN_PARAMETERS.issuperset(map(type, parameters))


def are_identical(a: Any, b: Any) -> bool:
    """Whether two collections have the very same values in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
