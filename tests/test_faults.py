"""Faults, end to end: each is a typed error at the step that needed the bytes, or a tensor that stays; and nothing is
left of it, and the next step works."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from running.scripts import Ended, Server
from spillway.runtime.spill_file import SpillFile, SystemCalls
from steps import (
    KiB,
    MiB,
    Result,
    assert_no_hook,
    assert_nothing_left,
    failing,
    quiesce,
    small_batch,
    small_model,
    steady_descriptors,
    step,
)

LINUX = sys.platform == "linux"
pytestmark = pytest.mark.skipif(not LINUX, reason="counts descriptors in /proc")


class FaultyDisk(SystemCalls):
    """A disk that works until it is told otherwise."""

    def __init__(self) -> None:
        self.room: int | None = None
        """Bytes that the file may have; ``None`` for any."""
        self.can_reserve = True
        self.write_room: int | None = None
        """Bytes that may yet be written before the disk is full."""
        self.most_at_once: int | None = None
        """Bytes that one call moves at most."""
        self.write_error: int | None = None
        self.read_error: int | None = None
        self.flips = False
        self.ends = False
        self.moved_in_pieces = 0

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        if not self.can_reserve:
            raise OSError(errno.EOPNOTSUPP, "cannot reserve")
        if self.room is not None and offset + length > self.room:
            raise OSError(errno.ENOSPC, "no space left")
        super().fallocate(fd, offset, length)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        if self.write_error is not None:
            raise OSError(self.write_error, os.strerror(self.write_error))
        if self.write_room == 0:
            raise OSError(errno.ENOSPC, "no space left")
        if self.most_at_once is not None and len(view) > self.most_at_once:
            view = view[: self.most_at_once]
            self.moved_in_pieces += 1
        moved = super().pwrite(fd, view, offset)
        if self.write_room is not None:
            # All of it is written, since direct I/O wants whole pages, but no more is said to be.
            moved = min(moved, self.write_room)
            self.write_room -= moved
        return moved

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        if self.read_error is not None:
            raise OSError(self.read_error, os.strerror(self.read_error))
        if self.ends:
            return 0
        if self.most_at_once is not None:
            view = view[: self.most_at_once]
        moved = super().preadv(fd, view, offset)
        if self.flips:
            view[moved // 2] ^= 4
        return moved


class Bench:
    """A session on a disk that can be made to fail, a model, and what plain PyTorch makes of it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.disk = FaultyDisk()
        self.directory = directory
        # No window: what backward needs must come back, except for what was saved last.
        self.session = spillway.Session(**{"window": 0, "spill_directory": directory, **options})
        self.session._file = SpillFile(
            directory, capacity=self.session._make_file.keywords["capacity"], calls=self.disk
        )
        self.model = small_model()
        self.x = small_batch()
        self.plain = step(self.model, self.x)
        self.context = self.offload()

    def offload(self, **options: Any) -> spillway.offload:
        return spillway.offload(**{"tier": "disk", "min_bytes": 0, "session": self.session, **options})

    def step(self, context: AbstractContextManager[Any] | None = None) -> Result:
        return step(self.model, self.x, self.context if context is None else context)

    def assert_works(self) -> None:
        """Nothing is left, and a step is right and moves bytes."""
        self.model.zero_grad()
        assert_nothing_left(self.session)
        context = self.offload(window=0)
        assert self.step(context) == self.plain
        assert context.stats().reloaded_bytes > 0
        assert context.stats().notes == ()
        assert_nothing_left(self.session)
        assert list(self.directory.iterdir()) == []


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with steady_descriptors():
        bench = Bench(tmp_path)
        # The file is made by a first step, so that faults meet extents and not the probe for direct I/O.
        bench.assert_works()
        yield bench
        bench.session.close()
        bench.session._file = None


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Bench]:
    """Like ``bench``, before the file is made."""
    with steady_descriptors():
        bench = Bench(tmp_path)
        yield bench
        bench.session.close()
        bench.session._file = None


