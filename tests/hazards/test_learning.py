"""Hazards 46 and 47: what is learned of a pass, from which pass it is learned, and passes that are not like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from spillway import Decision, Groups, SavedTensor, group, recompute
from spillway.policies import Offload, Ratio
from support import Context, Trial, grads, mlp

WIDTH = 256


def chain(leaf: torch.Tensor, length: int) -> torch.Tensor:
    """A graph that saves as many tensors of the leaf's size as it is long."""
    hidden = leaf * 2
    for _ in range(length):
        hidden = hidden.sin() * 1.5
    return hidden.sum()


def no_grad(trial: Trial) -> None:
    with torch.no_grad(), trial.offload(ratio=0.5, tag="tag"):
        chain(torch.randn(WIDTH, requires_grad=True), 4)


def inference(trial: Trial) -> None:
    with torch.inference_mode(), trial.offload(ratio=0.5, tag="tag"):
        chain(torch.randn(WIDTH), 4)


def raised(trial: Trial) -> None:
    with pytest.raises(ZeroDivisionError), trial.offload(ratio=0.5, tag="tag"):  # noqa: PT012
        chain(torch.randn(WIDTH, requires_grad=True), 2)
        raise ZeroDivisionError


def parameters_only(trial: Trial) -> None:
    weight = torch.nn.Parameter(torch.randn(WIDTH))
    with trial.offload(ratio=0.5, tag="tag"):
        (weight * weight).sum().backward()


def nothing_at_all(trial: Trial) -> None:
    with trial.offload(ratio=0.5, tag="tag"):
        pass


def dropped(trial: Trial) -> None:
    """A training pass of another tag says nothing of this one."""
    with trial.offload(ratio=0.5, tag="another tag"):
        chain(torch.randn(WIDTH, requires_grad=True), 4)


def ratios(trial: Trial, length: int, *, ratio: float = 0.5, passes: int = 1) -> list[float]:
    """The part of a pass that was sent away, for several passes."""
    parts = []
    for _ in range(passes):
        context = trial.offload(ratio=ratio, tag="tag")
        with context:
            loss = chain(torch.randn(WIDTH, requires_grad=True), length)
        stats = context.stats()
        parts.append(1 - stats.kept_bytes / stats.saved_bytes)
        loss.backward()
    return parts


BEFORE = [no_grad, inference, raised, parameters_only, nothing_at_all, dropped]


@pytest.mark.parametrize("before", BEFORE, ids=lambda function: function.__name__)
def test_h46_a_pass_that_saved_nothing_or_raised_stays_first(trial: Trial, before: Callable[[Trial], None]) -> None:
    """The first pass under a ratio sends everything away, and counts; the next ones the ratio of its bytes."""
    before(trial)
    before(trial)
    assert ratios(trial, 4, passes=3) == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("before", BEFORE, ids=lambda function: function.__name__)
def test_h46_such_a_pass_changes_nothing_that_was_learned(trial: Trial, before: Callable[[Trial], None]) -> None:
    assert ratios(trial, 4) == [1.0]
    before(trial)
    assert ratios(trial, 4) == [0.5]


