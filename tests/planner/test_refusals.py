"""Programs and rates that cannot be meant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.programs import SLOW, task
from spillway import UsageError
from spillway.planner.tasks import Program, Sent, Task
from spillway.planner.timeline import simulate_program


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((task("f", -1),), "task 'f': got -1 s"),
        ((task("f", math.nan),), "task 'f': got nan s"),
        ((task("f", math.inf),), "task 'f': got inf s"),
        ((task("f", 1, host_seconds=-1),), "task 'f': got 1 s, -1 s of the host and"),
        ((task("f", 1, host_seconds=math.nan),), "task 'f': got 1 s, nan s of the host and"),
        ((task("f", 1, host_seconds=math.inf),), "task 'f': got 1 s, inf s of the host and"),
        ((task("f", 1, peak=-1),), "task 'f': got 1 s, 0.0 s of the host and a peak of -1 bytes"),
        ((task("f", 1, Sent(0, -1)),), "task 'f' sends key 0: got -1 bytes"),
        ((task("f", 1, Sent(0, 1)), task("g", 1, Sent(0, 1))), "task 'g' sends key 0: got a key that task 'f' has"),
        ((task("f", 1, Sent(0, 1), drops=(0,)), task("g", 1, drops=(0,))), "task 'g' drops key 0: got a key that was"),
        ((task("f", 1, Sent(0, 1), drops=(0,)), task("g", 1, takes=(0,))), "task 'g' takes key 0: got a key that was"),
        ((task("f", 1, takes=(0,)), task("g", 1, Sent(0, 1))), "task 'g' sends key 0: got a key that task 'f' has tak"),
        ((task("f", 1, drops=(0,)), task("g", 1, Sent(0, 1))), "task 'g' sends key 0: got a key that task 'f' has tak"),
    ],
)
def test_what_is_no_program_is_refused_by_the_name_of_its_task(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        simulate_program(Program(0, tasks), SLOW)
    assert message in str(caught.value)


def test_a_step_that_begins_with_fewer_than_no_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="static_bytes: got -1"):
        simulate_program(Program(-1, ()), SLOW)


@pytest.mark.parametrize("lead", [-1.0, math.inf, math.nan])
def test_a_lead_that_is_none_is_refused(lead: float) -> None:
    with pytest.raises(UsageError, match=f"program: lead: got {lead}, expected 0 or more seconds"):
        simulate_program(Program(0, (), lead), SLOW)


@pytest.mark.parametrize("name", ["out", "back", "disk_write", "disk_read", "window"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_lanes_that_carry_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"rates: {name}: got {value}, expected more than 0"):
        simulate_program(Program(0, ()), replace(SLOW, **{name: value}))
