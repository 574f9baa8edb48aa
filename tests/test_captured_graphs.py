"""What is captured into a graph: its rules, held by the adversary. ``gpu/test_graphs.py`` has real graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.runtime.capturing import CapturedRuntime, CapturingBackend
from spillway.runtime.device import DeviceRuntime
from spillway.testing import AdversaryBackend


@pytest.fixture
def adversary() -> Iterator[AdversaryBackend]:
    adversary = AdversaryBackend()
    yield adversary
    adversary.check()


@pytest.fixture(params=[0, 4096, 1 << 20], ids=["window-0", "window-4096", "window-1-MiB"])
def session(adversary: AdversaryBackend, request: pytest.FixtureRequest) -> Iterator[spillway.Session]:
    with spillway.Session(backend=adversary.serve, window=request.param) as session:
        yield session


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def offload(session: spillway.Session, **how: Any) -> spillway.offload:
    return spillway.offload(**{"session": session, "min_bytes": 0, "tier": "host", **how})


def forward(net: nn.Module, context: spillway.offload) -> torch.Tensor:
    x = torch.linspace(-1, 1, 16 * 64).view(16, 64).requires_grad_()
    with context:
        loss: torch.Tensor = net(x).sum()
    return loss


def gradients(net: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    for parameter in net.parameters():
        parameter.grad = None
    return found


def step(net: nn.Module, context: spillway.offload) -> list[torch.Tensor]:
    forward(net, context).backward()
    return gradients(net)


def test_a_whole_step_is_captured(adversary: AdversaryBackend, session: spillway.Session) -> None:
    net, context = model(), offload(session)
    plain = step(net, offload(session, policy=spillway.policies.Keep()))
    for _ in range(2):
        step(net, context)
    for _ in range(2):
        with adversary.capturing():
            captured = step(net, context)
        assert all(map(torch.equal, captured, plain))
        assert context.stats().notes == ()
        assert context.stats().offloaded_bytes + context.stats().reused_bytes > 0
        # Not captured again, with room of its own.
        assert all(map(torch.equal, step(net, context), plain))
        assert context.stats().notes == ()


def test_forward_and_backward_are_captured_apart(adversary: AdversaryBackend, session: spillway.Session) -> None:
    net, context = model(), offload(session)
    plain = step(net, context)
    step(net, context)
    with adversary.capturing():
        loss = forward(net, context)
    with adversary.capturing():
        loss.backward()
    assert all(map(torch.equal, gradients(net), plain))


def test_two_graphs_of_one_stream_have_slots_of_their_own(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve, window=0) as session:
        nets, context = [model(), model()], offload(session)
        for _ in range(3):
            for loss in [forward(net, context) for net in nets]:
                loss.backward()
        used = []
        for net in nets:
            with adversary.capturing():
                step(net, context)
            used.append(session.used_bytes[0])
        assert 0 < used[0] < used[1]
        step(nets[0], context)
        session.synchronize()
        assert session.used_bytes[0] == used[1]
        assert session.release_graphs() == used[1]
        assert session.used_bytes == (0, 0)


def test_without_a_step_before_everything_stays_and_that_is_said(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve, window=0) as session:
        net, context = model(), offload(session)
        with adversary.capturing():
            captured = step(net, context)
        assert context.stats().offloaded_bytes == 0
        assert "earlier steps" in context.stats().notes[0]
        assert all(map(torch.equal, captured, step(net, context)))


def test_the_disk_is_refused(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve, window=0) as session:
        net = model()
        with adversary.capturing(), pytest.raises(spillway.UnsupportedError, match="disk"):
            forward(net, offload(session, tier="disk"))
        adversary.check()


def test_a_delayed_group_may_be_flushed_in_a_capture(adversary: AdversaryBackend, session: spillway.Session) -> None:
    def run() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 1024).requires_grad_()
        with offload(session):
            with spillway.group("late", delay=True):
                y = x.exp().sin()
            session.flush_groups()
            loss = y.exp().sum()
        loss.backward()
        assert x.grad is not None
        return [x.grad]

    plain = run()
    run()
    with adversary.capturing():
        captured = run()
    assert all(map(torch.equal, captured, plain))


@pytest.mark.parametrize("how", [{}, {"offload": "inputs"}, {"offload": "matmul"}, {"save": "pointwise"}], ids=str)
def test_a_region_that_was_tried_before_is_captured(
    adversary: AdversaryBackend, session: spillway.Session, how: dict[str, Any]
) -> None:
    net, context = model(), offload(session, policy=spillway.policies.Keep())
    region = partial(spillway.recompute, preserve_rng_state=False, session=session, **how)

    def run() -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 16 * 64).view(16, 64).requires_grad_()
        with context:
            hidden: torch.Tensor = x * 1
            for block in net:
                hidden = region(block, hidden)
            loss = hidden.sum()
        loss.backward()
        return gradients(net)

    plain = step(net, offload(session, policy=spillway.policies.Keep()))
    if "save" not in how:
        # Where all that autograd saves is kept, nothing runs again, and nothing is to be tried.
        with pytest.raises(spillway.UnsupportedError, match="found right before"), adversary.capturing():
            run()
    for _ in range(2):
        assert all(map(torch.equal, run(), plain))
    with adversary.capturing():
        captured = run()
    assert all(map(torch.equal, captured, plain))


def waits_for_anything(self: Any, lane: Any, event: Any) -> None:
    if event.inner is not None:
        self._inner.wait(lane, event.inner)


def asks(self: Any, lane: Any, event: Any, stalls: Any) -> None:
    if event.inner is not None:
        event.inner.query()


BROKEN = {
    "waits for what is over": (CapturingBackend, "wait", waits_for_anything),
    "joins nothing": (CapturedRuntime, "join", lambda self: None),
    "asks": (CapturingBackend, "timed_wait", asks),
    "is as outside": (DeviceRuntime, "captured", lambda self: self),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("broken", BROKEN)
def test_the_adversary_sees_what_is_broken(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adversary = AdversaryBackend()
    session = spillway.Session(backend=adversary.serve, window=1 << 20)
    net = model()
    step(net, offload(session))
    # Of this one no tail is known: all of it leaves.
    context = offload(session, tag="captured")
    monkeypatch.setattr(*BROKEN[broken])

    def apart() -> None:
        with adversary.capturing():
            loss = forward(net, context)
        with adversary.capturing():
            loss.backward()

    # Some are found in a finaliser, which cannot raise.
    with contextlib.suppress(spillway.RaceError):
        apart()
    assert adversary.faults
    with contextlib.suppress(spillway.RaceError):
        session.close()
