"""Functions at whose operators nobody looks: they run again whole, and what both runs have made is compared. See
NOTE [ Unwatched calls ] in ``regions/unwatched.py``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily, is_in_torch_dispatch_mode
from torch.utils.checkpoint import CheckpointError, checkpoint

import spillway
from recompute.regions import Call, HiddenAttribute, HiddenList, Regions, hides, one_place
from recompute.test_tapes import Block, gradients_of, leaf, tapes_of
from spillway.errors import InplaceError, RecomputeError
from spillway.operators import Planned, full_name
from spillway.records import Decision
from spillway.regions.following import Following
from spillway.regions.rerun import in_rerun
from spillway.regions.retracing import Retracing
from spillway.regions.tape import Tape
from spillway.regions.unwatched import Unwatched
from support import assert_identical, assert_nothing_left

pytestmark = one_place

Calls = list[weakref.ref[Unwatched]]


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Those that were made so."""
    made: Calls = []
    run_first = Unwatched.run

    def run(self: Unwatched, first: Callable[[], Any], tensors: Any) -> Any:
        made.append(weakref.ref(self))
        return run_first(self, first, tensors)

    monkeypatch.setattr(Unwatched, "run", run)
    return made


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each time that a function ran again, whether operators were left out, and it did as on its tape."""
    ended: list[bool] = []
    run_again = Unwatched._run_again

    def run(self: Unwatched, *args: Any) -> Any:
        packs = run_again(self, *args)
        ended.append(packs is not None and args[-1] is not None)
        return packs

    monkeypatch.setattr(Unwatched, "_run_again", run)
    return ended


def known(regions: Regions, function: Callable[..., Tensor], **how: Any) -> None:
    """Call it as often as it takes until nobody looks at it."""
    for seed in range(2):
        assert_identical(
            gradients_of(regions, function, seed=seed, watch=False, **how), gradients_of(None, function, seed=seed)
        )
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_it_runs_twice_and_is_the_same_in_every_bit(regions: Regions, calls: Calls) -> None:
    block = Block()
    known(regions, block)
    assert not calls
    for seed in range(2, 5):
        block.calls = 0
        ours = gradients_of(regions, block, seed=seed, watch=False)
        assert block.calls == 2
        assert_identical(ours, gradients_of(None, block, seed=seed))
    assert len(calls) == 3
    assert regions.last is not None
    assert regions.last.stats().recomputed_bytes > 0


@pytest.mark.parametrize("how", [{"offload": ["norm"]}, {"save": [spillway.saved_by("matmul")]}])
def test_what_is_kept_or_leaves_goes_by_the_order_and_is_handed_in(
    regions: Regions, calls: Calls, runs: list[bool], how: dict[str, Any]
) -> None:
    block = Block()
    for seed in range(5):
        ours = gradients_of(regions, block, seed=seed, watch=False, **how)
        assert_identical(ours, gradients_of(None, block, seed=seed))
    assert len(calls) == 3
    assert runs == [True] * 3, "none had to run whole"


class Changing(nn.Module):
    """Reads what changes between its first run and backward, deep inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale, self.eps = 1.0, 1e-5
        self.table = torch.zeros(16)
        self.kind = 0

    def forward(self, x: Tensor) -> Tensor:
        y = functional.layer_norm(x + self.table, (16,), eps=self.eps) * self.scale
        if self.kind:
            y = y.tanh()
        return x + self.down(functional.silu(self.up(y)))


class Hiding(Changing):
    """The same, where Spillway does not see it."""

    scale, eps = HiddenAttribute(1.0), HiddenAttribute(1e-5)
    kind = HiddenAttribute(0)


def scaled(block: Changing) -> None:
    block.scale = 1.0 + 2**-7


def another_eps(block: Changing) -> None:
    block.eps = 2e-5


def written(block: Changing) -> None:
    block.table[3] += 0.01


def replaced(block: Changing) -> None:
    block.table = torch.full((16,), 1e-3)


def another_way(block: Changing) -> None:
    block.kind = 1


def tape_by(regions: Regions, function: Callable[[Tensor], Tensor], **how: Any) -> Tape:
    known(regions, function, **how)
    (tape,) = tapes_of(regions.session)
    assert tape is not None
    return tape


def test_whatever_is_kept_or_leaves_it_is_the_same_in_every_bit(
    regions: Regions, calls: Calls, runs: list[bool]
) -> None:
    block = Changing()
    tape = tape_by(regions, block)
    saved = {spot.value for spot, _, _ in tape.saved if spot is not None}
    makers = [
        (place, full_name(step.func))
        for place, step in enumerate(tape.steps)
        if any(spot.value in saved for _, spot in step.makes)
    ]
    random = Random(0)
    kinds = [Decision.RECOMPUTE, Decision.KEEP, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK]
    for _ in range(20):
        decided = {place: (name, random.choice(kinds)) for place, name in makers}
        how = {"policy": Planned(decided, random.choice([Decision.KEEP, Decision.OFFLOAD_HOST]), True)}
        for seed in range(3):
            ours = gradients_of(regions, block, seed=seed, watch=False, **how)
            assert_identical(ours, gradients_of(None, block, seed=seed))
    assert len(calls) >= 15
    assert sum(runs) >= 5, "something was handed in, and nothing was otherwise"


