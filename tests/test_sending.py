"""Blocks of which nothing is computed again: they go by the order in which they save, and operators are seen once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from budgets import KINDS, Kind, hardware, one_step, train
from spillway.checkpointing.recorder import Recorder
from spillway.planner.block_tasks import make_option
from spillway.planner.plan import BlockPlan, planned_block
from spillway.testing import AdversaryBackend
from spillway.types import Decision
from steps import Block

KiB = 1024
HOST, DISK = Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK


@pytest.fixture(params=[0, 64 * KiB, 1 << 30], ids=["no window", "small window", "large window"])
def session(request: pytest.FixtureRequest) -> Iterator[spillway.Session]:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve, window=request.param) as session:
        yield session
    adversary.check()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each block whose operators are seen."""
    found: list[int] = []
    enter = Recorder.__enter__

    def counted(self: Recorder) -> Recorder:
        found.append(1)
        return enter(self)

    monkeypatch.setattr(Recorder, "__enter__", counted)
    return found


def plan_of(model: nn.Module, batch: Tensor, session: spillway.Session, to: Decision = HOST) -> spillway.Plan:
    """One by which all that can leave does, and nothing is computed again."""
    profile = replace(spillway.profile(model, batch, session=session), min_bytes=KiB)
    options = [make_option(kind, [to] * len(kind.values), min_bytes=KiB) for kind in profile.kinds]
    blocks = tuple(planned_block(call.name, profile.kinds[call.kind], options[call.kind]) for call in profile.calls)
    window = max(session.runtime(batch.device).mover.window, 1)
    return replace(spillway.plan(profile, budget="1TiB", hardware=hardware()), blocks=blocks, window=window)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("to", [HOST, DISK], ids=["host", "disk"])
@pytest.mark.covered
def test_gradients_are_plains_and_operators_are_seen_once(
    kind: Kind, to: Decision, session: spillway.Session, seen: list[int]
) -> None:
    batch = kind.batch()
    batch = batch[: len(batch) // 4]
    wanted = train(kind.model(), batch, 4)
    model = kind.model()
    plan = plan_of(model, batch[: len(batch) // 2], session, to)
    assert plan.recompute_seconds == 0 and not any(block.recomputes or block.plain for block in plan.blocks)
    model = kind.model()
    seen.clear()
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session) as attached:
        counts = []
        got = train(model, batch, 4, after=lambda: counts.append(len(seen)))
        stats = attached.stats()
    assert all(map(torch.equal, chain.from_iterable(got), chain.from_iterable(wanted)))
    # Experts are called or not: then a block saves something else, and is recorded anew.
    assert counts[0] == len(plan.blocks)
    assert counts == [counts[0]] * 4 or kind.name == "experts"
    assert stats.recomputed_bytes == 0
    assert stats.notes == ()


def test_what_leaves_is_what_the_plan_says(session: spillway.Session) -> None:
    model, batch = KINDS[0].model(), KINDS[0].batch()
    plan = plan_of(model, batch, session)
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session) as attached:
        one_step(model, batch)
        assert attached.stats().offloaded_bytes == plan.sent_bytes > 0
        for _ in range(3):
            one_step(model, batch)
            stats = attached.stats()
            # By then it is known what backward asks for before it has left.
            assert stats.offloaded_bytes <= plan.sent_bytes <= stats.offloaded_bytes + stats.reused_bytes


class Turning(nn.Module):
    """Saves other things once it has turned."""

    def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.other = other
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + (self.other(y) if self.turned else y.tanh().exp())


@pytest.mark.parametrize(
    ("other", "notices"),
    [
        (lambda y: y.tanh(), True),
        (lambda y: y.tanh().exp().sin(), True),
        (lambda y: y.tanh().view(-1, 8, 8).exp().flatten(1), True),
        (lambda y: y.double().tanh().exp().float(), True),
        (lambda y: y.sigmoid().exp(), False),
    ],
    ids=["less", "more", "other dimensions", "other type", "the same"],
)
def test_a_block_that_saves_otherwise_is_seen_again_and_is_right_meanwhile(
    other: Callable[[Tensor], Tensor], notices: bool, session: spillway.Session, seen: list[int]
) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), *(Turning(other) for _ in range(3)), nn.Linear(64, 8))

    batch = torch.randn(256, 64)
    plain, ours = build(), build()
    plan = plan_of(build(), batch, session)
    seen.clear()
    with spillway.attach(ours, plan=plan, min_bytes=KiB, session=session):
        for step, (turned, sees) in enumerate([(False, 3), (False, 0), (True, 0), (True, 3), (True, 0)]):
            for model in (plain, ours):
                for block in model:
                    if isinstance(block, Turning):
                        block.turned = turned
            before = len(seen)
            assert all(map(torch.equal, one_step(ours, batch), one_step(plain, batch)))
            assert len(seen) - before == (sees if notices or step < 3 else 0), step


