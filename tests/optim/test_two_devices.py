"""One optimizer over parameters of two devices: one thread steps them all, and each device waits for its own."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim import Optimizer

import spillway
from optim.support import assert_same_values, batches, train, wide
from spillway import OffloadedOptimizer
from spillway.optim.gradient import DeviceContext
from spillway.optim.placement import Placement
from spillway.runtime.backend import Backend
from spillway.runtime.cpu import CpuBackend
from spillway.testing import AdversaryBackend
from support import SlowBackend


class Together(torch.optim.SGD):
    """A class of one's own, which steps all parameters in one call."""


@contextlib.contextmanager
def two_devices() -> Iterator[None]:
    """Inside, every other parameter is one of a second device, which has streams and memory of its own."""
    numbers, context_of = itertools.count(), Placement.context_of

    def alternating(placement: Placement, device: torch.device) -> DeviceContext:
        return context_of(placement, torch.device(device.type, next(numbers) % 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placement, "context_of", alternating)
        yield


@pytest.fixture
def switching() -> Iterator[Callable[[float], None]]:
    """Lets threads take turns so often."""
    before = sys.getswitchinterval()
    yield sys.setswitchinterval
    sys.setswitchinterval(before)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.RMSprop, Together])
@pytest.mark.parametrize("kind", ["cpu", "slow", "adversary"])
def test_parameters_of_two_devices(
    optimizer_class: type[Optimizer],
    kind: str,
    pieces_of: Callable[[int], None],
    switching: Callable[[float], None],
) -> None:
    pieces_of(128)
    backends: list[AdversaryBackend] = []

    def serve(device: torch.device) -> Backend:
        if kind == "cpu":
            return CpuBackend(device)
        if kind == "slow":
            return SlowBackend("parameters" if device.index else "gradients", 0.001)
        backends.append(AdversaryBackend(device))
        return backends[-1]

    with spillway.Session(backend=serve) as session:
        model, plain = wide(torch.bfloat16), wide(torch.bfloat16)
        with two_devices():
            optimizer = OffloadedOptimizer(model.parameters(), optimizer_class, lr=0.01, session=session)
        reference = OffloadedOptimizer(plain.parameters(), optimizer_class, lr=0.01)
        switching(1e-6)
        for one, each in ((model, optimizer), (plain, reference)):
            train(
                one,
                each,
                batches(8, torch.bfloat16),
                micro=2,
                before_step=lambda one=one: torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5),
            )
        assert len(optimizer._placement.contexts) == 2
        assert_same_values(model, plain)
        reference.close()
        optimizer.close()
        assert session.used_bytes == (0, 0)
    for backend in backends:
        backend.check()