def test_what_is_handed_in_is_not_computed_again_nor_what_only_goes_into_it(regions: Regions, runs: list[bool]) -> None:
    ran: list[str] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    def function(x: Tensor) -> Tensor:
        return x.sin().exp().tanh().cos().sigmoid()

    known(regions, function, save="aten::tanh")
    x = leaf()
    with regions.offload():
        y = spillway.recompute(function, x * 1, session=regions.session, watch=False, save="aten::tanh").sum()
    with Sees():
        y.backward()
    assert runs[-1:] == [True]
    assert [name for name in ran if name in ("sin", "exp", "tanh", "cos", "sigmoid")][:4] == [
        "sin",
        "exp",
        "cos",
        "sigmoid",
    ]


def test_both_sides_of_what_is_handed_in_are_compared(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().exp().tanh().square().sigmoid()

    tape = tape_by(regions, function, save="aten::tanh")
    makers = {spot.value: step.func._schema.name for step in tape.steps for _, spot in step.makes}
    ends = [tape.saved[place].spot for place in sorted(tape.showing.last)]
    assert [makers[spot.value] for spot in ends if spot is not None] == ["aten::exp", "aten::sigmoid"]


def test_of_an_operator_at_the_end_all_that_it_gave_is_compared(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        return functional.layer_norm(x.exp(), (16,)) * 2

    tape = tape_by(regions, function)
    sizes = sorted(tuple(spot.size) for place in tape.showing.last if (spot := tape.saved[place].spot) is not None)
    # And what the norm read, which hides a scale.
    assert sizes == [(2, 5, 1), (2, 5, 1), (2, 5, 16)]


@hides
@pytest.mark.parametrize("change", [scaled, another_eps, written, replaced, another_way])
def test_what_changes_before_backward_is_told_or_is_of_no_account_where_something_is_handed_in(
    regions: Regions, calls: Calls, change: Callable[[Changing], None], hides: bool
) -> None:
    def step(call: Callable[..., Tensor], block: Changing) -> list[Tensor]:
        x = leaf()
        loss = call(block, x * 1).sum()
        change(block)
        return [*torch.autograd.grad(loss, [x, *block.parameters()])]

    for save in ("aten::silu", "aten::mul", ["aten::mul", "aten::silu"]):
        block = Hiding() if hides else Changing()
        how: dict[str, Any] = {"session": regions.session, "watch": False, "save": save}
        for seed in range(2):
            gradients_of(regions, block, seed=seed, watch=False, save=save)
        calls.clear()
        expected = step(lambda block, x: block(x), Changing())
        try:
            with regions.offload():
                found = step(lambda block, x: spillway.recompute(block, x, **how), block)  # noqa: B023
        except RecomputeError:
            # Attributes are put back before the re-run, and what was written is not.
            assert hides or change is written
        else:
            assert_identical(found, expected)
        assert len(calls) == 1


def of_parameters(regions: Regions | None, block: nn.Module) -> list[Tensor]:
    """Gradients of its parameters: in a region at which nobody looks, or plain ones."""
    x = leaf()
    if regions is None:
        y = block(x * 1)
    else:
        with regions.offload():
            y = spillway.recompute(block, x * 1, session=regions.session, watch=False, save="aten::tanh")
    return [*torch.autograd.grad(y.square().sum(), list(block.parameters()))]


class Numbered(nn.Module):
    """Has a number before what is handed in, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.before).exp().tanh().cos().sigmoid() * self.after).sigmoid()


@pytest.mark.parametrize("number", ["before", "after"])
def test_a_number_that_changes_has_the_function_run_whole_where_something_is_left_out_after_it(
    regions: Regions, calls: Calls, runs: list[bool], number: str
) -> None:
    block = Numbered()
    how = {"watch": False, "save": "aten::tanh"}
    known(regions, block, save="aten::tanh")
    gradients_of(regions, block, seed=3, **how)
    assert runs == [True]
    setattr(block, number, 1.25)
    runs.clear()
    for seed in range(4):
        assert_identical(gradients_of(regions, block, seed=seed, **how), gradients_of(None, block, seed=seed))
    # Before: it did something else, then ran whole; it was looked at in the next step; there was a tape from then on.
    assert runs == ([False, False, True, True] if number == "before" else [True] * 4)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators of re-runs that were compared with a tape's."""
    names: list[str] = []
    dispatch = Following.__torch_dispatch__

    def spy(self: Following, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(self, Retracing):
            names.append(func._schema.name.removeprefix("aten::"))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Following, "__torch_dispatch__", spy)
    return names


def test_nobody_looks_when_there_is_nothing_more_to_leave_out(
    regions: Regions, runs: list[bool], looked_at: list[str]
) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().exp().tanh().cos().sigmoid().exp()

    known(regions, function, save="aten::tanh")
    gradients_of(regions, function, seed=3, watch=False, save="aten::tanh")
    assert runs == [True]
    # It begins when sin has begun. What is handed in is held while the next one runs, and when one more has saved
    # something, it is seen to be gone.
    assert looked_at == ["exp", "tanh", "cos", "sigmoid"]


OnlyAgain = Callable[[list[Tensor], Tensor], Tensor]


class Again(nn.Module):
    """Has something handed in, and may do something in its second run alone: while it holds that, or later."""

    def __init__(self, early: OnlyAgain | None, late: OnlyAgain | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(256.0).reshape(16, 16) / 256)
        self.early, self.late = early, late
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        is_other = self.is_other and in_rerun()
        held = [(x.detach().sum().sin() + self.scale).tanh()]
        z = (held[0] * 1).cos().exp()
        if is_other and self.early is not None:
            z = self.early(held, z)
        held.clear()
        z = z.cos().exp() * 2
        if is_other and self.late is not None:
            z = self.late(held, z)
        return z.sigmoid()


def writes(held: list[Tensor], z: Tensor) -> Tensor:
    held[0].detach().zero_()
    return z


def writes_unseen(held: list[Tensor], z: Tensor) -> Tensor:
    held[0].data.zero_()
    return z


def transposes(held: list[Tensor], z: Tensor) -> Tensor:
    # Sums of what lies in memory are the same.
    return z.t()


WEIGHT = torch.ones(3, requires_grad=True)
SINE = WEIGHT.sin()


def goes_back(held: list[Tensor], z: Tensor) -> Tensor:
    torch.autograd.grad(SINE, WEIGHT, torch.ones(3), create_graph=True, retain_graph=True)
    return z


def has_nothing_left() -> bool:
    """Whether no mode is on, by its stack or by what torch's dispatcher goes by."""
    key = torch._C.DispatchKey.Python
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._dispatch_tls_is_dispatch_key_included(key)


@pytest.mark.parametrize(
    ("early", "late"),
    [
        (writes, None),
        (writes_unseen, None),
        (transposes, None),
        (None, transposes),
        (goes_back, None),
        (None, goes_back),
    ],
)
def test_what_only_the_second_run_does_is_told_or_of_no_account(
    regions: Regions, calls: Calls, early: OnlyAgain | None, late: OnlyAgain | None
) -> None:
    block = Again(early, late)
    for _ in range(4):
        assert_identical(of_parameters(regions, block), of_parameters(None, block))
    assert calls
    expected = of_parameters(None, block)
    block.is_other = True
    for _ in range(3):
        try:
            found = of_parameters(regions, block)
        except (RecomputeError, InplaceError, CheckpointError):
            pass
        else:
            assert_identical(found, expected)
        assert has_nothing_left()


def test_what_is_mapped_by_functorch_after_what_is_handed_in(regions: Regions, calls: Calls, runs: list[bool]) -> None:
    def function(x: Tensor) -> Tensor:
        y = (x.detach().sin() + x).tanh() * 2
        return torch.func.vmap(lambda row: row.cos().exp())(y).sigmoid()  # type: ignore[no-any-return]

    for seed in range(5):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, function, seed=seed))
        assert has_nothing_left()
    assert runs == [True] * 3


