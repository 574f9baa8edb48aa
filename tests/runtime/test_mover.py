"""The mover where things go wrong at the wrong moment: a failed read, a session closed meanwhile, memory taken away."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

import spillway
from spillway.errors import SessionError, TransferError
from spillway.runtime.cpu import CpuBackend

ELEMENTS = 1 << 14


def two_sines(leaf: torch.Tensor) -> torch.Tensor:
    return (leaf * 1).sin().sin().sum()


def test_a_read_that_failed_is_tried_again_though_its_error_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error's traceback keeps the destination alive, which was never written."""
    leaf = torch.randn(ELEMENTS, requires_grad=True)
    (wanted,) = torch.autograd.grad(two_sines(leaf), leaf)
    with spillway.Session(window=0, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        with spillway.offload(session=session, tier="disk", min_bytes=0):
            loss = two_sines(leaf)
        session.synchronize()
        assert session._file is not None
        with monkeypatch.context() as patch:

            def fail(*arguments: object) -> None:
                raise TransferError("not now")

            patch.setattr(session._file, "read", fail)
            with pytest.raises(TransferError, match="not now") as kept:
                torch.autograd.grad(loss, leaf, retain_graph=True)
        (got,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(got, wanted)
        assert kept.value.__traceback__ is not None
        del kept


def test_memory_that_was_taken_away_before_it_could_leave_is_left_alone() -> None:
    with spillway.Session(window=0) as session:
        context = spillway.offload(session=session, tier="host", min_bytes=0)
        leaf = torch.randn(ELEMENTS, requires_grad=True)
        with context:
            hidden = leaf * 1
            saver = hidden.sin()
            hidden.untyped_storage().resize_(0)
            (leaf * 1).cos()
        assert hidden.untyped_storage().nbytes() == 0
        del saver
        assert any("resized the storage" in note for note in context.stats().notes)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_storage_that_left_can_still_be_resized_by_its_owner(tier: str) -> None:
    with spillway.Session(window=0) as session:
        leaf = torch.randn(ELEMENTS, requires_grad=True)
        with spillway.offload(session=session, tier=tier, min_bytes=0):
            hidden = leaf * 1
            loss = hidden.sin().cos().sum()
        session.synchronize()
        hidden.untyped_storage().resize_(0)
        loss.backward()
        want = torch.autograd.grad((leaf * 1).sin().cos().sum(), leaf)[0]
        assert torch.equal(leaf.grad, want)  # type: ignore[arg-type]


def test_who_waits_while_the_session_closes_is_told_so() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Slow(CpuBackend):
        def compute(self) -> object:
            if threading.current_thread().name == "slow":
                inside.set()
                go_on.wait(20)
            return super().compute()

    session = spillway.Session(window=0, backend=Slow)
    leaf = torch.randn(ELEMENTS, requires_grad=True)
    with spillway.offload(session=session, tier="host", min_bytes=0):
        loss = two_sines(leaf)
    errors: list[str] = []

    def backward() -> None:
        try:
            torch.autograd.grad(loss, leaf, retain_graph=True)
        except SessionError as error:
            errors.append(str(error))

    slow, waiting = threading.Thread(target=backward, name="slow"), threading.Thread(target=backward)
    slow.start()
    assert inside.wait(20)
    waiting.start()
    closing = threading.Thread(target=session.close)
    closing.start()
    go_on.set()
    for thread in (slow, waiting, closing):
        thread.join(20)
        assert not thread.is_alive()
    with pytest.raises(SessionError, match="closed session"):
        torch.autograd.grad(loss, leaf)


def test_the_collector_may_run_in_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle that dies there must not wait for the stream that it dies in."""
    with spillway.Session(window=1 << 30) as session:
        leaf = torch.randn(ELEMENTS, requires_grad=True)
        runtime = session.runtime(leaf.device)
        out, _ = runtime.mover.streams
        start = threading.Event()

        def collect() -> None:
            start.wait(20)
            gc.collect()

        out.submit(collect)  # type: ignore[attr-defined]
        graphs: list[object] = []
        gc.disable()
        try:
            with spillway.offload(session=session, tier="host", min_bytes=0):
                graphs.append(two_sines(leaf))
                graphs.append(graphs)  # a circle, which only the collector ends
            del graphs
            start.set()
            runtime.backend.record(out).synchronize()
        finally:
            gc.enable()
        with runtime.mover.exclusive():
            pass
        assert session.used_bytes == (0, 0)
