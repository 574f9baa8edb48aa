"""Settings of the process that decide which operators run, and that a re-run finds otherwise than the first run did.

``torch.utils.checkpoint`` brings back autocast and generators. The default dtype and the choice of attention kernels
(``torch.nn.attention.sdpa_kernel``) are set around a forward as easily, and are brought back here; and with them
autocast and the default device, where a function runs again without torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)

_PRECISIONS = (("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))
_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_deterministic_algorithms, torch._C._set_deterministic_algorithms),
    (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda allowed: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(*_listed(allowed)),
    ),
    (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda allowed: torch._C._set_cublas_allow_bf16_reduced_precision_reduction(*_listed(allowed)),
    ),
)


class Numerics(NamedTuple):
    """Settings of the process by which products and convolutions choose how they add up."""

    flags: tuple[Any, ...]
    precisions: tuple[str, ...]

    @classmethod
    def now(cls) -> Numerics:
        get = torch._C._get_fp32_precision_getter
        return cls(tuple([get() for get, _ in _FLAGS]), tuple([get(*each) for each in _PRECISIONS]))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, they are as they were."""
        now = Numerics.now()
        try:
            self._set(now)
            yield
        finally:
            now._set(self)

    def _set(self, now: Numerics) -> None:
        for (_, put), flag, other in zip(_FLAGS, self.flags, now.flags, strict=True):
            if flag != other:
                put(flag)
        for place, precision, other in zip(_PRECISIONS, self.precisions, now.precisions, strict=True):
            if precision != other:
                torch._C._set_fp32_precision_setter(*place, precision)


def _listed(allowed: Any) -> tuple[Any, ...]:
    return allowed if isinstance(allowed, tuple) else (allowed,)


class Globals(NamedTuple):
    """The settings at one moment."""

    dtype: torch.dtype
    kernels: tuple[bool, ...]

    @classmethod
    def now(cls) -> Globals:
        return cls(torch.get_default_dtype(), tuple([enabled() for enabled, _ in _KERNELS]))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, they are as they were."""
        now = Globals.now()
        if now == self:
            yield
            return
        try:
            self._set()
            yield
        finally:
            now._set()

    def _set(self) -> None:
        torch.set_default_dtype(self.dtype)
        for (_, enable), enabled in zip(_KERNELS, self.kernels, strict=True):
            enable(enabled)


class Ambience(NamedTuple):
    """All that a function finds around it, besides modes that somebody sees operators by."""

    settings: Globals
    numerics: Numerics
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    caches: bool
    """Whether autocast remembers what it has cast."""
    device: AbstractContextManager[object] | None
    """Where tensors are made, if that was said."""

    @classmethod
    def now(cls) -> Ambience:
        autocast = tuple([(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _types()])
        device = None
        if torch._C._len_torch_function_stack() > 0:
            modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
            device = next((mode for mode in modes if isinstance(mode, DeviceContext)), None)
        return cls(Globals.now(), Numerics.now(), autocast, torch.is_autocast_cache_enabled(), device)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, it is as it was."""
        now = Ambience.now()
        with self.settings.in_force(), ExitStack() as stack:
            if self.numerics != now.numerics:
                stack.enter_context(self.numerics.in_force())
            for each, (_, *other) in zip(self.autocast, now.autocast, strict=True):
                name, enabled, dtype = each
                if [enabled, dtype] != other or (enabled and now.caches != self.caches):
                    stack.enter_context(torch.autocast(name, dtype, enabled, self.caches))
            if self.device is not None and self.device is not now.device:
                stack.enter_context(self.device)
            yield


@cache
def _types() -> tuple[str, ...]:
    """Of devices that autocast is for."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
