"""``spillway.attach``: checkpoints and offloads the blocks of a model that is not edited.

With a budget, each call of the model goes to ``controller``, which takes the search for a plan from stage to stage
(``Stage``). ``collector`` profiles steps, and ``blocks`` traces blocks and tells them how they are called by a plan.
``search`` chooses plans, which the ``Planner`` of ``budget`` makes of a profile, and compares later steps with the
budget. ``CONTRIBUTING.md`` lists the other files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.nn import Module

from spillway._torch import skip_call
from spillway.attaching.attached import Attached, as_policy, attached_to
from spillway.attaching.block import BlockCall
from spillway.attaching.call import ModuleCall
from spillway.attaching.model import ModelCall, ModelPass
from spillway.attaching.validation import (
    check_options,
    check_policy,
    groups_of,
    refuse_checkpointing,
    refuse_class,
    refuse_compiled,
    refuse_modules,
    refuse_unmatched,
)
from spillway.checkpointing.blocks import Blocks, Named, above, find_blocks, inside_of, walk
from spillway.errors import UsageError
from spillway.parameters.streamable import Trainer
from spillway.parameters.streamed import StreamedModel
from spillway.policies import Keep, Offload, Policy
from spillway.recomputing import Recompute
from spillway.runtime.system import which_device
from spillway.saved_tensors.groups import Groups
from spillway.session import MIN_BYTES, Session
from spillway.units import parse_bytes, read_budget

if TYPE_CHECKING:
    from spillway.attaching.blocks import DividedOptimizer
    from spillway.attaching.controller import PlanController
    from spillway.planner.hardware import Hardware
    from spillway.planner.plan import Plan

__all__ = ["Attached", "as_policy", "attach", "attached_to"]


def attach(
    model: Module,
    *,
    policy: Recompute | Policy | str | None = None,
    blocks: Blocks | None = None,
    groups: Groups | Mapping[str, str | Sequence[str]] | None = None,
    every: int = 1,
    first: int | None = None,
    keep_last: int = 0,
    stream: Blocks | Literal["auto"] | None = None,
    device: torch.device | str | None = None,
    min_bytes: int | str | None = None,
    budget: int | float | str | None = None,
    plan: Plan | None = None,
    hardware: Hardware | str | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    optimizer: DividedOptimizer | Trainer | None = None,
    session: Session | None = None,
) -> Attached:
    """Recompute the blocks of a model, or offload what it saves, without editing it. Call and train it as always.

    Each block's forward is checkpointed (:func:`~spillway.recompute`), and each call of the model is one pass with one
    learned order of offloaded tensors. Gradients are bit for bit those of the plain model. Only modules in training
    mode with gradients enabled are affected. A model whose blocks checkpoint themselves (``gradient_checkpointing`` of
    transformers and diffusers, ``grad_checkpointing`` of timm) does so again after :meth:`Attached.remove`.

    The model's class, state dictionary, parameters and hooks are unchanged. A copy or a pickle runs its own weights and
    is not attached. DDP and FSDP2's ``fully_shard`` may come before or after. A block's own hooks run once, outside of
    the checkpointed forward. Compile blocks, not the model, and before attaching (``for block in model.layers:
    block.compile()``): an outer ``torch.compile`` traces through the blocks, which then save nothing.

    Args:
        model: a module whose call is a step's forward.
        policy: a :class:`~spillway.Recompute` with the options of each block; ``None``: ``Recompute()``, which
            recomputes everything. Or an offload policy (:mod:`spillway.policies`): then nothing is recomputed, and a
            :class:`~spillway.offload` context with this policy is around each call of the model. Or a name:
            ``"recompute"``, ``"offload"``, ``"keep"``.
        blocks: a class or a tuple of them; a pattern of dotted names as in a shell (``"layers.*"``), whose ``*``
            matches dots; a predicate ``(name, module) -> bool``; or a list of such. A class or a pattern takes the
            outermost modules that match: ``"layers.*"`` takes ``layers.0``, and not ``layers.0.mlp``. A predicate or a
            list may name blocks within blocks. ``None``: the blocks that the model repeats.
        groups: names of groups, each with one or several patterns of dotted module names, or a
            :class:`~spillway.Groups`. The tensors that a matching module saves are a group (:class:`~spillway.group`).
            Only groups and the tensors that blocks offload are offloaded. Blocks are checkpointed only if ``policy`` is
            a :class:`~spillway.Recompute`.
        every: recompute each so many-th block only, from the first on.
        first: recompute only so many of the first blocks. ``None``: all.
        keep_last: leave out so many of the last blocks, which backward needs first.
        stream: blocks, as for ``blocks``, whose frozen parameters are in CPU memory, and on the device only during
            their calls: in forward, in evaluation, and for backward. So are trainable ones that ``optimizer`` steps.
            Others stay on the device. Between calls, streamed parameters are tensors of the device whose bytes are in
            pinned CPU memory, or of the CPU if they stay in their files (:func:`load_weights`). They may be read,
            written and saved. ``"auto"``, with a budget: the blocks that are planned for. All are streamed while steps
            are profiled. Then the plan leaves on the device as many of them as make the step shorter.
        device: with ``stream``: where the model computes. All that is not streamed is moved there. ``None``: where the
            model's first parameter is.
        min_bytes: do not offload smaller tensors, nor stream smaller parameters. Bytes, or a size like ``"4MiB"``.
            ``None``: 1 MiB. Inside of an :class:`~spillway.offload` context, that one's counts for tensors.
        budget: the most bytes that a step may have allocated on the device, all included, or a size like ``"40GiB"``,
            or a share like ``"60%"``, as for :func:`spillway.plan`. Each operator of each block is then kept, offloaded
            or recomputed by a plan. The first steps are profiled, and the plan is validated: ``docs/planning.md``.
        plan: a plan of :func:`spillway.plan`, instead.
        hardware: the machine's speeds, as for :func:`spillway.plan`. ``None``: measured, once.
        host_budget: with a budget: bytes of CPU memory for what is offloaded. ``None``: what the session may have.
        disk_budget: with a budget: bytes of disk. ``None``: any.
        allow: with a budget: decisions that a plan may make, of ``"keep"``, ``"host"``, ``"disk"`` and ``"recompute"``.
            ``None``: all but ``"disk"`` for an accelerator, all but ``"host"`` for the CPU.
        optimizer: with a budget or a plan: the model's :class:`~spillway.OffloadedOptimizer`. The plan then decides how
            much of it is stepped on the CPU
            (:meth:`OffloadedOptimizer.divide <spillway.OffloadedOptimizer.divide>`). With ``stream``: the
            :class:`~spillway.OffloadedOptimizer` of the trainable parameters in these blocks. A plan does not divide
            it then.
        session: ``None``: the default one.

    Returns:
        The handle, whose :meth:`Attached.remove` undoes it. It need not be kept.

    Raises:
        UsageError: for invalid arguments; blocks or submodules that are not found; a model that is attached, or wrapped
            in checkpoints, already; one that is compiled around its blocks.
        UnsupportedError: for scripted modules, ``DataParallel``, and classes with a property for a forward, or with a
            ``__call__`` or ``__deepcopy__`` that does not use torch's.

    Example:
        >>> attached = spillway.attach(model, policy=spillway.Recompute(save="attention"))  # doctest: +SKIP
        >>> model(batch).loss.backward()  # doctest: +SKIP
        >>> attached.remove()  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    policy = as_policy(policy)
    limits = {"hardware": hardware, "host_budget": host_budget, "disk_budget": disk_budget, "allow": allow}
    chosen = {"policy": policy, "groups": groups, "every": every, "first": first, "keep_last": keep_last}
    planning = {"budget": budget, "plan": plan, "optimizer": optimizer, "stream": stream, "device": device}
    is_planned = check_options({**limits, **chosen, **planning, "session": session, "min_bytes": min_bytes})
    places_weights = stream == "auto"
    refuse_modules([Named("", model), *walk(model)])
    rules = groups_of(groups)
    streamed = [] if stream is None else _streamed_blocks(model, blocks if places_weights else stream)
    where = (next(model.parameters()).device if device is None else which_device(device)) if streamed else None
    how = policy if policy is not None else Recompute() if rules is None else Offload()
    calls = _block_calls(model, how, session, blocks, every=every, first=first, keep_last=keep_last)
    if rules is not None:
        _name_groups(model, calls, rules)
    for each in streamed:
        calls.setdefault(each.name, ModuleCall(each))
    taken = [Named(name, module) for name, call in calls.items() if (module := call.module()) is not None]
    around = above(model, taken)
    for each in (Named("", model), *taken):
        refuse_class(each)
    refuse_compiled(around)
    context = ModelPass(
        # Tensors outside of blocks are kept, or offloaded in groups. The order of blocks' offloaded tensors is here.
        policy=(Keep() if rules is None else None) if isinstance(how, Recompute) else how,
        groups=None if rules is None else replace(rules, patterns={}),
        min_bytes=min_bytes,
        tag=f"attached {type(model).__name__}",
        session=session,
    )
    controller = None
    if is_planned:
        limits["places_weights"] = places_weights
        controller = _controller(model, session, min_bytes, optimizer, budget, plan, where, **limits)
    root = ModelCall(model, list(calls.values()), around, context, recomputes=isinstance(how, Recompute))
    attached = Attached(root, how, controller)
    skip_call(ModuleCall.__call__)
    with ExitStack() as undo:
        undo.callback(attached.remove)
        if isinstance(how, Recompute):
            inside = [module for each in find_blocks(model, blocks) for module in each.module.modules()]
            for module in (*inside, *(each.module for each in around)):
                root.flags.switch_off(module)
        if where is not None:
            root.streams = _stream(model, calls, streamed, where, session, min_bytes, optimizer)
            if controller is not None:
                controller.search.planner.streams = root.streams
                controller.collector.stream(attached.blocks, root.streams)
        # The model comes last, and goes first: its call checks its blocks, and other threads may call it.
        for call in (*calls.values(), root):
            call.install()
        undo.pop_all()
    return attached


