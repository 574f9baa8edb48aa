"""Compares the estimated times of a profile without the hardware with measured ones, operator by operator.

    python benchmarks/costs.py
    python benchmarks/costs.py --profile profile.json --hardware h100 --tokens 4096

The measured profile has blocks of Llama-8B's shape. By default it is the one of the tests, from an H200. Operators that
compute nothing are left out. The measured times of small operators are launch times, so only long operators matter.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import spillway
from _llama import make_stack

MEASURED = Path(__file__).parent.parent / "tests" / "planning" / "llama_8b_block.json"


class Scaled(nn.Module):
    """The stack after a scale, as after an embedding."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.stack = make_stack("8b", 2, tokens, meta, torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(4096, device=meta, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x * self.scale)


def line(name: str, ours: float, theirs: float) -> str:
    """A row of the table, in microseconds."""
    return f"| {name} | {1e6 * theirs:.0f} | {1e6 * ours:.0f} | {ours / theirs - 1:+.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=MEASURED)
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    measured = spillway.Profile.load(options.profile).kinds[0]
    batch = torch.empty(1, options.tokens, 4096, device="meta", dtype=torch.bfloat16)
    profile = spillway.profile(
        Scaled(options.tokens), batch, loss=lambda y: y.float().square().mean(), hardware=options.hardware
    )
    block = profile.kinds[0]
    print("| operator | measured, us | estimated, us | |\n|---|---|---|---|")
    for ours, theirs in zip(block.operators, measured.operators, strict=True):
        if ours.seconds:
            print(line(f"`{ours.name.removeprefix('aten::')}`", ours.seconds, theirs.seconds))
    print(line("forward of the block", block.forward_seconds, measured.forward_seconds))
    print(line("backward of the block", block.backward_seconds, measured.backward_seconds))


if __name__ == "__main__":
    main()
