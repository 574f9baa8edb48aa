"""Parked models and optimizers: the bits of a program that parks nothing, and no byte on the device meanwhile.

The device is the adversary's: a copy is done as late as its events allow, and a use before it is an error.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as step_hooks

import spillway
from runtime.scenarios import adversary_session
from spillway.errors import ParkedError, SessionError, TierFullError, TransferError, UsageError
from spillway.parking.parked import Parking
from spillway.runtime.arena import SLAB_BYTES
from spillway.runtime.tiers import HostTier
from spillway.testing import AdversaryBackend
from support import assert_nothing_left

WIDTH = 32


class Block(nn.Module):
    """A frozen part, a trained one, a buffer that forward writes, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.relu(self.base(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x) * self.scale
        return y


@pytest.fixture
def adversary() -> Iterator[tuple[AdversaryBackend, spillway.Session]]:
    with adversary_session() as (backend, session):
        yield backend, session
        settle(session)
        assert_nothing_left(session)


@pytest.fixture
def session(adversary: tuple[AdversaryBackend, spillway.Session]) -> spillway.Session:
    return adversary[1]


def settle(session: spillway.Session) -> None:
    """The streams are done, as on a device sooner or later, and garbage is gone."""
    for runtime in session._runtimes.values():
        for stream in runtime.mover.streams:
            runtime.backend.record(stream).synchronize()
    gc.collect()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}


def trained(make: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["fused AdamW"]) -> tuple[Model, Any]:
    """A model after one step, with gradients of the next."""
    model = Model()
    optimizer = make([each for each in model.parameters() if each.requires_grad])
    for step in range(2):
        model(batch(step)).square().mean().backward()
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def tensors_of(model: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """All of them, with gradients and states."""
    states = [] if optimizer is None else [each for state in optimizer.state.values() for each in state.values()]
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    return [*model.parameters(), *grads, *model.buffers(), *(each for each in states if isinstance(each, Tensor))]


def copied(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def nbytes_of(tensors: list[Tensor]) -> int:
    return sum({each.untyped_storage(): each.untyped_storage().nbytes() for each in tensors}.values())


def reinforce(
    parks: Callable[..., Any], make: Callable[[Any], Any], steps: int = 4, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """A loop as GRPO has it: generate, score, compare with the reference, train. ``parks`` makes the contexts."""
    policy, reference, reward = (Model(seed).to(device) for seed in (0, 0, 1))
    reference.requires_grad_(False)
    reward.requires_grad_(False).eval()
    optimizer = make([each for each in policy.parameters() if each.requires_grad])
    found = []
    for step in range(steps):
        with torch.no_grad():
            with parks(reference, reward, optimizer=optimizer):
                sample = batch(step).to(device)
                for _ in range(3):
                    sample = torch.tanh(policy(sample))
            with parks(policy, optimizer=optimizer):
                score = reward(sample).mean(-1)
                expected = reference(sample)
        with parks(reference, reward):
            for _ in range(2):
                loss = (policy(sample) - expected).square().mean() - (policy(sample).mean(-1) * score).mean()
                (loss / 2).backward()
                found.append(loss.detach())
                with parks(policy, optimizer=optimizer):
                    score = score * 0.5
            found += [each.grad.clone() for each in policy.parameters() if each.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *copied(tensors_of(policy, optimizer)), *copied(tensors_of(reference))]


@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"tier": "disk"}], ids=["host", "reuse", "disk"])
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.covered(times=2)
def test_a_loop_of_reinforcement_learning_has_the_bits_of_one_that_parks_nothing(
    make: str, options: dict[str, Any], session: spillway.Session
) -> None:
    wanted = reinforce(lambda *models, **_: nullcontext(), OPTIMIZERS[make])
    got = reinforce(
        lambda *models, **more: spillway.parked(*models, session=session, **options, **more), OPTIMIZERS[make]
    )
    assert same(got, wanted)
    for each in list(session.of(Parking).returning):
        each.synchronize()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_all_bytes_leave_and_the_objects_stay(tier: str, session: spillway.Session) -> None:
    model, optimizer = trained()
    tensors, kinds = tensors_of(model, optimizer), list(map(type, tensors_of(model, optimizer)))
    view, wanted, nbytes = model.layers[1].up.weight[1:].detach(), copied(tensors), nbytes_of(tensors)
    storages, versions = [each.untyped_storage() for each in tensors], [each._version for each in tensors]
    shapes = [each.shape for each in tensors]
    parking = spillway.park(model, optimizer=optimizer, tier=tier, session=session)
    assert parking.nbytes == parking.copied_bytes == nbytes
    assert [each.nbytes() for each in storages] == [0] * len(storages)
    assert [each.shape for each in tensors] == shapes and all(map(isinstance, tensors, kinds))
    assert model.head.weight is model.layers[0].up.weight
    parking.unpark()
    parking.synchronize()
    assert list(map(type, tensors)) == kinds
    assert same(tensors_of(model, optimizer), wanted) and torch.equal(view, model.layers[1].up.weight[1:])
    assert all(map(Tensor.is_set_to, tensors_of(model, optimizer), tensors))
    assert [each._version for each in tensors] == versions
    assert [id(each.untyped_storage()) for each in tensors] == list(map(id, storages))


