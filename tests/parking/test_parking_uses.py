"""Uses of parked tensors that neither hooks nor guards see, failures on the way back, and other hooks beside ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

import spillway
from parking.test_parked import adversary, batch, copied, same, session, tensors_of, trained
from runtime.scenarios import adversary_session
from spillway.errors import TransferError, UnsupportedError
from spillway.parking.parked import Parked
from spillway.parking.storages import ParkedStorage
from spillway.runtime.spill_file import SpillFile

__all__ = ["adversary", "session"]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_buffer_that_has_grown_since_gets_a_copy_of_its_size(session: spillway.Session, reuse: bool) -> None:
    grown, other = nn.Module(), nn.Module()
    grown.register_buffer("cache", torch.zeros(1000))
    other.register_buffer("x", torch.arange(1000.0))
    with spillway.parked(grown, reuse=True, session=session) as first:
        pass
    first.synchronize()
    held = spillway.park(other, session=session)
    grown.cache.resize_(4000).fill_(7.0)  # type: ignore[operator]
    with spillway.parked(grown, reuse=reuse, session=session) as second:
        pass
    held.unpark()
    assert torch.equal(other.x, torch.arange(1000.0))  # type: ignore[arg-type]
    assert torch.equal(grown.cache, torch.full((4000,), 7.0))  # type: ignore[arg-type]
    second.synchronize()


class Attention(nn.Module):
    """Its output projection is never called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Functional(nn.Linear):
    """Its weights are used by another module."""


FORWARDS: dict[str, Any] = {
    "module": (lambda: nn.Linear(8, 8), lambda model, x: model(x)),
    "attention": (Attention, lambda model, x: model(x)),
    "function": (lambda: Functional(8, 8), lambda model, x: functional.linear(x, model.weight, model.bias)),
    "forward": (lambda: nn.Linear(8, 8), lambda model, x: model.forward(x)),
}


@pytest.mark.parametrize("before", [False, True], ids=["forward after", "forward before"])
@pytest.mark.parametrize("way", FORWARDS)
def test_backward_adds_to_gradients_that_were_parked(session: spillway.Session, way: str, before: bool) -> None:
    make, forward = FORWARDS[way]
    torch.manual_seed(0)
    model = make()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 8)
    forward(model, x).square().sum().backward()
    loss = forward(model, x).square().sum() if before else None
    with spillway.parked(model, session=session):
        pass
    (forward(model, x).square().sum() if loss is None else loss).backward()
    for _ in range(2):
        forward(plain, x).square().sum().backward()
    assert same([each.grad for each in model.parameters()], [each.grad for each in plain.parameters()])


def test_an_encoder_computes_the_fast_way_again_at_once(session: spillway.Session) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        wanted = model(x)
        with spillway.parked(model, session=session):
            pass
        assert torch.equal(model(x), wanted)


def test_what_the_disk_could_not_read_stays_parked_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    views = [each.detach().view(-1) for each in model.parameters()]
    wanted, seen = copied(tensors_of(model, optimizer)), copied(views)
    with adversary_session() as (_, session):
        parking = spillway.park(model, optimizer=optimizer, tier="disk", session=session)
        read, left = SpillFile.read, [2]

        def flaky(*arguments: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise TransferError("flaky disk")
            return read(*arguments)

        monkeypatch.setattr(SpillFile, "read", flaky)
        with pytest.raises(TransferError, match="flaky disk"):
            parking.unpark()
        assert parking.is_parked
        parking.unpark()
        assert same(tensors_of(model, optimizer), wanted) and same(views, seen)
        parking.synchronize()
        assert session.used_bytes == (0, 0)


@pytest.mark.parametrize("other", ["a parking", "a hook"])
def test_a_step_after_the_copies_are_done_beside_other_hooks(session: spillway.Session, other: str) -> None:
    model, optimizer = trained()
    first = spillway.park(model, optimizer=optimizer, session=session)
    if other == "a parking":
        second = spillway.park(trained()[0], session=session)
        second.unpark()
    else:
        hook = register_optimizer_step_pre_hook(lambda *_: None)
    first.unpark()
    model(batch()).sum().backward()
    for storage in first._storages:
        storage.synchronize()
    optimizer.step()
    optimizer.step()
    if other == "a parking":
        second.synchronize()
    else:
        hook.remove()
    first.synchronize()


class Counting(torch.optim.SGD):
    """It has a state that is no parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


def test_an_optimizer_with_a_state_of_its_own(session: spillway.Session) -> None:
    model, _ = trained()
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    with spillway.parked(model, optimizer=optimizer, session=session) as parking:
        pass
    optimizer.step()
    assert optimizer.state["steps"] == 2  # type: ignore[index]
    parking.synchronize()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_an_interrupt_while_storages_are_emptied_brings_all_back(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    model, optimizer = trained()
    wanted, empty, left = copied(tensors_of(model, optimizer)), ParkedStorage.empty, [number]

    def interrupted(self: ParkedStorage) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        empty(self)

    monkeypatch.setattr(ParkedStorage, "empty", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spillway.park(model, optimizer=optimizer, session=session)
    assert same(tensors_of(model, optimizer), wanted)
    assert not any(type(each).__name__.startswith("Parked") for each in model.parameters())


def test_an_interrupt_after_all_is_parked_brings_all_back(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Parked, "_watch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spillway.park(model, optimizer=optimizer, session=session)
    assert same(tensors_of(model, optimizer), wanted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_module_is_refused_before_anything_moves(session: spillway.Session) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match="got a ScriptModule in Sequential"):
        spillway.park(model, session=session)
