"""Containers of Python state and random generators of Python: how each is read, compared and put back.

The content of a container is a copy: a dictionary if its values have names, else a list. Values are compared by
identity, since comparing tensors or arrays gives no truth value.

NOTE [ Raw states ]

Every recomputed call reads the states of both global generators. The public functions take 7 us (Python) and 30 us
(NumPy). So the memory of both generators is copied instead, which takes less than 1 us:

* Python's: an index, then the 624 words of a Mersenne Twister (``RandomObject`` in CPython);
* NumPy's: the words lie at an address that NumPy publishes. NumPy draws normal numbers in pairs. The second number of a
  pair, and whether there is one, lie in the ``RandomState`` object.

Each layout is checked once against the public functions. If it differs, the public functions are used.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from spillway._torch import base_of, disable_modes

MISSING: Any = object()
"""Stands for the value of a name that has none."""
INTERNAL = frozenset((*vars(Module()), "_compiled_call_impl", "forward", "__compiled_call_impl")) - {"training"}
"""Attributes of modules that belong to torch."""
_PLAIN_PARAMETERS = frozenset((Parameter, type(None)))

Content = Any
"""``dict[Any, Any]`` or ``list[Any]``."""


@dataclass(frozen=True, eq=False)
class Container:
    """A kind of container whose values have names."""

    get: Callable[[Any, Any], Any]
    put: Callable[[Any, Any, Any], object]
    delete: Callable[[Any, Any], object]
    open: Callable[[Any], Mapping[Any, Any]] | None = None
    """Returns all names and values; ``None``: the content has all names of the state."""
    is_left_out: Callable[[Any], bool] = lambda name: False
    """Whether a name is left out of the state."""

    def value(self, thing: Any, name: Any) -> Any:
        """The value of a name now, or ``MISSING``."""
        try:
            return self.get(thing, name)
        except (LookupError, AttributeError, ValueError):
            return MISSING

    def copy(self, thing: Any, content: Content) -> Content:
        """The current content of a container that had this content."""
        if self.open is None:
            return {name: self.value(thing, name) for name in content}
        return dict(self.open(thing).items())

    def changes(self, thing: Any, content: Content) -> list[Any]:
        """Names of values that differ from the content."""
        names = content
        if self.open is not None:
            now = self.open(thing)
            if _are_identical(now, content) and all(map(operator.is_, now.values(), content.values())):
                return []
            names = dict.fromkeys((*content, *now))
        changed = [name for name in names if self.value(thing, name) is not content.get(name, MISSING)]
        return [name for name in changed if not self.is_left_out(name)]

    def put_back(self, thing: Any, content: Content) -> None:
        """Set the container to this content."""
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
    """A module's parameters. Parameters that a wrapper (FSDP2) has exchanged are left out."""

    def changes(self, thing: Any, content: Content) -> list[Any]:
        return super().changes(thing, content) if are_plain(thing.values()) else []

    def put_back(self, thing: Any, content: Content) -> None:
        if are_plain(thing.values()):
            super().put_back(thing, content)


class Items(Container):
    """Lists, deques, arrays of bytes, and sets: values have no names."""

    def changes(self, thing: Any, content: Content) -> list[Any]:
        return [] if _are_identical(thing, content) else [f"a {type(thing).__name__}"]

    def put_back(self, thing: Any, content: Content) -> None:
        if not _are_identical(thing, content):
            thing.clear()
            (thing.update if isinstance(thing, set) else thing.extend)(content)


def are_plain(parameters: Iterable[Any]) -> bool:
    """Whether a module has its own parameters, and no views of a flat one that FSDP has put there.

    Plain tensors of ``torch.func.functional_call`` belong to the state.
    """
    parameters = [*parameters]
    if _PLAIN_PARAMETERS.issuperset(map(type, parameters)):
        return True
    others = (each for each in parameters if type(each) not in _PLAIN_PARAMETERS)
    return all(type(each) is torch.Tensor and not hasattr(base_of(each), "_is_flat_param") for each in others)


