"""A model with frozen and trained weights, its safetensors files, and its training, for tests of loaded weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapted import Block

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

WIDTH, BLOCKS = 16, 4


class Model(nn.Module):
    """Its head and its embedding are one tensor. It has buffers of each kind."""

    seen: Tensor
    scale: Tensor
    unused: Tensor

    def __init__(self, block: Callable[[], nn.Module] = Block, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inputs = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.inputs.weight
        self.register_buffer("seen", torch.tensor(3))
        self.scale = nn.Buffer(torch.full((WIDTH,), 1.5))
        self.register_buffer("unused", None)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def on_meta(*args: Any) -> Model:
    with torch.device("meta"):
        return Model(*args)


def saved(model: nn.Module, folder: Path, shards: int = 1) -> Path:
    """The model's state in a folder, as Hugging Face has it."""
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    names = list(state)
    if shards == 1:
        safetensors.save_file(state, folder / "model.safetensors")
        return folder
    files = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        safetensors.save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    # Files beside the index are not read.
    safetensors.save_file({"other": torch.zeros(1)}, folder / "consolidated.safetensors")
    return folder


def loss_of(model: nn.Module, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(torch.randint(32, (2, 6))).float().square().mean()
    return loss


def train(model: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """Losses, gradients, and all tensors in the end."""
    if optimizer is None:
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    found = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.detach().clone() for each in model.state_dict().values())]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def freeze(model: Model) -> Model:
    for layer in model.layers:
        for part in (layer.norm, layer.first.base, layer.second.base):  # type: ignore[union-attr]
            part.requires_grad_(False)  # type: ignore[operator, union-attr]
    return model


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: each.data_ptr() for name, each in model.state_dict().items()}
