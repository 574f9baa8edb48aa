"""The Python state that a recomputed function reads and changes: attributes, containers, closures, random generators.

NOTE [ Python state ]

A recomputed function runs more often than in plain training. Its Python state must not show that. So
:class:`PythonState` takes a shallow copy before the first run. Each replay starts from that copy. After the replay,
the state from before the replay is put back.

The copy has, for every module that the function is, belongs to or closes over (with all submodules):

* attributes, buffers, submodules and parameters, by identity. Hooks are left out, and parameters that FSDP exchanges;
* the memory of parameters and buffers, and whether they require gradients;
* attributes of their classes;
* the content of lists, dictionaries, sets, deques and small arrays, and attributes of plain objects, some levels deep.

It also has the function's closure cells, the globals that its code names (and those that functions among them name),
and the states of random generators: those of ``random`` and NumPy, and those among the function's objects. Objects of
torch's own classes are never opened: they hold the state of hooks, streams and process groups.

Iterators and files cannot be copied. A function that has one is not recomputed (:meth:`PythonState.why_kept`). Neither
is one with a layer that makes its parameters in this call, or that writes them.

Other state (C extensions) is not seen. There the checks of the replay decide: equal values,
or a :class:`~spillway.errors.RecomputeError`.

Each call takes a copy of its own. The copy lives as long as the call's graph, and holds all that the function had.
The contents of all containers are one list of names and one of values, which are compared at once. Only if they differ,
containers are compared one by one. Between calls, only :class:`~spillway.checkpointing.python_walk.WalkMemory`
stays, which holds no module and no tensor.

NOTE [ Parts of a state ]

Layers of a model share the classes of their modules, and objects such as a configuration. The copy of each is a part,
which calls share. A part is held by the states that have it. A later call compares a living part with the current
content, which is faster than reading it again. If anything differs, the call makes a part of its own.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.nn import Module

from spillway._torch import disable_function
from spillway.checkpointing.python_containers import (
    CLASS,
    DICTIONARY,
    GLOBALS,
    ITEMS,
    MISSING,
    MODULE,
    Container,
    global_generators,
)
from spillway.checkpointing.python_walk import AttributeNames, Content, Entry, Walk, WalkMemory
from spillway.checkpointing.tensors import below_modes
from spillway.saved_tensors.identity import is_streamed

_values_of, _requires_grad = methodcaller("values"), attrgetter("requires_grad")
# Without an object's own ``__getattribute__``.
_attribute_of, _DICT = object.__getattribute__, repeat("__dict__")


class PythonState:
    """A function's Python state, and a copy of its content. See NOTE [ Python state ].

    ``objects`` are those among its arguments. ``memory`` is of the walk in an earlier call of the function.
    """

    def __init__(self, function: Any, objects: Sequence[Any] = (), memory: WalkMemory | None = None) -> None:
        # Function modes must not see this.
        with disable_function():
            roots = (*_roots_of(function), *objects)
            own, parts, generators = None, [], global_generators()
            found = None if memory is None else memory.find(roots)
            if found is not None:
                remembered, walk = found
                own = _Copy(walk)
                own, parts = (own, remembered.parts) if remembered.is_right(walk, own.content) else (None, [])
            if own is None:
                walk = Walk(roots)
                own, parts = _Copy(walk), walk.parts
                if memory is not None and not walk.generators:
                    memory.keep(roots, walk, own.content)
            own.walk.generators += generators
            self._copies = [own.copy_rest(), *[_part_of(key, entries) for key, entries in parts]]

    def why_kept(self) -> str | None:
        """Why the function cannot be replayed, if it cannot."""
        return next((why for each in self._copies if (why := each.walk.why_kept) is not None), None)

    def reachable(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors and plain parameters that the function can reach, each once, with its name.

        Inference tensors are left out: they have no versions. The names are the same in every call, and not unique.
        """
        named = [*chain.from_iterable([each.walk.tensors for each in self._copies])]
        found = {id(pair[1]): pair for pair in reversed(named)}
        return [pair for pair in reversed(found.values()) if not pair[1].is_inference()]

    @property
    def changes(self) -> bool:
        """Whether the state has changed."""
        return not all(each.is_current() for each in self._copies)

    def changed(self) -> list[str]:
        """Names of the state that has changed."""
        return [*chain.from_iterable([(*each.changed_names(), *each.changed_values()) for each in self._copies])]

    @contextmanager
    def in_force(self, *, is_stateless: bool = False) -> Iterator[None]:
        """A context with the copied state. Afterwards the state from before the context is put back.

        ``is_stateless``: the function was not seen to change its state. If the state is still the copied one, neither
        has forward, and a replay that does the same leaves nothing to put back: the second comparison is left out.
        """
        # Function modes must not see this.
        with disable_function():
            before = []
            for each in self._copies:
                if each.is_current():
                    if not is_stateless:
                        before.append(each)
                else:
                    before.append(_Copy(each.walk, is_first=False).copy_rest())
                    each.put_back()
        try:
            yield
        finally:
            with disable_function():
                for current in before:
                    if not current.is_current():
                        current.put_back()


