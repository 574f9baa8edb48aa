"""Every optimizer of torch's own database steps on the host as the same class steps on the CPU, bit for bit.

Its implementation there is the fused one where the class has one on the CPU, else the loop (``foreach=False``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import optim_db

import spillway
from optim.support import FUSED, assert_same_state, assert_same_values, implementation
from spillway import OffloadedOptimizer, UnsupportedError
from spillway.optim.optimizer_class import ClassTraits

REFUSED = (torch.optim.SparseAdam, torch.optim.LBFGS)
MATRICES = [(17, 5), (3, 3), (1, 31)]


class Input(NamedTuple):
    """A class and what it is given."""

    optimizer_class: type[Optimizer]
    description: str
    defaults: dict[str, Any]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """What the class can step: Muon refuses all but matrices, and Adafactor divides by the number of elements."""
        if self.optimizer_class is torch.optim.Muon:
            return MATRICES
        empty = [] if self.optimizer_class is torch.optim.Adafactor else [(0,)]
        return [*MATRICES, (33,), (), (2, 3, 4), *empty]

    def __str__(self) -> str:
        return re.sub(r"\W+", "-", f"{self.optimizer_class.__name__} {self.description}")


def inputs() -> Iterator[Input]:
    for info in optim_db:
        if info.optim_cls not in REFUSED:
            for one in info.optim_inputs_func(device="cpu"):
                yield Input(info.optim_cls, one.desc, one.kwargs)


INPUTS = pytest.mark.parametrize("given", list(inputs()), ids=str)


def parameters(given: Input, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in given.shapes]


def gradients(given: Input, dtype: torch.dtype, steps: int) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(shape, generator=generator).to(dtype) for shape in given.shapes]


def step(optimizer: Optimizer, values: list[torch.nn.Parameter], grads: list[Tensor]) -> None:
    loss = sum(((value * grad).sum() for value, grad in zip(values, grads, strict=True)), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def compare(given: Input, dtype: torch.dtype, steps: int, session: spillway.Session) -> None:
    plain, ours = parameters(given, dtype), parameters(given, dtype)
    reference = given.optimizer_class(plain, **given.defaults, **implementation(given.optimizer_class, dtype))
    optimizer = OffloadedOptimizer(ours, given.optimizer_class, master_dtype=None, session=session, **given.defaults)
    for grads in gradients(given, dtype, steps):
        step(reference, plain, grads)
        step(optimizer, ours, grads)
        assert_same_values(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()


@INPUTS
def test_a_few_steps_are_those_of_the_class_on_the_cpu(given: Input, cpu_session: spillway.Session) -> None:
    compare(given, torch.float32, 4, cpu_session)


@INPUTS
def test_a_few_steps_in_bfloat16_are_too(given: Input, cpu_session: spillway.Session) -> None:
    compare(given, torch.bfloat16, 3, cpu_session)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@INPUTS
def test_a_hundred_steps_are_those_of_the_class_on_the_cpu(
    given: Input, dtype: torch.dtype, session: spillway.Session
) -> None:
    compare(given, dtype, 100, session)


@pytest.mark.parametrize(
    "info", [info for info in optim_db if info.optim_cls in REFUSED], ids=lambda info: info.optim_cls.__name__
)
def test_what_cannot_be_served_is_refused_by_name(info: Any) -> None:
    name = info.optim_cls.__name__
    with pytest.raises(UnsupportedError, match=rf"optimizer_class: {name} cannot be offloaded: .* Use {name} itself"):
        OffloadedOptimizer([torch.nn.Parameter(torch.zeros(2))], info.optim_cls)


def test_every_optimizer_of_torch_is_in_the_database_and_known() -> None:
    types = [value for value in vars(torch.optim).values() if isinstance(value, type) and value is not Optimizer]
    public = {value for value in types if issubclass(value, Optimizer)}
    assert public <= {info.optim_cls for info in optim_db}
    # Each of them steps every parameter by itself, so that some step before others.
    assert all(ClassTraits.of(value).steps_alone for value in public.difference(REFUSED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("optimizer_class", FUSED, ids=lambda cls: cls.__name__)
def test_what_steps_by_a_fused_kernel_steps_as_exact_arithmetic_does(
    optimizer_class: type[Optimizer], dtype: torch.dtype, cpu_session: spillway.Session
) -> None:
    # Torch's fused SGD leaves bfloat16 parameters on the CPU as they are: equal bits would not show it.
    given = Input(optimizer_class, "", {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {})
    ours, exact = parameters(given, dtype), [torch.nn.Parameter(one.double()) for one in parameters(given, dtype)]
    optimizer = OffloadedOptimizer(
        ours, optimizer_class, master_dtype=None, session=cpu_session, lr=0.05, **given.defaults
    )
    reference = optimizer_class(exact, lr=0.05, foreach=False, **given.defaults)
    for grads in gradients(given, dtype, 6):
        step(optimizer, ours, grads)
        step(reference, exact, [grad.double() for grad in grads])
    error = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for one, other in zip(ours, exact, strict=True):
        assert torch.allclose(one.double(), other, rtol=error, atol=error)
    optimizer.close()
