"""The operator database through a region: each operator kept, offloaded or run again as a die says, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import spillway
from operator_bench import IGNORED, first_dtype, name_of
from recompute.region_bench import RegionBench, few_samples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")

pytestmark = IGNORED

DIFFERENTIABLE = [
    each for each in invocations.op_db if each.supports_autograd and first_dtype(each.supported_backward_dtypes("cpu"))
]


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

    bench.check(name_of(operator), lambda: few_samples(operator, dtype), errors=True)
