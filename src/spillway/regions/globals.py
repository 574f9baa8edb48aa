"""Settings of the process that decide which operators run, and that a re-run finds otherwise than the first run did.

``torch.utils.checkpoint`` brings back autocast and generators. The default dtype and the choice of attention kernels
(``torch.nn.attention.sdpa_kernel``) are set around a forward as easily, and are brought back here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

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
