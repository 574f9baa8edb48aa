"""Cross entropy of large vocabularies, in rows and by torch's own kernels: time, memory, bits.

    python benchmarks/losses.py --json losses.json
    python benchmarks/losses.py --rows 512 --classes 1000       # a rehearsal

Logits are in bfloat16, and cast to float32 for the loss, as the models of transformers do. *In rows* is
``spillway.cross_entropy(logits, target, dtype=torch.float32)``. A time is that of a forward and a backward, the median
of several runs of ten each. The peak is above the logits, and has their gradient. A CPU has no figure for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.nn import functional

import spillway
from _table import describe_hardware, describe_versions

TOGETHER = 10
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), target)


def in_rows(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return spillway.cross_entropy(logits, target, dtype=torch.float32)


WAYS: dict[str, Loss] = {"torch's own": plain, "in rows": in_rows}


@dataclass
class Row:
    """One way with one vocabulary."""

    loss_of: str
    classes: int
    logits_bytes: int
    seconds: float
    seconds_min: float
    seconds_max: float
    peak_bytes: int
    identical: bool


def measure(way: str, classes: int, options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(options.rows, classes, device=device, generator=generator, dtype=torch.bfloat16)
    logits.requires_grad_()
    target = torch.randint(classes, (options.rows,), device=device, generator=generator)

    def gradient(loss: Loss) -> torch.Tensor:
        (found,) = torch.autograd.grad(loss(logits, target), logits)
        return found

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    loss = WAYS[way]
    gradient(loss)
    times = []
    for _ in range(options.runs):
        wait()
        begin = time.perf_counter()
        for _ in range(TOGETHER):
            gradient(loss)
        wait()
        times.append((time.perf_counter() - begin) / TOGETHER)
    peak = 0
    if device.type != "cpu":
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        gradient(loss)
        peak = torch.accelerator.max_memory_allocated(device) - before
    identical = torch.equal(loss(logits, target), plain(logits, target))
    identical &= torch.equal(gradient(loss), gradient(plain))
    middle = statistics.median(times)
    return Row(way, classes, logits.nbytes, middle, min(times), max(times), peak, identical)


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else accelerator.type
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=here)
    parser.add_argument("--rows", type=int, default=8192 if here != "cpu" else 512)
    parser.add_argument("--classes", type=int, nargs="+", default=[32000, 128256] if here != "cpu" else [32000])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for classes in options.classes:
        for way in WAYS:
            row = measure(way, classes, options)
            rows.append(row)
            share = row.peak_bytes / row.logits_bytes
            print(
                f"{classes:7} classes  {way:12} {row.seconds * 1e3:8.2f} ms  peak {share:5.2f} of the logits"
                f"  {'identical' if row.identical else 'OTHER BITS'}",
                flush=True,
            )
    if options.json:
        header = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": describe_versions(),
            "hardware": describe_hardware(torch.device(options.device)),
            "options": {name: str(value) for name, value in vars(options).items()},
        }
        options.json.write_text(json.dumps({**header, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
