"""Bytes that move are waited for: training under the adversary, with windows so small that all memory is used again.

Every wait of ``spillway.optim`` is needed by one of these tests, or by one of those of overlap and leftovers: without
it a test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch.nn import Module, Parameter

import spillway
from optim.plain_loop import pair, windows
from optim.support import Block, assert_same_values, batches, loss_of, offloaded, plainly, same_bits, train, wide
from spillway import OffloadedOptimizer
from spillway.errors import RaceError
from spillway.optim.transfers import Transfers
from spillway.runtime.arena import PAGE
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import CpuBackend
from spillway.testing import AdversaryBackend
from support import SlowBackend

SGD = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture(params=[0, 3000], ids=lambda window: f"window-{window}")
def tight(request: pytest.FixtureRequest, adversary: AdversaryBackend) -> Iterator[spillway.Session]:
    """A session under the adversary, in which one or two gradients may be leaving at once."""
    with spillway.Session(backend=adversary.serve, window=request.param) as session:
        yield session
    adversary.check()


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [1, 3, 2]], ids=["one", "ragged"])
@pytest.mark.parametrize("numel", [64, 1 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training(
    dtype: torch.dtype, sizes: list[int], numel: int, tight: spillway.Session, pieces_of: Callable[[int], None]
) -> None:
    pieces_of(numel)
    both = pair(torch.bfloat16, tight, lr=1e-2) if dtype is torch.bfloat16 else None
    if both is None:
        models = wide(), wide()
        optimizers = plainly(torch.optim.SGD, **SGD)(models[0]), offloaded(torch.optim.SGD, tight, **SGD)(models[1])
    for window in windows(dtype, sizes):
        if both is not None:
            for batch in window:
                both.backward(batch)
            both.assert_same_norm(0.05)
            both.step()
            both.zero_grad()
            both.assert_same()
            continue
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, window, micro=len(window))
        assert_same_values(models[1], models[0])
    (both.optimizer if both is not None else optimizers[1]).close()  # type: ignore[attr-defined]
    assert tight.used_bytes == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_training_that_overlaps(dtype: torch.dtype, tight: spillway.Session, pieces_of: Callable[[int], None]) -> None:
    pieces_of(256)
    results = []
    for overlaps in (True, False):
        model = wide(dtype)
        optimizer = offloaded(torch.optim.SGD, tight, **SGD)(model)
        if overlaps:
            optimizer.overlap_forward(model, blocks=Block)
        for number, window in enumerate(windows(dtype, [1, 2, 1, 3, 1])):
            train(model, optimizer, window, micro=len(window), before_step=lambda model=model: clip(model))
            if number == 2:
                with torch.no_grad():
                    model(window[0])
                    model.last.weight.mul_(2)  # type: ignore[union-attr]
        optimizer.synchronize()
        results.append(model)
        optimizer.close()
    assert_same_values(*results)
    assert tight.used_bytes == (0, 0)


def clip(model: Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_that_are_read_and_written_between(dtype: torch.dtype, tight: spillway.Session) -> None:
    results = []
    for offloads in (True, False):
        model = wide(dtype)
        optimizer = offloaded(torch.optim.SGD, tight, offload_gradients=offloads, master_dtype=None, **SGD)(model)
        for batch in batches(3, dtype):
            loss_of(model, batch).backward()
            for parameter in model.parameters():
                gradient = parameter.grad
                assert gradient is not None
                before = gradient.clone()
                gradient.add_(before.abs(), alpha=0.5)
                gradient.mul_(0.5)
                assert same_bits(gradient.clone(), gradient.clone())
                gradient.clamp_(-0.1, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model)
        optimizer.close()
    assert_same_values(*results)


def test_several_streams(adversary: AdversaryBackend) -> None:
    # The stream of a backward is not that of the step, and neither is that of the next forward.
    with spillway.Session(backend=adversary.serve, window=0) as session:
        model, plain = wide(), wide()
        optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
        for batch in batches(3):
            with adversary.stream("backward"):
                loss_of(model, batch).backward()
            with adversary.stream("step"):
                clip(model)
                optimizer.step()
            optimizer.zero_grad()
        train(plain, plainly(torch.optim.SGD, **SGD)(plain), batches(3), before_step=lambda: clip(plain))
        assert_same_values(model, plain)
        optimizer.close()
    adversary.check()


def test_a_parameter_that_is_read_does_not_wait_behind_gradients(adversary: AdversaryBackend) -> None:
    """The caller's thread may be far ahead of the GPU: it has sent gradients that the GPU computes later."""
    with spillway.Session(backend=adversary.serve) as session:
        optimizer = OffloadedOptimizer([Parameter(torch.ones(8))], torch.optim.SGD, lr=1.0, threads=1, session=session)
        transfers: Transfers = next(iter(optimizer._placement.contexts.values())).transfers
        parameter, gradient = torch.ones(1 << 18), torch.ones(1 << 18)
        ready = transfers.ready([parameter])
        later = transfers.send(gradient)
        (sent,) = transfers.fetch([parameter], ready)
        assert torch.equal(transfers.read(sent), parameter)
        assert later.batch.arrived is not None
        assert not later.batch.arrived.reached  # type: ignore[attr-defined]
        transfers.settle()
        assert torch.equal(transfers.read(later), gradient)
        for each in (sent, later):
            transfers.give_back(each)
        optimizer.close()
    adversary.check()


