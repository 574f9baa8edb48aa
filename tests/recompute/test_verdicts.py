"""What a device tells late of re-runs that made something else. What it compares is told at once on a CPU: here the
answers are put in by hand, as if they had come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spillway
from recompute.test_tapes import leaf
from recompute.test_unwatched import Changing
from spillway.errors import RecomputeError


class Late:
    """An event of a device that has come to it."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def with_a_failure() -> spillway.Session:
    session = spillway.Session()
    differs = torch.tensor(True)
    session.verdicts._sent.append(([("Block", differs)], differs[None], Late()))  # type: ignore[arg-type]
    return session


def test_a_session_that_is_closed_tells_of_what_nobody_was_told() -> None:
    session = with_a_failure()
    with pytest.raises(RecomputeError, match="got other values when Block ran again"):
        session.close()
    assert session.closed
    session.close()
    with pytest.raises(RecomputeError, match="got other values when Block ran again"), with_a_failure():
        pass


def test_an_error_that_is_on_its_way_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="the user's") as raised, with_a_failure():
        raise ValueError("the user's")
    assert "got other values when Block ran again" in raised.value.__notes__[0]


def test_the_default_session_tells_at_the_end() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})"
        + """
import spillway, torch
from recompute.test_verdicts import Late

differs = torch.tensor(True)
spillway.Session.default().verdicts._sent.append(([("Block", differs)], differs[None], Late()))
print("its end")
"""
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "its end\n"
    assert "got other values when Block ran again" in done.stderr


def test_a_later_call_tells_of_what_nobody_was_told() -> None:
    with spillway.Session() as session:
        verdicts = with_a_failure().verdicts
        session.verdicts = verdicts
        block = Changing()
        for _ in range(2):
            spillway.recompute(block, leaf() * 1, session=session, watch=False).sum().backward()
        with pytest.raises(RecomputeError, match="got other values when Block ran again"):
            spillway.recompute(block, leaf() * 1, session=session, watch=False)
