"""Hazards 33 to 35, 39 and 41 to 45 on an accelerator, where streams are real: ``make gpu``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import spillway
from spillway import EventKind, EventList
from spillway.runtime.accelerator import AcceleratorBackend
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.device import backend_for
from support import Context, Trial, Way, assert_identical, assert_nothing_left, grads, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are made busy with torch.cuda._sleep"),
]

MIB = 1 << 20
FLOATS = MIB
"""Floats in a tensor: 4 MiB, so that a copy takes long enough to be overtaken."""
WINDOW = 16 * MIB


def busy(milliseconds: float) -> None:
    """Keep the current stream busy for so long, at least."""
    torch.cuda._sleep(int(milliseconds * 2e6))


class LateBackend(AcceleratorBackend):
    """Copies of some lanes start late, and allocations are counted."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.late: dict[str, Callable[[], float]] = {}
        """Milliseconds before each copy of a lane."""
        self.slabs: list[int] = []
        self._names: list[tuple[Stream, str]] = []

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        self._names.append((super().new_stream(name, first=first), name))
        return self._names[-1][0]

    def copy(self, lane: Stream, destination: Bytes, source: Bytes) -> None:
        name = next(name for known, name in self._names if known is lane)
        if name in self.late:
            with lane:  # type: ignore[attr-defined]
                busy(self.late[name]())
        super().copy(lane, destination, source)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        self.slabs.append(nbytes)
        return super().host_slab(nbytes)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def backend(device: torch.device) -> LateBackend:
    return LateBackend(device)


@pytest.fixture(params=["host", "disk"])
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param, WINDOW)


@pytest.fixture
def session(way: Way, events: EventList, backend: LateBackend, tmp_path: Path) -> Iterator[spillway.Session]:
    with spillway.Session(
        window=way.window,
        spill_directory=tmp_path,
        allow_memory_filesystem=True,
        recorder=events,
        backend=lambda device: backend if device == backend.device else backend_for(device),
    ) as session:
        yield session
        assert_nothing_left(session)


def chain(leaf: torch.Tensor, length: int = 12) -> torch.Tensor:
    """Saves as many tensors as it is long. Element by element, so that no stream's workspace changes a bit."""
    hidden = leaf * 2
    for _ in range(length):
        hidden = (hidden.sin() * 1.5).sigmoid()
    return hidden


def simple(device: torch.device) -> Callable[[Context], Iterator[torch.Tensor]]:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(FLOATS, device=device, requires_grad=True)
        with context():
            hidden = chain(leaf)
        hidden.backward(torch.ones_like(hidden))
        yield hidden.detach()
        yield from grads(leaf)

    return step


