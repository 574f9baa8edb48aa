"""Training that is resumed from a saved state goes on bit for bit as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Module
from torch.optim import Optimizer

import spillway
from optim.support import (
    CLASSES,
    Make,
    assert_same_state,
    assert_same_values,
    batches,
    closed,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    saved,
    train,
    wide,
)

Class = type[Optimizer]


def interrupted(first: Make, second: Make, dtype: torch.dtype, steps: tuple[int, int] = (2, 2)) -> tuple[Module, Any]:
    """A model that is trained, saved, and trained on from what was saved."""
    data = batches(sum(steps), dtype)
    model = wide(dtype)
    optimizer = first(model)
    train(model, optimizer, data[: steps[0]])
    weights, state = saved(model.state_dict()), saved(optimizer.state_dict())
    resumed = wide(dtype, seed=5)
    other = second(resumed)
    # It has stepped before: its own state must be forgotten.
    train(resumed, other, batches(1, dtype, seed=9))
    resumed.load_state_dict(weights)
    other.load_state_dict(state)
    train(resumed, other, data[steps[0] :])
    return resumed, other


@CLASSES
@pytest.mark.parametrize("way", ["ours to plain", "plain to ours", "ours to ours"])
@pytest.mark.parametrize("session", ["adversary"], indirect=True)
def test_resume_is_as_if_never_stopped(
    optimizer_class: Class, defaults: dict[str, Any], way: str, session: spillway.Session
) -> None:
    # All of them are told the implementation, since the plain class takes another one where it is not told.
    plain = plainly(optimizer_class, **defaults)
    how = {"fused": True} if optimizer_class in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad) else {}
    ours = offloaded(optimizer_class, session, **defaults, **(how or {"foreach": False}))
    never, reference = wide(), None
    reference = plain(never)
    train(never, reference, batches(4))
    first, second = {"ours to plain": (ours, plain), "plain to ours": (plain, ours), "ours to ours": (ours, ours)}[way]
    model, optimizer = interrupted(first, second, torch.float32)
    assert_same_values(model, never)
    assert_same_state(optimizer.state_dict(), reference.state_dict())


@CLASSES
@pytest.mark.parametrize("fraction", [1.0, 0.0])
@pytest.mark.parametrize("session", ["adversary"], indirect=True)
def test_resume_in_a_narrow_type_without_masters(
    optimizer_class: Class, defaults: dict[str, Any], fraction: float, session: spillway.Session
) -> None:
    how = {} if optimizer_class is torch.optim.AdamW else {"foreach": False}
    ours = offloaded(optimizer_class, session, fraction=fraction, master_dtype=None, **defaults, **how)
    never = wide(torch.bfloat16)
    reference = ours(never)
    train(never, reference, batches(4, torch.bfloat16))
    model, optimizer = interrupted(ours, ours, torch.bfloat16)
    assert_same_values(model, never)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()
    reference.close()


@pytest.mark.parametrize("before", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("after", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("session", ["adversary"], indirect=True)
def test_masters_are_saved_and_loaded_in_either_order(
    before: float, after: float, weights_first: bool, session: spillway.Session
) -> None:
    dtype = torch.bfloat16
    never = wide(dtype)
    reference = offloaded(torch.optim.AdamW, session, fused=True, lr=1e-2)(never)
    train(never, reference, batches(4, dtype))
    model = wide(dtype)
    optimizer = offloaded(torch.optim.AdamW, session, fused=True, fraction=before, lr=1e-2)(model)
    train(model, optimizer, batches(4, dtype)[:2])
    weights, state = saved(model.state_dict()), saved(optimizer.state_dict())
    resumed = wide(dtype, seed=5)
    other = offloaded(torch.optim.AdamW, session, fused=True, fraction=after, lr=1e-2)(resumed)
    train(resumed, other, batches(2, dtype, seed=9))
    if weights_first:
        resumed.load_state_dict(weights)
    other.load_state_dict(state)
    if not weights_first:
        resumed.load_state_dict(weights)
    train(resumed, other, batches(4, dtype)[2:])
    assert_same_values(resumed, never)
    assert_same_state(other.state_dict(), reference.state_dict())
    assert all("master" in values for values in other.state.values())
    for one in (reference, optimizer, other):
        one.close()
    assert session.used_bytes == (0, 0)


def test_masters_that_contradict_the_weights_are_not_taken(session: spillway.Session) -> None:
    dtype = torch.bfloat16
    model = wide(dtype)
    optimizer = offloaded(torch.optim.SGD, session, lr=0.1)(model)
    train(model, optimizer, batches(2, dtype))
    state = saved(optimizer.state_dict())
    other = wide(dtype, seed=5)
    loaded = offloaded(torch.optim.SGD, session, lr=0.1)(other)
    loaded.load_state_dict(state)
    plain = wide(dtype, seed=5)
    reference = offloaded(torch.optim.SGD, session, lr=0.1)(plain)
    train(other, loaded, batches(1, dtype))
    train(plain, reference, batches(1, dtype))
    # Those of the norms begin as ones in both, and say so.
    assert same_bits(other.first.weight, plain.first.weight)
    assert same_bits(loaded.state[other.first.weight]["master"], reference.state[plain.first.weight]["master"])
    for one in (optimizer, loaded, reference):
        one.close()


@pytest.mark.parametrize("fraction", [1.0, 0.0])
def test_masters_that_a_state_does_not_have_are_taken_from_the_parameters(
    fraction: float, session: spillway.Session
) -> None:
    dtype = torch.bfloat16
    plain = wide(dtype)
    reference = plainly(torch.optim.AdamW, lr=1e-2)(plain)
    train(plain, reference, batches(2, dtype))
    results = []
    for before in (0, 2):
        model = wide(dtype, seed=3)
        optimizer = offloaded(torch.optim.AdamW, session, lr=1e-2, fraction=fraction, fused=True)(model)
        # Masters of its own, which say more than the parameters, and the same at first sight.
        model.load_state_dict(plain.state_dict())
        for group in optimizer.param_groups:
            group["lr"] = 1e-5
        train(model, optimizer, batches(before, dtype, seed=4))
        optimizer.load_state_dict(saved(reference.state_dict()))
        model.load_state_dict(plain.state_dict())
        train(model, optimizer, batches(1, dtype))
        results.append([optimizer.state[one]["master"].clone() for one in model.parameters()])
        optimizer.close()
    assert_same_values(results[1], results[0])


def test_the_plain_class_steps_on_from_a_state_with_masters(session: spillway.Session) -> None:
    dtype = torch.bfloat16
    model = wide(dtype)
    optimizer = offloaded(torch.optim.AdamW, session, lr=1e-2, fused=True)(model)
    train(model, optimizer, batches(2, dtype))
    plain = wide(dtype)
    plain.load_state_dict(model.state_dict())
    reference = plainly(torch.optim.AdamW, lr=1e-2)(plain)
    reference.load_state_dict(saved(optimizer.state_dict()))
    train(plain, reference, batches(2, dtype))
    assert torch.allclose(plain.first.weight.float(), model.first.weight.float(), atol=0.1)
    optimizer.close()


@pytest.mark.parametrize("numel", [64, 128])
def test_states_of_pieces(numel: int, pieces_of: Callable[[int], None], session: spillway.Session) -> None:
    never = wide()
    reference = plainly(torch.optim.AdamW, amsgrad=True)(never)
    train(never, reference, batches(4))
    pieces_of(numel)
    ours = offloaded(torch.optim.AdamW, session, amsgrad=True, fused=True)
    for first, second in ((ours, ours), (ours, plainly(torch.optim.AdamW, amsgrad=True))):
        model, optimizer = interrupted(first, second, torch.float32)
        assert_same_values(model, never)
        assert_same_state(optimizer.state_dict(), reference.state_dict())
        closed(optimizer)


def test_loading_while_gradients_are_away(session: spillway.Session) -> None:
    models = wide(), wide()
    optimizers = plainly(torch.optim.RMSprop)(models[0]), offloaded(torch.optim.RMSprop, session)(models[1])
    data = batches(4)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, data[:1])
        weights, state = saved(model.state_dict()), saved(optimizer.state_dict())
        train(model, optimizer, data[1:2])
        loss_of(model, data[2]).backward()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, data[3:])
    assert_same_values(models[1], models[0])
    assert_same_state(optimizers[1].state_dict(), optimizers[0].state_dict())
    closed(optimizers[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_states_of_distributed_checkpoints(dtype: torch.dtype, flat: bool, session: spillway.Session) -> None:
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    never = wide(dtype)
    reference = offloaded(torch.optim.AdamW, session, lr=1e-2)(never)
    train(never, reference, batches(4, dtype))
    model = wide(dtype)
    optimizer = offloaded(torch.optim.AdamW, session, lr=1e-2)(model)
    train(model, optimizer, batches(4, dtype)[:2])
    state = saved(get_optimizer_state_dict(model, optimizer, options=options))
    resumed = wide(dtype, seed=5)
    other = offloaded(torch.optim.AdamW, session, lr=1e-3)(resumed)
    resumed.load_state_dict(saved(model.state_dict()))
    set_optimizer_state_dict(resumed, other, state, options=options)
    train(resumed, other, batches(4, dtype)[2:])
    assert_same_values(resumed, never)
    assert_same_state(other.state_dict(), reference.state_dict())
    for one in (reference, optimizer, other):
        one.close()
