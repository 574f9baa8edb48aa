"""Recomputed blocks of six kinds of models, in every way: bit for bit what they are without."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import spillway
from recompute.models import MODELS
from spillway.testing import AdversaryBackend

POLICIES = [CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD, CheckpointPolicy.MUST_RECOMPUTE]

HOWS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "save-matmul": {"save": ["matmul"]},
    "save-attention-norm": {"save": ["attention", "norm", "convolution"]},
    "offload-matmul": {"offload": ["matmul", "convolution"]},
    "offload-inputs-pointwise": {"offload": ["inputs", "pointwise"]},
    "save-and-offload": {"save": ["norm", "random"], "offload": ["inputs", "matmul", "softmax"]},
    "offload-every-second": {"offload": [lambda call: call.index % 2 == 0]},
    "save-every-third": {"save": [lambda call: call.index % 3 == 0], "offload": ["inputs"]},
    "saved-by": {"offload": [spillway.saved_by("attention"), spillway.saved_by("norm"), spillway.saved_by("matmul")]},
    "policy": {"policy": lambda *asked, **kwargs: POLICIES[len(asked[1].name()) % 3]},
}


def steps(name: str, call: Callable[..., Any], context: Callable[[], Any], *, dropout: float, autocast: bool) -> Any:
    """Two steps of SGD: losses, gradients, weights and buffers of each."""
    torch.manual_seed(0)
    model = MODELS[name](dropout)
    seen: list[torch.Tensor] = []
    for _ in range(2):
        model.zero_grad()
        mixed = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with context(), mixed:
            loss = model(call).float().square().mean()
        loss.backward()
        seen += [loss.detach(), torch.rand(2)]
        for parameter in model.parameters():
            if parameter.grad is not None:
                seen.append(parameter.grad.clone())
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
        seen += [buffer.clone() for buffer in model.buffers()]
    return seen


@pytest.fixture
def session(tmp_path: Path) -> Iterator[spillway.Session]:
    with spillway.Session(window=1 << 10, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        yield session
        gc.collect()
        session.synchronize()
        assert session.used_bytes == (0, 0)


def nested(call: Callable[..., Any], how: Callable[..., Any]) -> Callable[..., Any]:
    """Regions in a region: the block inside of a function that is recomputed too."""

    def outer(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return how(lambda *args, **kwargs: call(block, *args, **kwargs), *args, **kwargs)

    return outer


CASES = list(itertools.product(MODELS, HOWS, [False, True]))


@pytest.mark.parametrize(("name", "how", "reentrant"), CASES)
@pytest.mark.parametrize(
    ("dropout", "autocast"),
    [
        pytest.param(0.0, False, marks=pytest.mark.long),
        pytest.param(0.3, False, marks=pytest.mark.long),
        (0.3, True),
    ],
)
def test_a_model_is_the_same_in_every_bit(
    name: str, how: str, reentrant: bool, dropout: float, autocast: bool, session: spillway.Session
) -> None:
    if reentrant and how == "saved-by":
        pytest.skip("refused")
    plain = steps(
        name, lambda block, *a, **k: block(*a, **k), contextlib.nullcontext, dropout=dropout, autocast=autocast
    )
    region = partial(spillway.recompute, use_reentrant=reentrant, session=session, **HOWS[how])

    def call(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A function has no parameters of its own, so the reentrant mode wants an input that needs grad.
        if reentrant and not isinstance(block, torch.nn.Module) and not _any_grad(args, kwargs):
            return block(*args, **kwargs)
        return region(block, *args, **kwargs)

    context = partial(spillway.offload, policy=spillway.policies.Keep(), min_bytes=0, session=session)
    ours = steps(name, call, context, dropout=dropout, autocast=autocast)
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def _any_grad(args: Any, kwargs: Any) -> bool:
    return any(torch.is_tensor(each) and each.requires_grad for each in (*args, *kwargs.values()))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", HOWS)
def test_regions_in_regions_are_the_same_in_every_bit(name: str, how: str, session: spillway.Session) -> None:
    plain = steps(name, lambda block, *a, **k: block(*a, **k), contextlib.nullcontext, dropout=0.3, autocast=False)
    region = partial(spillway.recompute, session=session, **HOWS[how])
    inner = partial(spillway.recompute, session=session, offload=["matmul"])
    context = partial(spillway.offload, min_bytes=0, session=session)
    ours = steps(name, nested(inner, region), context, dropout=0.3, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", HOWS)
def test_under_the_adversary_too(name: str, how: str) -> None:
    plain = steps(name, lambda block, *a, **k: block(*a, **k), contextlib.nullcontext, dropout=0.3, autocast=False)
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve, window=0) as session:
        region = partial(spillway.recompute, session=session, **HOWS[how])
        context = partial(spillway.offload, min_bytes=0, tier="host", session=session)
        ours = steps(name, region, context, dropout=0.3, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    adversary.check()
