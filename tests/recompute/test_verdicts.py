"""What a device tells late of re-runs that made something else. What it compares is told at once on a CPU: here the
answers are put in by hand, as if they had come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from recompute.test_tapes import leaf
from recompute.test_unwatched import Changing
from spillway.errors import RecomputeError
from spillway.regions.verdicts import Verdicts


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


class Compares(torch.autograd.Function):
    """The identity, in whose backward something is compared on a device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, verdicts: Verdicts) -> torch.Tensor:
        ctx.verdicts = verdicts
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.verdicts.add("Block", torch.empty((), dtype=torch.bool, device="meta"))
        return grads[0], None


class Asking(Verdicts):
    """Notes what it was asked to send, and sends nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def send(self) -> None:
        self.asked.append(sum(map(len, self._waiting.values())))
        self._waiting.clear()


def test_a_backward_s_comparisons_are_asked_for_once_and_at_its_end() -> None:
    verdicts = Asking()
    x = torch.ones(1, requires_grad=True)
    seen = []
    y = Compares.apply(x, verdicts)
    y.register_hook(lambda _: seen.append(len(verdicts.asked)))
    z = Compares.apply(y, verdicts)
    z.sum().backward(retain_graph=True)
    assert seen == [0]
    assert verdicts.asked == [2]
    z.sum().backward()
    assert verdicts.asked == [2, 2]


def test_what_is_compared_outside_of_a_backward_waits_for_the_next_call() -> None:
    verdicts = Asking()
    verdicts.add("Block", torch.empty((), dtype=torch.bool, device="meta"))
    assert verdicts.asked == []
    assert len(verdicts._waiting) == 1


def test_where_backward_raises_the_next_one_asks_for_all() -> None:
    verdicts = Asking()
    x = torch.ones(1, requires_grad=True)

    def fails(_: torch.Tensor) -> None:
        raise ValueError("no more")

    y = Compares.apply(x * 1.0, verdicts)
    x.register_hook(fails)
    with pytest.raises(ValueError, match="no more"):
        y.sum().backward()
    assert verdicts.asked == []
    z = torch.ones(1, requires_grad=True)
    Compares.apply(z, verdicts).sum().backward()
    assert verdicts.asked == [2]
