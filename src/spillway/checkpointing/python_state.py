"""The Python state that a recomputed function reads and changes: attributes, containers, closures, random generators.

NOTE [ Python state ]

A recomputed function runs more often than in plain training. Its Python state must not show that. So
:class:`PythonState` takes a shallow copy before the first run. Each replay starts from that copy. After the replay,
the state from before the replay is put back.

``docs/replays.md`` lists what is copied, and which functions are not recomputed (:meth:`PythonState.why_kept`).
Attributes, buffers, submodules, parameters and forward hooks of modules are copied by identity, and so is the memory of
parameters and buffers. Parameters that FSDP exchanges are left out, and attributes of tensors that the function's code
does not name: wrappers count there. A hook or an attribute that came after forward began is taken away for the replay.
Objects and hooks of torch's own are never opened: they hold the state of streams, process groups and wrappers. State
that is not seen (of C extensions) is left to the checks of the replay: equal values, or a
:class:`~spillway.errors.RecomputeError`.

Each call has a copy, which lives as long as the call's graph, and holds all that the function had. The names and values
of all containers are one sequence, whose identities are compared at once: values need not have a truth value. Only if
they differ, containers are compared one by one.

NOTE [ States that stay the same ]

Mostly a block's state is the same in each step, and comparing it takes less time than finding it again. So a
:class:`LatestState` keeps what the walk found. The block's next call compares all contents, and all else that the walk
went by (:meth:`Walk.frame`). If anything differs, or if a module has hooks around its forward, the call walks.

The block owns its :class:`LatestState`. It is emptied when the block's module dies or is detached, and by a call in
training that does not use it. It keeps no state that leads back to that module, that has hooks around a forward, or
that has tensors besides parameters and buffers. One of these that the user replaces is held until the block's next
call.

NOTE [ Parts of a state ]

Layers of a model share the classes of their modules, and objects such as a configuration. The copy of all classes is a
part, and so is that of each object. Calls share parts, and hold them. A later call compares a living part with the
current content and frame, which is faster than reading it again. If anything differs, the call makes a part of its own.
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import chain, islice, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch.nn import Module

from spillway._torch import PARAMETRIZED, caches_parametrized, disable_function, hooks_of, next_hook
from spillway.checkpointing.identities import have_same_items
from spillway.checkpointing.python_generators import global_generators
from spillway.checkpointing.python_walk import (
    MISSING,
    OF_BLOCK,
    OF_TORCH,
    Walk,
    are_plain,
    value_of_cell,
    values_of_slots,
)
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided
from spillway.saved_tensors.identity import is_streamed

_values_of, _requires_grad, _data_of = methodcaller("values"), attrgetter("requires_grad"), attrgetter("data")
_is_leaf = attrgetter("is_leaf")
# Without an object's own ``__getattribute__``.
_attribute_of, _DICT = object.__getattribute__, repeat("__dict__")


class PythonState:
    """A function's Python state, and a copy of its content. See NOTE [ Python state ].

    ``objects`` are those among its arguments.
    """

    def __init__(self, function: Any, objects: Sequence[Any] = (), latest: LatestState | None = None) -> None:
        # Function modes must not see this.
        self._first_hook = next_hook()
        roots = _roots_of(function)
        self._module = roots[0] if isinstance(roots[0], Module) else None
        if latest is not None and objects:
            latest.forget()
            latest = None
        with disable_function():
            self._kept = None if latest is None else latest.of_now(self._module)
            if self._kept is not None:
                self._copies = [_Copy(self._kept.walk, self._kept.content)]
            else:
                walk = Walk((*roots, *objects), [PARAMETRIZED] if caches_parametrized() else ())
                walk.generators = [*walk.generators, *global_generators()]
                shared = [*walk.found_classes], *([each] for each in walk.found_objects)
                self._copies = [_Copy(walk), *[_part_of(each) for each in shared if each]]
                if latest is not None:
                    self._kept = latest.found(self._module, self._copies)
            tensors = chain.from_iterable([each.walk.tensors for each in self._copies])
            self._spaces = [each.__dict__ for each in tensors if type(each) in PLAIN]
            """Attributes of all plain tensors."""
            self._names = self._names_in_use()
            if self._names:
                names = tuple(self._names)
                self._copies = [*self._copies, _Copy(Walk((), [(each, names) for each in self._spaces]))]

    def _names_in_use(self) -> set[str]:
        """Names of attributes of tensors that the function's code has. Wrappers and optimizers have others there."""
        if not any(self._spaces):
            return set()
        code = [*chain.from_iterable([each.walk.code for each in self._copies])]
        # A gradient's buffer is written in backward.
        names = set().union(*self._spaces)
        return {name for name in names if "grad" not in name and any(name in each for each in code)}

    def why_kept(self) -> str | None:
        """Why the function cannot be replayed, if it cannot."""
        return next((why for each in self._copies if (why := each.walk.why_kept) is not None), None)

    def reachable(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors and plain parameters that the function can reach, each once, with its name.

        Inference tensors are left out: they have no versions. The names are the same in every call, and not unique.
        """
        if self._kept is not None and self._kept.reachable is not None and not self._names:
            return self._kept.reachable
        walks = [each.walk for each in self._copies]
        named = [*chain.from_iterable([zip(each.tensor_names, each.tensors, strict=True) for each in walks])]
        found = {id(pair[1]): pair for pair in reversed(named)}
        reachable = [pair for pair in reversed(found.values()) if not pair[1].is_inference()]
        if self._kept is not None and not self._names:
            self._kept.reachable = reachable
        return reachable

    def modules(self) -> list[Module]:
        """The modules that the function can reach."""
        own = [] if self._module is None else [self._module]
        return [*own, *chain.from_iterable([each.walk.modules for each in self._copies])]

    def forward_ended(self) -> None:
        """Let go of the states of generators that forward did not advance: its replay needs none of them.

        To set and restore them would rewind what other threads draw meanwhile.
        """
        for each in self._copies:
            each.let_go_of_unused_generators()

    def has_drawn(self) -> bool:
        """Whether a generator of Python or NumPy is in another state."""
        return any(each.has_drawn() for each in self._copies)

    @property
    def changes(self) -> bool:
        return not all(each.is_current() for each in self._copies)

    def changed(self) -> list[str]:
        return [*chain.from_iterable([each.changed() for each in self._copies])]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context with the copied state. Afterwards the state from before the context is put back.

        It is compared also if forward left it as it was: a replay that ends early does not come to the code that puts a
        change back, and a change by forward may be gone.
        """
        # Function modes must not see this.
        with disable_function():
            put_back: list[Callable[[], None]] = []
            for each in self._copies:
                if not each.is_current():
                    put_back.append(each.taken_now())
                    each.put_back()
                else:
                    put_back.append(each.put_back)
            hidden = self._hide_hooks() if next_hook() != self._first_hook else []
            if new := self._names_in_use() - self._names:
                hidden += [_hide(each, new.intersection(each)) for each in self._spaces]
        try:
            yield
        finally:
            for space, now in reversed(hidden):
                space.clear()
                space.update(now)
            with disable_function():
                # Two copies may share an object. The first one has seen its present content.
                for function in reversed(put_back):
                    function()

    def _hide_hooks(self) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Take hooks from modules that got them since forward began."""
        spaces = chain.from_iterable(map(hooks_of, self.modules()))
        return [_hide(each, [number for number in each if number >= self._first_hook]) for each in spaces if each]


def _hide(space: dict[Any, Any], names: Iterable[Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Delete names from a namespace. Returns it with its present content."""
    now = dict(space)
    for name in names:
        del space[name]
    return space, now


class _Copy:
    """The content of all that a walk found, at that time."""

    def __init__(self, walk: Walk, content: _Content | None = None) -> None:
        self.walk = walk
        self.content = _content_of(walk) if content is None else content
        self._rest = _Rest(walk)

    def is_current(self) -> bool:
        return _is_content_of(self.content, self.walk) and not self._rest.changes()

    def changed(self) -> list[str]:
        """Names of what has changed."""
        copies = () if _is_content_of(self.content, self.walk) else self._contents()
        return [*(str(name) for each, then in copies for name in each.changes(then)), *self._rest.changes()]

    def put_back(self) -> None:
        if not self.is_current():
            _put_back(self._contents(), self._rest)

    def taken_now(self) -> Callable[[], None]:
        """A function that puts the present content back."""
        return partial(_put_back, [(each, each.content()) for each in _containers_of(self.walk)], _Rest(self.walk))

    def has_drawn(self) -> bool:
        return any(each.get() != state for each, state in self._rest.generators)

    def let_go_of_unused_generators(self) -> None:
        self._rest.generators = [(each, state) for each, state in self._rest.generators if each.get() != state]

    def _contents(self) -> Iterator[tuple[_Container, Any]]:
        lengths, names, values = self.content
        all_names, all_values, count = iter(names), iter(values), len(self.walk.attributes)
        for each, length in zip(_containers_of(self.walk), lengths[count:], strict=True):
            if isinstance(each, _Items):
                yield each, [*islice(all_values, length)]
            else:
                own = islice(all_names, length) if each.names is None else each.names
                yield each, dict(zip(own, all_values, strict=False))


def _put_back(contents: Iterable[tuple[_Container, Any]], rest: _Rest) -> None:
    for each, then in contents:
        each.put_back(then)
    rest.put_back()


class _Kept:
    """The finds of a walk, with the contents at that time. See NOTE [ States that stay the same ]."""

    def __init__(self, module: Module, walks: Sequence[Walk]) -> None:
        self.walk = Walk.joined(walks)
        self.content = _content_of(self.walk)
        self.reachable: list[tuple[str, torch.Tensor]] | None = None
        """That of :meth:`PythonState.reachable`, if it was asked for."""
        self._kind = type(module)
        self._frame = self.walk.frame()
        self._generators = global_generators()

    def is_of_now(self, module: Module) -> bool:
        """Whether another walk would find the same."""
        return (
            type(module) is self._kind
            and module.__dict__ is self.walk.attributes[0]
            and not any(self.walk.hooks)
            and global_generators() == self._generators
            and _is_content_of(self.content, self.walk)
            and have_same_items(self.walk.frame(), self._frame)
        )


_MOST_MISSES = 16
"""States in a row that were not the latest one: then a block's states are no longer kept."""


class LatestState:
    """A block's latest state. See NOTE [ States that stay the same ]."""

    def __init__(self) -> None:
        self._kept: _Kept | None = None
        self._misses = 0

    def of_now(self, module: Module | None) -> _Kept | None:
        """The state that is kept, if the block's state is the same."""
        kept = self._kept
        if kept is None or module is None or caches_parametrized():
            return None
        if kept.is_of_now(module):
            self._misses = 0
            return kept
        self._kept = None
        self._misses += 1
        return None

    def found(self, module: Module | None, copies: Sequence[_Copy]) -> _Kept | None:
        """Keep a state, if that is possible."""
        walks = [each.walk for each in copies]
        if module is None or self._misses >= _MOST_MISSES:
            return None
        if not all(each.is_repeatable and each.why_kept is None for each in walks):
            return None
        # A part may lead back to the module. Other tensors may be dropped, and those with a history hold graphs.
        if any(each.has_other_tensors for each in walks) or any(each.modules for each in walks[1:]):
            return None
        # These are read in each call.
        if any(walks[0].hooks):
            return None
        self._kept = _Kept(module, walks) if all(map(_is_leaf, walks[0].tensors)) else None
        return self._kept

    def forget(self, module: object = None) -> None:
        """Hold nothing, since the module has died or is detached, or a call does not use it."""
        self._kept = None


class _Part(_Copy):
    """See NOTE [ Parts of a state ]."""

    def __init__(self, shared: Sequence[Any]) -> None:
        super().__init__(Walk(shared, opens=True))
        self._frame = self._frame_now()

    def is_of_now(self) -> bool:
        return self.is_current() and have_same_items(self._frame_now(), self._frame)

    def _frame_now(self) -> tuple[Any, ...]:
        return self.walk.frame() if self.walk.is_repeatable else ()


_parts: weakref.WeakValueDictionary[tuple[int, ...], _Part] = weakref.WeakValueDictionary()
"""Living parts, by the identities of their classes or objects."""


def _part_of(shared: Sequence[Any]) -> _Copy:
    """See NOTE [ Parts of a state ]."""
    key = (*map(id, shared), *map(id, map(type, shared)))
    part = _parts.get(key)
    if part is None or not part.is_of_now():
        part = _parts[key] = _Part(shared)
    return part


_Content = tuple[list[int], tuple[Any, ...], tuple[Any, ...]]
"""The content of all containers of a walk, one after the other: numbers of all attributes of each module, then of the
values of each container; names in containers other than those whose names the walk has; and values."""


def _content_of(walk: Walk) -> _Content:
    modules = walk.attributes_now()
    maps = [*map(_attribute_of, walk.owners, _DICT), *walk.maps]
    parts: list[Any] = [get(own) for get, own in zip(walk.getters, modules, strict=True)]
    parts += [
        *map(_values_of, maps),
        *walk.items,
        *[[*map(now.get, names, repeat(MISSING))] for now, names in walk.globals],
        *[values_of_slots(*each) for each in walk.slots],
        *[(value_of_cell(cell),) for _, cell in walk.cells],
    ]
    lengths = [*map(len, modules), *map(len, parts), *map(len, walk.empty)]
    return lengths, tuple(chain(*maps)), tuple(chain(*parts))


def _is_content_of(content: _Content, walk: Walk) -> bool:
    """Whether all containers have the same names and values, in the same order."""
    try:
        now_lengths, now_names, now_values = _content_of(walk)
    except KeyError:
        # A module has lost an attribute.
        return False
    lengths, names, values = content
    return now_lengths == lengths and have_same_items(now_values, values) and have_same_items(now_names, names)


class _Container:
    """A container whose values have names."""

    def __init__(
        self,
        content: Callable[[], Any],
        put: Callable[[Any, Any], object],
        delete: Callable[[Any], object],
        names: Sequence[str] | None = None,
        is_left_out: Callable[[Any], bool] = lambda name: False,
    ) -> None:
        self.content = content
        """Returns a copy of the current content."""
        self.names = names
        """The names that are state; ``None``: all."""
        self._put, self._delete, self._is_left_out = put, delete, is_left_out

    def changes(self, then: Any) -> list[Any]:
        """Names of values that differ from an earlier content."""
        now = self.content()
        names = [name for name in {**then, **now} if now.get(name, MISSING) is not then.get(name, MISSING)]
        return [name for name in names if not self._is_left_out(name)]

    def put_back(self, then: Any) -> None:
        for name in _Container.changes(self, then):
            if then.get(name, MISSING) is MISSING:
                self._delete(name)
            else:
                self._put(name, then[name])


class _Dictionary(_Container):
    """A dictionary: its order is a part of the content."""

    def __init__(self, thing: Any) -> None:
        super().__init__(lambda: dict(thing.items()), thing.__setitem__, thing.__delitem__)
        self._thing = thing

    def changes(self, then: Any) -> list[Any]:
        return super().changes(then) or ([] if _are_identical(self._thing, then) else ["the order of a dictionary"])

    def put_back(self, then: Any) -> None:
        if not _are_identical(self._thing, then):
            self._thing.clear()
        super().put_back(then)


class _Parameters(_Dictionary):
    """A module's parameters. Parameters that a wrapper (FSDP2) has exchanged are left out."""

    def changes(self, then: Any) -> list[Any]:
        return super().changes(then) if are_plain(self._thing.values()) else []

    def put_back(self, then: Any) -> None:
        if are_plain(self._thing.values()):
            super().put_back(then)


class _Items(_Container):
    """A list, a deque, an array of bytes, or a set: values have no names."""

    def __init__(self, thing: Any) -> None:
        self._thing, self.content, self.names = thing, lambda: [*thing], ()

    def changes(self, then: Any) -> list[Any]:
        return [] if _are_identical(self._thing, then) else [f"a {type(self._thing).__name__}"]

    def put_back(self, then: Any) -> None:
        if not _are_identical(self._thing, then):
            if isinstance(self._thing, (list, bytearray)):
                # Not cleared before: a view forbids that.
                self._thing[:] = then
            else:
                self._thing.clear()
                (self._thing.update if isinstance(self._thing, set) else self._thing.extend)(then)


def _are_identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _containers_of(walk: Walk) -> Iterator[_Container]:
    """All containers, in the order of their contents."""
    for place, (attributes, names) in enumerate(zip(walk.attributes_now(), walk.names, strict=True)):
        left_out = OF_BLOCK if place == 0 and walk.has_own_module else OF_TORCH
        yield _attributes(attributes, names, left_out.__contains__)
    for each in walk.owners:
        yield _attributes(_attribute_of(each, "__dict__"))
    yield from map(_Dictionary, (*walk.dictionaries, *walk.own_buffers))
    yield from map(_Parameters, walk.own_parameters)
    yield from map(_class, walk.classes)
    yield from map(_Items, walk.items)
    yield from itertools.starmap(_globals, walk.globals)
    yield from itertools.starmap(_slots, walk.slots)
    yield from itertools.starmap(_cell, walk.cells)
    yield from map(_Dictionary, walk.empty)


# Attributes are not set by setattr(), which an object may override.


def _attributes(own: dict[str, Any], *more: Any) -> _Container:
    return _Container(own.copy, own.__setitem__, own.__delitem__, *more)


def _class(kind: type) -> _Container:
    is_special = operator.methodcaller("startswith", "__")
    return _Container(lambda: dict(vars(kind)), partial(setattr, kind), partial(delattr, kind), None, is_special)


def _globals(now: dict[str, Any], names: Sequence[str]) -> _Container:
    return _Container(lambda: {name: now.get(name, MISSING) for name in names}, now.__setitem__, now.__delitem__, names)


def _slots(thing: Any, names: Sequence[str]) -> _Container:
    put, delete = partial(object.__setattr__, thing), partial(object.__delattr__, thing)
    return _Container(lambda: dict(zip(names, values_of_slots(thing, names), strict=True)), put, delete, names)


def _cell(name: str, cell: types.CellType) -> _Container:
    def put(_: str, value: Any) -> None:
        cell.cell_contents = value

    def delete(_: str) -> None:
        del cell.cell_contents

    return _Container(lambda: {name: value_of_cell(cell)}, put, delete, (name,))


class _Rest:
    """State besides the contents of containers, at one time."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        with below_modes():
            self._flags = [*map(_requires_grad, walk.tensors)]
            holders = [each for each in (*walk.parameters, *walk.buffers) if is_strided(each)]
            # A streamed parameter has other memory in each use.
            self._holders = [each for each in holders if not is_streamed(each)]
            self._aliases = [*map(_data_of, self._holders)]
        self._arrays = [(array, copy(array)) for array in walk.arrays]
        self.generators = [(generator, generator.get()) for generator in walk.generators]
        self._is_empty = not (self._flags or self._holders or self._arrays or self.generators)

    def changes(self) -> list[str]:
        found: list[str] = []
        if self._is_empty:
            return found
        if self._flipped():
            found.append("whether a tensor requires grad")
        if any(array.tobytes() != content.tobytes() for array, content in self._arrays):
            found.append("an array")
        with below_modes():
            # The ``.data`` of one got other memory, or another shape, strides or type.
            if not all(map(_is_set_to, self._holders, self._aliases)):
                found.append("the memory of a parameter or buffer")
        if any(generator.get() != state for generator, state in self.generators):
            found.append("the state of a Python or NumPy random generator")
        return found

    def _flipped(self) -> list[tuple[torch.Tensor, bool]]:
        """Leaves that require grad now and did not, or the other way round, with their flags then."""
        tensors, flags = self._walk.tensors, self._flags
        if [*map(_requires_grad, tensors)] == flags:
            return []
        return [
            pair
            for pair in zip(tensors, flags, strict=True)
            if pair[0].requires_grad is not pair[1] and pair[0].is_leaf
        ]

    def put_back(self) -> None:
        for tensor, flag in self._flipped():
            tensor.requires_grad_(flag)
        for array, content in self._arrays:
            # Not a read-only one, which has not changed.
            if array.tobytes() != content.tobytes():
                array[... if hasattr(array, "shape") else slice(None)] = content
        with below_modes():
            for each, alias in zip(self._holders, self._aliases, strict=True):
                # FSDP frees the memory of a parameter: there is none to put back.
                if not _is_set_to(each, alias) and alias.untyped_storage().nbytes():
                    each.data = alias
        for generator, state in self.generators:
            if generator.get() != state:
                generator.put(state)


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
