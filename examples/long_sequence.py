"""The longest sequence that a memory budget allows: find it, and train it within that budget.

    python examples/long_sequence.py                                         # small, on the CPU or a GPU
    python examples/long_sequence.py --budget 70GiB --layers 16 --width 4096 --heads 32 --words 128256 \\
        --least 8192 --most 262144 --piece 4096 --steps 8 --alone

The loss is computed in pieces of the sequence, and each piece is a checkpointed function. For a long sequence, logits
are larger than all other activations. Here they exist for one piece at a time.

The default budget is the peak of a plain step with twice the shortest sequence. On a GPU, ``spillway.attach`` gets only
the budget. On the CPU a budget counts the process's resident bytes, and this small model is the lesser part of them. So
the plan is made beforehand.

The losses of the first steps, and all weights after them, are compared with those of plain steps, bit for bit.
``--alone`` leaves the plain steps out, since they may not fit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from spillway.units import parse_bytes


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.RMSNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """From tokens to the mean loss of each next one.

    Args:
        options: its sizes.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.piece = options.piece
        self.embedding = nn.Embedding(options.words, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.RMSNorm(options.width), nn.Linear(options.width, options.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        pieces = zip(x.split(self.piece, 1), tokens[:, 1:].split(self.piece, 1), strict=True)
        return torch.stack([spillway.recompute(self.loss_of, *piece) for piece in pieces]).sum() / (x[..., 0].numel())

    def loss_of(self, x: Tensor, expected: Tensor) -> Tensor:
        """The sum of the losses of a piece."""
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, expected.flatten(), reduction="sum")


def train(model: Model, tokens: Tensor, steps: int) -> list[Tensor]:
    """Some steps on one sequence: the losses, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(weight.detach() for weight in model.parameters())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="memory budget of a step, such as 70GiB")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--words", type=int, default=512, help="of the vocabulary")
    parser.add_argument("--piece", type=int, default=512, help="tokens whose logits exist at a time")
    parser.add_argument("--least", type=int, default=1024, help="tokens of the shortest sequence that is tried")
    parser.add_argument("--most", type=int, default=4096, help="tokens of the longest one")
    parser.add_argument(
        "--steps", type=int, default=3, help="with a GPU's budget, give eight: a plan is active from the fifth on"
    )
    parser.add_argument("--alone", action="store_true", help="leave out the plain run")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)

    def make(length: int) -> tuple[Model, Tensor]:
        torch.manual_seed(0)
        with device:
            return Model(options), torch.randint(options.words, (1, length + 1), device=device)

    budget = options.budget
    if budget is None:
        profile = spillway.profile(*make(2 * options.least))
        budget = spillway.plan(profile, budget="1TiB", allow={"keep"}).predicted_peak
        print(f"a plain step of {2 * options.least} tokens takes {budget / 2**20:.1f} MiB, which is the budget")
    # A little less, since a later measurement differs by some bytes.
    searched = parse_bytes(budget) * 49 // 50
    length = spillway.longest(
        make, budget=searched, at_least=options.least, multiple_of=options.least, most=options.most
    )
    print(f"the longest sequence, of up to {options.most} tokens, has {length}")
    model, tokens = make(length)
    how: dict[str, Any] = {"budget": budget}
    if device.type == "cpu":
        how = {"plan": spillway.plan(spillway.profile(model, tokens), budget=budget)}
    with spillway.attach(model, **how) as attached:
        ours = train(model, tokens, options.steps)
        print(attached.explain())
    if not options.alone:
        same = all(map(torch.equal, ours, train(*make(length), options.steps)))
        print(f"stage: {attached.stage}; losses and weights are {'equal, bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
