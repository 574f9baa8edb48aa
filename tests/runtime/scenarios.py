"""Training steps under the adversary that between them need every wait that the runtime has."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

import spillway
from spillway.runtime.bytes import Bytes
from spillway.testing import AdversaryBackend

Step = tuple[torch.Tensor, list[torch.Tensor]]


def make_model(layers: int = 4, width: int = 32) -> torch.nn.Module:
    """Linear layers, GELUs and layer norms: views, shared inputs, outputs."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(
            torch.nn.Sequential(
                torch.nn.Linear(width, 2 * width),
                torch.nn.GELU(),
                torch.nn.Linear(2 * width, width),
                torch.nn.LayerNorm(width),
            )
            for _ in range(layers)
        )
    )


def step(model: torch.nn.Module, batch: torch.Tensor, context: contextlib.AbstractContextManager[object]) -> Step:
    """One forward inside ``context`` and one backward outside: loss and gradients."""
    model.zero_grad()
    with context:
        loss = model(batch).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expect_same(got: Step, wanted: Step) -> None:
    """Bit for bit."""
    assert torch.equal(got[0], wanted[0])
    assert len(got[1]) == len(wanted[1])
    assert all(torch.equal(a, b) for a, b in zip(got[1], wanted[1], strict=True))


@contextlib.contextmanager
def adversary_session(
    *, direct_disk: bool = False, **options: object
) -> Iterator[tuple[AdversaryBackend, spillway.Session]]:
    """A session under the adversary, checked at the end."""
    adversary = AdversaryBackend(direct_disk=direct_disk)
    with spillway.Session(backend=adversary.serve, **options) as session:  # type: ignore[arg-type]
        yield adversary, session
    adversary.check()


def steps_in_a_row(tier: str, window: int, *, direct_disk: bool = False) -> None:
    """Three steps: nothing is known in the first, order and tail are in the others."""
    model, batch = make_model(), torch.randn(32, 32)
    wanted = step(model, batch, contextlib.nullcontext())
    with adversary_session(direct_disk=direct_disk, window=window) as (_, session):
        for _ in range(3):
            expect_same(
                step(model, batch, spillway.offload(min_bytes=0, session=session, tier=tier)),
                wanted,
            )
        session.synchronize()
        assert session.used_bytes == (0, 0)


def streams_of_the_caller(tier: str, *, direct_disk: bool = False) -> None:
    """Forward on one stream and backward on another, so that a slot is reused by a stream that never waited."""
    model, batch = make_model(), torch.randn(32, 32)
    wanted = step(model, batch, contextlib.nullcontext())
    with adversary_session(direct_disk=direct_disk, window=0) as (adversary, session):
        for name in ("compute", "side", "compute", "side"):
            model.zero_grad()
            with adversary.stream(name), spillway.offload(min_bytes=0, session=session, tier=tier):
                loss = model(batch).square().mean()
            # The graph is kept, so that nothing is dropped, which would make this stream wait for all that left.
            with adversary.stream(f"backward of {name}"):
                loss.backward(retain_graph=True)
            expect_same((loss.detach(), [p.grad.clone() for p in model.parameters()]), wanted)


def a_longer_pass_than_learned(tier: str, *, direct_disk: bool = False) -> None:
    """A tail that was held back has to leave after all, because the window is smaller now."""
    model, batch = make_model(), torch.randn(32, 32)
    wanted = step(model, batch, contextlib.nullcontext())
    with adversary_session(direct_disk=direct_disk) as (_, session):
        for window in (1 << 30, 4096, 4096):
            expect_same(
                step(model, batch, spillway.offload(min_bytes=0, session=session, tier=tier, window=window)), wanted
            )


