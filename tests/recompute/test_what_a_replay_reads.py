"""A replay reads what the first run read, whatever is there by then, and is compared up to its last tensor."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import spillway
from recompute.regions import Call, HiddenAttribute, HiddenList, Regions, gradients, one_place, ways
from support import assert_identical, assert_nothing_left

pytestmark = one_place

Options = dict[str, Any]
REENTRANT = {"use_reentrant": True}

# What is read from outside.


class Conditioned(nn.Module):
    """Reads a tensor that its user replaces before each call, and holds nowhere else."""

    def __init__(self, read: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.embed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 8)
        self.read = read
        self.given: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.down(READS[self.read](self, torch.tanh(self.up(x))))

    def condition(self, closure: HiddenList) -> None:
        self.given = GIVEN[self.read](self)
        if self.read.startswith("hidden"):
            closure[:], self.given = [self.given], closure


READS: dict[str, Callable[[Conditioned, Tensor], Tensor]] = {
    "with a history": lambda m, h: torch.tanh(h + m.given),
    "a view of it": lambda m, h: torch.tanh(h + m.given[1:7]),
    "a mask": lambda m, h: h.masked_fill(m.given, 0.5),
    "an index": lambda m, h: h[m.given],
    "a sparse matrix": lambda m, h: torch.sparse.mm(m.given, h),
    "many elements": lambda m, h: (h * m.given).sin(),
    "a cast": lambda m, h: torch.tanh(h + m.given),
    "hidden with a history": lambda m, h: torch.tanh(h + m.given[0]),
    "hidden mask": lambda m, h: h.masked_fill(m.given[0], 0.5),
}
GIVEN: dict[str, Callable[[Conditioned], Any]] = {
    "with a history": lambda m: m.embed(torch.randn(6, 4)),
    "a view of it": lambda m: m.embed(torch.randn(8, 4)),
    "a mask": lambda m: torch.rand(6, 8) < 0.3,
    "an index": lambda m: torch.randperm(6),
    "a sparse matrix": lambda m: (torch.rand(6, 6) * (torch.rand(6, 6) < 0.5)).to_sparse(),
    "many elements": lambda m: torch.rand(6, 8).repeat(1, 1),
    "a cast": lambda m: m.embed(torch.randn(6, 4)).double().float(),
    "hidden with a history": lambda m: m.embed(torch.randn(6, 4)),
    "hidden mask": lambda m: torch.rand(6, 8) < 0.3,
}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize("read", READS)
@ways
def test_a_tensor_that_was_replaced_since(regions: Regions, how: Options, read: str, nested: bool) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        model, hidden = Conditioned(read), HiddenList()
        for _ in range(3):
            outputs = []
            model.zero_grad()
            x = torch.randn(6, 8, requires_grad=True)
            with call.context():
                for n in range(1, 4):
                    model.condition(hidden)
                    function = (lambda y: call(model, y, **how) * 2) if nested else model
                    outputs.append(call(function, x * n, **how))
            (outputs[0] - outputs[1] * outputs[2]).square().mean().backward()
            yield from gradients(x)
            if not how.get("use_reentrant"):
                yield from gradients(model.up, model.down)

    if read.startswith("hidden"):
        how = {**how, "verify": "always"}
    if how.get("use_reentrant") or read.startswith("hidden"):
        # Torch's own reentrant mode goes through the graph of what is read once more, in each re-run.
        right_or_an_error(regions, step)
    else:
        regions(step)


def right_or_an_error(regions: Regions, step: Any) -> None:
    try:
        regions.right_or_refused(step)
    except RuntimeError as error:
        assert "backward through the graph a second time" in str(error)


# The last tensor that is saved.

ENDS = ["sin", "cos", "tanh", "exp", "sigmoid", "square", "abs", "sqrt", "log1p", "relu", "erf", "asinh"]


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("how", [{}, {"save": "matmul"}, {"early_stop": False}], ids=str)
def test_the_operator_of_the_last_saved_tensor_is_compared(regions: Regions, how: Options, first: str) -> None:
    for second in ENDS:
        if second == first:
            continue
        for forwards in (1, 2, 3):
            runs, linear = HiddenList(), nn.Linear(8, 8)

            def function(
                x: Tensor, runs: HiddenList = runs, linear: nn.Linear = linear, limit: int = forwards
            ) -> Tensor:
                runs.append(1)
                return getattr(linear(x).abs(), first if len(runs) <= limit else second)()  # noqa: B023

            x = torch.rand(4, 8, requires_grad=True)
            with regions.offload():
                y = spillway.recompute(function, x * 1, session=regions.session, **how)
            expected = torch.autograd.grad(getattr(linear(x).abs(), first)().sum(), x)
            try:
                found = torch.autograd.grad(y.sum(), x)
            except spillway.RecomputeError:
                continue
            assert_identical(found, expected)


def test_a_branch_by_chance_in_first_calls(regions: Regions) -> None:
    hidden = random.Random(3)
    box = HiddenList([hidden])
    for _ in range(100):
        linear, chosen = nn.Linear(8, 8), HiddenList()

        def function(x: Tensor, linear: nn.Linear = linear, chosen: HiddenList = chosen) -> Tensor:
            chosen.append(box[0].random() < 0.5)
            return linear(x).sin() if chosen[-1] else linear(x).cos()

        x = torch.randn(4, 8, requires_grad=True)
        y = spillway.recompute(function, x * 1, session=regions.session)
        expected = torch.autograd.grad((linear(x).sin() if chosen[0] else linear(x).cos()).sum(), x)
        try:
            found = torch.autograd.grad(y.sum(), x)
        except spillway.RecomputeError:
            continue
        assert_identical(found, expected)


# What comparing by sums must show.

EVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": torch.abs,
    "square": torch.square,
    "cos": torch.cos,
    "pow": lambda h: h.pow(4),
    "product with itself": lambda h: h * h,
    "matrix product with itself": lambda h: h @ h.T,
    "distances": lambda h: torch.cdist(h, h),
    "two exponentials": lambda h: h.exp() + (-h).exp(),
    "sine times itself": lambda h: h.sin() * h,
    "layer norm": lambda h: functional.layer_norm(h, (8,)),
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "max": lambda h: h.abs().max(-1).values,
}


@pytest.mark.parametrize("flip", [-1.0, 2.0], ids=["a sign", "a scale"])
@pytest.mark.parametrize("even", EVEN)
def test_what_an_even_function_hides_is_seen(regions: Regions, even: str, flip: float) -> None:
    class Block(nn.Module):
        scale = HiddenAttribute(1.0)

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return EVEN[even](torch.sin(self.up(x)) * self.scale)

    block, how = Block(), {"verify": "always", "session": regions.session}
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        expected = torch.autograd.grad(block(x).sin().sum(), x)
        y = spillway.recompute(block, x * 1, **how).sin().sum()
        if seed > 4:
            block.scale = flip
        try:
            found = torch.autograd.grad(y, x)
        except spillway.RecomputeError:
            assert seed > 4
        else:
            assert_identical(found, expected)
        block.scale = 1.0


# Settings, and kernels.


def _precision(name: str) -> Callable[[], Any]:
    return lambda: torch.set_float32_matmul_precision(name)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "mkldnn": (lambda: torch._C._set_mkldnn_enabled(False), lambda: torch._C._set_mkldnn_enabled(True)),
    "precision": (_precision("medium"), _precision("highest")),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "deterministic": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.use_deterministic_algorithms(False),
    ),
}


@pytest.mark.parametrize("when", ["around forward", "from backward on"])
@pytest.mark.parametrize("setting", SETTINGS)
@ways
def test_settings_are_those_of_the_first_run(regions: Regions, how: Options, setting: str, when: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.c = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.b(torch.tanh(self.a(x))))
            return torch.tanh(self.c(h) + torch.full((16,), 0.1))

    put, back = SETTINGS[setting]

    def step(call: Call) -> Iterator[Tensor]:
        net = Net()
        for _ in range(4):
            x = torch.randn(2, 3, 16, 16, requires_grad=True)
            net.zero_grad()
            try:
                if when == "around forward":
                    put()
                with call.context():
                    loss = call(net, x * 1, **how).square().mean()
                back() if when == "around forward" else put()
                loss.backward()
            finally:
                back()
            yield from (loss.detach(), *gradients(x, net))

    if when == "from backward on":
        # Backward's own kernels go by the setting, too, in both.
        regions.right_or_refused(step)
    else:
        regions(step)


@ways
def test_kernels_that_a_mode_would_change(regions: Regions, how: Options) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            pooled = functional.max_pool1d(z, 2)
            square = z[0] @ z[0].T
            numbers = torch.linalg.eigvalsh(square).sum() + torch.linalg.svdvals(z[1]).mean()
            numbers = numbers * torch.linalg.norm(z[2], "nuc") / torch.linalg.cond(square) + torch.norm(z[3], "nuc")
            h = torch.tanh(self.up(x))
            return (h.sin() * pooled.sum(1)[:, :8]).sum() + (h * numbers).cos().sum() + (pooled.flatten()[:8] * h).sum()

    def step(call: Call) -> Iterator[Tensor]:
        net = Net()
        for _ in range(4):
            x, z = torch.randn(4, 8, requires_grad=True), torch.randn(4, 16, 16)
            net.zero_grad()
            with call.context():
                loss = call(net, x * 1, z, **how)
            loss.backward()
            yield from (loss.detach(), *gradients(x, net))

    regions(step)


CHOOSERS: dict[str, Callable[[Tensor], Tensor]] = {
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a @ a.T).abs().amax(),
    "eigvals": lambda a: torch.linalg.eigvals(a @ a.T).abs().amax(),
    "svdvals": lambda a: torch.linalg.svdvals(a).amax(),
    "cond": lambda a: torch.linalg.cond(a @ a.T + torch.eye(len(a))),
    "nuclear": lambda a: torch.linalg.norm(a, "nuc"),
    "pool": lambda a: functional.max_pool1d(a[None], 2).sum(),
}
"""Functions that take other kernels under a dispatch mode. On some inputs the results agree all the same."""


@pytest.mark.parametrize("name", CHOOSERS)
def test_kernels_that_a_mode_changes_for_some_inputs(regions: Regions, name: str) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        net, norm, function = nn.Linear(4, 4), nn.LayerNorm(4), CHOOSERS[name]

        def block(x: Tensor, z: Tensor) -> Tensor:
            h = torch.tanh(net(x)) / (1 + function(z))
            return norm(h / (h.std(dim=1, keepdim=True) + 1))

        for number in range(24):
            x = torch.randn(3, 4, requires_grad=True)
            # The first calls, from which the program is learned, have a matrix for which all kernels agree.
            z = torch.eye(6) if number < 4 else torch.randn(6, 6)
            with call.context():
                y = call(block, x * 1, z, save=["matmul", "norm"])
            y.square().mean().backward()
            yield from gradients(x)

    regions(step)


@ways
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_that_a_later_call_updates(regions: Regions, how: Options, momentum: float | None) -> None:
    # Batch norm in evaluation reads its statistics in backward, as they are then. A kernel updates them without a new
    # version, so plain PyTorch's backward reads the later ones, and so must ours.
    def step(call: Call) -> Iterator[Tensor]:
        norm = nn.BatchNorm1d(8, momentum=momentum)
        block = nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh())
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            norm.train()
            norm(torch.randn(4, 8))
            norm.eval()
            with call.context():
                y = call(block, x * 1, **how)
            norm.train()
            norm(torch.randn(4, 8) + 3)
            y.square().sum().backward()
            yield from gradients(x, *block.parameters())

    regions(step)


@ways
def test_a_parameter_that_forward_makes(regions: Regions, how: Options) -> None:
    class Making(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "weight"):
                self.weight = nn.Parameter(torch.full((8,), 0.5))
            return (x * self.weight).sin()

    def step(call: Call) -> Iterator[Tensor]:
        block = Making()
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(block, x * 1, **how)
            y.sum().backward()
            yield from gradients(x, *block.parameters())

    regions(step)


def _swapped_before_a_read(x: Tensor, flag: Tensor) -> Tensor:
    a, b = x.sin(), x.cos()
    u, v = (a, b) if float(flag) < 0.5 else (b, a)
    return u.exp() * v.tanh()


def _swapped_while_saved(x: Tensor, flag: Tensor) -> Tensor:
    a, b = x.sin(), x.cos()
    u, v = (a, b) if float(flag) < 0.5 else (b, a)
    return u.square() + v.square() * 2 + (u + 1).exp() * (v + 2).exp()


@pytest.mark.parametrize(
    ("function", "save"),
    [(_swapped_before_a_read, ["aten::exp"]), (_swapped_while_saved, ["aten::sin", "aten::cos"])],
)
def test_operators_that_change_places_later(regions: Regions, function: Any, save: list[str]) -> None:
    # The same operators run in the same order, on other tensors. A partial replay must notice it: a tensor that it left
    # out is read, or another tensor is saved than the one that was handed in.
    def step(call: Call) -> Iterator[Tensor]:
        for number in range(10):
            x, flag = torch.randn(5, requires_grad=True), torch.tensor(float(number >= 5 and number % 2))
            with call.context():
                y = call(function, x * 1, flag, save=save)
            y.sum().backward()
            yield from gradients(x)

    regions(step)


def _used_memory(value: float) -> None:
    """Free memory of many sizes with this content, which later tensors get."""
    _ = [torch.full((size,), value) for size in (10, 50, 100, 200, 400, 800, 1600) for _ in range(3)]


@ways
def test_saved_memory_that_a_kernel_leaves_unwritten(regions: Regions, how: Options) -> None:
    # ctc_loss fills its table as far as the lengths of inputs and targets ask for.
    targets, lengths, inputs = torch.randint(1, 6, (4, 5)), torch.tensor([5, 3, 2, 4]), torch.tensor([12, 9, 12, 7])

    def step(call: Call) -> Iterator[Tensor]:
        net = nn.Linear(6, 6)

        def function(x: Tensor) -> Tensor:
            return functional.ctc_loss(net(x).log_softmax(2), targets, inputs, lengths)

        for number in range(5):
            x = torch.randn(12, 4, 6, requires_grad=True)
            _used_memory(0.25)
            with call.context():
                loss = call(function, x * 1, **how)
            _used_memory(number + 0.5)
            loss.backward()
            yield from (loss.detach(), *gradients(x, *net.parameters()))

    regions(step)


def test_a_replay_that_runs_twice_within_torchs_checkpoint(regions: Regions) -> None:
    # Torch's checkpoint gives each tensor that it saved once: here the input, which two runs of the replay need.
    def step(call: Call) -> Iterator[Tensor]:
        def inner(h: Tensor) -> Tensor:
            square = h.detach() @ h.detach().T
            return h / (1 + torch.linalg.eigvalsh(square).abs().amax())

        def outer(h: Tensor) -> Tensor:
            return call(inner, h, offload=[spillway.saved_by("matmul")]) * 2

        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            with call.context():
                y = checkpoint(outer, x * 1, use_reentrant=False)
            y.square().mean().backward()
            yield from gradients(x)

    regions(step)


# Gradients that are taken inside.


@pytest.mark.parametrize("chance", [False, True], ids=["fixed", "dropout"])
@pytest.mark.parametrize("inner", [{}, {"save": "pointwise"}, {"save": "matmul"}, {"early_stop": False}], ids=str)
@pytest.mark.parametrize("outer", [{}, {"save": "pointwise"}, {"early_stop": False}], ids=str)
def test_a_force_of_a_nested_energy(regions: Regions, outer: Options, inner: Options, chance: bool) -> None:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(functional.dropout(torch.tanh(self.up(x)), 0.3 if chance else 0.0))

    def step(call: Call) -> Iterator[Tensor]:
        energy = Energy()

        def force(x: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(call(energy, x, **inner).sum(), x, create_graph=True)
            return -gradient

        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            energy.zero_grad()
            with call.context():
                loss = call(lambda y: force(y).square().sum(), x * 1, **outer)
            loss.backward()
            yield from (*gradients(x, energy.up), torch.get_rng_state())

    regions(step, collect=True)


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def _spectral(self: Inside, h: Tensor) -> Tensor:
    return self.spectral(h)


def _counted(self: Inside, h: Tensor) -> Tensor:
    self.number += 1
    return h / self.number


def _written(self: Inside, h: Tensor) -> Tensor:
    self.scale.mul_(0.5)
    return h * self.scale.clone()


def _through_data(self: Inside, h: Tensor) -> Tensor:
    self.scale.data.mul_(0.5)
    return h * self.scale.detach().clone()


def _swapped(self: Inside, h: Tensor) -> Tensor:
    other = torch.full((8,), 3.0)
    h = h + self.given
    torch.utils.swap_tensors(self.given, other)
    return (h - self.given).tanh()


def _slots(self: Inside, h: Tensor) -> Tensor:
    self.slotted.count += 1
    return h / self.slotted.count


def _hidden(self: Inside, h: Tensor) -> Tensor:
    self.hidden[0] += 1
    return h / self.hidden[0]


def _file(self: Inside, h: Tensor) -> Tensor:
    self.file.write("a")
    return h / self.file.tell()


def _noise_last(self: Inside, h: Tensor) -> Tensor:
    return functional.rrelu(h, training=True)


READS_STATE: dict[str, Callable[[Inside, Tensor], Tensor]] = {
    "spectral norm": _spectral,
    "counted buffer": _counted,
    "written buffer": _written,
    "written through data": _through_data,
    "swapped tensors": _swapped,
    "slots": _slots,
    "a file": _file,
    "hidden": _hidden,
    "noise that is drawn last": _noise_last,
    "nuclear norm": lambda self, h: h / (1 + torch.linalg.matrix_norm(self.constant, "nuc")),
    "eigenvalues": lambda self, h: h / (1 + torch.linalg.eigvalsh(self.constant @ self.constant.T).amax()),
    "scripted": lambda self, h: self.scripted(h),
}


MAY_BE_REFUSED = ("written through data", "swapped tensors", "nuclear norm", "eigenvalues")


class Inside(nn.Module):
    """Takes a gradient of an energy, before or after which something reads or changes state."""

    def __init__(self, what: str, where: str, call: Call, inner: Options | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.where, self.call, self.inner = READS_STATE[what], where, call, inner
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(8))
        self.given, self.constant = torch.ones(8), torch.randn(8, 8)
        self.slotted, self.scripted, self.hidden = Slotted(), scripted_tanh(), HiddenList([0])
        # What has a file is never recomputed.
        self.file: Any = io.StringIO() if what == "a file" else None

    def energy(self, h: Tensor) -> Tensor:
        h = torch.tanh(self.up(h))
        return self.read(self, h) if self.where == "within" else h

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        if self.where == "before":
            h = self.read(self, h)
        energy = self.energy(h) if self.inner is None else self.call(self.energy, h, **self.inner)
        (force,) = torch.autograd.grad(energy.sum(), h, create_graph=True)
        h = h - force
        return self.read(self, h) if self.where == "after" else h


def scripted_tanh() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(_scripted_tanh)


def _scripted_tanh(h: Tensor) -> Tensor:
    return torch.tanh(h).sin() * 2 + h


@pytest.mark.parametrize("inner", [None, {}, {"save": "pointwise"}], ids=str)
@pytest.mark.parametrize("outer", [{}, {"save": "pointwise"}, {"early_stop": False}], ids=str)
@pytest.mark.parametrize("where", ["before", "within", "after"])
@pytest.mark.parametrize("what", READS_STATE)
def test_state_beside_a_gradient_inside(
    regions: Regions, what: str, where: str, outer: Options, inner: Options | None
) -> None:
    """State that is not seen may be refused. Then nothing else has been said."""
    if what == "hidden" and where == "within":
        pytest.skip("it counts each run of the inner function")

    def step(call: Call) -> Iterator[Tensor]:
        block = Inside(what, where, call, inner)
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                loss = call(block, x * 1, **outer).square().sum()
            loss.backward()
            found = [each.grad for each in (x, *block.parameters()) if each.grad is not None]
            yield from map(torch.clone, (loss.detach(), *found, *block.buffers()))
            yield from (
                torch.get_rng_state(),
                torch.tensor([block.slotted.count, block.file.tell() if block.file else 0]),
            )

    with torch.jit.optimized_execution(False):
        # Of two regions in each other, one runs under a mode, and the other does not.
        is_mixed = (inner or {}).get("save") != outer.get("save") and inner is not None
        if what == "hidden" or (is_mixed and what in MAY_BE_REFUSED):
            regions.right_or_refused(step)
        else:
            regions(step, collect=True)


def test_unseen_state_beside_a_gradient_inside_is_refused(regions: Regions) -> None:
    block = Inside("hidden", "before", Call(None), None)
    with pytest.raises(spillway.RecomputeError, match="Inside gave other values when"):
        spillway.recompute(block, torch.randn(4, 8, requires_grad=True) * 1, session=regions.session)


def test_a_function_that_takes_a_gradient_inside_keeps_what_it_saves(regions: Regions) -> None:
    runs = HiddenList()

    def function(x: Tensor) -> Tensor:
        runs.append(0)
        h = x.sin().exp()
        (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return h * slope.exp()

    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        spillway.recompute(function, x, session=regions.session).sum().backward()
    # In the first call it runs again as far as the gradient.
    assert len(runs) == 4
    assert "takes a gradient of what it computes" in " ".join(regions.session.stats().notes)


# Odd tensors.


class Hollow(torch.Tensor):
    """A wrapper without memory, which does not say of what it is made."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Hollow:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Hollow, lambda each: each.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Hollow, func(*args, **kwargs))


