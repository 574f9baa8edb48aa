"""What a device tells late of re-runs that made something else. What it compares is told at once on a CPU: here the
answers are put in by hand, as if they had come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from recompute.regions import Changing, leaf
from spillway.checkpointing.checks import PendingChecks
from spillway.errors import RecomputeError
from support import run_script


class Late:
    """An event of a device that has come to it."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def with_a_failure() -> spillway.Session:
    session = spillway.Session()
    differs = torch.tensor(True)
    session.of(PendingChecks)._sent.append(([("Block", differs)], differs[None], Late()))  # type: ignore[arg-type]
    return session


def test_a_session_that_is_closed_tells_of_what_nobody_was_told() -> None:
    session = with_a_failure()
    with pytest.raises(RecomputeError, match="Block gave other values when"):
        session.close()
    assert session.closed
    session.close()
    with pytest.raises(RecomputeError, match="Block gave other values when"), with_a_failure():
        pass


def test_an_error_that_is_on_its_way_is_not_hidden() -> None:
    with pytest.raises(ValueError, match="the user's") as raised, with_a_failure():
        raise ValueError("the user's")
    assert "Block gave other values when" in raised.value.__notes__[0]


def test_the_default_session_tells_at_the_end() -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})"
        + """
import spillway, torch
from recompute.test_verdicts import Late, PendingChecks

differs = torch.tensor(True)
spillway.Session.default().of(PendingChecks)._sent.append(([("Block", differs)], differs[None], Late()))
print("its end")
"""
    )
    done = run_script(script)
    assert done.stdout == "its end\n", done.stderr
    assert "Block gave other values when" in done.stderr


def test_a_later_call_tells_of_what_nobody_was_told() -> None:
    with spillway.Session() as session:
        session.of(PendingChecks)._sent.extend(with_a_failure().of(PendingChecks)._sent)
        block = Changing()
        with pytest.raises(RecomputeError, match="Block gave other values when"):
            spillway.recompute(block, leaf() * 1, session=session)


class Compares(torch.autograd.Function):
    """The identity, in whose backward something is compared on a device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pending_checks: PendingChecks) -> torch.Tensor:
        ctx.pending_checks = pending_checks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.pending_checks.add("Block", ON_A_DEVICE)
        return grads[0], None


class Lane:
    """A stream that notes what it waits for."""

    def __init__(self) -> None:
        self.awaited: list[Lane] = []

    def wait_stream(self, other: Lane) -> None:
        self.awaited.append(other)


class Asking(PendingChecks):
    """Notes how much it asks for at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.lane = Lane()
        self.fails = False

    def _copy(self, several: list[tuple[str, torch.Tensor]], now: Any) -> Any:
        assert now is self.lane
        if self.fails:
            raise torch.OutOfMemoryError("no memory")
        self.asked.append(len(several))
        return torch.zeros(len(several), dtype=torch.bool), Late()

    def _stream(self, device: torch.device) -> Any:
        return self.lane


ON_A_DEVICE = torch.empty((), dtype=torch.bool, device="meta")


def compared(pending_checks: PendingChecks, count: int) -> torch.Tensor:
    """A leaf through whose backward so much is compared."""
    leaf = torch.ones(1, requires_grad=True)
    x: Any = leaf
    for _ in range(count):
        x = Compares.apply(x, pending_checks)
    x.sum().backward()
    return leaf


def test_a_backward_s_comparisons_are_asked_for_once_and_at_its_end() -> None:
    pending_checks = Asking()
    x = torch.ones(1, requires_grad=True)
    seen = []
    y = Compares.apply(x, pending_checks)
    y.register_hook(lambda _: seen.append(len(pending_checks.asked)))
    z = Compares.apply(y, pending_checks)
    z.sum().backward(retain_graph=True)
    assert seen == [0]
    assert pending_checks.asked == [2]
    z.sum().backward()
    assert pending_checks.asked == [2, 2]
    assert pending_checks.lane.awaited == []


def test_many_are_asked_for_before_the_end() -> None:
    pending_checks = Asking()
    compared(pending_checks, 40)
    assert pending_checks.asked == [32, 8]


def test_what_is_compared_outside_of_a_backward_waits_for_the_next_call() -> None:
    pending_checks = Asking()
    pending_checks.add("Block", ON_A_DEVICE)
    compared(pending_checks, 1)
    assert pending_checks.asked == [2]
    pending_checks.add("Block", ON_A_DEVICE)
    assert pending_checks.asked == [2]
    pending_checks.send()
    assert pending_checks.asked == [2, 1]


def test_where_backward_raises_the_next_one_asks_for_all() -> None:
    pending_checks = Asking()
    x = torch.ones(1, requires_grad=True)

    def fails(_: torch.Tensor) -> None:
        raise ValueError("no more")

    y = Compares.apply(x * 1.0, pending_checks)
    x.register_hook(fails)
    with pytest.raises(ValueError, match="no more"):
        y.sum().backward()
    assert pending_checks.asked == []
    compared(pending_checks, 1)
    assert pending_checks.asked == [2]


def test_what_cannot_be_asked_for_fails_no_backward_and_is_not_lost() -> None:
    pending_checks = Asking()
    pending_checks.fails = True
    assert compared(pending_checks, 2).grad is not None
    with pytest.raises(torch.OutOfMemoryError):
        pending_checks.send()
    pending_checks.fails = False
    compared(pending_checks, 1)
    assert pending_checks.asked == [3]


def test_comparisons_of_another_stream_are_waited_for() -> None:
    pending_checks = Asking()
    here, there = pending_checks.lane, Lane()
    pending_checks.add("Block", ON_A_DEVICE)
    pending_checks.lane = there
    pending_checks.add("Block", ON_A_DEVICE)
    pending_checks.send()
    assert there.awaited == [here]
    pending_checks.add("Block", ON_A_DEVICE)
    pending_checks.send()
    assert there.awaited == [here]


def test_after_the_end_a_difference_is_told_at_once() -> None:
    pending_checks = PendingChecks()
    pending_checks.end()
    with pytest.raises(RecomputeError):
        pending_checks.add("Block", Differing())  # type: ignore[arg-type]


class Differing:
    """A comparison on a device, that failed."""

    device = torch.device("meta")

    def __bool__(self) -> bool:
        return True
