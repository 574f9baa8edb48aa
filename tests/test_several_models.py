"""Several models in one process: each trains bit for bit as without Spillway, and learns for itself.

A *program* trains models for a few steps. It asks its run for contexts, which do nothing when it runs plainly, and
gives back all that must be equal: losses, outputs and weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from spillway import Groups, Recompute, Session
from spillway.policies import Offload, Ratio
from spillway.testing import AdversaryBackend
from support import assert_nothing_left

WIDTH, ROWS, STEPS = 16, 32, 4


class Run:
    """One run of a program: plainly, or in sessions."""

    def __init__(self, *sessions: Session, tier: str = "host") -> None:
        self.sessions = sessions
        self.tier = tier
        self.moved: list[dict[str, int]] = []
        """For each step, the bytes that left, by tag or attached model."""
        self.returned = 0
        self._contexts: list[tuple[str, Callable[[], spillway.StepStats]]] = []
        self._attached: list[tuple[str, spillway.Attached]] = []

    def context(self, tag: str = "tag", *, session: int = 0, **options: Any) -> AbstractContextManager[Any]:
        if not self.sessions:
            return contextlib.nullcontext()
        context = spillway.offload(
            **{"tag": tag, "min_bytes": 0, "tier": self.tier, "session": self.sessions[session], **options}
        )
        self._contexts.append((tag, context.stats))
        return context

    def group(self, name: str) -> AbstractContextManager[Any]:
        return spillway.group(name) if self.sessions else contextlib.nullcontext()

    def attach(self, name: str, model: nn.Module, policy: Any) -> None:
        if self.sessions:
            attached = spillway.attach(model, policy=policy, min_bytes=0, session=self.sessions[0])
            self._attached.append((name, attached))

    def step_ends(self) -> None:
        """Every backward of the step has ended."""
        moved: dict[str, int] = {}
        for name, stats in (*self._contexts, *((name, attached.stats) for name, attached in self._attached)):
            counted = stats()
            moved[name] = moved.get(name, 0) + counted.offloaded_bytes
            self.returned += counted.reloaded_bytes
        self.moved.append(moved)
        self._contexts.clear()

    def close(self) -> None:
        for _, attached in self._attached:
            attached.remove()


Program = Callable[[Run], Iterator[Tensor]]
Proof = Callable[..., Run]


@pytest.fixture(params=["host", "disk", "adversary", pytest.param("adversary-disk", marks=pytest.mark.long)])
def prove(request: pytest.FixtureRequest, tmp_path: Path) -> Proof:
    """Runs a program plainly and in sessions, and compares."""
    kind, _, tier = request.param.partition("-")
    adversaries: list[AdversaryBackend] = []

    def session() -> Session:
        more: dict[str, Any] = {}
        if kind == "adversary":
            adversaries.append(AdversaryBackend())
            more["backend"] = adversaries[-1].serve
        # A few tensors are under way at once.
        return Session(window=4 * 1024, spill_directory=tmp_path, allow_memory_filesystem=True, **more)

    def prove(program: Program, *, sessions: int = 1) -> Run:
        torch.manual_seed(0)
        plain = list(program(Run()))
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(session()) for _ in range(sessions)]
            run = Run(*made, tier=tier or ("disk" if kind == "disk" else "host"))
            torch.manual_seed(0)
            ours = list(program(run))
            run.close()
            assert len(ours) == len(plain) > 0
            for number, (got, expected) in enumerate(zip(ours, plain, strict=True)):
                assert torch.equal(got, expected), f"result {number} differs from plain PyTorch's"
            del ours
            for each in run.sessions:
                assert_nothing_left(each)
                assert each.used_bytes == (0, 0)
        for adversary in adversaries:
            adversary.check()
        assert run.returned > 0, "nothing came back: the test proves nothing"
        return run

    return prove


def mlp(blocks: int, out: int = WIDTH, *, dropout: float = 0.0) -> nn.Sequential:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *([nn.Dropout(dropout)] if dropout else []))

    return nn.Sequential(*(block() for _ in range(blocks)), nn.Linear(WIDTH, out))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    weights = [weight for model in models for weight in model.parameters() if weight.requires_grad]
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def weights(*models: nn.Module) -> Iterator[Tensor]:
    for model in models:
        yield from (weight.detach() for weight in model.parameters())


def take(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def assert_steady(run: Run, *, since: int = 1) -> None:
    """From the second step on (or a later one), as much leaves of every model as in the step before."""
    assert len(run.moved) >= since + 2
    assert all(moved == run.moved[since] for moved in run.moved[since:]), run.moved
    assert all(count > 0 for count in run.moved[-1].values()), run.moved


# Models that are not trained, beside one that is


def policy_and_reference(run: Run) -> Iterator[Tensor]:
    """As in preference training: the reference in evaluation and without gradients, in the policy's context."""
    policy, reference = mlp(4, dropout=0.1), mlp(4, dropout=0.1)
    reference.load_state_dict(policy.state_dict())
    optimizer = sgd(policy)
    for _ in range(STEPS):
        x = batch()
        with run.context():
            reference.eval()
            with torch.no_grad():
                before = reference(x).log_softmax(-1)
            ours = policy(x).log_softmax(-1)
            with torch.no_grad():
                again = reference(x).log_softmax(-1)
            loss = (
                functional.kl_div(ours, before, reduction="batchmean", log_target=True) + (ours - again).square().mean()
            )
        loss.backward()
        yield loss.detach()
        del ours, loss
        run.step_ends()
        take(optimizer)
    yield from weights(policy, reference)