@ways
def test_a_wrapper_without_memory_as_an_output(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        linear = nn.Linear(8, 8)

        def function(x: Tensor) -> tuple[Hollow, Tensor]:
            h = torch.tanh(linear(x))
            return Hollow(h.detach()), h.sin()

        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                hollow, y = call(function, x * 1, **how)
            y.sum().backward()
            yield from (hollow.inner, *gradients(x))

    regions(step)


@pytest.mark.parametrize("save", [["pointwise"], ["norm", "pointwise"], ["matmul"]])
def test_the_result_of_a_wrapper_without_memory_is_saved(regions: Regions, save: list[str]) -> None:
    # The wrapper's operators read what it was made of: a partial replay must not leave that out.
    def step(call: Call) -> Iterator[Tensor]:
        linear = nn.Linear(8, 8)

        def function(x: Tensor) -> Tensor:
            h = x + torch.tanh(linear(x))
            return h * Hollow(h.detach()).sin().inner

        for _ in range(5):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(function, x * 1, save=save)
            y.sum().backward()
            yield from gradients(x, *linear.parameters())

    regions(step)


@ways
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_content(regions: Regions, how: Options, kind: str) -> None:
    if how.get("offload"):
        pytest.skip("what has no content cannot leave")
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Sigmoid())
    with FakeTensorMode(allow_non_fake_inputs=True) if kind == "fake" else torch.device("meta"):
        if kind == "meta":
            net = net.to("meta")
        for _ in range(4):
            x = torch.empty(4, 8, requires_grad=True)
            spillway.recompute(net, x * 1, session=regions.session, **how).sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


