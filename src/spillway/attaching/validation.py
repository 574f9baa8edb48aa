"""Checks of models and arguments that cannot be attached."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from spillway._torch import CHECKPOINT_WRAPPER, PLACE, composed_with, own_call
from spillway.attaching.call import ModuleCall, is_attached
from spillway.checkpointing.blocks import FSDP, Blocks, Named, is_a, is_compiled, patterns_of, perhaps, uncompiled
from spillway.errors import UnsupportedError, UsageError
from spillway.policies import Policy
from spillway.saved_tensors.groups import Groups
from spillway.session import Session
from spillway.units import parse_bytes, read_budget

LIMITS = ("hardware", "host_budget", "disk_budget", "allow")
"""Options of ``attach`` that plans keep within."""
_SHOWN = 8


def refuse_modules(modules: Sequence[Named]) -> None:
    """Raise an error if one of the modules is attached already, or is a ``DataParallel``.

    Only the user's own call counts: an automatic one (``spillway run``, ``SPILLWAY_BUDGET``) gives way to this one.
    """
    for each in modules:
        call = each.module.__dict__.get(PLACE)
        # A shallow copy has the call of its original in its dictionary.
        if isinstance(call, ModuleCall) and call.give_way is not None and call.module() is each.module:
            call.give_way()
        if is_attached(each.module):
            raise UsageError(
                f"{each} is attached already. Call remove() of the handle that the other spillway.attach returned, and "
                f"give all options in one call"
            )
        if isinstance(each.module, torch.nn.DataParallel):
            raise UnsupportedError(
                f"{each} calls copies of its module on other devices, which cannot be attached. Use "
                f"torch.nn.parallel.DistributedDataParallel, with one device in each process"
            )


def refuse_checkpointing(modules: Iterable[Named]) -> None:
    """Raise :class:`~spillway.errors.UsageError` if one of the modules is wrapped in a checkpoint."""
    for each in modules:
        if "checkpoint" in composed_with(each.module) or is_a(each.module, *CHECKPOINT_WRAPPER):
            raise UsageError(
                f"{each} checkpoints already, so its blocks would be recomputed twice. Leave out checkpoint_wrapper, "
                f"apply_activation_checkpointing or checkpoint, as FSDP's users call them"
            )


def refuse_unmatched(patterns: Iterable[str], blocks: Sequence[Named], model: Module) -> None:
    """Raise :class:`~spillway.errors.UsageError` if a pattern of submodules means none in any of the blocks."""
    below = {path: None for each in blocks for path, _ in uncompiled(each.module).named_modules()}
    # A module that is called in a block and is not below it has its class for a name.
    others = {type(module).__name__ for module in model.modules()}
    for pattern in patterns:
        if blocks and not any(fnmatch.fnmatchcase(path, pattern) for path in (*below, *others)):
            # A direct child of a block has no dot, and a name without any sign is no pattern.
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
                f"{each} is compiled around blocks, and its trace bypasses the attached blocks. Compile the blocks "
                f"instead, before attaching: `for block in blocks: block.compile()`"
            )


def refuse_class(named: Named) -> None:
    """Raise an error if a module, the model or a block, is of a class whose call cannot be taken over."""
    module = named.module
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"{named} is scripted, and the call of a scripted module cannot be replaced. Attach to the module that it "
            f"was made from"
        )
    if named.name and hasattr(inspect.getattr_static(type(module), "forward"), "__set__"):
        raise UnsupportedError(
            f"{named}.forward is a property and cannot be wrapped. Make it a method, or use spillway.recompute in the "
            f"code that calls the block"
        )
    if named.name and is_a(module, *FSDP):
        raise UsageError(
            f"{named} cannot be a block, since it gathers its parameters in its forward. Give blocks= the class of the "
            f"module in it, or use fully_shard"
        )
    for name, through in (("__call__", "super().__call__"), ("__deepcopy__", "copy.deepcopy")):
        method = _method_of(type(module), name)
        names = getattr(getattr(method, "__code__", None), "co_names", ())
        if method is not None and through.rpartition(".")[2] not in names:
            raise UnsupportedError(
                f"{named} has a {name} of its own that does not use {through}, so its call cannot be replaced. Change "
                f"that method, or use spillway.recompute in the code that calls the block"
            )


def _method_of(kind: type[Module], name: str) -> object:
    """The method of a class, unless it is torch's own, except the one that ``__call__`` calls."""
    for base in kind.__mro__:
        if name in vars(base):
            method: object = vars(base)[name]
            is_torchs = str(getattr(method, "__module__", "")).partition(".")[0] == "torch"
            return None if is_torchs and method is not own_call(Module) else method  # type: ignore[arg-type]
    return None


