"""Loops of every kind: whatever a user does between steps and in them, the numbers are those of plain training."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import spillway
from allocations import count_exactly
from budgets import KINDS, Kind, attached_to, budget_of, hardware
from spillway import Session
from steps import MiB, assert_nothing_left
from support import FailsInBackward

ROOM = 3 * MiB
"""Beside the least budget: graphs that are gone through twice, or give a second one, take more than a step does."""
ACTIONS = 40


class Loop:
    """A model in training, and what came of it.

    Args:
        kind: of the model.
        seed: of choices that actions make.
    """

    def __init__(self, kind: Kind, seed: int) -> None:
        torch.manual_seed(0)
        self.model, self.batch = kind.model(), kind.batch()
        # Half of it, and half of that, are still worth a journey.
        self.batch = self.batch[: len(self.batch) // 4]
        self.small = self.batch[: len(self.batch) // 2]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.random = random.Random(seed)
        self.seen: list[Tensor] = []
        self.attach: Callable[[nn.Module], spillway.Attached] | None = None
        self.attached: spillway.Attached | None = None
        torch.manual_seed(seed)

    def loss(self, batch: Tensor | None = None, model: nn.Module | None = None) -> Tensor:
        loss = (self.model if model is None else model)(self.batch if batch is None else batch).float().square().mean()
        self.seen.append(loss.detach().clone())
        return loss

    def update(self) -> None:
        self.seen += [each.grad.clone() for each in self.model.parameters() if each.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += [each.detach().clone() for each in self.model.parameters()]

    def trained(self) -> list[Tensor]:
        return [each for each in self.model.parameters() if each.requires_grad]

    # What users do.

    def step(self) -> None:
        self.loss().backward()
        self.update()

    def accumulate(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            (self.loss() / 2).backward()
        self.update()

    def smaller(self) -> None:
        self.loss(self.small).backward()
        self.update()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()

    def evaluate_between(self) -> None:
        loss = self.loss()
        self.evaluate()
        loss.backward()
        self.update()

    def generate(self) -> None:
        with torch.inference_mode():
            self.loss(self.small)

    def skip(self) -> None:
        self.loss()

    def fail_in_forward(self) -> None:
        def fail(*_: object) -> None:
            raise KeyError("on purpose")

        hook = list(self.model.modules())[-1].register_forward_hook(fail)
        with pytest.raises(KeyError):
            self.loss()
        hook.remove()

    def fail_in_backward(self) -> None:
        with pytest.raises(KeyError):
            FailsInBackward.apply(self.loss()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad()

    def freeze_or_not(self) -> None:
        child = self.random.choice([each for each in self.model.children() if any(True for _ in each.parameters())])
        child.requires_grad_(not next(child.parameters()).requires_grad)
        if not self.trained():
            self.model.requires_grad_()
        self.step()

    def train_in_evaluation_mode(self) -> None:
        self.model.eval()
        self.loss().backward()
        self.model.train()
        self.update()

    def ask_for_gradients(self) -> None:
        self.seen += torch.autograd.grad(self.loss(), self.trained())

    def go_back_twice(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        self.update()

    def have_two_losses(self) -> None:
        output = self.model(self.batch).float()
        output.abs().mean().backward(retain_graph=True)
        output.square().mean().backward()
        self.update()

    def compare_two_batches(self) -> None:
        (self.loss() * self.loss(self.small)).backward()
        self.update()

    def penalise_gradients(self) -> None:
        batch = self.small.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(batch), batch, create_graph=True)
        gradient.square().sum().backward()
        self.update()

    def keep_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.step()

    def copy_the_model(self) -> None:
        other = copy.deepcopy(self.model)
        with torch.no_grad():
            self.loss(self.small, other)
        self.loss(None, other).backward()
        self.seen += [each.grad.clone() for each in other.parameters() if each.grad is not None]

    def load(self) -> None:
        state = self.model.state_dict()
        self.model.load_state_dict(
            {name: each * 0.99 if each.is_floating_point() else each for name, each in state.items()}
        )

    def look_at_gradients(self) -> None:
        sums: list[Tensor] = []
        hooks = [
            each.register_post_accumulate_grad_hook(lambda it: sums.append(it.grad.sum())) for each in self.trained()
        ]
        self.loss().backward()
        for hook in hooks:
            hook.remove()
        self.seen += sums
        self.update()

    def attach_anew(self) -> None:
        if self.attached is not None and self.attach is not None:
            self.attached.remove()
            self.attached = self.attach(self.model)

    def run(self, actions: list[str]) -> list[Tensor]:
        for action in actions:
            getattr(self, action)()
        return self.seen


NAMES = [name for name, each in vars(Loop).items() if callable(each) and not name.startswith("_")]
NAMES = [name for name in NAMES if name not in ("loss", "update", "trained", "run", "step")]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    # What a process has beside a step is the same in all of them.
    count_exactly(monkeypatch, lambda: 16 * MiB)
    with Session(spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
@pytest.mark.parametrize("way", ["budget", "plan"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.covered
def test_whatever_a_loop_does_its_numbers_are_those_of_plain_training(
    kind: Kind, way: str, seed: int, session: Session
) -> None:
    choices = random.Random(seed)
    # Fused attention has no second derivative.
    names = [name for name in NAMES if kind.name != "attention" or name != "penalise_gradients"]
    # Half of it is plain steps, so that there is a plan in between.
    actions = [choices.choice([*names, *["step"] * len(names)]) for _ in range(ACTIONS)]
    plain = Loop(kind, seed).run(actions)
    assert not any(each.isnan().any() for each in plain)
    loop = Loop(kind, seed)
    profile = replace(spillway.profile(kind.model(), loop.batch, session=session), min_bytes=64 << 10)
    if way == "budget":
        budget = budget_of(profile, 0.3) + ROOM
        loop.attach = lambda model: attached_to(model, budget, session)
    else:
        # Nobody asks whether what the loop does beside is within it.
        plan = spillway.plan(profile, budget=budget_of(profile, 0.05), hardware=hardware())
        assert not all(block.plain for block in plan.blocks)
        loop.attach = lambda model: spillway.attach(model, plan=plan, min_bytes="64KiB", session=session)
    torch.manual_seed(seed)
    with loop.attach(loop.model) as loop.attached:
        ours = loop.run(actions)
        loop.attached.remove()
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain)), actions