@pytest.mark.parametrize("late", ["gradients", "parameters out", "parameters"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_training_on_lanes_that_are_late(late: str, overlaps: bool) -> None:
    with spillway.Session(backend=SlowBackend(late, 0.001).serve, window=4096) as session:
        model, plain = wide(), wide()
        optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
        if overlaps:
            optimizer.overlap_forward(model, blocks=Block)
        data = batches(4)
        train(model, optimizer, data, micro=2, before_step=lambda: clip(model))
        optimizer.synchronize()
        train(plain, plainly(torch.optim.SGD, **SGD)(plain), data, micro=2, before_step=lambda: clip(plain))
        assert_same_values(model, plain)
        optimizer.close()
        assert session.used_bytes == (0, 0)


def test_the_window_bounds_what_is_leaving(adversary: AdversaryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # Gradients of 4000 bytes, of which two and a half may be leaving, each by itself.
    monkeypatch.setattr("spillway.optim.transfers._TOGETHER", 0)
    with spillway.Session(backend=adversary.serve, window=10_000) as session:
        parameters = [Parameter(torch.ones(1000)) for _ in range(8)]
        optimizer = OffloadedOptimizer(parameters, torch.optim.SGD, lr=1.0, threads=1, session=session)
        transfers: Transfers = next(iter(optimizer._placement.contexts.values())).transfers
        seen = []
        for parameter in parameters:
            parameter.sum().backward()
            seen.append((len(transfers._leaving), transfers._leaving_bytes))
        assert seen == [(1, 4000), *[(2, 8000)] * 7]
        optimizer.step()
        assert (len(transfers._leaving), transfers._leaving_bytes) == (0, 0)
        optimizer.close()
    adversary.check()


def test_additions_on_the_host_are_bounded_by_the_window(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve, window=10_000) as session:
        parameters = [Parameter(torch.ones(1000)) for _ in range(8)]
        optimizer = OffloadedOptimizer(parameters, torch.optim.SGD, lr=1.0, session=session)
        most = 0
        for _ in range(4):
            for parameter in parameters:
                parameter.sum().backward()
                most = max(most, session.used_bytes[0])
        # The first gradient of each, which stays as it came until there is a second; then a page for each addition.
        assert most <= (len(parameters) + 10_000 // 4000 + 1) * PAGE
        assert session.used_bytes[0] <= 3 * PAGE
        optimizer.step()
        assert torch.equal(parameters[3], torch.full((1000,), -3.0))
        optimizer.close()
    adversary.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parameters_are_not_written_before_compute_is_done_with_them(
    dtype: torch.dtype, adversary: AdversaryBackend
) -> None:
    # An evaluation between backward and step reads them, say: what has arrived of gradients says nothing of that.
    with spillway.Session(backend=adversary.serve) as session:
        model = wide(dtype)
        optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
        for batch in batches(3, dtype):
            loss_of(model, batch).backward()
            for parameter in model.parameters():
                adversary.compute_access(Bytes.of(parameter.detach()))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
    adversary.check()


@pytest.mark.parametrize("kind", ["slow", "adversary"])
def test_memory_from_which_parameters_still_leave_is_not_written_by_gradients(
    kind: str, adversary: AdversaryBackend
) -> None:
    # Of another optimizer of the session, whose backward waits for none of these parameters.
    serve = adversary.serve if kind == "adversary" else SlowBackend("parameters", 0.005).serve
    with spillway.Session(backend=serve) as session:
        model, plain, other = wide(torch.bfloat16), wide(torch.bfloat16), wide(torch.bfloat16, seed=1)
        optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
        optimizer.overlap_forward(model, blocks=Block)
        second = offloaded(torch.optim.SGD, session, **SGD)(other)
        loss = loss_of(other, batches(1, torch.bfloat16, seed=5)[0])
        data = batches(1, torch.bfloat16)
        train(model, optimizer, data)
        # The step's work is done: the memory is free again, once the copies from it are done.
        next(iter(optimizer._placement.contexts.values())).lane.run(lambda: None).synchronize()
        loss.backward()
        optimizer.synchronize()
        reference = offloaded(torch.optim.SGD, session, **SGD)(plain)
        train(plain, reference, data)
        assert_same_values(model, plain)
        for each in (optimizer, second, reference):
            each.close()
    adversary.check()


def test_gradients_are_handed_back_to_the_stream_that_made_them() -> None:
    class Notes(CpuBackend):
        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))
            self.handed: list[tuple[int, list[Stream]]] = []

        def hand_back(self, memory: Bytes, lanes: Iterable[Stream]) -> None:
            self.handed.append((memory.nbytes, list(lanes)))

    backend = Notes()
    with spillway.Session(backend=lambda device: backend) as session:
        model = wide()
        optimizer = offloaded(torch.optim.SGD, session, **SGD)(model)
        train(model, optimizer, batches(1))
        sizes = sorted(parameter.nbytes for parameter in model.parameters())
        assert sorted(size for size, _ in backend.handed) == sizes
        assert all(lanes == [backend.compute()] for _, lanes in backend.handed)
        optimizer.close()


def test_the_adversary_is_told_what_the_host_reads_and_writes(adversary: AdversaryBackend) -> None:
    with spillway.Session(backend=adversary.serve) as session:
        optimizer = offloaded(torch.optim.SGD, session, **SGD)(wide())
        transfers: Transfers = next(iter(optimizer._placement.contexts.values())).transfers
        sent = transfers.send(torch.ones(8))
        transfers.flush()
        for write in (False, True):
            with pytest.raises(RaceError, match=r"the host (reads|writes) bytes"):
                transfers.host_view(sent.cells, write=write)
        transfers.settle()
        transfers.give_back(sent)
        optimizer.close()
    assert len(adversary.faults) == 2


def test_an_edit_of_a_state_while_its_step_is_under_way() -> None:
    """A dictionary that was read before the step, so that nothing waits for it."""
    models = [wide(), wide()]
    with spillway.Session(backend=SlowBackend("parameters", 0.01).serve) as session:
        optimizers = [offloaded(torch.optim.SGD, session, lr=0.1, momentum=0.9)(models[0])]
        optimizers.append(plainly(torch.optim.SGD, lr=0.1, momentum=0.9)(models[1]))
        optimizers[0].overlap_forward(models[0])
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, batches(1))
            state = optimizer.state[model.last.weight]
            loss_of(model, batches(1, seed=2)[0]).backward()
            optimizer.step()
            state["momentum_buffer"] = torch.ones_like(model.last.weight)
            optimizer.zero_grad()
            train(model, optimizer, batches(2, seed=3))
        optimizers[0].synchronize()
        assert_same_values(*models)
        optimizers[0].close()
