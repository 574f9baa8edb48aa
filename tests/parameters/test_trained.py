"""Streamed parameters that an optimizer steps: the bits of a resident model with the same optimizer.

The device is the adversary's: a copy is done as late as its events allow, and a use before it is an error.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from adapted import FeedForward
from runtime.scenarios import adversary_session
from spillway import policies
from spillway.errors import InplaceError, TierFullError, UsageError
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.parameters.streamable import trainer_of
from spillway.saved_tensors.identity import is_streamed
from support import assert_nothing_left

WIDTH, BLOCKS = 16, 3
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "on the CPU": {"step_on": "cpu"},
    "on the GPU": {"step_on": "gpu"},
    "on both": {"step_on": "auto", "cpu_share": 0.5},
    "on the disk": {"tier": "disk"},
}


class Model(nn.Module):
    """Its blocks are called several times if you say so."""

    def __init__(self, dtype: torch.dtype = torch.float32, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.times = times
        self.inputs = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(FeedForward() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x.to(self.inputs.weight.dtype))
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        y: Tensor = self.head(x)
        return y


def loss_of(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(torch.randn(6, 4)).float().square().mean()
    return loss


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Copies of all parameters, and of all tensors of the optimizer's state."""
    states = optimizer.state_dict()["state"].values()
    tensors = [*model.state_dict().values(), *(value for each in states for value in each.values())]
    return [each.detach().clone() for each in tensors if isinstance(each, Tensor)]


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 3,
    micro: int = 2,
    together: bool = False,
    max_norm: float | None = None,
    reads_gradients: bool = True,
) -> list[Tensor]:
    """Losses, gradients, norms, and parameters and states in the end. ``together``: one backward for all losses."""
    found: list[Tensor] = []
    for step in range(steps):
        losses = []
        for number in range(micro):
            losses.append(loss_of(model, 10 * step + number))
            if not together:
                losses[-1].backward()
        if together:
            torch.stack(losses).sum().backward()
        found += [each.detach().clone() for each in losses]
        if reads_gradients:
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        if max_norm is not None:
            found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *state_of(model, optimizer)]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@contextmanager
def optimized(model: nn.Module, **options: Any) -> Iterator[tuple[Any, spillway.Session]]:
    """The model's optimizer under the adversary."""
    with adversary_session(window=1 << 14) as (_, session):
        more = {**ADAMW, "session": session, **options}
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), more.pop("optimizer_class", torch.optim.AdamW), **more
        )
        try:
            yield optimizer, session
        finally:
            optimizer.close()
            del optimizer
            gc.collect()


@contextmanager
def streamed(
    model: nn.Module, *, policy: Any = None, overlaps: bool = False, **options: Any
) -> Iterator[tuple[Any, spillway.Attached, spillway.Session]]:
    """The same with streamed blocks. In the end nothing is left."""
    with optimized(model, **options) as (optimizer, session):
        attached = attach(model, optimizer, session, policy)
        if overlaps:
            optimizer.overlap_forward(model)
        try:
            yield optimizer, attached, session
        finally:
            attached.remove()
            assert not any(map(is_streamed, model.parameters()))
        optimizer.close()
        gc.collect()
        assert_nothing_left(session)


def attach(model: nn.Module, optimizer: Any, session: spillway.Session, policy: Any = None) -> spillway.Attached:
    how = spillway.Recompute() if policy is None else policy
    attached = spillway.attach(
        model, session=session, stream="layers.*", min_bytes=0, policy=how, optimizer=optimizer, device="cpu"
    )
    assert attached.streamed == tuple(f"layers.{number}" for number in range(BLOCKS))
    assert sum(map(is_streamed, model.parameters())) == 6 * BLOCKS
    return attached


def resident(
    make: Callable[[], nn.Module], *, overlaps: bool = False, loop: dict[str, Any], **options: Any
) -> list[Tensor]:
    model = make()
    with optimized(model, **options) as (optimizer, _):
        if overlaps:
            optimizer.overlap_forward(model)
        return train(model, optimizer, **loop)