def two_graphs_at_once(tier: str, *, direct_disk: bool = False) -> None:
    """Two forwards, then their backwards, the first one first, over slots that the last round has left."""
    model, batches = make_model(), torch.randn(2, 32, 32)
    wanted = []
    for batch in batches:
        wanted.append(step(model, batch, contextlib.nullcontext()))
    with adversary_session(direct_disk=direct_disk, window=8192) as (_, session):
        for _ in range(2):
            losses = []
            for batch in batches:
                with spillway.offload(min_bytes=0, session=session, tier=tier):
                    losses.append(model(batch).square().mean())
            for loss, want in zip(losses, wanted, strict=True):
                model.zero_grad()
                loss.backward()
                expect_same((loss.detach(), [p.grad.clone() for p in model.parameters()]), want)


def graphs_that_are_dropped(tier: str, *, direct_disk: bool = False) -> None:
    """Entries die while they leave and while they return, and their bytes go to others."""
    model, batch = make_model(), torch.randn(32, 32)
    wanted = step(model, batch, contextlib.nullcontext())
    with adversary_session(direct_disk=direct_disk, window=16384) as (_, session):
        for _ in range(3):
            with spillway.offload(min_bytes=0, session=session, tier=tier):
                loss = model(batch).square().mean()
            # The last node alone runs: it fetches others ahead, which nobody takes.
            torch.autograd.grad(loss, model[-1][-1].weight)
            del loss
            expect_same(step(model, batch, spillway.offload(min_bytes=0, session=session, tier=tier)), wanted)


def memory_that_is_trimmed(tier: str, *, direct_disk: bool = False) -> None:
    """Host memory goes back to the system as soon as its last entry has died."""
    model, batch = make_model(), torch.randn(32, 32)
    wanted = step(model, batch, contextlib.nullcontext())
    with adversary_session(direct_disk=direct_disk, window=8192) as (_, session):
        for _ in range(2):
            expect_same(step(model, batch, spillway.offload(min_bytes=0, session=session, tier=tier)), wanted)
            session.synchronize()
            assert session.trim() > 0


def a_slot_given_back_while_its_copy_back_is_queued(tier: str, *, direct_disk: bool = False) -> None:
    """By the tier alone, without the mover, whose own order would hide it: the next owner's bytes come too early."""
    with adversary_session(direct_disk=direct_disk) as (adversary, session):
        runtime = session.runtime(torch.device("cpu"))
        out, back = runtime.mover.streams
        place = runtime.tier(tier)
        first, second = torch.full((4096,), 1, dtype=torch.uint8), torch.full((4096,), 2, dtype=torch.uint8)
        slot = place.reserve(Bytes.of(first))
        compute = adversary.compute()
        adversary.wait(out, adversary.record(compute))
        adversary.wait(compute, place.store((slot,), (Bytes.of(first),))[0])
        destination = place.destination(slot, 4096)
        adversary.wait(back, adversary.record(compute))
        (loaded,) = place.load((slot,), (destination,))
        if hasattr(loaded, "run"):
            loaded.run()  # the task queues its copy, and gives its block back
        place.free(slot)
        following = place.reserve(Bytes.of(second))
        compute = adversary.compute()
        adversary.wait(out, adversary.record(compute))
        place.store((following,), (Bytes.of(second),))
        adversary.wait(compute, loaded)
        assert torch.equal(destination.tensor(), first)
        place.free(following)


SCENARIOS: list[Callable[[], None]] = [
    functools.partial(scenario, tier, *arguments, direct_disk=direct)
    for tier, direct in (("host", False), ("disk", False), ("disk", True))
    for scenario, arguments in (
        (steps_in_a_row, (0,)),
        (steps_in_a_row, (16384,)),
        (steps_in_a_row, (1 << 30,)),
        (streams_of_the_caller, ()),
        (a_longer_pass_than_learned, ()),
        (two_graphs_at_once, ()),
        (graphs_that_are_dropped, ()),
        (memory_that_is_trimmed, ()),
        (a_slot_given_back_while_its_copy_back_is_queued, ()),
    )
]
