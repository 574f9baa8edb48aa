"""A mixture of experts with checkpointed blocks: in recomputation, each token is routed to the same experts.

    python examples/mixture_of_experts.py                            # small, on the CPU or a GPU
    python examples/mixture_of_experts.py --layers 24 --width 2048 --experts 64 --tokens 16384 --window 1GiB

The number of tokens of an expert differs in each step and layer, and so do the sizes of saved tensors. Spillway keeps
results that determine sizes, such as the router's. It offloads the input of each block and recomputes the rest. Losses,
weights and counts of tokens are compared with those of a plain run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway


class Expert(nn.Module):
    """A feed-forward layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Sends each token to two of its experts, and adds their weighted outputs to the token.

    Args:
        width: of a token.
        experts: how many there are.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, chosen = self.router(y).softmax(-1).topk(2)
        self.counts += torch.bincount(chosen.flatten(), minlength=len(self.experts))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, choice = torch.where(chosen == number)
            out = out.index_add(0, tokens, expert(y[tokens]) * weights[tokens, choice, None])
        return x + out


def train(model: nn.Module, options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Some steps towards a rotation of the input: the losses, and weights and counts after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(options.steps):
        batch = torch.randn(options.tokens, options.width, generator=generator).to(device)
        loss = functional.mse_loss(model(batch), batch.roll(1, -1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(tensor.detach() for tensor in model.state_dict().values())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--window", default="64KiB", help="in-flight limit, in bytes")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    how = spillway.Recompute(offload="inputs")
    results = []
    with spillway.Session(window=options.window) as session:
        for attaches in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(*(Block(options.width, options.experts) for _ in range(options.layers))).to(device)
            if attaches:
                # By class: experts repeat, too, but are not checkpointed by themselves.
                attached = spillway.attach(model, policy=how, blocks=Block, min_bytes="64KiB", session=session)
            results.append(train(model, options, device))
        stats = attached.stats()
        attached.remove()
    same = all(map(torch.equal, *results))
    for name, block in model.named_children():
        print(f"tokens of each expert of block {name}: {block.counts.tolist()}")
    print(
        f"in the last step {stats.kept_bytes / 2**10:.0f} KiB were kept, {stats.offloaded_bytes / 2**10:.0f} KiB "
        f"offloaded and {stats.recomputed_bytes / 2**10:.0f} KiB recomputed; losses, weights and counts are "
        f"{'equal, bit for bit' if same else 'DIFFERENT'}"
    )


if __name__ == "__main__":
    main()
