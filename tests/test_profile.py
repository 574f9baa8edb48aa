"""``spillway.profile`` leaves a model as it was, and says what it cannot do; so do the arguments of a budget."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from allocations import count_exactly
from budgets import NAMED, attached_to, hardware, one_step, search
from running.scripts import Ended, Server
from spillway import BudgetError, Session, UnsupportedError, UsageError, planning
from spillway.planner.solve import aim_at
from spillway.recomputing import Recompute
from spillway.runtime.cpu import resident_bytes
from steps import Block, MiB, assert_nothing_left, failing, small_model


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    there = resident_bytes()
    count_exactly(monkeypatch, lambda: there)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)
        assert not torch.autograd._profiler_enabled()


class Counted(nn.Module):
    """A block with dropout, batch norm and a buffer that is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Block(64), nn.BatchNorm1d(64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return nn.functional.dropout(self.norm(self.inner(x)), 0.1)


def counted() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *(Counted() for _ in range(3)))


class Sized(nn.Module):
    """A block that does what torch does not see where its batch is large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(64)

    def forward(self, x: Tensor) -> Tensor:
        tripled = noise = x.detach() * 3
        if len(x) > 512:
            noise = torch.empty(x.shape)
            noise.numpy()[...] = tripled.numpy()
        found: Tensor = self.inner((x + noise).sin())
        return found


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_afterwards_what_it_was(fails: bool, session: Session) -> None:
    model, batch = counted(), torch.randn(512, 64, requires_grad=True)
    model(batch).sum().backward()
    kept = [parameter.grad for parameter in (*model.parameters(), batch)]
    buffers = list(model.buffers())
    before = [tensor.clone() for tensor in (*model.state_dict().values(), *kept, torch.get_rng_state())]

    def loss(output: Tensor) -> Tensor:
        if fails:
            raise KeyError
        return output.square().mean()

    if fails:
        failing(KeyError, lambda: spillway.profile(model, batch, loss=loss, session=session))
    else:
        assert len(spillway.profile(model, batch, loss=loss, session=session).calls) == 3
    after = [parameter.grad for parameter in (*model.parameters(), batch)]
    assert all(ours is theirs for ours, theirs in zip(after, kept, strict=True))
    assert all(ours is theirs for ours, theirs in zip(model.buffers(), buffers, strict=True))
    assert all(map(torch.equal, [*model.state_dict().values(), *after, torch.get_rng_state()], before))
    assert all(module.training for module in model.modules())
    assert all(module.__dict__.get("_compiled_call_impl") is None for module in model.modules())


def test_frozen_blocks_before_the_others_are_left_alone(session: Session) -> None:
    kind = NAMED["mlp"]
    model, plain, batch = kind.model(), kind.model(), kind.batch()
    for each in (model, plain):
        each[:3].requires_grad_(False)
    measured = spillway.profile(model, batch, session=session)
    assert [call.name for call in measured.calls] == ["3", "4"]
    expected = one_step(plain, batch)
    with attached_to(model, "8GiB", session) as attached:
        for _ in range(6):
            assert all(map(torch.equal, one_step(model, batch), expected))
        assert attached.stage == "active"
        plan = attached.plan
    assert plan is not None
    with spillway.attach(model, plan=plan, session=session):
        assert all(map(torch.equal, one_step(model, batch), expected))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Block(64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(64)

    def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.inner(pair[0])
        return x, {"more": pair[1]["more"] + x.mean()}


class OfNested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.layers = nn.ModuleList(Nested() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        pair = (x, {"more": x.sum()})
        for layer in self.layers:
            pair = layer(pair)
        return pair[0] + pair[1]["more"]


def two_kinds() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), Block(64), Block(64), nn.Linear(64, 32), Block(32), Block(32))


@pytest.mark.parametrize(("build", "kinds", "calls"), [(two_kinds, 2, 4), (Twice, 1, 4), (OfNested, 1, 3)])
def test_models_of_other_forms_are_profiled_and_trained(
    build: Callable[[], nn.Module], kinds: int, calls: int, session: Session
) -> None:
    torch.manual_seed(0)
    model, batch = build(), torch.randn(2048, 64)
    expected = one_step(model, batch)
    measured = spillway.profile(model, batch, session=session)
    assert (len(measured.kinds), len(measured.calls)) == (kinds, calls)
    with attached_to(model, "8GiB", session) as attached:
        for _ in range(6):
            assert all(map(torch.equal, one_step(model, batch), expected))
        assert attached.stage == "active"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda s: spillway.profile(nn.Linear(4, 4), torch.ones(4), session=s), UsageError, "block"),
        (lambda s: spillway.profile(small_model().eval(), torch.ones(4, 32), session=s), UsageError, "evaluation mode"),
        (lambda s: spillway.profile(3, torch.ones(4, 32), session=s), UsageError, "torch.nn.Module"),
        (
            lambda s: spillway.profile(small_model(), torch.ones(4, 32), loss=lambda y: y, session=s),
            UsageError,
            "one number",
        ),
        (
            lambda s: spillway.profile(
                small_model(), torch.ones(4, 32), loss=lambda y: torch.ones((), requires_grad=True), session=s
            ),
            UnsupportedError,
            "No backward came",
        ),
        (lambda s: spillway.plan(3, budget=1), UsageError, "profile: got 3"),
        (lambda s: spillway.longest(lambda n: None, budget=1, at_least=0), UsageError, "at_least=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_profiled_is_an_error_that_says_so(
    call: Callable[[Session], object], error: type[Exception], says: str, session: Session
) -> None:
    failing(error, lambda: call(session), match=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"budget": -1}, "budget: got -1"),
        ({"budget": "many"}, "budget: got 'many'"),
        ({"budget": True}, "budget: got True"),
        ({"budget": 10.5}, "budget: got 10.5"),
        ({"budget": "1GiB", "policy": Recompute()}, "beside a budget"),
        ({"budget": "1GiB", "groups": {"all": "*"}}, "beside a budget"),
        ({"budget": "1GiB", "every": 2}, "beside a budget"),
        ({"budget": "1GiB", "first": 1}, "beside a budget"),
        ({"budget": "1GiB", "keep_last": 1}, "beside a budget"),
        ({"budget": "1GiB", "plan": 3}, "one of them"),
        ({"plan": 3}, "plan: got 3"),
        ({"budget": "1GiB", "allow": {"magic"}}, "allow: got"),
        ({"budget": "1GiB", "allow": "disk"}, "allow: got 'disk'"),
        ({"budget": "1GiB", "allow": []}, "allow: got"),
        ({"budget": "1GiB", "host_budget": "all"}, "host_budget: got 'all'"),
        ({"budget": "1GiB", "hardware": "h2000"}, "hardware: got 'h2000'"),
        ({"budget": "1GiB", "blocks": ["0", "0.up"]}, "others inside"),
        ({"allow": {"keep"}}, "without a budget"),
        ({"host_budget": 1}, "without a budget"),
    ],
)
def test_arguments_of_a_budget_that_cannot_be_meant_are_errors_at_once(options: dict[str, Any], says: str) -> None:
    model = small_model()
    options = {"hardware": hardware(), **options} if "budget" in options else options
    failing(UsageError, lambda: spillway.attach(model, **options), match=says)
    assert all(module.__dict__.get("_compiled_call_impl") is None for module in model.modules())


def test_the_longest_batch_fits_and_a_longer_one_does_not(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    count_exactly(monkeypatch, lambda: 16 * MiB)
    model = small_model(width=64)
    ran: list[int] = []

    def step(rows: int) -> tuple[nn.Module, Tensor]:
        ran.append(rows)
        return model, torch.randn(rows, 64)

    how = {"hardware": hardware(), "session": session}
    found = spillway.longest(step, budget="20MiB", multiple_of=256, **how)
    assert found >= 512
    assert found % 256 == 0
    assert len(set(ran)) <= 8
    # What is on its way to the disk when a peak is read is not the same in two runs.
    spillway.plan(spillway.profile(*step(found), session=session), budget="22MiB", hardware=hardware())
    with pytest.raises(BudgetError):
        spillway.plan(spillway.profile(*step(3 * found // 2), session=session), budget="20MiB", hardware=hardware())
    assert spillway.longest(step, budget="1GiB", multiple_of=256, most=1024, **how) == 1024
    with pytest.raises(BudgetError):
        spillway.longest(step, budget="10MiB", **how)
    assert all(parameter.grad is None for parameter in model.parameters())


class Scaled(nn.Module):
    """Multiplies with a factor whose gradient autograd sums up. What follows saves less than it makes."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(512, 512))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x.neg() * self.scale)


