"""The longest sequence of a whole Llama that trains within the device's memory: checkpointed, and by a plan.

The model has an embedding, layers, a norm and a head. For both ways, the loss is summed over checkpointed pieces of the
sequence, so that the logits are never in memory as a whole. SGD without momentum steps each parameter in backward, as
soon as its gradient is there (``--gradients``: at the end). Checkpointing's longest sequence is found by real steps:
two predict the bytes of a token, and longer ones are run until one that is 3 % longer fails. ``spillway.longest`` finds
the plan's, and runs it.

    python benchmarks/longest.py --layers 32 --host-budget 120GiB --json longest.json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway
from _llama import SHAPES, RMSNorm, Stack, make_stack
from spillway.units import format_bytes, parse_bytes

PIECE = 2048
"""Tokens whose logits are in memory at the same time."""
SLACK = 1.03
RATE = 1e-6


class Whole(nn.Module):
    """A language model; its call is the loss of a sequence."""

    def __init__(self, stack: Stack, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.stack = stack
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.stack(self.embedding(tokens)))
        pieces = zip(x.split(PIECE, 1), tokens.split(PIECE, 1), strict=True)
        losses = [checkpoint(self.piece, part, wanted, use_reentrant=False) for part, wanted in pieces]
        return torch.stack(losses).sum() / tokens.numel()

    def piece(self, x: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten(), reduction="sum")


def make(options: argparse.Namespace, tokens: int) -> Whole:
    """With tables of positions for so many tokens."""
    hidden = SHAPES[options.shape].hidden
    device, dtype = torch.device(options.device), torch.bfloat16
    stack = make_stack(options.shape, options.layers, tokens, device, dtype)
    torch.manual_seed(1)
    with device:
        return Whole(stack, hidden, options.vocabulary).to(dtype)


def batch_of(options: argparse.Namespace, tokens: int) -> Tensor:
    return torch.randint(options.vocabulary, (1, tokens), device=options.device)


def positions(model: Whole, tokens: int, options: argparse.Namespace) -> None:
    """Tables for this length, and no longer: they count."""
    torch.manual_seed(0)
    with torch.device(options.device):
        other = Stack(SHAPES[options.shape], 0, tokens).to(torch.bfloat16)
    model.stack.cos, model.stack.sin = other.cos, other.sin


def step(model: Whole, tokens: Tensor) -> float:
    loss = model(tokens)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    model.zero_grad(set_to_none=True)
    return float(loss.detach())


def step_at_once(parameter: Tensor) -> None:
    """Step one parameter by SGD, and free its gradient."""
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-RATE)
    parameter.grad = None


def peak_of(model: Whole, options: argparse.Namespace, tokens: int) -> int | None:
    """Peak of two steps. ``None``: out of memory."""
    gc.collect()
    try:
        positions(model, tokens, options)
        batch = batch_of(options, tokens)
        torch.accelerator.reset_peak_memory_stats()
        begin = time.perf_counter()
        for _ in range(2):
            step(model, batch)
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated()
    except torch.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        torch.accelerator.empty_cache()
        print(f"  {tokens} tokens: out of memory", flush=True)
        return None
    print(f"  {tokens} tokens: {format_bytes(peak)}, {time.perf_counter() - begin:.1f} s for two steps", flush=True)
    return peak


def checkpointed(model: Whole, options: argparse.Namespace) -> int:
    """The longest that fits, of multiples, and no more than so much below what does not."""
    model.stack.call = lambda layer, *args: checkpoint(layer, *args, use_reentrant=False)
    found = longest_of(lambda units: peak_of(model, options, units * options.multiple), options.budget)
    model.stack.call = lambda layer, *args: layer(*args)
    return found * options.multiple


def longest_of(peak_of: Callable[[int], int | None], budget: int) -> int:
    """The largest size that fits, by the lines through what was measured: a peak is a line, from some size on."""
    fits: dict[int, int] = {}
    over: dict[int, int | None] = {}
    for units in (8, 16):
        peak = peak_of(units)
        assert peak is not None and peak <= budget, "give a smaller --multiple"
        fits[units] = peak
    while not over or min(over) > max(max(fits) * SLACK, max(fits) + 1):
        (before, low), (last, high) = sorted(fits.items())[-2:]
        beyond = over[min(over)] if over else None
        if beyond is not None:
            (before, low), (last, high) = (last, high), (min(over), beyond)
        units = int(before + (budget - low) * (last - before) / max(high - low, 1))
        # This may be far off while the peak does not grow linearly.
        units = max(min(units, 4 * max(fits)), int(max(fits) * SLACK), max(fits) + 1)
        if over:
            units = (max(fits) + min(over)) // 2 if beyond is None else min(units, min(over) - 1)
        peak = peak_of(units)
        if peak is not None and peak <= budget:
            fits[units] = peak
        else:
            over[units] = peak
    return max(fits)


def planned(model: Whole, options: argparse.Namespace) -> int:
    ran: dict[int, float] = {}

    def of(tokens: int) -> tuple[nn.Module, Tensor]:
        print(f"  {tokens} tokens, {time.perf_counter() - begin:.1f} s so far", flush=True)
        ran[tokens] = time.perf_counter()
        positions(model, tokens, options)
        return model, batch_of(options, tokens)

    begin = time.perf_counter()
    return spillway.longest(
        of,
        budget=options.budget,
        session=options.session,
        at_least=4 * options.multiple,
        multiple_of=options.multiple,
        loss=lambda loss: loss,
    )


def trained(model: Whole, options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Steps of the longest sequence, planned as a user would."""
    positions(model, tokens, options)
    batch = batch_of(options, tokens)
    with spillway.attach(model, budget=options.budget, session=options.session) as attached:
        times = []
        while attached.stage != "active" or len(times) < 7:
            torch.accelerator.reset_peak_memory_stats()
            begin = time.perf_counter()
            step(model, batch)
            torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
            print(f"  {attached.stage}: {times[-1]:.1f} s", flush=True)
        stats = attached.stats()
        assert attached.plan is not None
        return {
            "step_seconds": times[-1],
            "peak_bytes": torch.accelerator.max_memory_allocated(),
            "predicted_peak": attached.plan.predicted_peak,
            "peak_task": attached.plan.peak_task,
            "host_bytes": stats.host_bytes,
            "offloaded_bytes": stats.offloaded_bytes,
            "notes": list(stats.notes),
        }


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        print("benchmarks/longest.py needs an accelerator: there, allocated bytes say what fits")
        return
    total = torch.accelerator.get_memory_info()[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--multiple", type=int, default=4096)
    parser.add_argument("--budget", type=lambda text: parse_bytes(text, what="budget"), default=int(0.93 * total))
    parser.add_argument("--host-budget", default="120GiB")
    parser.add_argument("--gradients", action="store_true", help="all there until the end of backward")
    parser.add_argument("--parts", nargs="*", default=["checkpoint", "plan", "train"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.device = accelerator.type
    options.session = spillway.Session(host_budget=options.host_budget)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    model = make(options, options.multiple)
    if not options.gradients:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_at_once)
    result: dict[str, Any] = {}
    parts: dict[str, Callable[[], Any]] = {
        "checkpoint": lambda: checkpointed(model, options),
        "plan": lambda: planned(model, options),
        "train": lambda: trained(model, options, result.get("plan", 4 * options.multiple)),
    }
    for name, part in parts.items():
        if name in options.parts:
            print(name, flush=True)
            result[name] = part()
            print(f"{name}: {result[name]}", flush=True)
            write(options, result)


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.json is None:
        return
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "spillway": spillway.__version__},
        "hardware": {"device": torch.cuda.get_device_name(0), "cores": os.cpu_count()},
        "options": {name: str(value) for name, value in vars(options).items() if name != "session"},
    }
    options.json.write_text(json.dumps({**header, **result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