class Reshaping(nn.Module):
    """Runs the same operators on other dimensions from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.shape = (-1, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).view(self.shape).tanh().exp().view_as(x)
        return x + y


def test_a_block_that_was_recorded_anew_offloads_as_before(session: spillway.Session) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(Reshaping() for _ in range(3)), nn.Linear(64, 8))
    batch = torch.randn(256, 64)
    plan = plan_of(model, batch, session)
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session) as attached:
        moved = []
        for shape in ((-1, 64), (-1, 8, 8)):
            for block in model[1:-1]:
                block.shape = shape
            for _ in range(4):
                one_step(model, batch)
            stats = attached.stats()
            assert stats.recomputed_bytes == 0
            moved.append(stats.offloaded_bytes + stats.reused_bytes)
    assert moved[0] == moved[1] == plan.sent_bytes


def test_experts_offload_whatever_sizes_their_batches_have(session: spillway.Session, seen: list[int]) -> None:
    kind = next(kind for kind in KINDS if kind.name == "experts")
    model, twin, batch = kind.model(), kind.model(), kind.batch()
    plan = plan_of(kind.model(), batch, session)
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session) as attached:
        for step in range(6):
            batch = torch.randn_like(batch)
            assert all(map(torch.equal, one_step(model, batch), one_step(twin, batch)))
            stats = attached.stats()
            if step == 0:
                seen.clear()
            else:
                assert stats.recomputed_bytes == 0
                # The experts' own shares of a batch differ a little.
                assert stats.offloaded_bytes + stats.reused_bytes > 0.95 * plan.sent_bytes
        assert not seen
        assert stats.notes == ()


class Growing(nn.Module):
    """Saves one tensor more in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        for _ in range(self.calls):
            y = y.tanh()
        return x + y


def test_a_block_that_saves_otherwise_in_each_call_says_so(session: spillway.Session) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), Growing(), Growing(), nn.Linear(64, 8))
    batch = torch.randn(256, 64)
    plan = plan_of(model, batch, session)
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session) as attached:
        for _ in range(8):
            one_step(model, batch)
        (note,) = (note for note in attached.stats().notes if "saves other tensors" in note)
    assert note.startswith("Growing saves other tensors in each call.")