def test_a_policy_and_its_reference_in_one_context(prove: Proof) -> None:
    assert_steady(prove(policy_and_reference))


def teacher_and_student(run: Run) -> Iterator[Tensor]:
    """The teacher is frozen, but gradients are on: it passes them on to what comes before it."""
    adapter, teacher, student = mlp(1), mlp(4).requires_grad_(False), mlp(2)
    optimizer = sgd(adapter, student)
    for _ in range(STEPS):
        x = batch()
        with run.context():
            taught = teacher(adapter(x))
            learned = student(x)
            loss = functional.mse_loss(learned, taught.detach()) + taught.square().mean()
        loss.backward()
        yield loss.detach()
        del taught, learned, loss
        run.step_ends()
        take(optimizer)
    yield from weights(adapter, student, teacher)


def test_a_frozen_teacher_and_a_student_in_one_context(prove: Proof) -> None:
    # What is held back can be shared by what is saved after it, so that the second pass is shorter than the first.
    assert_steady(prove(teacher_and_student), since=2)


# Adversarial training


def gan(run: Run, *, tags: bool) -> Iterator[Tensor]:
    """The discriminator's graph is gone through twice, the generator's after it, through a discriminator that moved."""
    generator, discriminator = mlp(3), mlp(3, out=1)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    first, second = ("generator", "discriminator") if tags else ("gan", "gan")
    for _ in range(STEPS):
        real, noise = batch(), batch()
        with run.context(first):
            fake = generator(noise)
        with run.context(second):
            judged = discriminator(torch.cat([real, fake.detach()]))
            loss = functional.softplus(judged[ROWS:]).mean() + functional.softplus(-judged[:ROWS]).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        yield loss.detach()
        del judged, loss
        take(of_discriminator)
        with run.context("fool" if tags else "gan"):
            loss = functional.softplus(-discriminator(fake)).mean()
        loss.backward()
        yield loss.detach()
        del loss, fake
        run.step_ends()
        take(of_generator)
        of_discriminator.zero_grad()
    yield from weights(generator, discriminator)


@pytest.mark.parametrize("tags", [True, False], ids=["own tags", "one tag"])
def test_a_generator_and_a_discriminator(prove: Proof, tags: bool) -> None:
    assert_steady(prove(lambda run: gan(run, tags=tags)))


