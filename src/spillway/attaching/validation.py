"""Checks of models and arguments that cannot be attached."""

from __future__ import annotations

import fnmatch
import inspect
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.nn import Module

from spillway.attaching.call import PLACE, is_attached
from spillway.blocks import Blocks, Named, is_a, is_compiled, patterns_of, perhaps, uncompiled
from spillway.errors import UnsupportedError, UsageError
from spillway.policies import Policy
from spillway.session import Session

CHECKPOINTING_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""Attributes that are true of a module that checkpoints itself: in transformers and diffusers, and in timm."""

_SHOWN = 8
_COPIER = torch.nn.DataParallel.forward.__code__


def refuse_modules(modules: Sequence[Named]) -> None:
    """Raise an error if one of the modules is attached already, or copies what it calls."""
    for each in modules:
        if is_attached(each.module):
            raise UsageError(
                f"got {each}, which is attached already, expected a model that is not; call remove() of what the other "
                f"spillway.attach gave back, and say all in one"
            )
    for each in modules:
        if isinstance(each.module, torch.nn.DataParallel):
            raise UnsupportedError(
                f"got {each}, to whose replicas on other devices nothing is attached, expected one device in each "
                f"process; use torch.nn.parallel.DistributedDataParallel"
            )


def refuse_copier(frame: FrameType | None, named: Named) -> None:
    """Raise :class:`~spillway.errors.UnsupportedError` for a call that ``DataParallel`` makes, even on one device."""
    while frame is not None:
        if frame.f_code is _COPIER:
            raise UnsupportedError(
                f"got a call of {named}, which is attached, by torch.nn.DataParallel, to whose replicas on other "
                f"devices nothing is attached, expected one device in each process; use "
                f"torch.nn.parallel.DistributedDataParallel"
            )
        frame = frame.f_back


def refuse_checkpointing(modules: Iterable[Named]) -> None:
    """Raise :class:`~spillway.errors.UsageError` if one of the modules checkpoints itself."""
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    home = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    for each in modules:
        composed = contract is not None and "checkpoint" in (contract._get_registry(each.module) or ())
        if composed or is_a(each.module, home, "CheckpointWrapper"):
            raise UsageError(
                f"got {each}, which checkpoints already, expected a model that does not; leave out checkpoint_wrapper, "
                f"apply_activation_checkpointing or checkpoint, as FSDP's users call them"
            )
        if any(getattr(each.module, flag, False) is True for flag in CHECKPOINTING_FLAGS):
            raise UsageError(_checkpointing(each))


def refuse_own_flags(name: str, module: Module) -> None:
    """The same by the module's own flags alone, in so little time that each call of the model may ask."""
    own = module.__dict__
    if any(own.get(flag) is True for flag in CHECKPOINTING_FLAGS):
        raise UsageError(_checkpointing(Named(name, module)))


def _checkpointing(named: Named) -> str:
    return (
        f"got {named}, which checkpoints already ({' or '.join(CHECKPOINTING_FLAGS)} is True), expected a model that "
        f"does not, or blocks would be computed a third time; call model.gradient_checkpointing_disable() or, where it "
        f"is newer, activation_checkpointing_disable() (transformers), model.disable_gradient_checkpointing() "
        f"(diffusers) or model.set_grad_checkpointing(False) (timm)"
    )


def refuse_unmatched(patterns: Iterable[str], blocks: Sequence[Named], model: Module) -> None:
    """Raise :class:`~spillway.errors.UsageError` if a pattern of submodules means none in any of the blocks."""
    below = {path: None for each in blocks for path, _ in uncompiled(each.module).named_modules()}
    # What is not below a block, and called in it all the same, goes by its class.
    others = {type(module).__name__ for module in model.modules()}
    for pattern in patterns:
        if blocks and not any(fnmatch.fnmatchcase(path, pattern) for path in (*below, *others)):
            # What is right below a block has no dot, and a name without any sign is no pattern.
            known = [each if "." in each else f"*{each}" for each in patterns_of(filter(None, below))]
            raise UsageError(
                f"selector: got {pattern!r}, which no path of a module below {blocks[0]}, or another block, matches, "
                f"expected a pattern of such paths; {perhaps(pattern, known)}there are "
                f"{', '.join(map(repr, known[:_SHOWN]))}{' and others' if len(known) > _SHOWN else ''}"
            )


def refuse_compiled(around: Iterable[Named]) -> None:
    """Raise :class:`~spillway.errors.UsageError` if one of the modules that blocks are in is compiled."""
    for each in around:
        if is_compiled(each.module) or each.module.__dict__.get(PLACE) is not None:
            raise UsageError(
                f"got {each} compiled around blocks, expected none, since what is compiled goes through the blocks "
                f"without their regions; compile the blocks instead, before attaching: "
                f"`for block in blocks: block.compile()`"
            )


