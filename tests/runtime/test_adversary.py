"""The adversary finds what it is there to find: a check of the checker."""

from __future__ import annotations

import gc

import pytest
import torch

from runtime.scenarios import SCENARIOS
from spillway.errors import RaceError
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes
from spillway.testing import POISON, AdversaryBackend


def copy(adversary: AdversaryBackend, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
    adversary.copy(stream, Bytes.of(destination), Bytes.of(source))


def memory(nbytes: int = 64) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("number", range(len(SCENARIOS)))
def test_the_engine_has_no_race(number: int) -> None:
    # A scenario asserts bit for bit and checks the adversary's accounts.
    assert SCENARIOS[number]() is None


def test_a_copy_is_not_done_before_somebody_waits() -> None:
    adversary = AdversaryBackend()
    stream, compute = adversary.new_stream("out"), adversary.compute()
    source, destination = memory().fill_(7), adversary.host_slab(64)
    adversary.wait(stream, adversary.record(compute))
    copy(adversary, stream, destination, source)
    event = adversary.record(stream)
    assert not event.query()
    assert (destination == POISON).all()
    adversary.wait(compute, event)
    assert (destination == 7).all()


def test_a_source_that_compute_may_still_write_is_a_race() -> None:
    adversary = AdversaryBackend()
    stream, compute = adversary.new_stream("out"), adversary.compute()
    ready = adversary.record(compute)
    adversary.compute()  # time passes: anything may have been computed since
    adversary.wait(stream, ready)
    with pytest.raises(RaceError, match="not ordered after: compute writes"):
        copy(adversary, stream, adversary.host_slab(64), memory())


def test_two_lanes_that_never_met_race_for_a_slot() -> None:
    adversary = AdversaryBackend()
    out, back, compute = adversary.new_stream("out"), adversary.new_stream("back"), adversary.compute()
    slot = adversary.host_slab(64)
    ready = adversary.record(compute)
    adversary.wait(out, ready)
    adversary.wait(back, ready)
    copy(adversary, out, slot, memory())
    with pytest.raises(RaceError, match="copy on back reads"):
        copy(adversary, back, memory(), slot)
    with pytest.raises(RaceError):
        adversary.check()


def test_accesses_to_other_bytes_do_not_race() -> None:
    adversary = AdversaryBackend()
    out, back, compute = adversary.new_stream("out"), adversary.new_stream("back"), adversary.compute()
    slot = adversary.host_slab(128)
    ready = adversary.record(compute)
    adversary.wait(out, ready)
    adversary.wait(back, ready)
    copy(adversary, out, slot[:64], memory())
    copy(adversary, back, slot[64:], memory())
    adversary.check()
    assert adversary.faults == []


def test_a_source_that_died_is_a_race_and_delivers_poison() -> None:
    adversary = AdversaryBackend()
    stream, compute = adversary.new_stream("out"), adversary.compute()
    source, destination = memory(), memory()
    adversary.wait(stream, adversary.record(compute))
    copy(adversary, stream, destination, source)
    event = adversary.record(stream)
    del source
    gc.collect()
    with pytest.raises(RaceError, match="after its source had died"):
        adversary.wait(compute, event)
    assert (destination == POISON).all()


def test_a_chain_through_a_third_lane_orders() -> None:
    adversary = AdversaryBackend()
    out, middle, back = (adversary.new_stream(name) for name in ("out", "middle", "back"))
    compute, slot, source, target = adversary.compute(), adversary.host_slab(64), memory().fill_(3), memory()
    adversary.wait(out, adversary.record(compute))
    copy(adversary, out, slot, source)
    adversary.wait(middle, adversary.record(out))
    adversary.wait(back, adversary.record(middle))
    adversary.wait(back, adversary.record(compute))
    copy(adversary, back, target, slot)
    adversary.wait(compute, adversary.record(back))
    assert (target == 3).all()


def test_a_task_runs_when_it_is_waited_for_and_raises_there() -> None:
    adversary = AdversaryBackend()
    ran: list[int] = []

    def fail() -> None:
        ran.append(1)
        raise OSError("disk on fire")

    event = adversary.run(fail)
    assert ran == []
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"):
            event.synchronize()
    assert ran == [1]


def test_compute_on_another_stream_has_to_wait_for_the_callers_compute() -> None:
    adversary = AdversaryBackend()
    stream = adversary.new_stream("beside")
    memory = Bytes.of(torch.zeros(8))
    adversary.compute_access(memory)
    with adversary.compute_on(stream), pytest.raises(RaceError, match="compute writes bytes 0 to 32, not ordered"):
        adversary.compute_access(memory)
    memory = Bytes.of(torch.zeros(8))
    adversary.compute_access(memory)
    written = adversary.record(adversary.compute())
    with adversary.compute_on(stream):
        adversary.wait(adversary.compute(), written)
        adversary.compute_access(memory)
        end = adversary.record(adversary.compute())
    with pytest.raises(RaceError, match="compute writes"):
        adversary.compute_access(memory)
    adversary.wait(adversary.compute(), end)
    adversary.compute_access(memory)
