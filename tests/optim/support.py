"""What the tests of the optimizer share: small models of odd sizes, training loops, and comparisons bit for bit.

A parameter's size is odd on purpose: tails of vectorised loops are where implementations differ.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import spillway
from spillway import OffloadedOptimizer
from spillway.optim.offloaded_gradient import OffloadedGradient

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""The classes that have a fused kernel on the CPU."""

MODULES_WITH_CHUNK = ("state_store",)

Batch = Tensor
Make = Callable[[Module], Optimizer]


class Wide(torch.nn.Module):
    """Two blocks, a norm, and parameters of one, two and no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 19)
        self.blocks = torch.nn.ModuleList(Block(19) for _ in range(2))
        self.last = torch.nn.Linear(19, 5, bias=False)
        self.gain = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.gain


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 33)
        self.down = torch.nn.Linear(33, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def wide(dtype: torch.dtype = torch.float32, seed: int = 0) -> Wide:
    torch.manual_seed(seed)
    return Wide().to(dtype)


def batches(count: int, dtype: torch.dtype = torch.float32, *, seed: int = 1, rows: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 7, generator=generator).to(dtype) for _ in range(count)]


def loss_of(model: Module, batch: Batch) -> Tensor:
    return model(batch).square().mean()


def implementation(optimizer_class: type[Optimizer], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The argument that makes a class use the implementation that the host's step uses."""
    if optimizer_class is torch.optim.Muon:
        return {}
    narrow_sgd = optimizer_class is torch.optim.SGD and dtype.itemsize < 4
    return {"fused": True} if optimizer_class in FUSED and not narrow_sgd else {"foreach": False}


def plainly(optimizer_class: type[Optimizer], **defaults: Any) -> Make:
    """The class itself, by the implementation that the host's step uses."""

    def make(model: Module) -> Optimizer:
        dtype = next(model.parameters()).dtype
        return optimizer_class(model.parameters(), **{**implementation(optimizer_class, dtype), **defaults})

    return make


def offloaded(
    optimizer_class: type[Optimizer], session: spillway.Session | None = None, **options: Any
) -> Callable[[Module], OffloadedOptimizer]:
    return lambda model: OffloadedOptimizer(model.parameters(), optimizer_class, session=session, **options)


def train(
    model: Module,
    optimizer: Optimizer,
    data: Sequence[Batch],
    *,
    micro: int = 1,
    before_step: Callable[[], object] | None = None,
    set_to_none: bool = True,
) -> None:
    """One step for each ``micro`` batches."""
    for start in range(0, len(data), micro):
        for batch in data[start : start + micro]:
            loss_of(model, batch).backward()
        if before_step is not None:
            before_step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def assert_same_values(got: Module | Iterable[Tensor], expected: Module | Iterable[Tensor]) -> None:
    """Parameters are equal bit for bit."""
    ours = list(_named(got))
    plain = list(_named(expected))
    assert len(ours) == len(plain)
    different = [name for (name, one), (_, other) in zip(ours, plain, strict=True) if not same_bits(one, other)]
    assert not different, f"{different} differ"


def assert_same_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two state dictionaries are equal bit for bit, settings of devices aside."""
    assert got["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        ours = got["state"][number]
        assert ours.keys() == values.keys(), number
        for name, value in values.items():
            assert same_bits(ours[name], value), (number, name)
    for ours, plain in zip(got["param_groups"], expected["param_groups"], strict=True):
        skipped = {"fused", "foreach", "capturable"}
        assert ours.keys() - skipped == plain.keys() - skipped
        for name in plain.keys() - skipped:
            assert same_bits(ours[name], plain[name]), name


def same_bits(one: Any, other: Any) -> bool:
    """Equal, and for tensors: of one type and shape, ``nan`` equal to itself, zeros of one sign."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
    one, other = one.detach(), other.detach()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous().reshape(-1)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    return tensor.view(torch.uint8)


def _named(values: Module | Iterable[Tensor]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(values, Module):
        yield from values.named_parameters()
    else:
        for index, value in enumerate(values):
            yield str(index), value


def is_away(tensor: Tensor | None) -> bool:
    return isinstance(tensor, OffloadedGradient)


def here(gradient: Tensor | None) -> Tensor:
    """A gradient's bytes, wherever they are."""
    assert gradient is not None
    return gradient.clone()


def saved(value: Any) -> Any:
    """What comes back of a value that was saved to a file."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def closed(optimizer: Any) -> None:
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.close()


CLASSES = pytest.mark.parametrize(
    ("optimizer_class", "defaults"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {"t0": 1}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adafactor, {}),
    ],
    ids=["AdamW", "SGD", "SGD-without-state", "Adagrad", "RMSprop", "NAdam", "ASGD", "Rprop", "Adafactor"],
)
"""Classes of every kind, fused and not, that make their state at the first step or before."""


Both = tuple[tuple[Module, Optimizer], tuple[Module, OffloadedOptimizer]]


def both(optimizer_class: type[Optimizer], session: spillway.Session, groups: Any = None, **defaults: Any) -> Both:
    """A plain model and ours, with equal groups."""
    groups = groups or (lambda model: model.parameters())
    plain, ours = wide(), wide()
    reference = optimizer_class(groups(plain), **implementation(optimizer_class), **defaults)
    return (plain, reference), (ours, OffloadedOptimizer(groups(ours), optimizer_class, session=session, **defaults))


def assert_both_same(pair: Both) -> None:
    (plain, reference), (ours, optimizer) = pair
    assert_same_values(ours, plain)
    assert_same_state(optimizer.state_dict(), reference.state_dict())


def three_groups(model: Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters()), "lr": 0.3},  # type: ignore[union-attr]
        {"params": list(model.blocks.parameters()), "weight_decay": 0.4},  # type: ignore[union-attr]
        {"params": [model.last.weight, model.gain], "lr": 0.01, "maximize": True},  # type: ignore[union-attr]
    ]
