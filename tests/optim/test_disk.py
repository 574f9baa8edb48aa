"""State on disk: memory of the host, and a disk that is full, fails, or gives back other bytes than it got."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import spillway
from optim.store_loops import Loop, net, same, saved, session, small_pieces
from optim.test_streamed import elements, wide
from spillway import CorruptError, OffloadedOptimizer, TierError, TierFullError, TransferError
from spillway.optim import state_store
from spillway.runtime.arena import PAGE
from spillway.runtime.spill_file import SpillFile, SystemCalls

BF16 = torch.bfloat16
KiB = 1024
SETTINGS: dict[str, Any] = {"tier": "disk", "lr": 1e-2, "fused": True}


class Disk(SystemCalls):
    """One that works until it is told otherwise."""

    def __init__(self) -> None:
        self.write_error: int | None = None
        self.read_error: int | None = None
        self.flips = False
        self.writes_before_the_error = 0

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        if self.write_error is not None:
            if self.writes_before_the_error == 0:
                raise OSError(self.write_error, os.strerror(self.write_error))
            self.writes_before_the_error -= 1
        return super().pwrite(fd, view, offset)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        if self.read_error is not None:
            raise OSError(self.read_error, os.strerror(self.read_error))
        moved = super().preadv(fd, view, offset)
        if self.flips:
            view[8] ^= 4
        return moved


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def where(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[spillway.Session]:
    """A session on such a disk, in which chunks are small and all fit the in-flight limit."""
    small_pieces(monkeypatch)
    with session(tmp_path, window=16 * KiB) as found:
        assert found._file is not None
        found._file.close()
        found._file = SpillFile(tmp_path, calls=disk, allow_memory_filesystem=True)
        yield found
        gc.collect()
        assert found.used_bytes == (0, 0)


def test_host_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    window = 128 * KiB
    model = wide()
    with session(tmp_path, window=window) as where:
        arena: Any = where.runtime(torch.device("cpu")).arena
        allocate, peak = arena.allocate, [0]

        def counted(nbytes: int, **options: Any) -> Any:
            block = allocate(nbytes, **options)
            peak[0] = max(peak[0], arena.used_bytes)
            return block

        monkeypatch.setattr(arena, "allocate", counted)
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
        Loop(steps=3, dtype=BF16).run(model, optimizer)
        parameters = 2 * elements(model)
        # The window, gradients, and parameters on their way back; a page here and there.
        assert peak[0] <= window + 2 * parameters + 64 * PAGE
        assert 12 * elements(model) > 2 * (window + 2 * parameters)
        assert where.used_bytes[1] >= 12 * elements(model)
        optimizer.close()
        assert where.used_bytes == (0, 0)


def test_between_steps_host_memory_has_gradients_only(where: spillway.Session) -> None:
    model = net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, offload_gradients=False, **SETTINGS)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    # It lets go of what it copied for the last step.
    optimizer.step()
    assert where.used_bytes[0] == 0
    optimizer.close()


@pytest.mark.parametrize("limit", ["disk_budget", "disk_bytes_per_hour"])
def test_a_full_disk_is_said_before_anything_is_stepped(tmp_path: Path, limit: str) -> None:
    model = net(BF16)
    with session(tmp_path, **{limit: 8 * KiB}) as where:
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
        model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        before = [one.detach().clone() for one in model.parameters()]
        for _ in range(2):
            with pytest.raises(TierFullError):
                optimizer.step()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
        again = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        assert torch.equal(again, norm)
        optimizer.close()
        assert where.used_bytes == (0, 0)


def test_what_could_not_be_written_stays_and_is_used_from_there(where: spillway.Session, disk: Disk) -> None:
    # All chunks fit the in-flight limit: all are stepped, also in the step whose writes fail.
    model, plain = net(BF16), net(BF16)
    Loop(steps=6, dtype=BF16).run_in_float(plain, AdamW, {"lr": 1e-2, "fused": True})
    raised = []
    runtime: Any = where.runtime(torch.device("cpu"))
    runtime.mover.claim(runtime, 1 << 20)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)

    def fail(step: int, *_: object) -> None:
        disk.write_error = errno.EIO if step in (0, 3) else None

    class Told(OffloadedOptimizer):
        """Whose loop goes on."""

    step = optimizer.step

    def step_and_note(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except TransferError as error:
            raised.append(str(error))
            return None

    optimizer.step = step_and_note  # type: ignore[method-assign]
    Loop(steps=6, dtype=BF16, each=fail).run(model, optimizer)
    assert len(raised) == 2
    assert all("Input/output error" in text for text in raised)
    assert same(model, plain)
    optimizer.close()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_write_that_fails_under_the_next_forward_is_raised_once(
    fraction: float, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch)
    with session(tmp_path, window=4 * KiB) as where:
        assert where._file is not None
        where._file.close()
        where._file = SpillFile(tmp_path, calls=disk, allow_memory_filesystem=True)
        model = net(BF16)
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, fraction=fraction, **SETTINGS)
        Loop(steps=2, dtype=BF16).run(model, optimizer)
        optimizer.overlap_forward(model, blocks=nn.Linear)
        batch = torch.randn(8, 33, dtype=BF16)
        model(batch).square().mean().backward()
        disk.write_error = errno.EIO
        optimizer.step()
        for context in optimizer._placement.contexts.values():
            context.last_task().finish()
        disk.write_error = None
        with pytest.raises(TransferError):
            model(batch)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.close()


@pytest.mark.parametrize("working", [0, 3])
def test_a_write_that_fails_in_a_small_window_ends_the_step(where: spillway.Session, disk: Disk, working: int) -> None:
    model = net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    weights, state = saved((model.state_dict(), optimizer.state_dict()))
    model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
    disk.write_error, disk.writes_before_the_error = errno.EIO, working
    with pytest.raises(TransferError):
        optimizer.step()
    disk.write_error = None
    optimizer.zero_grad()
    # Some were stepped, with all that belongs to them: what each has, belongs together.
    for index, parameter in enumerate(model.parameters()):
        found = optimizer.state_dict()["state"][index]
        assert torch.equal(found["master"].to(BF16), parameter)
        shown = optimizer.state[parameter]
        assert all(torch.equal(shown[name], value) for name, value in found.items())
    # And training goes on from what was saved.
    expected = net(BF16)
    other = OffloadedOptimizer(expected.parameters(), AdamW, session=where, **SETTINGS)
    for one, stepped in ((model, optimizer), (expected, other)):
        one.load_state_dict(weights)
        stepped.load_state_dict(state)
        Loop(steps=2, seed=2, dtype=BF16).run(one, stepped)
        stepped.close()
    assert same(model, expected)


@pytest.mark.parametrize(("fault", "error"), [("flips", CorruptError), ("read_error", TransferError)])
def test_what_cannot_be_read_is_said_and_not_stepped(
    where: spillway.Session, disk: Disk, fault: str, error: type[TierError]
) -> None:
    model = net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    before = [one.detach().clone() for one in model.parameters()]
    batch = torch.randn(8, 33, dtype=BF16)
    model(batch).square().mean().backward()
    setattr(disk, fault, errno.EIO)
    with pytest.raises(error):
        optimizer.step()
    with pytest.raises(error):
        optimizer.state_dict()
    setattr(disk, fault, None)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
    # The gradients are still there, and the disk has its senses back.
    optimizer.step()
    plain = net(BF16)
    reference = OffloadedOptimizer(plain.parameters(), AdamW, session=where, lr=1e-2, fused=True)
    Loop(steps=2, dtype=BF16).run(plain, reference)
    plain(batch).square().mean().backward()
    reference.step()
    assert same(model, plain)
    optimizer.close()
    reference.close()


def test_loading_to_a_disk_that_fails_is_said(where: spillway.Session, disk: Disk) -> None:
    model = net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    state = saved(optimizer.state_dict())
    disk.write_error = errno.EIO
    with pytest.raises(TransferError):
        optimizer.load_state_dict(state)
    disk.write_error = None
    optimizer.load_state_dict(state)
    found = optimizer.state_dict()["state"]
    for index, expected in state["state"].items():
        assert all(torch.equal(found[index][name], value) for name, value in expected.items())
    Loop(steps=1, dtype=BF16).run(model, optimizer)
    optimizer.close()


def test_a_directory_without_a_spill_file_is_said_when_the_optimizer_is_made(tmp_path: Path) -> None:
    class Nowhere(SystemCalls):
        def open(self, path: str, flags: int, mode: int) -> int:
            raise OSError(errno.EACCES, "permission denied")

    with session(tmp_path) as where:
        assert where._file is not None
        where._file.close()
        where._file = None
        (tmp_path / "gone").mkdir()
        where._make_file = lambda: SpillFile(tmp_path / "gone", allow_memory_filesystem=True)
        (tmp_path / "gone").rmdir()
        with pytest.raises(spillway.SpillPathError):
            OffloadedOptimizer(net().parameters(), SGD, session=where, tier="disk", lr=0.1)


def test_any_host_budget_will_do_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small chunks, which all fit the in-flight limit, but not the CPU's memory.
    monkeypatch.setattr(state_store, "CHUNK", 256)
    plain = net(BF16)
    Loop(steps=3, dtype=BF16).run_in_float(plain, AdamW, {"lr": 1e-2, "fused": True})
    worked = []
    for budget in range(1, 12):
        model = net(BF16)
        with session(tmp_path, window=1 << 20, host_budget=budget * PAGE) as where:
            optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
            try:
                Loop(steps=3, dtype=BF16).run(model, optimizer)
            except TierFullError:
                assert not worked
            else:
                assert same(model, plain)
                worked.append(budget)
            optimizer.zero_grad()
            optimizer.close()
            del optimizer
            gc.collect()
            assert where.used_bytes == (0, 0)
    assert len(worked) > 3


def test_autograd_refuses_to_go_back_through_what_was_stepped(where: spillway.Session) -> None:
    model = net(BF16)
    optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **SETTINGS)
    loss = model(torch.randn(8, 33, dtype=BF16)).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.close()
