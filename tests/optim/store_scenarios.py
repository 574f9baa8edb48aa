"""Training under the adversary, in ways that together need every wait of the state stores."""

from __future__ import annotations

import contextlib
import copy
import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW

import spillway
from optim.store_loops import DEVICE, DISK, HOST, SPLIT, Loop, Way, net, same, saved, session
from spillway import OffloadedOptimizer
from spillway.optim import state_store
from spillway.testing import AdversaryBackend

BF16 = torch.bfloat16
SETTINGS: dict[str, Any] = {"lr": 1e-2, "fused": True}


@contextmanager
def hostile(**options: Any) -> Iterator[spillway.Session]:
    """A session of small chunks, under the adversary. What it finds is raised."""
    adversary, least = AdversaryBackend(), state_store._LEAST
    state_store._LEAST = 256
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            session(Path(folder), adversary=adversary, **options) as where,
        ):
            yield where
        # What nobody waited for was done when the session was closed.
        adversary.check()
    finally:
        state_store._LEAST = least


def train(where: spillway.Session, way: Way, loop: Loop, **options: Any) -> None:
    """As the plain loop does."""
    plain, mine = net(loop.dtype), net(loop.dtype)
    expected = Loop(**{**vars(loop), "norms": []})
    if loop.dtype == BF16:
        expected.run_in_float(plain, AdamW, SETTINGS)
    else:
        expected.run(plain, AdamW(plain.parameters(), **SETTINGS))
    optimizer = OffloadedOptimizer(mine.parameters(), AdamW, session=where, **way.options, **options, **SETTINGS)  # type: ignore[arg-type]
    loop.run(mine, optimizer)
    optimizer.synchronize()
    assert same(mine, plain)
    optimizer.close()


def narrow_windows(way: Way) -> None:
    for window in (0, 6000, 1 << 20):
        with hostile(window=window) as where:
            train(where, way, Loop(dtype=BF16, clip=0.01))
            train(where, way, Loop(micro=2))


def gradients_that_stay(way: Way) -> None:
    with hostile(window=6000) as where:
        train(where, way, Loop(), offload_gradients=False)


def gradients_that_add_up(way: Way) -> None:
    """The next backward begins while the last gradients are still read."""
    with hostile(window=1 << 20) as where:
        mine, plain = net(), net()
        optimizer = OffloadedOptimizer(mine.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
        reference = AdamW(plain.parameters(), **SETTINGS)
        torch.manual_seed(5)
        for step in range(6):
            for _ in range(1 + step % 3):
                batch = torch.randn(8, 33)
                mine(batch).square().mean().backward()
                plain(batch).square().mean().backward()
            optimizer.step()
            reference.step()
            if step % 2:
                # Else the next ones are added to these.
                optimizer.zero_grad(set_to_none=step % 4 == 1)
                reference.zero_grad(set_to_none=step % 4 == 1)
        assert same(mine, plain)
        optimizer.close()


def states_saved_and_loaded(way: Way) -> None:
    with hostile(window=6000) as where:
        model = net(BF16)
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
        Loop(steps=2, dtype=BF16).run(model, optimizer)
        weights, state = saved((model.state_dict(), optimizer.state_dict()))
        Loop(steps=2, dtype=BF16, seed=2).run(model, optimizer)
        after = [one.detach().clone() for one in model.parameters()]
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert all(
            torch.equal(value, state["state"][index][name])
            for index, found in optimizer.state_dict()["state"].items()
            for name, value in found.items()
        )
        Loop(steps=2, dtype=BF16, seed=2).run(model, optimizer)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), after, strict=True))
        optimizer.close()


def memory_that_others_had(way: Way) -> None:
    """One optimizer's memory, given back with copies under way, is the next one's."""
    with hostile(window=1 << 20) as where:
        for seed in (1, 2, 3):
            model, plain = net(BF16), net(BF16)
            optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
            Loop(steps=2, dtype=BF16, seed=seed, micro=seed).run(model, optimizer)
            Loop(steps=2, dtype=BF16, seed=seed, micro=seed).run_in_float(plain, AdamW, SETTINGS)
            assert same(model, plain)
            del optimizer
            gc.collect()


