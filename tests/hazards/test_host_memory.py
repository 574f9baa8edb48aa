"""Hazards 39 and 48: host memory is made once, in exact sizes, and used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import spillway
from spillway import EventList
from spillway.runtime.arena import SLAB_BYTES, Arena
from spillway.runtime.cpu import CpuBackend
from support import SlowBackend, Trial, Way, session_on, training_step, two_graphs

MIB = 1 << 20


def test_h39_no_host_memory_is_allocated_in_a_steady_step(way: Way, events: EventList, tmp_path: Path) -> None:
    backend = SlowBackend("nothing")
    with session_on(backend.serve, way, events, tmp_path) as session:
        trial = Trial(session, events, way)
        trial(training_step)
        trial(two_graphs)
        session.synchronize()
        slabs = len(backend.slabs)
        trial(training_step, passes=5)
        trial(two_graphs, passes=5)
        assert len(backend.slabs) == slabs
        assert sum(backend.slabs) == session.host_bytes


@pytest.mark.parametrize("mebibytes", [1, 5, 9, 11, 17, 20, 33, 65])
def test_h48_host_memory_is_reserved_in_nearly_exact_sizes(mebibytes: int) -> None:
    """Not rounded up to powers of two, nor to whole slabs: at most a quarter more than what is in use, and a slab."""
    nbytes = mebibytes * MIB + 4096
    arena = Arena(lambda size: torch.empty(size, dtype=torch.uint8), capacity=1 << 40)
    blocks = [arena.allocate(nbytes) for _ in range(24)]
    assert arena.used_bytes == 24 * nbytes
    assert arena.reserved_bytes <= 1.25 * arena.used_bytes + SLAB_BYTES
    for block in blocks:
        arena.free(block)


def test_h48_a_steady_mix_of_sizes_does_not_grow(way: Way, events: EventList, tmp_path: Path) -> None:
    """Tensors of many sizes come and go in the same order, step for step."""
    with session_on(CpuBackend, way, events, tmp_path) as session:
        reserved = []
        for _ in range(6):
            leaf = torch.randn(1, requires_grad=True)
            with spillway.offload(session=session, min_bytes=0, tier=way.tier):
                loss = torch.zeros(())
                for size in (300_000, 70_000, 1_000_000, 5_000, 640_000, 33):
                    loss = loss + (leaf * torch.randn(size)).sin().sum()
            loss.backward()
            session.synchronize()
            reserved.append(session.host_bytes)
        assert set(reserved[1:]) == {reserved[1]}
