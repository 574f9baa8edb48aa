"""DDP and FSDP2: when they reduce gradients over ranks, and what they divide gradients by.

NOTE [ DDP: parameters that only an early micro-batch uses ]

DDP reduces a parameter's gradient when the backward that reduces reaches the parameter. Without
``find_unused_parameters=True``, DDP waits for a gradient that only an earlier micro-batch has made, and its bucket
stays unreduced. DDP reports that in the next forward, after the optimizer has stepped. So the accumulator asks DDP's
reducer right after backward.

NOTE [ FSDP2: what it holds ]

With ``sync="last"``, FSDP2 holds whole gradients in its ``reduce_dtype``; with ``sync="every"`` a shard. On a mesh of
replicas and shards, ``sync="every"`` reduces over replicas only in the last micro-batch. Until then FSDP2
holds one flat buffer for each parameter group, and adds the next one without a check of the parameters in it. That is
right only if every micro-batch has gradients of the same parameters, and uses each group. So the accumulator compares
the buffer's size, and raises an error instead of losing gradients.

The switches are FSDP2's public ones. Its divisors and buffers have no public names, so a torch without the private ones
is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from spillway import _torch
from spillway.accumulate.gradients import HALF, Writer
from spillway.checkpointing.blocks import is_a
from spillway.errors import UnsupportedError, UsageError

_FSDP = "torch.distributed.fsdp"


class Wrappers:
    """All DDP and FSDP2 modules of a model, with the arguments of an accumulator.

    ``waits`` says that gradients are read after each backward that reduces.
    """

    def __init__(self, model: Module, sync: str, group: Any, *, waits: bool) -> None:
        modules = list(model.modules())
        _refuse(modules)
        self._all: list[_Replicated | _Sharded] = []
        if replicated := [each for each in modules if isinstance(each, DistributedDataParallel)]:
            self._all.append(_Replicated(replicated, sync))
        if sharded := [each for each in modules if is_a(each, _FSDP, "FSDPModule")]:
            self._all.append(_Sharded(sharded, sync, waits=waits))
        self.is_any = bool(self._all)
        """Whether there is one."""
        self.groups = _groups(group, self._all)
        """Process groups over which data differ. Reducing over one after the other reduces over all ranks."""
        self.ranks = _size_of(self.groups)

    def divisors(self) -> dict[int, float]:
        """The divisors of gradients when they are reduced, by ``id`` of the parameter; 1 for all others."""
        return {id(parameter): divisor for wrapper in self._all for parameter, divisor in wrapper.divisors()}

    def writers(self) -> dict[int, Writer]:
        """Who writes gradients, by ``id`` of the parameter; autograd for all others."""
        return {id(parameter): wrapper.writer for wrapper in self._all for parameter, _ in wrapper.divisors()}

    def reduces(self, *, last: bool) -> bool:
        return any(wrapper.reduces(last=last) for wrapper in self._all)

    def completes(self, *, last: bool) -> bool:
        """Whether all gradients are reduced over all ranks after this micro-batch."""
        return all(wrapper.completes(last=last) for wrapper in self._all)

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        """Set the switches for one micro-batch, before its forward. Closing ``switches`` sets them back."""
        for wrapper in self._all:
            wrapper.switch(switches, last=last)

    def check(self, *, last: bool) -> None:
        """After a backward: raise if a gradient stays unreduced."""
        for wrapper in self._all:
            wrapper.check(last=last)

    def leave(self, *, last: bool) -> bool:
        """End a micro-batch without a backward. Returns whether another one can follow."""
        left = [wrapper.leave(last=last) for wrapper in self._all]
        return all(left)

    def discard(self, *, failed: bool) -> None:
        """Drop held gradients. After a forward or a backward that failed, prepare for the next one."""
        for wrapper in self._all:
            wrapper.discard(failed=failed)


class _Replicated:
    """The DDP modules of a model. See :class:`Wrappers` for its methods."""

    writer = Writer.DDP

    def __init__(self, modules: Sequence[DistributedDataParallel], sync: str) -> None:
        self._modules = modules
        self._sync = sync
        self._has_run = False
        for module in modules:
            _torch.check_names("DDP", module.reducer)
        self.groups: Sequence[Any] = (max((each.process_group for each in modules), key=lambda group: group.size()),)

    def divisors(self) -> Iterator[tuple[Parameter, float]]:
        for module in self._modules:
            ranks = float(module.process_group.size())
            for name, parameter in module.module.named_parameters():
                if name not in module.parameters_to_ignore:
                    yield parameter, ranks

    def reduces(self, *, last: bool) -> bool:
        # DDP learns a static graph in its first iteration, which has to reduce.
        learns = not self._has_run and any(module.static_graph for module in self._modules)
        return last or self._sync == "every" or learns

    completes = reduces

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        if any(map(_torch.may_end_early, self._modules)):
            raise UsageError(
                "got an Accumulator within DistributedDataParallel.join(), but its ranks add up weights in each step, "
                "in which a rank without inputs cannot take part; call join(throw_on_early_termination=True), or give "
                "each rank as many steps"
            )
        if not self.reduces(last=last):
            for module in self._modules:
                switches.enter_context(module.no_sync())

    def check(self, *, last: bool) -> None:
        """See NOTE [ DDP: parameters that only an early micro-batch uses ]."""
        if not self.reduces(last=last):
            return
        self._has_run = True
        for module in self._modules:
            try:
                _torch.check_reduced(module)
            except RuntimeError as error:
                raise UsageError(
                    "the micro-batch that reduces gradients has not used every parameter, so DDP left gradients of "
                    "earlier micro-batches unreduced; say DistributedDataParallel(..., find_unused_parameters=True)"
                ) from error

    def leave(self, *, last: bool) -> bool:
        # DDP expects a backward that reduces, and would take the next one for it.
        self.discard(failed=self.reduces(last=last))
        return True

    def discard(self, *, failed: bool) -> None:
        # After a failed backward DDP refuses the next forward.
        for module in self._modules if failed else ():
            _torch.reset_ddp(module)


class _Sharded:
    """The FSDP2 modules of a model, the outermost first. See :class:`Wrappers` for its methods."""

    writer = Writer.FSDP

    def __init__(self, modules: Sequence[Any], sync: str, *, waits: bool) -> None:
        self._modules = modules
        self._sync = sync
        self._waits = waits
        for group in _torch.fsdp_groups(modules):
            _torch.check_names("FSDP2", group)
            if waits:
                self._check_dtype(group)
        found = [_process_groups(group) for group in _torch.fsdp_groups(modules)]
        self.groups: Sequence[Any] = max(found, key=_size_of, default=())

    def divisors(self) -> Iterator[tuple[Parameter, float]]:
        for group in _torch.fsdp_groups(self._modules):
            given = group.gradient_divide_factor
            divisor = float(_size_of(_process_groups(group)) if given is None else given)
            for each in group.fsdp_params:
                yield each.sharded_param, divisor

    def reduces(self, *, last: bool) -> bool:
        return last or self._sync == "every"

    def completes(self, *, last: bool) -> bool:
        return last or (
            self._sync == "every" and not any(_has_replicas(group) for group in _torch.fsdp_groups(self._modules))
        )

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        if last:
            return
        switches.callback(self._set, reduces=True, everywhere=True, last=True)
        # FSDP2 waits for its reduction only in a backward that is marked as the last one.
        reduces = self.reduces(last=last)
        self._set(reduces=reduces, everywhere=False, last=self._waits and reduces)

    def _set(self, *, reduces: bool, everywhere: bool, last: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(everywhere, recurse=False)
            module.set_is_last_backward(last)

    def check(self, *, last: bool) -> None:
        """See NOTE [ FSDP2: what it holds ]."""
        for group in _torch.fsdp_groups(self._modules):
            held = _torch.partial_reduction(group)
            trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
            elements = sum(each.padded_sharded_param_size.numel() for each in trained)
            if held is not None and (last or held.numel() != elements):
                names = ", ".join(sorted({type(module).__name__ for module in group.modules}))
                raise UsageError(
                    f"micro-batches of one accumulation step use different parameters of {names}, and with "
                    f"sync='every' FSDP2 does not reduce their gradients over replicas; say sync='last'"
                )

    def leave(self, *, last: bool) -> bool:
        # FSDP2 cannot start a forward in the middle of another one.
        return all(_torch.is_idle(module) for module in self._modules)

    def discard(self, *, failed: bool) -> None:
        for group in _torch.fsdp_groups(self._modules):
            _torch.drop_unreduced(group)
        if failed:
            _torch.reset_fsdp(self._modules)

    def _check_dtype(self, group: Any) -> None:
        """Raise if FSDP2 itself would sum gradients in a dtype narrower than float32."""
        policy = group.mp_policy
        dtypes = {policy.param_dtype or each.sharded_param.dtype for each in group.fsdp_params}
        holds = self._sync == "last" or _has_replicas(group)
        if holds and dtypes & set(HALF) and policy.reduce_dtype != torch.float32:
            raise UsageError(
                f"grad_dtype: with sync={self._sync!r} FSDP2 itself sums gradients between reductions, in "
                f"{policy.reduce_dtype or dtypes.pop()} instead of float32; say "
                f"fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )


def _process_groups(group: Any) -> list[Any]:
    """Process groups that FSDP2 reduces a parameter group over: shards, replicas, or both."""
    names = ("shard_process_group", "replicate_process_group")
    return [each for name in names if (each := getattr(group.mesh_info, name, None)) is not None]


def _has_replicas(group: Any) -> bool:
    return getattr(group.mesh_info, "replicate_process_group", None) is not None


def _size_of(groups: Sequence[Any]) -> int:
    return math.prod(group.size() for group in groups)


def _groups(group: Any, wrappers: Iterable[_Replicated | _Sharded]) -> Sequence[Any]:
    """The process groups of the given one, or those of the wrapper with the most ranks."""
    if group is None:
        return max((wrapper.groups for wrapper in wrappers), key=_size_of, default=())
    groups: list[Any] = list(group.get_all_groups()) if hasattr(group, "get_all_groups") else [group]
    for each in groups:
        if each is torch.distributed.GroupMember.NON_GROUP_MEMBER or (
            isinstance(each, torch.distributed.ProcessGroup) and torch.distributed.get_rank(each) < 0
        ):
            raise UsageError("group: this process is not in it; give the process group over which its data differ")
        if not isinstance(each, torch.distributed.ProcessGroup):
            raise UsageError(f"group: got {group!r}, expected a process group, a device mesh, or None")
    return groups


def _refuse(modules: Iterable[Module]) -> None:
    for module in modules:
        if is_a(module, _FSDP, "FullyShardedDataParallel"):
            raise UnsupportedError(
                f"{type(module).__name__} is the first generation of FSDP, which clips and unscales gradients by its "
                f"own methods; use torch.distributed.fsdp.fully_shard or DDP"
            )
        if "replicate" in _torch.composed_with(module) and not is_a(module, _FSDP, "FSDPModule"):
            raise UnsupportedError(
                f"{type(module).__name__} was wrapped by replicate() of torch.distributed._composable, which is not "
                f"supported; use torch.nn.parallel.DistributedDataParallel or fully_shard"
            )