def memory_that_another_had(way: Way) -> None:
    """A gradient of another optimizer's is still on its way when its memory becomes a state's."""
    with hostile(window=1 << 20) as where:
        torch.manual_seed(0)
        # Large enough to leave at once.
        others, mine = nn.Linear(512, 512), nn.Linear(4, 4)
        plain = copy.deepcopy(mine)
        other = OffloadedOptimizer(others.parameters(), AdamW, session=where)
        optimizer = OffloadedOptimizer(
            mine.parameters(),
            AdamW,
            session=where,
            offload_gradients=False,
            **way.options,
            **SETTINGS,  # type: ignore[arg-type]
        )
        reference = AdamW(plain.parameters(), **SETTINGS)
        others(torch.randn(8, 512)).sum().backward()
        other.zero_grad()
        other.step()
        for batch in torch.randn(2, 8, 4):
            for model, one in ((mine, optimizer), (plain, reference)):
                one.zero_grad()
                model(batch).square().mean().backward()
                one.step()
        assert same(mine, plain)
        optimizer.close()
        other.close()


class Broken(RuntimeError):
    """Of a class's own step."""


class BreaksDown:
    """A method that works twice."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls >= 3:
            raise Broken
        return self._step(*arguments)


def be_written(where: spillway.Session) -> None:
    """By the host, as the arena's memory may be: after the events that come with it."""
    runtime: Any = where.runtime(torch.device("cpu"))
    blocks = [runtime.arena.allocate(4096) for _ in range(64)]
    for block in blocks:
        for event in block.after:
            event.synchronize()
        runtime.backend.host_access(block, write=True)
        runtime.arena.free(block)


def a_step_that_fails(way: Way) -> None:
    """In the middle; what it had under way harms nobody who gets its memory."""
    for away in (True, False):
        with hostile(window=1 << 14) as where:
            model = net(BF16)
            optimizer = OffloadedOptimizer(
                model.parameters(),
                AdamW,
                session=where,
                offload_gradients=away,
                **way.options,
                **SETTINGS,  # type: ignore[arg-type]
            )
            Loop(steps=2, dtype=BF16).run(model, optimizer)
            inner: Any = optimizer._placement.stores[0]._optimizer  # type: ignore[attr-defined]
            inner.step_each = BreaksDown(inner.step_each)
            model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
            with contextlib.suppress(Broken):
                optimizer.step()
            assert inner.step_each.calls >= 3
            optimizer.close()
            del optimizer, inner
            gc.collect()
            assert where.used_bytes == (0, 0)
            be_written(where)
            train(where, way, Loop(dtype=BF16))


def a_copy_in_that_fails(way: Way) -> None:
    """Chunks before it are stepped, the others are not. The next step goes on from there."""
    with hostile(window=1 << 14) as where:
        model = net(BF16)
        optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
        Loop(steps=2, dtype=BF16).run(model, optimizer)
        tier: Any = optimizer._placement.stores[0].tier  # type: ignore[attr-defined]
        load = tier.load
        tier.load = BreaksDown(load)
        model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
        with contextlib.suppress(Broken):
            optimizer.step()
        assert tier.load.calls >= 3
        tier.load = load
        optimizer.zero_grad()
        Loop(steps=2, dtype=BF16).run(model, optimizer)
        optimizer.close()


def blocks_that_wait_for_their_own(way: Way) -> None:
    for window, micro in ((6000, 1), (6000, 2), (0, 2)):
        with hostile(window=window) as where:
            model, plain = net(BF16), net(BF16)
            optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
            optimizer.overlap_forward(model, blocks=nn.Linear)
            Loop(dtype=BF16, micro=micro).run(model, optimizer)
            optimizer.synchronize()
            Loop(dtype=BF16, micro=micro).run_in_float(plain, AdamW, SETTINGS)
            assert same(model, plain)
            optimizer.close()


def streamed_parameters(way: Way) -> None:
    """Their homes are read by blocks, written by steps, and read by the user."""
    for window, overlaps, dtype in ((1 << 20, False, BF16), (6000, True, BF16), (6000, False, torch.float32)):
        with hostile(window=window) as where:
            model, plain = net(dtype), net(dtype)
            optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
            with streamed(model, optimizer, where):
                if overlaps:
                    optimizer.overlap_forward(model, blocks=nn.Linear)
                Loop(dtype=dtype).run(model, optimizer)
                optimizer.synchronize()
                read = copy.deepcopy(model)
            if dtype == BF16:
                Loop(dtype=dtype).run_in_float(plain, AdamW, SETTINGS)
            else:
                Loop(dtype=dtype).run(plain, AdamW(plain.parameters(), **SETTINGS))
            assert same(read, plain)
            optimizer.close()


