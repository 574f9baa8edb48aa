"""Random loops, ours beside one that is plainly written out: parameters, states and masters are equal bit for bit.

A case is a number: it says which parameters, class, settings and place there are, and what is done in each step.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import spillway
from optim.support import FUSED, MODULES_WITH_CHUNK, same_bits
from spillway import OffloadedOptimizer
from spillway.testing import AdversaryBackend

CASES = 60
LONG = 2500

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}

TYPES = (
    [torch.float32],
    [torch.bfloat16],
    [torch.float16],
    [torch.float64],
    [torch.float32, torch.bfloat16],
    [torch.float32, torch.complex64],
)

CLASSES: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.05}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {"t0": 1}),
    (torch.optim.Rprop, {}),
)

SHAPES = ((), (1,), (7,), (3, 5), (0,), (2, 0), (4, 3, 2), (67,), (9, 11), (130,))

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"fraction": 0.5},
    {"fraction": 0.0},
    {"step_on": "gpu"},
    {"step_on": "auto", "cpu_share": 0.5},
    {"step_on": "auto", "cpu_share": 0.3, "fraction": 0.7},
    {"step_on": "auto", "cpu_share": 0.6, "step_in_backward": True},
    {"tier": "disk"},
    {"offload_gradients": False},
    {"step_in_backward": True},
    {"device_budget": 2000},
)


def _flat_bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


# What may be done to the parameters; some of it changes no version.


def clamp(parameter: Parameter) -> None:
    if not parameter.is_complex():
        parameter.data.clamp_(-0.2, 0.2)


def scale(parameter: Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.25)


def scale_data(parameter: Parameter) -> None:
    parameter.data.mul_(0.75)


def other(parameter: Parameter) -> None:
    parameter.data = parameter.data.clone().neg_()


def one_element(parameter: Parameter) -> None:
    if parameter.numel():
        parameter.data[(-1,) * parameter.ndim] = 0.5


def to_and_fro(parameter: Parameter) -> None:
    kept = parameter.data.clone()
    parameter.data.zero_()
    parameter.data.copy_(kept)


WRITES = (clamp, scale, scale_data, other, one_element, to_and_fro)


class Reference:
    """Parameters, and a copy of each in the type of the step, which the plain class steps."""

    def __init__(self, parameters: list[Parameter], work: list[torch.dtype], make: Callable[..., Any]) -> None:
        self.parameters = parameters
        self.copies = [
            Parameter(one.detach().to(dtype), requires_grad=False) for one, dtype in zip(parameters, work, strict=True)
        ]
        self.optimizer = make(self.copies)

    def gather(self) -> None:
        """Add what came to the copies' gradients."""
        for copied, parameter in zip(self.copies, self.parameters, strict=True):
            if parameter.grad is not None:
                came = parameter.grad.to(copied.dtype)
                copied.grad = came if copied.grad is None else copied.grad + came
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for copied, parameter in zip(self.copies, self.parameters, strict=True):
            if copied.grad is None:
                continue
            there = copied.to(parameter.dtype)
            bits = BITS[parameter.itemsize]
            if parameter.is_complex() or copied.dtype == parameter.dtype:
                copied.copy_(parameter)
            else:
                same = there.view(bits) == parameter.detach().view(bits)
                copied.copy_(torch.where(same, copied, parameter.to(copied.dtype)))
        # The fused kernel of SGD takes those that have momentum already, or those that have none yet.
        gradients = [copied.grad for copied in self.copies]
        known = [bool(self.optimizer.state.get(copied)) for copied in self.copies]
        for now in (False, True):
            for copied, gradient, is_known in zip(self.copies, gradients, known, strict=True):
                copied.grad = gradient if is_known is now else None
            self.optimizer.step()
        for copied, gradient in zip(self.copies, gradients, strict=True):
            copied.grad = gradient
        for copied, parameter in zip(self.copies, self.parameters, strict=True):
            if copied.grad is not None:
                parameter.copy_(copied)


