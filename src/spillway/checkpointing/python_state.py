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
Nothing is held between calls. The contents of all containers are one list of names and one of values, which are
compared at once. Only if they differ, containers are compared one by one.

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
from itertools import chain, islice
from typing import Any

import torch
from torch.nn import Module

from spillway._torch import disable_dispatch, disable_function
from spillway.checkpointing.python_containers import DICTIONARY, ITEMS, Container, global_generators, identities
from spillway.checkpointing.python_walk import Entry, Walk


class PythonState:
    """A function's Python state, and a copy of its content. See NOTE [ Python state ].

    Args:
        function: the function, method or module.
        objects: objects among its arguments: generators, modules and others whose state it may change.
    """

    def __init__(self, function: Any, objects: Sequence[Any] = ()) -> None:
        # Function modes must not see this.
        with disable_function():
            walk = Walk((*_roots_of(function), *objects))
            walk.generators += global_generators()
            self._copies = [_Copy(walk)]
            if walk.classes:
                self._copies.append(_part_of(walk.classes))
            self._copies += [_part_of([each]) for each in walk.objects]

    def why_kept(self) -> str | None:
        """Why the function cannot be replayed, if it cannot."""
        walks = [each.walk for each in self._copies]
        if any(walk.has_iterators for walk in walks):
            return "has an iterator, or a file, whose state cannot be copied for a second run"
        if any(walk.is_lazy for walk in walks):
            return "has a lazy layer, which makes its parameters in this call"
        is_writer = any(walk.writes_parameters for walk in walks)
        return "has an embedding with max_norm, whose forward writes its weight" if is_writer else None

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
            before = [each if each.is_current() else _Copy(each.walk) for each in self._copies]
            for copy, current in zip(self._copies, before, strict=True):
                if current is not copy:
                    copy.put_back()
        try:
            yield
        finally:
            with disable_function():
                for current in before:
                    current.put_back()


class _Copy:
    """The content of a state, or of a part of one, at one time."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self._lengths, self._names, self._values = self._flat()
        self._identities = identities(self._values)
        self._others = [(kind, thing, kind.copy(thing, content)) for kind, thing, content in walk.others]
        self._empty = walk.empty
        if any(walk.empty):
            self._empty = [each for each in walk.empty if not each]
            self._others += [(DICTIONARY, each, dict(each)) for each in walk.empty if each]
        with disable_dispatch():
            self._flags = [(each, each.requires_grad) for each in walk.parameters]
            each_with_memory = (*walk.parameters, *walk.buffers)
            self._memory = [(each, each.data) for each in each_with_memory if each.layout is torch.strided]
        self._arrays = [(array, array.copy()) for array in walk.arrays]
        self._generators = [(generator, generator.get()) for generator in walk.generators]

    def _flat(self) -> tuple[list[int], list[str], tuple[Any, ...]]:
        """Lengths, names and values of all containers, one after the other."""
        walk = self.walk
        maps = [thing.__dict__ for _, thing in walk.owners]
        maps += [thing for _, thing in walk.dictionaries]
        items = [thing for _, thing in walk.items]
        values = chain.from_iterable([*[each.values() for each in maps], *items])
        return [*map(len, (*maps, *items))], [*chain.from_iterable(maps)], tuple(values)

    def _contents(self) -> Iterator[tuple[Container, Any, Any]]:
        """All containers with their contents."""
        names, values, walk = iter(self._names), iter(self._values), self.walk
        for (kind, thing), length in zip((*walk.owners, *walk.dictionaries, *walk.items), self._lengths, strict=True):
            own = [*islice(values, length)]
            yield kind, thing, own if kind is ITEMS else dict(zip(islice(names, length), own, strict=True))
        yield from self._others
        yield from ((DICTIONARY, each, {}) for each in self._empty)

    def is_current(self) -> bool:
        """Whether nothing has changed."""
        return self.has_same_contents() and not self.changed_values()

    def has_same_contents(self) -> bool:
        """Whether all containers have the same names and values, in the same order."""
        lengths, names, values = self._flat()
        return (
            not any(self._empty)
            and lengths == self._lengths
            and names == self._names
            and identities(values) == self._identities
            and not any(kind.changes(thing, content) for kind, thing, content in self._others)
        )

    def changed_names(self) -> list[str]:
        """Names of changed values in containers."""
        if self.has_same_contents():
            return []
        return [str(name) for kind, thing, content in self._contents() for name in kind.changes(thing, content)]

    def changed_values(self) -> list[str]:
        """Descriptions of changes besides the content of containers."""
        found = []
        if self._flags and any(tensor.requires_grad is not flag for tensor, flag in self._flags):
            found.append("whether a parameter requires grad")
        if self._arrays and any(array.tobytes() != content.tobytes() for array, content in self._arrays):
            found.append("an array")
        if self._memory and self._with_other_memory():
            found.append("the memory of a parameter or buffer")
        if self._generators and any(generator.get() != state for generator, state in self._generators):
            found.append("the state of a Python or NumPy random generator")
        return found

    def _with_other_memory(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors whose ``.data`` got other memory, or another shape, strides or type."""
        with disable_dispatch():
            return [
                (a, b)
                for a, b in self._memory
                # Other devices need not have that operator.
                if a.dtype is not b.dtype or not (a.is_set_to(b) if a.is_cpu or a.is_cuda else _are_set_alike(a, b))
            ]

    def put_back(self) -> None:
        """Set everything to this content."""
        if self.is_current():
            return
        if not self.has_same_contents():
            for kind, thing, content in self._contents():
                kind.put_back(thing, content)
        for tensor, flag in self._flags:
            if tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                array[...] = content
        for each, alias in self._with_other_memory():
            # FSDP frees the memory of a parameter: there is none to put back.
            if alias.untyped_storage().nbytes():
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


def _are_set_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, shape and strides."""
    same = a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