POLICIES: dict[str, Any] = {
    "recomputed": lambda: spillway.Recompute(),
    "matmuls kept": lambda: spillway.Recompute(save="matmul"),
    "reentrant": lambda: spillway.Recompute(use_reentrant=True),
    "offloaded": lambda: policies.Offload(),
    "kept": lambda: policies.Keep(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.covered(times=2)
def test_a_run_has_the_bits_of_a_resident_model(dtype: torch.dtype, policy: str, way: str) -> None:
    loop = {"max_norm": 0.1}
    wanted = resident(lambda: Model(dtype), loop=loop, **WAYS[way])
    model = Model(dtype)
    with streamed(model, policy=POLICIES[policy](), **WAYS[way]) as (optimizer, _, _):
        assert same(train(model, optimizer, **loop), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.covered
def test_steps_in_the_next_forward(dtype: torch.dtype, way: str) -> None:
    loop = {"max_norm": 0.1, "steps": 4}
    wanted = resident(lambda: Model(dtype), loop=loop, overlaps=True, **WAYS[way])
    model = Model(dtype)
    with streamed(model, overlaps=True, **WAYS[way]) as (optimizer, _, _):
        assert same(train(model, optimizer, **loop), wanted)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "on the disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times", [1, 2])
def test_steps_in_backward(monkeypatch: pytest.MonkeyPatch, times: int, dtype: torch.dtype, way: str) -> None:
    # A block's parameters step before the backward of the next block.
    monkeypatch.setattr("spillway.optim.state_store._TOGETHER", 1000)
    monkeypatch.setattr("spillway.optim.state_store._LEAST", 256)
    loop = {"micro": 1, "reads_gradients": False, "steps": 4}
    wanted = resident(lambda: Model(dtype, times), loop=loop, step_in_backward=True, **WAYS[way])
    model = Model(dtype, times)
    with streamed(model, step_in_backward=True, **WAYS[way]) as (optimizer, _, _):
        assert same(train(model, optimizer, **loop), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["recomputed", "reentrant", "kept"])
@pytest.mark.parametrize(("times", "together"), [(2, False), (2, True), (1, True)])
@pytest.mark.covered(times=2)
def test_several_calls_of_a_block_in_one_backward(times: int, together: bool, policy: str, way: str) -> None:
    loop = {"together": together, "micro": 3, "max_norm": 0.1}
    wanted = resident(lambda: Model(torch.bfloat16, times), loop=loop, **WAYS[way])
    model = Model(torch.bfloat16, times)
    with streamed(model, policy=POLICIES[policy](), **WAYS[way]) as (optimizer, _, _):
        got = train(model, optimizer, **loop)
    assert same(got, wanted)
    if policy == "reentrant":
        return
    # The sum of two gradients in bfloat16 is not that in float32: the test can tell.
    apart = resident(lambda: Model(torch.bfloat16, times), loop={**loop, "together": False}, **WAYS[way])
    assert times == 2 or not same(apart, wanted)


def test_several_calls_of_a_block_step_in_backward() -> None:
    loop = {"micro": 1, "reads_gradients": False}
    options = {"step_on": "gpu", "step_in_backward": True}
    wanted = resident(lambda: Model(torch.bfloat16, 2), loop=loop, **options)
    model = Model(torch.bfloat16, 2)
    with streamed(model, **options) as (optimizer, _, _):
        assert same(train(model, optimizer, **loop), wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moves", [False, True], ids=["stays on its device", "moves to another device"])
@pytest.mark.covered
def test_attached_and_removed_between_steps(moves: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of(model: nn.Module, optimizer: Any, change: Callable[[int], None]) -> list[Tensor]:
        found = []
        for number in range(4):
            found += train(model, optimizer, steps=1)
            change(0)
            loss_of(model, 100 + number).backward()
            # A gradient is there when the parameters go back.
            change(1)
        return found

    model = Model(torch.bfloat16)
    with optimized(model, **WAYS[way]) as (optimizer, _):
        wanted = all_of(model, optimizer, lambda _: None)
    model = Model(torch.bfloat16)
    with optimized(model, **WAYS[way]) as (optimizer, session):
        attached: list[spillway.Attached] = []

        def change(number: int) -> None:
            # As if the CPU were another device than the one of the model.
            monkeypatch.setattr("spillway.optim.moves.has_moved", lambda held: moves)
            if number:
                attached.pop().remove()
                assert not any(map(is_streamed, model.parameters()))
            else:
                attached.append(attach(model, optimizer, session))

        assert same(all_of(model, optimizer, change), wanted)


def test_two_models_of_one_optimizer() -> None:
    def all_of(models: list[nn.Module], optimizer: Any, change: Callable[[int], None]) -> list[Tensor]:
        found = []
        for step in range(4):
            for number, model in enumerate(models):
                loss = loss_of(model, 10 * step + number)
                loss.backward()
                found.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.synchronize()
                change(0)
        optimizer.synchronize()
        return [*found, *(each.detach().clone() for model in models for each in model.parameters())]

    def both(*, is_streamed: bool) -> list[Tensor]:
        models: list[nn.Module] = [Model(torch.bfloat16), Model(torch.bfloat16)]
        with adversary_session(window=1 << 14) as (_, session):
            parameters = [each for model in models for each in model.parameters()]
            optimizer = spillway.OffloadedOptimizer(
                parameters, torch.optim.AdamW, step_on="gpu", session=session, **ADAMW
            )
            for model in models:
                optimizer.overlap_forward(model)
            attached = [attach(model, optimizer, session) for model in models if is_streamed]
            found = all_of(models, optimizer, lambda _: attached[0].remove() if attached else None)
            for each in attached:
                each.remove()
            optimizer.close()
        return found

    assert same(both(is_streamed=True), both(is_streamed=False))


def test_a_removal_that_is_refused_may_be_repeated() -> None:
    model = Model(torch.bfloat16)
    with optimized(model, step_on="gpu", step_in_backward=True) as (optimizer, session):
        attached = attach(model, optimizer, session)
        train(model, optimizer, micro=1, reads_gradients=False)
        loss_of(model, 0).backward()
        with pytest.raises(UsageError, match="between a backward and its step"):
            attached.remove()
        assert any(map(is_streamed, model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, micro=1, reads_gradients=False)
        attached.remove()
        assert not any(map(is_streamed, model.parameters()))


def test_a_session_that_was_closed_first() -> None:
    model = Model()
    with adversary_session(window=1 << 14) as (_, session):
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW)
        attached = attach(model, optimizer, session)
        train(model, optimizer)
        wanted = [each.detach().clone() for each in model.parameters()]
        session.close()
        attached.remove()
        assert not any(map(is_streamed, model.parameters()))
        assert same([each.detach() for each in model.parameters()], wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_inside_of_a_block_is_refused(way: str) -> None:
    model = Model(torch.bfloat16)
    with streamed(model, **WAYS[way]) as (optimizer, _, _):
        loss_of(model, 0).backward()
        inner: Any = model.layers[1].first  # type: ignore[union-attr,index]
        hook = inner.register_forward_hook(lambda *_: optimizer.step())
        before = [each.detach().clone() for each in model.parameters()]
        with torch.no_grad(), pytest.raises(UsageError, match="inside of a call of its block"):
            loss_of(model, 1)
        hook.remove()
        assert same([each.detach() for each in model.parameters()], before)
        optimizer.zero_grad()
        train(model, optimizer, steps=1)


def test_misuse_while_parameters_are_streamed() -> None:
    model = Model()
    with streamed(model) as (optimizer, attached, session):
        with pytest.raises(UsageError, match="streamed"):
            optimizer.divide(0.5)
        loss_of(model, 0).backward()
        attached.remove()
        with pytest.raises(UsageError, match="gradients"):
            attach(model, optimizer, session)


@pytest.mark.parametrize("budget", range(210, 330, 30))
def test_too_little_memory_for_states_leaves_all_as_it_was(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = resident(Model, loop={"steps": 2}, step_on="gpu")
    model = Model()
    with adversary_session(window=1 << 14, host_budget=budget << 10) as (_, session):
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, step_on="gpu", session=session, **ADAMW
        )
        train(model, optimizer, steps=1)
        monkeypatch.setattr("spillway.optim.moves.has_moved", lambda held: True)
        try:
            attach(model, optimizer, session).remove()
        except TierFullError:
            assert not any(map(is_streamed, model.parameters()))
        for number in range(2):
            loss_of(model, 10 + number).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert same(state_of(model, optimizer), wanted[-len(state_of(model, optimizer)) :])
        optimizer.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.covered
def test_parameters_are_read_and_written_between_steps(overlaps: bool, way: str) -> None:
    def all_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
        found, average = [], copy.deepcopy(model).requires_grad_(False)
        for step in range(3):
            found += train(model, optimizer, steps=1)
            found.append(loss_of(copy.deepcopy(model).eval(), 5).detach())
            with torch.no_grad():
                for mean, each in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(each, 0.5)
                for layer in model.layers:  # type: ignore[union-attr]
                    layer.first.weight.data.clamp_(-0.2, 0.2)
            if step == 1:
                model.load_state_dict(average.state_dict())
                optimizer.load_state_dict(optimizer.state_dict())
        return [*found, *(each.clone() for each in average.parameters())]

    model = Model(torch.bfloat16)
    with optimized(model, **WAYS[way]) as (optimizer, _):
        wanted = all_of(model, optimizer)
    model = Model(torch.bfloat16)
    # train() ends with a state dict, which waits for an overlapped step.
    with streamed(model, overlaps=overlaps, **WAYS[way]) as (optimizer, _, _):
        assert same(all_of(model, optimizer), wanted)


def test_gradients_stand_on_the_device_and_are_offloaded() -> None:
    model = Model()
    with streamed(model) as (optimizer, _, _):
        loss_of(model, 0).backward()
        assert all(isinstance(each.grad, OffloadedGradient) for each in model.layers.parameters())
        optimizer.zero_grad()
        assert all(each.grad is None for each in model.parameters())


def test_the_accumulator_steps_in_backward() -> None:
    def all_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
        accumulator = spillway.Accumulator(model, optimizer, steps=2, normalize="tokens")
        found = []
        for step in range(3):
            for number in range(2):
                with accumulator.micro(weight=3 + number):
                    loss = loss_of(model, 10 * step + number)
                    accumulator.backward(loss)
                found.append(loss.detach())
            accumulator.step()
        return [*found, *state_of(model, optimizer)]

    options = {"step_on": "gpu", "step_in_backward": True}
    model = Model(torch.bfloat16)
    with optimized(model, **options) as (optimizer, _):
        wanted = all_of(model, optimizer)
    model = Model(torch.bfloat16)
    with streamed(model, **options) as (optimizer, _, _):
        assert same(all_of(model, optimizer), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_scaler_skips_a_step(way: str) -> None:
    def all_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(4):
            loss = loss_of(model, step) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [torch.tensor(scaler.get_scale()), *state_of(model, optimizer)]

    model = Model()
    with optimized(model, **WAYS[way]) as (optimizer, _):
        wanted = all_of(model, optimizer)
    model = Model()
    with streamed(model, **WAYS[way]) as (optimizer, _, _):
        assert same(all_of(model, optimizer), wanted)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
@pytest.mark.parametrize("way", ["on the CPU", "on the GPU"])
def test_other_classes(way: str, optimizer_class: Any) -> None:
    options = {**WAYS[way], "optimizer_class": optimizer_class, "weight_decay": 0.01}
    wanted = resident(Model, loop={}, **options)
    model = Model()
    with streamed(model, **options) as (optimizer, _, _):
        assert same(train(model, optimizer), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_after_the_step_is_refused(way: str) -> None:
    model = Model()
    with streamed(model, policy=policies.Keep(), **WAYS[way]) as (optimizer, _, _):
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises((InplaceError, RuntimeError), match=r"modified|written|version"):
            loss.backward()
        del loss
        optimizer.zero_grad()


def reads_in_the_loss(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """A weight penalty reads parameters at rest."""
    for step in range(3):
        penalty = torch.stack([each.float().square().sum() for each in model.parameters()]).sum()
        (loss_of(model, step) + 0.01 * penalty).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


def uses_gradients_alone(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """``torch.autograd.grad``, ``backward(inputs=)``, and two losses of one forward."""
    found = list(torch.autograd.grad(loss_of(model, 0), list(model.parameters())))
    for step in range(3):
        loss_of(model, step).backward(inputs=list(model.layers[1].parameters()))  # type: ignore[union-attr,index]
        loss = loss_of(model, 10 + step)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *state_of(model, optimizer)]


def hooks_gradients(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Hooks that are not linear, and such that see the accumulated gradient."""
    found: list[Tensor] = []
    weight: Any = model.layers[1].first.weight  # type: ignore[union-attr,index]
    hooks = [
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
        weight.register_post_accumulate_grad_hook(lambda parameter: found.append(parameter.grad.clone())),
    ]
    found += train(model, optimizer)
    for hook in hooks:
        hook.remove()
    return found


def leaves_forwards_without_backward(model: nn.Module, optimizer: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for step in range(3):
        loss_of(model, step)
        found += train(model, optimizer, steps=1)
    return found


def fails_in_backward(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Micro-batches before and after one that fails, with and without ``zero_grad``."""

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    for step in range(4):
        loss_of(model, step).backward()
        hook = model.layers[0].first.weight.register_hook(fail)  # type: ignore[union-attr,index]
        with pytest.raises(ArithmeticError):
            loss_of(model, 50).backward()
        hook.remove()
        if step % 2:
            optimizer.zero_grad()
        loss_of(model, 10 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "loop",
    [
        reads_in_the_loss,
        uses_gradients_alone,
        hooks_gradients,
        leaves_forwards_without_backward,
        fails_in_backward,
    ],
)
def test_loops_that_do_more_than_step(loop: Callable[[nn.Module, Any], list[Tensor]], way: str, times: int) -> None:
    model = Model(torch.bfloat16, times)
    with optimized(model, **WAYS[way]) as (optimizer, _):
        wanted = loop(model, optimizer)
    model = Model(torch.bfloat16, times)
    with streamed(model, policy=policies.Keep(), **WAYS[way]) as (optimizer, _, _):
        assert same(loop(model, optimizer), wanted)


@pytest.mark.parametrize("times", [1, 2])
def test_training_goes_on_after_a_backward_that_failed(times: int) -> None:
    def all_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
        for step in range(3):

            def fail(gradient: Tensor) -> None:
                raise ArithmeticError

            hook = model.layers[0].first.weight.register_hook(fail)  # type: ignore[union-attr,index]
            with pytest.raises(ArithmeticError):
                loss_of(model, 50).backward()
            hook.remove()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model, optimizer)

    model = Model(times=times)
    with optimized(model, step_on="gpu") as (optimizer, _):
        wanted = all_of(model, optimizer)
    model = Model(times=times)
    with streamed(model, step_on="gpu") as (optimizer, _, _):
        assert same(all_of(model, optimizer), wanted)


def test_another_optimizer_goes_on_after_one_was_closed() -> None:
    def all_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
        train(model, optimizer, steps=1)
        loss_of(model, 0).backward()
        optimizer.close()
        other = torch.optim.SGD(model.parameters(), lr=0.1)
        other.step()
        other.zero_grad()
        return train(model, other, steps=2)

    model = Model()
    with optimized(model) as (optimizer, _):
        wanted = all_of(model, optimizer)
    model = Model()
    with streamed(model) as (optimizer, _, _):
        assert same(all_of(model, optimizer), wanted)


def test_a_model_whose_optimizer_is_gone_is_detached() -> None:
    model = Model()
    with adversary_session(window=1 << 14) as (_, session):
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW)
        attached = attach(model, optimizer, session)
        train(model, optimizer, steps=1)
        wanted = [each.detach().clone() for each in model.parameters()]
        loss_of(model, 0).backward()
        assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
        del optimizer
        gc.collect()
        attached.remove()
        assert not any(map(is_streamed, model.parameters()))
        assert same([each.detach() for each in model.parameters()], wanted)


def test_too_little_memory_leaves_all_as_it_was() -> None:
    wanted = resident(Model, loop={})
    model = Model()
    with adversary_session(window=1 << 14, host_budget=1 << 16) as (_, session):
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, session=session, **ADAMW)
        with pytest.raises(TierFullError):
            spillway.attach(model, session=session, stream="layers.*", min_bytes=0, optimizer=optimizer)
        assert not any(map(is_streamed, model.parameters()))
        assert same(train(model, optimizer), wanted)
        optimizer.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 0.5}, "fraction"),
        ({"device_budget": "1KiB"}, "device_budget"),
    ],
)
def test_optimizers_that_keep_something_on_the_gpu_are_refused(options: dict[str, Any], words: str) -> None:
    model = Model()
    with optimized(model, **options) as (optimizer, session), pytest.raises(UsageError, match=words):
        attach(model, optimizer, session)
    assert not any(map(is_streamed, model.parameters()))


def test_other_optimizers_are_refused() -> None:
    model = Model()
    with pytest.raises(UsageError, match="OffloadedOptimizer"):
        spillway.attach(model, stream="layers.*", optimizer=torch.optim.AdamW(model.parameters()), device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_first", [False, True])
def test_of_several_optimizers_the_one_with_most_of_the_model_is_found(is_first: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    blocks, head = (spillway.OffloadedOptimizer(each.parameters(), torch.optim.SGD, lr=0.1) for each in model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = (blocks, head, plain) if is_first else (plain, head, blocks)
    assert trainer_of(model, optimizers) is blocks
    assert trainer_of(model, (plain, head)) is head
    assert trainer_of(nn.Linear(2, 2), optimizers) is None
    blocks.close()
    head.close()
