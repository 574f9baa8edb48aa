"""What may go wrong beyond the numbered hazards: state, unseen kernels, aliases, layouts, exceptions, threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import spillway
from recompute.regions import (
    PLACES,
    Block,
    Call,
    HiddenAttribute,
    HiddenList,
    Place,
    Regions,
    backward_place,
    choices,
    few_places,
    gradients,
    hides,
    loss_of,
    modes,
    one_place,
    operators_of_backward,
    pointwise_chain,
    ways,
)
from spillway.checkpointing.program import form_of
from spillway.checkpointing.schema import facts_of
from spillway.saved_tensors.handles import in_replay

Options = dict[str, Any]


def one_region(region: Callable[..., Any], *more: Any, size: tuple[int, ...] = (8,), **how: Any) -> Any:
    """A step that calls one region of one leaf, and gives the leaf's gradient."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(size, requires_grad=True)
        with call.context():
            loss = loss_of(call(region, x * 1, *more, **how))
        loss.backward()
        yield from gradients(x)

    return step


# Control flow and state that differ in the re-run. Hidden state: whole, or refused, and never wrong. Seen state: right.


def counting(hides: bool = True) -> Callable[[], int]:
    """Gives the number of its calls; a fresh one for each step."""
    runs: list[int] = HiddenList() if hides else []

    def count() -> int:
        runs.append(1)
        return len(runs)

    return count


CHANGING: dict[str, Callable[[torch.Tensor, Callable[[], int]], torch.Tensor]] = {
    "a number": lambda x, count: (x * count()).sin(),
    "a slice": lambda x, count: x[(start := count()) : start + 4].sin(),
    "a tensor of a number": lambda x, count: (x * torch.tensor(float(count()))).sin(),
    "an array": lambda x, count: (x + torch.from_numpy(np.full(8, count(), "f"))).sin(),
    "a branch": lambda x, count: x.cos().exp() if count() % 2 else x.tanh().sigmoid(),
    "a loop": lambda x, count: functools.reduce(lambda x, _: x.sin() * 2, range(count()), x),
    "a dtype": lambda x, count: (x.double() if count() % 2 else x.half()).sin().float(),
    "an order": lambda x, count: (x.sin() * x.exp() if count() % 2 else x.exp() * x.sin()).cos(),
}


@one_place
@pytest.mark.parametrize("change", CHANGING)
@hides
@modes
def test_what_differs_in_the_re_run_is_never_wrong(regions: Regions, change: str, reentrant: bool, hides: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        count, x = counting(hides), torch.randn(8, requires_grad=True)
        with call.context():
            loss = call(lambda x: CHANGING[change](x, count), x * 1, use_reentrant=reentrant).sum()
        loss.backward()
        yield from gradients(x)

    (regions.right_or_refused if hides else regions)(step)


@one_place
@hides
def test_branches_drawn_by_pythons_own_generator_are_never_wrong(regions: Regions, hides: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        generator = HiddenList([random.Random(0)]) if hides else [random]
        random.seed(0)
        x = torch.randn(8, requires_grad=True)
        branches = [lambda x: x.cos().exp(), lambda x: x.tanh().sigmoid()]
        with call.context():
            loss = sum(call(lambda x: generator[0].choice(branches)(x), x * 1, verify="always") for _ in range(6)).sum()
        loss.backward()
        yield from gradients(x)

    (regions.right_or_refused if hides else regions)(step)


@one_place
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter], ids=["tensor", "parameter"])
@hides
@modes
def test_a_closure_over_the_variable_of_a_loop_is_never_wrong(
    regions: Regions, kind: Any, reentrant: bool, hides: bool
) -> None:
    """By the time of the re-run it names the last weight."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        weights = [torch.randn(8, 8) for _ in range(3)]
        weights = [torch.nn.Parameter(weight) if kind is torch.nn.Parameter else weight for weight in weights]
        x = torch.randn(4, 8, requires_grad=True)
        last = HiddenList()

        def function(x: torch.Tensor) -> torch.Tensor:
            used = last[-1] if hides else weight
            return (x @ used + used.sum()).sin()

        with call.context():
            hidden = x * 1
            for weight in weights:
                last.append(weight)
                hidden = call(function, hidden, use_reentrant=reentrant, verify="always")
        hidden.sum().backward()
        yield from gradients(x, *(weight for weight in weights if weight.requires_grad))

    (regions.right_or_refused if hides else regions)(step)


class Cached(torch.nn.Module):
    """Makes its mask when it first needs it, or when the length changes."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.linear, self.mask = torch.nn.Linear(8, 8), None
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        if self.mask is None or len(self.mask) != count:
            self.mask = torch.full((count, count), float("-inf")).triu(1)
        q = self.norm(self.linear(x))
        return ((q @ q.t()) + self.mask).softmax(-1) @ q.sin()


class HidingCached(Cached):
    mask = HiddenAttribute(None)


@pytest.mark.parametrize("norm", [False, True], ids=["cache", "cache-and-batch-norm"])
@hides
@ways
def test_a_cache_that_the_first_run_fills(regions: Regions, how: Options, norm: bool, hides: bool) -> None:
    """With batch norm in it, and a hidden cache, the region cannot run again whole: then it says so."""
    make = HidingCached if hides else Cached

    def step(call: Call) -> Iterator[torch.Tensor]:
        model, leaves = make(norm), [torch.randn(size, 8, requires_grad=True) for size in (8, 6)]
        with call.context():
            losses = [call(model, leaf * 1, **how).sum() for leaf in leaves]
        losses[0].backward()
        losses[1].backward()
        with call.context():
            again = call(model, leaves[0] * 1, **how)
        yield again
        yield from gradients(*leaves)
        yield from model.buffers()

    (regions.right_or_refused if norm and hides else regions)(step)