def test_h33_each_tensor_returns_to_its_own_device(trial: Trial, device: torch.device) -> None:
    """Tensors of the host and of the accelerator in one graph."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        host = torch.randn(FLOATS, requires_grad=True)
        there = torch.randn(FLOATS, device=device, requires_grad=True)
        with context():
            hidden = chain(host, 3).to(device, non_blocking=False) * chain(there, 3)
            hidden = chain(chain(hidden, 2).cpu(), 3)
        trial.push_out()
        trial.push_out(device)
        hidden.sum().backward()
        yield from grads(host, there)

    trial(step)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")
@pytest.mark.parametrize("current", [0, 1])
def test_h33_the_current_device_may_be_another_one(way: Way, events: EventList, tmp_path: Path, current: int) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaves = [torch.randn(FLOATS, device=f"cuda:{index}", requires_grad=True) for index in (0, 1)]
        with torch.cuda.device(current), context():
            hidden = chain(leaves[1], 4) * chain(leaves[0], 4).to("cuda:1")
            hidden = chain(hidden.to("cuda:0"), 4)
        with torch.cuda.device(1 - current):
            hidden.sum().backward()
        yield from grads(*leaves)

    with spillway.Session(
        window=WINDOW, spill_directory=tmp_path, allow_memory_filesystem=True, recorder=events
    ) as session:
        Trial(session, events, way)(step)


def test_h34_the_compute_stream_is_the_one_of_the_moment(trial: Trial, device: torch.device) -> None:
    """A new stream for each forward, another for each backward, both busy when they are handed their work."""
    leaf = torch.randn(FLOATS, device=device, requires_grad=True)
    expected = torch.autograd.grad(chain(leaf).sum(), [leaf])
    for _ in range(4):
        forward, backward = torch.cuda.Stream(), torch.cuda.Stream()
        forward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(forward):
            busy(5)
            with trial.offload():
                loss = chain(leaf).sum()
        backward.wait_stream(forward)
        with torch.cuda.stream(backward):
            busy(5)
            got = torch.autograd.grad(loss, [leaf])
        torch.cuda.current_stream().wait_stream(backward)
        torch.cuda.synchronize()
        assert_identical(list(got), list(expected))
        del loss, got
    assert trial.count(EventKind.TAKE) > 0


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


def test_h35_the_peak_is_the_same_from_run_to_run(trial: Trial, device: torch.device, backend: LateBackend) -> None:
    """However late copies are: what is let go is decided by the order of the program."""
    leaf = torch.randn(FLOATS, device=device, requires_grad=True)

    def step(context: AbstractContextManager[object]) -> None:
        with context:
            loss = chain(leaf, 40).sum()
        torch.autograd.grad(loss, [leaf])

    keep = peak_of(lambda: step(torch.enable_grad()), device)
    for _ in range(2):
        step(trial.offload())
    peaks = []
    generator = random.Random(0)
    for late in ({}, {"out": 3.0}, {"back": 3.0}, {"out": 1.0, "back": 2.0}, {}):
        backend.late = {name: lambda most=most: generator.uniform(0, most) for name, most in late.items()}  # type: ignore[misc]
        peaks.append(peak_of(lambda: step(trial.offload()), device))
    assert len(set(peaks)) == 1, peaks
    assert peaks[0] < keep / 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_h39_a_steady_step_allocates_no_host_memory_and_does_not_synchronise(
    trial: Trial, device: torch.device, backend: LateBackend
) -> None:
    leaf = torch.randn(FLOATS, device=device, requires_grad=True)

    def step() -> None:
        with trial.offload():
            hidden = chain(leaf)
        torch.autograd.grad(hidden, [leaf], torch.ones_like(hidden))

    for _ in range(3):
        step()
    trial.session.synchronize()
    slabs = len(backend.slabs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(backend.slabs) == slabs
    assert sum(backend.slabs) == trial.session.host_bytes


def test_h39_the_host_runs_ahead_of_the_device(trial: Trial, device: torch.device) -> None:
    """Forward and backward are queued while the device has not begun: the host waits for nothing."""
    if trial.way.tier == "disk":
        pytest.skip("a write to disk waits for its copy, and staging for the writes")
    leaf = torch.randn(FLOATS, device=device, requires_grad=True)

    def step() -> None:
        with trial.offload():
            hidden = chain(leaf)
        torch.autograd.grad(hidden, [leaf], torch.ones_like(hidden))

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    busy(500)
    done.record()
    step()
    assert not done.query(), "the step was queued only after the device had caught up"
    torch.cuda.synchronize()


@pytest.mark.parametrize("inplace", [False, True])
def test_h41_rrelu(trial: Trial, device: torch.device, inplace: bool) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(FLOATS, device=device, requires_grad=True)
        with context():
            hidden = leaf * 2
            for _ in range(6):
                hidden = functional.rrelu(hidden.sin() - 0.3, 0.1, 0.9, training=True, inplace=inplace)
        hidden.backward(torch.ones_like(hidden))
        yield from grads(leaf)

    trial(step)


@pytest.mark.parametrize("late", ["out", "back"])
def test_h42_h43_h44_late_copies_change_nothing(
    trial: Trial, device: torch.device, backend: LateBackend, late: str
) -> None:
    """Reloads come before copies out are done, storages die before they are read, blocks change hands while in use."""

    def two_graphs(context: Context) -> Iterator[torch.Tensor]:
        leaves = [torch.randn(FLOATS, device=device, requires_grad=True) for _ in range(2)]
        hiddens = []
        for leaf in leaves:
            with context():
                hiddens.append(chain(leaf, 8))
        for hidden in hiddens:
            hidden.backward(torch.ones_like(hidden))
        yield from grads(*leaves)

    backend.late[late] = lambda: 2.0
    trial(simple(device))
    trial(two_graphs)


def test_h43_freed_bytes_are_not_overwritten_before_they_are_read(
    trial: Trial, device: torch.device, backend: LateBackend
) -> None:
    """As soon as a storage is let go, compute asks for as many bytes and fills them with something else."""
    backend.late["out"] = lambda: 3.0

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(FLOATS, device=device, requires_grad=True)
        with context():
            hidden = leaf * 2
            for _ in range(10):
                hidden = hidden.sin()
                torch.full((FLOATS,), float("nan"), device=device)
        hidden.backward(torch.ones_like(hidden))
        yield from grads(leaf)

    trial(step)


def test_h43_a_graph_dropped_with_its_copies_on_the_way(
    trial: Trial, device: torch.device, backend: LateBackend
) -> None:
    backend.late["out"] = lambda: 3.0
    expected = run(simple(device), lambda **_: torch.enable_grad())
    for _ in range(3):
        leaf = torch.randn(FLOATS, device=device, requires_grad=True)
        with trial.offload():
            hidden = chain(leaf)
        del hidden
        assert_identical(run(simple(device), trial.offload), expected)


def test_h44_a_block_changes_hands_while_its_copy_back_is_queued(
    trial: Trial, device: torch.device, backend: LateBackend
) -> None:
    """Backward of one graph, and at once the forward of the next, over the same host memory."""
    backend.late["back"] = lambda: 3.0
    generator = torch.Generator(device).manual_seed(0)
    leaves = [torch.randn(FLOATS, device=device, generator=generator, requires_grad=True) for _ in range(4)]
    expected = [torch.autograd.grad(chain(leaf).sum(), [leaf])[0] for leaf in leaves]
    got = []
    for leaf in leaves:
        with trial.offload():
            loss = chain(leaf).sum()
        got += torch.autograd.grad(loss, [leaf])
        del loss
    assert_identical(got, expected)


def test_h45_reserved_memory_does_not_grow(trial: Trial, device: torch.device) -> None:
    """Destinations come from the compute stream's pool: no second one fills up beside it."""
    leaf = torch.randn(FLOATS, device=device, requires_grad=True)

    def step(context: AbstractContextManager[object]) -> None:
        with context:
            loss = chain(leaf, 20).sum()
        torch.autograd.grad(loss, [leaf])

    def pools() -> set[int]:
        return {part["stream"] for part in torch.cuda.memory_snapshot() if part["segment_type"] == "large"}

    torch.cuda.empty_cache()
    step(torch.enable_grad())
    plain = torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    pools_before = pools()
    reserved = []
    for _ in range(8):
        step(trial.offload())
        reserved.append(torch.cuda.memory_reserved(device))
    assert reserved[2:] == [reserved[2]] * 6
    assert reserved[-1] <= plain
    # Tests before this one may have left pools of streams of their own.
    assert pools() - pools_before <= {torch.cuda.current_stream(device).cuda_stream}
