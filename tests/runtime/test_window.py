"""A window that changes while things move."""

from __future__ import annotations

import torch

import spillway
from spillway.types import EventKind, EventList

MIB = 1 << 20


def most_on_their_way(events: EventList) -> tuple[int, int]:
    """Most bytes that were leaving, and that were returning, at once."""
    out: dict[int, int] = {}
    back: dict[int, int] = {}
    most = [0, 0]
    for event in events.events:
        if event.kind is EventKind.LEAVE:
            out[event.entry] = event.nbytes
        elif event.kind in (EventKind.RELEASE, EventKind.REUSE, EventKind.DROP):
            out.pop(event.entry, None)
        if event.kind is EventKind.RETURN:
            back[event.entry] = event.nbytes
        elif event.kind in (EventKind.TAKE, EventKind.DROP):
            back.pop(event.entry, None)
        most = [max(most[0], sum(out.values())), max(most[1], sum(back.values()))]
    return most[0], most[1]


class Owner:
    """Of a claim."""


def test_the_smallest_window_that_is_claimed_is_in_force_and_the_own_one_after_all() -> None:
    with spillway.Session(window=64 * MIB) as session:
        mover = session.runtime(torch.device("cpu")).mover
        first, second = Owner(), Owner()
        mover.claim(first, 32 * MIB)
        mover.claim(second, 16 * MIB)
        assert mover.window == 16 * MIB
        mover.claim(second, None)
        assert mover.window == 32 * MIB
        mover.claim(second, 128 * MIB)
        mover.claim(first, None)
        assert mover.window == 128 * MIB
        del second
        mover.claim(first, None)
        assert mover.window == 64 * MIB


def test_a_smaller_window_is_kept_to_from_then_on() -> None:
    events = EventList()
    leaf = torch.randn(MIB // 4, requires_grad=True)
    with spillway.Session(window=16 * MIB, recorder=events) as session:

        def step() -> torch.Tensor:
            leaf.grad = None
            with spillway.offload(session=session, min_bytes=0):
                x = leaf
                for _ in range(12):
                    x = x.sin()
            x.sum().backward()
            assert leaf.grad is not None
            return leaf.grad

        wanted = step().clone()
        mover = session.runtime(leaf.device).mover
        mover.claim(mover, 2 * MIB)
        assert mover.window == 2 * MIB
        for _ in range(3):
            events.events.clear()
            assert torch.equal(step(), wanted)
        out, back = most_on_their_way(events)
        assert 0 < out <= 2 * MIB
        assert 0 < back <= 2 * MIB
        mover.claim(mover, 5 * MIB)
        for _ in range(3):
            events.events.clear()
            assert torch.equal(step(), wanted)
        assert 2 * MIB < most_on_their_way(events)[1] <= 5 * MIB