class _Copy:
    """The content of a state, or of a part of one, at one time: ``is_first`` if that is when it was walked."""

    __slots__ = (
        *("__weakref__", "_arrays", "_attributes", "_dictionaries", "_empty", "_flags", "_generators", "_has_rest"),
        *("_holders", "_items", "_memory", "_names", "_others", "_owners", "content", "walk"),
    )

    def __init__(self, walk: Walk, *, is_first: bool = True) -> None:
        self.walk = walk
        self._attributes: list[Any] = [each.__dict__ for each in walk.modules]
        self._names = walk.names if is_first else [*map(AttributeNames.of, self._attributes)]
        self._owners = [thing for _, thing in walk.owners]
        self._dictionaries = [vars(thing) if kind is CLASS else thing for kind, thing in walk.dictionaries]
        self._items = [thing for _, thing in walk.items]
        self.content = self._now()

    def copy_rest(self) -> _Copy:
        """Copy what is no value in a container."""
        walk = self.walk
        self._others = [(kind, thing, kind.copy(thing, content)) for kind, thing, content in walk.others]
        self._empty = walk.empty
        if any(walk.empty):
            self._empty = [each for each in walk.empty if not each]
            self._others += [(DICTIONARY, each, dict(each)) for each in walk.empty if each]
        with below_modes():
            self._flags = [*map(_requires_grad, walk.parameters)]
            holders = [each for each in (*walk.parameters, *walk.buffers) if each.layout is torch.strided]
            # A streamed parameter has other memory in each use.
            self._holders = [each for each in holders if not is_streamed(each)]
            self._memory = [each.data for each in self._holders]
        self._arrays = [(array, array.copy()) for array in walk.arrays]
        self._generators = [(generator, generator.get()) for generator in walk.generators]
        self._has_rest = bool(self._flags or self._holders or self._arrays or self._generators)
        return self

    def _now(self) -> Content:
        attributes, maps = self._attributes, [*map(_attribute_of, self._owners, _DICT), *self._dictionaries]
        try:
            parts: list[Any] = [each.get(own) for each, own in zip(self._names, attributes, strict=True)]
        except KeyError:
            parts = [*map(AttributeNames.values, self._names, attributes)]
        parts += [
            *map(_values_of, maps),
            *self._items,
            *[[*map(function.__globals__.get, names, repeat(MISSING))] for function, names in self.walk.globals],
        ]
        lengths = [*map(len, attributes), *map(len, parts)]
        return Content(lengths, [*chain.from_iterable(maps)], tuple(chain.from_iterable(parts)))

    def _changed(self) -> Iterator[tuple[Container, Any, Any]]:
        """Containers that may have other names or values now, with their contents."""
        before, after = map(self._parts, (self.content, self._now()))
        for (kind, thing), own, others in zip(self._containers, before, after, strict=True):
            if own[:2] == others[:2] and all(map(is_, own[2], others[2])):
                continue
            if kind is GLOBALS:
                yield kind, thing[0].__globals__, dict(zip(thing[1], own[2], strict=True))
            else:
                yield kind, thing, own[2] if kind is ITEMS else dict(zip(own[1], own[2], strict=True))
        yield from self._others
        yield from ((DICTIONARY, each, {}) for each in self._empty)

    def _parts(self, content: Content) -> Iterator[tuple[int, Sequence[str], list[Any]]]:
        """Number, names and values of each container. Those of items and globals have no names."""
        count, names, values = len(self._names), iter(content.names), iter(content.values)
        sizes, lengths = (*content.lengths[:count], *content.lengths[2 * count :]), content.lengths[count:]
        for place, ((kind, _), length) in enumerate(zip(self._containers, lengths, strict=True)):
            if kind is MODULE:
                own: Sequence[str] = self._names[place].names
            else:
                own = [] if kind in (ITEMS, GLOBALS) else [*islice(names, length)]
            yield sizes[place], own, [*islice(values, length)]

    @property
    def _containers(self) -> list[tuple[Container, Any]]:
        walk = self.walk
        return [
            *((MODULE, each) for each in walk.modules),
            *walk.owners,
            *walk.dictionaries,
            *walk.items,
            *((GLOBALS, each) for each in walk.globals),
        ]

    def is_current(self) -> bool:
        """Whether nothing has changed."""
        return self.has_same_contents() and not self.changed_values()

    def has_same_contents(self) -> bool:
        """Whether all containers have the same names and values, in the same order."""
        now, content = self._now(), self.content
        if any(self._empty) or now[:2] != content[:2] or not all(map(is_, now.values, content.values)):
            return False
        return not any(kind.changes(thing, content) for kind, thing, content in self._others)

    def changed_names(self) -> list[str]:
        """Names of changed values in containers."""
        if self.has_same_contents():
            return []
        return [str(name) for kind, thing, content in self._changed() for name in kind.changes(thing, content)]

    def changed_values(self) -> list[str]:
        """Descriptions of changes besides the content of containers."""
        found: list[str] = []
        if not self._has_rest:
            return found
        if [*map(_requires_grad, self.walk.parameters)] != self._flags:
            found.append("whether a parameter requires grad")
        if any(array.tobytes() != content.tobytes() for array, content in self._arrays):
            found.append("an array")
        if self._has_other_memory():
            found.append("the memory of a parameter or buffer")
        if any(generator.get() != state for generator, state in self._generators):
            found.append("the state of a Python or NumPy random generator")
        return found

    def _has_other_memory(self) -> bool:
        """Whether a tensor's ``.data`` got other memory, or another shape, strides or type."""
        with below_modes():
            return not all(map(_is_set_to, self._holders, self._memory))

    def put_back(self) -> None:
        """Set everything to this content."""
        for kind, thing, content in self._changed():
            kind.put_back(thing, content)
        for tensor, flag in zip(self.walk.parameters, self._flags, strict=True):
            if tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                array[...] = content
        with below_modes():
            for each, alias in zip(self._holders, self._memory, strict=True):
                # FSDP frees the memory of a parameter: there is none to put back.
                if not _is_set_to(each, alias) and alias.untyped_storage().nbytes():
                    each.data = alias
        for generator, state in self._generators:
            if generator.get() != state:
                generator.put(state)


_parts: weakref.WeakValueDictionary[tuple[int, ...], _Copy] = weakref.WeakValueDictionary()
"""Living parts, by the identities of their classes or objects."""


def _part_of(key: tuple[int, ...], entries: Callable[[], Sequence[Entry]]) -> _Copy:
    """See NOTE [ Parts of a state ]."""
    part = _parts.get(key)
    if part is None or not part.is_current():
        part = _parts[key] = _Copy(Walk((), entries())).copy_rest()
    return part


def _roots_of(function: Any) -> list[Any]:
    """The function, or the module that it belongs to, with the function of a method."""
    # Modules search long for attributes that they do not have.
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    if not isinstance(owner, Module):
        return [function]
    return [owner, function.__func__] if isinstance(function, types.MethodType) else [owner]


def _is_set_to(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, type, shape and strides."""
    if a.dtype is not b.dtype:
        return False
    if a.is_cpu or a.is_cuda:
        return a.is_set_to(b)
    # Other devices need not have that operator.
    same = a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
