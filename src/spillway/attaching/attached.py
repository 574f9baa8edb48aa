"""The public call that puts recomputed regions around the blocks of a model, and what it gives back."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from spillway.attaching.block import KeptCall, RegionCall
from spillway.attaching.call import PLACE, ModuleCall
from spillway.attaching.model import ModelCall, ModelPass
from spillway.attaching.validation import (
    check_arguments,
    check_planned,
    check_policy,
    refuse_attached,
    refuse_checkpointing,
    refuse_class,
    refuse_compiled,
    refuse_copies,
    refuse_unmatched,
)
from spillway.blocks import Blocks, Named, above, find_blocks, walk
from spillway.errors import SpillwayError, UsageError, printable
from spillway.groups import Groups
from spillway.losses.own import own_losses
from spillway.policies import Keep, Offload, Policy
from spillway.recomputing import Recompute
from spillway.records import StepStats
from spillway.runtime.host_memory import local_ranks
from spillway.session import Session
from spillway.units import format_bytes, read_budget

if TYPE_CHECKING:
    from spillway.attaching.controller import Measured, PlanController
    from spillway.attaching.measure import DividedOptimizer, ProfileCollector
    from spillway.planning.hardware import Hardware
    from spillway.planning.plan import Plan
    from spillway.planning.profile import Profile


def attach(
    model: Module,
    *,
    policy: Recompute | Policy | str | None = None,
    blocks: Blocks | None = None,
    groups: Groups | Mapping[str, str | Sequence[str]] | None = None,
    every: int = 1,
    first: int | None = None,
    keep_last: int = 0,
    min_bytes: int | str | None = None,
    budget: int | float | str | None = None,
    plan: Plan | None = None,
    hardware: Hardware | str | None = None,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    optimizer: DividedOptimizer | None = None,
    session: Session | None = None,
) -> Attached:
    """Recompute the blocks of a model, or offload what it saves, without editing it. Call and train it as always.

    Each block's forward becomes a region (:func:`~spillway.recompute`), and each call of the model is one pass: what
    regions offload has one learned order. Gradients are bit for bit those of the plain model. Only modules in training
    mode with gradients on are touched; evaluation is as ever.

    The model itself is not changed: its class, state dictionary, parameters and hooks are what they were, a copy
    (``copy.deepcopy``, an average of weights) or a pickle runs its own weights and has no regions. DDP and FSDP2's
    ``fully_shard`` may come before or after. A block's own hooks run outside of its region, once.

    Compile blocks, not the model, and before attaching (``for block in model.layers: block.compile()``): an outer
    ``torch.compile`` traces through regions, which then save nothing.

    Args:
        model: a module whose call is a step's forward.
        policy: a :class:`~spillway.Recompute`, with the options of each region; ``None``: ``Recompute()``, which
            computes everything again. Or an offload policy (:mod:`spillway.policies`): then there are no regions, and
            a :class:`~spillway.offload` context with this policy around each call of the model. Or the name of one, as
            the command line has it: ``"recompute"``, ``"offload"``, ``"keep"``.
        blocks: which modules are blocks: a class or a tuple of them; a pattern of dotted names as in a shell
            (``"layers.*"``, ``"*.mlp"``), whose ``*`` matches dots; a predicate ``(name, module) -> bool``; or a list
            of such. Of what a class or a pattern matches, only the outermost modules are taken: ``"layers.*"`` takes
            ``layers.0``, and not ``layers.0.mlp``. A predicate is taken at its word, and a list may name blocks within
            blocks. ``None``: those that the model repeats.
        groups: names of groups, each with a pattern of dotted module names, or several; or a
            :class:`~spillway.Groups`, with rules. What a module that matches saves is a group
            (:class:`~spillway.group`), and only groups leave, and what regions offload; there are regions only if
            ``policy`` is a :class:`~spillway.Recompute`.
        every: recompute each so many-th block only: the first, and so on.
        first: recompute only so many of the first blocks. ``None``: all.
        keep_last: leave out so many of the last blocks, which backward wants first: what they save stays on the device.
        min_bytes: leave smaller tensors where they are, of those that regions or the policy would send away. Bytes, or
            a size like ``"4MiB"``. ``None``: 1 MiB, as with :class:`~spillway.offload`. Where a call of the model is
            inside of such a context, regions go by that one's.
        budget: bytes that a step may have allocated on the device at most, parameters, gradients and optimizer state
            included, or a size like ``"40GiB"``, or a share like ``"60%"``, as for :func:`spillway.plan`: then it
            is decided for each block and operator what stays, what leaves and what is computed again. The first steps
            are measured, a plan is made, applied, and checked against a real step. ``docs/planning.md`` tells how.
        plan: a plan that was made before, by :func:`spillway.plan`, instead.
        hardware: what the machine can do, as for :func:`spillway.plan`. ``None``: as it was measured on it, once.
        host_budget: with a budget: bytes of host memory that what leaves may take. ``None``: what the session may have.
        disk_budget: with a budget: bytes of disk. ``None``: any.
        allow: with a budget: what may be done, of ``"keep"``, ``"host"``, ``"disk"`` and ``"recompute"``. ``None``: all
            but ``"disk"`` for an accelerator's tensors, all but ``"host"`` for the CPU's.
        optimizer: with a budget or a plan: the :class:`~spillway.OffloadedOptimizer` of the model's parameters. How
            much of it is stepped on the host, and how much has its state on the device, is then one of the plan's
            decisions (:meth:`OffloadedOptimizer.divide <spillway.OffloadedOptimizer.divide>`).
        session: ``None``: the default one.

    Returns:
        What was attached; :meth:`Attached.remove` undoes it. It need not be kept.

    Raises:
        UsageError: for arguments that cannot be meant; blocks, or submodules of them, that are not found; a model that
            is attached, or that checkpoints by itself, already; one that is compiled around its blocks.
        UnsupportedError: for modules whose call cannot be taken over: scripted ones, those of a class with a
            ``__call__`` or ``__deepcopy__`` of its own that goes past torch's, or with a property for a forward; and
            for ``DataParallel``.

    Example:
        >>> attached = spillway.attach(model, policy=spillway.Recompute(save="attention"))  # doctest: +SKIP
        >>> model(batch).loss.backward()  # doctest: +SKIP
        >>> attached.remove()  # doctest: +SKIP
    """
    check_arguments(model, session, every=every, first=first, keep_last=keep_last)
    if isinstance(policy, str):
        policy = policy_named(policy)
    if budget is not None or plan is not None:
        check_planned(policy, groups, plan, budget, every=every, first=first, keep_last=keep_last)
    elif any(each is not None for each in (hardware, host_budget, disk_budget, allow, optimizer)):
        raise UsageError(
            "got hardware, host_budget, disk_budget, allow or optimizer without a budget, expected one beside them, "
            "since they say how it is planned for; give budget=..."
        )
    if optimizer is not None and not hasattr(optimizer, "divide"):
        raise UsageError(
            f"optimizer: got {type(optimizer).__name__}, expected a spillway.OffloadedOptimizer, of which a part can "
            f"be on the host; leave out any other: its state is counted as it is"
        )
    modules = [Named("", model), *walk(model)]
    refuse_attached(modules)
    refuse_copies(modules)
    rules = Groups(groups) if isinstance(groups, Mapping) else groups
    if rules is not None and not isinstance(rules, Groups):
        raise UsageError(f"groups: got {groups!r}, expected a mapping from names to patterns, or a spillway.Groups")
    how = policy if policy is not None else Recompute() if rules is None else Offload()
    calls: list[ModuleCall]
    if isinstance(how, Recompute):
        refuse_checkpointing(modules)
        found = find_blocks(model, blocks)
        taken = found[: max(len(found) - keep_last, 0)][:first][::every]
        refuse_unmatched(how.choices.patterns, taken, model)
        calls = [RegionCall(each, how, session, taken) for each in taken]
    else:
        check_policy(how, blocks, every=every, first=first, keep_last=keep_last)
        taken = find_blocks(model, blocks)[-keep_last:] if keep_last else []
        calls = [KeptCall(each) for each in taken]
    if rules is not None:
        taken = [*taken, *_group(model, calls, rules)]
    around = above(model, taken)
    for each in (Named("", model), *taken):
        refuse_class(each)
    refuse_compiled(around)
    context = ModelPass(
        # What regions do not take is kept, or leaves in groups; what they offload has its order here.
        policy=(Keep() if rules is None else None) if isinstance(how, Recompute) else how,
        groups=None if rules is None else dataclasses.replace(rules, patterns={}),
        min_bytes=min_bytes,
        tag=f"attached {type(model).__name__}",
        session=session,
    )
    controller = None
    if budget is not None or plan is not None:
        limits = {"host_budget": host_budget, "disk_budget": disk_budget, "allow": allow}
        controller = _controller_of(model, budget, plan, optimizer, session, min_bytes, hardware, limits)
    root = ModelCall(model, calls, around, context, recomputes=isinstance(how, Recompute))
    attached = Attached(root, how, controller)
    if controller is not None:
        attached.follow(controller)
    _take(attached, root)
    return attached


NAMED: dict[str, Callable[[], Recompute | Policy]] = {"offload": Offload, "recompute": Recompute, "keep": Keep}
"""Policies by the names that :func:`attach`, the command line and callbacks take."""


def policy_named(name: str) -> Recompute | Policy:
    """The policy of a name.

    Raises:
        UsageError: for a name that there is not.
    """
    if name not in NAMED:
        raise UsageError(
            f"policy: got {name!r}, expected one of {', '.join(NAMED)}, a spillway.Recompute(...), or an offload "
            f"policy such as spillway.policies.Ratio(0.5)"
        )
    return NAMED[name]()


def _controller_of(
    model: Module,
    budget: int | float | str | None,
    plan: Plan | None,
    optimizer: DividedOptimizer | None,
    session: Session | None,
    min_bytes: int | str | None,
    hardware: Hardware | str | None,
    limits: Mapping[str, Any],
) -> PlanController:
    # These take a while to import, and are for users with a budget.
    from spillway.attaching.budget import Planner, collector_of
    from spillway.attaching.controller import PlanController

    collector = collector_of(model, session, min_bytes, optimizer=optimizer)
    nbytes = None if budget is None else read_budget(budget)
    planner = Planner.of(collector.device, session, hardware, needs_hardware=plan is None, **limits)
    return PlanController(collector, planner, budget=nbytes, plan=plan)


def _group(model: Module, calls: list[ModuleCall], groups: Groups) -> list[Named]:
    """Give the modules that are groups their names; those that nothing else takes are added to the calls, and given."""
    known = {call.name: call for call in calls}
    added: list[Named] = []
    for name, patterns in groups.patterns.items():
        for each in find_blocks(model, [patterns] if isinstance(patterns, str) else list(patterns)):
            call = known.get(each.name)
            if call is None:
                call = known[each.name] = ModuleCall(each)
                calls.append(call)
                added.append(each)
            if call.group is not None:
                raise UsageError(f"groups: got {each.name!r} in {call.group!r} and in {name!r}, expected it in one")
            call.group = name
    return added


def _take(attached: Attached, root: ModelCall) -> None:
    # Here and not above: it takes a second, for which whoever trains waits anyway.
    from torch._dynamo.decorators import skip

    # Torch is not to trace it. It may what is called inside; torch.compiler.disable(recursive=False) forbids exporting.
    skip(ModuleCall.__call__)
    with ExitStack() as undo:
        undo.callback(attached.remove)
        # The model comes last, and goes first: it looks whether its blocks are there, and other threads may call it.
        for call in (*root.blocks, root):
            call.take()
        undo.pop_all()


def attached_to(model: Module) -> Attached | None:
    """What is attached to a model, if something is: for those who did not keep what ``attach`` gave back.

    Example:
        >>> attached_to(torch.nn.Linear(2, 2)) is None
        True
    """
    call = model.__dict__.get(PLACE)
    # A shallow copy has it in its dictionary, and nothing attached.
    attached = call.attached if isinstance(call, ModelCall) and call.module() is model else None
    return attached if isinstance(attached, Attached) else None


class Attached:
    """What :func:`attach` put around a model. Also a context manager, which removes it in the end.

    It does not keep the model alive. A copy of it is ``None``, since a copy of the model has nothing attached.

    Example:
        >>> with spillway.attach(model, blocks="layers.*", every=2) as attached:  # doctest: +SKIP
        ...     model(batch).loss.backward()
        >>> attached.stats().recomputed_bytes  # doctest: +SKIP
    """

    def __init__(self, root: ModelCall, policy: Recompute | Policy, controller: PlanController | None = None) -> None:
        self._root = root
        self._controller = controller
        self._root.attached = self
        self._policy = policy
        self._removed = False

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the recomputed blocks, in the order in which the model has them."""
        return tuple(call.name for call in self._root.blocks if isinstance(call, RegionCall))

    @property
    def passes(self) -> int:
        """How often the model was called in training since it was attached."""
        return self._root.passes

    def follow(self, observer: PlanController | ProfileCollector) -> None:
        """From the next call of the model on, have it observed, and its blocks called in the observer's way."""
        self._root.observer = observer
        observer.take([call for call in self._root.blocks if isinstance(call, RegionCall)])
        model = self._root.module()
        if model is not None:
            self._root.losses = own_losses(model)

    def tell(self, told: Callable[[SpillwayError], None]) -> None:
        """Of what is refused in a call later on, tell somebody, and let the call go on as if nothing were attached.

        For those who attach to a model whose code is not theirs. What they raise then is raised in the call.
        """
        for call in (self._root, *self._root.blocks):
            call.told = told

    @property
    def plan(self) -> Plan | None:
        """The plan in force; ``None`` as long as there is none, and where there was no budget."""
        return None if self._controller is None else self._controller.plan

    @property
    def profile(self) -> Profile | None:
        """What was measured for it; ``None`` as long as nothing was."""
        return None if self._controller is None else self._controller.profile

    @property
    def stage(self) -> str | None:
        """Where the search for a plan is; ``None`` without a budget.

        ``"profiling operators"``, ``"profiling memory"``, ``"profiling time"``, ``"warming up"``, ``"validating"``, and
        ``"active"`` when the search is over.
        """
        return None if self._controller is None else self._controller.stage.value

    @property
    def budget(self) -> int | None:
        """Bytes that a step may have; ``None`` without a budget, and while a share of one is not yet measured."""
        return None if self._controller is None else self._controller.budget

    @property
    def missing(self) -> str | None:
        """What a plan still needs, in words; ``None``: there is one, or no budget."""
        return None if self._controller is None else self._controller.missing or None

    @property
    def measured(self) -> Measured | None:
        """What the step took in which the plan was checked; ``None`` before."""
        return None if self._controller is None else self._controller.measured

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened while a plan was looked for and held; none without a budget."""
        return () if self._controller is None else tuple(self._controller.notes)

    def explain(self, what: str | Module | torch.Tensor | None = None) -> str:
        """Why what is done is done.

        Args:
            what: a block, by its name or itself; or a module, a parameter or a buffer of one. ``None``: where the
                search for a plan is, and the whole plan, or what it still needs.

        Raises:
            UsageError: for a block where there is no plan, or no such block.

        Example:
            >>> print(attached.explain(model.layers[3]))  # doctest: +SKIP
        """
        plan = self.plan
        if what is None:
            losses = [f"the loss of {loss.kind} is computed in rows" for loss in self._root.losses if loss.is_in_rows]
            plans = [] if plan is None else [str(plan)]
            return "\n".join([self._state(), *plans, *map(printable, [*losses, *self.notes])])
        if plan is None:
            raise UsageError(f"explain: got a call before there is a plan ({self._state()}), expected one after it")
        name = what if isinstance(what, str) else self._block_of(what)
        found = [block for block in plan.blocks if block.name == name]
        if not found:
            names = ", ".join(repr(block.name) for block in plan.blocks[:4])
            raise UsageError(
                f"explain: got {what!r:.200}, expected a block of the plan ({names}, ...), or a module, a parameter or "
                f"a buffer of one"
            )
        lines = [
            printable(f"{each.operator} (operator {each.place}, {each.nbytes} bytes) {each.reason}")
            for each in found[0].operators
        ]
        return "\n".join([str(found[0]), *lines])

    def _block_of(self, what: object) -> str | None:
        """The name of the block that something is, or is in."""
        for call in self._root.blocks:
            module = call.module()
            if module is not None:
                parts = (*module.modules(), *module.parameters(), *module.buffers())
                if any(part is what for part in parts):
                    return call.name
        return None

    def report(
        self, path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None, curve: bool = False
    ) -> None:
        """Write the plan as one HTML file, which is opened without a network. ``docs/report.md`` tells what is in it.

        Args:
            path: of the file. One that is there is written anew.
            trace: of another file: the simulated step, for Chrome and Perfetto.
            curve: also plan for other budgets, and draw what a step takes for each. That takes as long as some ten
                plans do.

        Raises:
            UsageError: where there is no plan, or nothing was measured, since a plan was given; where plotly is not
                installed; if there can be no such file.

        Example:
            >>> attached.report("plan.html", trace="step.json")  # doctest: +SKIP
        """
        controller = self._controller
        if controller is None or controller.plan is None:
            missing = "" if controller is None else f" (it takes {controller.missing})"
            raise UsageError(
                f"report: got a call before there is a plan{missing}, expected attach(model, budget=...) and steps"
            )
        if controller.profile is None or controller.planner.hardware is None:
            raise UsageError(
                "report: got a plan that was given, of whose step nothing was measured, expected attach(model, "
                "budget=...); or write the report of its profile, with: spillway report profile.json plan.json"
            )
        # Drawing takes a while to import.
        from spillway.planning.curve import Point
        from spillway.planning.files import write_file
        from spillway.report.facts import facts_of
        from spillway.report.page import to_page
        from spillway.report.trace import to_trace

        measured = controller.measured
        facts = facts_of(
            controller.profile,
            controller.plan,
            controller.planner.hardware,
            active=local_ranks(),
            measured=None if measured is None else Point(measured.peak_bytes, measured.seconds),
            notes=controller.notes,
            curve=controller.planner.curve(controller.profile) if curve else None,
        )
        # All is made before anything is written.
        page, step = to_page(facts), None if trace is None else to_trace(facts)
        write_file(path, page)
        if trace is not None and step is not None:
            write_file(trace, step)

    def stats(self) -> StepStats:
        """Bytes and seconds of the last pass through the model that has ended, as far as its backward has come.

        Of a call inside of a :class:`~spillway.offload` context, that context knows.
        """
        return self._root.context.stats()

    def remove(self) -> None:
        """Take everything off the model, which is then as it was. A second time, it does nothing.

        Raises:
            UsageError: if a module was compiled after attaching. Everything of Spillway's is off the model all the
                same, and what was compiled is still there.
        """
        if self._removed:
            return
        self._removed = True
        self._root.attached = None
        if self._root.observer is not None:
            self._root.observer.drop()
        strangers = [call for call in (self._root, *self._root.blocks) if not call.give_back()]
        if strangers:
            raise UsageError(strangers[0].collision())

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A call of the model has raised the same already.
        with suppress(UsageError) if kind is not None else nullcontext():
            self.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _state(self) -> str:
        """Stage, budget and peak in one line, and what a plan still needs."""
        if self._controller is None:
            return "no plan: attach() was given neither a budget nor a plan"
        parts = [f"stage {self.stage!r}"]
        if self.budget is not None:
            parts.append(f"budget {format_bytes(self.budget)}")
        if self.missing is not None:
            parts.append(f"no plan yet: it takes {self.missing}")
        elif self.plan is not None:
            parts.append(f"predicted peak {format_bytes(self.plan.predicted_peak)}")
            if self.measured is not None:
                parts.append(f"measured peak {format_bytes(self.measured.peak_bytes)}")
        return ", ".join(parts)

    def __repr__(self) -> str:
        names = self.blocks
        shown = ", ".join(names[:2] + (("...", names[-1]) if len(names) > 3 else names[2:]))
        if self._removed:
            what = "removed"
        elif self._controller is not None:
            what = f"{len(names)} blocks: {shown}; {self._state()}"
        else:
            what = f"{len(names)} blocks recomputed: {shown}" if names else f"policy {self._policy!r}"
        return printable(f"<spillway.Attached to {self._root.kind}, {what}>")
