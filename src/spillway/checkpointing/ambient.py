"""Settings, autocast and random generators of torch: what a replay must find as forward found it.

``torch.utils.checkpoint`` restores autocast and random generators. A user may as well set the default dtype, the
attention kernels (``torch.nn.attention.sdpa_kernel``), TF32 or the default device around a forward. A replay restores
these, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from spillway.checkpointing.tensors import tensors_in

if TYPE_CHECKING:
    from typing import Self


_OWN = __name__.partition(".")[0] + "."
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)


def _listed(allowed: Any) -> tuple[Any, ...]:
    return allowed if isinstance(allowed, tuple) else (allowed,)


class Settings(tuple[Any, ...]):
    """Settings of the process that choose kernels: default dtype, attention, TF32, deterministic algorithms."""

    __slots__ = ()

    getters: ClassVar[tuple[Callable[[], Any], ...]] = (
        torch.get_default_dtype,
        torch._C._get_flash_sdp_enabled,
        torch._C._get_mem_efficient_sdp_enabled,
        torch._C._get_math_sdp_enabled,
        torch._C._get_cudnn_sdp_enabled,
        torch._C._get_mkldnn_enabled,
        torch._C._get_cudnn_enabled,
        torch._C._get_cudnn_benchmark,
        torch._C._get_cudnn_deterministic,
        torch._C._get_mkldnn_deterministic,
        torch._C._get_nnpack_enabled,
        lambda: (torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()),
        torch._C._get_cublas_allow_fp16_accumulation,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        *(partial(torch._C._get_fp32_precision_getter, *place) for place in _PRECISIONS),
    )
    setters: ClassVar[tuple[Callable[[Any], object], ...]] = (
        torch.set_default_dtype,
        torch._C._set_sdp_use_flash,
        torch._C._set_sdp_use_mem_efficient,
        torch._C._set_sdp_use_math,
        torch._C._set_sdp_use_cudnn,
        torch._C._set_mkldnn_enabled,
        torch._C._set_cudnn_enabled,
        torch._C._set_cudnn_benchmark,
        torch._C._set_cudnn_deterministic,
        torch._C._set_mkldnn_deterministic,
        torch._C._set_nnpack_enabled,
        lambda flags: torch._C._set_deterministic_algorithms(flags[0], warn_only=flags[1]),
        torch._C._set_cublas_allow_fp16_accumulation,
        lambda allowed: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*_listed(allowed)),
        lambda allowed: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*_listed(allowed)),
        *(partial(torch._C._set_fp32_precision_setter, *place) for place in _PRECISIONS),
    )

    @classmethod
    def now(cls) -> Self:
        return cls([get() for get in cls.getters])

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context with these settings."""
        now = self.now()
        if now == self:
            yield
            return
        try:
            self._set(now)
            yield
        finally:
            now._set(self)

    def _set(self, now: Self) -> None:
        for put, value, other in zip(self.setters, self, now, strict=True):
            if value != other:
                put(value)


class AmbientState(NamedTuple):
    """Settings, autocast and function modes around a call. Dispatch modes are left out."""

    settings: Settings
    autocast: tuple[Any, ...]
    """Whether autocast is on, and its dtype, for each of :func:`_types`."""
    caches: bool
    """Whether autocast caches its casts."""
    modes: tuple[AbstractContextManager[object], ...]
    """Function modes of the user, such as a default device."""

    @classmethod
    def now(cls) -> AmbientState:
        modes: tuple[Any, ...] = ()
        if torch._C._len_torch_function_stack() > 0:
            stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            modes = tuple([mode for mode in stack if not type(mode).__module__.startswith(_OWN)])
        autocast = tuple([get() for get in _autocast()])
        return cls(Settings.now(), autocast, torch.is_autocast_cache_enabled(), modes)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """A context with this state."""
        now = AmbientState.now()
        if now == self:
            yield
            return
        with self.settings.in_force(), ExitStack() as stack:
            for place, name in enumerate(_types()):
                enabled, dtype = was = self.autocast[2 * place : 2 * place + 2]
                if was != now.autocast[2 * place : 2 * place + 2] or (enabled and now.caches != self.caches):
                    stack.enter_context(torch.autocast(name, dtype, enabled, self.caches))
            if self.modes != now.modes:
                for mode in self.modes:
                    if all(mode is not other for other in now.modes):
                        stack.enter_context(mode)
            yield


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


_CPU = torch.device("cpu")

replay_lock = threading.RLock()
"""Held while a replay has put back default generators and contents: several threads may run backward at once."""


def state_now(generator: torch.Generator) -> torch.Tensor:
    """The generator's state, as a real tensor under any mode."""
    with _no_modes():
        return generator.get_state()


def put_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the generator to a state."""
    with _no_modes():
        generator.set_state(state)


def _no_modes() -> AbstractContextManager[object]:
    # A fake mode would give a fake tensor.
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() > 0 else nullcontext()


def given_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator among the arguments, if there is one."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, torch.Generator)), None)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device on which an operator makes its tensors."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for tensor in tensors_in((*args, *kwargs.values())):
        return tensor.device
    return torch.device("cpu")


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
    return [default_generator(device) for device in {_CPU, *devices} if device.type != "meta"]


def restorer_of(generators: Iterable[torch.Generator]) -> Callable[[], None]:
    """A function that sets generators back to their state of now."""
    states = [(generator, state_now(generator)) for generator in generators]

    def restore() -> None:
        for generator, state in states:
            put_state(generator, state)

    return restore