def test_pinned_memory_is_that_of_the_parked_bytes_once(session: spillway.Session) -> None:
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
    model(torch.randn(4, 512)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    with spillway.parked(model, optimizer=optimizer, session=session) as parking:
        assert parking.nbytes == 8 * (4 * 512 * 512 * 4 + 4)
        assert parking.nbytes <= session.used_bytes[0] <= parking.nbytes * 1.05
        # Slabs of 32 MiB: one for the weights, and one for numbers of steps.
        assert session.host_bytes <= 2 * SLAB_BYTES
    assert session.used_bytes[0] == 0


def test_the_least_needed_bytes_leave_first(session: spillway.Session) -> None:
    model, optimizer = trained()
    states = [each for state in optimizer.state.values() for each in state.values()]
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    frozen = [each for each in model.parameters() if not each.requires_grad]
    others = [*(each for each in model.parameters() if each.requires_grad), *model.buffers()]
    before = 0
    for some in (states, grads, frozen, others):
        each = nbytes_of(some)
        with spillway.parked(model, optimizer=optimizer, bytes=before + each, session=session) as parking:
            assert parking.nbytes == before + each
        parking.synchronize()
        before += each
        with spillway.parked(model, optimizer=optimizer, bytes=before - each + 1, session=session) as parking:
            assert before - each < parking.nbytes < before
        parking.synchronize()
    with pytest.raises(UsageError, match=r"bytes: got .* expected at most"):
        spillway.park(model, optimizer=optimizer, bytes=before + 1, session=session)
    with spillway.parked(model, optimizer=optimizer, bytes=0, session=session) as parking:
        assert parking.nbytes == 0
        model(batch()).sum().backward()
        optimizer.step()


def test_a_storage_is_needed_as_much_as_its_most_needed_tensor(session: spillway.Session) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.register_parameter("first", nn.Parameter(model.weight.detach()[:1], requires_grad=False))
    model.register_parameter("other", nn.Parameter(torch.ones(4), requires_grad=False))
    with spillway.parked(model, bytes=1, session=session) as parking:
        assert parking.nbytes == 16
        # It is not parked.
        model.weight.sum()
    parking.synchronize()


def test_the_last_modules_leave_first(session: spillway.Session) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    with spillway.parked(model, bytes=2 * WIDTH * WIDTH * 4, session=session):
        x = model[1](model[0](batch()))
        with pytest.raises(ParkedError, match=r"forward of Sequential\.2 needs"):
            model[2](x)


USES: dict[str, Callable[[Model, Any], object]] = {
    "the model": lambda model, _: model(batch()),
    "a module": lambda model, _: model.layers[1].up(batch()),
    "a step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, _: model.state_dict(),
    "load_state_dict": lambda model, _: model.load_state_dict({"scale": torch.ones(WIDTH)}, strict=False),
    "an operator": lambda model, _: model.scale + 1,
    "an operator of a list": lambda model, _: torch.cat([torch.ones(2), model.scale]),
    "a keyword": lambda model, _: nn.functional.linear(batch(), weight=model.head.weight),
    "a write": lambda model, _: model.scale.data.zero_(),
    "data_ptr": lambda model, _: model.scale.data_ptr(),
    "a gradient": lambda model, _: model.scale.grad.sum(),  # type: ignore[union-attr]
    "clipping": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a buffer": lambda model, _: model.layers[0].norm.running_mean.clone(),  # type: ignore[union-attr]
    "a state": lambda model, optimizer: optimizer.state[model.scale]["exp_avg"].sum(),
    "saving": lambda model, _: torch.save(model.scale, io.BytesIO()),
    "saving a state": lambda _, optimizer: torch.save(optimizer.state_dict(), io.BytesIO()),
    "copying": lambda model, _: copy.deepcopy(model),
    "a move": lambda model, _: model.to(torch.float64),
    "numpy": lambda model, _: model.layers[0].base.weight.numpy(),
    "item": lambda model, _: model.layers[0].norm.num_batches_tracked.item(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("use", USES)
def test_a_use_while_parked_is_an_error_and_changes_nothing(use: str, session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    with (
        spillway.parked(model, optimizer=optimizer, session=session) as parking,
        # Torch gathers those of `load_state_dict` in one of its own.
        pytest.raises(RuntimeError if use == "load_state_dict" else ParkedError, match="parked"),
    ):
        USES[use](model, optimizer)
    parking.synchronize()
    assert same(tensors_of(model, optimizer), wanted)


@pytest.mark.parametrize("use", USES)
def test_a_use_right_after_waits_for_its_bytes(use: str, session: spillway.Session) -> None:
    (model, optimizer), (other, same_optimizer) = trained(), trained()
    parking = spillway.park(model, optimizer=optimizer, session=session)
    parking.unpark()
    got, wanted = USES[use](model, optimizer), USES[use](other, same_optimizer)
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        assert torch.equal(got, wanted)
    assert same(tensors_of(model, optimizer), tensors_of(other, same_optimizer))
    parking.synchronize()


def test_errors_name_what_was_used(session: spillway.Session) -> None:
    model, optimizer = trained()
    with spillway.parked(model, optimizer=optimizer, session=session):
        with pytest.raises(ParkedError, match=r"the forward of Model\.layers\.1\.up needs"):
            model.layers[1].up(batch())
        with pytest.raises(ParkedError, match=r"the step of AdamW"):
            optimizer.step()
        with pytest.raises(ParkedError, match=r"Model\.scale is parked: its 128 B .*and sum needs"):
            model.scale.sum()
        assert repr(model.scale) == "<ParkedParameter Model.scale (32,) torch.float32>"


def test_shapes_and_gradients_are_there_while_parked(session: spillway.Session) -> None:
    model, optimizer = trained()
    with spillway.parked(model, optimizer=optimizer, session=session):
        assert sum(each.numel() for each in model.parameters() if each.requires_grad) > 0
        assert model.scale.dtype == torch.float32 and model.scale.device == torch.device("cpu")
        assert model.scale.grad is not None and {model.scale: 1}[model.scale] == 1
        optimizer.zero_grad()
        assert model.scale.grad is None
    model(batch()).sum().backward()
    wanted, _ = trained()
    wanted.zero_grad()
    wanted(batch()).sum().backward()
    assert torch.equal(model.scale.grad, wanted.scale.grad)  # type: ignore[arg-type]


def test_a_gradient_that_was_dropped_while_parked_is_not_reloaded(session: spillway.Session) -> None:
    model, _ = trained()
    assert model.scale.grad is not None
    gone = weakref.ref(model.scale.grad.untyped_storage())
    parking = spillway.park(model, session=session)
    model.zero_grad()
    gc.collect()
    assert gone() is None
    parking.unpark()
    parking.synchronize()
    assert session.used_bytes == (0, 0)


def test_parked_state_refuses_steps_only(session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted, other = trained()
    states = nbytes_of([each for state in optimizer.state.values() for each in state.values()])
    with spillway.parked(model, optimizer=optimizer, bytes=states, session=session):
        model(batch()).sum().backward()
        with pytest.raises(ParkedError, match="the step of AdamW needs them"):
            optimizer.step()
    wanted(batch()).sum().backward()
    optimizer.step()
    other.step()
    assert same(tensors_of(model, optimizer), tensors_of(wanted, other))


def test_parked_gradients_refuse_training_and_allow_generation(session: spillway.Session) -> None:
    model, _ = trained()
    grads = nbytes_of([each.grad for each in model.parameters() if each.grad is not None])
    with spillway.parked(model, bytes=grads, session=session):
        with torch.no_grad():
            model(batch())
        with pytest.raises(ParkedError, match=r"the backward after the forward of Model needs"):
            model(batch())
    model(batch()).sum().backward()
    wanted, _ = trained()
    with torch.no_grad():
        wanted(batch())
    wanted(batch()).sum().backward()
    assert same(tensors_of(model), tensors_of(wanted))


def test_a_step_of_an_optimizer_that_was_not_named_stops_before_it_begins(session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted, other = trained()
    with spillway.parked(model.layers[1], session=session), pytest.raises(ParkedError, match="the step of AdamW"):
        optimizer.step()
    optimizer.step()
    other.step()
    assert same(tensors_of(model, optimizer), tensors_of(wanted, other))


def test_a_stream_of_the_caller_waits_as_well(adversary: tuple[AdversaryBackend, spillway.Session]) -> None:
    backend, session = adversary
    model, _ = trained()
    wanted, _ = trained()
    for name in ("first", "second"):
        parking = spillway.park(model, session=session)
        with backend.stream(name):
            parking.unpark()
        with backend.stream("other"):
            got = model(batch())
        assert torch.equal(got, wanted(batch()))
        # The stream of the call needs no wait of its own.
        assert torch.equal(model.scale, wanted.scale)
        parking.synchronize()


def test_a_graph_from_before_has_its_backward_afterwards(session: spillway.Session) -> None:
    model, _ = trained()
    wanted, _ = trained()
    loss, expected = model(batch()).square().mean(), wanted(batch()).square().mean()
    parking = spillway.park(model, session=session)
    parking.unpark()
    loss.backward()
    expected.backward()
    parking.synchronize()
    assert same(tensors_of(model), tensors_of(wanted))


def test_a_view_from_before_waits_as_well(session: spillway.Session) -> None:
    model, _ = trained()
    views, wanted = [each.detach()[:1] for each in model.parameters()], copied(list(model.parameters()))
    with spillway.parked(model, session=session) as parking:
        pass
    assert same(views, [each[:1] for each in wanted])
    parking.synchronize()


def test_only_what_is_shared_is_waited_for_at_once(session: spillway.Session) -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    view = model.scale.detach()
    with spillway.parked(model, session=session) as parking:
        pass
    returned = [each for each in tensors_of(model) if type(each) in (Tensor, nn.Parameter)]
    assert len(returned) == 1 and returned[0] is model.scale
    parking.synchronize()
    assert torch.equal(view, model.scale)


def test_an_exception_inside_brings_everything_back(session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    with pytest.raises(KeyError), spillway.parked(model, optimizer=optimizer, session=session) as parking:
        raise KeyError
    assert not parking.is_parked
    assert same(tensors_of(model, optimizer), wanted)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_without_memory_for_the_copies_nothing_is_parked(tier: str) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    with adversary_session(host_budget="32KiB", disk_budget="16KiB") as (_, session):
        with pytest.raises(TierFullError):
            spillway.park(model, optimizer=optimizer, tier=tier, session=session)
        assert same(tensors_of(model, optimizer), wanted)
        model(batch()).sum().backward()
        optimizer.step()
        gc.collect()
        session.synchronize()
        assert session.used_bytes == (0, 0)


def test_without_memory_on_the_device_all_stays_parked(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    wanted, storages = copied(tensors_of(model, optimizer)), [each.untyped_storage() for each in model.parameters()]
    parking = spillway.park(model, optimizer=optimizer, session=session)
    resize, left = torch.UntypedStorage.resize_, 5

    def failing(storage: torch.UntypedStorage, size: int) -> Any:
        nonlocal left
        left -= size > 0
        if size and left < 0:
            raise torch.OutOfMemoryError("no memory.")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", failing)
        with pytest.raises(ParkedError, match=r"unpark\(\) needs .* no memory\. All is still parked"):
            parking.unpark()
    assert parking.is_parked and not any(each.nbytes() for each in storages)
    with pytest.raises(ParkedError):
        model(batch())
    with pytest.raises(ParkedError):
        model.scale.sum()
    parking.unpark()
    assert same(tensors_of(model, optimizer), wanted)


def test_a_session_that_is_closed_too_early_is_an_error() -> None:
    model, _ = trained()
    storages = [each.untyped_storage() for each in model.parameters()]
    with adversary_session() as (_, session):
        parking = spillway.park(model, session=session)
    with pytest.raises(SessionError, match="closed session"):
        parking.unpark()
    assert not any(each.nbytes() for each in storages)
    with pytest.raises(ParkedError):
        model.scale.sum()


def test_an_interrupt_brings_everything_back(session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    resize, left = torch.UntypedStorage.resize_, 7

    def interrupted(storage: torch.UntypedStorage, size: int) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            spillway.park(model, optimizer=optimizer, session=session)
    for each in list(session.of(Parking).returning):
        each.synchronize()
    assert same(tensors_of(model, optimizer), wanted)
    assert {type(each) for each in tensors_of(model, optimizer)} == {Tensor, nn.Parameter}


def test_two_parkings_at_once(session: spillway.Session) -> None:
    (policy, optimizer), (reference, _) = trained(), trained()
    reference.head.weight = policy.head.weight
    reference.eval()
    wanted = copied([*tensors_of(policy, optimizer), *tensors_of(reference)])
    first = spillway.park(policy, optimizer=optimizer, session=session)
    second = spillway.park(reference, session=session)
    with pytest.raises(UsageError, match="is parked already"):
        spillway.park(policy, session=session)
    second.unpark()
    # It shares a weight with the first.
    with pytest.raises(ParkedError, match=r"Model\.layers\.0\.up\.weight is parked"):
        reference(batch())
    first.unpark()
    assert same([*tensors_of(policy, optimizer), *tensors_of(reference)], wanted)


def test_a_part_and_then_the_rest(session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted, nbytes = copied(tensors_of(model, optimizer)), nbytes_of(tensors_of(model, optimizer))
    first = spillway.park(model, optimizer=optimizer, bytes=10_000, session=session)
    second = spillway.park(model, optimizer=optimizer, session=session)
    assert first.nbytes + second.nbytes == nbytes
    first.unpark()
    with pytest.raises(ParkedError):
        model(batch())
    second.unpark()
    second.unpark()
    assert same(tensors_of(model, optimizer), wanted)


def test_a_parking_begins_while_copies_are_under_way(session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    for _ in range(3):
        # Each begins while the copies of the one before are queued.
        spillway.park(model, optimizer=optimizer, session=session).unpark()
    assert same(tensors_of(model, optimizer), wanted)


# Copies that stay.


@pytest.mark.parametrize("kind", [nn.Parameter, Tensor])
def test_an_unchanged_model_costs_nothing_the_second_time(kind: type, session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted, nbytes = copied(tensors_of(model, optimizer)), nbytes_of(tensors_of(model, optimizer))
    for number in range(3):
        parking = spillway.park(model, optimizer=optimizer, reuse=True, session=session)
        assert parking.nbytes == nbytes
        assert parking.copied_bytes == (0 if number else nbytes)
        parking.unpark()
    assert session.used_bytes[0] >= nbytes
    assert same(tensors_of(model, optimizer), wanted)
    with spillway.parked(model, optimizer=optimizer, session=session) as parking:
        assert parking.copied_bytes == nbytes
    assert same(tensors_of(model, optimizer), wanted)
    assert session.used_bytes[0] == 0


def test_only_a_large_storage_is_compared(session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 511, bias=False))
    for copied_bytes in (4 * 512 * (512 + 511), 4 * 512 * 511):
        with spillway.parked(model, reuse=True, session=session) as parking:
            assert parking.copied_bytes == copied_bytes


def test_copies_that_stay_end_with_their_storages(session: spillway.Session) -> None:
    model = Model()
    parking = spillway.park(model, reuse=True, session=session)
    parking.unpark()
    parking.synchronize()
    assert session.used_bytes[0] > 0
    del model, parking
    settle(session)
    assert session.used_bytes[0] == 0


def swap(weight: Tensor) -> None:
    """Two rows change places, which changes no sum of all elements."""
    weight.data[[0, 1]] = weight.data[[1, 0]]


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: torch.no_grad()(layer.weight.add_)(1),
    "data": lambda layer: layer.weight.data.add_(1),
    "one element of data": lambda layer: layer.weight.data[3, 5].add_(1),
    "the last element of data": lambda layer: layer.weight.data[-1, -1].add_(1),
    "two rows of data": lambda layer: swap(layer.weight),
    "other data": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "inference mode": lambda layer: torch.inference_mode()(layer.weight.add_)(1),
    "a step": lambda layer: stepped(layer, foreach=True),
    "a fused step": lambda layer: stepped(layer, fused=True),
    "a fused SGD step": lambda layer: stepped(layer, torch.optim.SGD, fused=True),
    "raw memory": lambda layer: layer.weight.detach().numpy().__setitem__((1, 1), 7.0),
}


def stepped(layer: nn.Linear, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    kind([layer.weight], lr=0.1, **options).step()  # type: ignore[call-arg]
    layer.weight.grad = None


@pytest.mark.parametrize("width", [16, 160])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_copied_out_again(write: str, width: int, session: spillway.Session) -> None:
    layer = nn.Linear(width, width, bias=False)
    for _ in range(2):
        spillway.park(layer, reuse=True, session=session).unpark()
        WRITES[write](layer)
        wanted = layer.weight.detach().clone()
        if write == "raw memory":
            # Its memory cannot be resized any more: numpy has it.
            break
        with spillway.parked(layer, reuse=True, session=session) as parking:
            assert parking.copied_bytes == parking.nbytes == width * width * 4
        assert torch.equal(layer.weight, wanted)


def test_a_write_that_the_fingerprint_misses_is_seen_by_the_version(session: spillway.Session) -> None:
    layer = nn.Linear(1021, 2, bias=False, dtype=torch.float64)
    spillway.park(layer, reuse=True, session=session).unpark()
    # Two words of one column change places.
    with torch.no_grad():
        layer.weight[:, 0] = layer.weight[:, 0].flip(0)
    wanted = layer.weight.detach().clone()
    with spillway.parked(layer, reuse=True, session=session) as parking:
        assert parking.copied_bytes == parking.nbytes
    assert torch.equal(layer.weight, wanted)


def test_a_copy_that_failed_is_not_used(session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    wanted = layer.weight.detach().clone()
    spillway.park(layer, reuse=True, session=session).unpark()
    layer.weight.data.add_(1)
    store = HostTier.store

    def failing(*args: Any) -> None:
        store(*args)
        raise TransferError("the link")

    with monkeypatch.context() as patch:
        patch.setattr(HostTier, "store", failing)
        with pytest.raises(TransferError, match="the link"):
            spillway.park(layer, reuse=True, session=session)
    # As it was when the copy was made.
    layer.weight.data.copy_(wanted)
    with spillway.parked(layer, reuse=True, session=session) as parking:
        assert parking.copied_bytes == parking.nbytes
    assert torch.equal(layer.weight, wanted)


def test_an_inference_tensor_has_no_version_and_is_copied_each_time(session: spillway.Session) -> None:
    with torch.inference_mode():
        layer = nn.Linear(WIDTH, WIDTH)
        wanted = layer(batch())
        for _ in range(2):
            with spillway.parked(layer, reuse=True, session=session) as parking:
                assert parking.copied_bytes == parking.nbytes > 0
            assert torch.equal(layer(batch()), wanted)


# Kinds of tensors.

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
    *(torch.uint16, torch.uint32, torch.uint64),
]


def buffers_of(dtype: torch.dtype) -> list[Tensor]:
    """Plain, strided, expanded, offset, empty, and scalar ones."""
    plain = torch.arange(24).remainder(7).to(dtype)
    return [
        plain.clone(),
        plain.clone().view(4, 6).t(),
        plain.clone()[:1].expand(5, 1),
        plain.clone()[5:],
        plain.clone()[:0],
        plain.clone()[3],
        plain.clone().view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    ]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout(dtype: torch.dtype, tier: str, session: spillway.Session) -> None:
    model = nn.Module()
    for number, each in enumerate(buffers_of(dtype)):
        model.register_buffer(f"buffer{number}", each)
    strides = [each.stride() for each in model.buffers()]
    for _ in range(2):
        with spillway.parked(model, tier=tier, reuse=True, session=session) as parking:
            assert parking.nbytes == 24 * dtype.itemsize * 7
        # Each use waits for its own.
        assert all(each.clone() is not None for each in model.buffers())
        assert [each.stride() for each in model.buffers()] == strides
        for one, other in zip(model.buffers(), buffers_of(dtype), strict=True):
            assert bytes(one.untyped_storage()) == bytes(other.untyped_storage())


def test_tensors_that_have_no_storage_to_empty_are_left(session: spillway.Session) -> None:
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("meta", torch.empty(3, device="meta"))
    model.register_buffer("foreign", torch.frombuffer(bytearray(16), dtype=torch.uint8))
    model.lazy = nn.LazyLinear(3)
    with spillway.parked(model, session=session) as parking:
        assert parking.nbytes == 0
        assert model.sparse.to_dense().sum() == 3
    assert model.lazy(torch.ones(1, 2)).shape == (1, 3)


class Tagged(Tensor):
    """A subclass with an attribute and a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


calls: list[Any] = []


class Slotted(Tensor):
    __slots__ = ("note",)


@pytest.mark.parametrize("kind", [Tagged, Slotted])
def test_subclasses_keep_their_class_and_their_attributes(kind: type[Tensor], session: spillway.Session) -> None:
    model = nn.Module()
    model.register_buffer("own", torch.ones(4).as_subclass(kind))
    model.own.note = "kept"
    with spillway.parked(model, session=session), pytest.raises(ParkedError, match=r"Module\.own is parked"):
        model.own.sum()
    calls.clear()
    total = model.own.sum()
    assert total == 4 and type(model.own) is kind and model.own.note == "kept"
    assert (len(calls) > 0) == (kind is Tagged)


def quantized(layer: str) -> nn.Module:
    torch.manual_seed(0)
    if layer == "torchao":
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        model = nn.Linear(64, 64).requires_grad_(False)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
        return model
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if layer == "bitsandbytes 4 bits":
        model = library.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4")
    else:
        model = library.nn.Linear8bitLt(64, 64, has_fp16_weights=False)
    return model.requires_grad_(False).to("cpu")  # type: ignore[no-any-return]


@pytest.mark.parametrize("layer", ["torchao", "bitsandbytes 4 bits", "bitsandbytes 8 bits"])
def test_quantized_weights(layer: str, session: spillway.Session) -> None:
    model = nn.Sequential(quantized(layer), nn.Linear(64, 4))
    x = torch.randn(3, 64)
    wanted, kind = model(x), type(model[0].weight)
    for _ in range(2):
        with spillway.parked(model, session=session) as parking:
            assert parking.nbytes >= 64 * 64 // 2
            with pytest.raises(ParkedError):
                model[0](x)
        assert torch.equal(model(x), wanted) and type(model[0].weight) is kind


# Lifetimes.


@pytest.mark.parametrize("cycles", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_many_cycles_leave_nothing(cycles: int, session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    counts, objects = set(), []
    for number in range(cycles):
        with spillway.parked(model, optimizer=optimizer, reuse=number % 2 == 0, session=session):
            pass
        if number % 3 == 0:
            model.layers[0].up(batch())
        if number % 50 == 49:
            gc.collect()
            hooks = sum(len(each._forward_pre_hooks) for each in model.modules()) + len(step_hooks)
            counts.add((session.host_bytes, len(session.of(Parking).returning), hooks))
            objects.append(len(gc.get_objects()))
    assert len(counts) == 1
    # One object of every second cycle would be 75.
    assert max(objects) - min(objects) < 50, objects
    assert same(tensors_of(model, optimizer), wanted)


def test_a_model_that_is_dropped_while_parked_frees_its_copy(session: spillway.Session) -> None:
    model, optimizer = trained()
    parking = spillway.park(model, optimizer=optimizer, session=session)
    assert session.used_bytes[0] > 0
    before = len(step_hooks)
    del model, optimizer, parking
    settle(session)
    assert session.used_bytes[0] == 0 and len(step_hooks) == before - 1


def test_a_model_is_copied_and_pickled_while_its_hooks_are_there(session: spillway.Session) -> None:
    model, _ = trained()
    model.eval()
    spillway.park(model, session=session).unpark()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(batch()), model(batch()))


def test_hooks_and_classes_are_gone_afterwards(session: spillway.Session) -> None:
    model, optimizer = trained()
    before = len(step_hooks)
    parking = spillway.park(model, optimizer=optimizer, session=session)
    parking.unpark()
    parking.synchronize()
    assert not any(each._forward_pre_hooks for each in model.modules()) and len(step_hooks) == before
    assert {type(each) for each in tensors_of(model, optimizer)} == {Tensor, nn.Parameter}
    assert not session.of(Parking).returning


def test_on_the_cpu_nothing_is_copied_and_errors_are_the_same() -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    with spillway.Session() as session:
        with spillway.parked(model, optimizer=optimizer, bytes="1TiB", session=session) as parking:
            assert parking.nbytes == 0
        with spillway.parked(model, optimizer=optimizer, session=session) as parking:
            assert parking.nbytes == 0 and session.used_bytes == (0, 0)
            with pytest.raises(ParkedError, match="the forward of Model"):
                model(batch())
            with pytest.raises(ParkedError, match="the step of AdamW"):
                optimizer.step()
            for models, options in (((model,), {}), ((), {"optimizer": optimizer})):
                with pytest.raises(UsageError, match="is parked already"):
                    spillway.park(*models, session=session, **options)  # type: ignore[arg-type]
            with spillway.parked(model, nn.Linear(1, 1), session=session):
                pass
        assert not any(each._forward_pre_hooks for each in model.modules())
        model(batch())
        optimizer.step()
        parking.synchronize()
    assert not same(tensors_of(model, optimizer), wanted)
    assert not any(each._forward_pre_hooks for each in model.modules())


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((), {}, "got nothing"),
        ((3,), {}, "models: got 3"),
        ((nn.Linear(1, 1),), {"optimizer": 3}, "optimizer: got"),
        ((nn.Linear(1, 1),), {"optimizer": [3]}, "optimizer: got \\[3\\]"),
        ((nn.Linear(1, 1),), {"tier": "tape"}, "tier: got 'tape'"),
        ((nn.Linear(1, 1),), {"bytes": "much"}, "bytes: got 'much'"),
        ((nn.Linear(1, 1),), {"session": 3}, "session: got 3"),
    ],
)
def test_wrong_arguments(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        spillway.park(*arguments, **options)
