"""CPU overhead of a checkpointed function for each operator, compared with torch's own checkpointing.

The model is four Llama layers of width 256, so small that CPU overhead dominates. All ways run the same steps. The
times of ``torch.utils.checkpoint``, whose recomputation is the same, are subtracted from those of a way, and the rest
is divided by the number of operators. ``an operator`` is the mean over forward and recomputation. Rounds go through all
ways in turn, in one thread, and a figure is the median over the rounds.

    python benchmarks/dispatch.py --json dispatch.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import spillway
from _llama import Stack, make_stack

TARGET_MICROSECONDS = 15.0
LAYERS, TOKENS = 4, 8

Call = Callable[..., Any]


@dataclass
class Row:
    """One way of running a layer; microseconds an operator above plain checkpointing."""

    way: str
    forward: float
    again: float
    an_operator: float
    step_milliseconds: float


class Through(TorchDispatchMode):
    """A mode that does nothing, but count."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def ways() -> dict[str, Call]:
    plain = partial(checkpoint, use_reentrant=False)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return {
        "checkpoint": plain,
        "checkpoint, empty modes": partial(plain, context_fn=lambda: (Through(), Through())),
        "torch's selective checkpoint": partial(
            plain, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.bmm.default])
        ),
        "torch's, attention saved": partial(
            plain, context_fn=partial(create_selective_checkpoint_contexts, [attention])
        ),
        "spillway.recompute": spillway.recompute,
        "spillway's, attention saved": spillway.Recompute(save="attention"),
        "spillway's, saved_by attention": spillway.Recompute(save=spillway.saved_by("attention")),
    }


def once(stack: Stack, call: Call, x: torch.Tensor) -> tuple[float, float]:
    stack.call = call
    start = time.perf_counter()
    loss = stack(x).sum()
    middle = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - middle


def operators(stack: Stack, x: torch.Tensor) -> int:
    stack.call = lambda layer, *args: layer(*args)
    with Through() as mode:
        stack(x)
    return mode.count


def measure(rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    stack = make_stack("tiny", LAYERS, TOKENS, torch.device("cpu"), torch.float32)
    x = torch.randn(1, TOKENS, 256, requires_grad=True)
    count = operators(stack, x)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways()}
    for _ in range(rounds):
        for name, call in ways().items():
            times[name].append(once(stack, call, x))
    medians = {
        name: tuple(statistics.median(column) for column in zip(*pairs[rounds // 5 :], strict=True))
        for name, pairs in times.items()
    }
    base = medians["checkpoint"]
    rows = []
    for name, (forward, backward) in medians.items():
        more = [(ours - theirs) / count * 1e6 for ours, theirs in zip((forward, backward), base, strict=True)]
        rows.append(Row(name, more[0], more[1], sum(more) / 2, (forward + backward) * 1e3))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    rows = measure(options.rounds)
    print(f"{'':32} us an operator: forward  replay    mean    step")
    for row in rows:
        print(
            f"{row.way:32} {row.forward:24.1f} {row.again:7.1f} {row.an_operator:7.1f} {row.step_milliseconds:7.1f} ms",
            flush=True,
        )
    print(f"target: {TARGET_MICROSECONDS:.0f} us an operator")
    if options.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "hardware": {"cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"},
            "target_microseconds": TARGET_MICROSECONDS,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
