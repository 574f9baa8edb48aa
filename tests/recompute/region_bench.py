"""Samples of the operator database in regions: each operator kept, offloaded or run again as a die says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

import spillway
from operator_bench import Bench, Call, Outcome, Sample, operator_samples, run

ANSWERS = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD, CheckpointPolicy.PREFER_RECOMPUTE)


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


def few_samples(operator: Any, dtype: torch.dtype, device: str = "cpu") -> Iterator[Sample]:
    """Four of an operator's, inside of a region."""
    for number, sample in enumerate(operator_samples(operator, dtype, device)):
        if number == 4:
            break
        if operator.name == "nn.functional.rrelu" and number == 3:
            # Without training, it saves memory that no kernel has written: a replay saves other numbers.
            break
        made = sample.make
        yield replace(sample, make=lambda made=made: inside(made()))
