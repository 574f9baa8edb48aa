"""Nothing grows: handles, bytes, files, hooks, threads and descriptors, counted after many kinds of use."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spillway
from spillway import Session
from spillway.saved_tensors import identity
from spillway.saved_tensors.hooks import ForwardScope, SavedState
from steps import KiB, MiB, assert_no_hook, assert_nothing_left, failing, open_files, small_batch, small_model, step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")

TIERS = pytest.mark.parametrize("tier", ["host", "disk"])


def threads() -> int:
    return sum(thread.name.startswith("spillway") for thread in threading.enumerate())


def descriptors() -> int:
    return len(open_files())


def ended(count: Callable[[], int], most: int) -> bool:
    """Whether the count falls to ``most``, given a moment: threads are told to end, and then do."""
    for _ in range(200):
        gc.collect()
        if count() <= most:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(params=[0, "8KiB", "1MiB"])
def session(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with Session(window=request.param, spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)
        assert list(tmp_path.iterdir()) == []


# Kinds of use. Each runs in a function of its own, so that no local of it is alive afterwards.


def ordinary(context: spillway.offload) -> None:
    step(small_model(), small_batch(), context)


def dropped(context: spillway.offload) -> None:
    with context:
        small_model()(small_batch())


def unused_branch(context: spillway.offload) -> None:
    model, x = small_model(), small_batch().requires_grad_()
    with context:
        used, _unused = model(x).sum(), model(x.sin()).exp()
    used.backward()


def twice(context: spillway.offload) -> None:
    model = small_model()
    with context:
        loss = model(small_batch()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def double_backward(context: spillway.offload) -> None:
    x = small_batch().requires_grad_()
    with context:
        loss = small_model()(x).sin().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()


def half_a_backward(context: spillway.offload) -> None:
    x = small_batch().requires_grad_()
    with context:
        middle = x.sin().exp()
        loss = middle.cos().exp().sum()
    torch.autograd.grad(loss, middle, retain_graph=True)


def output_saved_and_kept(context: spillway.offload) -> None:
    x = small_batch().requires_grad_()
    with context:
        y = x.exp()
    y.sum().backward()
    y.add_(1)


def raised_in_forward(context: spillway.offload) -> None:
    def run() -> None:
        with context:
            small_model()(small_batch()).exp()
            raise KeyError

    failing(KeyError, run)


def in_place_error(context: spillway.offload) -> None:
    def run() -> None:
        with context:
            y = small_batch().requires_grad_().exp()
            z = y.sin()
        y.add_(1)
        z.sum().backward()

    failing(spillway.InplaceError, run)


def checkpointed(context: spillway.offload) -> None:
    model, x = small_model(), small_batch().requires_grad_()
    with context:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
    x.square().mean().backward()


def many_alive(context: spillway.offload) -> None:
    model, losses = small_model(), []
    for _ in range(4):
        with context:
            losses.append(model(small_batch()).square().mean())
    for index in (2, 0, 3, 1):
        losses[index].backward()


def in_a_cycle(context: spillway.offload) -> None:
    with context:
        loss = small_model()(small_batch()).sum()
    holder: list[object] = [loss]
    holder.append(holder)


def from_a_thread(context: spillway.offload) -> None:
    thread = threading.Thread(target=ordinary, args=(context,))
    thread.start()
    thread.join()


def decorated(context: spillway.offload) -> None:
    context(lambda x: small_model()(x).sum())(small_batch()).backward()


def by_module_and_operator(context: spillway.offload) -> None:
    policy = spillway.policies.Modules("1*", spillway.policies.Operators("*gelu"))
    step(small_model(), small_batch(), spillway.offload(policy=policy, min_bytes=0, session=context._session))


KINDS = [
    ordinary,
    dropped,
    unused_branch,
    twice,
    double_backward,
    half_a_backward,
    output_saved_and_kept,
    raised_in_forward,
    in_place_error,
    checkpointed,
    many_alive,
    in_a_cycle,
    from_a_thread,
    decorated,
    by_module_and_operator,
]


@TIERS
@pytest.mark.parametrize("use", KINDS, ids=lambda use: use.__name__)
def test_nothing_is_left_after(session: Session, tier: str, use: Callable[[spillway.offload], None]) -> None:
    context = spillway.offload(min_bytes=0, tier=tier, session=session)
    before = threads(), descriptors()
    for number in range(3):
        use(context)
        assert_nothing_left(session)
        if number == 0:
            # What a session makes once: two lanes, two threads for the file.
            assert threads() - before[0] <= 4
            before = threads(), descriptors()
    assert (threads(), descriptors()) <= before


def test_a_pass_needs_no_collector(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[ForwardScope]] = []
    begin = ForwardScope.__init__

    def init(self: ForwardScope, *args: object, **options: object) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ForwardScope, "__init__", init)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with spillway.offload(session=session, min_bytes=0) as context:
                loss = small_model()(small_batch()).square().mean()
            loss.backward()
            del loss, context
        assert made
        assert [each() for each in made] == [None] * len(made)
    finally:
        gc.enable()


@TIERS
def test_tensors_die_when_the_graph_does(session: Session, tier: str) -> None:
    """None of what was saved, nor of what came back, is held by Spillway."""
    storages: list[weakref.ref[torch.UntypedStorage]] = []

    def hooked(tensor: Tensor) -> Tensor:
        storages.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def run() -> None:
        x = small_batch().requires_grad_()
        with spillway.offload(min_bytes=0, tier=tier, session=session):
            for _ in range(5):
                x = hooked(x.exp() * 0.1)
        x.sum().backward()

    run()
    gc.collect()
    assert [storage() for storage in storages] == [None] * 5


def test_a_tensor_that_backward_was_given_may_outlive_the_graph(session: Session) -> None:
    x = small_batch().requires_grad_()
    with spillway.offload(min_bytes=0, tier="host", session=session):
        y = x.exp()
        z = y.sin().sum()
    expected = y.detach().clone()
    del y
    # Detached, since what autograd gives has the node that made it, which has its own saved tensors.
    saved = z.grad_fn.next_functions[0][0]._saved_self.detach()  # type: ignore[union-attr, index]
    del z
    assert_nothing_left(session)
    assert torch.equal(saved, expected)


# Growth


def sizes(session: Session) -> dict[str, int]:
    """Everything of a session that could grow."""
    session.synchronize()
    memories = session.of(SavedState)._learned
    counts = {
        "identity": len(session.of(SavedState).identity),
        "marks": len(session.of(SavedState).marks._marks),
        "memories": len(memories),
        "signatures": sum(len(memory._orders) for memory in memories.values()),
        "waiting": sum(len(memory._waiting) for memory in memories.values()),
        "orders": sum(
            len(order._entries) + sum(len(each.asked) for each in order._traversals)
            for memory in memories.values()
            for order in (*memory._orders.values(), *memory._turns.values(), *(each for *_, each in memory._waiting))
        ),
        "host": session.host_bytes,
        "disk": session.disk_bytes,
    }
    for runtime in session._runtimes.values():
        counts |= runtime.mover.counts()
        counts["free ranges"] = sum(len(slab.free.ranges) for slab in runtime.arena._slabs)
        counts["events of free ranges"] = sum(
            sum(not event.query() for event in events)
            for slab in runtime.arena._slabs
            for _, _, events in slab.free.ranges
        )
    return counts


@pytest.mark.timeout(120)
@TIERS
def test_many_steps_without_growth(tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two windows of 1200 steps: one in which tensors return, one in which all is caught before it leaves."""
    # What is known of storages that are gone is swept away after so many, which is early enough to be seen here.
    monkeypatch.setattr(identity, "_FIRST_SWEEP", 32)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    x = torch.rand(16, 16)
    process = psutil.Process()
    for window in (1 * KiB, 64 * KiB):
        with Session(window=window, spill_directory=tmp_path) as session:

            def steps(count: int, session: Session = session) -> None:
                for _ in range(count):
                    with spillway.offload(min_bytes=0, ratio=0.9, tag="steps", tier=tier, session=session):
                        loss = model(x).sum()
                    loss.backward()

            steps(200)
            assert_nothing_left(session)
            before = len(gc.get_objects()), sizes(session), threads(), descriptors()
            resident = process.memory_info().rss
            steps(1000)
            assert_nothing_left(session)
            after = len(gc.get_objects()), sizes(session), threads(), descriptors()
            # A step that leaked one object, or 1 KiB, would show by 1000 of them.
            assert after[0] - before[0] < 200
            assert after[1:] == before[1:]
            assert process.memory_info().rss - resident < MiB


