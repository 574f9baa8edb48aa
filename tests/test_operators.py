"""Bit for bit over PyTorch's own operator and module databases: every differentiable operator, and in the long matrix
every sample input.

How a sample is run and compared is in ``operator_bench.py``. On an accelerator: ``gpu/test_gpu_operators.py``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from operator_bench import (
    IGNORED,
    NOT_DETERMINISTIC,
    TIERS,
    Bench,
    Sample,
    first_dtype,
    module_samples,
    name_of,
    operator_samples,
)
from spillway import EventKind

with warnings.catch_warnings():
    # The databases are PyTorch's own test code: importing them warns of what PyTorch itself deprecates.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

pytestmark = IGNORED

NO_SECOND_DERIVATIVE = {
    "native_layer_norm": "PyTorch refuses the sample without a weight",
    "nn_functional_scaled_dot_product_attention": "the flash kernel's backward has none",
    "nn_functional_ctc_loss": "its backward has none for one of the two ways in which it can be called",
}
"""Operators said to have second derivatives that plain PyTorch refuses for some samples: we must refuse likewise."""

OPERATORS = 600
"""At least so many operators and modules are differentiable."""

SAMPLES = 5_500
"""At least so many samples are run of them, of those in ``make test`` alone."""


def amounts(some: int) -> Any:
    """How many samples of one operator, drawn from all. Some have hundreds, which take most of the time of all."""
    return pytest.mark.parametrize(
        "most", [pytest.param(some, id="some"), pytest.param(None, id="all", marks=pytest.mark.long)]
    )


SLOW = {"grid_sampler_3d": 4}
"""How many of those whose samples take much longer than all others'."""

UNEQUAL: dict[str, str] = {}
"""Operators whose results are not those of plain PyTorch, each with its reason. Published, and empty."""


DIFFERENTIABLE = [
    each for each in op_db if each.supports_autograd and first_dtype(each.supported_backward_dtypes("cpu"))
]
IN_PLACE = [each for each in DIFFERENTIABLE if each.get_inplace() is not None and each.supports_inplace_autograd]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.session.close()


@amounts(16)
@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=name_of)
def test_an_operator_is_the_same_in_every_bit(operator: Any, most: int | None, bench: Bench) -> None:
    dtype = first_dtype(operator.supported_backward_dtypes("cpu"))
    name = name_of(operator)
    most = SLOW.get(name, most) if most else None
    assert bench.check(name, lambda: operator_samples(operator, dtype), most=most) > 0


@amounts(16)
@pytest.mark.parametrize("operator", IN_PLACE, ids=name_of)
def test_an_operator_in_place_is_the_same_in_every_bit(operator: Any, most: int | None, bench: Bench) -> None:
    dtype = first_dtype(operator.supported_backward_dtypes("cpu"))
    bench.check(name_of(operator), lambda: operator_samples(operator, dtype, inplace=True), most=most, errors=True)


@amounts(5)
@pytest.mark.parametrize("info", module_db, ids=name_of)
def test_a_module_is_the_same_in_every_bit(info: Any, most: int | None, bench: Bench) -> None:
    for training in (True, False):

        def samples(training: bool = training) -> Iterator[Sample]:
            return module_samples(info, torch.float64, training=training)

        bench.check(name_of(info), samples, most=most)


@pytest.mark.long
@pytest.mark.parametrize(
    ("operator", "dtype"),
    [
        pytest.param(each, dtype, id=f"{name_of(each)}-{str(dtype).removeprefix('torch.')}")
        for dtype in (torch.float32, torch.bfloat16, torch.complex128)
        for each in DIFFERENTIABLE
        if dtype in each.supported_backward_dtypes("cpu")
    ],
)
def test_an_operator_is_the_same_in_every_bit_in_other_dtypes(operator: Any, dtype: torch.dtype, bench: Bench) -> None:
    assert bench.check(name_of(operator), lambda: operator_samples(operator, dtype)) > 0


@pytest.mark.long
@pytest.mark.parametrize("operator", [each for each in DIFFERENTIABLE if each.supports_gradgrad], ids=name_of)
def test_second_derivatives_of_an_operator_are_the_same_in_every_bit(operator: Any, bench: Bench) -> None:
    dtype = first_dtype(operator.supported_backward_dtypes("cpu"))
    name = name_of(operator)
    count = bench.check(
        name, lambda: operator_samples(operator, dtype), twice=True, errors=name in NO_SECOND_DERIVATIVE
    )
    assert count > 0


def test_the_sweep_was_no_empty_one(bench: Bench, request: pytest.FixtureRequest) -> None:
    """It comes last, and looks at what the tests of this file that were selected have done."""
    assert not UNEQUAL
    assert NOT_DETERMINISTIC.keys() | NO_SECOND_DERIVATIVE.keys() <= {name_of(each) for each in DIFFERENTIABLE}
    selected = {
        name_of(next(each for each in (call.get("operator"), call.get("info")) if each is not None))
        for item in request.session.items
        if item.path == request.path and (call := getattr(getattr(item, "callspec", None), "params", {}))
    }
    assert bench.operators <= selected
    if bench.operators != selected and "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("another worker has run a part of the sweep")
    assert bench.operators == selected
    if not selected:
        pytest.skip("none of the sweep was selected")
    for tier in TIERS:
        # Not every operator saves something. Where one does, what it saved has left, and has come back.
        assert bench.moved[tier][EventKind.LEAVE] > 0
        assert bench.moved[tier][EventKind.RETURN] > 0
    if len(selected) >= OPERATORS:
        assert bench.samples >= SAMPLES
        for tier in TIERS:
            assert bench.moved[tier][EventKind.RETURN] >= SAMPLES / 2
            # What two saved tensors share is asked for twice and comes back once.
            assert bench.moved[tier][EventKind.REUSE] < bench.moved[tier][EventKind.RETURN] / 2
    assert len({name_of(each) for each in (*DIFFERENTIABLE, *module_db)}) >= OPERATORS
