"""Programs of parkings, uses and steps, drawn from one number, beside the same program that parks nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import spillway
from parking.test_parked import OPTIMIZERS, Model, batch, copied, same, settle, tensors_of
from runtime.scenarios import adversary_session
from spillway.errors import ParkedError, UsageError
from spillway.parking.parked import Parking

STEPS = 30


class Pair:
    """A model with its optimizer, and the same ones that are never parked."""

    def __init__(self, seed: int, make: str) -> None:
        self.models = Model(seed), Model(seed)
        for model in self.models:
            # So that an error in the middle of a forward changes nothing.
            model.eval()
        self.optimizers = [
            OPTIMIZERS[make]([each for each in model.parameters() if each.requires_grad]) for model in self.models
        ]
        self.losses: list[Tensor] = []

    def forward(self, number: int, seed: int) -> Tensor:
        return self.models[number](batch(seed)).square().mean()  # type: ignore[no-any-return]


def run(draw: random.Random) -> int:
    """Gives how many uses were refused."""
    pairs = [Pair(seed, draw.choice(list(OPTIMIZERS))) for seed in range(2)]
    refused = 0
    with adversary_session() as (adversary, session):
        parkings: list[spillway.Parked] = []
        for _ in range(STEPS):
            pair = draw.choice(pairs)
            what = draw.choice(("park", "park", "unpark", "unpark", "train", "step", "write", "read", "clear", "graph"))
            seed = draw.randrange(100)
            if what == "park":
                chosen = draw.sample(pairs, draw.randint(1, 2))
                options: dict[str, Any] = {
                    "bytes": draw.choice((None, None, 100, 5_000, 20_000)),
                    "tier": draw.choice(("host", "host", "disk")),
                    "reuse": draw.random() < 0.5,
                }
                optimizers = [each.optimizers[0] for each in chosen if draw.random() < 0.7]
                try:
                    parkings.append(
                        spillway.park(
                            *(each.models[0] for each in chosen), optimizer=optimizers, session=session, **options
                        )
                    )
                except UsageError:
                    # All of it is parked, or there are fewer bytes than that.
                    continue
            elif what == "unpark" and parkings:
                parking = parkings.pop(draw.randrange(len(parkings)))
                parking.unpark()
                if draw.random() < 0.3:
                    parking.synchronize()
            elif what == "clear":
                for optimizer in pair.optimizers:
                    optimizer.zero_grad()
            else:
                with adversary.stream("compute"):
                    refused += not use(pair, what, seed)
        while parkings:
            parkings.pop().unpark()
        for pair in pairs:
            got, wanted = (copied(tensors_of(*each)) for each in zip(pair.models, pair.optimizers, strict=True))
            assert same(got, wanted)
            pair.losses.clear()
        for each in list(session.of(Parking).returning):
            each.synchronize()
        settle(session)
    return refused


def use(pair: Pair, what: str, seed: int) -> bool:
    """The same use of both, unless the first is refused."""
    for number, (model, optimizer) in enumerate(zip(pair.models, pair.optimizers, strict=True)):
        try:
            if what == "train":
                # A forward and its backward in one: a refused backward would add to some gradients.
                with torch.no_grad():
                    model(batch(seed))
                pair.forward(number, seed).backward()
            elif what == "step":
                optimizer.step()
            elif what == "write":
                with torch.no_grad():
                    model.scale.mul_(1.5)
            elif what == "graph":
                pair.losses.append(pair.forward(number, seed).detach())
            else:
                pair.losses.append(model.head.weight.detach().sum())
        except ParkedError:
            assert number == 0
            return False
    if what in ("read", "graph"):
        assert torch.equal(*pair.losses[-2:])
    return True


@pytest.mark.parametrize("seed", range(24))
def test_a_program_has_the_bits_of_one_that_parks_nothing(seed: int) -> None:
    refused = run(random.Random(seed))
    assert refused >= 0


def test_some_uses_are_refused_and_some_are_not() -> None:
    assert 0 < sum(run(random.Random(seed)) for seed in range(6)) < 6 * STEPS
