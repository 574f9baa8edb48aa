"""How long the CPU takes to queue a recomputed layer, beside a plain one and torch's own checkpointing.

The model is sixteen layers of width 32 on eight tokens of the CPU, so small that CPU overhead takes nearly all of the
time. Layers are those of a Llama in plain PyTorch, or of transformers' ViT, which have more modules. A layer is plain,
checkpointed by torch, or checkpointed by Spillway in one of three ways. *all recomputed* keeps only its inputs.
*attention kept* keeps the output of attention, too. *nothing again, all kept* keeps everything that the layer saves, in
the order in which it is saved, and recomputes nothing.

Rounds go through all ways in turn, in one thread, and figures are medians over the rounds of the time of a layer; its
spread is that between the quartiles. ``x`` is the ratio to the plain layer of the same round.

    python benchmarks/queueing.py --json queueing.json
    python benchmarks/queueing.py --model vit
    python benchmarks/queueing.py --profile "all recomputed"
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spillway
from _llama import Shape, Stack
from spillway.checkpointing.selectors import Planned
from spillway.types import Decision

LAYERS, TOKENS = 16, 8
SHAPE = Shape(hidden=32, heads=4, kv_heads=2, ffn=64)
PLAIN = "plain"
LEARNED = 4
"""Steps in which a way learns what it runs later."""


@dataclass
class Row:
    """One way of running a layer; microseconds, and ratios to a plain layer."""

    way: str
    forward: float
    backward: float
    forward_ratio: float
    forward_spread: tuple[float, float]
    backward_ratio: float
    backward_spread: tuple[float, float]


class VitStack(nn.Module):
    """Layers of transformers' ViT."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import ViTConfig
        from transformers.models.vit.modeling_vit import ViTLayer

        config = ViTConfig(
            hidden_size=SHAPE.hidden, num_attention_heads=SHAPE.heads, intermediate_size=2 * SHAPE.hidden
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(ViTLayer(config) for _ in range(LAYERS))
        self.call: Callable[..., Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, x)
        return x


def ways(model: str) -> dict[str, Stack | VitStack]:
    """A model for each: of the same shape, run in its way."""

    def make() -> Stack | VitStack:
        torch.manual_seed(0)
        return VitStack() if model == "vit" else Stack(SHAPE, LAYERS, TOKENS)

    regions = {
        "all recomputed": spillway.Recompute(save="inputs"),
        "attention kept": spillway.Recompute(save=["inputs", "attention"]),
        "nothing again, all kept": spillway.Recompute(policy=Planned({}, Decision.KEEP, recomputes=False)),
    }
    stacks = {PLAIN: make(), "torch's checkpoint": make()}
    stacks["torch's checkpoint"].call = partial(checkpoint, use_reentrant=False)
    for name, how in regions.items():
        stacks[name] = make()
        spillway.attach(stacks[name], policy=how, blocks="layers.*")
    return stacks


def once(stack: Stack | VitStack) -> tuple[float, float]:
    x = torch.ones(1, TOKENS, SHAPE.hidden, requires_grad=True)
    start = time.thread_time()
    loss = stack(x).sum()
    middle = time.thread_time()
    loss.backward()
    return middle - start, time.thread_time() - middle


def measure(model: str, rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    stacks = ways(model)
    for stack in stacks.values():
        for _ in range(LEARNED):
            once(stack)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in stacks}
    for _ in range(rounds):
        for name, stack in stacks.items():
            times[name].append(once(stack))
    return rows_of(times)


def rows_of(times: dict[str, list[tuple[float, float]]]) -> list[Row]:
    rows = []
    for name, pairs in times.items():
        forward, backward = (statistics.median(column) / LAYERS * 1e6 for column in zip(*pairs, strict=True))
        ratios = [
            [ours[side] / plain[side] for ours, plain in zip(pairs, times[PLAIN], strict=True)] for side in range(2)
        ]
        spreads = [statistics.quantiles(column, n=4)[::2] for column in ratios]
        rows.append(
            Row(
                name,
                forward,
                backward,
                statistics.median(ratios[0]),
                (spreads[0][0], spreads[0][1]),
                statistics.median(ratios[1]),
                (spreads[1][0], spreads[1][1]),
            )
        )
    return rows


def profile(model: str, name: str, rounds: int) -> None:
    """What Python does in it, which a profile makes slower than it is."""
    torch.set_num_threads(1)
    stack = ways(model)[name]
    for _ in range(LEARNED):
        once(stack)
    for part in ("forward", "backward"):
        profiler = cProfile.Profile()
        for _ in range(rounds):
            x = torch.ones(1, TOKENS, SHAPE.hidden, requires_grad=True)
            with profiler if part == "forward" else nullcontext():
                loss = stack(x).sum()
            with profiler if part == "backward" else nullcontext():
                loss.backward()
        print(part)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "vit"), default="llama")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--profile", metavar="WAY", help="where one way's time goes")
    options = parser.parse_args()
    if options.profile:
        profile(options.model, options.profile, options.rounds)
        return
    rows = measure(options.model, options.rounds)
    plain, torchs = rows[0], rows[1]
    print(f"{'us a layer':40} forward      x            backward      x")
    for row in rows:
        print(
            f"{row.way:40} {row.forward:7.0f} {row.forward_ratio:6.2f} "
            f"({row.forward_spread[0]:.2f} to {row.forward_spread[1]:.2f}) {row.backward:7.0f} "
            f"{row.backward_ratio:6.2f} ({row.backward_spread[0]:.2f} to {row.backward_spread[1]:.2f})",
            flush=True,
        )
    ratios = [(row.way, (row.forward - plain.forward) / (torchs.forward - plain.forward)) for row in rows[2:]]
    print("forward beyond plain, of torch's checkpoint: " + ", ".join(f"{way} {ratio:.2f}" for way, ratio in ratios))
    if options.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "hardware": {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
            "model": options.model,
            "layers": LAYERS,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
