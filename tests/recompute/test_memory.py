"""What regions hold: nothing that they need not, told by weak references and without the collector."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

# The first checkpointed call would import it. That import leaves frames behind until garbage is collected.
import torch._dynamo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import spillway
from recompute.regions import HiddenAttribute, HiddenList
from spillway.checkpointing.selectors import Planned
from spillway.recomputing import call_checkpointed
from spillway.testing import AdversaryBackend
from spillway.types import Decision, EventKind, EventList


class Operators(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """Projections, rotary embedding, attention, a residual and an MLP; the queries are kept aside to be looked at."""

    seen = HiddenAttribute(())

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (2, 16)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = q.cos() * 2 + q.neg(), k.cos() * 2 + k.neg()
        self.seen = [weakref.ref(each.untyped_storage()) for each in (q, k, v)]
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


@pytest.fixture
def session(tmp_path: Path) -> Iterator[spillway.Session]:
    with spillway.Session(window=0, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        yield session


def away(session: spillway.Session) -> spillway.offload:
    return spillway.offload(policy=spillway.policies.Keep(), min_bytes=0, session=session)


def again(session: spillway.Session, **how: Any) -> Counter[str]:
    """What backward runs of the forward's operators, in the third step (the first two are recorded, and compared)."""
    model = Attention()
    for _ in range(3):
        x = torch.randn(2, 8, 32, requires_grad=True)
        with away(session):
            loss = spillway.recompute(model, x, session=session, **how).sum()
        with Operators() as mode:
            loss.backward()
    return mode.counts


def backward_alone() -> Counter[str]:
    loss = Attention()(torch.randn(2, 8, 32, requires_grad=True)).sum()
    with Operators() as mode:
        loss.backward()
    return mode.counts


@pytest.mark.parametrize(
    ("how", "matmuls"),
    [
        ({}, 5),
        ({"save": "matmul"}, 0),
        ({"offload": "matmul"}, 0),
        ({"offload": spillway.saved_by("attention")}, 4),
        ({"offload": [spillway.saved_by("attention"), lambda call: call.name == "aten::add.Tensor"]}, 3),
    ],
)
def test_only_what_is_needed_runs_again(how: dict[str, Any], matmuls: int, session: spillway.Session) -> None:
    """Of six projections the last is never needed. With what attention saved away, v's is not, but q's and k's are,
    since the cosines saved them; with the residual away, the output's is not needed either."""
    assert (again(session, **how) - backward_alone())["aten::mm"] == matmuls


def test_what_attention_saved_does_not_stay(session: spillway.Session, no_collector: None) -> None:
    model = Attention()
    for _ in range(2):
        with away(session):
            x = torch.randn(2, 8, 32, requires_grad=True)
            y = spillway.recompute(model, x, session=session, offload=spillway.saved_by("attention"))
            # Window 0: what is on its way stays until something else leaves.
            z = spillway.recompute(Attention(), y, session=session, offload=spillway.saved_by("attention"))
        seen = [each() for each in model.seen]
        assert seen == [None, None, None]
        z.sum().backward()
        del x, y, z


@pytest.mark.parametrize(
    "how",
    [{"offload": "inputs"}, {"offload": ["inputs", "matmul"]}, {"offload": "inputs", "use_reentrant": True}],
    ids=str,
)
def test_inputs_do_not_stay(how: dict[str, Any], session: spillway.Session, no_collector: None) -> None:
    """By keyword and in a dictionary, too."""

    def function(x: Tensor, *, more: dict[str, Tensor]) -> Tensor:
        return (x @ more["y"]).relu() @ more["y"]

    held: list[weakref.ref[torch.UntypedStorage]] = []
    leaf, loss = torch.randn(16, 16, requires_grad=True), torch.zeros(())
    with away(session):
        for _ in range(3):
            x, y = leaf * 2, leaf * 3
            held += [weakref.ref(each.untyped_storage()) for each in (x, y)]
            out = spillway.recompute(function, x, more={"y": y}, session=session, **how)
            del x, y
            loss = loss + out.sum()
            del out
    # The last pass may still be on its way out.
    assert [each() for each in held[:4]] == [None] * 4
    loss.backward()


@pytest.mark.parametrize(
    "how",
    [{}, {"save": "matmul"}, {"offload": ["matmul", "inputs"]}, {"drop_output": True}, {"use_reentrant": True}],
    ids=str,
)
@pytest.mark.parametrize("ends", ["backward", "dropped"])
def test_all_dies_with_the_graph(how: dict[str, Any], ends: str, session: spillway.Session, no_collector: None) -> None:
    model = Attention()
    with away(session):
        x = torch.randn(2, 8, 32, requires_grad=True)
        y = spillway.recompute(model, x, session=session, **how)
        loss = (y * y).sum()
    held = [weakref.ref(x), weakref.ref(y), weakref.ref(loss)]
    if ends == "backward":
        loss.backward()
    del x, y, loss
    assert [each() for each in held] == [None] * 3
    session.synchronize()
    assert session.used_bytes == (0, 0)


