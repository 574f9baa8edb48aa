"""Low-rank adapters on a frozen model, in checkpointed blocks.

    python examples/lora.py                                          # small, on the CPU or a GPU
    python examples/lora.py --layers 32 --width 4096 --tokens 16384 --rank 16 --window 1GiB

A frozen weight needs no input for its gradient. So a plain step saves less than one in which all weights are trained,
and the table shows both. Losses and adapters are compared with those of a plain run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway


class LoRA(nn.Module):
    """A frozen linear layer, plus a product of two thin matrices, which is 0 at first.

    Args:
        frozen: the layer.
        rank: of the product.
    """

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) * frozen.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + functional.linear(functional.linear(x, self.down), self.up)


class Block(nn.Module):
    """A gated feed-forward layer, normalised before and added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def make_model(options: argparse.Namespace, device: torch.device, *, adapters: bool) -> nn.Sequential:
    """Blocks with the same weights each time: all trained, or frozen with adapters on the ``up`` layers."""
    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(options.layers)]
    if adapters:
        for block in blocks:
            block.requires_grad_(False)
            block.gate, block.up = LoRA(block.gate, options.rank), LoRA(block.up, options.rank)
    return nn.Sequential(*blocks).to(device)


def train(model: nn.Module, options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Some steps towards a rotation of the input: the losses, and the trained weights."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(options.steps):
        batch = torch.randn(options.tokens, options.width, generator=generator).to(device)
        loss = functional.mse_loss(model(batch), batch.roll(1, -1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in trained)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--window", default="512KiB", help="in-flight limit, in bytes")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    keep, recompute = spillway.policies.Keep(), spillway.Recompute(offload="inputs")
    results = {}
    print(f"{'':<20} {'trained':>12} {'saved':>12} {'offloaded':>12} {'recomputed':>12}")
    with spillway.Session(window=options.window) as session:
        for name, adapters, policy in (
            ("all, plain", False, keep),
            ("adapters, plain", True, keep),
            ("adapters, recompute", True, recompute),
        ):
            model = make_model(options, device, adapters=adapters)
            count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            with spillway.attach(model, policy=policy, min_bytes="64KiB", session=session) as attached:
                results[name] = train(model, options, device)
                stats = attached.stats()
            figures = [stats.saved_bytes, stats.offloaded_bytes, stats.recomputed_bytes]
            print(f"{name:<20} {count:>12}", *(f"{number / 2**20:>8.1f} MiB" for number in figures))
    same = all(map(torch.equal, results["adapters, plain"], results["adapters, recompute"]))
    print(f"losses and adapters are {'equal, bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
