"""A script that is run until a model of it is profiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.nn import Module

from spillway.attaching import attach
from spillway.attaching.budgeted import device_of
from spillway.attaching.pilot import Pilot
from spillway.errors import UnsupportedError, printable
from spillway.planning.files import check_writable
from spillway.planning.profile import Profile
from spillway.running.asked import Treated
from spillway.running.files import numbered, rank_of
from spillway.running.script import Ended, Script
from spillway.running.seeing import Seeing
from spillway.running.table import wrapped
from spillway.session import MIN_BYTES
from spillway.units import format_bytes, format_seconds


def run_profiled(script: Script, path: Path, *, steps: int) -> Profile:
    """Run a script until the first of its models is profiled, write the profile, and end the script there.

    Args:
        script: what to run.
        path: where to write it.
        steps: optimizer steps to wait for, at most.

    Raises:
        UsageError: for a script that is not there, or a file that cannot be written.
        UnsupportedError: if there was no profile.
        BaseException: what the script raises.
    """
    script.check()
    check_writable("-o", path)
    rank = rank_of()
    found: list[Profile] = []
    pilots: list[_EndingPilot] = []

    def treat(model: Module) -> Treated:
        pilot = _EndingPilot(model, found)
        attached = attach(model)
        attached.follow(pilot)
        pilots.append(pilot)
        return Treated(attached, "profile")

    def stepped(count: int) -> None:
        if count >= steps and not found:
            raise Ended

    seen = Seeing(treat, stepped)
    try:
        script.run()
    except Ended:
        pass
    except SystemExit as ended:
        if ended.code:
            raise
    outcome = seen.end(rank)
    for pilot in pilots:
        if not found:
            # The last step has ended with the script.
            pilot.finish()
            pilot.give()
    seen.close()
    if not found:
        reasons = "; ".join(f"{each.kind} {each.reason}" for each in outcome.not_attached)
        raise UnsupportedError(
            f"got no profile of a model in {outcome.steps} optimizer steps, expected three passes through one, forward "
            f"and backward; {reasons or 'run a script that trains in this process, or give more --steps'}"
        )
    found[0].save(numbered(path, "rank", rank))
    if not rank and sys.__stderr__ is not None:
        sys.__stderr__.write("\n".join(["", *summary(found[0]), printable(f"written to {path}"), ""]))
    return found[0]


def summary(profile: Profile) -> list[str]:
    """A profile in lines of at most 80 columns: kinds of blocks, what they save, what lies outside."""
    lines = wrapped(str(profile))
    for number, kind in enumerate(profile.kinds):
        calls = sum(call.kind == number for call in profile.calls)
        lines += wrapped(
            f"{calls} like {kind.kind}: {len(kind.operators)} operators save {format_bytes(kind.saved_bytes)}; forward "
            f"{format_seconds(kind.forward_seconds)}, backward {format_seconds(kind.backward_seconds)}",
            "  ",
        )
    for name, part in (("before", profile.before), ("between", profile.middle), ("after", profile.after)):
        lines.append(
            f"  {name} the blocks: {format_seconds(part.seconds)}, at most {format_bytes(part.peak_bytes)} more"
        )
    lines.append(f"  always there: {format_bytes(profile.static_bytes)}")
    return lines


class _EndingPilot(Pilot):
    """Measures, plans nothing, and ends the script in the call of the model by which all is known.

    Args:
        model: the model.
        found: where the profile goes.
    """

    def __init__(self, model: Module, found: list[Profile]) -> None:
        super().__init__(type(model).__name__, device_of(model), None, min_bytes=MIN_BYTES, budget=None, planner=None)
        self._found = found

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: the step before has ended."""
        super().begin(model, args, kwargs)
        if self.give():
            raise Ended

    def give(self) -> bool:
        """Whether there is a profile; the first one is what was looked for."""
        if self.profile is None:
            return False
        if not self._found:
            self._found.append(self.profile)
        return True
