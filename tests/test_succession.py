"""Whose backward comes next, and what is fetched ahead of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spillway
from spillway.saved_tensors.hooks import SavedState
from spillway.saved_tensors.order import AccessOrder, NextPassPredictor
from spillway.testing import AdversaryBackend
from spillway.types import EventKind, EventList


class Pass:
    def __init__(self, tag: str | None) -> None:
        self.tag = tag
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive


def guesses(order: Sequence[tuple[str, int, int]], steps: int = 3) -> list[bool]:
    """Of the last step, whether each backward but the first was foreseen when the one before it had begun.

    Each of ``order`` is a tag, the place of its pass among those of the tag, and a lap.
    """
    predictor: NextPassPredictor = NextPassPredictor()
    right: list[bool] = []
    for _ in range(steps):
        passes = {(tag, place): Pass(tag) for tag, place, _ in sorted(order)}
        for each in passes.values():
            predictor.add(each)
        right = []
        foreseen = None
        for tag, place, lap in order:
            course = passes[tag, place]
            right.append(foreseen is not None and foreseen == (course, lap))
            predictor.begin(course, lap)
            foreseen = predictor.after(course, lap)
        for each in passes.values():
            each.alive = False
    return right[1:]


@pytest.mark.parametrize(
    "order",
    [
        [("a", place, 0) for place in range(4)],
        [("a", place, 0) for place in reversed(range(4))],
        [(tag, place, 0) for tag in "ba" for place in range(3)],
        [(tag, place, 0) for place in range(3) for tag in "ba"],
        [(f"micro-batch {place}", 0, 0) for place in range(5)],
        [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("a", 2, 0), ("a", 1, 1), ("a", 2, 1)],
    ],
    ids=["first-first", "last-first", "by-part", "parts-in-turn", "tags", "split"],
)
def test_a_schedule_that_repeats_is_foreseen(order: list[tuple[str, int, int]]) -> None:
    assert guesses(order) == [True] * (len(order) - 1)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4)), unique=True, max_size=8))
def test_whoever_is_foreseen_waits(order: list[tuple[str, int]]) -> None:
    predictor: NextPassPredictor = NextPassPredictor()
    for _ in range(2):
        waiting = {(tag, place): Pass(tag) for tag, place in sorted(order)}
        for each in waiting.values():
            predictor.add(each)
        begun = []
        for key in order:
            begun.append(waiting.pop(key))
            predictor.begin(begun[-1], 0)
            foreseen = predictor.after(begun[-1], 0)
            assert foreseen is None or foreseen[0] in waiting.values()
        for each in begun:
            each.alive = False


def test_nobody_is_foreseen_who_does_not_wait() -> None:
    predictor: NextPassPredictor = NextPassPredictor()
    for _ in range(3):
        one = Pass("a")
        predictor.add(one)
        predictor.begin(one, 0)
        assert predictor.after(one, 0) is None
        one.alive = False


def test_passes_are_not_kept_alive() -> None:
    predictor: NextPassPredictor = NextPassPredictor()
    one, other = Pass("a"), Pass("a")
    predictor.add(one)
    predictor.add(other)
    predictor.begin(one, 0)
    predictor.begin(other, 0)
    references = [weakref.ref(one), weakref.ref(other)]
    del one, other
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    for _ in range(1000):
        predictor.add(Pass("a"))
    assert sum(map(len, predictor._waiting.values())) < 100


def test_what_is_asked_for_each_tensor_does_not_grow_with_the_passes_that_wait() -> None:
    looks = 0

    class Counted(Pass):
        def is_alive(self) -> bool:
            nonlocal looks
            looks += 1
            return super().is_alive()

    counts = []
    for count in (10, 1000):
        predictor: NextPassPredictor = NextPassPredictor()
        for _ in range(2):
            passes = [Counted("a") for _ in range(count)]
            for each in passes:
                predictor.add(each)
            looks = 0
            for place, each in enumerate(passes[:10]):
                predictor.begin(each, 0)
                for _ in range(20):
                    following = predictor.after(each, 0)
                    assert following is None or following == (passes[place + 1], 0)
            for each in passes:
                each.alive = False
        counts.append(looks)
    assert counts[0] <= counts[1] <= 20


@pytest.mark.parametrize("graphs", [1, 2])
def test_a_graph_that_is_retained_for_many_backwards_leaves_little_behind(graphs: int) -> None:
    x = torch.randn(64, requires_grad=True)
    plain = torch.autograd.grad(x.exp().sin().exp().sum(), x)[0]
    with spillway.Session(backend=AdversaryBackend().serve, window=512) as session:
        losses = []
        for _ in range(graphs):
            with spillway.offload(min_bytes=0, session=session):
                losses.append(x.exp().sin().exp().sum())
        for _ in range(50):
            for loss in losses:
                assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], plain)
        memory = session.of(SavedState).learned(None)
        assert memory.total_bytes > 0
        order = next(iter(memory._orders.values()))
        assert len(order._traversals) < 10
        with spillway.offload(min_bytes=0, session=session):
            later = x.exp().sin().exp().sum()
        for _ in range(12):
            assert torch.equal(torch.autograd.grad(later, x, retain_graph=True)[0], plain)


def test_devices_have_successions_of_their_own() -> None:
    with spillway.Session() as session:
        one = session.of(SavedState).predictor(torch.device("cpu"))
        assert one is session.of(SavedState).predictor(torch.device("cpu"))
        assert one is not session.of(SavedState).predictor(torch.device("cuda", 0))


def test_the_next_backward_finds_its_first_tensors_on_the_way() -> None:
    events = EventList()
    with spillway.Session(backend=AdversaryBackend().serve, window=4096, recorder=events) as session:
        x = torch.randn(256, requires_grad=True)
        for _ in range(3):
            losses = []
            for _ in range(3):
                with spillway.offload(min_bytes=0, session=session):
                    y = x
                    for _ in range(12):
                        y = y.exp().sin()
                    losses.append(y.sum())
            fetched = []
            for loss in losses:
                before = {event.entry for event in events.events if event.kind is EventKind.RETURN}
                taken = {event.entry for event in events.events if event.kind is EventKind.TAKE}
                fetched.append(len(before - taken))
                loss.backward()
        assert fetched[0] == 0
        assert min(fetched[1:]) >= 2


def test_what_was_fetched_of_the_next_pass_is_not_named_again() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    predictor: NextPassPredictor = NextPassPredictor()
    for step in range(2):
        orders = [AccessOrder(predictor=predictor) for _ in range(2)]
        for order in orders:
            for _ in range(100):
                order.add(look, 1)
            order.is_alive = lambda: True  # type: ignore[method-assign]
            predictor.add(order)
        for order in orders:
            for place in reversed(range(100)):
                order.ask(place, 0, caught=False)
                looks = 0
                order.fetched(sum(1 for _ in order.upcoming()))
                if step == 1 and order is orders[0]:
                    assert looks == (199 if place == 99 else 0)
                if step == 1 and order is orders[1] and place == 99:
                    # That it has begun says that all which had not left by then may be looked at again.
                    assert looks >= 99
        for order in orders:
            order.is_alive = lambda: False  # type: ignore[method-assign]


def test_a_turn_is_how_many_passes_have_ended_since_none_waited() -> None:
    predictor: NextPassPredictor = NextPassPredictor()

    def forward() -> tuple[int, Pass]:
        turn, made = predictor.turn(), Pass("a")
        predictor.add(made)
        return turn, made

    for _ in range(3):
        # One forward, one backward, three of them alive at most.
        turns, waiting = [], []
        for _ in range(6):
            turn, made = forward()
            turns.append(turn)
            waiting.append(made)
            if len(waiting) == 3:
                predictor.begin(waiting.pop(0), 0)
        for each in waiting:
            predictor.begin(each, 0)
        assert turns == list(range(6))
    # One that nobody goes back through, and is gone, does not wait.
    for _ in range(2):
        turn, made = forward()
        assert turn == 0
        made.alive = False
    # Of one that stays, others are counted on, up to a bound.
    _, stays = forward()
    turns = []
    for _ in range(1000):
        turn, made = forward()
        turns.append(turn)
        predictor.begin(made, 0)
    assert stays.is_alive()
    assert turns[:4] == [1, 2, 3, 4]
    assert turns[-1] == turns[-2]


def test_the_tail_of_the_last_micro_batch_is_that_of_no_other() -> None:
    """Of the others, forwards come in between, and what is held back for nothing would be waited for."""
    adversary = AdversaryBackend()
    events = EventList()
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
    x = torch.randn(64, 64, requires_grad=True)
    with spillway.Session(backend=adversary.serve, window=2 * 64 * 64 * 4, recorder=events) as session:

        def forward() -> torch.Tensor:
            y = x * 1
            with spillway.offload(session=session, tier="host", min_bytes=0):
                for layer in layers:
                    y = layer(y).sin()
            return y.sum()

        def step() -> None:
            losses = [forward() for _ in range(3)]
            for each in losses:
                each.backward()

        for _ in range(3):
            step()
        held: list[list[bool]] = []
        for _ in range(3):
            forwards = []
            for _ in range(3):
                loss = forward()
                order = next(reversed([each for *_, each in session.of(SavedState).learned(None)._waiting]))
                held.append([place in order.tail for place in range(len(order._entries))])
                forwards.append(loss)
            for each in forwards:
                each.backward()
    adversary.check()
    # All forwards come first here, and the backward of the first is the first: nothing of it is in the window any more.
    assert [any(each) for each in held] == [False, False, True] * 3
