"""Random generators of Python and NumPy, and those among a function's objects: their states are read and set.

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
import pickle
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spillway._torch import disable_modes

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
