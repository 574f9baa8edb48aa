"""Whatever the order of a schedule: chunks of two parts of a model, forward and backward as hypothesis likes.

A micro-batch goes through the first part and then the second, as between two ranks: what the first gives is a leaf to
the second, and its gradient is what the first one's backward begins with, if there is one by then. Of each chunk the
graph may be retained, gone through again, gone through in the two halves of a zero-bubble schedule, or dropped.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import spillway
from spillway import Decision, SavedTensor
from spillway.integrations.pipelining import OffloadedStages, offload_stages
from spillway.saved_tensors.hooks import SavedState
from spillway.testing import AdversaryBackend
from steps import assert_no_hook
from support import assert_nothing_left

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="a torch without torch.distributed")

QUICK = settings(derandomize=True, deadline=None, max_examples=30, database=None, phases=[Phase.generate])
THOROUGH = settings(QUICK, max_examples=3000)

WIDTH, ROWS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.25)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).tanh()


class PartStage:
    """A stage as far as :func:`offload_stages` knows it, with torch's own backwards."""

    is_first = False
    group_size = 2

    def __init__(self, index: int) -> None:
        self.submod: nn.Module = Part()
        self.stage_index = self.group_rank = index
        self.chunks: int | None = None
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}
        self.weights: dict[int, Any] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, x: Tensor) -> Tensor:
        out = self.submod(x)
        self.graphs[fwd_chunk_id] = x, out
        return out.detach().clone()

    def backward(self, number: int, gradient: Tensor, *, retain: bool) -> Tensor:
        x, out = self.graphs[number] if retain else self.graphs.pop(number)
        x.grad = None
        torch.autograd.backward(out, gradient, retain_graph=retain)
        assert x.grad is not None
        return x.grad.clone()

    def backward_input(self, number: int, gradient: Tensor) -> Tensor:
        from torch.distributed.pipelining._backward import stage_backward_input

        x, out = self.graphs.pop(number)
        x.grad = None
        (found,), self.weights[number] = stage_backward_input([out], [gradient], [x], self.submod.parameters())
        assert found is not None
        return found.clone()

    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None:
        from torch.distributed.pipelining._backward import stage_backward_weight

        stage_backward_weight(self.submod.parameters(), self.weights.pop(bwd_chunk_id))

    def drop(self, number: int) -> None:
        self.graphs.pop(number, None)
        self.weights.pop(number, None)


LIVES = ("B", "RB", "RRB", "RD", "D", "IW", "RIW", "ID", "IW")
"""Of a chunk after its forward: a backward (B), one that retains the graph (R), one for inputs (I), and then one for
weights (W); or the graph is dropped (D)."""

REGIONS: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"save": "matmul"},
    {"offload": ["inputs", "matmul"]},
    {"save": "norm", "offload": ["inputs", "pointwise", "random"]},
    {"offload": [spillway.saved_by("matmul")]},
    {"use_reentrant": True, "offload": "inputs"},
)


@dataclass(frozen=True)
class Treatment:
    """What is done to the chunks of one part."""

    decisions: Sequence[Decision] | None
    window: int
    min_bytes: int
    tier: str
    region: dict[str, Any] | None

    def put_on(self, stage: PartStage, session: spillway.Session) -> OffloadedStages:
        decisions = self.decisions

        def policy(saved: SavedTensor) -> Decision:
            assert decisions is not None
            return decisions[saved.position % len(decisions)]

        return offload_stages(
            stage,
            policy=None if decisions is None else policy,
            window=self.window,
            min_bytes=self.min_bytes,
            tier=self.tier,
            recompute=None if self.region is None else spillway.Recompute(**self.region),
            blocks=None if self.region is None else "blocks.*",
            session=session,
        )


@dataclass(frozen=True)
class Case:
    lives: Sequence[tuple[str, str]]
    """Of each micro-batch, in both parts."""
    order: Sequence[int]
    treatments: tuple[Treatment, Treatment]
    window: int

    def events(self) -> Iterator[tuple[str, int, int]]:
        """What happens, with part and micro-batch: any order in which each chunk lives its own life, after its
        forward, and a micro-batch goes through the first part first."""
        left = {
            (part, number): ["F", *life] for number, lives in enumerate(self.lives) for part, life in enumerate(lives)
        }
        for choice in self.order:
            ready = [
                (part, number)
                for (part, number), events in left.items()
                if part == 0 or events[0] != "F" or (0, number) not in left or left[0, number][0] != "F"
            ]
            if not ready:
                break
            chunk = ready[choice % len(ready)]
            yield left[chunk].pop(0), *chunk
            if not left[chunk]:
                del left[chunk]