def _are_identical(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _of(open_: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
    """Functions that get, set and delete a value in the dictionary that ``open_`` returns, and ``open_``."""
    return (
        # By get(): a defaultdict would make missing values.
        lambda thing, name: open_(thing).get(name, MISSING),
        lambda thing, name, value: operator.setitem(open_(thing), name, value),
        lambda thing, name: operator.delitem(open_(thing), name),
        open_,
    )


def _itself(thing: Any) -> Any:
    return thing


_attributes = operator.attrgetter("__dict__")
# Not by setattr(), which an object may override.
ATTRIBUTES = Container(*_of(_attributes))
MODULE = Container(*_of(_attributes), is_left_out=INTERNAL.__contains__)
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
GLOBALS = Container(*_of(_itself)[:3])
DICTIONARY = Dictionary(*_of(_itself))
PARAMETERS = Parameters(*_of(_itself))
ITEMS = Items(*_of(_itself))


_WORDS = 625 * 4
"""Bytes of the state of a Mersenne Twister: 624 words, and a position."""
_PAIR = struct.Struct("=i4xd")
"""NumPy's second normal number: whether there is one, and the number."""


class Generator(NamedTuple):
    """One random generator."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


def global_generators() -> list[Generator]:
    """The generators that every function can reach: Python's, and NumPy's if it is imported."""
    numpy = sys.modules.get("numpy.random")
    return [_PYTHON] if numpy is None else [_PYTHON, _numpys(numpy.get_bit_generator())]


def generator_of(value: Any) -> Generator | None:
    """Functions that get and set the state of a random generator; ``None`` if it has no state."""
    if isinstance(value, random.SystemRandom):
        # The operating system's source has no state.
        return None
    if isinstance(value, random.Random):
        return Generator(value.getstate, value.setstate)
    if isinstance(value, torch.Generator):
        # A graph under capture has generators of its own.
        is_captured = value.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return None if is_captured else _torchs(value)
    if hasattr(value, "get_state"):
        return Generator(
            lambda: pickle.dumps(value.get_state(legacy=False)), lambda state: value.set_state(pickle.loads(state))
        )
    bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
    if bits is None:
        return None
    # A dictionary of numbers and arrays: its bytes can be compared.
    return Generator(lambda: pickle.dumps(bits.state), lambda state: setattr(bits, "state", pickle.loads(state)))


def _torchs(generator: torch.Generator) -> Generator:
    def get() -> bytes:
        # A fake mode would give a fake tensor.
        with disable_modes():
            return bytes(generator.get_state().numpy())

    def put(state: bytes) -> None:
        with disable_modes():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Generator(get, put)


# Python's global generator.


def _pythons() -> Generator:
    owner = getattr(random, "_inst", None)
    if sys.implementation.name != "cpython" or type(owner) is not random.Random:
        return Generator(random.getstate, random.setstate)
    known: Any = owner
    address = id(owner) + object.__basicsize__

    def get() -> tuple[bytes, float | None]:
        return ctypes.string_at(address, _WORDS), known.gauss_next

    def put(state: tuple[bytes, float | None]) -> None:
        words, gauss_next = state
        random.setstate((3, _numbers(words), gauss_next))

    is_known = _numbers(get()[0]) == random.getstate()[1]
    return Generator(get, put) if is_known else Generator(random.getstate, random.setstate)


def _numbers(words: bytes) -> tuple[int, ...]:
    """The words as ``random.getstate`` gives them: the position comes last."""
    position, *numbers = struct.unpack("=625I", words)
    return (*numbers, position)


_PYTHON = _pythons()


# NumPy's global generator.


@functools.lru_cache(maxsize=1)
def _numpys(bits: Any) -> Generator:
    """NumPy's global generator with this bit generator, which users may exchange."""
    numpy = sys.modules["numpy.random"]
    owner = getattr(numpy.get_state, "__self__", None)
    offset = _offset_of_pair(type(owner)) if type(bits).__name__ == "MT19937" and owner is not None else None
    if offset is None:
        return Generator(
            lambda: pickle.dumps(numpy.get_state(legacy=False)), lambda state: numpy.set_state(pickle.loads(state))
        )
    words_at, pair_at = bits.ctypes.state_address, id(owner) + offset

    def get() -> tuple[bytes, bytes]:
        return ctypes.string_at(words_at, _WORDS), ctypes.string_at(pair_at, _PAIR.size)

    def put(state: tuple[bytes, bytes]) -> None:
        numbers = struct.unpack("=625I", state[0])
        numpy.set_state(("MT19937", numbers[:624], numbers[624], *_PAIR.unpack(state[1])))

    return Generator(get, put)


def _offset_of_pair(kind: Any) -> int | None:
    """Offset of the second normal number of a pair in a ``RandomState``, in bytes.

    It is found by a search for known numbers in one object, and checked on others; ``None`` if they disagree.
    """
    if sys.implementation.name != "cpython":
        return None
    offset = None
    for seed in range(4):
        sample = kind(seed)
        for _ in range(2):
            sample.standard_normal()
            pair = _PAIR.pack(*sample.get_state()[3:])
            memory = ctypes.string_at(id(sample), kind.__basicsize__)
            if offset is None:
                offset = memory.find(pair)
                # Two matches cannot be told apart.
                if offset < 0 or memory.find(pair, offset + 1) >= 0:
                    return None
            elif memory[offset : offset + _PAIR.size] != pair:
                return None
    return offset