# The disk


@pytest.mark.parametrize("room", [0, 4096, 20_000, 64 * KiB, 128 * KiB])
def test_what_a_full_disk_cannot_reserve_stays(fresh: Bench, room: int) -> None:
    fresh.disk.room = room
    assert fresh.step() == fresh.plain
    stats = fresh.context.stats()
    assert stats.offloaded_bytes <= room
    assert (stats.offloaded_bytes > 0) == (room >= 4 * KiB)
    assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes
    assert len(stats.notes) >= 1
    assert all("kept on the device" in note and "no space left" in note for note in stats.notes)
    assert_nothing_left(fresh.session)
    fresh.disk.room = None
    fresh.assert_works()


def test_a_tensor_that_stayed_is_not_counted_as_reused(fresh: Bench) -> None:
    fresh.disk.room = 0
    assert fresh.step() == fresh.plain
    stats = fresh.context.stats()
    assert stats.kept_bytes == stats.saved_bytes
    assert stats.reused_bytes == 0


@pytest.mark.parametrize("written", [0, 1, 4096, 5000, 30_000])
def test_a_disk_that_is_full_only_at_the_write_is_an_error(fresh: Bench, written: int) -> None:
    fresh.disk.can_reserve = False
    fresh.assert_works()
    fresh.disk.write_room = written
    message = failing(spillway.TierError, fresh.step)
    assert "no space left" in message
    assert "write of" in message and "expected all of them" in message and "free space" in message
    fresh.disk.write_room = None
    fresh.assert_works()


def test_short_writes_and_reads_are_completed(bench: Bench) -> None:
    bench.disk.most_at_once = 4096
    bench.assert_works()
    assert bench.disk.moved_in_pieces > 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_a_write_that_fails_is_an_error_of_this_step(bench: Bench, number: int) -> None:
    bench.disk.write_error = number
    message = failing(spillway.TransferError, bench.step)
    assert os.strerror(number) in message and "write of" in message and "expected all of them" in message
    bench.disk.write_error = None
    bench.assert_works()


def test_a_write_that_failed_for_bytes_that_nobody_needed_is_no_error_of_the_next_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, window=64 * MiB)
    with bench.session:
        bench.assert_works()
        # One tensor, which has not left when backward asks for it: no later write of the step meets the failed one.
        bench.disk.write_error = errno.EIO
        with bench.offload(tag="failing"):
            loss = torch.ones(KiB, requires_grad=True).exp().sum()
        quiesce(bench.session.runtime(torch.device("cpu")))
        try:
            loss.backward()
        except spillway.TransferError:
            pytest.fail("backward needed nothing of the disk")
        finally:
            del loss
            bench.model.zero_grad()
        assert_nothing_left(bench.session)
        bench.disk.write_error = None
        bench.assert_works()


def test_a_read_that_fails_is_an_error_of_this_backward(bench: Bench) -> None:
    bench.disk.read_error = errno.EIO
    message = failing(spillway.TransferError, bench.step)
    assert os.strerror(errno.EIO) in message and "read of" in message and "expected all of them" in message
    bench.disk.read_error = None
    bench.assert_works()


def test_a_read_that_failed_can_be_tried_again(bench: Bench) -> None:
    bench.model.zero_grad()
    with bench.offload():
        loss = bench.model(bench.x).square().mean()
    bench.disk.read_error = errno.EIO
    failing(spillway.TransferError, partial(loss.backward, retain_graph=True))
    bench.disk.read_error = None
    bench.model.zero_grad()
    loss.backward()
    assert Result(loss.detach(), [p.grad for p in bench.model.parameters()]) == bench.plain
    del loss
    bench.assert_works()


