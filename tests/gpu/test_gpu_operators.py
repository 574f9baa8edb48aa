"""The operator database on an accelerator, in one dtype: every differentiable operator, through both tiers.

Atomic additions make some kernels give other bits from run to run, in plain PyTorch too. Such an operator is run
several times, and counts as equal if a run of ours is, or if plain runs differ; how many there were is said at the end.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from operator_bench import IGNORED, Bench, Sample, first_dtype, name_of, operator_samples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = [pytest.mark.gpu, *IGNORED]

DEVICE = "cuda"

READS_WHAT_IS_NOT_ITS_OWN = {
    "nn_functional_pad_reflect": "with a negative padding (sample 11), the gradient of the deterministic kernel "
    "changes with what lies beside the incoming gradient in memory (torch 2.11: seen with 0 and with 1000 there)",
}
"""Operators whose gradient in plain PyTorch depends on what lies beside its arguments. They are run, not compared."""
DIFFERENTIABLE = [
    each for each in invocations.op_db if each.supports_autograd and first_dtype(each.supported_backward_dtypes(DEVICE))
]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench(DEVICE)
    yield bench
    print(f"\n{len(bench.operators)} operators, {bench.samples} samples, not stable: {sorted(bench.unstable)}")
    bench.session.close()
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=name_of)
def test_an_operator_is_the_same_in_every_bit(operator: Any, bench: Bench) -> None:
    dtype = first_dtype(operator.supported_backward_dtypes(DEVICE))
    compared = name_of(operator) not in READS_WHAT_IS_NOT_ITS_OWN

    def samples() -> Iterator[Sample]:
        for sample in operator_samples(operator, dtype, DEVICE):
            yield replace(sample, deterministic=sample.deterministic and compared)

    bench.check(name_of(operator), samples, errors=True)


def test_few_operators_are_not_stable(bench: Bench) -> None:
    """It comes last."""
    assert {name_of(each) for each in DIFFERENTIABLE} >= READS_WHAT_IS_NOT_ITS_OWN.keys()
    assert len(bench.unstable) <= len(bench.operators) // 20
