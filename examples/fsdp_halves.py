"""Two checkpointed modules in each module that FSDP2 wraps: a block's attention and its MLP, recomputed one by one.

    torchrun --nproc-per-node 2 examples/fsdp_halves.py

FSDP2 gathers a block's parameters once, and frees them after the block's backward. Both halves are recomputed in
between, and gather nothing. Every bit is compared with the same run without checkpointing, on the CPUs of one machine,
or on as many GPUs as there are processes.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn import functional

import spillway
from spillway.integrations.fsdp import local_share

WIDTH, HEADS, LAYERS, ROWS, LENGTH, STEPS = 128, 4, 4, 4, 64, 4
HALVES = ["blocks.*.attention", "blocks.*.mlp"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))

    def scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The forward of the last block, which gives the size of its output, too."""
        x = self.mlp(self.attention(x))
        return x, x.square().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        x, size = self.blocks[-1].scored(x)
        return self.head(x), size


def train(device: torch.device, session: spillway.Session | None) -> list[Tensor]:
    """The losses of some steps, and then the weights that this rank has."""
    torch.manual_seed(0)
    model = Model().to(device)
    for block in model.blocks:
        fully_shard(block)
    # FSDP2 gathers parameters when forward is called. Other methods have to be registered.
    register_fsdp_forward_method(model.blocks[-1], "scored")
    fully_shard(model)
    if session is not None:
        policy = spillway.Recompute(offload="inputs")
        attached = spillway.attach(model, blocks=HALVES, policy=policy, min_bytes="64KiB", session=session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(256, (ROWS, LENGTH), device=device)
        logits, size = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + 0.01 * size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if session is not None:
        left = attached.stats().offloaded_bytes >> 10
        print(f"rank {dist.get_rank()}: {2 * LAYERS} halves, {left} KiB offloaded in the last step", flush=True)
    return [*losses, *(each.to_local().detach() for each in model.parameters())]


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
    print(f"rank {dist.get_rank()}: {STEPS} losses and all weights {'are equal' if same else 'DIFFER'}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(not same)


if __name__ == "__main__":
    main()