@pytest.mark.parametrize("window", [0, "1MiB"])
def test_a_flipped_bit_is_found(tmp_path: Path, window: int | str) -> None:
    bench = Bench(tmp_path)
    with bench.session:
        bench.assert_works()
        bench.session.runtime(torch.device("cpu")).mover.window = 0 if window == 0 else MiB
        bench.disk.flips = True
        message = failing(spillway.CorruptError, lambda: bench.step(bench.offload(window=0)))
        assert "checksum" in message and "expected" in message and "another directory" in message
        bench.disk.flips = False
        bench.assert_works()


def test_a_truncated_file_is_found(bench: Bench) -> None:
    def truncated() -> None:
        bench.model.zero_grad()
        with bench.context:
            loss = bench.model(bench.x).square().mean()
        quiesce(bench.session.runtime(torch.device("cpu")))
        os.ftruncate(bench.session._file._fd, 8 * KiB)
        loss.backward()

    message = failing(spillway.CorruptError, truncated)
    assert "expected" in message
    size = bench.session._file._size
    os.posix_fallocate(bench.session._file._fd, 0, size)
    bench.assert_works()


def test_a_file_that_ends_early_is_found(bench: Bench) -> None:
    bench.disk.ends = True
    message = failing(spillway.CorruptError, bench.step)
    assert "then no more" in message
    bench.disk.ends = False
    bench.assert_works()


# The path


