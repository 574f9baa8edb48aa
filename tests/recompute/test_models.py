"""Recomputed blocks of six kinds of models, in every way: bit for bit what they are without."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from recompute.models import HOWS, MODELS, plainly, recomputed, steps
from spillway.testing import AdversaryBackend


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


REENTRANT: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "reentrant-inputs": {"use_reentrant": True, "offload": "inputs"},
}
CASES = list(itertools.product(MODELS, [*HOWS, *REENTRANT]))
MIXED = ["save-and-offload", "saved-by", "policy"]
mixtures = pytest.mark.parametrize(
    "how", [how if how in MIXED else pytest.param(how, marks=pytest.mark.long) for how in HOWS]
)
"""Where each mode runs all of them, the rest has those that save, offload and recompute at once."""


@functools.cache
def plain_steps(name: str, dropout: float, autocast: bool = False) -> list[torch.Tensor]:
    """What a model's steps come to without Spillway. They are the same for each way."""
    return steps(name, plainly, contextlib.nullcontext, dropout=dropout, autocast=autocast)


@pytest.mark.parametrize(("name", "how"), CASES)
@pytest.mark.parametrize(
    ("dropout", "autocast"),
    [
        pytest.param(0.0, False, marks=pytest.mark.long),
        pytest.param(0.3, False, marks=pytest.mark.long),
        (0.3, True),
    ],
)
def test_a_model_is_the_same_in_every_bit(
    name: str, how: str, dropout: float, autocast: bool, session: spillway.Session
) -> None:
    plain = plain_steps(name, dropout, autocast)
    call = recomputed(session=session, **{**HOWS, **REENTRANT}[how])
    context = partial(spillway.offload, policy=spillway.policies.Keep(), min_bytes=0, session=session)
    ours = steps(name, call, context, dropout=dropout, autocast=autocast)
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", MODELS)
@mixtures
def test_regions_in_regions_are_the_same_in_every_bit(name: str, how: str, session: spillway.Session) -> None:
    plain = plain_steps(name, 0.3)
    region = partial(spillway.recompute, session=session, **HOWS[how])
    inner = partial(spillway.recompute, session=session, offload=["matmul"])
    context = partial(spillway.offload, min_bytes=0, session=session)
    ours = steps(name, nested(inner, region), context, dropout=0.3, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", MODELS)
@mixtures
def test_under_the_adversary_too(name: str, how: str) -> None:
    plain = plain_steps(name, 0.3)
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve, window=0) as session:
        region = partial(spillway.recompute, session=session, **HOWS[how])
        context = partial(spillway.offload, min_bytes=0, tier="host", session=session)
        ours = steps(name, region, context, dropout=0.3, autocast=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    adversary.check()
