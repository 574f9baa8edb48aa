"""FSDP2 and HSDP in a window: which micro-batches reduce, and what is held until then.

NOTE [ What FSDP2 holds ]

With ``sync="last"``, micro-batches before the last reduce nothing: FSDP2 holds whole gradients, in its
``reduce_dtype``, until one does. That one reduces all that is held, also of modules that it has not used itself. With
``sync="every"`` each is reduced, and what is held is a shard.

On a mesh of replicas and shards, ``sync="every"`` reduces over the shards each time and over the replicas in the last.
In between FSDP2 holds one flat buffer for each group of parameters, and adds the next to it without looking which
parameters are in it. That is right if all of the group have a gradient in each micro-batch, and is wrong without a word
otherwise; and a buffer whose modules the last micro-batch does not use is never reduced. So their sizes are looked at,
and what would be lost is an error.

The switches are FSDP2's own public ones. What it divides by, and what it holds, it tells nobody: that is read where it
keeps it, and a torch where it is not there is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module, Parameter

from spillway.accumulate.options import Sync
from spillway.accumulate.widening import HALF, Home
from spillway.blocks import is_a
from spillway.errors import UnsupportedError, UsageError

_RECORDS = ("fsdp_params", "mesh_info", "mp_policy", "gradient_divide_factor", "_partial_reduce_output")
_MODULE = "torch.distributed.fsdp"


def is_sharded(module: Module) -> bool:
    """Whether ``fully_shard`` was applied to it."""
    return is_a(module, _MODULE, "FSDPModule")


class Sharded:
    """The FSDP2 modules of a model.

    Args:
        modules: they, the outermost first.
        sync: which micro-batches reduce.
        waits: whether gradients are read after each backward that reduces.
    """

    home = Home.FSDP

    def __init__(self, modules: Sequence[Any], sync: Sync, *, waits: bool) -> None:
        self._modules = modules
        self._sync = sync
        self._waits = waits
        for group in self._parameter_groups():
            missing = [name for name in _RECORDS if not hasattr(group, name)]
            if missing:
                raise UnsupportedError(
                    f"got a torch {torch.__version__} whose FSDP2 keeps no {' and no '.join(missing)}, expected one "
                    f"that does, since gradients could not be normalised; use a torch that Spillway was tested with"
                )
            if waits:
                self._check_dtype(group)

    @property
    def groups(self) -> Sequence[Any]:
        found = [_process_groups(group.mesh_info) for group in self._parameter_groups()]
        return max(found, key=size_of, default=())

    def divisors(self) -> Iterator[tuple[Parameter, float]]:
        for group in self._parameter_groups():
            said = group.gradient_divide_factor
            divisor = float(size_of(_process_groups(group.mesh_info)) if said is None else said)
            for each in group.fsdp_params:
                yield each.sharded_param, divisor

    def reduces(self, *, last: bool) -> bool:
        return last or self._sync is Sync.EVERY

    def completes(self, *, last: bool) -> bool:
        return last or (self._sync is Sync.EVERY and all(not _is_hybrid(group) for group in self._parameter_groups()))

    def switch(self, switches: ExitStack, *, last: bool) -> None:
        if last:
            return
        switches.callback(self._set, reduces=True, everywhere=True, last=True)
        # Only after the last one, as it says of itself, does FSDP2 wait for what it has reduced.
        reduces = self.reduces(last=last)
        self._set(reduces=reduces, everywhere=False, last=self._waits and reduces)

    def _set(self, *, reduces: bool, everywhere: bool, last: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(everywhere, recurse=False)
            module.set_is_last_backward(last)

    def check(self, *, last: bool) -> None:
        """See NOTE [ What FSDP2 holds ]."""
        for group in self._parameter_groups():
            held = group._partial_reduce_output
            if held is not None and (last or held.numel() != _elements(group)):
                names = ", ".join(sorted({type(module).__name__ for module in group.modules}))
                raise UsageError(
                    f"got gradients of {names} in an earlier micro-batch that not every micro-batch of the window has, "
                    f"expected that all use the same parameters, since FSDP2 does not reduce the others over replicas "
                    f"with sync='every'; say sync='last'"
                )

    def leave(self, *, last: bool) -> bool:
        # In the middle of a forward it cannot begin another.
        return all(module._get_fsdp_state()._training_state.name == "IDLE" for module in self._modules)

    def discard(self, *, failed: bool) -> None:
        for group in self._parameter_groups():
            group._partial_reduce_output = None
            for each in group.fsdp_params:
                each.unsharded_accumulated_grad = None
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.grad = None
        for module in self._modules if failed else ():
            # From torch 2.13 on. Before, a model whose forward or backward has failed is of no more use to FSDP2.
            if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
                module.reset_iter_state()

    def _parameter_groups(self) -> Iterator[Any]:
        seen = set()
        for module in self._modules:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
                # Several modules that are wrapped as one share their state.
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group

    def _check_dtype(self, group: Any) -> None:
        """Raise if FSDP2 itself would add up in a narrower type than float32."""
        policy = group.mp_policy
        types = {policy.param_dtype or each.sharded_param.dtype for each in group.fsdp_params}
        holds = self._sync is Sync.LAST or _is_hybrid(group)
        if holds and types & set(HALF) and policy.reduce_dtype != torch.float32:
            raise UsageError(
                f"grad_dtype: got torch.float32 with sync={self._sync.value!r}, and FSDP2 adds gradients up in "
                f"{policy.reduce_dtype or types.pop()} between the micro-batches that reduce, expected float32; say "
                f"fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
            )


def _process_groups(mesh: Any) -> list[Any]:
    """What a group of parameters is reduced over: shards, replicas, or both."""
    found = [getattr(mesh, name, None) for name in ("shard_process_group", "replicate_process_group")]
    return [each for each in found if each is not None]


def _is_hybrid(group: Any) -> bool:
    """Whether it is reduced over replicas, too: in the last micro-batch only."""
    return getattr(group.mesh_info, "replicate_process_group", None) is not None


def size_of(groups: Sequence[Any]) -> int:
    """How many ranks there are over all of them."""
    size = 1
    for group in groups:
        size *= group.size()
    return size


def _elements(group: Any) -> int:
    """Of a buffer in which all parameters of a group have their part."""
    trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    return sum(each.padded_sharded_param_size.numel() for each in trained)
