"""The fused kernels of the host, stepped in pieces that are cut at cache lines, give the bits of the whole.

So say the notes of ``spillway.optim``; here it is held for every class, type and option, for sizes around cache lines
and for any cuts at them. That it is not so for cuts elsewhere is shown too: the tests would see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import spillway
from optim.support import assert_same_state, same_bits
from spillway import OffloadedOptimizer
from spillway.optim.optimizer_class import ClassTraits
from spillway.optim.tensors import CHUNK

LINE = 64
OPTIONS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    *[
        (cls, {"lr": 0.05, **options})
        for cls in (torch.optim.Adam, torch.optim.AdamW)
        for options in (
            {},
            {"amsgrad": True},
            {"weight_decay": 0.1},
            {"maximize": True},
            {"amsgrad": True, "weight_decay": 0.1, "maximize": True, "betas": (0.7, 0.8), "eps": 1e-3},
        )
    ],
    *[
        (torch.optim.SGD, {"lr": 0.05, **options})
        for options in (
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True},
            {"weight_decay": 0.1},
        )
    ],
    *[
        (torch.optim.Adagrad, {"lr": 0.05, **options})
        for options in (
            {},
            {"lr_decay": 0.1},
            {"weight_decay": 0.1, "maximize": True, "initial_accumulator_value": 0.5},
        )
    ],
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def cases() -> Iterator[Any]:
    for optimizer_class, options in OPTIONS:
        for dtype in DTYPES:
            if dtype in ClassTraits.of(optimizer_class).fused:
                name = "-".join([optimizer_class.__name__, *(key for key in options if key != "lr"), str(dtype)[6:]])
                yield pytest.param(optimizer_class, options, dtype, id=name)


def values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (tensor * 10.0 ** (seed % 3 - 1)).to(dtype)


def stepped(
    optimizer_class: type[Optimizer], options: dict[str, Any], parts: list[Tensor], gradients: list[list[Tensor]]
) -> list[list[Tensor]]:
    """The parts, and their states, after steps of a fused optimizer over all of them."""
    parameters = [Parameter(part.clone()) for part in parts]
    optimizer = optimizer_class(parameters, fused=True, **options)
    for grads in gradients:
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    names = [name for name, value in states[0].items() if name != "step" and isinstance(value, Tensor)]
    return [[parameter.detach() for parameter in parameters], *([state[name] for state in states] for name in names)]


def is_same_in_pieces(
    optimizer_class: type[Optimizer], options: dict[str, Any], dtype: torch.dtype, numel: int, cuts: list[int]
) -> bool:
    borders = [0, *sorted(set(cuts)), numel]
    split = lambda tensor: [tensor[a:b] for a, b in itertools.pairwise(borders)]  # noqa: E731
    whole, grads = values(numel, dtype, 0), [values(numel, dtype, seed) for seed in (1, 2, 3)]
    expected = stepped(optimizer_class, options, [whole], [[one] for one in grads])
    got = stepped(optimizer_class, options, split(whole), [split(one) for one in grads])
    return all(same_bits(torch.cat(parts), one) for parts, (one,) in zip(got, expected, strict=True))


@st.composite
def sizes_and_cuts(draw: st.DrawFn, line: int) -> tuple[int, list[int]]:
    lines = draw(st.integers(1, 12))
    numel = max(1, line * lines + draw(st.integers(-3, 3)))
    most = (numel - 1) // line
    return numel, [line * one for one in draw(st.lists(st.integers(1, max(1, most)), max_size=4)) if one <= most]


@pytest.mark.parametrize(("optimizer_class", "options", "dtype"), list(cases()))
def test_pieces_that_are_cut_at_cache_lines_are_the_whole(
    optimizer_class: type[Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    @settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(sizes_and_cuts(LINE // dtype.itemsize))
    def check(case: tuple[int, list[int]]) -> None:
        assert is_same_in_pieces(optimizer_class, options, dtype, *case)

    check()


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("optimizer_class", "options", "dtype"), list(cases()))
def test_pieces_of_large_parameters_in_several_threads_are_the_whole(
    optimizer_class: type[Optimizer], options: dict[str, Any], dtype: torch.dtype, threads: int
) -> None:
    line = LINE // dtype.itemsize

    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(30_000, 150_000), st.lists(st.integers(1, 29_000 // line), max_size=5))
    def check(numel: int, cuts: list[int]) -> None:
        assert is_same_in_pieces(optimizer_class, options, dtype, numel, [line * cut for cut in cuts])

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check()
    finally:
        torch.set_num_threads(before)


def test_cuts_elsewhere_give_other_bits() -> None:
    # Tails are computed otherwise than vectors: here is what the cuts above are for.
    assert not all(is_same_in_pieces(torch.optim.AdamW, {"lr": 0.05}, torch.float32, 512, [cut]) for cut in (3, 101))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_size_of_a_piece_is_a_whole_number_of_cache_lines(dtype: torch.dtype) -> None:
    assert CHUNK * dtype.itemsize % LINE == 0


@pytest.mark.parametrize(
    ("optimizer_class", "options", "dtype", "numel"),
    # Each class, and each dtype, with pieces of both sizes.
    [
        (*case.values, [64, 192][(OPTIONS.index(case.values[:2]) + DTYPES.index(case.values[2])) % 2])
        for case in cases()
        if "wei" in str(case.id)
    ],
)
def test_the_optimizer_in_pieces_is_the_plain_one(
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    numel: int,
    pieces_of: Callable[[int], None],
    cpu_session: spillway.Session,
) -> None:
    pieces_of(numel)
    shapes = [(63,), (64,), (65, 2), (3, 127), (5,), (1000,), (31,), (), (0,)]
    ours, plain = ([Parameter(values(size(one), dtype, 4).view(one)) for one in shapes] for _ in range(2))
    optimizer = OffloadedOptimizer(ours, optimizer_class, master_dtype=None, session=cpu_session, **options)
    reference = optimizer_class(plain, fused=True, **options)
    for seed in range(4):
        for parameters in (ours, plain):
            for parameter, one in zip(parameters, shapes, strict=True):
                parameter.grad = values(size(one), dtype, seed).view(one)
        optimizer.step()
        reference.step()
    assert all(same_bits(one, other) for one, other in zip(ours, plain, strict=True))
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()


def size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


@pytest.mark.parametrize("optimizer_class", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.AdamW])
def test_what_has_no_fused_kernel_is_not_cut(
    optimizer_class: type[Optimizer], pieces_of: Callable[[int], None], cpu_session: spillway.Session
) -> None:
    pieces_of(64)
    how = {"fused": False} if optimizer_class is torch.optim.AdamW else {}
    ours, plain = Parameter(values(1001, torch.float32, 4)), Parameter(values(1001, torch.float32, 4))
    optimizer = OffloadedOptimizer([ours], optimizer_class, session=cpu_session, **how)
    reference = optimizer_class([plain], foreach=False, **how)
    for seed in range(3):
        ours.grad = values(1001, torch.float32, seed)
        plain.grad = values(1001, torch.float32, seed)
        optimizer.step()
        reference.step()
    assert same_bits(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()


@pytest.mark.parametrize("begins", [True, False], ids=["fused first", "fused later"])
def test_an_implementation_that_is_changed_later(
    begins: bool, pieces_of: Callable[[int], None], cpu_session: spillway.Session
) -> None:
    # By hand, or by a state of the plain class that is loaded. Pieces are for fused kernels only.
    pieces_of(64)
    ours, plain = Parameter(values(1001, torch.float32, 4)), Parameter(values(1001, torch.float32, 4))
    optimizer = OffloadedOptimizer([ours], torch.optim.AdamW, session=cpu_session, fused=begins)
    reference = torch.optim.AdamW([plain], fused=begins, foreach=False)
    for seed in range(4):
        if seed == 2:
            for one in (optimizer, reference):
                one.param_groups[0]["fused"] = not begins
        ours.grad = values(1001, torch.float32, seed)
        plain.grad = values(1001, torch.float32, seed)
        optimizer.step()
        reference.step()
        assert same_bits(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    optimizer.close()
