"""Hazards 23 to 25: tensors made of other tensors. Their parts move, or all of it stays; it is exact either way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import spillway
from spillway import EventKind
from support import Context, Saves, Trial, grads

ROW = 1024


class Scaled(torch.Tensor):
    """Rows of small integers with a scale each, as quantised formats have them. It computes by unpacking itself."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor, name: str) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, values.shape, dtype=scales.dtype, device=values.device, strides=values.stride()
        )

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, name: str) -> None:
        self.values, self.scales, self.label = values, scales, name

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({self.label})"

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str) -> Scaled:
        scales = tensor.abs().amax(-1, keepdim=True) / 127
        return cls((tensor / scales).round().to(torch.int8), scales, name)

    def unpacked(self) -> torch.Tensor:
        return self.values.to(self.scales.dtype) * self.scales

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["values", "scales"], self.label

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], name: str, size: Any, stride: Any) -> Scaled:
        return Scaled(parts["values"], parts["scales"], name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].values, args[0].scales, args[0].label)
        if func is torch.ops.aten.mul_.Tensor:
            args[0].scales.mul_(args[1])
            return args[0]
        return func(*pytree.tree_map_only(cls, cls.unpacked, args), **(kwargs or {}))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Pair(Scaled):
    """A wrapper whose parts are wrappers."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor, name: str) -> Pair:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, values.shape, dtype=values.dtype, device=values.device, strides=values.stride()
        )

    def unpacked(self) -> torch.Tensor:
        return self.values + self.scales

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], name: str, size: Any, stride: Any) -> Pair:
        return Pair(parts["values"], parts["scales"], name)


class Opaque(torch.Tensor):
    """A subclass that says nothing of how it is made: it may be told from a plain tensor only by its class."""

    note: str


def scaled() -> Scaled:
    return Scaled.of(torch.randn(8, ROW), "a")


def pair() -> Pair:
    return Pair(Scaled.of(torch.randn(8, ROW), "left"), Scaled.of(torch.randn(8, ROW), "right"), "pair")


def test_h24_a_wrapper_leaves_by_its_parts(trial: Trial) -> None:
    torch.manual_seed(0)
    wanted = scaled()
    torch.manual_seed(0)
    back = trial.round_trip(scaled)
    assert type(back) is Scaled
    assert back.label == "a"
    assert back.dtype is wanted.dtype
    assert back.shape == wanted.shape
    assert back.stride() == wanted.stride()
    assert torch.equal(back.values, wanted.values)
    assert torch.equal(back.scales, wanted.scales)
    assert back.values.dtype is torch.int8
    assert trial.nbytes(EventKind.TAKE) == wanted.values.nbytes + wanted.scales.nbytes


def test_h24_a_wrapper_of_wrappers(trial: Trial) -> None:
    torch.manual_seed(0)
    wanted = pair()
    torch.manual_seed(0)
    back = trial.round_trip(pair)
    assert type(back) is Pair
    assert type(back.values) is type(back.scales) is Scaled
    assert torch.equal(back.values.values, wanted.values.values)  # type: ignore[attr-defined]
    assert torch.equal(back.scales.scales, wanted.scales.scales)  # type: ignore[attr-defined]
    assert trial.count(EventKind.TAKE) == 4


@pytest.mark.parametrize("make", [scaled, pair])
def test_h24_a_wrapper_among_plain_tensors(trial: Trial, make: Callable[[], Scaled]) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(4, 8, requires_grad=True)
        with context():
            weight = make()
            hidden = torch.mm(leaf.sin(), weight)
            loss = (hidden.sin() * torch.mm(leaf.cos(), weight)).exp().sum()
        del weight, hidden
        loss.backward()
        yield from grads(leaf)

    trial(step)


def test_h24_a_frozen_wrapped_parameter_stays(trial: Trial) -> None:
    """What is trained is an adapter beside a quantised weight."""
    weight = torch.nn.Parameter(scaled(), requires_grad=False)
    adapter = torch.nn.Parameter(torch.randn(4, 8))
    with trial.offload():
        loss = torch.mm(adapter, weight).sum()
    loss.backward()
    assert trial.count(EventKind.LEAVE) == 0
    assert torch.equal(*grads(adapter), torch.ones(4, ROW) @ weight.data.unpacked().t())


@pytest.mark.parametrize("context", ["offload", "keep"])
def test_h24_a_wrapper_changed_in_place(trial: Trial, context: str) -> None:
    leaf = torch.ones(1, requires_grad=True)
    weight = scaled()
    with trial.offload() if context == "offload" else spillway.keep():
        out = Saves.apply(leaf, weight)
    trial.push_out()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        out.backward()


def test_h24_a_part_changed_in_place(trial: Trial) -> None:
    """Its owner is gone, and its counter with it; the part is still held by someone, and changed."""
    leaf = torch.ones(1, requires_grad=True)
    weight = scaled()
    with trial.offload():
        out = Saves.apply(leaf, weight)
    trial.push_out()
    scales = weight.scales
    del weight
    scales.mul_(2)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        out.backward()


def test_h24_wrappers_that_share_a_part_move_it_once(trial: Trial) -> None:
    leaf = torch.ones(1, requires_grad=True)
    first = scaled()
    second = Scaled(first.values, first.scales * 2, "b")
    nbytes = first.values.nbytes + first.scales.nbytes + second.scales.nbytes
    wanted = float(first.unpacked().sum() + 2 * second.unpacked().sum())
    with trial.offload():
        out = Saves.apply(leaf, first, second)
    assert trial.nbytes(EventKind.LEAVE) == nbytes
    del first, second
    trial.push_out()
    out.backward()
    assert float(*grads(leaf)) == pytest.approx(wanted, rel=1e-4)


def test_h24_a_subclass_that_says_nothing_of_itself_stays(trial: Trial) -> None:
    def make() -> torch.Tensor:
        tensor = torch.randn(256).as_subclass(Opaque)
        tensor.note = "remember me"
        return tensor

    back = trial.round_trip(make)
    assert type(back) is Opaque
    assert back.note == "remember me"
    assert trial.count(EventKind.TAKE) == 0


@pytest.mark.parametrize("kind", ["nf4", "float8"])
def test_h24_torchao(trial: Trial, kind: str) -> None:
    pytest.importorskip("torchao")
    if kind == "nf4":
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

        def step(context: Context) -> Iterator[torch.Tensor]:
            leaf = torch.randn(4, 256, requires_grad=True)
            with context():
                weight = nf4.to_nf4(torch.randn(256, 256))
                loss = nf4.linear_nf4(leaf.sin(), weight).sin().exp().sum()
            del weight
            loss.backward()
            yield from grads(leaf)
    else:
        quantization = pytest.importorskip("torchao.quantization")

        def step(context: Context) -> Iterator[torch.Tensor]:
            model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())
            quantization.quantize_(model, quantization.Float8WeightOnlyConfig())
            leaf = torch.randn(4, 256, requires_grad=True)
            with context():
                loss = model(leaf.sin()).sin().exp().sum()
            loss.backward()
            yield from grads(leaf)

    trial(step)


def jagged(requires_grad: bool = True) -> torch.Tensor:
    rows = [torch.randn(length, 32) for length in (3, 17, 8, 1)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=requires_grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("operators", ["pointwise", "linear", "softmax", "attention"])
def test_h25_jagged_nested(trial: Trial, operators: str) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        ragged, layer = jagged(), torch.nn.Linear(32, 32)
        with context():
            hidden = (ragged * 2).sin()
            if operators == "linear":
                hidden = torch.nn.functional.gelu(layer(hidden)) * hidden
            elif operators == "softmax":
                hidden = torch.nn.functional.layer_norm(hidden, (32,)).softmax(-1) * hidden.sigmoid()
            elif operators == "attention":
                heads = layer(hidden).unflatten(-1, [2, 16]).transpose(1, 2)
                hidden = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
            loss = (hidden * hidden.cos()).values().square().sum()
        del hidden
        loss.backward()
        yield from [gradient.values() for gradient in grads(ragged)]
        yield from [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]

    trial(step)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_h25_jagged_comes_back_with_the_same_offsets(trial: Trial) -> None:
    """Its shape is known by its offsets, the very object: with others it could not be added to its own gradient."""
    made: list[torch.Tensor] = []

    def remember() -> torch.Tensor:
        made.append(jagged(requires_grad=False))
        return made[-1] * 1

    back = trial.round_trip(remember)
    wanted = made.pop()
    assert back.shape == wanted.shape
    assert back.offsets() is wanted.offsets()
    assert torch.equal(back.values(), wanted.values())
    assert torch.equal((back + wanted).values(), 2 * wanted.values())
    assert trial.nbytes(EventKind.TAKE) == wanted.values().nbytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_h25_strided_nested(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        rows = [torch.randn(length, 32, requires_grad=True) for length in (3, 17)]
        with context():
            nested = torch.nested.as_nested_tensor([(row * 2).sin() for row in rows])
            loss = (nested * nested).to_padded_tensor(0.0).exp().sum()
        loss.backward()
        yield from grads(*rows)

    trial(step)