def gan_of_two_forwards(run: Run) -> Iterator[Tensor]:
    """The generator's graph is dropped in the discriminator's step: no backward ever goes through it."""
    generator, discriminator = mlp(3), mlp(3, out=1)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    for _ in range(STEPS):
        with run.context("generator", ratio=0.5):
            fake = generator(batch()).detach()
        with run.context("discriminator"):
            loss = (discriminator(fake) - discriminator(batch())).mean()
        loss.backward()
        yield loss.detach()
        take(of_discriminator)
        with run.context("generator", ratio=0.5):
            loss = -discriminator(generator(batch())).mean()
        loss.backward()
        yield loss.detach()
        del loss, fake
        run.step_ends()
        take(of_generator)
        of_discriminator.zero_grad()
    yield from weights(generator, discriminator)


def test_a_generator_whose_graph_is_dropped_in_every_other_call(prove: Proof) -> None:
    # What the ratio leaves over is learned a step later.
    assert_steady(prove(gan_of_two_forwards), since=2)


# Attached models


def attached_in_turn(run: Run, *, policies: tuple[Any, Any]) -> Iterator[Tensor]:
    """Of one class, but not alike; their backward in the order of their calls, and the other way round."""
    small, large = mlp(2), mlp(6)
    run.attach("small", small, policies[0])
    run.attach("large", large, policies[1])
    optimizer = sgd(small, large)
    for number in range(STEPS + 2):
        losses = [small(batch()).square().mean(), large(batch()).square().mean()]
        for loss in losses[:: 1 if number % 2 else -1]:
            loss.backward()
            yield loss.detach()
        del loss, losses
        run.step_ends()
        take(optimizer)
    yield from weights(small, large)


@pytest.mark.parametrize(
    "policies",
    [
        (Offload(), Offload()),
        (Ratio(0.5), Ratio(0.75)),
        (Recompute(offload="inputs"), Offload()),
        (Recompute(offload="inputs"), Recompute(offload="matmul")),
    ],
    ids=["all", "ratios", "regions and all", "regions"],
)
def test_two_attached_models_whose_calls_alternate(prove: Proof, policies: tuple[Any, Any]) -> None:
    run = prove(lambda run: attached_in_turn(run, policies=policies))
    # Backward goes two ways in turn.
    assert run.moved[-2:] == run.moved[-4:-2], run.moved


