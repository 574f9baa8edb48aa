"""Containers of Python state, by kind: what changed in each, and how its content is put back.

A content is a copy: a dictionary where values have names, else a list. Values are compared by identity: tensors and
arrays have no truth value when they are compared.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, Parameter

MISSING: Any = object()
"""Stands for the value of a name that has none."""
INTERNAL = frozenset((*vars(Module()), "_compiled_call_impl", "forward", "__compiled_call_impl")) - {"training"}
"""Attributes of modules that are torch's own business."""
_PLAIN_PARAMETERS = frozenset((Parameter, type(None)))

Content = Any
"""``dict[Any, Any]`` or ``list[Any]``."""


@dataclass(frozen=True, eq=False)
class Container:
    """A kind of container whose values have names."""

    get: Callable[[Any, Any], Any]
    """Gives a value by its name."""
    put: Callable[[Any, Any, Any], object]
    delete: Callable[[Any, Any], object]
    open: Callable[[Any], Mapping[Any, Any]] | None = None
    """Gives all names and values; ``None``: names that are not in the content are none of the state."""
    is_left_out: Callable[[Any], bool] = lambda name: False
    """Whether a name is none of the state."""
    is_plain: bool = False
    """Whether tensors in it may be released: see :meth:`PythonState.release`."""

    def value(self, thing: Any, name: Any) -> Any:
        """The value of a name now, or ``MISSING``."""
        try:
            return self.get(thing, name)
        except (LookupError, AttributeError, ValueError):
            return MISSING

    def copy(self, thing: Any, content: Content) -> Content:
        """The content now, of a container that had this content."""
        if self.open is None:
            return {name: self.value(thing, name) for name in content}
        return dict(self.open(thing).items())

    def changes(self, thing: Any, content: Content) -> list[Any]:
        """Names of values that are not as in the content."""
        names = content
        if self.open is not None:
            now = self.open(thing)
            if _are_identical(now, content) and all(map(operator.is_, now.values(), content.values())):
                return []
            names = dict.fromkeys((*content, *now))
        changed = [name for name in names if self.value(thing, name) is not content.get(name, MISSING)]
        return [name for name in changed if not self.is_left_out(name)]

    def put_back(self, thing: Any, content: Content) -> None:
        """Give it this content."""
        for name in Container.changes(self, thing, content):
            if content.get(name, MISSING) is MISSING:
                self.delete(thing, name)
            else:
                self.put(thing, name, content[name])


class Dictionary(Container):
    """Dictionaries: their order is a part of the content."""

    def changes(self, thing: Any, content: Content) -> list[Any]:
        names = super().changes(thing, content)
        return names if names or _are_identical(thing, content) else ["the order of a dictionary"]

    def put_back(self, thing: Any, content: Content) -> None:
        if not _are_identical(thing, content):
            thing.clear()
        super().put_back(thing, content)


class Parameters(Dictionary):
    """A module's parameters, as long as no wrapper (FSDP2) has exchanged them for its own."""

    def changes(self, thing: Any, content: Content) -> list[Any]:
        return super().changes(thing, content) if are_plain(thing.values()) else []

    def put_back(self, thing: Any, content: Content) -> None:
        if are_plain(thing.values()):
            super().put_back(thing, content)


class Items(Container):
    """Lists, deques, arrays of bytes, and sets: values have no names."""

    def copy(self, thing: Any, content: Content) -> Content:
        return list(thing)

    def changes(self, thing: Any, content: Content) -> list[Any]:
        return [] if _are_identical(thing, content) else [f"a {type(thing).__name__}"]

    def put_back(self, thing: Any, content: Content) -> None:
        if not _are_identical(thing, content):
            thing.clear()
            (thing.update if isinstance(thing, set) else thing.extend)(content)


def are_plain(parameters: Iterable[Any]) -> bool:
    """Whether no wrapper has put its own in the place of a module's parameters.

    ``torch.func.functional_call`` puts plain tensors there, which belong to the state. FSDP's are views of a flat one.
    """
    parameters = [*parameters]
    if _PLAIN_PARAMETERS.issuperset(map(type, parameters)):
        return True
    others = (each for each in parameters if type(each) not in _PLAIN_PARAMETERS)
    return all(type(each) is torch.Tensor and not hasattr(each._base, "_is_flat_param") for each in others)


def _are_identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _attributes(thing: Any) -> Any:
    return thing.__dict__


def _items(thing: Any) -> Any:
    return thing


def _of(open_: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
    """How to get, set and delete a value in the dictionary that ``open_`` gives; and ``open_``."""
    return (
        # A dictionary may make what it does not have, if it is asked otherwise.
        lambda thing, name: open_(thing).get(name, MISSING),
        lambda thing, name, value: operator.setitem(open_(thing), name, value),
        lambda thing, name: operator.delitem(open_(thing), name),
        open_,
    )


# A setter of the object's own would do more.
ATTRIBUTES = Container(*_of(_attributes), is_plain=True)
MODULE = Container(*_of(_attributes), is_left_out=INTERNAL.__contains__, is_plain=True)
CLASS = Container(
    _of(_attributes)[0], setattr, delattr, _attributes, is_left_out=lambda name: str(name).startswith("__")
)
# Without a `__getattr__` of the object's own.
SLOTS = Container(object.__getattribute__, object.__setattr__, object.__delattr__)
CELL = Container(
    lambda cell, _: cell.cell_contents,
    lambda cell, _, value: setattr(cell, "cell_contents", value),
    lambda cell, _: delattr(cell, "cell_contents"),
)
GLOBALS = Container(*_of(_items)[:3])
DICTIONARY = Dictionary(*_of(_items), is_plain=True)
PARAMETERS = Parameters(*_of(_items))
ITEMS = Items(*_of(_items))
