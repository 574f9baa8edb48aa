"""Quantized weights stay on the device, with the bits of plain training. Spillway does not move them there itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from runtime.scenarios import adversary_session
from spillway.errors import UsageError
from spillway.parameters.streamable import parameters_of
from spillway.saved_tensors.identity import is_streamed

WIDTH, BLOCKS = 64, 3


class Block(nn.Module):
    """A quantized layer, a frozen one, and an adapter."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.base, self.plain = layer(), nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.plain(torch.relu(self.base(x) + self.up(self.down(x))))


def of_bitsandbytes(bits: int) -> nn.Module:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layer: nn.Module = (
        library.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=torch.float32, quant_type="nf4")
        if bits == 4
        else library.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    )
    return layer.requires_grad_(False).to("cpu")  # which quantizes


def of_torchao() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(version=2))
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "bitsandbytes 4 bits": lambda: of_bitsandbytes(4),
    "bitsandbytes 8 bits": lambda: of_bitsandbytes(8),
    "torchao int8": of_torchao,
}


def make(layer: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(LAYERS[layer]) for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))


def train(model: nn.Module) -> list[Tensor]:
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(6, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(each.detach().clone() for each in trained)]


@contextmanager
def streamed(model: nn.Module, policy: str) -> Iterator[set[str]]:
    with adversary_session(window=1024) as (_, session):
        attached = spillway.attach(model, policy=policy, stream=Block, min_bytes=WIDTH * 4 + 1, session=session)
        yield {name for name, each in model.named_parameters() if is_streamed(each)}
        attached.remove()


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
@pytest.mark.parametrize("policy", ["recompute", "keep", "offload"])
@pytest.mark.parametrize("layer", LAYERS)
def test_quantized_weights_stay_on_the_device(layer: str, policy: str) -> None:
    wanted, model = train(make(layer)), make(layer)
    with streamed(model, policy) as names:
        assert names == {f"{number}.plain.weight" for number in range(BLOCKS)}
        found = train(model)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("layer", LAYERS)
def test_they_are_on_the_device_before(layer: str) -> None:
    model = make(layer)
    blocks: Any = [(str(number), model[number]) for number in range(BLOCKS)]
    with pytest.raises(UsageError, match=r"of 0\.base on cpu, expected it on cuda:0.*Move its module first"):
        parameters_of(blocks, model, torch.device("cuda:0"), 0, None)


def test_plain_ones_are_moved() -> None:
    class Mine(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
    model[0].bias = Mine(torch.zeros(WIDTH), requires_grad=False)
    found = parameters_of([("0", model[0])], model, torch.device("cuda:0"), 0, None)
    assert [name for name, _ in found["0"]] == ["0.weight"]
