"""From what a user says of a budget to a pilot for the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from spillway.attaching.peers import Peers, peers_of
from spillway.attaching.pilot import Pilot
from spillway.attaching.ranks import RankPilot
from spillway.attaching.stages import StagePilot
from spillway.attaching.steering import Divided
from spillway.errors import UnsupportedError, UsageError
from spillway.planning.curve import Curve, make_curve
from spillway.planning.hardware import Hardware
from spillway.planning.plan import Plan
from spillway.planning.planner import make_checkpointing_plan, make_plan
from spillway.planning.profile import Profile
from spillway.planning.programs import check_allow
from spillway.planning.stages import StageProfile, make_stage_plans, simulate_stages
from spillway.planning.tasks import Turn
from spillway.planning.windows import Lanes
from spillway.profiling.machine import known_hardware
from spillway.profiling.meter import Known, known_bytes
from spillway.runtime.host_memory import local_ranks
from spillway.session import MIN_BYTES, Session
from spillway.units import parse_bytes, read_budget


@dataclass(frozen=True)
class Limits:
    """What a plan has to keep to, as the user says it."""

    budget: int | float | str | None = None
    host_budget: int | str | None = None
    disk_budget: int | str | None = None
    allow: Collection[str] | None = None


def allowed(device: torch.device, allow: Collection[str] | None) -> Collection[str]:
    """What may be done: by default, all that serves a device at its best."""
    if allow is not None:
        return allow
    return {"keep", "recompute", "disk" if device.type == "cpu" else "host"}


def device_of(model: Module) -> torch.device:
    """Where a model computes.

    Raises:
        UsageError: if it has no parameters.
    """
    parameter = next(iter(model.parameters()), None)
    if parameter is None:
        raise UsageError(f"got {type(model).__name__}, which has no parameters, with a budget, expected one that has")
    return parameter.device


def pilot_of(
    model: Module,
    limits: Limits,
    plan: Plan | None,
    hardware: Hardware | str | None,
    session: Session | None,
    min_bytes: int | str | None,
    optimizer: Divided | None = None,
) -> Pilot:
    """A pilot that finds a plan, or has one.

    Raises:
        UsageError: for limits that cannot be meant.
    """
    device = device_of(model)
    _check(limits)
    budget = None if limits.budget is None else read_budget(limits.budget)
    least = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")

    # Measured at most once on a machine, and not in the middle of a step.
    known: Hardware | None = None
    if hardware is not None:
        known = Hardware.of(hardware)
    elif plan is None:
        known = known_hardware(device)

    used = session if session is not None else Session.default()
    window = used.runtime(device).mover.window

    def terms(hardware: Hardware | None, room: int) -> dict[str, Any]:
        given = None if limits.host_budget is None else parse_bytes(limits.host_budget, what="host_budget")
        return {
            "hardware": hardware,
            "window": window,
            "may_grow": used.window is None,
            "active": local_ranks(),
            "host_budget": room if given is None else min(given, room),
            "disk_budget": limits.disk_budget,
            "allow": allowed(device, limits.allow),
        }

    def planner(profile: Profile, aim: int, peers: Peers) -> Plan:
        # What others keep there, as an optimizer does, is taken already.
        room = min(peers.share("room", lambda: used.host_room(device)))
        first = peers.share("hardware", lambda: known)[0]
        return peers.share("plan", lambda: make_plan(profile, budget=aim, **terms(first, room)))[0]

    def checkpointing(profile: Profile, aim: int, peers: Peers) -> Plan:
        first = peers.share("hardware", lambda: known)[0]
        assert first is not None
        return peers.share(
            "plan",
            lambda: make_checkpointing_plan(profile, first, budget=aim, window=window, active=local_ranks()),
        )[0]

    def sweep(profile: Profile) -> Curve:
        return make_curve(profile, **terms(known, used.host_room(device)))

    return Pilot(
        type(model).__name__,
        device,
        session,
        min_bytes=least,
        budget=budget,
        planner=planner,
        checkpointing=checkpointing,
        plan=plan,
        optimizer=optimizer,
        sweep=sweep,
        hardware=known,
        known=_known_of(model, device),
    )


def stage_pilot_of(index: int, model: Module, session: Session | None, min_bytes: int | str | None) -> StagePilot:
    """A pilot for a stage of a pipeline.

    Args:
        index: its place there.
        model: its module.
        session: ``None``: the default one.
        min_bytes: what is smaller does not leave.

    Raises:
        UsageError: for a module without parameters.
        UnsupportedError: where ranks share its parameters.
    """
    device = device_of(model)
    if not peers_of(model).alone:
        raise UnsupportedError(
            f"budget: got stage {index}, whose parameters several ranks share (DDP, FSDP or a mesh), expected stages "
            f"of one rank each, since such ranks would need one plan; give offload_stages its bytes or recompute"
        )
    least = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")
    return StagePilot(index, type(model).__name__, device, session, min_bytes=least, known=_known_of(model, device))


def rank_pilot_of(
    stages: Sequence[tuple[StagePilot, Module]],
    limits: Limits,
    hardware: Hardware | str | None,
    session: Session | None,
) -> RankPilot:
    """A pilot for all stages that a rank has.

    Raises:
        UsageError: for limits that cannot be meant, and for stages on several devices.
    """
    assert limits.budget is not None
    _check(limits)
    budget = read_budget(limits.budget)
    if isinstance(budget, float):
        raise UsageError(
            f"budget: got {limits.budget!r} for the stages of a pipeline, expected bytes, since several stages share "
            f'them and no profile has them all; write it like "40GiB"'
        )
    devices = {device_of(module) for _, module in stages}
    if len(devices) > 1:
        raise UsageError(f"stages: got some on {sorted(map(str, devices))}, expected one device, which has one budget")
    (device,) = devices
    used = session if session is not None else Session.default()
    given = None if limits.host_budget is None else parse_bytes(limits.host_budget, what="host_budget")
    disk = None if limits.disk_budget is None else parse_bytes(limits.disk_budget, what="disk_budget")
    lanes = Lanes(known_hardware(device) if hardware is None else Hardware.of(hardware), local_ranks())
    # Now, before any plan claims another one.
    window = used.runtime(device).mover.window
    planner = _StagePlanner(used, device, lanes, window, given, disk, allowed(device, limits.allow))
    return RankPilot(stages, device, budget, planner)


@dataclass(frozen=True)
class _StagePlanner:
    """What a rank's plans are made with."""

    session: Session
    device: torch.device
    lanes: Lanes
    window: int
    host_budget: int | None
    disk_budget: int | None
    allow: Collection[str]

    def plans(self, stages: Sequence[StageProfile], turns: Sequence[Turn], static: int, aim: int) -> list[Plan]:
        # What others keep there, as an optimizer does, is taken already.
        room = self.session.host_room(self.device)
        return make_stage_plans(
            stages,
            turns,
            self.lanes,
            static_bytes=static,
            budget=aim,
            window=self.window,
            may_grow=self.session.window is None,
            host_budget=room if self.host_budget is None else min(self.host_budget, room),
            disk_budget=self.disk_budget,
            allow=self.allow,
        )

    def peak(self, stages: Sequence[StageProfile], turns: Sequence[Turn], static: int, plans: Sequence[Plan]) -> int:
        return simulate_stages(stages, plans, turns, self.lanes, static_bytes=static).peak_bytes


def _check(limits: Limits) -> None:
    """Now, and not only when the first steps were measured."""
    for what in ("host_budget", "disk_budget"):
        given = getattr(limits, what)
        if given is not None:
            parse_bytes(given, what=what)
    if limits.allow is not None:
        check_allow(limits.allow)


def profiling_pilot(model: Module, session: Session | None, optimizer: torch.optim.Optimizer | None = None) -> Pilot:
    """A pilot that measures, and plans nothing."""
    device = device_of(model)
    return Pilot(
        type(model).__name__,
        device,
        session,
        min_bytes=MIN_BYTES,
        budget=None,
        planner=None,
        known=_known_of(model, device, optimizer),
    )


def _known_of(
    model: Module, device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], Known]:
    """What can be told of the device's bytes when it is called. It does not keep the model alive."""
    reference = weakref.ref(model)

    def known() -> Known:
        found = reference()
        # It is asked within a call of the model.
        assert found is not None
        return known_bytes(found, device, optimizer)

    return known