def _block_calls(
    model: Module,
    how: Recompute | Policy,
    session: Session | None,
    blocks: Blocks | None,
    *,
    every: int,
    first: int | None,
    keep_last: int,
) -> dict[str, ModuleCall]:
    """The calls of the blocks that are recomputed, or of the last ones, that a policy does not offload, by names."""
    if not isinstance(how, Recompute):
        check_policy(how, blocks, every=every, first=first, keep_last=keep_last)
        last = find_blocks(model, blocks)[-keep_last:] if keep_last else []
        return {each.name: ModuleCall(each, keeps=True) for each in last}
    refuse_checkpointing([Named("", model), *walk(model)])
    found = find_blocks(model, blocks)
    taken = found[: max(len(found) - keep_last, 0)][:first][::every]
    refuse_unmatched(how.choices.patterns, taken, model)
    return {each.name: BlockCall(each, how, session, taken) for each in taken}


def _name_groups(model: Module, calls: dict[str, ModuleCall], groups: Groups) -> None:
    """Name the modules that are groups, and add the calls of those that are no blocks."""
    for name, patterns in groups.patterns.items():
        for each in find_blocks(model, [patterns] if isinstance(patterns, str) else list(patterns), what="groups"):
            call = calls.setdefault(each.name, ModuleCall(each))
            if call.group is not None:
                raise UsageError(f"groups: got {each.name!r} in {call.group!r} and in {name!r}, expected it in one")
            call.group = name


