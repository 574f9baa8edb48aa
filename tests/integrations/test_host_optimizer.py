"""The optimizer on the host over two ranks: DDP, FSDP2, tensor parallel; the bits of the same class, plainly."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import spillway
from integrations.ranks import World
from integrations.test_fsdp import replicated, sharded
from integrations.test_tensor_parallel import parallel
from integrations.training import LENGTH, ROWS, TOKENS, Block, Model, local
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.optim.tensors import local_of

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]

STEPS, MICRO = 3, 2
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
# Torch's fused and foreach kernels take no mixture of DTensors and plain ones.
LOOP = {**ADAMW, "fused": False, "foreach": False}
Built = tuple[nn.Module, Model]


def fsdp(**options: Any) -> Built:
    return sharded(Model(), **options)


def ddp(**options: Any) -> Built:
    return replicated(Model(), **options)


def tensor_parallel(**options: Any) -> Built:
    return parallel(Block, **options)


MODELS: dict[str, tuple[Callable[..., Built], dict[str, Any]]] = {
    "fsdp": (fsdp, {}),
    "fsdp that stays": (fsdp, {"reshard_after_forward": False}),
    "hsdp": (fsdp, {"mesh": (2, 1)}),
    "ddp": (ddp, {}),
    "ddp, gradients as views": (ddp, {"gradient_as_bucket_view": True}),
    "tensor parallel": (tensor_parallel, {}),
    "tensor parallel and fsdp": (tensor_parallel, {"shard": True}),
}


def last_only(model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced in the last micro-batch."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:
        return model.no_sync()  # type: ignore[no-any-return]
    return nullcontext()


def train(built: Built, optimizer: torch.optim.Optimizer, max_norm: float | None, *, accumulate: bool) -> list[Any]:
    model, inner = built
    torch.manual_seed(dist.get_rank() if not hasattr(inner, "mesh") else 0)
    found: list[Any] = []
    for _ in range(STEPS):
        for micro in range(MICRO):
            tokens = torch.randint(TOKENS, (ROWS, LENGTH + 1))
            with last_only(model, last=accumulate or micro == MICRO - 1):
                logits = model(tokens[:, :-1])
                functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(inner.parameters(), max_norm)
            found.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(local(parameter).detach().clone() for parameter in inner.parameters())]


def case(name: str, max_norm: float | None, accumulate: bool, **given: Any) -> list[float]:
    """Gives 1 for each held parameter that the CPU steps, else 0."""
    make, options = MODELS[name]
    settings = LOOP if name == "tensor parallel" else ADAMW
    torch.manual_seed(0)
    plain = make(**options)
    expected = train(plain, torch.optim.AdamW(plain[1].parameters(), **settings), max_norm, accumulate=accumulate)
    torch.manual_seed(0)
    built = make(**options)
    optimizer = spillway.OffloadedOptimizer(built[1].parameters(), torch.optim.AdamW, **given, **settings)
    got = train(built, optimizer, max_norm, accumulate=accumulate)
    places = [float(not one.store.steps_on_device) for one in optimizer._placement.held.values()]
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
    for parameter in built[1].parameters():
        state = optimizer.state[parameter]
        assert type(state["exp_avg"]) is type(parameter.data) or not hasattr(parameter, "placements")
        assert local_of(state["exp_avg"]).shape == local_of(parameter).shape
    optimizer.close()
    return places


@pytest.mark.parametrize("accumulate", [False, True], ids=["reduced last", "reduced each time"])
@pytest.mark.parametrize("max_norm", [None, 0.05], ids=["as they are", "clipped"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_over_two_ranks_is_the_plain_one(
    world: World, name: str, max_norm: float | None, accumulate: bool
) -> None:
    if max_norm is not None and name.startswith("tensor parallel"):
        pytest.skip("torch takes no norm over parameters of several meshes, or of none")
    world.run(case, name, max_norm, accumulate)


def split(name: str, max_norm: float | None) -> list[float]:
    return case(name, max_norm, accumulate=False, step_on="auto", cpu_share=0.5)


@pytest.mark.parametrize(("name", "max_norm"), [("fsdp", 0.05), ("ddp", 0.05), ("tensor parallel", None)])
def test_steps_on_the_cpu_and_on_the_gpu_are_the_plain_ones(world: World, name: str, max_norm: float | None) -> None:
    places, others = world.run(split, name, max_norm)
    assert set(places) == {0.0, 1.0}
    assert places == others


def measured() -> float:
    """The share of the CPU on ranks without a GPU, where nothing has to be measured."""
    model, inner = ddp()
    optimizer = spillway.OffloadedOptimizer(inner.parameters(), torch.optim.AdamW, step_on="auto")
    model(torch.randint(TOKENS, (ROWS, LENGTH))).square().mean().backward()
    optimizer.step()
    share = optimizer.cpu_share
    optimizer.close()
    return share


def test_ranks_without_a_gpu_measure_no_share(world: World) -> None:
    assert world.run(measured) == [1.0, 1.0]


def leaving(name: str) -> tuple[int, int]:
    make, options = MODELS[name]
    model, inner = make(**options)
    optimizer = spillway.OffloadedOptimizer(inner.parameters(), torch.optim.SGD, lr=0.1)
    tokens = torch.randint(TOKENS, (ROWS, LENGTH))
    model(tokens).square().mean().backward()
    away = sum(isinstance(local_of(one.grad), OffloadedGradient) for one in inner.parameters() if one.grad is not None)
    optimizer.step()
    optimizer.close()
    return away, len(list(inner.parameters()))


@pytest.mark.parametrize("name", ["fsdp", "tensor parallel"])
def test_sharded_gradients_leave_in_backward(world: World, name: str) -> None:
    for away, parameters in world.run(leaving, name):
        assert 0 < away <= parameters


def test_replicated_gradients_stay_until_the_step_since_they_may_have_to_be_reduced_yet(world: World) -> None:
    for away, _ in world.run(leaving, "ddp"):
        assert away == 0


def divided(name: str, dtype: torch.dtype) -> None:
    """States move between CPU and GPU, and stay distributed as the parameters are."""
    make, options = MODELS[name]
    found = []
    for fractions in ((1.0, 1.0, 1.0), (0.0, 0.5, 1.0)):
        torch.manual_seed(0)
        built = make(**options)
        built[1].to(dtype)
        optimizer = spillway.OffloadedOptimizer(built[1].parameters(), torch.optim.AdamW, **ADAMW)
        steps = []
        for fraction in fractions:
            steps += train(built, optimizer, None, accumulate=False)
            optimizer.divide(fraction)
        states = [optimizer.state[parameter]["exp_avg"] for parameter in built[1].parameters()]
        found.append([*steps, *(local_of(state).clone() for state in states)])
        optimizer.close()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_an_optimizer_may_be_divided_again_in_training(world: World, name: str, dtype: torch.dtype) -> None:
    world.run(divided, name, dtype)


def checkpointed(name: str, given: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    make, options = MODELS[name]
    torch.manual_seed(0)
    built = make(**options)
    optimizer = spillway.OffloadedOptimizer(built[1].parameters(), torch.optim.AdamW, **given, **ADAMW)
    train(built, optimizer, None, accumulate=False)
    weights = [local(parameter).detach().clone() for parameter in built[1].parameters()]
    # What is saved are the tensors themselves, as of any optimizer.
    saved = copy.deepcopy(get_optimizer_state_dict(built[0], optimizer))
    torch.save(saved, io.BytesIO())
    expected = train(built, optimizer, None, accumulate=False)
    torch.manual_seed(7)
    other = make(**options)
    resumed = spillway.OffloadedOptimizer(other[1].parameters(), torch.optim.AdamW, **given, **ADAMW)
    with torch.no_grad():
        for parameter, weight in zip(other[1].parameters(), weights, strict=True):
            local_of(parameter).copy_(weight)
    set_optimizer_state_dict(other[0], resumed, saved)
    for one, two in zip(train(other, resumed, None, accumulate=False), expected, strict=True):
        assert torch.equal(one, two)
    optimizer.close()
    resumed.close()


@pytest.mark.parametrize("given", [{}, {"tier": "disk"}, {"step_on": "gpu"}], ids=str)
@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_a_run_resumed_by_torchs_distributed_checkpoint_is_the_uninterrupted_one(
    world: World, name: str, given: dict[str, Any]
) -> None:
    world.run(checkpointed, name, given)
