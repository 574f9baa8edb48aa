"""Settings of the process that decide which operators run, and that a re-run finds otherwise than the first run did.

``torch.utils.checkpoint`` brings back autocast and generators. The default dtype and the choice of attention kernels
(``torch.nn.attention.sdpa_kernel``) are set around a forward as easily, and are brought back here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
)


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