def test_shapes_that_change_every_step_are_forgotten_in_the_end(session: Session) -> None:
    for rows in range(1, 200):
        with spillway.offload(min_bytes=0, session=session):
            loss = torch.ones(rows, requires_grad=True).exp().sum()
        loss.backward()
    assert len(session.of(SavedState).learned(None)._orders) <= 64


# Sessions


@TIERS
def test_200_sessions_leave_no_thread_and_no_descriptor(tmp_path: Path, tier: str) -> None:
    before = threads(), descriptors()
    for _ in range(200):
        with Session(window=0, spill_directory=tmp_path) as session:
            with spillway.offload(min_bytes=0, tier=tier, session=session):
                loss = torch.ones(64, requires_grad=True).exp().exp().sum()
            loss.backward()
    assert (threads(), descriptors()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_session_that_was_never_used_has_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    before = threads(), descriptors()
    with Session(spill_directory=tmp_path) as session:
        assert (threads(), descriptors()) == before
        assert (session.host_bytes, session.disk_bytes, session.used_bytes) == (0, 0, (0, 0))


@TIERS
def test_a_session_that_is_dropped_without_being_closed_ends_its_threads_and_its_file(
    tmp_path: Path, tier: str
) -> None:
    before = threads(), descriptors()

    def use() -> weakref.ref[Session]:
        session = Session(window=0, spill_directory=tmp_path)
        step(small_model(), small_batch(), spillway.offload(min_bytes=0, tier=tier, session=session))
        assert threads() > before[0]
        return weakref.ref(session)

    session = use()
    assert ended(lambda: session() is not None, 0), "something holds the session"
    assert ended(threads, before[0]), [thread.name for thread in threading.enumerate()]
    assert ended(descriptors, before[1])


@TIERS
def test_a_graph_may_outlive_the_session_that_nobody_holds(tmp_path: Path, tier: str) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    model.zero_grad()

    def forward() -> Tensor:
        session = Session(window=0, spill_directory=tmp_path)
        with spillway.offload(min_bytes=0, tier=tier, session=session):
            out: Tensor = model(x).square().mean()
        return out

    loss = forward()
    gc.collect()
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain.gradients, strict=True))


@TIERS
def test_a_session_closed_under_a_living_graph_gives_its_memory_back_with_the_graph(tmp_path: Path, tier: str) -> None:
    session = Session(window=0, spill_directory=tmp_path)
    with spillway.offload(min_bytes=0, tier=tier, session=session):
        loss = small_model()(small_batch()).sum()
    session.close()
    session.close()
    slabs = [weakref.ref(slab) for runtime in session._runtimes.values() for slab in runtime.arena._slabs]
    del loss
    gc.collect()
    assert [slab() for slab in slabs] == [None] * len(slabs)
    assert session.used_bytes == (0, 0)
    assert (session.host_bytes, session.disk_bytes) == (0, 0)
    assert_no_hook()


def test_trim_gives_host_memory_back(tmp_path: Path) -> None:
    with Session(window=0, spill_directory=tmp_path) as session:
        step(small_model(), small_batch(), spillway.offload(min_bytes=0, tier="host", session=session))
        assert_nothing_left(session)
        assert session.host_bytes > 0
        assert session.trim() > 0
        assert session.host_bytes == 0
        step(small_model(), small_batch(), spillway.offload(min_bytes=0, tier="host", session=session))