def _streamed_blocks(model: Module, stream: Blocks | None) -> list[Named]:
    """The blocks whose parameters are streamed."""
    found = find_blocks(model, stream, what="stream")
    for each in found:
        if any(inside_of(other.name, (each.name,)) for other in found):
            raise UsageError(f"stream: got {each.name!r} and blocks inside of it, expected blocks that are not nested")
    return found


def _stream(
    model: Module,
    calls: Mapping[str, ModuleCall],
    blocks: Sequence[Named],
    device: torch.device,
    session: Session | None,
    min_bytes: int | str | None,
    optimizer: DividedOptimizer | Trainer | None,
) -> StreamedModel:
    """Move parameters of blocks to CPU memory."""
    if optimizer is not None and not isinstance(optimizer, Trainer):
        raise UsageError(
            f"optimizer: got {type(optimizer).__name__} with stream=, expected a spillway.OffloadedOptimizer"
        )
    least = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")
    pairs = [(each.name, each.module) for each in blocks]
    streams = StreamedModel(pairs, model, device, Session.default() if session is None else session, least, optimizer)
    for block in streams.blocks:
        calls[block.name].streamed = block
    return streams


def _controller(
    model: Module,
    session: Session | None,
    min_bytes: int | str | None,
    optimizer: DividedOptimizer | Trainer | None,
    budget: int | float | str | None,
    plan: Plan | None,
    where: torch.device | None,
    **limits: Any,
) -> PlanController:
    # Slow to import, and only for users with a budget.
    from spillway.attaching.budget import Planner
    from spillway.attaching.collector import ProfileCollector
    from spillway.attaching.controller import PlanController
    from spillway.attaching.search import PlanSearch

    # Its class was checked. With streamed parameters, all of its state is in CPU memory: there is nothing to divide.
    divided = cast("DividedOptimizer | None", optimizer) if where is None else None
    collector = ProfileCollector(model, session, min_bytes, optimizer=divided, device=where)
    nbytes = None if budget is None else read_budget(budget)
    planner = Planner(collector.device, session, **limits)
    return PlanController([collector], PlanSearch(planner, collector.notes, budget=nbytes, plan=plan))
