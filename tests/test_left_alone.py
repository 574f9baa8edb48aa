"""Blocks of which a plan keeps all: they run without hooks, and nobody else's hooks see more of them than before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks as top_hooks
from torch.autograd.graph import saved_tensors_hooks

import spillway
from allocations import count_exactly
from budgets import hardware, one_step
from recompute.regions import HiddenList
from spillway import Decision, Plan, Session
from spillway.planner.plan import OperatorPlan
from steps import assert_nothing_left, failing


def around() -> str:
    """Whose hooks are in force."""
    hooks = top_hooks(True)
    return "nobody's" if hooks is None else type(getattr(hooks[0], "__self__", None)).__name__


class Looking(nn.Module):
    """A block that says what hooks are around it, and fails if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.seen = HiddenList()
        self.inside: Callable[[Tensor], object] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(around())
        self.inside(x)
        return x + self.linear(x).tanh()


def fail(x: Tensor) -> None:
    raise ValueError("told to")


class Model(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Looking() for _ in range(count))
        self.outside = ""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.outside = around()
        return x.square().mean()


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets do not depend on what the process holds beside the model."""
    count_exactly(monkeypatch, lambda: 16 << 20)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(512, 64)


def mixed(model: Model, batch: Tensor, session: Session) -> Plan:
    """A plan by which the blocks are left alone but the second, of which all is computed again."""
    profile = spillway.profile(model, batch, session=session)
    plan = spillway.plan(profile, budget=1.5, hardware=hardware())
    least = spillway.plan(profile, budget=plan.predicted_peak - 1, hardware=hardware(), allow=("keep", "recompute"))
    (other,) = [block for block in least.blocks if not block.plain][:1]
    blocks = [dataclasses.replace(other, name=each.name) if each.name == "blocks.1" else each for each in plan.blocks]
    assert [block.plain for block in blocks] == [True, False, True]
    return dataclasses.replace(plan, blocks=tuple(blocks))


def test_but_in_the_first_call_no_hooks_are_around_them_and_those_of_the_pass_are_around_the_rest(
    model: Model, batch: Tensor, session: Session
) -> None:
    plan = mixed(model, batch, session)
    plain = one_step(model, batch)
    with spillway.attach(model, plan=plan, session=session, min_bytes=0) as attached:
        kept = set()
        for number in range(4):
            for block in model.blocks:
                block.seen.clear()
            assert all(map(torch.equal, one_step(model, batch), plain))
            assert model.blocks[0].seen == model.blocks[2].seen == ["nobody's" if number else "ForwardScope"]
            assert model.blocks[1].seen[0] != "nobody's"
            assert model.outside == "ForwardScope"
            kept.add(attached.stats().kept_bytes)
        # What is not seen is counted all the same.
        assert len(kept) == 1
        assert min(kept) > 0
    assert around() == "nobody's"


class Saving(Looking):
    """A block that saves what it gives, and not its last sum if it has one."""

    adds: bool | Tensor | nn.Module = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(around())
        y = self.linear(x).tanh()
        return x + y if self.adds else y


@pytest.mark.parametrize("sends", ["the region before", "the region after"])
def test_what_a_block_and_its_neighbour_save_is_one(sends: str, batch: Tensor, session: Session) -> None:
    """Where the neighbour sends it, it is away for both of them; where the block has it anyway, it is not sent."""
    model = Model()
    for block in model.blocks:
        block.__class__ = Saving
    # By itself, it could be left alone.
    model.blocks[2].adds = True
    plan = mixed(model, batch, session)
    plain = one_step(model, batch)
    region = plan.blocks[1]
    if sends == "the region after":
        region = dataclasses.replace(region, inputs=Decision.OFFLOAD_DISK)
    else:
        profile = spillway.profile(model, batch, session=session)
        names = [operator.name for operator in profile.kinds[0].operators]
        tanh = "aten::tanh.default"
        told = OperatorPlan(names.index(tanh), tanh, Decision.OFFLOAD_DISK, batch.nbytes, "asked for")
        region = dataclasses.replace(region, operators=(told,))
    plan = dataclasses.replace(plan, blocks=(plan.blocks[0], region, plan.blocks[2]))
    with spillway.attach(model, plan=plan, session=session, min_bytes=0) as attached:
        for _ in range(4):
            for block in model.blocks:
                block.seen.clear()
            assert all(map(torch.equal, one_step(model, batch), plain))
            assert model.blocks[0].seen == ["ForwardScope"]
            assert sends == "the region after" or model.blocks[2].seen == ["ForwardScope"]
            stats = attached.stats()
            # Of the region before, what it gives, once: later on it is asked for before it could leave.
            away = 0 if sends == "the region after" else batch.nbytes
            assert stats.saved_bytes - stats.kept_bytes == away
            assert stats.offloaded_bytes <= away


def test_an_error_inside_leaves_the_hooks_where_they_were(model: Model, batch: Tensor, session: Session) -> None:
    plain = one_step(model, batch)
    with spillway.attach(model, plan=mixed(model, batch, session), session=session, min_bytes=0):
        for _ in range(2):
            assert all(map(torch.equal, one_step(model, batch), plain))
        model.blocks[0].inside = fail
        with spillway.offload(policy=spillway.policies.Keep(), session=session):
            failing(ValueError, lambda: model(batch), match="told to")
            assert around() == "ForwardScope"
        failing(ValueError, lambda: model(batch), match="told to")
        assert model.blocks[0].seen[-1] == "nobody's"
        assert top_hooks(True) is None
        model.blocks[0].inside = lambda x: None
        assert all(map(torch.equal, one_step(model, batch), plain))


def test_the_users_own_hooks_around_the_model_see_no_more_of_it_than_before(
    model: Model, batch: Tensor, session: Session
) -> None:
    def hook(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    packed: list[Tensor] = []
    plain = one_step(model, batch)
    with spillway.attach(model, plan=mixed(model, batch, session), session=session, min_bytes=0):
        one_step(model, batch)
        with saved_tensors_hooks(hook, hook):
            loss = model(batch)
        assert not packed
        assert model.blocks[0].seen[-1] == "ForwardScope"
        loss.square().mean().backward()
        found = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        assert all(map(torch.equal, found, plain[1:]))


def test_what_is_marked_inside_is_seen_from_there_on(model: Model, batch: Tensor, session: Session) -> None:
    def mark(x: Tensor) -> None:
        # Also where other hooks are in force just then: those of the pass are put back below them.
        with spillway.keep():
            model.blocks[0].seen.append(around())
            spillway.offload_tensor(x, session=session)
            model.blocks[0].seen.append(around())
        model.blocks[0].seen.append(around())

    plan = mixed(model, batch, session)
    plain = one_step(model, batch)
    with spillway.attach(model, plan=plan, session=session, min_bytes=0) as attached:
        for _ in range(2):
            one_step(model, batch)
        assert attached.stats().offloaded_bytes == 0
        del model.blocks[0].seen[:]
        model.blocks[0].inside = mark
        assert all(map(torch.equal, one_step(model, batch), plain))
        assert model.blocks[0].seen == ["nobody's", "NoneType", "NoneType", "ForwardScope"]
        assert attached.stats().offloaded_bytes >= batch.nbytes
        assert all(map(torch.equal, one_step(model, batch), plain))
        assert model.blocks[0].seen[4] == "ForwardScope"


def test_a_group_of_the_users_inside_is_counted(model: Model, batch: Tensor, session: Session) -> None:
    def grouped(x: Tensor) -> None:
        with spillway.group("mine"):
            x.requires_grad_().sin()

    model.blocks[2].inside = lambda x: grouped(x.detach().clone())
    plan = mixed(model, batch, session)
    with spillway.attach(model, plan=plan, session=session, min_bytes=0) as attached:
        for _ in range(4):
            one_step(model, batch)
            (group,) = attached.stats().groups
            assert group.kept_bytes == batch.nbytes


def test_hooks_that_are_left_in_the_next_block_stay_above_those_of_the_pass(
    model: Model, batch: Tensor, session: Session
) -> None:
    hooks = saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor)
    plain = one_step(model, batch)
    with spillway.attach(model, plan=mixed(model, batch, session), session=session, min_bytes=0):
        one_step(model, batch)
        model.blocks[0].inside = lambda x: hooks.__enter__()
        model.blocks[2].inside = lambda x: hooks.__exit__()
        assert all(map(torch.equal, one_step(model, batch), plain))
        assert model.outside == "ForwardScope"


def test_where_hooks_are_disabled_inside_they_are_back_behind_it(model: Model, batch: Tensor, session: Session) -> None:
    def disable(x: Tensor) -> None:
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks"):
            spillway.keep_tensor(x, session=session)

    plain = one_step(model, batch)
    with spillway.attach(model, plan=mixed(model, batch, session), session=session, min_bytes=0):
        one_step(model, batch)
        model.blocks[0].inside = disable
        assert all(map(torch.equal, one_step(model, batch), plain))
        assert model.outside == "ForwardScope"
        model.blocks[0].inside = lambda x: None
        assert all(map(torch.equal, one_step(model, batch), plain))


@pytest.mark.parametrize("drop_output", [False, True])
def test_a_region_of_the_users_inside_is_in_the_pass(
    drop_output: bool, model: Model, batch: Tensor, session: Session
) -> None:
    class Regions(Looking):
        drops: bool | Tensor | nn.Module = False

        def forward(self, x: Tensor) -> Tensor:
            y = spillway.recompute(torch.tanh, super().forward(x), drop_output=self.drops, session=session)
            self.seen.append(around())
            return x + self.linear(y)

    for block in model.blocks:
        block.__class__ = Regions
    plan = mixed(model, batch, session)
    plain = one_step(model, batch)
    # It is refused where there is no pass, and in the block that is a region.
    model.blocks[0].drops = drop_output
    with spillway.attach(model, plan=plan, session=session, min_bytes=0):
        for number in range(4):
            del model.blocks[0].seen[:]
            assert all(map(torch.equal, one_step(model, batch), plain))
            # It is left alone once, and from then on it is known.
            assert model.blocks[0].seen == [
                "nobody's" if number == 1 and not drop_output else "ForwardScope",
                "ForwardScope",
            ]
            assert model.outside == "ForwardScope"


def test_what_is_written_in_place_is_autograds_own_error(model: Model, batch: Tensor, session: Session) -> None:
    with spillway.attach(model, plan=mixed(model, batch, session), session=session, min_bytes=0):
        one_step(model, batch)
        x = batch.clone()
        loss = model(x)
        x.zero_()
        failing(RuntimeError, loss.backward, match="modified by an inplace operation")
        del loss