@ways
def test_tensors_of_inference_mode(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        linear = nn.Linear(8, 8)
        with torch.inference_mode():
            shift = torch.randn(8)

        def function(x: Tensor) -> Tensor:
            with torch.inference_mode():
                scale = float(x.detach().abs().mean())
            return torch.tanh(linear(x) + shift).sin() / (1 + scale)

        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(function, x * 1, **how)
            y.sum().backward()
            yield from gradients(x)

    regions(step)
    if "save" not in how and not how["use_reentrant"]:
        regions(step, save=lambda call: True)


@pytest.mark.filterwarnings("ignore")
@ways
def test_scripted_functions(regions: Regions, how: Options) -> None:

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(torch.tanh(self.up(x)) * 2)

    def step(call: Call) -> Iterator[Tensor]:
        net = torch.jit.script(Net())
        for _ in range(4):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(net, x * 1, **how)
            y.sum().backward()
            yield from gradients(x)

    for _ in range(2):
        # The first runs of a scripted function are not optimized, and round otherwise.
        assert list(step(Call(None)))
    # The interpreter holds the error by which a replay ends.
    regions(step, collect=True)


def test_swapped_tensors(regions: Regions) -> None:
    """Torch swaps no tensor that has a weak reference."""

    def step(call: Call) -> Iterator[Tensor]:
        linear, box = nn.Linear(8, 8), HiddenList([torch.ones(8)])

        def function(x: Tensor) -> Tensor:
            h, other = linear(x) + box[0], torch.full((8,), 3.0)
            torch.utils.swap_tensors(box[0], other)
            y = torch.tanh(h + box[0])
            torch.utils.swap_tensors(box[0], other)
            return y.sin()

        for _ in range(2):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(function, x * 1)
            y.sum().backward()
            yield from gradients(x)

    regions(step, passes=1)


def test_a_constant_comes_back_as_itself(regions: Regions) -> None:
    seen = HiddenList()

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            (scale,) = ctx.saved_tensors
            seen.append(scale)
            return gradient * scale, None

    scale = torch.full((8,), 2.0)
    scale.mark = "kept"  # type: ignore[attr-defined]
    x = torch.randn(8, requires_grad=True)
    with regions.offload():
        Scale.apply(x, scale).sum().backward()
    spillway.recompute(lambda x: Scale.apply(x * 1, scale) * 1, x, session=regions.session).sum().backward()
    assert [each is scale for each in seen] == [True, True]
    with regions.offload(policy=spillway.policies.Offload()) as context:
        y = Scale.apply(x, scale).sum()
    y.backward()
    assert context.stats().offloaded_bytes == scale.nbytes
    assert seen[-1].mark == "kept"


@ways
def test_nothing_is_left_after_a_refusal(regions: Regions, how: Options) -> None:
    class Block(nn.Module):
        runs = HiddenAttribute(0)

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.out: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            h = torch.tanh(self.up(x))
            self.out = h.sin() if self.runs == 1 else h.cos()
            return self.out

    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    with regions.offload():
        y = spillway.recompute(block, x * 1, session=regions.session, **how)
    try:
        y.sum().backward()
    except spillway.RecomputeError:
        # The engine keeps what an interrupted backward held, until the next one.
        torch.ones(1, requires_grad=True).sum().backward()
    block.out = None
    del y
    assert_nothing_left(regions.session)


def test_a_reentrant_output_that_needs_no_gradient(regions: Regions) -> None:
    x = torch.ones(4, 8, requires_grad=True)
    y = spillway.recompute(lambda x: x.detach() * 2, x, session=regions.session, use_reentrant=True)
    (y * x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 2.0))