def refuse_class(named: Named) -> None:
    """Raise an error if a module, the model or a block, is of a class whose call cannot be taken over."""
    module = named.module
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"got {named}, a scripted module, whose call cannot be taken over, expected Python; attach to the module "
            f"that it was made from"
        )
    if named.name and hasattr(inspect.getattr_static(type(module), "forward"), "__set__"):
        raise UnsupportedError(
            f"got {named}, whose class has a property for a forward, for which nothing can stand in, expected a "
            f"method; change it so, or use spillway.recompute where the block is called"
        )
    fsdp = "torch.distributed.fsdp.fully_sharded_data_parallel"
    if named.name and is_a(module, fsdp, "FullyShardedDataParallel"):
        raise UsageError(
            f"got {named} as a block, which gathers its parameters in its forward, expected the module in it; say "
            f"blocks= with the class of that, or use fully_shard"
        )
    for name, through in (("__call__", "super().__call__"), ("__deepcopy__", "copy.deepcopy")):
        method = _method_of(type(module), name)
        names = getattr(getattr(method, "__code__", None), "co_names", ())
        if method is not None and through.rpartition(".")[2] not in names:
            raise UnsupportedError(
                f"got {named}, whose class has a {name} of its own that does not use {through}, expected one that does "
                f"or none; change it so, or use spillway.recompute where the block is called"
            )


def _method_of(kind: type[Module], name: str) -> object:
    """The method of a class, unless it is torch's own, which do right but for one: what ``__call__`` itself calls."""
    for base in kind.__mro__:
        if name in vars(base):
            method: object = vars(base)[name]
            is_torchs = str(getattr(method, "__module__", "")).partition(".")[0] == "torch"
            return None if is_torchs and method is not Module._call_impl else method
    return None


def cache_error(name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UsageError | None:
    """The error if one of a block's arguments is a cache of keys and values."""
    for value in (*args, *kwargs.values()):
        kind: Any = type(value)
        if _is_cache(kind):
            return UsageError(
                f"got a {kind.__name__} as an argument of {Named(name, module)}, which writes its keys and values "
                f"there, expected none, since recomputing the block would write them a second time; call the "
                f"model with use_cache=False, and without a cache of your own"
            )
    return None


@cache
def _is_cache(kind: Any) -> bool:
    """Whether it is one of transformers' caches."""
    return hasattr(kind, "get_seq_length") and not issubclass(kind, torch.Tensor)


def refuse_nested(blocks: Sequence[Named]) -> None:
    """Raise :class:`~spillway.errors.UsageError` if one of the blocks has others inside: no plan is of such."""
    modules = {id(each.module) for each in blocks}
    for each in blocks:
        if any(id(inner) in modules for inner in each.module.modules() if inner is not each.module):
            raise UsageError(
                f"blocks: got {each.name!r}, which has others inside, with a budget or a profile, expected blocks one "
                f"after the other; name the outer ones or the inner ones"
            )


def check_arguments(model: object, session: object, *, every: object, first: object, keep_last: object) -> None:
    """Raise :class:`~spillway.errors.UsageError` for arguments of other kinds."""
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if session is not None and not isinstance(session, Session):
        raise UsageError(f"session: got {session!r}, expected a spillway.Session or None")
    for name, number, least in (("every", every, 1), ("first", first, 0), ("keep_last", keep_last, 0)):
        if (number is None and name == "first") or (type(number) is int and number >= least):
            continue
        raise UsageError(f"{name}: got {number!r}, expected a whole number of at least {least}")


def check_planned(policy: object, groups: object, plan: object, budget: object, *, takes_all: bool) -> None:
    """Refuse arguments that decide what the plan decides, such as that not all blocks are taken."""
    if budget is not None and plan is not None:
        raise UsageError(f"got both budget={budget!r} and a plan, expected one of them; a plan has its budget")
    if plan is not None and not hasattr(plan, "predicted_peak"):
        raise UsageError(f"plan: got {plan!r:.200}, expected a spillway.Plan, as spillway.plan() makes it")
    if policy is not None or groups is not None or not takes_all:
        raise UsageError(
            "got a policy, groups, every, first or keep_last beside a budget or a plan, expected none, since the plan "
            "decides about every block; leave them out, or leave out the budget"
        )


def check_policy(policy: Policy, blocks: Blocks | None, *, every: int, first: int | None, keep_last: int) -> None:
    """Refuse what is no policy, and arguments of recomputation beside an offload policy."""
    if isinstance(policy, type) or not callable(policy):
        raise UsageError(
            f"policy: got {policy!r}, expected a spillway.Recompute(...), an offload policy such as "
            f"spillway.policies.Ratio(0.5), or None"
        )
    if every != 1 or first is not None or (blocks is not None and not keep_last):
        raise UsageError(
            f"got every={every!r}, first={first!r} or blocks={blocks!r} with the offload policy {policy!r}, which "
            f"recomputes nothing, expected at most keep_last and the blocks that it counts; to recompute, give a "
            f"spillway.Recompute(offload=...)"
        )
