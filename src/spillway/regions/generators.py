"""States of random generators, before and after the operators that draw from them.

A re-run that leaves out a random operator must leave the generator where that operator would have left it, and one that
runs must draw what it drew. So both states are noted in the first run, of random operators only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spillway.regions.tensors import tensors_in

_CPU = torch.device("cpu")

drawing = threading.RLock()
"""Held while default generators are not where their user left them: several threads may go through graphs at once."""


class GeneratorState(NamedTuple):
    """The state of a generator at some moment."""

    device: torch.device
    state: torch.Tensor


def state_now(generator: torch.Generator) -> torch.Tensor:
    """The generator's state: a real tensor, whatever modes are in force."""
    with _no_modes():
        return generator.get_state()


def put_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the generator to a state."""
    with _no_modes():
        generator.set_state(state)


def _no_modes() -> AbstractContextManager[object]:
    # A fake mode would give a fake tensor.
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() > 0 else nullcontext()


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    """The generator that a call draws from: the one it is given, or its device's own."""
    given = given_generator(args, kwargs)
    return default_generator(device) if given is None else given


def given_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator among the arguments, if there is one."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, torch.Generator)), None)


def state_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> GeneratorState:
    """Its state now."""
    device = device_of(args, kwargs)
    return GeneratorState(device, state_now(generator_of(args, kwargs, device)))


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a call makes its tensors."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for tensor in tensors_in((*args, *kwargs.values())):
        return tensor.device
    return torch.device("cpu")


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that a device's operators draw from when they are given none."""
    if device.type in ("cpu", "meta"):
        # Nothing is drawn on meta.
        return torch.default_generator
    index = device.index if device.index is not None else torch.get_device_module(device).current_device()
    return _generator_of_index(device.type, index)


@cache
def _generator_of_index(kind: str, index: int) -> torch.Generator:
    module: Any = torch.get_device_module(kind)
    generator: torch.Generator = module.default_generators[index]
    return generator


@contextmanager
def drawn_from(moment: GeneratorState) -> Iterator[None]:
    """A context in which a device's default generator is where it was, and after which it is where it is now."""
    generator = default_generator(moment.device)
    with drawing:
        now = state_now(generator)
        put_state(generator, moment.state)
        try:
            yield
        finally:
            put_state(generator, now)


def generators_now(tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Gives what sets the default generators, the host's and those of the tensors' devices, back to where they are."""
    return states_of(generators_of({each.device for each in tensors}))


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of the host and of these devices."""
    return [default_generator(device) for device in {_CPU, *devices} if device.type != "meta"]


def states_of(generators: Iterable[torch.Generator]) -> Callable[[], None]:
    """Gives what sets generators back to where they are."""
    states = [(generator, state_now(generator)) for generator in generators]

    def restore() -> None:
        for generator, state in states:
            put_state(generator, state)

    return restore