def test_h46_evaluation_before_and_between_training(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model = torch.nn.Sequential(mlp(16, 64, 64), torch.nn.Dropout(0.2), mlp(64, 1))
        for _ in range(3):
            model.eval()
            with torch.no_grad(), context():
                yield model(torch.randn(32, 16))
            model.train()
            with context():
                loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            # With gradients on and no backward, as an evaluation that forgot no_grad.
            with context():
                yield model(torch.randn(8, 16)).detach()
        yield from grads(*model.parameters())

    trial(step)


@pytest.mark.parametrize("policy", [None, Ratio(1.0), Offload()], ids=str)
def test_h47_a_longer_pass_than_the_first_leaves_all_the_same(trial: Trial, policy: Ratio | Offload | None) -> None:
    """It begins like the one before, and saves more."""
    for length in (2, 9, 3, 40, 1):
        context = trial.offload(tag="tag", policy=policy)
        with context:
            loss = chain(torch.randn(WIDTH, requires_grad=True), length)
        saved, kept = context.stats().saved_bytes, context.stats().kept_bytes
        assert (saved, kept) == (length * WIDTH * 4, 0)
        loss.backward()


@pytest.mark.parametrize("policy", [None, Ratio(1.0), Offload()], ids=str)
def test_h47_a_pass_that_grows_after_an_equal_beginning(trial: Trial, policy: Ratio | Offload | None) -> None:
    """As with experts, or images, whose number differs from step to step."""
    begin = torch.randn(WIDTH, requires_grad=True)
    for rows in (1, 4, 2, 64):
        leaf = torch.randn(rows, WIDTH, requires_grad=True)
        context = trial.offload(tag="tag", policy=policy)
        with context:
            loss = (begin * 2).sin().sum() + chain(leaf, 3)
        saved, kept = context.stats().saved_bytes, context.stats().kept_bytes
        assert (saved, kept) == ((1 + 3 * rows) * WIDTH * 4, 0)
        loss.backward()


def test_h47_more_micro_batches_than_in_the_first_step(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model = mlp(16, 64, 64, 1)
        for count in (1, 4, 2):
            losses = []
            for batch in torch.randn(count, 8, 16):
                with context(tag="stage"):
                    losses.append(model(batch).square().mean())
            for loss in losses:
                loss.backward()
            del losses, loss
            yield from [gradient.clone() for gradient in grads(*model.parameters())]

    trial(step)


def test_h47_other_shapes_than_in_the_first_step(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        model, contexts = mlp(16, 64, 64, 1), []
        for rows in (8, 3, 24, 1, 8, 24):
            with context() as _:
                loss = model(torch.randn(rows, 16)).square().mean()
            loss.backward()
            contexts.append(rows)
            yield from [gradient.clone() for gradient in grads(*model.parameters())]

    trial(step)


def test_h47_a_ratio_is_learned_for_each_shape(trial: Trial) -> None:
    def part(rows: int) -> float:
        context = trial.offload(ratio=0.5, tag="tag")
        with context:
            loss = chain(torch.randn(rows, WIDTH, requires_grad=True), 4)
        loss.backward()
        stats = context.stats()
        return 1 - stats.kept_bytes / stats.saved_bytes

    assert [part(rows) for rows in (1, 8, 1, 8, 3, 8, 3)] == [1.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5]


def test_h47_a_ratio_follows_a_pass_that_has_grown(trial: Trial) -> None:
    assert ratios(trial, 4, passes=2) == [1.0, 0.5]
    grown = ratios(trial, 20, passes=3)
    assert 0 < grown[0] <= 0.5
    assert grown[1:] == [0.5, 0.5]
    assert ratios(trial, 4, passes=2)[1] == 0.5


def test_h47_more_shapes_than_are_remembered(trial: Trial) -> None:
    """Old ones are forgotten, and the gradients are those of plain PyTorch."""
    generator = torch.Generator().manual_seed(0)
    for number in [*range(1, 100), *range(1, 100, 7)]:
        leaf = torch.randn(number, generator=generator, requires_grad=True)
        with trial.offload(ratio=0.5):
            loss = chain(leaf, 3)
        (gradient,) = torch.autograd.grad(loss, [leaf])
        (expected,) = torch.autograd.grad(chain(leaf, 3), [leaf])
        assert torch.equal(gradient, expected)


def test_h47_the_order_changes_from_step_to_step(trial: Trial) -> None:
    """The learned order is wrong every time: what is asked for is fetched all the same."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(WIDTH, requires_grad=True)
        for turn in range(4):
            with context():
                losses = [chain(leaf * (1 + number), 4) for number in range(4)]
            for number in range(4):
                losses[(number * (1 + 2 * (turn % 2)) + turn) % 4].backward()
                yield from [gradient.clone() for gradient in grads(leaf)]

    trial(step)


def test_h47_decisions_that_change_from_step_to_step(trial: Trial) -> None:
    turns = iter(range(10**6))

    def policy(saved: SavedTensor) -> Decision:
        return Decision.KEEP if next(turns) % 3 == 0 else Decision.OFFLOAD

    def step(context: Context) -> Iterator[torch.Tensor]:
        model = mlp(16, 64, 64, 1)
        for batch in torch.randn(5, 8, 16):
            with context():
                loss = model(batch).square().mean()
            loss.backward()
        yield from grads(*model.parameters())

    trial(step, policy=policy)


def evaluation(trial: Trial, length: int, **options: object) -> None:
    """With gradients on and no backward: its graph is dropped."""
    with trial.offload(tag="tag", **options):
        chain(torch.randn(WIDTH, requires_grad=True), length)


def test_h46_an_evaluation_with_gradients_is_not_the_first_pass(trial: Trial) -> None:
    """Shorter or longer than what is trained: the training counts for itself."""
    for length in (2, 20):
        evaluation(trial, length, ratio=0.5)
    assert ratios(trial, 4, passes=3) == [1.0, 0.5, 0.5]


def test_h46_an_evaluation_with_gradients_changes_nothing_that_was_learned(trial: Trial) -> None:
    assert ratios(trial, 4, passes=2) == [1.0, 0.5]
    for length in (2, 20):
        evaluation(trial, length, ratio=0.5)
        assert ratios(trial, 4) == [0.5]


def test_h46_an_evaluation_whose_graph_lingers_changes_nothing_that_was_learned(trial: Trial) -> None:
    assert ratios(trial, 4, passes=2) == [1.0, 0.5]
    with trial.offload(ratio=0.5, tag="tag"):
        lingers = chain(torch.randn(WIDTH, requires_grad=True), 20)
    assert ratios(trial, 4, passes=2) == [0.5, 0.5]
    del lingers


def test_h46_gradients_that_are_accumulated_need_no_backward_to_be_counted(trial: Trial) -> None:
    """The graph of the first micro-batch is alive: it counts, for all those that come before its backward."""
    losses, parts = [], []
    for _ in range(3):
        context = trial.offload(ratio=0.5, tag="tag")
        with context:
            losses.append(chain(torch.randn(WIDTH, requires_grad=True), 4))
        stats = context.stats()
        parts.append(1 - stats.kept_bytes / stats.saved_bytes)
    assert parts == [1.0, 0.5, 0.5]
    while losses:
        losses.pop().backward()
    assert ratios(trial, 4) == [0.5]


def test_h46_groups_with_a_margin_warm_up_in_training_and_not_in_an_evaluation(trial: Trial) -> None:
    def step(count: int, *, backward: bool = True) -> int:
        context = trial.offload(groups=Groups(margin=1), tag="tag")
        with context:
            hidden = torch.randn(WIDTH, requires_grad=True) * 2
            for _ in range(count):
                with group("sin"):
                    hidden = hidden.sin()
        if backward:
            hidden.sum().backward()
        (counted,) = context.stats().groups
        return (counted.saved_bytes - counted.kept_bytes) // (4 * WIDTH)

    # An evaluation of more layers than are trained would let the last one of these leave.
    assert step(6, backward=False) == 6
    assert [step(4), step(4)] == [4, 3]
    assert step(6, backward=False) in (5, 6)
    assert step(4) == 3


def test_h46_an_order_that_was_learned_survives_evaluations(trial: Trial) -> None:
    def asked_ahead(*, evaluate: bool) -> list[int]:
        """Bytes that were still here when backward asked, which it learns not to send."""
        seen, tag = [], f"evaluated {evaluate}"
        for _ in range(4):
            context = trial.offload(tag=tag)
            with context:
                loss = chain(torch.randn(WIDTH, requires_grad=True), 6)
            loss.backward()
            seen.append(context.stats().offloaded_bytes)
            if evaluate:
                with trial.offload(tag=tag):
                    chain(torch.randn(WIDTH, requires_grad=True), 3)
        return seen

    assert asked_ahead(evaluate=True) == asked_ahead(evaluate=False)


def test_h46_an_evaluation_through_regions_outside_of_contexts_is_a_pass_of_its_own(trial: Trial) -> None:
    def forward(length: int) -> torch.Tensor:
        hidden = torch.randn(2**18 + 1, requires_grad=True) * 2
        for _ in range(length):
            hidden = recompute(torch.sin, hidden, offload="inputs", session=trial.session)
        return hidden.sum()

    counted = []
    for _ in range(3):
        forward(5)
        loss = forward(3)
        counted.append(trial.session.stats().saved_bytes)
        loss.backward()
        del loss
    assert counted == [counted[0]] * 3 and counted[0] < 4 * (2**20 + 4)