MOVES = [decision for decision in Decision if decision is not Decision.RECOMPUTE]
treatments = st.builds(
    Treatment,
    st.one_of(st.none(), st.lists(st.sampled_from(MOVES), min_size=1, max_size=5)),
    st.sampled_from((0, 400, 1 << 20)),
    st.sampled_from((0, 0, 150)),
    st.sampled_from(("host", "disk")),
    st.sampled_from(REGIONS),
)
lives = st.tuples(st.sampled_from(LIVES), st.sampled_from(LIVES))
cases = st.builds(
    Case,
    st.lists(lives, min_size=1, max_size=3),
    st.lists(st.integers(0, 59), min_size=24, max_size=24),
    st.tuples(treatments, treatments),
    st.sampled_from((0, 600, 1 << 20)),
)


def run(case: Case, session: spillway.Session | None) -> tuple[list[Tensor], int]:
    """Outputs and gradients, in order, and how many bytes came back."""
    torch.manual_seed(5)
    stages = [PartStage(0), PartStage(1)]
    results: list[Tensor] = []
    offloaded = []
    if session is not None:
        offloaded = [how.put_on(stage, session) for how, stage in zip(case.treatments, stages, strict=True)]
    between: dict[tuple[int, int], Tensor] = {}
    given: dict[tuple[int, int], Tensor] = {}
    for event, part, number in case.events():
        stage = stages[part]
        gradient = given.get((part, number), torch.full((ROWS, WIDTH), 1.0 + number))
        if event == "F":
            x = torch.randn(ROWS, WIDTH) if part == 0 else between.pop((1, number))
            # A copy of its own, which nobody else holds.
            between[part + 1, number] = stage.forward_one_chunk(number, x.clone().requires_grad_())
            results.append(between[part + 1, number].clone())
        elif event in "RBI":
            if event == "I":
                found = stage.backward_input(number, gradient)
            else:
                found = stage.backward(number, gradient, retain=event == "R")
            results.append(found)
            given[part - 1, number] = found
        elif event == "W":
            stage.backward_weight_one_chunk(number)
        else:
            stage.drop(number)
        results += [parameter.grad.clone() for parameter in stage.submod.parameters() if parameter.grad is not None]
    back = sum(each.stats().reloaded_bytes for each in offloaded)
    for each in offloaded:
        each.remove()
    return results, back


class Rooms:
    """Sessions, with the adversary or without: what is learned in one example misleads the next."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[int, bool], tuple[spillway.Session, AdversaryBackend | None]] = {}

    def check(self, case: Case, *, adversary: bool) -> int:
        """Compare twice: the first time all is new, the second time it is known. How many bytes came back."""
        key = case.window, adversary
        if key not in self._sessions:
            backend = AdversaryBackend() if adversary else None
            more: dict[str, Any] = {} if backend is None else {"backend": backend.serve}
            self._sessions[key] = spillway.Session(window=case.window, **more), backend
        session, backend = self._sessions.pop(key)  # not used again if what follows fails
        plain, _ = run(case, None)
        total = 0
        for _ in range(2):
            got, back = run(case, session)
            total += back
            assert len(got) == len(plain)
            for place, (ours, expected) in enumerate(zip(got, plain, strict=True)):
                assert torch.equal(ours, expected), f"result {place} of {list(case.events())}"
            del got
            if backend is not None:
                backend.check()
            session.synchronize()
            if session.used_bytes != (0, 0):
                gc.collect()
            assert session.used_bytes == (0, 0)
            assert len(session.of(SavedState).identity) == 0
            assert_no_hook()
        self._sessions[key] = session, backend
        return total

    def close(self) -> None:
        for session, _ in self._sessions.values():
            assert_nothing_left(session)
            session.close()


@pytest.fixture(scope="module")
def rooms() -> Iterator[Rooms]:
    rooms = Rooms()
    yield rooms
    rooms.close()


def test_any_order_of_chunks_has_the_gradients_of_plain_pytorch(rooms: Rooms) -> None:
    moved: list[int] = []

    @QUICK
    @given(case=cases)
    def check(case: Case) -> None:
        moved.append(rooms.check(case, adversary=False))

    check()
    # It is worth something only if bytes move.
    assert sum(map(bool, moved)) > len(moved) / 3


@settings(QUICK, max_examples=15)
@given(case=cases)
def test_any_order_of_chunks_under_the_adversary(rooms: Rooms, case: Case) -> None:
    rooms.check(case, adversary=True)


@pytest.mark.long
@THOROUGH
@given(case=cases, adversary=st.booleans())
def test_any_order_of_chunks_thoroughly(rooms: Rooms, case: Case, adversary: bool) -> None:
    rooms.check(case, adversary=adversary)