@pytest.mark.parametrize(
    "then", [lambda x: x, lambda x: (torch.cat([x] * 8) * 2)[:2].sin()], ids=["none", "large ones"]
)
@pytest.mark.parametrize("allow", ["keep", "recompute"])
def test_sums_of_broadcast_gradients_come_after_recomputed_tensors_and_before_kept_ones_are_released(
    then: Callable[[Tensor], Tensor], allow: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MiB are summed up to 1 MiB. By then a recomputed factor of 2 MiB is gone, and a kept one is not.

    It is in no case there when the operator before runs its backward.
    """
    count_exactly(monkeypatch, lambda: 16 * MiB)
    # The first one makes a tensor that no caller holds.
    model = nn.Sequential(nn.Threshold(0.1, 1.0), *(Scaled(then) for _ in range(4)))
    batch = torch.randn(2, 512, 512)
    options: dict[str, Any] = {"hardware": hardware(), "min_bytes": "64KiB", "session": session}
    with spillway.attach(model, blocks=Scaled, budget="1GiB", allow={allow}, **options) as attached:
        for _ in range(12):
            model(batch).sum().backward()
            model.zero_grad()
        assert attached.stage == "active" and attached.plan is not None and attached.measured is not None
        assert abs(attached.plan.predicted_peak - attached.measured.peak_bytes) < MiB / 8


class Freed(torch.autograd.Function):
    """Frees in backward what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        found = gradient * y
        y.untyped_storage().resize_(0)
        return found


class Freeing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Freed.apply(x.neg())
        return found.tanh()


def test_a_backward_that_frees_its_tensors_is_profiled(session: Session) -> None:
    model = nn.Sequential(nn.Linear(64, 64), *(Freeing() for _ in range(3)))
    batch = torch.randn(512, 64)
    wanted = one_step(model, batch)
    with spillway.attach(model, blocks=Freeing, budget="64GiB", hardware=hardware(), session=session) as attached:
        for _ in range(8):
            assert all(map(torch.equal, one_step(model, batch), wanted))
        assert attached.stage == "active"


def test_where_a_step_is_over_the_budget_another_plan_is_made_for_less(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_exactly(monkeypatch, lambda: 16 * MiB)
    model = small_model(width=64)
    budgets: list[int] = []

    def peak(self: planning._SizeSearch, size: int, plan: spillway.Plan) -> int:
        budgets.append(plan.budget)
        return plan.budget + beyond

    monkeypatch.setattr(planning._SizeSearch, "_peak", peak)

    def longest() -> int:
        return spillway.longest(
            lambda rows: (model, torch.randn(rows, 64)), budget=30 * MiB, most=1, hardware=hardware(), session=session
        )

    aim = aim_at(30 * MiB)
    beyond = 30 * MiB - aim + 1000
    assert longest() == 1
    assert budgets[:2] == [aim, aim - 1000 - MiB]
    # More than any plan could be less.
    beyond = 16 * MiB
    with pytest.raises(UsageError, match="its steps exceed it"):
        longest()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05])