class Flat(nn.Module):
    """Works on rows, whatever dimensions they have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh().exp()


def test_arguments_of_other_dimensions_have_an_order_of_their_own(session: spillway.Session, seen: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(Flat() for _ in range(3)), nn.Linear(64, 8))
    batches = torch.randn(256, 64), torch.randn(16, 16, 64)
    plan = plan_of(model, batches[0], session)
    wanted = [one_step(model, batch) for batch in batches]
    seen.clear()
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session):
        for turn in range(3):
            for batch, plain in zip(batches, wanted, strict=True):
                assert all(map(torch.equal, one_step(model, batch), plain))
            # Those of the first batch were recorded when it was profiled.
            assert len(seen) == 3, turn


class Remembering(nn.Module):
    """Writes what it did not make, and reads what it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.state: Tensor | None = None
        self.register_buffer("counted", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        assert self.state is not None
        y = self.linear(x).tanh()
        self.counted += y.detach().sum(0)
        self.state.copy_(y)
        return x + y.exp()


@pytest.mark.parametrize("raises", [False, True], ids=["dropped", "raised"])
def test_what_a_call_has_seen_goes_with_its_graph(raises: bool, session: spillway.Session) -> None:
    torch.manual_seed(0)
    blocks = [Remembering() for _ in range(3)]
    model, batch = nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 8)), torch.randn(32, 64)

    def begin() -> list[weakref.ref[Tensor]]:
        for block in blocks:
            block.state = torch.zeros(32, 64)
        return [weakref.ref(block.state) for block in blocks if block.state is not None]

    begin()
    plan = plan_of(model, batch, session)
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session):
        for _ in range(3):
            states = begin()
            handle = model[-1].register_forward_hook(fails) if raises else None
            try:
                loss = model(batch).sum()
                del loss
            except RuntimeError:
                assert raises
            if handle is not None:
                handle.remove()
            for block in blocks:
                block.state = None
            gc.collect()
            assert [state() for state in states] == [None] * 3


def test_graphs_may_be_kept_and_gone_through_twice_and_in_any_order(session: spillway.Session) -> None:
    model, batch = KINDS[1].model(), KINDS[1].batch()[:4]
    plan = plan_of(model, batch, session)
    other = torch.randn_like(batch)

    def gradients() -> list[Any]:
        losses = [model(each).square().mean() for each in (batch, other)]
        parameters = list(model.parameters())
        found = []
        for loss in (losses[0], losses[1], losses[0]):
            found += torch.autograd.grad(loss, parameters, retain_graph=True)
        return found

    wanted = gradients()
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session):
        for _ in range(3):
            assert all(map(torch.equal, gradients(), wanted))


def test_within_another_checkpoint_and_without_gradients(session: spillway.Session) -> None:
    model, batch = KINDS[0].model(), KINDS[0].batch()
    plan = plan_of(model, batch, session)
    wanted, without = one_step(model, batch), model(batch).detach()

    def outer() -> list[Tensor]:
        loss = torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False).square().mean()
        loss.backward()
        found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session):
        for _ in range(2):
            assert all(map(torch.equal, outer(), wanted))
            assert all(map(torch.equal, one_step(model, batch), wanted))
            with torch.no_grad():
                assert torch.equal(model(batch), without)


def test_an_error_leaves_no_hook_and_the_next_step_is_right(session: spillway.Session) -> None:
    model, batch = KINDS[0].model(), KINDS[0].batch()
    plan = plan_of(model, batch, session)
    wanted = one_step(model, batch)
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session):
        for _ in range(2):
            handle = model[2].register_forward_hook(fails)
            with pytest.raises(RuntimeError, match="on purpose"):
                one_step(model, batch)
            handle.remove()
            model.zero_grad()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert torch._C._len_torch_dispatch_stack() == 0
            assert all(map(torch.equal, one_step(model, batch), wanted))


def fails(module: nn.Module, args: object, output: object) -> None:
    raise RuntimeError("on purpose")


def test_what_autocast_makes_of_weights_stays(session: spillway.Session) -> None:
    torch.manual_seed(0)
    model, batch = (
        nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(3)), nn.Linear(64, 8)),
        torch.randn(64, 64),
    )

    def step() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found

    wanted = step()
    profile = replace(spillway.profile(model, batch, session=session), min_bytes=KiB)
    plan = spillway.plan(profile, budget="1TiB", hardware=hardware())
    everything = tuple(
        BlockPlan(block.name, False, Decision.OFFLOAD_HOST, (), 0, 1, 0.0, recomputes=False) for block in plan.blocks
    )
    plan = replace(plan, blocks=everything)
    weights = sum(2 * p.numel() for p in model.parameters())
    with spillway.attach(model, plan=plan, min_bytes=KiB, session=session) as attached:
        assert all(map(torch.equal, step(), wanted))
        assert 0 < attached.stats().offloaded_bytes <= 3 * batch.nbytes < weights
        assert all(map(torch.equal, step(), wanted))
