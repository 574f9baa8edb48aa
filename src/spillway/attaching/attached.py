"""The handle of an attached model."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from spillway._torch import PLACE
from spillway.attaching.block import BlockCall
from spillway.attaching.model import ModelCall
from spillway.errors import UsageError, printable
from spillway.policies import Keep, Offload, Policy
from spillway.recomputing import Recompute
from spillway.types import StepStats
from spillway.units import format_bytes, format_html

if TYPE_CHECKING:
    from spillway.attaching.controller import PlanController
    from spillway.planner.plan import Plan
    from spillway.planner.planner import Point
    from spillway.planner.profile import Profile


NAMED: dict[str, Callable[[], Recompute | Policy]] = {"offload": Offload, "recompute": Recompute, "keep": Keep}
"""Policies by the names that :func:`attach`, the command line and callbacks take."""


def as_policy(policy: Recompute | Policy | str | None) -> Recompute | Policy | None:
    """A policy, or that of a name."""
    if not isinstance(policy, str):
        return policy
    if policy not in NAMED:
        raise UsageError(
            f"policy: got {policy!r}, expected one of {', '.join(NAMED)}, a spillway.Recompute(...), or an offload "
            f"policy such as spillway.policies.Ratio(0.5)"
        )
    return NAMED[policy]()


def attached_to(model: Module) -> Attached | None:
    """The handle of an attached model; ``None``: it is not attached.

    Example:
        >>> attached_to(torch.nn.Linear(2, 2)) is None
        True
    """
    call = model.__dict__.get(PLACE)
    # A shallow copy has the call in its dictionary, and is not attached.
    return call.attached if isinstance(call, ModelCall) and call.module() is model else None


class Attached:
    """The handle of an attached model. Also a context manager, which removes it in the end.

    It does not keep the model alive. A copy of it is ``None``, since a copy of the model is not attached.

    Example:
        >>> with spillway.attach(model, blocks="layers.*", every=2) as attached:  # doctest: +SKIP
        ...     model(batch).loss.backward()
        >>> attached.stats().recomputed_bytes  # doctest: +SKIP
    """

    def __init__(self, root: ModelCall, policy: Recompute | Policy, controller: PlanController | None = None) -> None:
        self._root = root
        self._controller = controller
        self._search = None if controller is None else controller.search
        self._policy = policy
        self._removed = False
        root.attached = self
        if controller is not None:
            root.hand_to(controller)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the recomputed blocks, in the order in which the model has them."""
        return tuple(call.name for call in self._root.blocks if isinstance(call, BlockCall))

    @property
    def streamed(self) -> tuple[str, ...]:
        """Names of the blocks whose parameters are streamed now."""
        streams = self._root.streams
        return () if streams is None else tuple(block.name for block in streams.blocks if block.parameters)

    @property
    def passes(self) -> int:
        """How often the model was called in training since it was attached."""
        return self._root.passes

    @property
    def plan(self) -> Plan | None:
        """The latest plan; not in use while :attr:`missing` says that profiling began again. ``None``: none yet."""
        return None if self._search is None else self._search.plan

    @property
    def profile(self) -> Profile | None:
        """The profile that the plan was made of; ``None``: there is none yet."""
        return None if self._search is None else self._search.profile

    @property
    def stage(self) -> str | None:
        """The stage of the search for a plan; ``None`` without a budget.

        ``"profiling operators"``, ``"profiling memory"``, ``"profiling time"``, ``"warming up"``, ``"validating"``, and
        ``"active"`` when the search is over.
        """
        return None if self._controller is None else self._controller.stage.value

    @property
    def budget(self) -> int | None:
        """Bytes that a step may have; ``None``: no budget, or a share of a step that was not profiled yet."""
        return None if self._search is None else self._search.budget

    @property
    def missing(self) -> str | None:
        """The calls or steps that a plan still needs, in words; ``None``: there is a plan, or no budget."""
        return None if self._controller is None else self._controller.missing or None

    @property
    def measured(self) -> Point | None:
        """Peak and seconds of the step that validated the plan, and the bytes of its tasks; ``None`` before."""
        return None if self._search is None else self._search.measured

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes: whether the model's own checkpointing is switched off, and with a budget those of the search."""
        own, search = self._root.flags.note, self._search
        return (*(() if own is None else (own,)), *(() if search is None else search.notes))

    def explain(self, what: str | Module | torch.Tensor | None = None) -> str:
        """Explain the plan.

        Args:
            what: a block, by its name or itself; or a module, a parameter or a buffer of one. ``None``: the stage of
                the search, and the whole plan, or what it still needs.

        Raises:
            UsageError: for a block where there is no plan, or no such block.

        Example:
            >>> print(attached.explain(model.layers[3]))  # doctest: +SKIP
        """
        plan = self.plan
        if what is None:
            found = () if self._root.controller is None else self._root.controller.losses
            losses = [f"the loss of {loss.kind} is computed in rows" for loss in found if loss.is_in_rows]
            plans = [] if plan is None else [str(plan) if self.missing is None else f"the plan before: {plan}"]
            return "\n".join([self._state(), *plans, *map(printable, [*losses, *self.notes])])
        if plan is None:
            raise UsageError(f"explain: there is no plan yet ({self._state()}). Call it when there is one")
        owner = what if isinstance(what, str) else None
        for call in self._root.blocks:
            module = call.module()
            if owner is None and module is not None:
                parts = (*module.modules(), *module.parameters(), *module.buffers())
                owner = call.name if any(part is what for part in parts) else None
        mine = [block for block in plan.blocks if block.name == owner]
        if not mine:
            names = ", ".join(repr(block.name) for block in plan.blocks[:4])
            raise UsageError(
                f"explain: got {what!r:.200}, expected a block of the plan ({names}, ...), or a module, a parameter or "
                f"a buffer of one"
            )
        lines = [
            printable(
                f"{each.operator} (operator {each.place}, {format_bytes(each.nbytes)}): {each.decision.value}, since "
                f"{each.reason}"
            )
            for each in mine[0].operators
        ]
        return "\n".join([str(mine[0]), *lines])

    def report(
        self, path: str | os.PathLike[str], *, trace: str | os.PathLike[str] | None = None, curve: bool = False
    ) -> None:
        """Write the plan as one HTML file, which needs no network. ``docs/report.md`` describes it.

        Args:
            path: of the file, which is replaced.
            trace: of another file: the simulated step, for Chrome and Perfetto.
            curve: also draw a step's time over up to eight budgets, each with a plan of its own.

        Raises:
            UsageError: if there is no plan, or no profile, since the plan was given; if plotly is not installed; if the
                file cannot be written.

        Example:
            >>> attached.report("plan.html", trace="step.json")  # doctest: +SKIP
        """
        # Slow to import.
        from spillway.planner.files import write_file
        from spillway.planner.planner import make_curve
        from spillway.planner.report.facts import facts_of
        from spillway.planner.report.page import to_page, to_trace

        search, plan, profile = self._search, self.plan, self.profile
        if search is None or plan is None:
            raise UsageError(
                "report: there is no plan yet. Attach with attach(model, budget=...), and train some steps"
                if search is None
                else f"report: there is no plan yet, which takes {self.missing}. Call it again afterwards"
            )
        if profile is None:
            raise UsageError(
                "report: the plan was given, so nothing was measured here. Attach with attach(model, budget=...), or "
                "write the report from files, with: spillway report profile.json plan.json"
            )
        hardware, limits = search.planner.hardware, search.planner.limits()
        facts = facts_of(
            profile,
            plan,
            hardware,
            # Until a plan is active, it is of a plan before.
            measured=search.measured if self.stage == "active" else None,
            notes=self.notes,
            curve=make_curve(profile, hardware, **limits) if curve else (),
        )
        # All is made before anything is written.
        texts = [(path, to_page(facts)), *([] if trace is None else [(trace, to_trace(facts))])]
        for file, text in texts:
            write_file(file, text)

    def stats(self) -> StepStats:
        """Bytes and seconds of the last pass that has ended, as far as its backward has come.

        A call inside of an :class:`~spillway.offload` context counts there.
        """
        return self._root.context.stats()

    def remove(self) -> None:
        """Detach the model, which is then unchanged. A second call does nothing.

        Raises:
            UsageError: if a module was compiled after attaching. The model is detached all the same, and stays
                compiled. With ``stream`` and ``optimizer``: between a backward that has stepped parameters and its
                ``step()``. The model then stays attached.
        """
        if self._removed:
            return
        if self._root.streams is not None:
            # It may be refused: then all stays as it is.
            self._root.streams.remove()
            self._root.streams = None
            for call in self._root.blocks:
                call.streamed = None
        self._removed = True
        self._root.attached = None
        self._root.flags.put_back()
        if self._root.controller is not None:
            self._root.controller.drop()
        strangers = [call for call in (self._root, *self._root.blocks) if not call.uninstall()]
        if strangers:
            raise strangers[0].collision()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        if self._removed:
            parts.append("removed")
        elif self.missing is not None:
            parts.append(f"{'no plan yet' if self.plan is None else 'no new plan yet'}: it takes {self.missing}")
        elif self.plan is not None:
            parts.append(f"predicted peak {format_bytes(self.plan.predicted_peak)}")
            if self.measured is not None:
                parts.append(f"measured peak {format_bytes(self.measured.peak_bytes)}")
        return ", ".join(parts)

    def _repr_html_(self) -> str:
        return format_html(f"{self!r}\n{self.explain()}")

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