def attached_nested(run: Run, *, policies: tuple[Any, Any]) -> Iterator[Tensor]:
    """The outer model calls the inner one, which is no part of it."""
    inner = mlp(3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = mlp(2), mlp(2)
            self.call: Callable[[Tensor], Tensor] = lambda x: inner(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.call(self.before(x))) + self.call(x)

    outer = Outer()
    run.attach("inner", inner, policies[0])
    run.attach("outer", outer, policies[1])
    optimizer = sgd(inner, outer)
    for _ in range(STEPS):
        loss = outer(batch()).square().mean()
        loss.backward()
        yield loss.detach()
        loss = inner(batch()).square().mean()
        loss.backward()
        yield loss.detach()
        del loss
        run.step_ends()
        take(optimizer)
    yield from weights(inner, outer)


@pytest.mark.parametrize(
    "policies",
    [(Offload(), Offload()), (Recompute(offload="inputs"), Offload()), (Offload(), Recompute(offload="inputs"))],
    ids=["all", "regions inside", "regions outside"],
)
def test_two_attached_models_of_which_one_calls_the_other(prove: Proof, policies: tuple[Any, Any]) -> None:
    prove(lambda run: attached_nested(run, policies=policies))


def shares(*models: nn.Module) -> list[list[float]]:
    """Of each attached model, the part that a ratio of a half lets go, step by step, where they are trained in turn."""
    with Session(window=0) as session:
        all_attached = [spillway.attach(model, policy=Ratio(0.5), min_bytes=0, session=session) for model in models]
        parts: list[list[float]] = [[] for _ in models]
        for _ in range(3):
            for model, attached, part in zip(models, all_attached, parts, strict=True):
                model(torch.ones(ROWS, WIDTH)).sum().backward()
                stats = attached.stats()
                part.append(1 - stats.kept_bytes / stats.saved_bytes)
        return parts


def test_attached_models_of_one_class_do_not_share_what_is_learned() -> None:
    small, large = mlp(2), mlp(6)
    (alone,), (alone_too,) = shares(small), shares(large)
    assert shares(mlp(2), mlp(6)) == [alone, alone_too]


# One model in two sessions


def two_sessions(run: Run) -> Iterator[Tensor]:
    """Micro-batches in turn, their backward the other way round, and a context of one inside of the other's."""
    model = mlp(4)
    optimizer = sgd(model)
    for _ in range(STEPS):
        losses = []
        for number in range(3):
            with run.context(f"session {number % 2}", session=number % 2):
                losses.append(model(batch()).square().mean())
        with run.context("session 0", session=0):
            hidden = model[:2](batch())
            with run.context("session 1", session=1):
                hidden = model[2:](hidden)
            losses.append(hidden.square().mean())
        del hidden
        while losses:
            loss = losses.pop()
            loss.backward()
            yield loss.detach()
        del loss
        run.step_ends()
        take(optimizer)
    yield from weights(model)


def test_one_model_in_two_sessions(prove: Proof) -> None:
    assert_steady(prove(two_sessions, sessions=2))


# Evaluation


def evaluated(run: Run, *, gradients: bool, **options: Any) -> Iterator[Tensor]:
    """Before, between and after the steps, in the same context as these; with gradients, as by one who forgot."""
    model = mlp(4, dropout=0.2)
    optimizer = sgd(model)

    def forward(x: Tensor) -> Tensor:
        for number, layer in enumerate(model):
            with run.group("layers") if number < 3 else contextlib.nullcontext():
                x = layer(x)
        return x

    def evaluate() -> Iterator[Tensor]:
        model.eval()
        for rows in (ROWS, ROWS // 2):
            # Contexts of its own run, whose bytes are not the training's.
            with torch.set_grad_enabled(gradients), run.context("model", **options):
                yield forward(torch.randn(rows, WIDTH)).detach()
        run._contexts.clear()
        model.train()

    yield from evaluate()
    for _ in range(STEPS):
        with run.context("model", **options):
            loss = forward(batch()).square().mean()
        loss.backward()
        yield loss.detach()
        del loss
        run.step_ends()
        take(optimizer)
        yield from evaluate()
    yield from weights(model)


HOWS: list[dict[str, Any]] = [{}, {"ratio": 0.5}, {"groups": Groups(margin=1)}]


@pytest.mark.parametrize("options", HOWS, ids=["all", "ratio", "groups"])
def test_evaluation_changes_nothing_of_what_training_learns(prove: Proof, options: dict[str, Any]) -> None:
    runs = [prove(lambda run, on=on: evaluated(run, gradients=on, **options)) for on in (False, True)]
    assert runs[0].moved == runs[1].moved
    assert_steady(runs[0], since=2)


# Gradients that are accumulated


def accumulated(run: Run, *, tags: bool) -> Iterator[Tensor]:
    """Forwards of two models in turn, and their backward in another order."""
    models = [mlp(2), mlp(5)]
    optimizer = sgd(*models)
    for _ in range(STEPS):
        losses = []
        for number in range(4):
            with run.context(f"model {number % 2}" if tags else "models"):
                losses.append(models[number % 2](batch()).square().mean())
        for number in (1, 0, 3, 2):
            losses[number].backward()
            yield losses[number].detach()
        del losses
        run.step_ends()
        take(optimizer)
    yield from weights(*models)


@pytest.mark.parametrize("tags", [True, False], ids=["own tags", "one tag"])
def test_gradients_of_two_models_are_accumulated_in_turn(prove: Proof, tags: bool) -> None:
    assert_steady(prove(lambda run: accumulated(run, tags=tags)))
