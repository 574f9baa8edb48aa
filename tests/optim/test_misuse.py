"""What an optimizer on the host cannot do is said, and not left undone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import spillway
from spillway import OffloadedOptimizer, UnsupportedError, UsageError
from spillway.testing import AdversaryBackend


def trained(session: spillway.Session | None = None) -> tuple[nn.Linear, OffloadedOptimizer]:
    model = nn.Linear(8, 8)
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_closed_optimizer_does_not_pass_over_steps_in_silence() -> None:
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(UsageError, match="a closed OffloadedOptimizer"):
        optimizer.step()
    with pytest.raises(UsageError, match="a closed OffloadedOptimizer"):
        optimizer.load_state_dict(saved)
    optimizer.close()


def test_a_step_within_a_capture_is_refused_and_the_next_one_works() -> None:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve) as session:
        model, optimizer = trained(session)
        before = model.weight.detach().clone()
        with adversary.capturing(), pytest.raises(UnsupportedError, match="capture"):
            optimizer.step()
        assert torch.equal(model.weight, before)
        optimizer.step()
        assert not torch.equal(model.weight, before)
        optimizer.close()
    adversary.check()


@pytest.mark.parametrize("which", [0, 1])
def test_of_two_optimizers_over_a_parameter_either_may_step(which: int) -> None:
    """Somebody who makes another one, and still has the first."""
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve) as session:
        plain, model = nn.Linear(8, 8), nn.Linear(8, 8)
        model.load_state_dict(plain.state_dict())
        both = [OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, session=session) for _ in range(2)]
        expected = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            for each, optimizer in ((plain, expected), (model, both[which])):
                each(torch.ones(2, 8)).sum().backward()
                nn.utils.clip_grad_norm_(each.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(model.weight, plain.weight)
        model(torch.ones(2, 8)).sum().backward()
        both[1].close()
        both[0].close()
        assert type(model.weight.grad) is torch.Tensor
        assert bool((model.weight.grad == 2).all())
        assert session.used_bytes == (0, 0)
    adversary.check()


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_it_is_not_copied_without_what_it_is_made_of(copied: object) -> None:
    """A plain optimizer's copy has groups and state; here that is not all."""
    _, optimizer = trained()
    with pytest.raises(UnsupportedError, match="state_dict"):
        copied(optimizer)  # type: ignore[operator]
