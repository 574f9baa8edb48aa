"""The modules of torch's that average gradients over ranks: DDP and FSDP2, and what a window asks of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.nn import Module, Parameter

from spillway.accumulate.ddp import Replicated
from spillway.accumulate.fsdp import Sharded, is_sharded, size_of
from spillway.accumulate.options import Sync
from spillway.accumulate.widening import Home
from spillway.blocks import is_a
from spillway.errors import UnsupportedError, UsageError


class Wrapper(Protocol):
    """One kind of them, in one model."""

    home: Home

    @property
    def groups(self) -> Sequence[Any]:
        """The process groups over which its ranks' data differ: to reduce over one after the other is over all."""

    def divisors(self) -> Iterator[tuple[Parameter, float]]:
        """Its parameters, each with what its gradient is divided by when it is summed over ranks."""

    def reduces(self, *, last: bool) -> bool:
        """Whether this micro-batch is one that reduces."""

    def completes(self, *, last: bool) -> bool:
        """Whether after this micro-batch all that it has is reduced over all ranks."""

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        """Set it for one micro-batch, from before its forward; ``switches`` sets it back."""

    def check(self, *, last: bool) -> None:
        """After a micro-batch's backward: raise if a gradient was left behind."""

    def leave(self, *, last: bool) -> bool:
        """A micro-batch ends without a backward: be ready for the next one.

        Returns:
            Whether that is possible.
        """

    def discard(self, *, failed: bool) -> None:
        """Forget what it holds of a window; after a forward or a backward that failed, be ready for the next."""


class Wrappers:
    """All of a model's.

    Args:
        model: the model; what wraps it, or is wrapped in it, has been wrapped by now.
        sync: which micro-batches reduce.
        group: the process group, or device mesh, over which the data of ranks differ; ``None``: the wrappers'.
        waits: whether gradients are read after each backward that reduces.
    """

    def __init__(self, model: Module, sync: Sync, group: Any, *, waits: bool) -> None:
        self._all: list[Wrapper] = []
        modules = list(model.modules())
        _refuse(modules)
        if replicated := [each for each in modules if isinstance(each, torch.nn.parallel.DistributedDataParallel)]:
            self._all.append(Replicated(replicated, sync))
        if sharded := [each for each in modules if is_sharded(each)]:
            self._all.append(Sharded(sharded, sync, waits=waits))
        self.groups = _groups(group, self._all)
        self.ranks = size_of(self.groups)

    def divisors(self) -> dict[int, float]:
        """What gradients are divided by, by ``id`` of the parameter; who is not here is divided by nothing."""
        return {id(parameter): divisor for wrapper in self._all for parameter, divisor in wrapper.divisors()}

    def homes(self) -> dict[int, Home]:
        """Who puts gradients there, by ``id`` of the parameter; of who is not here, autograd does."""
        return {id(parameter): wrapper.home for wrapper in self._all for parameter, _ in wrapper.divisors()}

    def reduces(self, *, last: bool) -> bool:
        """Whether this micro-batch is one that reduces."""
        return any(wrapper.reduces(last=last) for wrapper in self._all)

    def completes(self, *, last: bool) -> bool:
        """Whether after this micro-batch all gradients are reduced over all ranks."""
        return all(wrapper.completes(last=last) for wrapper in self._all)

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        """Set all for one micro-batch."""
        for wrapper in self._all:
            wrapper.switch(switches, last=last)

    def check(self, *, last: bool) -> None:
        """Raise if a gradient was left behind."""
        for wrapper in self._all:
            wrapper.check(last=last)

    def leave(self, *, last: bool) -> bool:
        """A micro-batch ends without a backward: whether another can follow."""
        left = [wrapper.leave(last=last) for wrapper in self._all]
        return all(left)

    def discard(self, *, failed: bool) -> None:
        """Forget what they hold of a window."""
        for wrapper in self._all:
            wrapper.discard(failed=failed)


def _groups(group: Any, wrappers: Iterable[Wrapper]) -> Sequence[Any]:
    """The process groups of one that is given, or of the wrapper that has the most ranks."""
    if group is None:
        found = [wrapper.groups for wrapper in wrappers]
        return max(found, key=size_of, default=())
    groups: list[Any] = list(group.get_all_groups()) if hasattr(group, "get_all_groups") else [group]
    for each in groups:
        if each is torch.distributed.GroupMember.NON_GROUP_MEMBER or (
            isinstance(each, torch.distributed.ProcessGroup) and torch.distributed.get_rank(each) < 0
        ):
            raise UsageError("group: got one that this process is not in, expected one over which its data differ")
        if not isinstance(each, torch.distributed.ProcessGroup):
            raise UsageError(f"group: got {group!r}, expected a process group, a device mesh, or None")
    return groups


def _refuse(modules: Iterable[Module]) -> None:
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    for module in modules:
        if is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise UnsupportedError(
                f"got a {type(module).__name__}, the first generation of FSDP, expected torch.distributed.fsdp."
                f"fully_shard, DDP, or neither; its gradients are clipped and unscaled by calls of its own"
            )
        composed = contract is not None and "replicate" in (contract._get_registry(module) or ())
        if composed and not is_sharded(module):
            raise UnsupportedError(
                f"got a {type(module).__name__} that replicate() of torch.distributed._composable has wrapped, "
                f"expected torch.nn.parallel.DistributedDataParallel around it, or fully_shard"
            )