def cache_error(name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UsageError | None:
    """The error if one of a block's arguments is a cache of keys and values."""
    for value in (*args, *kwargs.values()):
        kind = type(value)
        # Those of transformers have such a method.
        if hasattr(kind, "get_seq_length") and not issubclass(kind, torch.Tensor):
            return UsageError(
                f"got a {kind.__name__} as an argument of {Named(name, module)}, which writes its keys and values "
                f"there, and would write them a second time when it is recomputed; call the model with "
                f"use_cache=False, and without a cache of your own"
            )
    return None


def refuse_nested(blocks: Sequence[Named]) -> None:
    """Raise :class:`~spillway.errors.UsageError` if one of the blocks has others inside: plans have no such blocks."""
    modules = {id(each.module) for each in blocks}
    for each in blocks:
        if any(id(inner) in modules for inner in each.module.modules() if inner is not each.module):
            raise UsageError(
                f"blocks: {each.name!r} has others inside, and with a budget or a profile blocks must come one after "
                f"the other. Name the outer ones or the inner ones"
            )


def check_options(given: Mapping[str, Any]) -> bool:
    """Check the options of ``attach`` as far as that needs no model. Returns whether there is a budget or a plan.

    Raises:
        UsageError: for an invalid value, and for options that need or exclude another one.
    """
    budget, plan, optimizer, stream = (given.get(name) for name in ("budget", "plan", "optimizer", "stream"))
    session, device = given.get("session"), given.get("device")
    if session is not None and not isinstance(session, Session):
        raise UsageError(f"session: got {session!r}, expected a spillway.Session or None")
    if session is not None:
        session.check_open()
    for name, least in (("every", 1), ("first", 0), ("keep_last", 0)):
        number = given.get(name, least)
        if not (type(number) is int and number >= least) and not (number is None and name == "first"):
            raise UsageError(f"{name}: got {number!r}, expected an integer of at least {least}")
    groups_of(given.get("groups"))
    if device is not None and stream is None:
        raise UsageError(f"device: got {device!r} without stream=, expected both. Move the model with model.to()")
    if budget is not None and plan is not None:
        raise UsageError(f"got both budget={budget!r} and a plan, which has its own budget. Give one of them")
    if plan is not None and not hasattr(plan, "predicted_peak"):
        raise UsageError(f"plan: got {plan!r:.200}, expected a spillway.Plan, as spillway.plan() makes it")
    is_planned = budget is not None or plan is not None
    takes_all = given.get("every") in (None, 1) and given.get("first") is None and not given.get("keep_last")
    if is_planned and not (given.get("policy") is None and given.get("groups") is None and takes_all):
        raise UsageError(
            "got a policy, groups, every, first or keep_last beside a budget or a plan, expected none, since the plan "
            "decides about every block; leave them out, or leave out the budget"
        )
    of_plans = (*LIMITS, "optimizer") if stream is None else LIMITS
    alone = [] if is_planned else [name for name in of_plans if given.get(name) is not None]
    if alone:
        raise UsageError(
            f"got {', '.join(alone)} without a budget, and only plans for a budget use these options. Give budget=..."
        )
    if optimizer is not None and not hasattr(optimizer, "divide"):
        raise UsageError(
            f"optimizer: got {type(optimizer).__name__}, expected a spillway.OffloadedOptimizer, which can be "
            f"divided; leave out any other: its state is counted as it is"
        )
    if stream == "auto" and budget is None:
        raise UsageError('stream: got "auto" without a budget, expected both, or names or classes of blocks')
    if budget is not None:
        read_budget(budget)
    for name in ("host_budget", "disk_budget", "min_bytes"):
        if given.get(name) is not None:
            parse_bytes(given[name], what=name)
    # Planning takes a while to import.
    if given.get("allow") is not None:
        from spillway.planner.plan import check_allow

        check_allow(given["allow"])
    if given.get("hardware") is not None:
        from spillway.planner.hardware import Hardware

        Hardware.of(given["hardware"])
    return is_planned


def groups_of(groups: object) -> Groups | None:
    """The groups of an option, or an error for something else."""
    if groups is None or isinstance(groups, Groups):
        return groups
    if not isinstance(groups, Mapping):
        raise UsageError(f"groups: got {groups!r}, expected a mapping from names to patterns, or a spillway.Groups")
    return Groups(groups)


def check_policy(policy: Policy, blocks: Blocks | None, *, every: int, first: int | None, keep_last: int) -> None:
    """Refuse anything but a policy, and arguments of recomputation beside an offload policy."""
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