def streamed_parameters_that_are_dropped(way: Way) -> None:
    """The model is gone while the last step still writes it. Its memory becomes another owner's."""
    for dtype in (BF16, torch.float32):
        with hostile(window=1 << 20) as where:
            model = net(dtype)
            optimizer = OffloadedOptimizer(model.parameters(), AdamW, session=where, **way.options, **SETTINGS)  # type: ignore[arg-type]
            attached = attach(model, optimizer, where)
            optimizer.overlap_forward(model, blocks=nn.Linear)
            Loop(dtype=dtype).run(model, optimizer)
            for context in optimizer._placement.contexts.values():
                # Gradients have left, and all of the step is queued.
                context.transfers.settle()
                context.last_task().finish()
                context.stepper.run(lambda: None).finish()
                context.workers.run(lambda: None).finish()
            runtime: Any = where.runtime(torch.device("cpu"))
            del model, optimizer, attached, context
            gc.collect()
            runtime.mover.read_notes()
            gc.collect()
            second = net(dtype).requires_grad_(False)
            wanted = copy.deepcopy(second)
            kept = spillway.attach(
                second, policy="keep", stream=(nn.Linear, nn.LayerNorm), min_bytes=0, session=where, device="cpu"
            )
            runtime.backend.check()
            assert same(second, wanted)
            kept.remove()


def streamed_parameters_without_state(way: Way) -> None:
    """Only parameters and gradients are in memory that the next ones get."""
    for dtype in (BF16, torch.float32):
        with hostile(window=6000) as where:
            model, plain = net(dtype), net(dtype)
            options: dict[str, Any] = {"lr": 1e-2, "master_dtype": None}
            optimizer = OffloadedOptimizer(model.parameters(), SGD, session=where, **way.options, **options)
            with streamed(model, optimizer, where):
                Loop(dtype=dtype).run(model, optimizer)
            Loop(dtype=dtype).run(plain, SGD(plain.parameters(), lr=1e-2))
            assert same(model, plain)
            optimizer.close()


def attach(model: nn.Module, optimizer: OffloadedOptimizer, where: spillway.Session) -> spillway.Attached:
    return spillway.attach(
        model, policy=spillway.policies.Keep(), stream=(nn.Linear, nn.LayerNorm), min_bytes=0, session=where,
        optimizer=optimizer, device="cpu",
    )  # fmt: skip


@contextmanager
def streamed(model: nn.Module, optimizer: OffloadedOptimizer, where: spillway.Session) -> Iterator[None]:
    attached = attach(model, optimizer, where)
    try:
        yield
    finally:
        attached.remove()


def steps_during_backward(way: Way) -> None:
    for window in (0, 6000, 1 << 20):
        with hostile(window=window) as where:
            train(where, way, Loop(dtype=BF16), step_in_backward=True)
            train(where, way, Loop(), step_in_backward=True)


ALL = (DEVICE, DISK, HOST, SPLIT)
IN_MEMORY = (DEVICE, HOST, SPLIT)
# In CPU memory the small model is one chunk: nothing comes after a failure.
IN_CHUNKS = (DEVICE, DISK, SPLIT)
# Quick ones, and those that alone need some wait, come first: a test of a wait ends with the first that fails.
SCENARIOS: list[tuple[Callable[[Way], None], Way]] = [
    (scenario, way)
    for scenario, ways in (
        (memory_that_another_had, ALL),
        (states_saved_and_loaded, ALL),
        (gradients_that_add_up, ALL),
        (streamed_parameters_without_state, IN_MEMORY),
        (a_copy_in_that_fails, IN_CHUNKS),
        (memory_that_others_had, ALL),
        (streamed_parameters_that_are_dropped, IN_MEMORY),
        (gradients_that_stay, ALL),
        (streamed_parameters, ALL),
        (blocks_that_wait_for_their_own, ALL),
        (narrow_windows, ALL),
        (steps_during_backward, (DEVICE, SPLIT)),
        (a_step_that_fails, IN_CHUNKS),
    )
    for way in ways
]