class Case:
    """One loop.

    Args:
        number: says all of it.
    """

    def __init__(self, number: int) -> None:
        self.random = dice = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        dtypes = dice.choice(TYPES)
        self.adversary = AdversaryBackend() if dice.random() < 0.5 else None
        self.way = dict(dice.choice(WAYS))
        self.chunk = dice.choice([64, 1 << 22])
        optimizer_class, defaults = dice.choice(CLASSES)
        while torch.complex64 in dtypes and (optimizer_class in FUSED or optimizer_class is torch.optim.Rprop):
            # Their fused kernels take no complex numbers, and one reference has one implementation.
            optimizer_class, defaults = dice.choice(CLASSES)
        self.optimizer_class = optimizer_class
        master = dice.choice(["auto", "auto", None])
        shapes = [dice.choice(SHAPES) for _ in range(dice.randint(1, 6))]
        own = [dice.choice(dtypes) for _ in shapes]
        values = [
            torch.randn(shape, generator=self.generator).to(dtype) for shape, dtype in zip(shapes, own, strict=True)
        ]
        values = [one.t() if one.ndim == 2 and dice.random() < 0.3 else one for one in values]
        narrow = master == "auto"
        work = [torch.float32 if narrow and dtype.itemsize == 2 else dtype for dtype in own]
        fused = optimizer_class in FUSED and (
            optimizer_class is not torch.optim.SGD or all(one.itemsize >= 4 for one in work)
        )
        if optimizer_class is torch.optim.SGD and not fused:
            work_is_mixed = len({one.itemsize >= 4 for one in work}) > 1
            if work_is_mixed:
                # One reference has one implementation.
                master, work = "auto", [torch.float32] * len(own)
                fused = True
        how = {"fused": True} if fused else {"foreach": False}
        self.lr = dice.choice([1e-1, 1e-2])
        self.defaults = {**defaults, "lr": self.lr}
        ours = [Parameter(one.clone()) for one in values]
        plain = [Parameter(one.clone()) for one in values]
        self.cut = dice.randint(0, len(ours)) if dice.random() < 0.5 else 0

        def groups(some: list[Parameter]) -> list[dict[str, Any]]:
            parts = [some[: self.cut], some[self.cut :]]
            return [{"params": part, "lr": self.lr / (1 + n)} for n, part in enumerate(parts) if part]

        self.session = spillway.Session(backend=self.adversary.serve if self.adversary else None)
        # The device's step runs as it is configured, and the plain one is.
        options = {**self.way, **how, "master_dtype": master, "session": self.session}
        self.make: Callable[[list[Parameter]], OffloadedOptimizer] = lambda some: OffloadedOptimizer(
            groups(some), optimizer_class, **self.defaults, **options
        )
        self.ours = ours
        self.optimizer = self.make(ours)
        self.reference = Reference(plain, work, lambda some: optimizer_class(groups(some), **self.defaults, **how))
        self.on_host = not {"fraction", "step_on", "device_budget"} & self.way.keys()
        leaves = self.way.get("offload_gradients", True)
        # On the device the fused kernel of SGD is given all at once, and takes no parameters of which some are new.
        self.may_freeze = 0.1 if self.on_host or optimizer_class is not torch.optim.SGD else 0.0
        self.early = bool(self.way.get("step_in_backward"))
        wide = all(one == each for one, each in zip(own, work, strict=True))
        # Elsewhere gradients are added up, and clipped, in their own type.
        self.may_change = not self.early and (wide or (self.on_host and leaves)) and torch.complex64 not in own

    def run(self) -> None:
        for _ in range(self.random.randint(2, 5)):
            self._step()
            self._compare()
        self.optimizer.close()
        self.session.close()
        if self.adversary is not None:
            self.adversary.check()

    def _step(self) -> None:
        dice = self.random
        self._maybe(0.5, self._write)
        frozen = {index for index in range(len(self.ours)) if dice.random() < self.may_freeze}
        for _ in range(dice.choice([1, 1, 2, 3]) if self.may_change else 1):
            self._backward(frozen)
            if not self.early:
                self._maybe(0.3, self._write)
        if self.may_change:
            self._maybe(0.3, self._scale)
            # Of gradients of several types torch takes the norms type by type, and the copies' are of one.
            self._maybe(0.4 if len({one.dtype for one in self.ours}) == 1 else 0.0, self._clip)
        if not self.early:
            self._maybe(0.3, self._write)
        self._both_step()
        self._maybe(0.3, self._write)
        self._maybe(0.3, self._edit_states)
        self._maybe(0.2, self._resume)
        self._maybe(0.2, self._other_settings)

    def _maybe(self, chance: float, deed: Callable[[], None]) -> None:
        if self.random.random() < chance:
            deed()

    def _pairs(self) -> Iterator[tuple[Parameter, Parameter]]:
        yield from zip(self.ours, self.reference.parameters, strict=True)

    def _backward(self, frozen: set[int]) -> None:
        weights = [torch.randn(one.shape, generator=self.generator).to(one.dtype) for one in self.ours]
        for parameters in (self.ours, self.reference.parameters):
            losses = [
                (one * one * weight).abs().sum().double()
                for index, (one, weight) in enumerate(zip(parameters, weights, strict=True))
                if index not in frozen
            ]
            if losses:
                torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        self.reference.gather()

    def _gradients(self) -> Iterator[list[Tensor]]:
        yield [one.grad for one in self.ours if one.grad is not None]
        yield [one.grad for one in self.reference.copies if one.grad is not None]

    def _scale(self) -> None:
        factor: Any = self.random.choice([0.37, 0.5, torch.tensor(0.3), torch.tensor(2.0**-7)])
        for gradients in self._gradients():
            for gradient in gradients:
                gradient.mul_(factor)

    def _clip(self) -> None:
        order = self.random.choice([2.0, 1.0, math.inf])
        most = self.random.choice([0.1, 10.0])
        norms = []
        for parameters in (self.ours, self.reference.copies):
            # Not of none: its norm is of the default type.
            some = [one for one in parameters if one.grad is not None and one.numel()]
            norms.append(torch.nn.utils.clip_grad_norm_(some, most, norm_type=order))
        assert same_bits(*norms)

    def _write(self) -> None:
        index, write = self.random.randrange(len(self.ours)), self.random.choice(WRITES)
        for parameter in (self.ours[index], self.reference.parameters[index]):
            write(parameter)

    def _both_step(self) -> None:
        self.optimizer.step()
        self.reference.step()
        set_to_none = self.random.random() < 0.7 or not self.may_change
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.reference.optimizer.zero_grad(set_to_none=set_to_none)

    def _edit_states(self) -> None:
        index = self.random.randrange(len(self.ours))
        state = self.optimizer.state[self.ours[index]]
        plain = self.reference.optimizer.state[self.reference.copies[index]]
        for name in sorted(plain):
            value = plain[name]
            if not isinstance(value, Tensor) or value.ndim == 0 or self.random.random() < 0.5:
                continue
            if self.random.random() < 0.5:
                state[name].mul_(0.5)
                value.mul_(0.5)
            else:
                state[name], plain[name] = torch.ones_like(state[name]), torch.ones_like(value)

    def _resume(self) -> None:
        saved = copy.deepcopy(self.optimizer.state_dict())
        self.ours = [Parameter(one.detach().clone()) for one in self.ours]
        self.optimizer.close()
        self.optimizer = self.make(self.ours)
        self.optimizer.load_state_dict(saved)
        # The new parameters have no gradients, not even zeros.
        self.reference.optimizer.zero_grad()

    def _other_settings(self) -> None:
        factor = self.random.choice([0.5, 2.0])
        for optimizer in (self.optimizer, self.reference.optimizer):
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def _compare(self) -> None:
        self.optimizer.synchronize()
        copies = self.reference.copies
        for index, ((ours, plain), copied) in enumerate(zip(self._pairs(), copies, strict=True)):
            assert torch.equal(_flat_bits(ours), _flat_bits(plain)), f"parameter {index}"
            state, expected = dict(self.optimizer.state.get(ours, {})), self.reference.optimizer.state.get(copied, {})
            state.pop("master", None)
            assert state.keys() == expected.keys(), f"state of {index}"
            for name, value in expected.items():
                assert same_bits(state[name], value), f"{name} of {index}"


def run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(number)
    for name in MODULES_WITH_CHUNK:
        monkeypatch.setattr(importlib.import_module(f"spillway.optim.{name}"), "CHUNK", case.chunk)
    try:
        case.run()
    except Exception as error:
        error.add_note(f"case {number}: {case.optimizer_class.__name__}, {case.way}")
        raise


@pytest.mark.parametrize("number", range(CASES))
def test_a_random_loop(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(number, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("number", range(CASES, LONG))
def test_many_random_loops(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run(number, monkeypatch)


def test_a_norm_has_the_type_of_a_gradient_that_a_tensor_has_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power of two, as of a gradient scaler, in a tensor of another type."""
    run(2146, monkeypatch)