class Holds(nn.Module):
    """Holds what need not be computed again, and may read it in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        held = x.detach().sin()
        z = (held + self.weight).tanh().cos().exp()
        return (z * (held if in_rerun() and self.reads else 1)).sigmoid()


def test_what_was_left_out_and_is_held_is_looked_at_to_the_end(
    regions: Regions, calls: Calls, runs: list[bool], looked_at: list[str]
) -> None:
    block = Holds()
    for _ in range(4):
        assert_identical(of_parameters(regions, block), of_parameters(None, block))
    assert runs and all(runs)
    assert looked_at[-1] == "sigmoid"
    # The second run is another one, which would read what nobody has written: it is run anew, whole.
    block.reads = True
    runs.clear()
    with pytest.raises(RecomputeError):
        of_parameters(regions, block)
    assert runs[0] is False


def test_what_draws_and_is_left_out_is_looked_at(regions: Regions, calls: Calls) -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.bernoulli(torch.full_like(x, 0.5)) * x.detach()
        return (x.sin() * y).exp() * torch.bernoulli(torch.full_like(x, 0.5))

    for seed in range(5):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::mul")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert not calls


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_what_draws_and_is_handed_in_is_not_looked_at(
    regions: Regions, calls: Calls, runs: list[bool], first: bool
) -> None:
    """As attention, which by its schema may draw: nothing draws after it again. What drew before it does."""

    def function(x: Tensor) -> Tensor:
        if not first:
            x = x * torch.rand_like(x)
        return (x.sin() * torch.bernoulli(torch.full_like(x, 0.5))).exp() * 2

    for seed in range(6):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::bernoulli")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert len(calls) == 4
    # What was drawn is handed in.
    assert runs == [True] * 4


def test_casts_of_what_it_is_given_are_operators_like_others(regions: Regions, calls: Calls, runs: list[bool]) -> None:
    """As in most norms. It is no leaf in the second run either, of which autocast may have made a cast."""

    def function(x: Tensor) -> Tensor:
        y = x.double()
        return (y * y.square().mean().rsqrt()).float().sin().exp().tanh()

    for seed in range(6):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::exp")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert len(calls) == 4
    assert runs == [True] * 4


def test_what_is_kept_for_the_re_run_alone_is_shown_by_operators(regions: Regions, calls: Calls) -> None:
    def function(x: Tensor) -> Tensor:
        # Autograd does not save the sum.
        return ((x.sin() + x) * 3).cos().exp()

    for seed in range(4):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::add")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert not calls


def test_inputs_may_leave(regions: Regions, calls: Calls) -> None:
    block = Block()
    known(regions, block, offload="inputs")
    ours = gradients_of(regions, block, seed=5, watch=False, offload="inputs")
    assert_identical(ours, gradients_of(None, block, seed=5))
    assert len(calls) == 1
    assert regions.last is not None
    stats = regions.last.stats()
    # So small a step may ask for them before they are gone.
    assert stats.offloaded_bytes + stats.reused_bytes == leaf().nbytes


def test_what_would_not_run_again_and_takes_its_time_is_left_out(regions: Regions, runs: list[bool]) -> None:
    weight = torch.randn(16, 16)

    def function(x: Tensor) -> Tensor:
        # No gradient goes through the product's sign.
        return x.sin().exp() * torch.mm(x.detach().flatten(0, 1), weight).sign().view_as(x)

    def useless(x: Tensor) -> Tensor:
        torch.mm(x.detach().flatten(0, 1), weight)
        return x.sin().exp().cos()

    for each, left_out in ((function, False), (useless, True)):
        runs.clear()
        for seed in range(4):
            ours = gradients_of(regions, each, seed=seed, watch=False)
            assert_identical(ours, gradients_of(None, each, seed=seed))
        assert runs == [left_out] * 2, "the product is needed in the first, and in the second it is not"


def test_a_number_that_changes_from_step_to_step_is_the_same_in_both_runs(regions: Regions, calls: Calls) -> None:
    block = Block()
    known(regions, block)
    for number in range(4):
        block.scale = 1 + 0.1 * number
        ours = gradients_of(regions, block, seed=number, watch=False)
        assert_identical(ours, gradients_of(None, block, seed=number))
    assert len(calls) == 4


@hides
@pytest.mark.parametrize("change", [scaled, another_eps, written, replaced, another_way])
def test_what_changes_before_backward_is_told(
    regions: Regions, calls: Calls, change: Callable[[Changing], None], hides: bool
) -> None:
    block = Hiding() if hides else Changing()
    known(regions, block)
    x = leaf()
    with regions.offload():
        loss = spillway.recompute(block, x * 1, session=regions.session, watch=False).sum()
    assert len(calls) == 1
    leaves = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x * 1).sum(), leaves)
    change(block)
    for _ in range(2):
        if (hides and change is not replaced) or change is written:
            with pytest.raises(RecomputeError, match=f"got other values when {type(block).__name__} ran again"):
                loss.backward()
        else:
            assert_identical(torch.autograd.grad(loss, leaves, retain_graph=True), expected)
    del loss
    assert_nothing_left(regions.session)


def test_a_weight_that_is_written_before_backward_is_refused(regions: Regions, calls: Calls) -> None:
    block = Block()
    known(regions, block)
    with regions.offload():
        loss = spillway.recompute(block, leaf() * 1, session=regions.session, watch=False).sum()
    with torch.no_grad():
        block.qkv.weight.mul_(2)
    with pytest.raises((RecomputeError, InplaceError)):
        loss.backward()


def test_an_input_that_is_written_before_backward_is_refused(regions: Regions, calls: Calls) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().cos().exp()

    known(regions, function)
    x = leaf() * 1
    with regions.offload():
        loss = spillway.recompute(function, x, session=regions.session, watch=False).sum()
    assert len(calls) == 1
    x.detach().mul_(2)
    with pytest.raises(InplaceError):
        loss.backward()


def test_an_output_that_is_written_before_backward_is_taken_as_it_was(regions: Regions, calls: Calls) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().cos().exp()

    known(regions, function)
    x = leaf()
    with regions.offload():
        y = spillway.recompute(function, x * 1, session=regions.session, watch=False)
    assert len(calls) == 1
    loss = y.sum()
    # Autograd has saved it, too: plain PyTorch refuses.
    y.detach().mul_(2)
    (found,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(function(x * 1).sum(), x)
    assert torch.equal(found, expected)


def test_another_way_in_both_runs_is_right_and_the_tape_is_lost(regions: Regions, calls: Calls) -> None:
    block = Changing()
    known(regions, block)
    block.kind = 1
    for seed in range(5):
        ours = gradients_of(regions, block, seed=seed, watch=False)
        assert_identical(ours, gradients_of(None, block, seed=seed))
    # One that did something else, one that was looked at again, and three that were not.
    assert len(calls) == 4


def test_a_graph_may_be_gone_through_twice(regions: Regions, calls: Calls) -> None:
    block = Changing()
    known(regions, block)

    def both(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        x = leaf()
        loss = call(block, x * 1).square().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x, create_graph=True)
        (third,) = torch.autograd.grad(second.square().sum(), x)
        return [first, second, third]

    with regions.offload():
        ours = both(lambda block, x: spillway.recompute(block, x, session=regions.session, watch=False))
    assert len(calls) == 1
    assert_identical(ours, both(lambda block, x: block(x)))


def test_it_holds_nothing_but_its_inputs(regions: Regions, calls: Calls) -> None:
    made = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin()
        z = y.exp()
        made.extend(weakref.ref(each.untyped_storage()) for each in (y, z))
        return z.cos()

    known(regions, function)
    gc.collect()
    made.clear()
    with regions.offload():
        y = spillway.recompute(function, leaf() * 1, session=regions.session, watch=False)
    assert len(calls) == 1
    assert [each() for each in made] == [None, None]
    y.sum().backward()
    del y
    assert [each() for each in made] == [None] * len(made)
    assert_nothing_left(regions.session)


def test_what_a_function_raises_comes_as_it_is(regions: Regions, calls: Calls) -> None:
    fails = False

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        if fails:
            raise ValueError("its own")
        return y.cos()

    known(regions, function)
    fails = True
    with regions.offload(), pytest.raises(ValueError, match="its own"):
        spillway.recompute(function, leaf() * 1, session=regions.session, watch=False)
    assert_nothing_left(regions.session)
    fails = False
    assert_identical(gradients_of(regions, function, watch=False), gradients_of(None, function))


@pytest.mark.parametrize("watch", [False, True])
def test_what_catches_errors_in_a_function_does_not_see_that_it_has_run_enough(regions: Regions, watch: bool) -> None:
    caught: list[Exception] = []
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)

    def function(x: Tensor) -> Tensor:
        y = functional.dropout(up(x), 0.3)
        try:
            y = functional.gelu(y)
        except Exception as error:  # noqa: BLE001
            caught.append(error)
            y = y.tanh()
        return down(y)

    for seed in range(4):
        # Backward wants nothing that comes after what gelu reads.
        ours = gradients_of(regions, function, seed=seed, watch=watch, save="aten::gelu")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert not caught


def test_within_a_checkpoint_of_torchs(regions: Regions, calls: Calls) -> None:
    block = Block()
    known(regions, block)

    def outer(x: Tensor) -> Tensor:
        y: Tensor = spillway.recompute(block, x.sin(), session=regions.session, watch=False)
        return y.cos()

    def step(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        x = leaf()
        y = checkpoint(function, x * 1, use_reentrant=False)
        return [*torch.autograd.grad(y.square().sum(), x)]

    assert_identical(step(outer), step(lambda x: block(x.sin()).cos()))


def test_under_autocast(regions: Regions, calls: Calls) -> None:
    block = Changing()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))

    def step(call: Callable[..., Tensor]) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            y = call(block, (x * 1).requires_grad_() * 1)
        y.float().square().sum().backward()
        found = [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]
        block.zero_grad(set_to_none=True)
        return found

    for _ in range(5):
        with regions.offload():
            ours = step(lambda block, x: spillway.recompute(block, x, session=regions.session, watch=False))
        assert_identical(ours, step(lambda block, x: block(x)))
    assert calls


def test_what_is_compared_is_what_all_the_rest_goes_into(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        # Two ends, the first of which is saved first.
        return (y.exp() * 3).tanh() + y.square().sigmoid()

    tape = tape_by(regions, function)
    ends = {tape.saved[place].spot.value for place in tape.showing.last if tape.saved[place].spot is not None}  # type: ignore[union-attr]
    makers = {spot.value: step.func._schema.name for step in tape.steps for _, spot in step.makes}
    # And what goes into the square, which hides a sign.
    assert sorted(makers[value] for value in ends) == ["aten::sigmoid", "aten::sin", "aten::tanh"]


def test_of_a_block_it_is_all_but_what_a_linear_layer_reads(regions: Regions) -> None:
    block = Changing()
    tape = tape_by(regions, block)
    assert tape.is_whole
    # What SiLU gave; what the norm read, which hides a scale, and what it gave besides: mean and deviation.
    assert len(tape.showing.last) == 1 + 1 + 2
    assert len(tape.showing.last) < len(tape.showing.compared)


def told(
    regions: Regions, function: Callable[..., Any], change: Callable[[], object], *, hides: bool, **how: Any
) -> None:
    """That hidden state which changes between forward and backward is an error, and that other state is put back."""
    for _ in range(3):
        with regions.offload():
            out = spillway.recompute(function, leaf() * 1, session=regions.session, watch=False, **how)
        total(out).backward()
    x = leaf()
    torch.manual_seed(0)
    with regions.offload():
        out = spillway.recompute(function, x * 1, session=regions.session, watch=False, **how)
    torch.manual_seed(0)
    plain = function(x * 1)
    change()
    if hides:
        with pytest.raises(RecomputeError):
            total(out).backward()
    else:
        leaves = [x, *(function.parameters() if isinstance(function, nn.Module) else ())]
        assert_identical(torch.autograd.grad(total(out), leaves), torch.autograd.grad(total(plain), leaves))
    del out
    # Of the error's frames.
    gc.collect()


def total(out: Any) -> Tensor:
    return out.sum() if isinstance(out, Tensor) else out[0].sum()  # type: ignore[no-any-return]


@hides
def test_masks_are_compared(regions: Regions, calls: Calls, hides: bool) -> None:
    least = HiddenList([0.5]) if hides else [0.5]

    def function(x: Tensor) -> Tensor:
        return x.masked_fill(x.detach() > least[0], 0).sum()

    told(regions, function, lambda: least.append(least.pop() / 4), hides=hides)
    assert calls


@hides
@pytest.mark.parametrize(
    "function",
    [
        lambda x, scale: torch.linalg.qr(x[0] * scale)[0].sin(),
        lambda x, scale: (x + 1) * torch.ones_like((x * scale).exp()).cos() + (x * scale).exp().detach().round(),
    ],
    ids=["what is given besides", "round"],
)
def test_what_shows_in_nothing_else_is_compared(
    regions: Regions, calls: Calls, function: Callable[[Tensor, float], Tensor], hides: bool
) -> None:
    scale = HiddenList([1.0]) if hides else [1.0]
    told(regions, lambda x: function(x, scale[0]), lambda: scale.insert(0, 2.0), hides=hides)
    assert calls


@hides
def test_a_re_run_that_saves_less_is_told(regions: Regions, calls: Calls, hides: bool) -> None:
    ends = HiddenList([False]) if hides else [False]

    def function(x: Tensor) -> Any:
        y = x.sin()
        # Nobody goes through the second.
        return (y.exp(), y) if ends[0] else (y.exp(), y.exp().tanh().exp())

    told(regions, function, lambda: ends.insert(0, True), hides=hides)
    assert calls


@hides
def test_parameters_in_another_order_are_told(regions: Regions, calls: Calls, hides: bool) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            experts = [nn.Linear(16, 16, bias=False) for _ in range(2)]
            self.experts = HiddenList(experts) if hides else experts
            self.inner = nn.ModuleList(self.experts)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (expert(x.sin()).tanh() for expert in self.experts)
            return (first + second).exp()

    model = Experts()
    told(regions, model, lambda: model.experts.reverse(), hides=hides)
    assert calls


def test_a_slice_that_leaves_first_is_not_taken_for_the_whole(regions: Regions, calls: Calls, runs: list[bool]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        some, every = y[:1].cos(), y.sin()
        return some.sum() + every.sum() + torch.where(y.detach() > 0.5, x, x * 3).sum()

    for tier in ("aten::mul", spillway.saved_by("pointwise")):
        for seed in range(5):
            ours = gradients_of(regions, function, seed=seed, watch=False, offload=[tier])
            assert_identical(ours, gradients_of(None, function, seed=seed))


def test_a_buffer_that_comes_to_be_written_is_written_once(regions: Regions, calls: Calls) -> None:
    class Averages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(16, 16)
            self.register_buffer("mean", torch.zeros(16))
            self.writes = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x).tanh()
            if self.writes:
                with torch.no_grad():
                    self.mean.lerp_(y.detach().mean((0, 1)), 0.1)
            return y.exp()

    ours, plain = Averages(), Averages()
    known(regions, ours)
    for seed in range(5):
        ours.writes = plain.writes = seed >= 1
        assert_identical(gradients_of(regions, ours, seed=seed, watch=False), gradients_of(None, plain, seed=seed))
        assert torch.equal(ours.mean, plain.mean)
    assert calls


def test_what_nobody_has_written_is_given_to_nobody(regions: Regions, calls: Calls, runs: list[bool]) -> None:
    class Keeps(nn.Module):
        seen = HiddenAttribute(None)

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
            self.keeps = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            self.seen = y.detach() if self.keeps else None
            return self.down(y.relu()).tanh().exp()

    ours, plain = Keeps(), Keeps()
    known(regions, ours, save="aten::relu")
    gradients_of(regions, ours, seed=2, watch=False, save="aten::relu")
    assert runs == [True]
    ours.keeps = plain.keeps = True
    found = gradients_of(regions, ours, seed=3, watch=False, save="aten::relu")
    assert_identical(found, gradients_of(None, plain, seed=3))
    assert runs == [True, False, False]
    assert ours.seen is not None
    assert plain.seen is not None
    assert torch.equal(ours.seen, plain.seen)


def test_now_and_then_all_of_it_is_compared(regions: Regions, calls: Calls) -> None:
    gate = torch.zeros(16, requires_grad=True)
    count = HiddenList([0])

    def function(x: Tensor) -> Tensor:
        count[0] += 1
        # Nothing of it shows behind the gate.
        return (x + gate * (x * count[0]).sin()).exp()

    def steps() -> None:
        for _ in range(140):
            with regions.offload():
                y = spillway.recompute(function, leaf() * 1, session=regions.session, watch=False)
            y.sum().backward()

    # So that tapes are written.
    count[0] = -1000
    with pytest.raises(RecomputeError):
        steps()


def test_a_re_run_knows_that_it_is_one(regions: Regions, calls: Calls) -> None:
    ran = HiddenList()

    def function(x: Tensor) -> Tensor:
        ran.append(in_rerun())
        return x.sin().exp().cos()

    known(regions, function)
    ran.clear()
    gradients_of(regions, function, watch=False)
    assert ran == [False, True]
    assert len(calls) == 1


@hides
def test_where_something_new_is_saved_outputs_are_compared(regions: Regions, calls: Calls, hides: bool) -> None:
    more = False
    scale = HiddenList([1.0]) if hides else [1.0]

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        return (y * scale[0]).tanh().sigmoid() if more else y

    known(regions, function)
    more = True
    x = leaf()
    with regions.offload():
        loss = spillway.recompute(function, x * 1, session=regions.session, watch=False).sum()
    assert len(calls) == 1
    expected = torch.autograd.grad(function(x * 1).sum(), x)
    # Of what it did before, nothing hangs on it.
    scale[0] = 1.5
    if hides:
        with pytest.raises(RecomputeError):
            loss.backward()
    else:
        assert_identical(torch.autograd.grad(loss, x), expected)


def test_a_function_that_does_less_has_lost_its_tape(regions: Regions, calls: Calls) -> None:
    less = False

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp()
        return y if less else y.cos()

    known(regions, function)
    less = True
    assert_identical(gradients_of(regions, function, watch=False), gradients_of(None, function))
    assert len(calls) == 1
    assert tapes_of(regions.session) == []


def test_inputs_leave_before_the_function_has_ended(regions: Regions, calls: Calls) -> None:
    seen = HiddenList()

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().cos()
        seen.append(sum(regions.session.used_bytes))
        return y

    how = {"session": regions.session, "watch": False, "offload": "inputs"}
    for _ in range(4):
        seen.clear()
        with regions.offload():
            y = leaf() * 1
            for _ in range(4):
                y = spillway.recompute(function, y, **how)
        y.sum().backward()
    assert len(calls) >= 4
    # The last ones are asked for right away, and stay.
    assert seen[0] > 0


def test_a_plan_says_which_blocks_are_not_looked_at(regions: Regions, calls: Calls) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), *(Changing() for _ in range(3)), nn.Linear(16, 16))

    def step(model: nn.Module) -> list[Tensor]:
        model(leaf(4, 8, 16)).square().sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    ours, plain = model(), model()
    profile = spillway.profile(ours, leaf(4, 8, 16), loss=lambda y: y.square().sum(), hardware="h200")
    plan = spillway.plan(profile, budget="1TiB", hardware="h200")
    blocks = [
        replace(block, plain=False, operators=(), inputs=Decision.KEEP, recomputes=True, watched=number == 1)
        for number, block in enumerate(plan.blocks)
    ]
    assert [block.watched for block in blocks] == [False, True, False]
    plan = spillway.Plan.from_json(replace(plan, blocks=tuple(blocks)).to_json())
    with spillway.attach(ours, plan=plan, session=regions.session):
        for _ in range(4):
            assert_identical(step(ours), step(plain))
    assert len(calls) == 2 * 3, "two blocks in three steps, after the one in which tapes were written"


class Late(nn.Module):
    """Much of it comes before the first operator that is left out where tanh's output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * self.number).cos().exp().cos().tanh().sigmoid().exp()


