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

Each call takes a copy of its own, in one walk. The copy lives as long as the call's graph, and holds all that the
function had. Nothing is held between calls.

NOTE [ Parts of a state ]

Layers of a model share the classes of their modules, and objects such as a configuration. The copy of each is a part,
which calls share. A part is held by the copies that have it. A later call compares a living part with the current
state, which is faster than reading it again. If anything differs, the call makes a part of its own.
"""

from __future__ import annotations

import copy
import operator
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from spillway._torch import disable_dispatch, disable_function
from spillway.checkpointing.python_containers import ATTRIBUTES, DICTIONARY, MODULE, PARAMETERS, global_generators
from spillway.checkpointing.python_walk import Contents, Entry, Walk, layout_of

if TYPE_CHECKING:
    from typing import Self

_WITH_HISTORIES = (ATTRIBUTES, MODULE, DICTIONARY)


class _Copy(Walk):
    """A copy of Python state, which can be compared with the current state."""

    def __init__(self, roots: Iterable[Any], entries: Iterable[Entry] = ()) -> None:
        super().__init__(roots, entries)
        self._parts: list[_Copy] = []
        # Lengths, names and values of owners and dictionaries, made when they are first compared.
        self._flat: tuple[list[int], list[Any], list[Any]] | None = None
        with disable_function(), disable_dispatch():
            self._flags = [(each, each.requires_grad) for each in self._parameters]
            each_with_memory = (*self._parameters, *self._buffers)
            self._memory = [(each, each.data) for each in each_with_memory if each.layout is torch.strided]
        del self._parameters, self._buffers

    def again(self) -> Self:
        """A copy of the current content of the same containers."""
        other = copy.copy(self)
        other._parts = [part.again() for part in self._parts]
        layouts = [(module, layout_of(tuple(module.__dict__))) for module, *_ in self._modules]
        other._modules = [(module, layout, layout.get(module.__dict__)) for module, layout in layouts]
        other._owners, other._others = _copies(self._owners), _copies(self._others)
        other._dictionaries = _copies([*self._dictionaries, *((DICTIONARY, each, {}) for each in self._empty)])
        other._empty, other._flat = [], None
        with disable_function(), disable_dispatch():
            other._flags = [(tensor, tensor.requires_grad) for tensor, _ in self._flags]
            other._memory = [(tensor, tensor.data) for tensor, _ in self._memory]
        other._arrays = [(array, array.copy()) for array, _ in self._arrays]
        other._generators = [(generator, generator.get()) for generator, _ in self._generators]
        return other

    def _contents(self) -> Contents:
        empty: Contents = [(DICTIONARY, each, {}) for each in self._empty]
        modules = [(module, dict(zip(layout.names, values, strict=True))) for module, layout, values in self._modules]
        own = [*[(MODULE, *each) for each in modules], *self._owners, *self._dictionaries, *self._others, *empty]
        return [*own, *chain.from_iterable([part._contents() for part in self._parts])]

    @property
    def changes(self) -> bool:
        """Whether the state has changed."""
        return not self._has_same_contents() or bool(self._changed_values())

    def _has_same_contents(self) -> bool:
        """Whether all containers have the same names and values, in the same order."""
        if self._flat is None:
            self._flat = _flattened([content for *_, content in (*self._owners, *self._dictionaries)])
        lengths, names, values = self._flat
        now = [thing.__dict__ for _, thing, _ in self._owners] + [thing for _, thing, _ in self._dictionaries]
        return (
            all(part._has_same_contents() for part in self._parts)
            and not any(self._empty)
            and self._has_same_modules()
            and [*map(len, now)] == lengths
            # Names are strings: equal ones are the same.
            and [*chain.from_iterable(now)] == names
            and all(map(operator.is_, chain.from_iterable([each.values() for each in now]), values))
            and not any(kind.changes(thing, content) for kind, thing, content in self._others)
        )

    def _has_same_modules(self) -> bool:
        for module, layout, values in self._modules:
            attributes = module.__dict__
            # With other names, there may be none of these.
            if tuple(attributes) != layout.all_names or not all(map(operator.is_, layout.get(attributes), values)):
                return False
        return True

    def _with_other_memory(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors whose ``.data`` got other memory, or another shape, strides or type."""
        with disable_dispatch():
            return [
                (a, b)
                for a, b in self._memory
                # Other devices need not have that operator.
                if a.dtype is not b.dtype or not (a.is_set_to(b) if a.is_cpu or a.is_cuda else _are_set_alike(a, b))
            ]

    def changed(self) -> list[str]:
        """Names of the state that has changed."""
        names: list[str] = []
        if not self._has_same_contents():
            for kind, thing, content in self._contents():
                names += map(str, kind.changes(thing, content))
        return names + self._changed_values()

    def _changed_values(self) -> list[str]:
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


