"""A few steps of a small model under FSDP2, with checkpointed blocks that offload their inputs.

    torchrun --nproc-per-node 2 examples/fsdp.py

It runs on the CPUs of one machine, or on as many GPUs as there are processes. See ``docs/distributed.md``.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import spillway
from spillway.integrations.fsdp import local_share

WIDTH, LAYERS, ROWS, LENGTH, STEPS = 128, 4, 4, 128, 5


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


def train(device: torch.device, session: spillway.Session | None) -> list[Tensor]:
    """The losses of some steps: with everything kept, or with a session that offloads."""
    torch.manual_seed(0)
    model = Model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if session is not None:
        policy = spillway.Recompute(offload="inputs")
        # Tensors here are small: by default, Spillway keeps those under 1 MiB.
        attached = spillway.attach(model, policy=policy, min_bytes="64KiB", session=session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(256, (ROWS, LENGTH), device=device)
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if session is not None:
        print(
            f"rank {dist.get_rank()}: {attached.stats().offloaded_bytes >> 10} KiB offloaded in the last step",
            flush=True,
        )
    return losses


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group()
    plain = train(device, None)
    # A limit of 0: the default one of 64 MiB on a CPU would keep all of so small a model.
    with spillway.Session(window=0, host_budget=local_share("2GiB"), disk_budget=local_share("2GiB")) as session:
        ours = train(device, session)
    same = all(map(torch.equal, ours, plain))
    print(f"rank {dist.get_rank()}: {STEPS} losses {'are equal' if same else 'DIFFER'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