def last_tape(regions: Regions) -> Tape:
    (tape,) = tapes_of(regions.session)
    assert tape is not None
    return tape


def test_nobody_looks_before_there_is_anything_to_leave_out(
    regions: Regions, calls: Calls, runs: list[bool], looked_at: list[str]
) -> None:
    block = Late()
    known(regions, block, save="aten::tanh")
    # What cos is given is saved when two have run, and it has begun.
    assert last_tape(regions).look_from == (1, 2)
    for number in (1.0, 1.25):
        block.number = number
        looked_at.clear()
        ours = gradients_of(regions, block, seed=3, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, block, seed=3))
        assert looked_at == ["exp", "cos", "tanh", "sigmoid", "exp"]
    assert runs == [True, True]
    assert len(calls) == 2


def test_where_it_does_not_show_how_much_has_run_all_is_looked_at(
    regions: Regions, calls: Calls, runs: list[bool]
) -> None:
    block = Late()
    known(regions, block, save="aten::tanh")
    tape = last_tape(regions)
    tape.__dict__["look_from"] = 3, 3
    for seed in range(4):
        ours = gradients_of(regions, block, seed=seed, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, block, seed=seed))
    # The first ran whole after that. It is the same tape.
    assert runs == [False, False, True, True, True]
    assert last_tape(regions) is tape
    assert tape.look_from == (-1, 0)


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at operators, and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ends", [True, False], ids=["a mode that ends", "a mode around the call"])
def test_a_mode_of_the_functions_own_ends_as_it_began(
    regions: Regions, calls: Calls, runs: list[bool], ends: bool
) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        # What looks from there on would be taken off the stack in its place.
        with Passing() if ends else nullcontext():  # type: ignore[no-untyped-call]
            y = y.cos()
        return y.exp().cos().tanh().sigmoid().exp()

    for seed in range(5):
        with nullcontext() if ends else Passing():  # type: ignore[no-untyped-call]
            ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, function, seed=seed))
        assert torch._C._len_torch_dispatch_stack() == 0
    assert last_tape(regions).look_from == (1, 1)
    assert len(calls) == 3
    assert runs == [True] * 3