class PythonState(_Copy):
    """A copy of a function's current Python state. See NOTE [ Python state ].

    Args:
        function: the function, method or module.
        objects: objects among its arguments: generators, modules and others whose state it may change.
    """

    def __init__(self, function: Any, objects: Sequence[Any] = ()) -> None:
        super().__init__((*_roots_of(function), *objects))
        self._generators += [(each, each.get()) for each in global_generators()]
        # Function modes must not see this.
        with disable_function():
            if self._classes:
                self._add(_parts.of(tuple(map(id, self._classes)), self._classes))
            for each in self._objects:
                self._add(_parts.of((id(each[0]), id(type(each[0])), each[2]), (), [each]))
        del self._classes, self._objects

    def _add(self, part: _Copy) -> None:
        self._parts.append(part)
        self.has_iterators |= part.has_iterators
        self.is_lazy |= part.is_lazy
        self.writes_parameters |= part.writes_parameters
        self._fixed += part._fixed
        self._tensors += part._tensors
        self._of_buffers += part._of_buffers
        self._flags += part._flags
        self._memory += part._memory
        self._arrays += part._arrays
        self._generators += part._generators

    # Tensors that the function reads.

    def reachable(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors and plain parameters that the function can reach, each once, with its name.

        Inference tensors are left out: they have no versions. The names are the same in every call, and not unique.
        """
        found = {id(pair[1]): pair for pair in reversed(self._tensors)}
        return [pair for pair in reversed(found.values()) if not pair[1].is_inference()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that the copy holds. Parameters of modules are left out: a replay finds them in the modules."""
        contents = [content for kind, _, content in self._contents() if kind is not PARAMETERS]
        for values in (*[each.values() if type(each) is dict else each for each in contents], *self._fixed):
            yield from (value for value in values if isinstance(value, torch.Tensor))

    def sole_buffers(self) -> set[int]:
        """Ids of buffers that only modules have, and that have kept their memory."""
        counts = Counter(id(tensor) for _, tensor in self._tensors)
        found = [buffer for each in self._of_buffers for buffer in each.values() if buffer is not None]
        counts.subtract(map(id, found))
        elsewhere = {id(buffer) for buffer, _ in self._with_other_memory()}
        return {id(buffer) for buffer in found if not counts[id(buffer)]} - elsewhere

    @contextmanager
    def swapped(self, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """A context in which modules have other buffers.

        Args:
            others: these, by the ids of the buffers that they stand for.
        """
        undo = []
        if others:
            for buffers in self._of_buffers:
                for name, buffer in buffers.items():
                    other = others.get(id(buffer))
                    if other is not None:
                        undo.append((buffers, name, buffer, other))
                        buffers[name] = other
        try:
            yield
        finally:
            for buffers, name, buffer, other in undo:
                if buffers.get(name) is other:
                    buffers[name] = buffer

    def replaceable(self) -> set[int]:
        """Ids of tensors that lie only in containers in which they can be replaced."""
        fixed = {id(value) for values in self._fixed for value in values}
        fixed.update(id(value) for _, thing, content in self._contents() if isinstance(thing, set) for value in content)
        return {id(tensor) for _, tensor in self._tensors} - fixed

    @contextmanager
    def replaced(self, others: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """A context in which containers have other tensors.

        Args:
            others: these, by the ids of the tensors that they stand for.
        """
        undo: list[tuple[Callable[[Any, Any, Any], object], Any, Any, Any]] = []
        for kind, thing, content in self._contents() if others else ():
            for name, value in content.items() if type(content) is dict else enumerate(content):
                if id(value) in others and isinstance(value, torch.Tensor):
                    put = kind.put if type(content) is dict else operator.setitem
                    put(thing, name, others[id(value)])
                    undo.append((put, thing, name, value))
        try:
            yield
        finally:
            for put, thing, name, value in undo:
                put(thing, name, value)

    # Comparing and putting back.

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context with the copied state. Afterwards the state from before the context is put back."""
        # Function modes must not see this.
        with disable_function():
            is_current = not self.changes
            before = self if is_current else self.again()
            if not is_current:
                self._put_back()
        try:
            yield
        finally:
            with disable_function():
                before._put_back()

    def histories(self) -> dict[str, torch.Tensor]:
        """Former tensors, by name, of attributes that now have a tensor that requires grad."""
        return {
            str(name): content[name]
            for kind, thing, content in self._contents()
            if kind in _WITH_HISTORIES
            for name in kind.changes(thing, content)
            if isinstance(content.get(name), torch.Tensor) and getattr(kind.value(thing, name), "requires_grad", False)
        }

    def made(self) -> list[str]:
        """Names of new attributes that are parameters, or other leaves that require grad."""
        return [
            str(name)
            for kind, thing, content in ([] if self._has_same_contents() else self._contents())
            if isinstance(content, dict)
            for name in kind.changes(thing, content)
            if content.get(name) is None and _is_trained(kind.value(thing, name))
        ]

    def _put_back(self) -> None:
        if not self._has_same_contents():
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


class _Parts:
    """Living parts of states. See NOTE [ Parts of a state ]."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], weakref.ref[_Copy]] = {}

    def of(self, key: tuple[int, ...], classes: Sequence[type], objects: Sequence[Entry] = ()) -> _Copy:
        """The part of some classes, or of an object, by their identities."""
        reference = self._known.get(key)
        part = None if reference is None else reference()
        if part is None or part.changes:
            part = _Copy((), [*((each, "class", 0, True) for each in classes), *objects])
            self._known[key] = weakref.ref(part, partial(self._forget, key))
        return part

    def _forget(self, key: tuple[int, ...], reference: weakref.ref[_Copy]) -> None:
        if self._known.get(key) is reference:
            del self._known[key]


_parts = _Parts()


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _roots_of(function: Any) -> list[Any]:
    """The function, or the module that it belongs to, with the function of a method."""
    # Modules search long for attributes that they do not have.
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    if not isinstance(owner, Module):
        return [function]
    return [owner, function.__func__] if isinstance(function, types.MethodType) else [owner]


def _flattened(contents: Sequence[dict[str, Any]]) -> tuple[list[int], list[Any], list[Any]]:
    """Lengths, names and values of several dictionaries, one after the other."""
    values = chain.from_iterable([each.values() for each in contents])
    return [*map(len, contents)], [*chain.from_iterable(contents)], [*values]


def _copies(contents: Contents) -> Contents:
    return [(kind, thing, kind.copy(thing, content)) for kind, thing, content in contents]


def _are_set_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, shape and strides."""
    same = a.untyped_storage() is b.untyped_storage() and a.storage_offset() == b.storage_offset()
    return same and a.shape == b.shape and a.stride() == b.stride()
