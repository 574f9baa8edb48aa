"""The report of what is attached: its plan, beside what was measured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spillway.errors import UsageError
from spillway.planning.curve import Point
from spillway.planning.files import write_file
from spillway.report.facts import facts_of
from spillway.report.page import to_page
from spillway.report.trace import to_trace
from spillway.runtime.host_memory import local_ranks

if TYPE_CHECKING:
    from spillway.attaching.pilot import Pilot


def write_report(
    pilot: Pilot | None, path: str | os.PathLike[str], trace: str | os.PathLike[str] | None, *, curve: bool
) -> None:
    """What :meth:`spillway.Attached.report` writes; its arguments, and who found the plan."""
    if pilot is None or pilot.plan is None:
        missing = "" if pilot is None else f" (it takes {pilot.missing})"
        raise UsageError(
            f"report: got a call before there is a plan{missing}, expected attach(model, budget=...) and steps"
        )
    if pilot.profile is None or pilot.hardware is None or pilot.sweep is None:
        raise UsageError(
            "report: got a plan that was given, of whose step nothing was measured, expected attach(model, "
            "budget=...); or write the report of its profile, with: spillway report profile.json plan.json"
        )
    measured = pilot.measured
    facts = facts_of(
        pilot.profile,
        pilot.plan,
        pilot.hardware,
        active=local_ranks(),
        measured=None if measured is None else Point(measured.peak_bytes, measured.seconds),
        notes=pilot.notes,
        curve=pilot.sweep(pilot.profile) if curve else None,
    )
    # All is made before anything is written.
    page, step = to_page(facts), None if trace is None else to_trace(facts)
    write_file(path, page)
    if trace is not None and step is not None:
        write_file(trace, step)
