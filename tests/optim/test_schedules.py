"""Groups of parameters with settings of their own, and what changes the settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import spillway
from optim.support import (
    assert_both_same,
    assert_same_values,
    batches,
    both,
    implementation,
    loss_of,
    same_bits,
    saved,
    three_groups,
    train,
    wide,
)
from spillway import OffloadedOptimizer


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_groups_with_settings_of_their_own(optimizer_class: type[Optimizer], session: spillway.Session) -> None:
    pair = both(optimizer_class, session, three_groups, lr=0.1)
    for model, optimizer in pair:
        train(model, optimizer, batches(3))
        optimizer.param_groups[1]["lr"] = 0.7
        optimizer.param_groups[2]["weight_decay"] = 0.2
        train(model, optimizer, batches(3))
    assert_both_same(pair)
    pair[1][1].close()


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_group_that_is_added_late(fraction: float, session: spillway.Session) -> None:
    plain, ours = wide(), wide()
    reference = torch.optim.RMSprop(plain.first.parameters(), lr=0.1, foreach=False)
    optimizer = OffloadedOptimizer(
        ours.first.parameters(), torch.optim.RMSprop, lr=0.1, fraction=fraction, session=session, foreach=False
    )
    for model, one in ((plain, reference), (ours, optimizer)):
        train(model, one, batches(2))
        # Gradients that were there before their parameters were given.
        loss_of(model, batches(1)[0]).backward()
        one.add_param_group({"params": list(model.blocks.parameters()), "lr": 0.02, "momentum": 0.5})
        one.step()
        one.zero_grad()
        model.zero_grad()
        train(model, one, batches(2))
    assert_both_same(((plain, reference), (ours, optimizer)))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        optimizer.add_param_group({"params": [ours.first.weight]})
    assert len(optimizer.param_groups) == 2
    optimizer.close()
    assert session.used_bytes == (0, 0)


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "per group": lambda optimizer: LambdaLR(optimizer, [lambda n: 1 / (n + 1), lambda n: 0.5**n, lambda n: n % 2]),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.7),
    "one cycle, of the momentum too": lambda optimizer: OneCycleLR(optimizer, 0.3, total_steps=8),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.01, 0.2, 2),
    "warm restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "one after the other": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), ExponentialLR(optimizer, 0.5)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize("session", ["adversary"], indirect=True)
def test_a_scheduler(name: str, session: spillway.Session) -> None:
    pair = both(torch.optim.SGD, session, three_groups, lr=0.1, momentum=0.9)
    for model, optimizer in pair:
        scheduler = SCHEDULERS[name](optimizer)
        for batch in batches(5):
            train(model, optimizer, [batch])
            scheduler.step()
    assert_both_same(pair)
    pair[1][1].close()


def test_a_scheduler_that_looks_at_the_loss_and_one_that_is_resumed(session: spillway.Session) -> None:
    pair = both(torch.optim.AdamW, session, lr=0.1)
    for model, optimizer in pair:
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        scheduler = StepLR(optimizer, 1, 0.9)
        for batch in batches(3):
            train(model, optimizer, [batch])
            plateau.step(1.0)
            scheduler.step()
        state = saved(scheduler.state_dict())
        again = StepLR(optimizer, 1, 0.9)
        again.load_state_dict(state)
        train(model, optimizer, batches(1))
        again.step()
        train(model, optimizer, batches(1))
    assert_both_same(pair)
    pair[1][1].close()


def test_a_learning_rate_that_is_a_tensor(session: spillway.Session) -> None:
    for optimizer_class in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        plain, ours = wide(), wide()
        rates = torch.tensor(0.1), torch.tensor(0.1)
        reference = optimizer_class(plain.parameters(), lr=rates[0], **implementation(optimizer_class))
        optimizer = OffloadedOptimizer(ours.parameters(), optimizer_class, lr=rates[1], session=session)
        for batch in batches(3):
            for model, one, rate in ((plain, reference, rates[0]), (ours, optimizer, rates[1])):
                train(model, one, [batch])
                rate.mul_(0.5)
        assert_same_values(ours, plain)
        assert same_bits(rates[0], rates[1])
        assert optimizer.param_groups[0]["lr"] is rates[1]
        optimizer.close()
