"""DDP in a window: gradients are reduced in the last micro-batch, and all of them.

NOTE [ Used early only ]

DDP reduces the gradient of a parameter when the backward that reduces reaches it. One that only an earlier micro-batch
has used is reduced too, if DDP looks for unused parameters (``find_unused_parameters=True``). If it does not, DDP waits
for the gradient: not only this one, but the whole bucket that it is in stays as it is on each rank, and DDP says so in
the next forward, when the optimizer has long stepped. So its reducer is asked right after backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from spillway.accumulate.options import Sync
from spillway.accumulate.widening import Home
from spillway.errors import UnsupportedError, UsageError

_REDUCER = ("_check_reducer_finalized", "_reset_state")


class Replicated:
    """The DDP modules of a model."""

    home = Home.DDP

    def __init__(self, modules: Sequence[DistributedDataParallel], sync: Sync) -> None:
        self._modules = modules
        self._sync = sync
        self._has_run = False
        for module in modules:
            missing = [name for name in _REDUCER if not hasattr(module.reducer, name)]
            if missing:
                raise UnsupportedError(
                    f"got a torch {torch.__version__} whose DDP has no {' and no '.join(missing)}, expected one that "
                    f"has, since it could not be known what is reduced; use a torch that Spillway was tested with"
                )

    @property
    def groups(self) -> Sequence[Any]:
        most = max(self._modules, key=lambda module: module.process_group.size())
        return (most.process_group,)

    def divisors(self) -> Iterator[tuple[Parameter, float]]:
        for module in self._modules:
            ranks = float(module.process_group.size())
            for name, parameter in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    yield parameter, ranks

    def reduces(self, *, last: bool) -> bool:
        # A static graph is learned in a first iteration, and that one must reduce.
        learns = not self._has_run and any(module.static_graph for module in self._modules)
        return last or self._sync is Sync.EVERY or learns

    def completes(self, *, last: bool) -> bool:
        return self.reduces(last=last)

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        if not self.reduces(last=last):
            for module in self._modules:
                switches.enter_context(module.no_sync())

    def check(self, *, last: bool) -> None:
        """See NOTE [ Used early only ]."""
        if not self.reduces(last=last):
            return
        self._has_run = True
        for module in self._modules:
            try:
                module.reducer._check_reducer_finalized()
            except RuntimeError as error:
                raise UsageError(
                    "got a micro-batch that reduces gradients and has not used every parameter, expected that it has, "
                    "or that DDP looks for the others: gradients of earlier micro-batches were left on their ranks; "
                    "say DistributedDataParallel(..., find_unused_parameters=True)"
                ) from error

    def leave(self, *, last: bool) -> bool:
        if self.reduces(last=last):
            # Its forward waits for a backward that reduces, and would take the next one for it.
            self._reset()
        return True

    def discard(self, *, failed: bool) -> None:
        if failed:
            # What a backward that failed has left half reduced. Without it, DDP refuses the next forward by itself.
            self._reset()

    def _reset(self) -> None:
        for module in self._modules:
            module.reducer._reset_state()