def test_a_directory_that_is_gone_is_an_error_of_the_step_and_works_again_when_it_is_back(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    directory.mkdir()
    bench = Bench(directory)
    with bench.session:
        directory.rmdir()
        message = failing(spillway.SpillPathError, bench.step)
        assert str(directory) in message and "expected a directory" in message
        assert_nothing_left(bench.session)
        directory.mkdir()
        bench.assert_works()


def test_a_file_that_lost_its_directory_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    directory.mkdir()
    bench = Bench(directory)
    with bench.session:
        bench.assert_works()
        shutil.rmtree(directory)
        assert bench.step() == bench.plain
        assert_nothing_left(bench.session)


def test_a_path_that_is_no_directory_is_refused_when_the_session_is_made(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with steady_descriptors():
        message = failing(spillway.SpillPathError, lambda: spillway.Session(spill_directory=path))
    assert str(path) in message and "not a directory" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        message = failing(spillway.SpillPathError, lambda: spillway.Session(spill_directory=tmp_path))
        assert "not writable" in message
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_that_the_system_calls_unwritable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    message = failing(spillway.SpillPathError, lambda: spillway.Session(spill_directory=tmp_path))
    assert str(tmp_path) in message and "not writable" in message


def test_a_bad_default_directory_is_an_error_of_the_first_step_and_leaves_no_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(tmp_path / "nowhere"))
    model, x = small_model(), small_batch()
    plain = step(model, x)
    with spillway.Session(window=0) as session:
        context = spillway.offload(tier="disk", min_bytes=0, session=session)
        message = failing(spillway.SpillPathError, lambda: step(model, x, context))
        assert "nowhere" in message and "SPILLWAY_DIR" in message
        assert_nothing_left(session)
        monkeypatch.setenv("SPILLWAY_DIR", str(tmp_path))
        assert step(model, x, context) == plain
        assert context.stats().reloaded_bytes > 0
        assert_nothing_left(session)


# The caps


@pytest.mark.parametrize("budget", [0, 4 * KiB, 64 * KiB])
def test_what_the_host_budget_cannot_hold_stays(tmp_path: Path, budget: int) -> None:
    bench = Bench(tmp_path, host_budget=budget)
    with bench.session as session:
        context = bench.offload(tier="host")
        for _ in range(3):
            assert bench.step(context) == bench.plain
            stats = context.stats()
            assert session.host_bytes <= budget
            assert stats.offloaded_bytes <= budget
            assert (stats.offloaded_bytes > 0) == (budget >= 4 * KiB)
            assert stats.kept_bytes > 0
            assert any("kept on the device" in note and "host_budget" in note for note in stats.notes)
            assert_nothing_left(session)


@pytest.mark.parametrize("budget", [0, 4 * KiB, 16 * KiB, 32 * KiB, 64 * KiB])
def test_a_disk_tier_with_little_host_memory_for_its_blocks_keeps_or_waits(tmp_path: Path, budget: int) -> None:
    bench = Bench(tmp_path, host_budget=budget, window=32 * KiB)
    with bench.session as session:
        context = bench.offload()
        for _ in range(8):
            assert bench.step(context) == bench.plain
            stats = context.stats()
            # One read passes the cap rather than lose the graph, by the largest storage of this model.
            assert session.host_bytes <= budget + (16 * KiB if budget else 0)
            assert stats.kept_bytes == 0 or stats.notes
            assert_nothing_left(session)


@pytest.mark.parametrize("budget", [0, 8 * KiB, 128 * KiB])
def test_what_the_disk_budget_cannot_hold_stays(tmp_path: Path, budget: int) -> None:
    bench = Bench(tmp_path, disk_budget=budget)
    with bench.session as session:
        context = bench.offload()
        for _ in range(3):
            assert bench.step(context) == bench.plain
            stats = context.stats()
            assert session.disk_bytes <= budget
            assert stats.offloaded_bytes <= budget
            assert (stats.offloaded_bytes > 0) == (budget > 0)
            assert any("kept on the device" in note and "capacity" in note for note in stats.notes)
            assert_nothing_left(session)


def test_a_session_s_disk_budget_reaches_its_own_file(tmp_path: Path) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    with spillway.Session(window=0, disk_budget="64KiB", spill_directory=tmp_path) as session:
        context = spillway.offload(tier="disk", min_bytes=0, session=session)
        assert step(model, x, context) == plain
        assert 0 < session.disk_bytes <= 64 * KiB
        assert context.stats().notes


# Exceptions


class Boom(Exception):
    """What the tests raise."""


class Raising(nn.Module):
    """Raises in forward while told to."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error("in forward")
        return x


class RaisesInBackward(torch.autograd.Function):
    """An identity whose backward does what it is told."""

    act: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        if RaisesInBackward.act is not None:
            RaisesInBackward.act()
        return gradient


class Through(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = RaisesInBackward.apply(x)
        return out


def boom() -> None:
    raise Boom("in backward")


TIERS = pytest.mark.parametrize("tier", ["host", "disk"])


@TIERS
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, SystemExit])
def test_an_exception_in_forward(bench: Bench, tier: str, error: type[BaseException]) -> None:
    raising = Raising(error)
    bench.model.insert(2, raising)
    context = bench.offload(tier=tier)
    failing(error, lambda: bench.step(context), match="in forward")
    assert_nothing_left(bench.session)
    raising.error = None
    assert bench.step(context) == bench.plain
    assert_nothing_left(bench.session)


@TIERS
def test_an_exception_in_a_nested_context_leaves_the_outer_one_as_it_was(bench: Bench, tier: str) -> None:
    raising = Raising(Boom)
    bench.model.insert(2, raising)
    context = bench.offload(tier=tier)
    x = bench.x

    def caught_inside() -> Result:
        bench.model.zero_grad()
        with context:
            failing(Boom, lambda: bench.step(bench.offload(tier=tier, tag="inner")))
            with spillway.keep():
                failing(Boom, lambda: bench.model(x))
            raising.error = None
            loss = bench.model(x).square().mean()
        loss.backward()
        return Result(loss.detach(), [p.grad.clone() for p in bench.model.parameters()])

    assert caught_inside() == bench.plain
    assert context.stats().reloaded_bytes > 0
    bench.model.zero_grad()
    assert_nothing_left(bench.session)


@TIERS
@pytest.mark.parametrize("window", [0, "1MiB"])
def test_an_exception_in_backward(bench: Bench, tier: str, window: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.session.runtime(torch.device("cpu")).mover.window = 0 if window == 0 else MiB
    bench.model.insert(2, Through())
    context = bench.offload(tier=tier, window=0)
    for _ in range(2):  # the second time the order is known, and tensors are on their way back
        monkeypatch.setattr(RaisesInBackward, "act", boom)
        failing(Boom, lambda: bench.step(context), match="in backward")
        bench.model.zero_grad()
        assert_nothing_left(bench.session)
        monkeypatch.setattr(RaisesInBackward, "act", None)
        assert bench.step(context) == bench.plain
        assert_nothing_left(bench.session)


@TIERS
def test_a_graph_is_good_after_an_exception_in_its_backward(
    bench: Bench, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.model.insert(2, Through())
    bench.model.zero_grad()
    with bench.offload(tier=tier):
        loss = bench.model(bench.x).square().mean()
    monkeypatch.setattr(RaisesInBackward, "act", boom)
    failing(Boom, partial(loss.backward, retain_graph=True))
    monkeypatch.setattr(RaisesInBackward, "act", None)
    bench.model.zero_grad()
    loss.backward()
    assert Result(loss.detach(), [p.grad for p in bench.model.parameters()]) == bench.plain
    del loss
    assert_nothing_left(bench.session)


@TIERS
@pytest.mark.parametrize("call", [0, 1, 5, 9])
def test_an_exception_in_a_policy(bench: Bench, tier: str, call: int) -> None:
    calls = 0

    def policy(saved: spillway.SavedTensor) -> spillway.Decision:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise Boom("in policy")
        return spillway.Decision.OFFLOAD

    context = bench.offload(tier=tier, policy=policy)
    failing(Boom, lambda: bench.step(context), match="in policy")
    assert_nothing_left(bench.session)
    assert bench.step(context) == bench.plain
    assert_nothing_left(bench.session)


class RecorderThatRaises:
    """Raises once, at an event of one kind."""

    def __init__(self, kind: spillway.EventKind) -> None:
        self.kind: spillway.EventKind | None = kind

    def __call__(self, event: spillway.Event) -> None:
        if event.kind is self.kind:
            self.kind = None
            raise Boom(f"at {event.kind}")


KINDS = spillway.EventKind


@TIERS
@pytest.mark.parametrize("kind", [KINDS.LEAVE, KINDS.RELEASE, KINDS.RETURN, KINDS.TAKE, KINDS.REUSE])
def test_an_exception_in_a_recorder(tmp_path: Path, tier: str, kind: spillway.EventKind) -> None:
    recorder = RecorderThatRaises(kind)
    bench = Bench(tmp_path, recorder=recorder)
    with bench.session:
        context = bench.offload(tier=tier)
        failing(Boom, lambda: bench.step(context))
        assert recorder.kind is None
        bench.assert_works()


def test_an_exception_in_a_recorder_that_hears_of_a_refusal(tmp_path: Path) -> None:
    bench = Bench(tmp_path, recorder=RecorderThatRaises(KINDS.REFUSE))
    with bench.session:
        bench.disk.room = 0
        failing(Boom, bench.step)
        bench.disk.room = None
        bench.assert_works()


@TIERS
def test_an_exception_in_a_recorder_that_hears_of_a_drop(
    tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(repr(report.exc_value)))
    bench = Bench(tmp_path, recorder=RecorderThatRaises(KINDS.DROP))
    with bench.session:
        # It is raised in a finaliser, where Python reports it and goes on.
        assert bench.step(bench.offload(tier=tier)) == bench.plain
        assert len(reports) == 1 and "Boom" in reports[0]
        bench.assert_works()


# Signals


@TIERS
@pytest.mark.parametrize("window", [0, "1MiB"])
def test_a_keyboard_interrupt_by_signal_in_backward(
    bench: Bench, tier: str, window: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.session.runtime(torch.device("cpu")).mover.window = 0 if window == 0 else MiB
    bench.model.insert(2, Through())
    context = bench.offload(tier=tier, window=0)
    monkeypatch.setattr(RaisesInBackward, "act", lambda: signal.raise_signal(signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        failing(KeyboardInterrupt, lambda: bench.step(context))
    finally:
        signal.signal(signal.SIGINT, previous)
    bench.model.zero_grad()
    assert_nothing_left(bench.session)
    monkeypatch.setattr(RaisesInBackward, "act", None)
    assert bench.step(context) == bench.plain
    assert_nothing_left(bench.session)


SCRIPT = """
import os, signal, sys, threading, warnings
import torch
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
import spillway
from steps import assert_nothing_left, small_batch, small_model, step

directory = sys.argv[1]
session = spillway.Session(window=0, spill_directory=directory)
model, x = small_model(), small_batch()
plain = step(model, x)
context = spillway.offload(tier="disk", min_bytes=0, session=session)
assert step(model, x, context) == plain
with context:
    loss = model(x).square().mean()
"""


Run = Callable[[str], Ended]


@pytest.fixture
def run_script(server: Server, tmp_path: Path) -> Iterator[Run]:
    """The end of a process of its own, started with a graph of which most bytes are on the disk. It leaves nothing."""
    spill, streams = tmp_path / "spill", tmp_path / "streams"
    spill.mkdir()
    streams.mkdir()
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    yield lambda code: server.run(streams, script + textwrap.dedent(code), "script", spill)
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGABRT])
def test_a_process_that_is_killed_leaves_nothing(run_script: Run, number: signal.Signals) -> None:
    ended = run_script(f"print(session.used_bytes[1], flush=True); os.kill(os.getpid(), {int(number)})")
    assert ended.code == -number, ended.err
    assert int(ended.out) > 0


def test_a_process_that_ends_with_a_graph_alive_leaves_nothing_and_says_nothing(run_script: Run) -> None:
    assert run_script("") == Ended(0, "", "")


def test_a_process_that_ends_by_an_exception_shows_only_that(run_script: Run) -> None:
    ended = run_script("raise RuntimeError('the end')")
    assert ended.code == 1
    assert ended.err.strip().splitlines()[-1] == "RuntimeError: the end"
    assert ended.err.count("Traceback") == 1


def test_the_session_of_the_parent_is_refused_in_a_forked_child_whose_own_works(run_script: Run) -> None:
    ended = run_script(
        """
        session.use_as_default()
        # One that ends in the ordinary way takes nothing from its parent.
        child = os.fork()
        if child == 0:
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        child = os.fork()
        if child == 0:
            code = 1
            try:
                refusals = 0
                for use in (context.__enter__, loss.backward, session.use_as_default):
                    try:
                        use()
                    except spillway.SessionError as error:
                        assert "fork" in str(error) and "new Session" in str(error), error
                        refusals += 1
                assert refusals == 3, refusals
                own = spillway.Session(window=0, spill_directory=directory)
                mine = spillway.offload(tier="disk", min_bytes=0, session=own)
                assert step(model, x, mine) == plain
                assert mine.stats().reloaded_bytes > 0
                assert_nothing_left(own)
                assert spillway.Session.default() is not session
                del loss
                session.close()
                own.close()
                code = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert spillway.Session.default() is session
        model.zero_grad()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        assert all(map(torch.equal, gradients, plain.gradients))
        del loss
        assert_nothing_left(session)
        assert step(model, x, context) == plain
        print("good")
        """
    )
    assert (ended.code, ended.out) == (0, "good\n"), ended.err


# Closing


@TIERS
def test_a_backward_after_its_session_was_closed_is_a_typed_error(bench: Bench, tier: str) -> None:
    bench.model.zero_grad()
    with bench.offload(tier=tier):
        loss = bench.model(bench.x).square().mean()
    bench.session.close()
    message = failing(spillway.SessionError, loss.backward)
    assert "closed" in message and "expected" in message
    del loss
    assert bench.session.used_bytes == (0, 0)
    assert bench.session.host_bytes == 0
    assert bench.session.disk_bytes == 0
    assert_no_hook()