def test_of_two_like_operators_it_does_not_show_which_one_it_is(
    regions: Regions, calls: Calls, runs: list[bool]
) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin().cos().cos().tanh().sigmoid()

    for seed in range(4):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert last_tape(regions).look_from == (-1, 0)
    assert runs == [True, True]


class Reading(nn.Module):
    """Reads one of two things that it made early."""

    other = False

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.sin().exp(), x.cos().exp()
        y = (one + other).cos().tanh()
        return (y * one).sigmoid() * (other if self.other else one)


def test_what_is_not_what_was_read_before_is_told_apart(regions: Regions, calls: Calls, runs: list[bool]) -> None:
    block = Reading()
    known(regions, block, save="aten::tanh")
    for other in (False, True):
        block.other = other
        ours = gradients_of(regions, block, seed=5, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, block, seed=5))
    assert runs == [True, False, False]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Operators of re-runs for which a mode was called, whatever it did with them."""
    names: list[str] = []
    dispatch = Retracing.__torch_dispatch__

    def spy(self: Retracing, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names.append(func._schema.name.removeprefix("aten::"))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Retracing, "__torch_dispatch__", spy)
    return names


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a mode of the function's own"])
def test_the_mode_goes_where_autograd_saves_what_was_just_made(
    regions: Regions, calls: Calls, runs: list[bool], seen: list[str], inside: bool
) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().tanh().cos()
        with Passing() if inside else nullcontext():  # type: ignore[no-untyped-call]
            # Of the first, what is saved has not just been made; of the second it has.
            y = (y * y).sigmoid()
            y = y.exp().sin()
        return y.exp().cos()

    known(regions, function, save="aten::tanh")
    seen.clear()
    ours = gradients_of(regions, function, seed=3, watch=False, save="aten::tanh")
    assert_identical(ours, gradients_of(None, function, seed=3))
    before = ["exp", "tanh", "cos", "mul", "sigmoid"]
    # Within another mode, it cannot go, nor does it when what it would be told by has been saved there.
    assert seen == [*before, "exp", "sin", "exp"] if inside else before
    assert torch._C._len_torch_dispatch_stack() == 0
    assert runs == [True] * len(runs)


def modes_known() -> tuple[bool, bool]:
    """Whether torch takes itself to be in a mode."""
    return bool(is_in_torch_dispatch_mode()), bool(is_in_torch_dispatch_mode(include_infra_modes=False))


def test_what_torch_remembers_of_modes_is_as_it_was(regions: Regions, calls: Calls, seen: list[str]) -> None:
    before = modes_known()

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().tanh().cos() * 2
        with Passing():  # type: ignore[no-untyped-call]
            with _pop_mode_temporarily():  # type: ignore[no-untyped-call]
                # Here the mode of the second run is the innermost, and goes.
                y = y.exp()
            y = y.sin()
        return y.exp().cos()

    known(regions, function, save="aten::tanh")
    seen.clear()
    ours = gradients_of(regions, function, seed=3, watch=False, save="aten::tanh")
    assert_identical(ours, gradients_of(None, function, seed=3))
    assert seen[-1] == "exp"
    assert torch._C._len_torch_dispatch_stack() == 0
    assert modes_known() == before


def viewed(y: Tensor) -> Tensor:
    base = y * 2
    view = base[0]
    base.mul_(3)
    # A view of what was written gets a new node where it is read.
    return view * view


@pytest.mark.parametrize("reads", [viewed, lambda y: (y * 2).sin_()], ids=["a view", "in place"])
def test_what_is_read_has_not_just_been_made(
    regions: Regions, calls: Calls, seen: list[str], reads: Callable[[Tensor], Tensor]
) -> None:
    def function(x: Tensor) -> Tensor:
        return reads(x.sin().exp().tanh().cos() * 2).sigmoid().exp()

    known(regions, function, save="aten::tanh")
    seen.clear()
    ours = gradients_of(regions, function, seed=3, watch=False, save="aten::tanh")
    assert_identical(ours, gradients_of(None, function, seed=3))
    assert seen[-1] == "sigmoid"


def test_a_mode_that_stands_aside_ends_as_it_began(regions: Regions, calls: Calls, seen: list[str]) -> None:
    before = modes_known()

    def function(x: Tensor) -> Tensor:
        with Passing():  # type: ignore[no-untyped-call]
            y = x.sin()
            with _pop_mode_temporarily():  # type: ignore[no-untyped-call]
                y = y.cos().exp()
            y = y.sin()
        return y.tanh().sigmoid().exp()

    known(regions, function, save="aten::tanh")
    ours = gradients_of(regions, function, seed=3, watch=False, save="aten::tanh")
    assert_identical(ours, gradients_of(None, function, seed=3))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert modes_known() == before


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_what_is_mapped_in_a_compiled_graph_ends_with_the_mode_that_it_began_with(
    regions: Regions, calls: Calls, runs: list[bool]
) -> None:
    mapped = torch.compile(torch.func.vmap(lambda row: row.cos().exp().sin()), backend="eager")

    def function(x: Tensor) -> Tensor:
        y = x.sin().exp().tanh() * 2
        return mapped(y * 2).sigmoid()  # type: ignore[no-any-return]

    for seed in range(4):
        ours = gradients_of(regions, function, seed=seed, watch=False, save="aten::tanh")
        assert_identical(ours, gradients_of(None, function, seed=seed))
        assert has_nothing_left()
    assert runs and all(runs)


@pytest.mark.parametrize("save", ["aten::exp", "matmul"], ids=["the product runs again", "the product is kept"])
def test_a_weight_that_gets_other_memory_is_as_it_was(regions: Regions, calls: Calls, save: str) -> None:
    def step(regions: Regions | None) -> list[Tensor]:
        torch.manual_seed(0)
        linear = nn.Linear(16, 16, bias=False)
        x = leaf()
        call = Call(regions, watch=False, save=save)
        for changes in (False, False, True):
            x.grad = None
            with call.context():
                # What it gives is needed again in the one case, and there in the other.
                loss = call(lambda x: linear(x.sin().exp()).sin().cos(), x * 1).sum()
            if changes:
                linear.weight.data = linear.weight.data * 2
            loss.backward()
        assert x.grad is not None
        return [x.grad]

    expected = step(None)
    assert_identical(step(regions), expected)
    assert len(calls) == 1