@ways
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "spectral norm"])
def test_an_operator_on_a_wrapper_without_memory(regions: Regions, how: Options, norm: bool) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        linear = nn.Linear(8, 8)
        net = nn.utils.parametrizations.spectral_norm(linear) if norm else linear

        def function(x: Tensor) -> Tensor:
            return net(x * Hollow(x.detach()).tanh().inner).sin()  # type: ignore[attr-defined]

        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(function, x * 1, **how)
            y.sum().backward()
            yield from gradients(x, net)

    regions(step)


@ways
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_inside(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        def function(x: Tensor) -> Tensor:
            nested = torch.relu(torch.nested.as_nested_tensor([x[:1].tanh(), x[1:] * 2])) * 0.5
            return torch.cat(nested.unbind()).sin()

        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(function, x * 1, **how)
            y.sum().backward()
            yield from gradients(x)

    regions(step)


@pytest.mark.parametrize("offload", ["pointwise", [spillway.saved_by("matmul")], "aten::*"], ids=str)
def test_fake_tensors_do_not_leave(regions: Regions, offload: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    with FakeTensorMode() as mode, regions.offload():
        fake = mode.from_tensor
        weights = {name: fake(weight) for name, weight in net.named_parameters()}

        def function(x: Tensor) -> Tensor:
            return torch.func.functional_call(net, weights, (x,))  # type: ignore[no-any-return]

        for _ in range(4):
            x = torch.empty(4, 8, requires_grad=True)
            spillway.recompute(function, x * 1, session=regions.session, offload=offload).sum().backward()
            assert x.grad is not None
            assert x.grad.shape == x.shape


@ways
def test_a_lazy_layer(regions: Regions, how: Options) -> None:
    def step(call: Call) -> Iterator[Tensor]:
        net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())
        for _ in range(3):
            x = torch.randn(4, 8, requires_grad=True)
            with call.context():
                y = call(net, x * 1, **how)
            y.sum().backward()
            yield from (*gradients(x, net), *net.buffers())

    regions(step)


def test_a_predicate_beside_a_lazy_layer(regions: Regions) -> None:
    net = nn.Sequential(nn.Tanh(), nn.LazyLinear(8))
    x = torch.randn(4, 8, requires_grad=True)
    spillway.recompute(net, x * 1, session=regions.session, save=lambda call: call.module is None).sum().backward()
    assert x.grad is not None
