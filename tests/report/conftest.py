"""Plans of blocks as they were measured on an H200, for tests of what is shown of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from spillway.planner.hardware import Bandwidth, Hardware
from spillway.planner.plan import program_of
from spillway.planner.planner import Point, make_plan, planning_rates
from spillway.planner.profile import Profile, Static
from spillway.planner.report.facts import Facts, facts_of
from spillway.planner.tasks import TaskBytes
from spillway.planner.timeline import simulate_program

LLAMA = Profile.load(Path(__file__).parents[1] / "planner" / "llama_8b_block.json")
GIB = 1 << 30
H200 = Hardware.named("h200")
SLOW = replace(H200, name="a slow link", bandwidths=(Bandwidth(active=1, out=3e9, back=3e9, both=6e9),))


@cache
def made(gib: int = 15, slow: bool = False, told: bool = True, hosted: bool = False) -> Facts:
    """Facts of a plan for six blocks.

    Args:
        gib: its budget.
        slow: whether its link is slow, so that compute waits.
        told: whether the profile says what its static bytes are.
        hosted: whether compute waits for the host before it gets to the blocks.
    """
    if hosted:
        return with_host(made(gib, slow, told))
    static = Static(8 * GIB, GIB, GIB, LLAMA.static_bytes - 10 * GIB) if told else None
    kinds = tuple(replace(kind, backward_change_bytes=64 << 20) for kind in LLAMA.kinds)
    # The optimizer lets go of all gradients in the end.
    after = replace(LLAMA.after, change_bytes=-(6 * 64 << 20) - GIB)
    profile = replace(LLAMA, kinds=kinds, calls=LLAMA.calls[:6], static=static, after=after)
    plan = make_plan(profile, H200, budget=gib * GIB, window=256 << 20, allow={"keep", "host", "recompute"})
    return facts_of(
        profile,
        plan,
        SLOW if slow else H200,
        measured=Point(plan.predicted_peak + GIB, plan.predicted_seconds * 1.5),
        notes=["planned again for 15.0 GiB"],
        curve=(Point(14 * GIB, 0.3), Point(18 * GIB, 0.2)),
    )


def with_host(found: Facts) -> Facts:
    program = program_of(found.profile, found.plan)
    first, *others = program.tasks
    tasks = (replace(first, host_seconds=first.seconds + 0.1 * found.timeline.seconds), *others)
    rates = planning_rates(SLOW if found.hardware == SLOW.name else H200, found.plan.window)
    timeline = simulate_program(replace(program, tasks=tasks), rates, spans=True)
    return replace(found, timeline=timeline)


def with_tasks(found: Facts, **more: int) -> Facts:
    """Facts of a measured step with the predicted bytes of each task, and with ``more`` bytes in some of them."""
    assert found.measured is not None
    tasks = tuple(
        TaskBytes(span.name, span.peak_bytes + (extra := more.get(span.name.replace(" ", "_"), 0)), extra)
        for span in found.timeline.spans
        if span.peak_bytes
    )
    return replace(found, measured=replace(found.measured, tasks=tasks))


@pytest.fixture(scope="session")
def facts() -> Callable[..., Facts]:
    return made
