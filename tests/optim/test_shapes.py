"""Parameters of any shape, strides and type, and gradients of other strides and types than their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import spillway
from optim.support import (
    assert_same_state,
    here,
    implementation,
    same_bits,
)
from spillway import OffloadedOptimizer

SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}

Make = Callable[[], Tensor]

SHAPES: dict[str, Make] = {
    "of no dimensions": lambda: torch.tensor(1.25),
    "empty": lambda: torch.zeros(3, 0, 2),
    "of one element": lambda: torch.ones(1, 1, 1),
    "transposed": lambda: torch.arange(15.0).view(3, 5).t(),
    "channels last": lambda: torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "with a size of one and an odd stride": lambda: torch.arange(6.0).as_strided((1, 6), (99, 1)),
    "in the middle of a storage": lambda: torch.arange(64.0)[7:29],
    "complex": lambda: torch.complex(torch.arange(6.0), torch.ones(6)),
    "complex, of no dimensions": lambda: torch.tensor(1.0 + 2.0j),
}


def strides_that_count(tensor: Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def step_both(
    make: Make,
    optimizer_class: type[Optimizer],
    defaults: dict[str, Any],
    session: spillway.Session,
    deed: Callable[[Parameter], object] = lambda parameter: None,
    master_dtype: torch.dtype | None = None,
) -> None:
    ours, plain = Parameter(make()), Parameter(make())
    assert ours.stride() == make().stride()
    how = {"foreach": False} if ours.is_complex() else implementation(optimizer_class, ours.dtype)
    optimizer = OffloadedOptimizer([ours], optimizer_class, session=session, master_dtype=master_dtype, **defaults)
    reference = optimizer_class([plain], **defaults, **how)
    for number in range(3):
        results = []
        for parameter, one in ((ours, optimizer), (plain, reference)):
            for _ in range(1 + number % 2):
                torch.manual_seed(number)
                weight = torch.randn(parameter.shape, dtype=parameter.dtype)
                (parameter * weight).sum().abs().backward()  # type: ignore[no-untyped-call]
            results.append(deed(parameter))
            one.step()
            one.zero_grad()
        if isinstance(results[0], Tensor):
            assert same_bits(results[0], results[1])
            assert isinstance(results[1], Tensor)
            assert strides_that_count(results[0]) == strides_that_count(results[1])
        assert same_bits(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    for name, value in reference.state[plain].items():
        if isinstance(value, Tensor):
            assert strides_that_count(optimizer.state[ours][name]) == strides_that_count(value)
    optimizer.close()


@pytest.mark.parametrize("name", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, SGD), (torch.optim.RMSprop, {})],
    ids=["AdamW", "SGD", "RMSprop"],
)
def test_a_parameter_that_is(
    name: str, optimizer_class: type[Optimizer], defaults: dict[str, Any], session: spillway.Session
) -> None:
    step_both(SHAPES[name], optimizer_class, defaults, session)


@pytest.mark.parametrize("name", SHAPES, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.parametrize(
    "deed",
    [
        lambda p: p.grad.clone(),
        lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
        lambda p: p.grad.add_(torch.ones_like(p.grad), alpha=0.5).clone(),
        lambda p: p.grad.mul_(0.5).clone(),
        lambda p: (p.grad.norm(), p.grad.zero_())[0],
    ],
    ids=["clone", "clip", "write", "scale", "zero"],
)
@pytest.mark.parametrize("session", ["adversary"], indirect=True)
def test_a_gradient_of_a_parameter_that_is(
    name: str, deed: Callable[[Parameter], object], session: spillway.Session
) -> None:
    step_both(SHAPES[name], torch.optim.SGD, SGD, session, deed)


@pytest.mark.parametrize("name", [name for name in SHAPES if "complex" not in name], ids=lambda n: n.replace(" ", "-"))
def test_a_narrow_parameter_that_is(name: str, session: spillway.Session) -> None:
    ours = Parameter(SHAPES[name]().bfloat16())
    plain = Parameter(SHAPES[name]().bfloat16())
    master = Parameter(plain.detach().float())
    optimizer = OffloadedOptimizer([ours], torch.optim.AdamW, lr=0.1, session=session)
    reference = torch.optim.AdamW([master], lr=0.1, fused=True)
    for number in range(3):
        for parameter in (ours, plain):
            torch.manual_seed(number)
            (parameter * torch.randn(parameter.shape).bfloat16()).sum().backward()  # type: ignore[no-untyped-call]
        assert plain.grad is not None
        assert same_bits(here(ours.grad), plain.grad)
        master.grad, plain.grad = plain.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        with torch.no_grad():
            plain.copy_(master)
        assert same_bits(ours, plain)
        assert same_bits(optimizer.state[ours]["master"], master)
    optimizer.close()


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_gradients_of_other_strides_than_the_parameter(session: spillway.Session) -> None:
    ours, plain = Parameter(torch.zeros(5, 3)), Parameter(torch.zeros(5, 3))
    optimizer = OffloadedOptimizer([ours], torch.optim.SGD, session=session, **SGD)
    reference = torch.optim.SGD([plain], fused=True, **SGD)
    for number in range(3):
        gradient = torch.randn(3, 5).t()
        plain.grad = gradient.contiguous()
        ours.grad = gradient
        if number == 1:
            (ours * 2.0).sum().backward()
            (plain * 2.0).sum().backward()
        optimizer.step()
        reference.step()
        assert same_bits(ours, plain)
    ours.grad = torch.ones(1).expand(5, 3)
    plain.grad = torch.ones(5, 3)
    optimizer.step()
    reference.step()
    assert same_bits(ours, plain)
    optimizer.close()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch whose gradients have their tensor's type")
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, torch.float16])
def test_gradients_of_a_type_of_their_own(grad_dtype: torch.dtype, session: spillway.Session) -> None:
    ours, plain = Parameter(torch.ones(37, dtype=torch.bfloat16)), Parameter(torch.ones(37, dtype=torch.bfloat16))
    for parameter in (ours, plain):
        parameter.grad_dtype = grad_dtype  # type: ignore[attr-defined]
    master = Parameter(plain.detach().float())
    optimizer = OffloadedOptimizer([ours], torch.optim.AdamW, lr=0.1, session=session)
    reference = torch.optim.AdamW([master], lr=0.1, fused=True)
    for number in range(3):
        for parameter in (ours, plain):
            torch.manual_seed(number)
            weight = torch.randn(37)
            for _ in range(1 if grad_dtype is not torch.float32 else 1 + number % 2):
                (parameter.float() * weight).sum().backward()  # type: ignore[no-untyped-call]
        assert plain.grad is not None
        assert ours.grad is not None
        assert ours.grad.dtype is grad_dtype
        assert same_bits(here(ours.grad), plain.grad)
        master.grad, plain.grad = plain.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        with torch.no_grad():
            plain.copy_(master)
        assert same_bits(ours, plain)
    optimizer.close()


NEIGHBOURS: dict[str, list[Make]] = {
    "an empty one after a complex one": [SHAPES["complex"], lambda: torch.zeros(0)],
    "an empty one before another": [lambda: torch.zeros(2, 0), SHAPES["transposed"]],
    "an empty one of another type": [lambda: torch.ones(3, dtype=torch.float64), lambda: torch.zeros(0, 4)],
    "empty ones alone": [lambda: torch.zeros(0), lambda: torch.zeros(0, dtype=torch.complex128)],
    "a complex empty one": [SHAPES["of no dimensions"], lambda: torch.zeros(0, dtype=torch.complex64)],
    "numbers of all types": [
        SHAPES["of no dimensions"],
        SHAPES["complex, of no dimensions"],
        lambda: torch.tensor(1.0, dtype=torch.float64),
    ],
    "sizes that end between lines": [
        lambda: torch.ones(5, dtype=torch.float64),
        lambda: torch.ones(3, dtype=torch.complex128),
        lambda: torch.ones(7),
        lambda: torch.zeros(3, 0),
        lambda: torch.ones(1),
    ],
}


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"tier": "disk"},
        {"step_on": "gpu"},
        {"step_on": "auto", "cpu_share": 0.5},
        {"fraction": 0.0},
        {"step_in_backward": True},
    ],
    ids=["host", "disk", "streamed", "split", "device", "in-backward"],
)
@pytest.mark.parametrize("name", NEIGHBOURS, ids=lambda name: name.replace(" ", "-").replace(",", ""))
@pytest.mark.parametrize("optimizer_class", [torch.optim.RMSprop, torch.optim.NAdam], ids=lambda one: one.__name__)
def test_parameters_beside_each_other(
    optimizer_class: type[Optimizer], name: str, way: dict[str, Any], session: spillway.Session
) -> None:
    ours, plain = ([Parameter(make()) for make in NEIGHBOURS[name]] for _ in range(2))
    optimizer = OffloadedOptimizer(ours, optimizer_class, lr=0.1, foreach=False, session=session, **way)
    reference = optimizer_class(plain, lr=0.1, foreach=False)  # type: ignore[call-arg]
    for _ in range(3):
        for parameters, one in ((ours, optimizer), (plain, reference)):
            torch.stack([(each * each).abs().sum().double() for each in parameters]).sum().backward()  # type: ignore[no-untyped-call]
            one.step()
            one.zero_grad()
        assert all(same_bits(one, other) for one, other in zip(ours, plain, strict=True))
        optimizer.load_state_dict(optimizer.state_dict())
    assert_same_state(optimizer.state_dict(), reference.state_dict())
    for one, other in zip(ours, plain, strict=True):
        assert all(same_bits(optimizer.state[one][key], value) for key, value in reference.state[other].items())
    optimizer.close()
