"""What is captured into a graph: its rules, held by the adversary. ``gpu/test_graphs.py`` has real graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway.runtime.device import CapturedRuntime, CapturingBackend, DeviceRuntime
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


def test_what_a_step_before_saved_of_the_same_tensor_is_not_shared(
    adversary: AdversaryBackend, session: spillway.Session
) -> None:
    """A static input, say: the note that its handle has died is not read before the capture saves it, too."""
    net, context = model(), offload(session)
    x = torch.linspace(-1, 1, 16 * 64).view(16, 64).requires_grad_()

    def run() -> list[torch.Tensor]:
        with context:
            loss = net(x).sum()
        loss.backward()
        return gradients(net)

    plain = [run() for _ in range(3)][-1]
    with adversary.capturing():
        captured = run()
    assert all(map(torch.equal, captured, plain))
    session.release_graphs()
    session.synchronize()
    assert session.used_bytes == (0, 0)


def test_a_step_may_save_what_a_capture_saved_and_outlive_the_graph(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve, window=0) as session:
        weight = torch.linspace(-1, 1, 1024).requires_grad_()

        def run(hidden: torch.Tensor) -> torch.Tensor:
            with offload(session):
                return (hidden * weight).exp().sin().sum()

        run(torch.linspace(1, 2, 1024)).backward()
        weight.grad = None
        with adversary.capturing():
            hidden = torch.linspace(1, 2, 1024)
            run(hidden).backward()
        plain, weight.grad = weight.grad, None
        loss = run(hidden)
        del hidden
        session.release_graphs()
        loss.backward()
        assert plain is not None
        assert weight.grad is not None
        assert torch.equal(weight.grad, plain)
        session.synchronize()
        assert session.used_bytes == (0, 0)


def test_slots_are_found_among_those_of_other_sizes(adversary: AdversaryBackend) -> None:
    """Free neighbours are joined for them, which is where an arena asks for events otherwise."""
    with spillway.Session(backend=adversary.serve, window=0) as session:
        context = offload(session)

        def run(count: int) -> None:
            x = torch.linspace(-1, 1, count).requires_grad_()
            with context:
                hidden = x
                for _ in range(4):
                    hidden = hidden.exp().sin()
                loss = hidden.sum()
            loss.backward()

        for count in (1024, 2048):
            run(count)
        for _ in range(3):
            with adversary.capturing():
                run(1024)
            assert context.stats().notes == ()
            assert context.stats().offloaded_bytes > 0


def test_what_a_step_left_behind_may_die_in_a_capture(adversary: AdversaryBackend, session: spillway.Session) -> None:
    """Compute cannot wait there for what is on its way out, so that is given back when it can."""
    context = offload(session)
    loss = forward(model(), context)
    with adversary.capturing():
        del loss
    session.synchronize()
    assert session.used_bytes == (0, 0)


def test_without_a_step_before_everything_stays_and_that_is_said(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve, window=0) as session:
        net, context = model(), offload(session)
        with adversary.capturing():
            captured = step(net, context)
        assert context.stats().offloaded_bytes == 0
        assert "before the capture" in context.stats().notes[0]
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
        with (
            pytest.raises(spillway.UnsupportedError, match="was recomputed and compared"),
            adversary.capturing(),
        ):
            run()
    for _ in range(2):
        assert all(map(torch.equal, run(), plain))
    with adversary.capturing():
        captured = run()
    assert all(map(torch.equal, captured, plain))


def test_what_a_capture_preserves_need_not_leave_out_operators(
    adversary: AdversaryBackend, session: spillway.Session
) -> None:
    """The last operator's output is kept: a replay ends before it, and leaves nothing out that could be compared."""
    weight = torch.linspace(-1, 1, 1024).requires_grad_()
    how = {"save": torch.ops.aten.exp.default, "preserve_rng_state": False, "session": session}

    def kept_bytes() -> int:
        x = torch.linspace(-1, 1, 1024).requires_grad_()
        with offload(session, policy=spillway.policies.Keep()) as context:
            y = spillway.recompute(lambda x: (x * weight).tanh().exp(), x, **how)
        y.sum().backward()
        return context.stats().kept_bytes

    first, second = kept_bytes(), kept_bytes()
    assert second == first + weight.nbytes
    with adversary.capturing():
        assert kept_bytes() == second


def test_regions_outside_of_any_context_are_captured_apart_from_others(
    adversary: AdversaryBackend, session: spillway.Session
) -> None:
    """They share a pass with those before them whose backward has not come: not with those of another runtime."""
    region = partial(spillway.recompute, preserve_rng_state=False, session=session, offload="inputs")
    # What is saved outside of any context leaves from 1 MiB on.
    weight = torch.linspace(-1, 1, 1 << 18).requires_grad_()

    def begin(call: Callable[..., Any] = region) -> torch.Tensor:
        hidden = torch.linspace(1, 2, 1 << 18).requires_grad_() * 1
        for _ in range(4):
            hidden = call(lambda hidden: (hidden * weight).tanh(), hidden)
        return hidden.sum()

    def end(loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        return gradient

    plain = end(begin(lambda block, hidden: block(hidden)))
    for _ in range(2):
        assert torch.equal(end(begin()), plain)
    assert session.stats().offloaded_bytes > 0
    before = begin()
    with adversary.capturing():
        assert torch.equal(end(begin()), plain)
        captured = begin()
    assert torch.equal(end(begin()), plain)
    assert torch.equal(end(before), plain)
    with adversary.capturing():
        assert torch.equal(end(captured), plain)


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
