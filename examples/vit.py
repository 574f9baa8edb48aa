"""A vision transformer with checkpointed blocks, which offload attention's saved tensors and recompute the rest.

    python examples/vit.py                                                       # small, on the CPU or a GPU
    python examples/vit.py --images 256 --size 224 --patch 16 --width 1024 --depth 24 --heads 16 --window 1GiB

Losses and weights are compared with those of a plain run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches, position embeddings, blocks, and a head over the mean of all patches.

    Args:
        size: pixels of a side.
        patch: pixels of a patch's side.
        width: of a token.
        depth: how many blocks.
        heads: of attention.
        classes: how many there are.
    """

    def __init__(self, *, size: int, patch: int, width: int, depth: int, heads: int, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def train(model: ViT, *, images: int, size: int, steps: int) -> list[Tensor]:
    """Some steps on noise: the losses, and the weights after them."""
    device = model.places.device
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = torch.randn(images, 3, size, size, generator=generator).to(device)
        labels = torch.randint(model.head.out_features, (images,), generator=generator).to(device)
        loss = functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(weight.detach() for weight in model.parameters())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=8, help="in a batch")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side")
    parser.add_argument("--patch", type=int, default=8, help="pixels of a patch's side")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--window", default="1MiB", help="in-flight limit, in bytes")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    how = spillway.Recompute(offload=["inputs", spillway.saved_by("attention")])
    results = []
    with spillway.Session(window=options.window) as session:
        for attaches in (False, True):
            torch.manual_seed(0)
            model = ViT(
                size=options.size, patch=options.patch, width=options.width, depth=options.depth, heads=options.heads
            ).to(device)
            if attaches:
                # Tensors here are small: by default, Spillway keeps those under 1 MiB.
                attached = spillway.attach(model, policy=how, min_bytes="64KiB", session=session)
            results.append(train(model, images=options.images, size=options.size, steps=options.steps))
        stats = attached.stats()
        attached.remove()
    same = all(map(torch.equal, *results))
    print(
        f"{len(attached.blocks)} blocks: in the last step {stats.offloaded_bytes / 2**20:.1f} MiB were offloaded and "
        f"{stats.recomputed_bytes / 2**20:.1f} MiB recomputed; "
        f"losses and weights are {'equal, bit for bit' if same else 'DIFFERENT'}"
    )


if __name__ == "__main__":
    main()
