"""Functions at whose operators nobody looks: they run again whole, and what both runs have made is compared. See
NOTE [ Unwatched calls ] in ``regions/unwatched.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import spillway
from recompute.regions import HiddenAttribute, Regions, one_place
from recompute.test_tapes import gradients_of, leaf, tapes_of
from spillway.errors import RecomputeError
from spillway.regions.rerun import in_rerun
from support import assert_identical

pytestmark = one_place


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


def known(regions: Regions, function: Callable[..., Tensor], **how: Any) -> None:
    """Call it as often as it takes until nobody looks at it."""
    for seed in range(2):
        assert_identical(gradients_of(regions, function, seed=seed, **how), gradients_of(None, function, seed=seed))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


class Changing(nn.Module):
    """Reads what changes between its first run and backward, deep inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale, self.eps = 1.0, 1e-5
        self.table = torch.zeros(16)
        self.kind = 0

    def forward(self, x: Tensor) -> Tensor:
        y = functional.layer_norm(x + self.table, (16,), eps=self.eps) * self.scale
        if self.kind:
            y = y.tanh()
        return x + self.down(functional.silu(self.up(y)))


class Hiding(Changing):
    """The same, where Spillway does not see it."""

    scale, eps = HiddenAttribute(1.0), HiddenAttribute(1e-5)
    kind = HiddenAttribute(0)


def scaled(block: Changing) -> None:
    block.scale = 1.0 + 2**-7


def another_eps(block: Changing) -> None:
    block.eps = 2e-5


def written(block: Changing) -> None:
    block.table[3] += 0.01


def replaced(block: Changing) -> None:
    block.table = torch.full((16,), 1e-3)


def another_way(block: Changing) -> None:
    block.kind = 1


def of_parameters(regions: Regions | None, block: nn.Module) -> list[Tensor]:
    """Gradients of its parameters: in a region at which nobody looks, or plain ones."""
    x = leaf()
    if regions is None:
        y = block(x * 1)
    else:
        with regions.offload():
            y = spillway.recompute(block, x * 1, session=regions.session, save="aten::tanh")
    return [*torch.autograd.grad(y.square().sum(), list(block.parameters()))]


class Numbered(nn.Module):
    """Has a number before what is handed in, and one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.before).exp().tanh().cos().sigmoid() * self.after).sigmoid()


OnlyAgain = Callable[[list[Tensor], Tensor], Tensor]


class Again(nn.Module):
    """Has something handed in, and may do something in its second run alone: while it holds that, or later."""

    def __init__(self, early: OnlyAgain | None, late: OnlyAgain | None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(256.0).reshape(16, 16) / 256)
        self.early, self.late = early, late
        self.is_other = False

    def forward(self, x: Tensor) -> Tensor:
        is_other = self.is_other and in_rerun()
        held = [(x.detach().sum().sin() + self.scale).tanh()]
        z = (held[0] * 1).cos().exp()
        if is_other and self.early is not None:
            z = self.early(held, z)
        held.clear()
        z = z.cos().exp() * 2
        if is_other and self.late is not None:
            z = self.late(held, z)
        return z.sigmoid()


def writes(held: list[Tensor], z: Tensor) -> Tensor:
    held[0].detach().zero_()
    return z


def writes_unseen(held: list[Tensor], z: Tensor) -> Tensor:
    held[0].data.zero_()
    return z


def transposes(held: list[Tensor], z: Tensor) -> Tensor:
    # Sums of what lies in memory are the same.
    return z.t()


WEIGHT = torch.ones(3, requires_grad=True)
SINE = WEIGHT.sin()


def goes_back(held: list[Tensor], z: Tensor) -> Tensor:
    torch.autograd.grad(SINE, WEIGHT, torch.ones(3), create_graph=True, retain_graph=True)
    return z


def has_nothing_left() -> bool:
    """Whether no mode is on, by its stack or by what torch's dispatcher goes by."""
    key = torch._C.DispatchKey.Python
    return torch._C._len_torch_dispatch_stack() == 0 and not torch._C._dispatch_tls_is_dispatch_key_included(key)


class Holds(nn.Module):
    """Holds what need not be computed again, and may read it in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        held = x.detach().sin()
        z = (held + self.weight).tanh().cos().exp()
        return (z * (held if in_rerun() and self.reads else 1)).sigmoid()


@pytest.mark.parametrize("watch", [False, True])
def test_what_catches_errors_in_a_function_does_not_see_that_it_has_run_enough(regions: Regions, watch: bool) -> None:
    caught: list[Exception] = []
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)

    def function(x: Tensor) -> Tensor:
        y = functional.dropout(up(x), 0.3)
        try:
            y = functional.gelu(y)
        except Exception as error:  # noqa: BLE001
            caught.append(error)
            y = y.tanh()
        return down(y)

    for seed in range(4):
        # Backward wants nothing that comes after what gelu reads.
        ours = gradients_of(regions, function, seed=seed, save="aten::gelu")
        assert_identical(ours, gradients_of(None, function, seed=seed))
    assert not caught


def told(
    regions: Regions, function: Callable[..., Any], change: Callable[[], object], *, hides: bool, **how: Any
) -> None:
    """That hidden state which changes between forward and backward is an error, and that other state is put back."""
    for _ in range(3):
        with regions.offload():
            out = spillway.recompute(function, leaf() * 1, session=regions.session, **how)
        total(out).backward()
    x = leaf()
    torch.manual_seed(0)
    with regions.offload():
        out = spillway.recompute(function, x * 1, session=regions.session, **how)
    torch.manual_seed(0)
    plain = function(x * 1)
    change()
    if hides:
        with pytest.raises(RecomputeError):
            total(out).backward()
    else:
        leaves = [x, *(function.parameters() if isinstance(function, nn.Module) else ())]
        assert_identical(torch.autograd.grad(total(out), leaves), torch.autograd.grad(total(plain), leaves))
    del out
    # Of the error's frames.
    gc.collect()


def total(out: Any) -> Tensor:
    return out.sum() if isinstance(out, Tensor) else out[0].sum()  # type: ignore[no-any-return]


class Late(nn.Module):
    """Much of it comes before the first operator that is left out where tanh's output is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin() * self.number).cos().exp().cos().tanh().sigmoid().exp()


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at operators, and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Reading(nn.Module):
    """Reads one of two things that it made early."""

    other = False

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.sin().exp(), x.cos().exp()
        y = (one + other).cos().tanh()
        return (y * one).sigmoid() * (other if self.other else one)


def modes_known() -> tuple[bool, bool]:
    """Whether torch takes itself to be in a mode."""
    return bool(is_in_torch_dispatch_mode()), bool(is_in_torch_dispatch_mode(include_infra_modes=False))


def viewed(y: Tensor) -> Tensor:
    base = y * 2
    view = base[0]
    base.mul_(3)
    # A view of what was written gets a new node where it is read.
    return view * view