@one_place
@hides
@modes
def test_a_cache_in_a_function_beside_statistics(regions: Regions, reentrant: bool, hides: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        norm, x = torch.nn.BatchNorm1d(8), torch.randn(4, 8, requires_grad=True)
        cache: list[torch.Tensor] = HiddenList() if hides else []

        def region(x: torch.Tensor) -> torch.Tensor:
            if not cache:
                cache.append(torch.arange(8.0))
            return (norm(x) + cache[0]).sin()

        with call.context():
            loss = call(region, x * 1, use_reentrant=reentrant).sum()
        loss.backward()
        yield from (*gradients(x, norm), *norm.buffers())

    (regions.right_or_refused if hides else regions)(step)


@one_place
@hides
@pytest.mark.parametrize("differs", ["operand", "constant", "made-constant", "number", "random", "generator"])
@modes
def test_what_differs_beside_a_cache_is_never_wrong(
    regions: Regions, differs: str, reentrant: bool, hides: bool
) -> None:
    """The first run fills a cache, so the re-run is not like it, and is run whole: then it must compute the same."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x, generator, count = torch.randn(8, requires_grad=True), torch.Generator().manual_seed(3), counting(hides)
        first, second = torch.randn(8), torch.randn(8)

        def region(x: torch.Tensor) -> torch.Tensor:
            number = count()
            if number == 1:
                torch.rand(3, generator=generator) if differs == "generator" else torch.rand(3)
            if differs == "operand":
                y, z = x.sin(), x.cos()
                return (y * z.exp() * (y if number == 1 else z)).sin()
            factor = {
                "constant": lambda: first if number == 1 else second,
                "made-constant": lambda: torch.full((8,), float(number)),
                "number": lambda: torch.tensor([float(number)] * 8),
                "random": lambda: torch.rand(8),
                "generator": lambda: torch.rand(8, generator=generator),
            }[differs]()
            return (x * factor).sin()

        with call.context():
            loss = call(region, x * 1, use_reentrant=reentrant).sum()
        loss.backward()
        yield from (*gradients(x), torch.rand(2, generator=generator))

    (regions.right_or_refused if hides else regions)(step)


@one_place
@hides
def test_what_a_region_leaves_for_another_region_is_what_it_computed(regions: Regions, hides: bool) -> None:
    """A re-run that leaves out what nobody wants must not leave garbage behind for those that read it elsewhere."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        shared: list[torch.Tensor] = HiddenList() if hides else []
        x = torch.randn(8, requires_grad=True)

        def first(x: torch.Tensor) -> torch.Tensor:
            shared[:] = [torch.arange(8.0).cos()]
            return (x * 2).sin().exp()

        with call.context():
            hidden = call(first, x * 1)
            loss = call(lambda x: (x + shared[0]).sin(), hidden).sum()
        del hidden
        loss.backward(retain_graph=True)
        yield from [gradient.clone() for gradient in gradients(x)]
        loss.backward()
        yield from (*gradients(x), shared[0])

    (regions.right_or_refused if hides else regions)(step)


@one_place
@hides
@pytest.mark.parametrize("by", ["attribute", "hook", "list"])
def test_what_a_module_notes_for_its_user_is_not_garbage_after_backward(regions: Regions, by: str, hides: bool) -> None:
    """A router's loss, say, which is logged after the step."""

    class Notes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.router = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
            self.noted: list[torch.Tensor] = HiddenList() if hides else []
            if by == "hook":
                self.router.register_forward_hook(lambda module, args, out: self.noted.append(out.detach()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            routed = self.router(x.detach()).logsumexp(-1).detach()
            if by == "attribute":
                self.loss = routed
            elif by == "list":
                self.noted.append(routed)
            return self.linear(x).tanh().exp()

    class Hiding(Notes):
        loss = HiddenAttribute(None)

    def step(call: Call) -> Iterator[torch.Tensor]:
        model, x = (Hiding if hides else Notes)(), torch.randn(4, 8, requires_grad=True)
        with call.context():
            loss = call(model, x * 1).sum()
        loss.backward()
        yield from gradients(x)
        yield model.loss if by == "attribute" else model.noted[-1]

    regions(step)


# Kernels that torch's dispatcher does not see.


def unseen_sine(out: torch.Tensor, x: torch.Tensor) -> None:
    out.numpy()[...] = np.sin(x.detach().numpy())


class UnseenSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        out = torch.empty(x.shape)
        unseen_sine(out, x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0].cos()


def reads_unseen(x: torch.Tensor) -> torch.Tensor:
    tripled, out = x.detach() * 3, torch.empty(x.shape)
    unseen_sine(out, tripled)
    return (x + out).sin()


def writes_unseen(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape) + 1
    out.numpy()[...] *= 3
    return (x * out).sin().exp()


def writes_a_kept_output_unseen(x: torch.Tensor) -> torch.Tensor:
    values = x.detach().topk(8).values
    values.numpy()[...] *= 3
    return (x * values).sin().exp()


def reads_through_an_alias(x: torch.Tensor) -> torch.Tensor:
    tripled = x.detach() * 3
    return (x + torch.from_numpy(tripled.numpy())).sin()


def writes_through_an_alias(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape)
    torch.from_numpy(out.numpy()).copy_(x.detach() * 3)
    return (x + out).sin()


def through_a_function(x: torch.Tensor) -> torch.Tensor:
    return UnseenSine.apply((x * 3).exp()).cos() * UnseenSine.apply(x + 1).detach()


def through_dlpack(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape)
    torch.from_dlpack(out).add_(x.detach() * 3)
    return (x + out).sin()


UNSEEN = [
    *(reads_unseen, writes_unseen, writes_a_kept_output_unseen, reads_through_an_alias, writes_through_an_alias),
    *(through_a_function, through_dlpack),
]


@one_place
@pytest.mark.parametrize("region", UNSEEN, ids=lambda region: region.__name__)
@pytest.mark.parametrize(
    "how", [{}, {"save": "pointwise"}, {"offload": "aten::topk"}, {"use_reentrant": True}], ids=str
)
def test_unseen_kernels_are_noticed_from_the_first_step_on(
    regions: Regions, region: Callable[..., Any], how: Options
) -> None:
    regions.right_or_refused(one_region(region, **how))


class Runs(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Caller:
    """No module, but called like one."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x)


def listed(call: Call, functions: list[Callable[[torch.Tensor], torch.Tensor]]) -> Callable[..., torch.Tensor]:
    return functools.partial(call, lambda x: functions[0](x))


def deep(call: Call, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    for _ in range(5):
        function = functools.partial(run, function)
    return functools.partial(call, function)


WRAPPED: dict[str, Callable[[Call, Callable[..., Any]], Callable[[torch.Tensor], torch.Tensor]]] = {
    "modules of one class": lambda call, f: functools.partial(call, Runs(f)),
    "sequences": lambda call, f: functools.partial(call, torch.nn.Sequential(Runs(f))),
    "partial functions": lambda call, f: functools.partial(call, functools.partial(f)),
    "lambdas of one line": lambda call, f: functools.partial(call, lambda x: f(x)),
    "a function of functions": lambda call, f: functools.partial(call, run, f),
    "callable objects": lambda call, f: functools.partial(call, Caller(f)),
    "methods of objects": lambda call, f: functools.partial(call, Caller(f).method),
    "a list of functions": lambda call, f: listed(call, [f]),
    "functions deep inside": deep,
}


@one_place
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_what_other_functions_were_proven_to_do_says_nothing_of_an_unseen_kernel(
    regions: Regions, wrapped: str
) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(4, 8, requires_grad=True)
        with call.context():
            for depth in range(1, 6):
                layers = [torch.nn.Linear(8, 8), torch.nn.GELU()] * depth
                model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 8))
                WRAPPED[wrapped](call, model)(x * 1).sum().backward()
            yield from [gradient.clone() for gradient in gradients(x)]
            x.grad = None
            WRAPPED[wrapped](call, reads_unseen)(x * 1).sum().backward()
        yield from gradients(x)

    regions.right_or_refused(step, passes=1)


@one_place
def test_other_functions_of_autograd_say_nothing_of_an_unseen_kernel(regions: Regions) -> None:
    def made(depth: int) -> Any:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                saved = x * 1
                if depth:
                    saved = functools.reduce(lambda x, _: x.sin(), range(depth), x)
                else:
                    saved, tripled = torch.empty(x.shape), x * 3
                    unseen_sine(saved, tripled)
                ctx.save_for_backward(saved)
                return saved + x

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient * ctx.saved_tensors[0]

        return Function.apply

    def step(call: Call) -> Iterator[torch.Tensor]:
        for depth in (1, 2, 3, 4, 5, 0):
            x = torch.randn(8, requires_grad=True)
            with call.context():
                loss = call(made(depth), x * 1).sum()
            loss.backward()
            yield from gradients(x)

    regions.right_or_refused(step)


@one_place
def test_two_functions_of_the_same_operators_of_which_one_has_an_unseen_kernel(regions: Regions) -> None:
    class Kernel(torch.nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.reads = reads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tripled, out = x.detach() * 3, torch.empty(x.shape)
            out.numpy()[...] = np.sin(tripled.numpy()) if self.reads else 1
            return (x + out).sin()

    def step(call: Call) -> Iterator[torch.Tensor]:
        for reads in (False, True):
            x = torch.randn(8, requires_grad=True)
            with call.context():
                loss = call(Kernel(reads), x * 1).sum()
            loss.backward()
            yield from gradients(x)

    regions.right_or_refused(step)


class Experts(torch.nn.Module):
    """Ragged experts, routed by counts that the host reads."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.router, self.read = torch.nn.Linear(8, 3), read
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        chosen = chosen.flatten()
        if self.read == "mask":
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().flatten()
                if len(rows):
                    out = out.index_add(0, rows, functional.gelu(expert(x[rows])))
            return out * weight
        counts = functional.one_hot(chosen, 3).sum(0)
        sizes = {
            "tolist": counts.tolist,
            "numpy": lambda: [int(count) for count in counts.numpy()],
            "item": lambda: [int(count.item()) for count in counts],
            "int": lambda: [int(count) for count in counts],
            "bincount": lambda: torch.bincount(chosen, minlength=3).tolist(),
        }[self.read]()
        order = chosen.argsort(stable=True)
        parts = x[order].split(sizes)
        out = torch.cat([functional.gelu(expert(part)) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_copy(0, order, out) * weight


@one_place
@pytest.mark.parametrize("read", ["tolist", "numpy", "item", "int", "bincount", "mask"])
@pytest.mark.covered(times=2)
@ways
def test_ragged_experts(regions: Regions, read: str, how: Options) -> None:
    """The number of tokens of each expert, and of operators, is another one in each step."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        model = Experts(read)
        for tokens in (16, 8, 3, 12):
            x = torch.randn(tokens, 8, requires_grad=True)
            with call.context():
                out = call(model, x * 1, **how)
            out.sum().backward()
            yield from (out, *gradients(x))
        yield from [weight.grad for weight in model.parameters() if weight.grad is not None]

    regions(step)


# What is read from outside, and changes.


CHANGES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "the weight": lambda weight: weight,
    "a detached weight": lambda weight: weight.detach(),
    "a part of it": lambda weight: weight[:8],
    "a part of a detached weight": lambda weight: weight.detach()[:8],
    "a cast of it": lambda weight: weight.double(),
    "an autocast of it": lambda weight: weight,
}


@one_place
@pytest.mark.parametrize("read", CHANGES)
@modes
def test_a_weight_that_changes_between_forward_and_backward(regions: Regions, read: str, reentrant: bool) -> None:
    """Nothing saves it, so plainly that is no error."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        weight, x = torch.nn.Parameter(torch.randn(8)), torch.randn(8, requires_grad=True)
        with call.context():
            loss = call(lambda x: (x + CHANGES[read](weight)).sin(), x * 1, use_reentrant=reentrant).sum()
        with torch.no_grad():
            weight.add_(1)
        loss.backward()
        yield from gradients(x)

    regions.right_or_refused(step)


@modes
def test_an_input_that_is_written_after_the_region(regions: Regions, reentrant: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)
        with call.context():
            hidden = x * 1
            loss = call(lambda x: (x + 1).sin(), hidden, use_reentrant=reentrant).sum()
        hidden.mul_(2)
        loss.backward()
        yield from gradients(x)

    regions.right_or_refused(step)


INSIDE: dict[str, Callable[..., Any]] = {
    "a part": lambda x, buffer: (x * buffer[1:].add_(1)[0]).sin(),
    "and used": lambda x, buffer: (x * buffer.add_(1)).sin(),
    "used before and after": lambda x, buffer: (x * buffer.clone()).sin() * buffer.mul_(2),
    "by out=": lambda x, buffer: (x * torch.add(buffer, 1, out=buffer)).sin(),
    "by foreach": lambda x, buffer: (torch._foreach_add_([buffer], 1), (x * buffer).sin())[1],
}


@one_place
@pytest.mark.parametrize("written", INSIDE)
@pytest.mark.parametrize("given", ["input", "closure"])
@ways
def test_a_tensor_from_outside_that_the_region_writes(regions: Regions, written: str, given: str, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        buffer, x = torch.ones(8), torch.randn(8, requires_grad=True)
        more = [buffer] if given == "input" else []
        region = INSIDE[written] if more else lambda x: INSIDE[written](x, buffer)
        with call.context():
            loss = call(region, x * 1, *more, **how).sum()
        loss.backward()
        yield from (*gradients(x), buffer)

    (regions.right_or_refused if how["use_reentrant"] else regions)(step)


@one_place
@modes
def test_an_input_with_a_history_that_the_region_writes(regions: Regions, reentrant: bool) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.sin() * x.detach()

    regions(one_region(region, use_reentrant=reentrant))


# What comes in and goes out.


OUTPUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the input": lambda x: x,
    "the input and more": lambda x: (x, x.sin(), x),
    "views of the input": lambda x: (x[:4], x.view(2, 4).t(), x.sin()),
    "views of one output": lambda x: (y := x.sin().exp(), y[2:], y.view(2, 4)),
    "no tensors too": lambda x: {"a": [x.sin(), None, 3], "b": ("text", {"c": x.exp()})},
    "integers and bools": lambda x: (x.sin(), (x * 3).long(), x > 0, x.detach().argsort()),
    "complex": lambda x: (torch.complex(x.sin(), x.cos()).conj() * 2).exp(),
    "views of complex": lambda x: (torch.fft.fft(x.sin()).conj().imag * 2, torch.view_as_real(torch.fft.fft(x))),
    "nothing of size": lambda x: (x[:0].sin().exp(), x.sin()),
    "one number": lambda x: x.sin().exp().sum(),
    "expanded": lambda x: x.sin().exp().expand(3, 8),
    "of another dtype": lambda x: (x.double().sin().to(torch.bfloat16).exp(), x.half().exp()),
    "without gradient": lambda x: (x.sin().detach().exp(), x.exp()),
    "masked": lambda x: (x[x > 0].exp(), x.masked_fill(x < 0, 0).sin(), torch.where(x > 0, x.exp(), x)),
    "of tensors made of numbers": lambda x: x * torch.tensor([1.0, 2.0] * 4) + torch.tensor(3.0) * x.exp(),
    "of arrays": lambda x: (x * torch.from_numpy(np.arange(8, dtype="f"))).exp(),
    "of ranges": lambda x: (x * torch.arange(8.0) + torch.linspace(0, 1, 8)).sin() * torch.ones(8).cumsum(0),
}


@one_place
@pytest.mark.parametrize("out", OUTPUTS)
@ways
def test_any_output(regions: Regions, out: str, how: Options) -> None:
    regions(one_region(OUTPUTS[out], **how))


@ways
def test_an_output_is_written_like_any_other(regions: Regions, how: Options) -> None:
    """It is no view of anything that autograd would refuse to see written."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(8, requires_grad=True)
        with call.context():
            hidden = call(lambda x: (x.sin() * 2).exp() + 1, x * 1, **how)
            hidden.mul_(x).relu_()
            loss = call(lambda x: x.sin() + 1, hidden, **how).sum()
        loss.backward()
        yield from gradients(x)

    regions(step)


@one_place
@pytest.mark.parametrize("options", [{}, {"save": "matmul"}, {"offload": "matmul"}, {"use_reentrant": True}], ids=str)
def test_a_region_without_tensor_arguments(regions: Regions, options: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        class Closure(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear, self.x = torch.nn.Linear(8, 8), torch.randn(4, 8)

            def forward(self, scale: float) -> torch.Tensor:
                return functional.dropout(self.linear(self.x.sin()).tanh() * scale, 0.3)

        model = Closure()
        with call.context():
            loss = call(model, 2.0, **options).sum()
        loss.backward()
        yield from gradients(model)

    regions(step)


@one_place
def test_a_function_called_by_its_wrapper_with_no_argument_at_all(regions: Regions) -> None:
    weight = torch.nn.Parameter(torch.randn(8))
    region = spillway.recompute(lambda: weight.sin().exp(), session=regions.session)
    region().sum().backward()
    (expected,) = torch.autograd.grad(weight.sin().exp().sum(), weight)
    assert torch.equal(weight.grad, expected)


@one_place
@modes
def test_without_gradients_nothing_is_done(regions: Regions, reentrant: bool) -> None:
    x = torch.randn(8)
    with torch.no_grad():
        assert torch.equal(spillway.recompute(torch.exp, x, use_reentrant=reentrant), x.exp())
    with torch.inference_mode():
        assert torch.equal(spillway.recompute(torch.exp, x, use_reentrant=reentrant), x.exp())
    module = torch.nn.Linear(8, 8).requires_grad_(False)
    assert not spillway.recompute(module, x, use_reentrant=reentrant, session=regions.session).requires_grad


# Layouts and classes.


@one_place
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["coo", "csr", "mkldnn", "quantized", "sparse-gradient"])
@modes
def test_layouts_inside(regions: Regions, kind: str, reentrant: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        table, x = torch.nn.Embedding(8, 4, sparse=kind == "sparse-gradient"), torch.randn(8, 4, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = (x * 2).sin()
            if kind == "coo":
                places = torch.stack([torch.arange(8), torch.arange(8) % 4])
                hidden = torch.sparse.mm(torch.sparse_coo_tensor(places, hidden[:, 0], (8, 4)), hidden[:4])
            elif kind == "csr":
                hidden = torch.eye(8).to_sparse_csr() @ hidden
            elif kind == "mkldnn":
                hidden = hidden.to_mkldnn().to_dense() * hidden
            elif kind == "quantized":
                rounded = torch.quantize_per_tensor(hidden.detach(), 0.1, 0, torch.quint8).dequantize()
                hidden = hidden + (rounded - hidden).detach()
            return hidden.exp() * table(torch.arange(8) % 3)

        with call.context():
            loss = call(region, x * 1, use_reentrant=reentrant).sum()
        loss.backward()
        yield from gradients(x)
        (gradient,) = gradients(table)
        yield gradient.to_dense() if gradient.is_sparse else gradient

    regions(step)


@one_place
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "where"), [(torch.strided, "input"), (torch.jagged, "inside"), (torch.jagged, "input")]
)
def test_nested_tensors(regions: Regions, layout: torch.layout, where: str) -> None:
    """Torch's checkpoint does the jagged input, and says of the others that it cannot."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, x = torch.nn.Linear(8, 8), torch.randn(6, 8, requires_grad=True)

        def nested(x: torch.Tensor) -> torch.Tensor:
            if layout is torch.strided:
                return torch.nested.as_nested_tensor([x[:2], x[2:]])
            return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))

        def region(x: torch.Tensor) -> torch.Tensor:
            parts = linear(nested(x.sin()) if where == "inside" else x) * 2
            return parts if where == "input" else torch.cat([part.exp() for part in parts.unbind()])

        with call.context():
            out = call(region, x * 1 if where == "inside" else nested(x * 1))
            loss = torch.cat(list(out.unbind())).sum() if where == "input" else out.sum()
        loss.backward()
        yield from gradients(x, linear)

    if (layout, where) == (torch.jagged, "input"):
        regions(step)
    else:
        regions.right_or_refused(step)


@one_place
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_buffer(regions: Regions, layout: torch.layout) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, x = torch.nn.Linear(8, 8), torch.randn(6, 8, requires_grad=True)
        parts = torch.nested.nested_tensor([torch.ones(2, 8), torch.full((4, 8), 2.0)], layout=layout)
        linear.register_buffer("parts", parts)
        linear.register_forward_hook(lambda module, _, out: out * torch.cat(list(module.parts.unbind())))
        with call.context():
            loss = call(linear, x * 1).sum()
        loss.backward()
        yield from gradients(x, linear)

    regions(step)


@pytest.mark.parametrize("needs", ["leaf", "history", "history-saved-inside"])
@ways
def test_a_distributed_tensor_as_input(one_rank: None, regions: Regions, how: Options, needs: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def step(call: Call) -> Iterator[torch.Tensor]:
        weight = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).requires_grad_()
        x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()]).requires_grad_()

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = ((x * 2).sin() @ weight).exp()
            return hidden * x if needs == "history-saved-inside" else hidden + x

        with call.context():
            loss = call(region, x if needs == "leaf" else x * 1, **how).sum()
        loss.backward()
        yield from (gradient.to_local() for gradient in gradients(x, weight))

    regions(step)


@one_place
def test_a_wrapper_from_outside_that_the_region_writes(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        buffer, x = TwoTensor(torch.ones(8), torch.full((8,), 2.0)), torch.randn(8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            buffer.add_(1)
            return (x * (buffer * 2).a).sin()

        with call.context():
            loss = call(region, x * 1).sum()
        loss.backward()
        yield from (*gradients(x), buffer.a, buffer.b)

    regions.right_or_refused(step)


# Operators with many outputs, lists, state.


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        self.gru = torch.nn.GRU(8, 4, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, (last, cell) = self.lstm(x.sin())
        return self.gru(hidden)[0].exp() * last[:1].sin().transpose(0, 1) + cell.sum()


def many_outputs(x: torch.Tensor) -> torch.Tensor:
    values, places = x.topk(3, dim=-1)
    most, where = x.max(dim=-1)
    sorted_values, order = x.sort(dim=-1, stable=True)
    parts = [part.sin() for part in x.split([3, 5], dim=-1)] + list((x * 2).unbind(0))[:1]
    variance, mean = torch.var_mean(x.exp(), dim=-1)
    normed = torch.native_layer_norm(x, (8,), None, None, 1e-5)[0]
    out = (values * places).sum(-1) + most.exp() * where + (sorted_values * order).sin().sum(-1)
    return out + sum(part.exp().sum() for part in parts) + variance * mean + normed.exp().sum(-1)


def decompositions(x: torch.Tensor) -> torch.Tensor:
    square = x @ x.t() + torch.eye(8) * torch.arange(1.0, 9.0)
    q, r = torch.linalg.qr(square)
    values = torch.linalg.svd(square).S
    eigen, vectors = torch.linalg.eigh(square)
    return (q @ r).sin().sum() + values.log().sum() + (vectors @ torch.diag(eigen)).cos().sum() + square.logdet()


def foreach(x: torch.Tensor) -> torch.Tensor:
    listed = torch._foreach_mul(list(x.unbind(0)), 2.0)
    more = torch._foreach_exp(listed)
    torch._foreach_add_(listed, 1.0)
    return sum(a.sin() * b for a, b in zip(torch._foreach_sqrt(torch._foreach_abs(listed)), more, strict=True))


OPERATORS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "many outputs": lambda: many_outputs,
    "decompositions": lambda: decompositions,
    "foreach": lambda: foreach,
    "recurrent": lambda: Recurrent(),
    "attention": lambda: lambda x: functional.scaled_dot_product_attention(x.sin(), x, x.exp(), is_causal=True).cos(),
    "convolution": lambda: torch.nn.Sequential(torch.nn.Conv1d(8, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.SiLU()),
}


@few_places
@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.covered(times=2)
@ways
def test_operators(regions: Regions, operators: str, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        function = OPERATORS[operators]()
        shape = {"recurrent": (4, 5, 8), "attention": (2, 4, 8), "convolution": (4, 8, 8)}.get(operators, (8, 8))
        x = torch.randn(shape, requires_grad=True)
        with call.context():
            loss = call(function, x * 1, **how).sum()
        loss.backward()
        yield from gradients(x)
        if isinstance(function, torch.nn.Module):
            yield from gradients(function)

    # Reentrant, the first run is without gradients, where an LSTM may take other kernels, with other bits.
    (regions.right_or_refused if operators == "recurrent" and how["use_reentrant"] else regions)(step)


@one_place
def test_unwritten_room_in_a_workspace_is_no_unseen_kernel(regions: Regions) -> None:
    """An LSTM saves a workspace with room that no kernel writes: it must not be taken for one."""
    model, x = torch.nn.LSTM(8, 8), torch.randn(4, 5, 8, requires_grad=True)
    with regions.offload() as _:
        loss = spillway.recompute(lambda x: model(x.sin())[0].exp(), x * 1, session=regions.session).sum()
    loss.backward()
    assert regions.last is not None
    assert not [note for note in regions.last.stats().notes if "whole" in note]


_unwritten = itertools.count()


@torch.library.custom_op("spillway_tests::attend", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As fused attention without dropout does: the seed is memory that nobody writes."""
    return x.sin(), torch.tensor(next(_unwritten))


@_attend.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty((), dtype=torch.int64)


_attend.register_autograd(
    lambda ctx, gradient, _: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)


@one_place
def test_a_seed_that_no_kernel_wrote_is_no_other_result(regions: Regions) -> None:
    """Nor where two re-runs are compared: of a size that came later than the first."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return _attend(x.exp())[0].exp() + 1

    for size in (8, 12, 16):
        x = torch.randn(size, requires_grad=True)
        with regions.offload() as _:
            spillway.recompute(function, x * 1, session=regions.session).sum().backward()
        assert regions.last is not None
        assert not [note for note in regions.last.stats().notes if "whole" in note]


STATEFUL: dict[str, Callable[[], torch.nn.Module]] = {
    "BatchNorm1d": lambda: torch.nn.BatchNorm1d(8),
    "BatchNorm2d": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 2, 2)), torch.nn.BatchNorm2d(2), torch.nn.Flatten()
    ),
    "BatchNorm1d-cumulative": lambda: torch.nn.BatchNorm1d(8, momentum=None),
    "BatchNorm1d-untracked": lambda: torch.nn.BatchNorm1d(8, track_running_stats=False),
    "BatchNorm1d-eval": lambda: torch.nn.BatchNorm1d(8).eval(),
    "InstanceNorm1d": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (2, 4)),
        torch.nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        torch.nn.Flatten(),
    ),
    "spectral_norm": lambda: torch.nn.utils.spectral_norm(torch.nn.Linear(8, 8)),
    "parametrized-spectral_norm": lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(8, 8)),
    "weight_norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)),
    "tied": lambda: (linear := torch.nn.Linear(8, 8), torch.nn.Sequential(linear, torch.nn.Tanh(), linear))[1],
}


@one_place
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.covered(times=2)
@ways
def test_statistics_are_counted_once(regions: Regions, kind: str, how: Options) -> None:
    """Over two regions of the same module, and three steps of an optimizer."""
    twice = not how["use_reentrant"]

    def step(call: Call) -> Iterator[torch.Tensor]:
        module = STATEFUL[kind]()
        if kind == "tied" and not twice:
            module = module[:2]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(6, 8, requires_grad=True)
            with call.context():
                hidden = call(module, x.sin(), **how)
                # Reentrant, each use of a weight has a sum of its own, and sums go in another order.
                loss = (call(module, hidden, **how) if twice else hidden).square().mean()
            del hidden
            loss.backward()
            yield from (*gradients(x, module), *(buffer.clone() for buffer in module.buffers()))
            optimizer.step()
            optimizer.zero_grad()

    (regions.right_or_refused if how["use_reentrant"] else regions)(step)


# Operators that change a tensor's shape or memory, wanted and not.


def metadata(x: torch.Tensor, kind: str, wanted: bool) -> torch.Tensor:
    """A view after each, which fails or is another one if its operator is left out."""
    x, side = (x * 3).sin(), x.detach() * 2
    if kind == "resize_":
        side = side[:4].clone().resize_(4, 4).fill_(2.0).view(16)
    elif kind == "t_":
        side = side.clone().view(2, 8).clone().t_()[7].expand(8, 2).reshape(16)
    elif kind == "out=":
        out = torch.empty(0)
        torch.mul(side, 2, out=out)
        side = out.view(4, 4).view(16)
    elif kind == "unsqueeze_":
        side = side.unsqueeze_(0)[0]
    elif kind == "set_":
        side = (x.detach()[:4] * 1).set_(side).view(4, 4).view(16)
    elif kind == "data":
        other = x.detach()[:4] * 1
        other.data = side
        side = other.view(4, 4).view(16)
    elif kind == "as_strided_":
        side = side.clone().as_strided_((2, 8), (8, 1)).view(16)
    else:
        side = torch.cat([side, side]).as_strided((4, 4), (5, 1)).reshape(16)
    return (x * side).exp() if wanted else x.exp() + side


METADATA = ["resize_", "t_", "out=", "unsqueeze_", "set_", "data", "as_strided_", "as_strided"]


@one_place
@pytest.mark.parametrize("kind", METADATA)
@pytest.mark.parametrize("wanted", [False, True], ids=["unwanted", "wanted"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@modes
def test_operators_that_change_shape_or_memory(regions: Regions, kind: str, wanted: bool, reentrant: bool) -> None:
    regions(one_region(metadata, kind, wanted, size=(16,), use_reentrant=reentrant))


@ways
def test_a_part_of_an_output_is_saved_and_the_whole_is_wanted(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        w, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = x @ w
            return hidden[5].sin().sum() + (hidden + 1).sin() * hidden[60:].exp().sum()

        with call.context():
            loss = call(region, x * 1, **how).sum()
        loss.backward()
        yield from gradients(x, w)

    regions(step)


@pytest.mark.parametrize("change", ["part", "row", "view", "detached", "data"])
@pytest.mark.parametrize("how", [{"save": "matmul"}, {"offload": "matmul"}, {"save": ["matmul", "pointwise"]}], ids=str)
def test_a_part_of_a_kept_output_is_written_inside(regions: Regions, how: Options, change: str) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        w, x = torch.randn(8, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = x @ w
            before = (hidden * 2).sin()
            if change == "part":
                hidden[:, 2:4] *= 3
            elif change == "row":
                hidden[0] = before.detach()[0]
            elif change == "view":
                hidden.view(8, 4).t().add_(1)
            elif change == "detached":
                hidden.detach().mul_(2)
            else:
                hidden.data.mul_(2)
            return (hidden + 1).exp() * before

        with call.context():
            loss = call(region, x * 1, **how).sum()
        loss.backward()
        yield from gradients(x, w)

    regions(step)


@one_place
@ways
def test_addresses_are_handed_out_again(regions: Regions, how: Options) -> None:
    """Temporaries of one size, one after the other, take each other's place."""

    def region(x: torch.Tensor) -> torch.Tensor:
        for round_ in range(12):
            side = torch.full((64,), float(round_)) * 2
            x = (x + side.cos() * (side - 1).sin()).sin() * x.detach().clone().tanh()
        return x

    regions(one_region(region, size=(64,), **how))


# Hooks of modules and tensors, anomaly mode, optimisers.


@one_place
@ways
def test_hooks_of_modules_and_tensors(regions: Regions, how: Options) -> None:
    """Those of the backward run once, with what they would have seen."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x, seen = Block(), torch.randn(3, 4, 16, requires_grad=True), []
        block.up.register_forward_hook(lambda module, args, out: out * 2)
        block.down.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        block.qkv.register_full_backward_hook(lambda module, into, out: seen.append(out[0].clone()))

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = block(x.sin())
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient * 3)
            return hidden.exp()

        with call.context():
            loss = call(region, x * 1, **how).square().mean()
        loss.backward()
        yield from (*gradients(x, block), *seen, torch.tensor(len(seen)))

    regions(step)


@one_place
def test_under_anomaly_mode(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)
        with torch.autograd.detect_anomaly(), call.context():
            loss = call(block, x * 1, save="softmax").sum()
            loss.backward()
        yield from gradients(x, block)

    with pytest.warns(UserWarning, match="Anomaly"):
        regions(step)


# Exceptions.


class Deliberate(Exception):
    """Raised by these tests and by nothing else."""


def healthy(call: Call) -> Iterator[torch.Tensor]:
    """A step without a fault: what must still work after one with."""
    block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)
    with call.context():
        loss = call(block, x * 1, offload="matmul", save="norm").square().mean()
    loss.backward()
    yield from gradients(x, block)


@few_places
@pytest.mark.parametrize("error", [Deliberate, KeyboardInterrupt, GeneratorExit, StopIteration])
@ways
def test_an_exception_in_the_first_run_leaves_nothing(
    regions: Regions, no_collector: None, error: type[BaseException], how: Options
) -> None:
    storages = []

    def region(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        storages.append(weakref.ref(x.untyped_storage()))
        x = (x * x).exp()
        storages.append(weakref.ref(x.untyped_storage()))
        raise error

    with regions.offload():
        try:
            spillway.recompute(region, torch.randn(8, requires_grad=True) * 1, session=regions.session, **how)
        except error:
            pass
        else:
            pytest.fail("nothing was raised")
    assert [storage() is None for storage in storages] == [True, True]
    regions.assert_nothing_left()
    regions(healthy)


@few_places
@pytest.mark.parametrize("error", [Deliberate, KeyboardInterrupt])
@pytest.mark.parametrize("run_number", [2, 3, 4])
@ways
def test_an_exception_in_the_re_run_reaches_the_caller(
    regions: Regions, error: type[BaseException], run_number: int, how: Options
) -> None:
    """The second run is the replay that is recorded. The third and fourth ones are those of the next call."""
    runs = HiddenList()

    def region(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        number, x = len(runs), (x * 2).sin()
        if number == run_number or (number > 1 and how["use_reentrant"]):
            raise error
        return (x.exp() * x.cos()).tanh() + 1

    def three_times() -> None:
        for _ in range(3):
            with regions.offload():
                x = torch.randn(8, requires_grad=True) * 1
                loss = spillway.recompute(region, x, session=regions.session, **how)
            loss.sum().backward()

    with pytest.raises(error):
        three_times()
    assert len(runs) == (2 if how["use_reentrant"] else run_number)
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    regions.assert_nothing_left()
    regions(healthy)


@one_place
@pytest.mark.parametrize("asked", ["policy", "predicate"])
@pytest.mark.parametrize("error", [Deliberate, KeyboardInterrupt])
def test_an_exception_in_a_policy_or_predicate(regions: Regions, asked: str, error: type[BaseException]) -> None:
    def decide(*args: Any, **kwargs: Any) -> Any:
        raise error

    how: Options = {"policy": decide} if asked == "policy" else {"save": decide}
    with pytest.raises(error):
        # Selectors are asked while the first call is replayed.
        spillway.recompute(
            torch.nn.Linear(4, 4),
            torch.randn(2, 4, requires_grad=True),
            session=regions.session,
            **how,
        ).sum().backward()
    gc.collect()
    regions.assert_nothing_left()
    regions(healthy)


def test_a_region_whose_backward_never_comes_is_forgotten(regions: Regions, no_collector: None) -> None:
    with regions.offload():
        out = spillway.recompute(Block(), torch.randn(3, 4, 16, requires_grad=True) * 1, offload=["inputs", "matmul"])
    del out
    regions.push_out()
    regions.assert_nothing_left()


WRONG: list[tuple[str, Options]] = [
    ("selector", {"save": "matmuls"}),
    ("selector", {"offload": ""}),
    ("selector", {"save": 3}),
    ("selector", {"save": [None]}),
    ("selector", {"offload": ["matmul", spillway]}),
    ("policy", {"policy": "matmul"}),
    ("policy", {"policy": lambda *args: False, "save": "matmul"}),
    ("determinism_check", {"determinism_check": "all"}),
    ("determinism_check", {"determinism_check": "none", "use_reentrant": True}),
    ("drop_output", {"drop_output": True, "use_reentrant": True}),
    ("drop_output", {"drop_output": True}),
    ("save with use_reentrant", {"save": "matmul", "use_reentrant": True}),
    ("save with use_reentrant", {"save": spillway.saved_by("matmul"), "use_reentrant": True}),
    ("offload of more than 'inputs'", {"offload": ["inputs", "matmul"], "use_reentrant": True}),
    ("policy with use_reentrant", {"policy": lambda *asked, **kwargs: True, "use_reentrant": True}),
]


@pytest.mark.parametrize(("match", "options"), WRONG, ids=lambda value: str(value).partition(" at 0x")[0][:40])
def test_options_that_cannot_be_meant(match: str, options: Options) -> None:
    with pytest.raises(spillway.UsageError, match=match):
        spillway.recompute(torch.sin, torch.randn(4, requires_grad=True), **options)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_selector_of_what_saves_is_checked_when_it_is_made() -> None:
    with pytest.raises(spillway.UsageError, match="selector"):
        spillway.saved_by("nonsense")


@one_place
def test_a_policy_that_answers_nonsense(regions: Regions) -> None:
    with pytest.raises(spillway.PolicyError, match="CheckpointPolicy"):
        spillway.recompute(torch.sin, torch.randn(4, requires_grad=True), policy=lambda *args: "save").sum().backward()
    gc.collect()
    regions.assert_nothing_left()


# Threads, and many regions at once.


@pytest.mark.parametrize("place", PLACES[:2], ids=str, indirect=True)  # the adversary takes all threads for one stream
@pytest.mark.parametrize("backward", ["same-thread", "other-thread"])
@choices
def test_regions_in_several_threads(regions: Regions, backward: str, how: Options) -> None:
    """All are in their forward at once, and then all in their backward, each in the thread of its forward or not."""
    count = 4

    def forward(number: int, call: Call) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(number)
        weight, x = (torch.randn(8, 8, generator=generator, requires_grad=True) for _ in range(2))
        with call.context():
            return call(lambda x: pointwise_chain(x @ weight) @ weight, x * 1, **how).sum(), x, weight

    def backwards(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
        loss.backward()
        return list(gradients(*leaves))

    expected = [backwards(*forward(number, Call(None))) for number in range(count)]
    barrier = threading.Barrier(count, timeout=30)

    def train(number: int) -> Any:
        with _aborting(barrier):
            results = forward(number, Call(regions))
            barrier.wait()
            return backwards(*results) if backward == "same-thread" else results

    for _ in range(3):
        with ThreadPoolExecutor(count) as forwards, ThreadPoolExecutor(count) as others:
            got = list(forwards.map(train, range(count)))
            if backward == "other-thread":
                got = list(others.map(lambda results: backwards(*results), got))
        assert all(map(torch.equal, itertools.chain(*got), itertools.chain(*expected)))
        del got
        regions.assert_nothing_left()


@contextlib.contextmanager
def _aborting(barrier: threading.Barrier) -> Iterator[None]:
    """Who fails lets the others go on."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise


@few_places
@pytest.mark.parametrize("order", ["first-in-first-out", "last-in-first-out", "one-forward-one-backward", "mixed"])
@choices
@pytest.mark.covered(times=2)
def test_many_regions_are_alive_in_any_order(regions: Regions, order: str, how: Options) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        stages, count = [Block(), Block()], 6
        schedule: list[tuple[str, int]] = [("f", number) for number in range(count)]
        backwards = {
            "first-in-first-out": range(count),
            "last-in-first-out": reversed(range(count)),
            "mixed": [3, 0, 5, 1, 4, 2],
        }.get(order)
        if backwards is None:
            schedule = [("f", 0), ("f", 1)]
            for number in range(count):
                schedule += [("b", number), *([("f", number + 2)] if number + 2 < count else [])]
        else:
            schedule += [("b", number) for number in backwards]
        leaves = [torch.randn(3, 4, 16, requires_grad=True) for _ in range(count)]
        losses: dict[int, torch.Tensor] = {}
        for what, number in schedule:
            if what == "f":
                with call.context(tag="microbatch"):
                    hidden = call(stages[1], call(stages[0], leaves[number] * 1, **how), **how)
                    losses[number] = hidden.square().mean()
                    del hidden
            else:
                losses.pop(number).backward()
        yield from gradients(*leaves, *stages)

    regions(step)


# Outputs that are dropped.


def relu_in_place(call: Call, linear: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    hidden.relu_()
    return linear(hidden).sin() * hidden


CONSUMERS: dict[str, Callable[[Call, torch.nn.Module, torch.Tensor], torch.Tensor]] = {
    "one": lambda call, linear, hidden: linear(hidden),
    "two": lambda call, linear, hidden: linear(hidden) + hidden.sin() * hidden.exp(),
    "region": lambda call, linear, hidden: call(lambda x: linear(x).sin().exp(), hidden),
    "reentrant-region": lambda call, linear, hidden: call(lambda x: linear(x).sin().exp(), hidden, use_reentrant=True),
    "dropping-region": lambda call, linear, hidden: linear(
        call(lambda x: linear(x).sin().exp(), hidden, drop_output=True)
    ),
    "view": lambda call, linear, hidden: linear(hidden.view(2, 2, 8)[0].sin()),
    "part": lambda call, linear, hidden: linear(hidden[1:3]),
    "detached": lambda call, linear, hidden: linear(hidden) * hidden.detach().sin(),
    "itself-alive": lambda call, linear, hidden: torch.cat([linear(hidden), hidden]),
    "sum": lambda call, linear, hidden: linear.bias + hidden * linear.weight.sum(),
    "in-place": relu_in_place,
    "part-in-place": lambda call, linear, hidden: (hidden[0].mul_(2), linear(hidden))[1],
}


@few_places
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("how", [{}, {"save": "matmul"}, {"offload": ["inputs", "matmul"]}], ids=str)
@pytest.mark.parametrize("outputs", [1, 2])
@backward_place
def test_dropped_outputs(regions: Regions, consumer: str, how: Options, outputs: int, inside: bool) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        first, second = torch.nn.Linear(8, 8 * outputs), torch.nn.Linear(8, 8)
        x = torch.randn(4, 8, requires_grad=True)

        def region(x: torch.Tensor) -> Any:
            hidden = functional.dropout(first(x).tanh(), 0.3) * 2
            return hidden if outputs == 1 else [part.contiguous() for part in hidden.chunk(2, dim=-1)]

        def consumed() -> torch.Tensor:
            hidden = call(region, x * 1, drop_output=True, **how)
            if outputs == 1:
                return CONSUMERS[consumer](call, second, hidden)
            return CONSUMERS[consumer](call, second, hidden.pop()) + second(hidden.pop()).exp().sum()

        with call.context():
            loss = consumed().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        yield from gradients(x, first, second)

    regions(step)


@pytest.mark.parametrize("in_region", [False, True], ids=["plain-consumer", "consumer-in-a-region"])
def test_a_dropped_output_is_gone_until_backward(regions: Regions, in_region: bool, no_collector: None) -> None:
    def consume(hidden: torch.Tensor) -> torch.Tensor:
        return spillway.recompute(linear, hidden, session=regions.session) if in_region else linear(hidden)

    linear, storages = torch.nn.Linear(64, 64), HiddenList()

    def region(x: torch.Tensor) -> torch.Tensor:
        out = x.sin() * 2
        storages.append(weakref.ref(out.untyped_storage()))
        return out

    with regions.offload():
        x = torch.randn(4, 64, requires_grad=True)
        loss = consume(spillway.recompute(region, x, session=regions.session, drop_output=True)).sum()
        assert storages[0]() is None
    loss.backward()


# What operators save.


@pytest.mark.parametrize("selector", ["attention", "norm", "matmul", "pointwise", "softmax", "random", "aten::*"])
@pytest.mark.parametrize("option", ["save", "offload"])
def test_saved_by(regions: Regions, selector: str, option: str) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        block, x = Block(), torch.randn(3, 4, 16, requires_grad=True)

        def region(x: torch.Tensor) -> torch.Tensor:
            hidden = block(x.sin())
            q = (hidden.exp() * 0.1).unsqueeze(1)
            hidden = hidden + functional.scaled_dot_product_attention(q, q.cos(), hidden.unsqueeze(1) * 2).squeeze(1)
            return functional.dropout(hidden.relu_() + 1, 0.2).tanh()

        with call.context():
            loss = call(region, call(region, x * 1, **{option: spillway.saved_by(selector)})).sum()
        loss.backward(retain_graph=True)
        yield from [gradient.clone() for gradient in gradients(x, block)]
        loss.backward()
        yield from gradients(x, block)

    regions(step)


# The adversary, with all that moves at once.


@pytest.mark.parametrize(
    "place", [Place("host", window, adversary=True) for window in (0, 256, 1 << 20)], ids=str, indirect=True
)
def test_under_the_adversary_with_any_window(place: Place, regions: Regions) -> None:
    """Copies that are late, and memory that nobody wrote full of poison."""

    def step(call: Call) -> Iterator[torch.Tensor]:
        blocks, x = [Block() for _ in range(3)], torch.randn(3, 4, 16, requires_grad=True)
        hows: list[Options] = [{"offload": ["inputs", "matmul"]}, {"offload": spillway.saved_by("norm")}, {}]
        hidden = x * 1
        with call.context(policy=None):
            for block, how in zip(blocks, hows, strict=True):
                hidden = call(block, hidden, **how).sin()
            loss = hidden.square().mean()
        del hidden
        loss.backward()
        yield from gradients(x, *blocks)

    regions(step, passes=3)


def test_what_was_made_in_inference_mode_stays(regions: Regions) -> None:
    """It has no version, by which a write would be noticed."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = float(x.detach().abs().mean())
        return (x / (scale + 1)).sin()

    def step(call: Call) -> Iterator[torch.Tensor]:
        x = torch.randn(4, 8, requires_grad=True)
        with call.context():
            loss = call(function, x * 1, offload=[lambda *_: True]).sum()
        loss.backward()
        yield from gradients(x)

    regions(step)


class _Preactivated(nn.Module):
    """Its activation writes the input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.first, self.second = nn.Conv1d(4, 4, 3, padding=1), _Preactivated(), _Preactivated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(self.begin(x))).tanh()


@pytest.mark.parametrize("outer", ["ours", "torch's", "attached"])
def test_a_nested_function_that_writes_its_input(outer: str) -> None:
    def train(recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(_Stage(), _Stage()), []
        with spillway.Session() as session:
            if recomputes and outer == "attached":
                spillway.attach(
                    model, policy=spillway.Recompute(), blocks=["[01]", "*.first", "*.second"], session=session
                )
            for stage in model if recomputes and outer != "attached" else ():
                for inner in (stage.first, stage.second):
                    inner.forward = partial(spillway.recompute, inner.forward, session=session)
                wrap = checkpoint if outer == "torch's" else spillway.recompute
                options: dict[str, Any] = {"use_reentrant": False} if outer == "torch's" else {"session": session}
                stage.forward = partial(wrap, stage.forward, **options)
            for _ in range(4):
                x = torch.randn(2, 4, 8, requires_grad=True)
                model(x).square().sum().backward()
                found += [*gradients(x, model)]
                model.zero_grad()
        return found

    assert all(map(torch.equal, train(True), train(False)))


@pytest.mark.parametrize("function", [lambda x, w: (x * w).sin(), lambda x, w: (x @ w).sin()])
def test_an_argument_that_requires_grad_later_was_a_constant(function: Callable[..., torch.Tensor]) -> None:
    def train(recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        w, found = torch.randn(8, 8, requires_grad=True), []
        with spillway.Session() as session:
            for _ in range(4):
                x = torch.randn(8, 8)
                y = spillway.recompute(function, x, w, session=session) if recomputes else function(x, w)
                x.requires_grad_(True)
                y.sum().backward()
                assert x.grad is None and w.grad is not None
                found.append(w.grad.clone())
        return found

    assert all(map(torch.equal, train(True), train(False)))


def test_dual_numbers_are_refused() -> None:
    x, forward_ad = torch.randn(4, requires_grad=True), torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(4))
        with pytest.raises(spillway.UnsupportedError, match="dual_level"):
            spillway.recompute(torch.sin, dual)
    spillway.recompute(torch.sin, x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())  # type: ignore[arg-type]


@one_place
def test_a_zero_tensor_has_no_bits(regions: Regions) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        zeros, x = torch._efficientzerotensor((4,)), torch.randn(4, requires_grad=True)
        with call.context():
            loss = call(lambda x: (x.sin() * zeros + x.cos()).exp(), x * 1).sum()
        loss.backward()
        yield from gradients(x)

    regions(step)


# State that forward reads through its own functions.

_SETTINGS = {"factor": 1.0}


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.linear(x)).tanh()

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _ByMethod(_Scaled):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * _SETTINGS["factor"]


class _ByTwoMethods(_Scaled):
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(x)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return x * _SETTINGS["factor"]


class _ByProperty(_Scaled):
    @property
    def factor(self) -> float:
        return _SETTINGS["factor"]

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class _ByStaticMethod(_Scaled):
    @staticmethod
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * _SETTINGS["factor"]

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class _BySuper(_ByMethod):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


def _by_closure() -> nn.Module:
    settings = _SETTINGS

    class Closed(_Scaled):
        def scale(self, x: torch.Tensor) -> torch.Tensor:
            return x * settings["factor"]

    return Closed()


def _by_forward_of_the_instance() -> nn.Module:
    module = _Scaled()
    module.forward = lambda x: (module.linear(x) * _SETTINGS["factor"]).tanh()  # type: ignore[method-assign]
    return nn.Sequential(module)


@pytest.mark.parametrize(
    "make",
    [_ByMethod, _ByTwoMethods, _ByProperty, _ByStaticMethod, _BySuper, _by_closure, _by_forward_of_the_instance],
    ids=lambda make: make.__name__.strip("_"),
)
@pytest.mark.parametrize("is_attached", [False, True])
def test_settings_that_change_between_two_micro_batches(make: Callable[[], nn.Module], is_attached: bool) -> None:
    def train(recomputes: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(make(), make()), []
        with spillway.Session() as session:
            if recomputes and is_attached:
                spillway.attach(model, policy=spillway.Recompute(), blocks=["0", "1"], session=session)
            for step in range(4):
                losses = []
                for factor in (1.0, 2.0 + step):
                    _SETTINGS["factor"] = factor
                    y = torch.randn(4, 8, requires_grad=True)
                    for block in () if is_attached else model:
                        y = spillway.recompute(block, y, session=session) if recomputes else block(y)
                    losses.append((model(y) if is_attached else y).square().sum())
                sum(losses).backward()  # type: ignore[union-attr]
                found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
                model.zero_grad()
        _SETTINGS["factor"] = 1.0
        assert len(found) == 16
        return found

    assert all(map(torch.equal, train(True), train(False)))


@one_place
def test_other_threads_draw_numbers_once(regions: Regions) -> None:
    """A replay rewinds only generators that its forward has advanced."""
    drawn = HiddenList()

    def function(x: torch.Tensor) -> torch.Tensor:
        if in_replay():
            thread = threading.Thread(target=lambda: drawn.append((random.random(), np.random.rand())))
            thread.start()
            thread.join()
        return x.sin()

    for _ in range(3):
        drawn.clear()
        random.seed(0)
        np.random.seed(0)
        wanted = [(random.random(), np.random.rand()) for _ in range(3)]
        random.seed(0)
        np.random.seed(0)
        y = spillway.recompute(function, torch.randn(4, requires_grad=True) * 1, session=regions.session)
        drawn.append((random.random(), np.random.rand()))
        y.sum().backward()
        drawn.append((random.random(), np.random.rand()))
        assert drawn == wanted


@one_place
@pytest.mark.parametrize("which", ["argument", "parameter", "after accumulation"])
@ways
def test_hooks_that_the_function_registers_on_leaves_act_once(regions: Regions, how: Options, which: str) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        linear, x, seen = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), HiddenList()

        def function(x: torch.Tensor) -> torch.Tensor:
            leaf = x if which == "argument" else linear.weight
            if which == "after accumulation":
                leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.sum()))
            else:
                leaf.register_hook(lambda gradient: gradient * 0.5)
            return linear(x).sin().exp()

        for _ in range(3):
            with call.context():
                loss = call(function, x, **how).sum()
            loss.backward()
            yield from gradients(x, linear)
            yield from seen
            yield torch.tensor(len(seen))

    regions(step)


# Functions that change after their program was recorded, while partial replays follow it.


class _Changing(nn.Module):
    """Two layers before a ``middle``, and one after it. In later calls ``late`` is true."""

    def __init__(self, middle: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("written", torch.zeros(8))
        self.register_buffer("other", torch.ones(8))
        self.late = False
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.middle(self, self.first(x), self.second(x)))


def _every_second(call: Any) -> bool:
    return bool(call.index % 2 == 0)


changing_ways = pytest.mark.parametrize(
    "how",
    [
        {},
        {"save": "matmul"},
        {"offload": "matmul"},
        {"offload": ["inputs", "matmul", "norm"]},
        {"save": "aten::add.Tensor", "offload": "matmul"},
        {"save": _every_second},
        {"offload": _every_second},
    ],
    ids=["nothing", "save", "offload", "norms-too", "sums-too", "save-some", "offload-some"],
)


def _trains_alike(
    regions: Regions,
    middle: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
    how: Options,
    scale: Callable[[int], float] = lambda number: 1.0,
) -> None:
    def step(call: Call) -> Iterator[torch.Tensor]:
        model = _Changing(middle)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(7):
            model.late = number >= 4
            x = (torch.randn(4, 8) * scale(number)).requires_grad_()
            with call.context():
                loss = call(model, x * 1, **how).square().mean()
            loss.backward()
            yield from (loss, x.grad, *model.buffers())  # type: ignore[misc]
            yield from (each.grad for each in model.parameters() if each.grad is not None)
            optimizer.step()
            optimizer.zero_grad()

    regions(step)


def _writes_one_of_two(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (a if model.late else b).mul_(2)
    return a.sin() * b.cos()


def _writes_what_no_gradient_needs(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    unneeded = b.detach() * 3
    before = a.exp()
    (a.detach() if model.late else unneeded).mul_(2)
    return a.sin() + before.tanh()


def _writes_a_result(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    unneeded, result = b.detach() * 3, a.sin()
    (result if model.late else unneeded).mul_(2)
    return a.tanh() * result.cos()


def _reads_a_buffer_that_it_wrote(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    model.written.copy_(a.detach().mean(0))
    return functional.gelu(b) * ((model.written if model.late else model.other) * 2)


def _reads_statistics(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    normed = model.norm(a)
    return functional.gelu(normed) * (model.norm.running_mean if model.late else model.other).clone() + b


def _casts_a_weight_that_it_wrote(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.third.weight.clamp_(-0.1, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        return model.third(functional.gelu(a)).float() * b  # type: ignore[no-any-return]


@one_place
@pytest.mark.parametrize(
    "middle",
    [
        _writes_one_of_two,
        _writes_what_no_gradient_needs,
        _writes_a_result,
        _reads_a_buffer_that_it_wrote,
        _reads_statistics,
        _casts_a_weight_that_it_wrote,
    ],
    ids=lambda middle: middle.__name__.strip("_"),
)
@changing_ways
def test_writes_that_a_program_did_not_foresee(regions: Regions, how: Options, middle: Any) -> None:
    _trains_alike(regions, middle, how)


def _draws_by_poisson(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    model.events = torch.poisson(a.detach().abs() * (3.0 * model.late)).sum()
    return functional.dropout(a, 0.3) + b.sin()


def _draws_by_binomial(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    model.events = torch.binomial(torch.full((4,), 5.0 * model.late), a.detach()[:, 0].sigmoid()).sum()
    return functional.dropout(a, 0.3) + b.sin()


def _draws_by_rrelu(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    model.events = functional.rrelu(a.detach() + (0 if model.late else 100), training=True).sum()
    return functional.dropout(a, 0.3) + b.sin()


@one_place
@pytest.mark.parametrize(
    "middle", [_draws_by_poisson, _draws_by_binomial, _draws_by_rrelu], ids=lambda middle: middle.__name__.strip("_")
)
@changing_ways
def test_operators_that_draw_nothing_at_first(regions: Regions, how: Options, middle: Any) -> None:
    _trains_alike(regions, middle, how)


@one_place
def test_saved_attention_is_not_recomputed_beside_dropout(regions: Regions) -> None:
    """By its tags it may draw random numbers, as dropout does."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x[:, None]
        return functional.dropout(functional.scaled_dot_product_attention(x, x, x).sin(), 0.1).exp()

    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert attention in operators_of_backward(regions, function, save="attention")
    names = operators_of_backward(regions, function, save="attention")
    assert "bernoulli_" in names and attention not in names


def test_attention_that_begins_to_drop_has_another_form() -> None:
    facts, q = facts_of(torch.ops.aten._scaled_dot_product_flash_attention.default), torch.zeros(1, 2, 4, 8)
    forms = [form_of(facts, (q, q, q, probability), {}) for probability in (0.0, 0.1, 0.2)]
    assert forms[0] != forms[1] == forms[2]


@torch.library.custom_op("spillway_attacks::any_above", mutates_args=())
def _any_above(x: torch.Tensor) -> bool:
    return bool((x.abs() > 3).any())


@torch.library.custom_op("spillway_attacks::count_above", mutates_args=())
def _count_above(x: torch.Tensor) -> int:
    return int((x.abs() > 3).sum())


@torch.library.custom_op("spillway_attacks::share_above", mutates_args=())
def _share_above(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    return x.abs(), float((x.abs() > 3).float().mean())


@one_place
@pytest.mark.parametrize("operator", [_any_above, _count_above, _share_above], ids=lambda operator: operator._name)
@changing_ways
def test_numbers_that_an_operator_computes(regions: Regions, how: Options, operator: Any) -> None:
    def middle(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = operator(a.detach())
        number = found[1] if isinstance(found, tuple) else found
        return functional.gelu(a) * (0.5 + number / 100) * b.sin()

    _trains_alike(regions, middle, how, scale=lambda number: 8.0 if number >= 4 else 0.1)
