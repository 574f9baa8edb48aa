"""The order in which chunks are loaded, stepped and stored, as lists of events of a store that only records."""

from __future__ import annotations

from typing import Any, cast

import pytest

from spillway.errors import CorruptError, TierFullError, TransferError
from spillway.optim.chunks import ChunkTier, ChunkTransfer, Layout, StateChunk, TransferPipeline
from spillway.optim.state_store import StepCost
from spillway.runtime.backend import Event


class Written:
    """Writes down what it is asked."""

    def __init__(self, sizes: list[int]) -> None:
        self.transfers = [ChunkTransfer(StateChunk([]), {}, {}, StepCost(), cast(Event, None)) for _ in sizes]
        self.sizes = dict(zip(self.transfers, sizes, strict=True))
        self.events: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.room: int | None = None

    def note(self, what: str, transfer: ChunkTransfer) -> None:
        event = f"{what} {self.transfers.index(transfer)}"
        self.events.append(event)
        if event in self.fails:
            raise self.fails.pop(event)

    def nbytes(self, transfer: ChunkTransfer) -> int:
        return self.sizes[transfer]

    def load(self, transfer: ChunkTransfer) -> None:
        if self.room is not None and self.sizes[transfer] > self.room:
            raise TierFullError("full")
        self.note("load", transfer)
        if self.room is not None:
            self.room -= self.sizes[transfer]

    def wait(self, transfer: ChunkTransfer) -> None:
        self.note("wait", transfer)

    def store(self, transfer: ChunkTransfer, place: Any, layout: Layout) -> None:
        self.note("put", transfer)

    def finish(self, transfer: ChunkTransfer) -> None:
        if self.room is not None:
            self.room += self.sizes[transfer]
        self.note("finish", transfer)

    def drop(self, transfer: ChunkTransfer) -> None:
        if self.room is not None:
            self.room += self.sizes[transfer]
        self.note("drop", transfer)


def as_store(store: Written) -> ChunkTier:
    return cast(ChunkTier, store)


def run(store: Written, window: int) -> list[str]:
    pipeline = TransferPipeline(as_store(store), window, store.transfers)
    for transfer in store.transfers:
        pipeline.take(transfer)
        store.note("step", transfer)
        pipeline.put(transfer, None, Layout())
    pipeline.settle()
    return store.events


def test_without_a_window_one_comes_when_the_one_before_has_left() -> None:
    assert run(Written([4, 4, 4]), 0) == [
        *("load 0", "wait 0", "step 0", "put 0", "finish 0"),
        *("load 1", "wait 1", "step 1", "put 1", "finish 1"),
        *("load 2", "wait 2", "step 2", "put 2", "finish 2"),
    ]


def test_half_of_the_window_is_for_what_comes() -> None:
    # 8 bytes of 16 come ahead: two. The first that leaves is finish when a fourth wants its place.
    assert run(Written([4] * 5), 16) == [
        *("load 0", "load 1", "wait 0", "step 0", "put 0"),
        *("load 2", "wait 1", "step 1", "put 1"),
        *("load 3", "wait 2", "step 2", "put 2"),
        *("finish 0", "load 4", "wait 3", "step 3", "put 3"),
        *("wait 4", "step 4", "put 4"),
        *("finish 1", "finish 2", "finish 3", "finish 4"),
    ]


def test_one_that_is_larger_than_the_window_is_alone() -> None:
    assert run(Written([4, 40, 4]), 8) == [
        *("load 0", "wait 0", "step 0", "put 0", "finish 0"),
        *("load 1", "wait 1", "step 1", "put 1", "finish 1"),
        *("load 2", "wait 2", "step 2", "put 2", "finish 2"),
    ]


def test_where_memory_does_not_do_what_leaves_makes_room() -> None:
    store = Written([4, 4, 4])
    store.room = 5
    assert run(store, 1000) == [
        *("load 0", "wait 0", "step 0", "put 0", "finish 0"),
        *("load 1", "wait 1", "step 1", "put 1", "finish 1"),
        *("load 2", "wait 2", "step 2", "put 2", "finish 2"),
    ]


def test_what_never_fits_is_said_and_the_next_comes() -> None:
    store = Written([4, 40, 4])
    store.room = 5
    pipeline = TransferPipeline(as_store(store), 1000, store.transfers)
    first, second, third = store.transfers
    pipeline.take(first)
    pipeline.put(first, None, Layout())
    with pytest.raises(TierFullError):
        pipeline.take(second)
    pipeline.take(third)
    pipeline.put(third, None, Layout())
    pipeline.settle()


def test_one_that_cannot_be_read_is_dropped_and_the_next_comes() -> None:
    store = Written([4, 4])
    store.fails["wait 0"] = CorruptError("wrong")
    pipeline = TransferPipeline(as_store(store), 1000, store.transfers)
    with pytest.raises(CorruptError):
        pipeline.take(store.transfers[0])
    pipeline.take(store.transfers[1])
    pipeline.put(store.transfers[1], None, Layout())
    pipeline.settle()
    assert store.events == ["load 0", "load 1", "wait 0", "drop 0", "wait 1", "put 1", "finish 1"]


def test_after_one_that_could_not_be_put_back_nothing_more_comes() -> None:
    store = Written([4] * 4)
    store.fails["finish 0"] = TransferError("broken")
    pipeline = TransferPipeline(as_store(store), 8, store.transfers)
    first, second, third, fourth = store.transfers
    pipeline.take(first)
    pipeline.put(first, None, Layout())
    pipeline.take(second)
    pipeline.put(second, None, Layout())
    for transfer in (third, fourth):
        with pytest.raises(TransferError):
            pipeline.take(transfer)
    with pytest.raises(TransferError):
        pipeline.settle()
    assert store.events == [
        *("load 0", "wait 0", "put 0", "load 1", "wait 1", "put 1", "finish 0", "finish 1"),
    ]


def test_what_came_in_vain_is_waited_for_and_dropped() -> None:
    store = Written([4, 4, 4])
    pipeline = TransferPipeline(as_store(store), 16, store.transfers)
    pipeline.take(store.transfers[0])
    pipeline.drop(store.transfers[0])
    pipeline.settle()
    assert store.events == ["load 0", "load 1", "wait 0", "drop 0", "wait 1", "drop 1"]


def test_what_came_ahead_makes_room_for_what_is_stepped_and_comes_again() -> None:
    store = Written([4, 4, 4])
    store.room = 12
    pipeline = TransferPipeline(as_store(store), 1000, store.transfers)
    first, second, third = store.transfers
    pipeline.take(first)

    def staged() -> str:
        assert store.room is not None
        if store.room < 8:
            raise TierFullError("full")
        return "room"

    assert pipeline.freeing_memory(staged) == "room"
    pipeline.put(first, None, Layout())
    for transfer in (second, third):
        pipeline.take(transfer)
        pipeline.put(transfer, None, Layout())
    pipeline.settle()
    assert store.events == [
        *("load 0", "load 1", "load 2", "wait 0"),
        *("wait 2", "drop 2", "wait 1", "drop 1", "put 0"),
        *("load 1", "load 2", "wait 1", "put 1", "wait 2", "put 2"),
        *("finish 0", "finish 1", "finish 2"),
    ]
