"""What stays of what a function makes is kept shortly from its second call on, and nobody sees a difference."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway._torch import pop_hooks, top_hooks
from spillway.checkpointing.selectors import Planned
from spillway.recomputing import call_checkpointed
from spillway.saved_tensors.scopes import HiddenHooks, current_scope, restore_hooks
from spillway.testing import AdversaryBackend
from spillway.types import Decision

KEPT = Decision.KEEP
Call = Callable[[Callable[..., Any], Tensor, spillway.Session], Any]


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve) as session:
        yield session
    adversary.check()


@pytest.fixture(params=["nothing recomputed", "some recomputed"])
def call(request: pytest.FixtureRequest) -> Call:
    """Calls a function whose exponentials are kept."""
    if request.param == "some recomputed":

        def recomputed(function: Callable[..., Any], x: Tensor, session: spillway.Session) -> Any:
            save = ["inputs", torch.ops.aten.exp]
            return spillway.recompute(function, x, save=save, session=session)

        return recomputed
    how = spillway.Recompute(policy=Planned({}, KEPT, recomputes=False))
    return lambda function, x, session: call_checkpointed(how, function, (x,), {}, session)


def gives_what_it_keeps(x: Tensor) -> Tensor:
    return x.sin().exp()


class Result:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def gives_an_object(x: Tensor) -> Result:
    return Result(x.sin().exp())


def gives_a_part(x: Tensor) -> tuple[Tensor, int]:
    return x.sin().exp()[8:], 3


def keeps_twice(x: Tensor) -> Tensor:
    y = x.sin().exp()
    return y * y.cos()


def keeps_in_a_group(x: Tensor) -> Tensor:
    with spillway.group("exponentials"):
        y = x.sin().exp()
    return y.sin()


FUNCTIONS = [gives_what_it_keeps, gives_an_object, gives_a_part, keeps_twice, keeps_in_a_group]


def leaf(seed: int) -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def loss_of(output: Any) -> Tensor:
    """Of which autograd saves what the function gave."""
    y: Tensor = output[0] if isinstance(output, tuple) else getattr(output, "tensor", output)
    return y.square().sum()


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_each_call_counts_and_moves_what_the_second_one_did(
    function: Callable[[Tensor], Any], call: Call, session: spillway.Session
) -> None:
    stats = []
    for seed in range(6):
        x, plain = leaf(seed), leaf(seed)
        with spillway.offload(session=session, min_bytes=1) as passed:
            loss = loss_of(call(function, x, session))
        counted = passed.stats()
        groups = sum(group.kept_bytes for group in counted.groups)
        stats.append((counted.saved_bytes, counted.kept_bytes, groups))
        loss.backward()
        loss_of(function(plain)).backward()
        assert x.grad is not None
        assert plain.grad is not None
        assert torch.equal(x.grad, plain.grad)
    # What the exponential gives is known from the first replay on.
    assert stats[1:] == [stats[1]] * 5
    assert stats[1][1] >= x.nbytes


def test_what_is_longer_than_it_was_counts_as_what_it_is(call: Call, session: spillway.Session) -> None:
    def counted(rows: int) -> int:
        with spillway.offload(session=session, min_bytes=1) as passed:
            x = torch.ones(rows, 32, requires_grad=True)
            call(gives_what_it_keeps, x, session).sum().backward()
        return passed.stats().kept_bytes

    one = [counted(8 * times) for times in (1, 1, 2, 3)][1]
    assert [counted(8 * times) for times in (1, 2, 3, 2, 1)] == [one * times for times in (1, 2, 3, 2, 1)]


def test_a_graph_that_is_dropped_inside_is_not_held(session: spillway.Session) -> None:
    how = spillway.Recompute(policy=Planned({}, KEPT, recomputes=False))
    alive: list[bool] = []

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        memory = weakref.ref(y.untyped_storage())
        z = y.sin()
        del y, z
        alive.append(memory() is not None)
        return x.exp()

    for seed in range(4):
        with spillway.offload(session=session, min_bytes=1):
            call_checkpointed(how, function, (leaf(seed),), {}, session).sum().backward()
    # The first call is compared in full.
    assert alive[1:] == [False] * 3


@pytest.mark.parametrize("first", [True, False])
def test_what_is_learned_in_a_group_or_not_counts_where_it_is_kept(
    first: bool, call: Call, session: spillway.Session
) -> None:
    counted = []
    # What the exponential gives is known from the first replay on.
    call(gives_what_it_keeps, leaf(0), session).sum().backward()
    for grouped in (first, first, first, first, not first, first, not first):
        around = spillway.group("all") if grouped else nullcontext()
        with spillway.offload(session=session, min_bytes=1) as passed, around:
            output = call(gives_what_it_keeps, leaf(0), session)
        stats = passed.stats()
        assert sum(group.kept_bytes for group in stats.groups) == (stats.kept_bytes if grouped else 0)
        counted.append(stats.kept_bytes)
        output.sum().backward()
    assert counted == [counted[0]] * 7


def test_a_call_that_fails_holds_nothing(call: Call, session: spillway.Session, request: pytest.FixtureRequest) -> None:
    made: list[weakref.ref[Tensor]] = []
    elsewhere: list[Tensor] = []
    fails = False

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        z = y.sin()
        made.append(weakref.ref(y.untyped_storage()))  # type: ignore[arg-type]
        if fails:
            if "nothing" in request.node.name:
                # Part of the graph lives on.
                elsewhere.append(x.cos())
            raise ValueError("too long")
        return z * x.cos()

    with spillway.offload(session=session, min_bytes=1):
        for seed in range(4):
            call(function, leaf(seed), session).sum().backward()
        fails = True
        try:
            call(function, leaf(5), session)
        except ValueError as error:
            error.__traceback__ = None
    gc.collect()
    assert made[-1]() is None


class Counting(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_mode_inside_sees_the_functions_operators_alone(call: Call, session: spillway.Session) -> None:
    seen: list[list[str]] = []
    weight = torch.nn.Parameter(torch.ones(32, 64))

    def function(x: Tensor) -> Tensor:
        with Counting() as counting:
            y = x.sin().exp() * weight.t()
        seen.append(counting.names)
        return y

    for seed in range(4):
        with spillway.offload(session=session, min_bytes=1):
            output = call(function, leaf(seed), session)
        assert seen[-1] == ["sin.default", "exp.default", "t.default", "mul.Tensor"]
        output.sum().backward()


def test_what_leaves_is_gone_when_its_operator_has_run() -> None:
    waiting: list[int] = []

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        waiting.append(current_scope(session).waiting.nbytes)
        z = y.exp()
        waiting.append(current_scope(session).waiting.nbytes)
        return z

    decisions = {0: ("aten::sin.default", Decision.OFFLOAD_DISK), 1: ("aten::exp.default", Decision.OFFLOAD_DISK)}
    how = spillway.Recompute(policy=Planned(decisions, KEPT, recomputes=False))
    with spillway.Session(window=64 << 10) as session:
        for seed in range(5):
            with spillway.offload(session=session, min_bytes=1):
                output = call_checkpointed(how, function, (leaf(seed),), {}, session)
            output.sum().backward()
            if not seed:
                # It is recorded.
                waiting.clear()
    assert waiting == [leaf(0).nbytes, 0] * 4


def test_what_was_kept_dies_with_its_graph(call: Call, session: spillway.Session) -> None:
    with spillway.offload(session=session, min_bytes=1):
        for seed in range(4):
            call(gives_what_it_keeps, leaf(seed), session).sum().backward()
        output = call(gives_what_it_keeps, leaf(5), session)
        memory = weakref.ref(output.untyped_storage())
        del output
    assert memory() is None


def test_hidden_hooks_are_put_back_below_those_on_the_stack(session: spillway.Session) -> None:
    with spillway.offload(session=session):
        hooks = top_hooks(True)
        assert hooks is not None
        pop_hooks()
        hidden = HiddenHooks(hooks)
        seen: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor: seen.append(tensor), lambda packed: packed):
            restore_hooks()
            torch.ones(3, requires_grad=True).exp()
        assert hidden.was_wanted and len(seen) == 1
        assert top_hooks(True) == hooks
