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

Iterators and files cannot be copied. A function that has one is not recomputed: :attr:`PythonState.has_iterators`.
Neither is one with a layer that makes its parameters in this call (:attr:`PythonState.is_lazy`), or that writes them
(:attr:`PythonState.writes_parameters`).

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.nn import Module

from spillway._torch import disable_function
from spillway.checkpointing.python_containers import (
    DICTIONARY,
    GLOBALS,
    ITEMS,
    MISSING,
    Container,
    global_generators,
    identities,
)
from spillway.checkpointing.python_walk import Content, Entry, Walk, WalkMemory
from spillway.checkpointing.tensors import below_modes

_values_of, _requires_grad, _dtype = methodcaller("values"), attrgetter("requires_grad"), attrgetter("dtype")
# Without an object's own ``__getattribute__``.
_attribute_of = object.__getattribute__


class PythonState:
    """A function's Python state, and a copy of its content. See NOTE [ Python state ].

    ``objects`` are those among its arguments. ``memory`` is of the walk in an earlier call of the function.
    """

    def __init__(self, function: Any, objects: Sequence[Any] = (), memory: WalkMemory | None = None) -> None:
        # Function modes must not see this.
        with disable_function():
            roots = (*_roots_of(function), *objects)
            own, generators = None, global_generators()
            found = None if memory is None else memory.find(roots)
            if found is not None:
                remembered, walk = found
                walk.generators = generators
                own = _Copy(walk)
                own = own if remembered.is_right(own.content) else None
            if own is None:
                walk = Walk(roots)
                has_own_generators = bool(walk.generators)
                walk.generators += generators
                own = _Copy(walk)
                if memory is not None and not has_own_generators:
                    memory.keep(roots, walk, own.content)
            walk = own.walk
            self._copies = [own]
            if walk.classes:
                self._copies.append(_part_of(walk.classes))
            self._copies += [_part_of([each]) for each in walk.objects]

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
    def in_force(self) -> Iterator[None]:
        """A context with the copied state. Afterwards the state from before the context is put back."""
        # Function modes must not see this.
        with disable_function():
            before = []
            for each in self._copies:
                if each.is_current():
                    before.append(each)
                else:
                    before.append(_Copy(each.walk))
                    each.put_back()
        try:
            yield
        finally:
            with disable_function():
                for current in before:
                    if not current.is_current():
                        current.put_back()


class _Copy:
    """The content of a state, or of a part of one, at one time."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._owners = [thing for _, thing in walk.owners]
        self._dictionaries = [thing for _, thing in walk.dictionaries]
        self._items = [thing for _, thing in walk.items]
        self.content, self._values = self._flat()
        """They are those of all containers, one after the other."""
        self._others = [(kind, thing, kind.copy(thing, content)) for kind, thing, content in walk.others]
        self._empty = walk.empty
        if any(walk.empty):
            self._empty = [each for each in walk.empty if not each]
            self._others += [(DICTIONARY, each, dict(each)) for each in walk.empty if each]
        with below_modes():
            self._flags = [*map(_requires_grad, walk.parameters)]
            self._holders = [each for each in (*walk.parameters, *walk.buffers) if each.layout is torch.strided]
            self._memory = [each.data for each in self._holders]
            self._dtypes = [*map(_dtype, self._memory)]
        self._arrays = [(array, array.copy()) for array in walk.arrays]
        self._generators = [(generator, generator.get()) for generator in walk.generators]

    def _flat(self) -> tuple[Content, tuple[Any, ...]]:
        """Content and values of all containers, one after the other."""
        maps = [*map(_attribute_of, self._owners, repeat("__dict__")), *self._dictionaries]
        parts = [
            *map(_values_of, maps),
            *self._items,
            *[[*map(function.__globals__.get, names, repeat(MISSING))] for function, names in self.walk.globals],
        ]
        values = tuple(chain.from_iterable(parts))
        return ([*map(len, parts)], [*chain.from_iterable(maps)], identities(values)), values

    def _changed(self) -> Iterator[tuple[Container, Any, Any]]:
        """Containers that may have other names or values now, with their contents."""
        now, now_values = self._flat()
        before, after = map(self._parts, (self.content, now), (self._values, now_values))
        for (kind, thing), (names, own), (other_names, others) in zip(self._containers, before, after, strict=True):
            if names == other_names and len(own) == len(others) and all(map(is_, own, others)):
                continue
            if kind is GLOBALS:
                yield kind, thing[0].__globals__, dict(zip(thing[1], own, strict=True))
            else:
                yield kind, thing, own if kind is ITEMS else dict(zip(names, own, strict=True))
        yield from self._others
        yield from ((DICTIONARY, each, {}) for each in self._empty)

    def _parts(self, content: Content, values: tuple[Any, ...]) -> Iterator[tuple[list[str], list[Any]]]:
        """Names and values of each container. Those of items and globals have no names."""
        lengths, names, all_values = content[0], iter(content[1]), iter(values)
        for (kind, _), length in zip(self._containers, lengths, strict=True):
            yield [] if kind in (ITEMS, GLOBALS) else [*islice(names, length)], [*islice(all_values, length)]

    @property
    def _containers(self) -> list[tuple[Container, Any]]:
        walk = self.walk
        return [*walk.owners, *walk.dictionaries, *walk.items, *((GLOBALS, each) for each in walk.globals)]

    def is_current(self) -> bool:
        """Whether nothing has changed."""
        return self.has_same_contents() and not self.changed_values()

    def has_same_contents(self) -> bool:
        """Whether all containers have the same names and values, in the same order."""
        if any(self._empty) or self._flat()[0] != self.content:
            return False
        return not any(kind.changes(thing, content) for kind, thing, content in self._others)

    def changed_names(self) -> list[str]:
        """Names of changed values in containers."""
        if self.has_same_contents():
            return []
        return [str(name) for kind, thing, content in self._changed() for name in kind.changes(thing, content)]

    def changed_values(self) -> list[str]:
        """Descriptions of changes besides the content of containers."""
        found = []
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
            has_types = [*map(_dtype, self._holders)] == self._dtypes
            return not (has_types and all(map(_is_set_to, self._holders, self._memory)))

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
                is_other = each.dtype is not alias.dtype or not _is_set_to(each, alias)
                # FSDP frees the memory of a parameter: there is none to put back.
                if is_other and alias.untyped_storage().nbytes():
                    each.data = alias
        for generator, state in self._generators:
            if generator.get() != state:
                generator.put(state)


_parts: weakref.WeakValueDictionary[tuple[int, ...], _Copy] = weakref.WeakValueDictionary()
"""Living parts, by the identities of their classes or objects."""


def _part_of(entries: Sequence[Entry]) -> _Copy:
    """See NOTE [ Parts of a state ]."""
    key = tuple([each for value, _, depth, _ in entries for each in (id(value), id(type(value)), depth)])
    part = _parts.get(key)
    if part is None or not part.is_current():
        part = _parts[key] = _Copy(Walk((), entries))
    return part


def _roots_of(function: Any) -> list[Any]:
    """The function, or the module that it belongs to, with the function of a method."""
    # Modules search long for attributes that they do not have.
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    if not isinstance(owner, Module):
        return [function]
    return [owner, function.__func__] if isinstance(function, types.MethodType) else [owner]


def _is_set_to(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type have the same memory, shape and strides."""
    if a.is_cpu or a.is_cuda:
        return a.is_set_to(b)
    # Other devices need not have that operator.
    same = a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