def test_a_dropped_output_does_not_stay(session: spillway.Session, no_collector: None) -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)

    def step(drop: bool) -> tuple[list[Tensor], bool]:
        first.zero_grad()
        second.zero_grad()
        with away(session):
            x = torch.ones(4, 16, requires_grad=True)
            hidden = spillway.recompute(lambda x: first(x).relu(), x, drop_output=drop, session=session)
            held = weakref.ref(hidden.untyped_storage())
            out = second(hidden)
            del hidden
        is_gone = held() is None
        out.square().sum().backward()
        return [parameter.grad.clone() for parameter in (*first.parameters(), *second.parameters())], is_gone  # type: ignore[union-attr]

    kept, dropped = step(False), step(True)
    assert (kept[1], dropped[1]) == (False, True)
    assert all(map(torch.equal, kept[0], dropped[0]))


@pytest.mark.parametrize(("is_leaf", "around"), [(True, "ours"), (False, "ours"), (True, "theirs")])
def test_an_argument_that_the_graph_holds_anyway_is_not_offloaded(is_leaf: bool, around: str) -> None:
    packed: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each)
    with spillway.Session() as session:
        x = torch.randn(64, requires_grad=True)
        given = x if is_leaf else x * 1
        with spillway.offload(session=session, min_bytes=0) as context, hooks if around == "theirs" else nullcontext():
            y = spillway.recompute(torch.sin, given, session=session)
        del given
        assert context.stats().offloaded_bytes == (0 if is_leaf else 256)
        # Hooks of others get it.
        assert [each is x for each in packed] == ([True] if around == "theirs" else [])
        y.sum().backward()
        assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


def test_what_a_region_offloads_leaves_while_it_runs() -> None:
    events = EventList()
    left = HiddenList()

    def region(x: Tensor) -> Tensor:
        y = x.sin().exp().cos().exp()
        left.append(sum(event.kind is EventKind.LEAVE for event in events.events))
        return y

    with spillway.Session(backend=AdversaryBackend().serve, window=0, recorder=events) as session:
        x = torch.randn(64, requires_grad=True)
        # The first call is recorded when it is replayed.
        spillway.recompute(region, x, offload="pointwise", session=session).sum().backward()
        left.clear()
        with spillway.offload(session=session, min_bytes=0):
            y = spillway.recompute(region, x, offload="pointwise", session=session)
        # What the last operator saved waits until that has run. The graph holds the argument, which is a leaf.
        assert left == [1]
        y.sum().backward()


def test_what_leaves_is_let_go_of_while_its_region_still_runs() -> None:
    """A region holds what it may hand to its re-run, but not what is away by then."""
    most, again = HiddenList([0]), [False]

    def six_sines(x: torch.Tensor) -> torch.Tensor:
        storages = []
        for _ in range(6):
            x = x.sin()
            storages.append(weakref.ref(x.untyped_storage()))
            if not again[0]:
                most[0] = max(most[0], sum(storage() is not None for storage in storages))
        return x

    plan = Planned(dict.fromkeys(range(5), ("aten::sin.default", Decision.OFFLOAD_HOST)), Decision.OFFLOAD_HOST)
    leaf = torch.randn(1 << 12, requires_grad=True)
    (wanted,) = torch.autograd.grad(six_sines(leaf * 1).sum(), leaf)
    most[0] = 0
    with spillway.Session(window=0) as session:
        how = spillway.Recompute(policy=plan)
        # The first call is recorded when it is replayed.
        call_checkpointed(how, six_sines, (leaf * 1,), {}, session).sum().backward()
        most[0] = 0
        with spillway.offload(session=session, policy=spillway.policies.Keep(), min_bytes=0) as context:
            y = call_checkpointed(how, six_sines, (leaf * 1,), {}, session)
        # The newest, the one before it, which the operator reads, and one that waits for its operator to return.
        assert most[0] <= 3
        again[0] = True
        (got,) = torch.autograd.grad(y.sum(), leaf)
        assert torch.equal(got, wanted)
        assert context.stats().offloaded_bytes == 6 * leaf.nbytes


def test_a_call_holds_few_objects_that_a_collection_of_garbage_goes_through(
    session: spillway.Session, no_collector: None
) -> None:
    # With short kernels, collections take longer than checks: beside a model library, a full one takes 0.3 s.
    block = nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    )
    x = torch.randn(4, 8, requires_grad=True)

    def objects_after(call: Callable[[], Tensor]) -> int:
        for _ in range(4):
            call().sum().backward()
        before = len(gc.get_objects())
        loss = call().sum()
        found = len(gc.get_objects()) - before
        loss.backward()
        return found

    torchs = objects_after(lambda: checkpoint(block, x, use_reentrant=False))
    ours = objects_after(lambda: spillway.recompute(block, x, session=session))
    assert ours <= 1.5 * torchs, (ours, torchs)


def test_a_call_that_raised_holds_nothing_to_compare(session: spillway.Session, no_collector: None) -> None:
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    kept: list[Tensor] = []

    def fails(x: Tensor) -> Tensor:
        kept.append(x.exp())
        last = kept[0].sin().exp()
        seen.append(weakref.ref(last.untyped_storage()))
        raise ValueError

    x = torch.randn(64, 64, requires_grad=True)
    # Without the traceback, whose frames hold the tensor.
    with suppress(ValueError):
        spillway.recompute(fails, x, session=session)
    assert seen[0]() is None
    kept[0].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, x.detach().exp())