def test_what_steps_took_more_than_foreseen_is_known_of_other_sizes(
    session: Session, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    count_exactly(monkeypatch, lambda: 16 * MiB)
    model = small_model(width=64)
    ran: list[int] = []

    def peak(self: planning._SizeSearch, size: int, plan: spillway.Plan) -> int:
        ran.append(size)
        static = 16 * MiB
        return int(static + (1 + share) * (plan.predicted_peak - static))

    monkeypatch.setattr(planning._SizeSearch, "_peak", peak)
    found = spillway.longest(
        lambda rows: (model, torch.randn(rows, 64)),
        budget=40 * MiB,
        at_least=512,
        multiple_of=64,
        allow={"keep"},
        hardware=hardware(),
        session=session,
    )
    tried = list(dict.fromkeys(ran))
    assert tried[:2] == [8, 16]
    # One that is foreseen, and is over, and one near it that is not.
    assert len(tried) <= (3 if share == 0 else 4)
    assert 64 * 70 <= found == 64 * tried[-1]


class Truth(planning._SizeSearch):
    """Up to a size, all fit; what is foreseen may be another one."""

    def __init__(self, fitting: int, predicted: int | None) -> None:
        self.fitting, self.predicted, self.ran = fitting, predicted, []
        self.excess = 0

    def fits(self, size: int) -> bool:
        assert size not in self.ran
        self.ran.append(size)
        return size <= self.fitting

    def _predicted(self) -> int | None:
        return None if len(self.ran) < 2 else self.predicted


@pytest.mark.parametrize("fitting", [1, 2, 3, 17, 1000])
@pytest.mark.parametrize("share", [None, 0.5, 0.97, 1.0, 1.03, 3.0])
@pytest.mark.parametrize("limit", [None, 5, 2000])
def test_the_search_for_a_size_ends_at_what_fits(fitting: int, share: float | None, limit: int | None) -> None:
    truth = Truth(fitting, None if share is None else int(fitting * share))
    assert truth.fits(1)
    found = truth.largest(1, limit)
    most = min(fitting, limit or fitting)
    # Where less is foreseen than would fit, and the next one is not tried, it ends there.
    assert found == most or (share is not None and share < 1 and int(fitting * share) <= found <= most)
    assert len(truth.ran) <= (14 if share == 1.0 else 24)
    assert share != 1.0 or limit is not None or len(truth.ran) <= 9


def test_a_model_under_ddp_has_a_budget(session: Session) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        kind = NAMED["mlp"]
        batch = kind.batch()
        model, plain = (nn.parallel.DistributedDataParallel(kind.model()) for _ in range(2))
        expected = one_step(plain, batch)
        with attached_to(model, "8GiB", session) as attached:
            for _ in range(6):
                assert all(map(torch.equal, one_step(model, batch), expected))
            search(model, batch, attached)
        del model, plain
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_is_written_to_the_terminal(server: Server, tmp_path: Path) -> None:
    script = """
import torch, spillway
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)))
spillway.profile(model, torch.ones(4, 8))
"""
    assert server.run(tmp_path, script, "script") == Ended(0, "", "")
