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

An iterator, or a file, cannot be copied. A function that has one is not recomputed: :attr:`Places.has_iterators`.
Neither is one with a layer that makes its parameters in this call (:attr:`Places.is_lazy`), or that writes them
(:attr:`Places.writes_parameters`).

Other state (C extensions) is not seen. There the checks of the replay decide: equal values,
or a :class:`~spillway.errors.RecomputeError`.
"""

from __future__ import annotations

import operator
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from spillway.errors import UnsupportedError
from spillway.regions.containers import MISSING, Attributes, Container, Dictionary
from spillway.regions.python_generators import Generator, generator_of, global_generators
from spillway.regions.python_places import Places

_MOST_BYTES = 1 << 16
"""Bytes of an array that is copied."""
_TRIES = 8
"""How often a state is read that another thread changes meanwhile."""

Contents = list[tuple[Container, Any, Any]]
"""Containers: the kind, the object, and its content."""


class PythonState:
    """A copy of a function's Python state, taken now. See NOTE [ Python state ].

    Args:
        function: the function, method or module.
        objects: objects among its arguments: generators, modules and others whose state it may change.
        places: where the state lay in an earlier call; it is copied faster if it still lies there.
    """

    __slots__ = ("_arrays", "_contents", "_flags", "_generators", "_memory", "_roots", "_things", "_values", "places")

    def __init__(self, function: Any, objects: Sequence[Any] = (), places: Places | None = None) -> None:
        self._roots = [*_roots_of(function), *objects]
        taken = None if places is None else places.take(self._roots)
        tries = 0
        while taken is None:
            if tries == _TRIES:
                raise UnsupportedError(
                    f"The Python state of {function!r} changes while it is copied. Another thread may change it. Do "
                    f"not change attributes of a checkpointed function in another thread during its forward."
                )
            tries += 1
            places = Places(self._roots)
            taken = places.take(self._roots)
        assert places is not None
        self.places = places
        """Where the state lies, for the next call."""
        self._things, values = taken
        self._values: list[Any] | None = values
        """The values of all containers; ``None`` if they are not the content any more."""
        self._contents: Contents | None = None
        """Containers with their contents, made of the values where something has changed."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self._flags = [(each, each.requires_grad) for each in places.parameters(values)]
            self._memory = [(each, each.data) for each in places.memory(values) if each.layout is torch.strided]
        self._copy_others()

    @property
    def has_iterators(self) -> bool:
        """Whether the function has state that cannot be copied."""
        return self.places.has_iterators

    @property
    def is_lazy(self) -> bool:
        """Whether a module of the function makes its parameters or buffers when it is first called."""
        return self.places.is_lazy

    @property
    def writes_parameters(self) -> bool:
        """Whether the forward of a module writes its own parameters."""
        return self.places.writes_parameters

    def _copy_others(self) -> None:
        arrays = self.places.arrays(self._things)
        self._arrays = [(array, array.copy()) for array in arrays if array.nbytes <= _MOST_BYTES]
        own = [each for thing in self.places.generators(self._things) if (each := generator_of(thing)) is not None]
        self._generators: list[tuple[Generator, Any]] = [(each, each.get()) for each in (*global_generators(), *own)]

    def again(self) -> PythonState:
        """A copy of the same containers, taken now."""
        other = PythonState.__new__(PythonState)
        other.places, other._roots, other._things, other._values = self.places, self._roots, self._things, None
        other._contents = [(kind, thing, kind.copy(thing)) for kind, thing, _ in self._all_contents()]
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            other._flags = [(tensor, tensor.requires_grad) for tensor, _ in self._flags]
            other._memory = [(tensor, tensor.data) for tensor, _ in self._memory]
        other._copy_others()
        return other

    def _all_contents(self) -> Contents:
        if self._contents is None:
            values, self._contents = self._values, []
            assert values is not None
            for place, thing in zip(self.places.places, self._things, strict=True):
                if place.has_values:
                    part = values[place.start : place.start + place.count]
                    self._contents.append((place.kind, thing, place.kind.content(place.keys, part)))
        return self._contents

    # What the function reads.

    def reachable(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors and plain parameters that the function can reach, each once, with the name it is found under.

        Inference tensors are left out: they have no versions. The names are the same in every call, and not unique.
        """
        values = self._values
        assert values is not None
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for position, name, _ in self.places.tensors:
            tensor = values[position]
            found.setdefault(id(tensor), (name, tensor))
        return [pair for pair in found.values() if not pair[1].is_inference()]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Those that the copy holds, but for modules' parameters: a replay finds them where they were."""
        if self._values is not None:
            yield from (self._values[position] for position, _, is_own in self.places.tensors if not is_own)
            return
        for kind, _, content in self._all_contents():
            if not kind.is_parameters:
                values = content.values() if kind.has_names else content
                yield from (value for value in values if isinstance(value, torch.Tensor))

    def sole_buffers(self) -> set[int]:
        """Ids of buffers that nothing has but modules, each under one name or several, where they were before."""
        values = self._values
        if values is None:
            return set()
        counts = Counter(id(values[position]) for position, *_ in self.places.tensors)
        found = [buffer for each in self.places.buffers(self._things) for buffer in each.values() if buffer is not None]
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
            for buffers in self.places.buffers(self._things):
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

    # What is compared, and put back.

    @property
    def changes(self) -> bool:
        """Whether the state is another one now."""
        return next(self.changed(), None) is not None

    def changed_names(self) -> str:
        """Names of attributes, globals and generators that are not what they were, for messages."""
        names = list(dict.fromkeys(self.changed()))
        return ", ".join(names[:4]) + (" and more" if len(names) > 4 else "")

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context that begins with the copied state, and ends with the state from before the context."""
        # Nothing of this is the function's own: no mode is to see it.
        with torch._C.DisableTorchFunction():
            is_current = not self.changes
            before = self if is_current else self.again()
            if not is_current:
                self._put_back()
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction():
                before._put_back()

    def histories(self) -> list[str]:
        """Names of attributes that had a tensor which the function read, and now have one that needs gradients."""
        return [
            name
            for kind, thing, content in self._all_contents()
            if isinstance(kind, (Attributes, Dictionary)) and kind.is_plain
            for name in kind.changes(thing, content)
            if _is_read_tensor(content.get(name)) and getattr(kind.open(thing).get(name), "requires_grad", False)
        ]

    def release(self, is_read: Callable[[torch.Tensor], bool]) -> None:
        """Hold no longer a tensor that was replaced in the first run, and whose bytes were never read.

        It may be of an earlier step. A stand-in takes its place, since the function may have asked for its shape.
        """
        for kind, thing, content in self._all_contents():
            if isinstance(kind, (Attributes, Dictionary)) and kind.is_plain:
                now = kind.open(thing)
                for name, value in content.items():
                    # A subclass may say more of itself than a stand-in does.
                    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
                    if is_plain and now.get(name, MISSING) is not value and not is_read(value):
                        content[name] = _stand_in(value)
                        self._values = None

    def _has_same_values(self) -> bool:
        """Whether all containers have the values that they had."""
        if self._values is None:
            return False
        now = self.places.read(self._roots, self._things)
        return now is not None and all(map(operator.is_, now, self._values))

    def _with_other_memory(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors whose ``.data`` was given other memory, or the same with another shape, strides or type."""
        with torch._C._DisableTorchDispatch():
            return [(a, b) for a, b in self._memory if not (a.dtype is b.dtype and _are_set_alike(a, b))]

    def changed(self) -> Iterator[str]:
        """Names of what is not what it was."""
        if not self._has_same_values():
            for kind, thing, content in self._all_contents():
                yield from kind.changes(thing, content)
        if any(tensor.requires_grad is not flag for tensor, flag in self._flags):
            yield "whether a parameter requires grad"
        if any(array.tobytes() != content.tobytes() for array, content in self._arrays):
            yield "an array"
        if self._with_other_memory():
            yield "the memory of a parameter or buffer"
        if any(generator.get() != state for generator, state in self._generators):
            yield "the state of a Python or NumPy random generator"

    def _put_back(self) -> None:
        if not self._has_same_values():
            for kind, thing, content in self._all_contents():
                kind.put_back(thing, content)
        for tensor, flag in self._flags:
            if tensor.requires_grad is not flag:
                tensor.requires_grad_(flag)
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                array[...] = content
        for tensor, alias in self._with_other_memory():
            # FSDP takes the memory of a parameter: there is none to put back.
            if alias.untyped_storage().nbytes():
                tensor.data = alias
        for generator, state in self._generators:
            if generator.get() != state:
                generator.put(state)


def _roots_of(function: Any) -> list[Any]:
    """The function, or the module that it belongs to; of a method, the function as well."""
    # A module looks for other attributes than its own for long.
    owner = function if isinstance(function, Module) else getattr(function, "__self__", None)
    if not isinstance(owner, Module):
        return [function]
    return [owner, function.__func__] if isinstance(function, types.MethodType) else [owner]


def _are_set_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same memory, shape and strides."""
    if a.is_cpu or a.is_cuda:
        return a.is_set_to(b)
    # Other devices need not have that operator, which takes a third of the time.
    return (
        a.untyped_storage() is b.untyped_storage()
        and a.stride() == b.stride()
        and a.shape == b.shape
        and a.storage_offset() == b.storage_offset()
    )


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, type and device, with the memory of one element."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        stand_in = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        stand_in.__dict__["_is_stand_in"] = True
        return stand_in


def _is_read_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not hasattr(value, "_is_stand_in")
