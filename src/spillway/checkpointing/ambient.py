"""Settings, autocast and random generators of torch: what a replay must find as forward found it.

``torch.utils.checkpoint`` restores autocast and random generators. A user may as well set the default dtype, the
attention kernels (``torch.nn.attention.sdpa_kernel``), TF32 or the default device around a forward. A replay restores
these, too. Torch has an older and a newer interface for precisions, and refuses to read one that contradicts the other:
both are set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from spillway._torch import (
    KERNEL_SETTINGS,
    fit_older_precisions,
    function_mode_stack,
    function_modes,
    older_precisions_fit,
)
from spillway.checkpointing.tensors import below_modes, tensors_in

_OWN = __name__.partition(".")[0] + "."
_GETTERS = tuple([get for get, _ in KERNEL_SETTINGS])
_SETTERS = tuple([put for _, put in KERNEL_SETTINGS])


class AmbientState(NamedTuple):
    """Settings, autocast and function modes around a call. Dispatch modes are left out."""

    settings: tuple[Any, ...]
    """Values of :data:`~spillway._torch.KERNEL_SETTINGS`."""
    autocast: tuple[Any, ...]
    """Whether autocast is on, and its dtype, for each of :func:`_types`."""
    caches: bool
    """Whether autocast caches its casts."""
    modes: tuple[AbstractContextManager[object], ...]
    """Function modes of the user, such as a default device."""

    @classmethod
    def now(cls) -> AmbientState:
        modes: tuple[Any, ...] = ()
        if function_modes() > 0:
            modes = tuple([mode for mode in function_mode_stack() if not type(mode).__module__.startswith(_OWN)])
        autocast = tuple([get() for get in _autocast()])
        return cls(tuple([get() for get in _GETTERS]), autocast, torch.is_autocast_cache_enabled(), modes)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context with this state. It ends with the state from before, whatever a replay that ends early has left."""
        now = AmbientState.now()
        fits = now.settings != self.settings and older_precisions_fit()
        try:
            _set(self.settings, now.settings, fits=fits)
            with ExitStack() as stack:
                for place, name in enumerate(_types() if now != self else ()):
                    enabled, dtype = was = self.autocast[2 * place : 2 * place + 2]
                    if was != now.autocast[2 * place : 2 * place + 2] or (enabled and now.caches != self.caches):
                        stack.enter_context(torch.autocast(name, dtype, enabled, self.caches))
                for mode in self.modes:
                    if all(mode is not other for other in now.modes):
                        stack.enter_context(mode)
                yield
        finally:
            left = AmbientState.now()
            if left != now or fits:
                now._put_back(left, fits=fits or (now.settings == self.settings and older_precisions_fit()))

    def _put_back(self, left: AmbientState, *, fits: bool) -> None:
        _set(self.settings, left.settings, fits=fits)
        if left.autocast != self.autocast or left.caches != self.caches:
            for place, name in enumerate(_types()):
                torch.set_autocast_enabled(name, self.autocast[2 * place])
                torch.set_autocast_dtype(name, self.autocast[2 * place + 1])
            torch.set_autocast_cache_enabled(self.caches)


def _set(settings: tuple[Any, ...], now: tuple[Any, ...], *, fits: bool) -> None:
    """Set what differs from now; ``fits``: with the older settings of precision, which said the same."""
    for put, value, other in zip(_SETTERS, settings, now, strict=True):
        if value != other:
            put(value)
    if fits:
        fit_older_precisions()


@cache
def _types() -> tuple[str, ...]:
    """Types of devices that have autocast."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@cache
def _autocast() -> tuple[Callable[[], Any], ...]:
    """Getters of :attr:`AmbientState.autocast`."""
    getters = (torch.is_autocast_enabled, torch.get_autocast_dtype)
    return tuple(partial(get, name) for name in _types() for get in getters)


replay_lock = threading.RLock()
"""Held while a replay has put back default generators and contents: several threads may run backward at once."""


def states_of(generators: Iterable[torch.Generator]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """Generators with their states, which are real tensors under any mode."""
    with below_modes():
        return [(generator, generator.get_state()) for generator in generators]


def put_states(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    """Set generators back to their states."""
    with below_modes():
        for generator, state in states:
            generator.set_state(state)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device on which an operator makes its tensors."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    return next((tensor.device for tensor in tensors_in((*args, *kwargs.values()))), torch.device("cpu"))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators of a device draw from by default."""
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


def generators_of(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of the CPU and of these devices."""
    return [default_generator(device) for device in {torch.device("cpu"), *devices} if device.type != "meta"]
