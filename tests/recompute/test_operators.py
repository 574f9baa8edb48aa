"""The operator database through a region: each operator kept, offloaded or run again as a die says, bit for bit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

import spillway
from operator_bench import IGNORED, Bench, Call, Outcome, Sample, first_dtype, name_of, operator_samples, run

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = IGNORED

ANSWERS = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD, CheckpointPolicy.PREFER_RECOMPUTE)
DIFFERENTIABLE = [
    each for each in invocations.op_db if each.supports_autograd and first_dtype(each.supported_backward_dtypes("cpu"))
]


def inside(call: Call) -> Call:
    """The operator on what the region itself computes, and something that saves its output."""

    def forward(inputs: Any) -> Any:
        inputs = pytree.tree_map_only(torch.Tensor, lambda t: t * 1 if t.requires_grad else t, inputs)
        return pytree.tree_map_only(torch.Tensor, _used, call.forward(inputs))

    return replace(call, forward=forward)


def _used(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * tensor if tensor.requires_grad and tensor.layout is torch.strided else tensor


class RegionBench(Bench):
    """Runs samples in a region, with other decisions in each of the two ways."""

    def _run(self, sample: Sample, tier: str, *, twice: bool) -> Outcome:
        die = random.Random(f"{self.samples} {len(self.operators)} {tier}")
        made = sample.make

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return die.choice(ANSWERS)

        def make() -> Call:
            call = made()
            region = spillway.Recompute(policy=policy)
            return replace(call, forward=lambda inputs: region(call.forward, inputs))

        def context() -> Any:
            self._tier = tier
            keep = spillway.policies.Keep()
            return spillway.offload(policy=keep, min_bytes=0, window=0, tier=tier, session=self.session)

        self.session.use_as_default()
        return run(replace(sample, make=make), context, self.device, twice=twice)


@pytest.fixture(scope="module")
def bench() -> Iterator[RegionBench]:
    before = spillway.Session._default
    bench = RegionBench()
    yield bench
    bench.session.close()
    spillway.Session._default = before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=name_of)
def test_an_operator_in_a_region_is_the_same_in_every_bit(operator: Any, bench: RegionBench) -> None:
    dtype = first_dtype(operator.supported_backward_dtypes("cpu"))

    def samples() -> Iterator[Sample]:
        for number, sample in enumerate(operator_samples(operator, dtype)):
            if number == 4:
                break
            made = sample.make
            yield replace(sample, make=lambda made=made: inside(made()))

    bench.check(name_of(operator), samples, errors=True)
