"""A GAN: two models, two optimizers, and a policy for each of them.

    python examples/gan.py                                           # small, on the CPU or a GPU
    python examples/gan.py --width 1024 --depth 12 --rows 65536 --window 1GiB

The blocks of the generator are recomputed. The critic's saved tensors are offloaded: a step calls it three times, which
leaves time for the copies. Losses and weights are compared with those of a plain run, bit for bit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway

POINT, NOISE = 2, 16


class Block(nn.Module):
    """A feed-forward layer, normalised before and added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_model(inside: int, outside: int, options: argparse.Namespace) -> nn.Sequential:
    """Blocks between a layer that widens and one that narrows."""
    blocks = (Block(options.width) for _ in range(options.depth))
    return nn.Sequential(nn.Linear(inside, options.width), *blocks, nn.Linear(options.width, outside))


def train(generator: nn.Module, critic: nn.Module, options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Some steps of both on points of a ring: the losses, and the weights after them."""
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    random = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(options.steps):
        angle = torch.rand(options.rows, 1, generator=random) * 2 * torch.pi
        real = torch.cat([angle.cos(), angle.sin()], 1).to(device)
        noise = torch.randn(options.rows, NOISE, generator=random).to(device)
        with torch.no_grad():
            made = generator(noise)
        loss = functional.softplus(-critic(real)).mean() + functional.softplus(critic(made)).mean()
        loss.backward()
        judges.step()
        losses.append(loss.detach())
        loss = functional.softplus(-critic(generator(noise))).mean()
        loss.backward()
        makes.step()
        losses.append(loss.detach())
        for optimizer in (makes, judges):
            optimizer.zero_grad()
    return [*losses, *(weight.detach() for model in (generator, critic) for weight in model.parameters())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=3, help="blocks of each model")
    parser.add_argument("--rows", type=int, default=1024, help="points in a batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--window", default="512KiB", help="in-flight limit, in bytes")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    how = {"generator": spillway.Recompute(offload="inputs"), "critic": spillway.policies.Ratio(1)}
    results = []
    with spillway.Session(window=options.window) as session:
        for attaches in (False, True):
            torch.manual_seed(0)
            models = {
                "generator": make_model(NOISE, POINT, options).to(device),
                "critic": make_model(POINT, 1, options).to(device),
            }
            attached = {
                name: spillway.attach(model, policy=how[name], min_bytes="64KiB", session=session)
                for name, model in models.items()
                if attaches
            }
            results.append(train(models["generator"], models["critic"], options, device))
        for name, each in attached.items():
            stats = each.stats()
            print(
                f"{name}: in its last pass {stats.offloaded_bytes / 2**20:.1f} MiB were offloaded and "
                f"{stats.recomputed_bytes / 2**20:.1f} MiB recomputed"
            )
            each.remove()
    same = all(map(torch.equal, *results))
    print(f"losses and weights of both are {'equal, bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
