"""A few steps of a small model whose weights are split over ranks (tensor and sequence parallel, by DTensor).

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

It runs on the CPUs of one machine, or on as many GPUs as there are processes. See ``docs/distributed.md``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

import spillway

WIDTH, LAYERS, ROWS, LENGTH, STEPS = 128, 4, 4, 128, 5

Attach = Callable[[nn.Module], spillway.Attached]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def split_model(device: torch.device) -> nn.Module:
    """Each rank has a part of the weights, and between layers a part of each sequence."""
    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole, part = Replicate(), Shard(1)
    outer = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=part),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    parallelize_module(model, mesh, outer)
    inner = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=part),
        "down": RowwiseParallel(output_layouts=part),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, inner)
    return model


def train(device: torch.device, attach: Attach | None) -> list[Tensor]:
    """Losses of some steps, and this rank's part of the weights: with everything kept, or attached."""
    model = split_model(device)
    attached = None if attach is None else attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # All ranks have the same batch.
    torch.manual_seed(1)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(256, (ROWS, LENGTH), device=device)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    if attached is not None:
        stats = attached.stats()
        done = f"{stats.offloaded_bytes >> 10} KiB offloaded, {stats.recomputed_bytes >> 10} KiB recomputed"
        print(f"rank {dist.get_rank()}: {done} in the last step", flush=True)
    weights = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return [*found, *(weight.detach() for weight in weights)]


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group()
    plain = train(device, None)
    # A limit of 0: the default one of 64 MiB on a CPU would keep all of so small a model.
    with spillway.Session(window=0) as session:
        # Tensors here are small: by default, Spillway keeps those under 1 MiB.
        attach = partial(spillway.attach, min_bytes="32KiB", session=session)
        ways = {
            "offloaded": partial(attach, policy=spillway.policies.Offload()),
            "recomputed": partial(attach, policy=spillway.Recompute(offload="inputs")),
        }
        for name, way in ways.items():
            same = all(map(torch.equal, train(device, way), plain))
            print(f"rank {dist.get_rank()}: {name}, losses and weights {'are equal' if same else 'DIFFER'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
