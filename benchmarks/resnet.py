"""Peak and time of a ResNet-50's step for offload ratios from 0 to 1.

    python benchmarks/resnet.py --json resnet.json
    python benchmarks/resnet.py --images 256            # on an accelerator, with its defaults otherwise

The model is that of ``examples/resnet50.py``, with ``spillway.offload(ratio=...)`` around its four stages, which on an
accelerator is haiscale's ``CPUOffload(offload_ratio, tag)``. A step is a forward and a backward; gradients accumulate.
``plain`` has no context, and a ratio of 0 one that keeps everything. Each row is a process of its own, with malloc set
as in the demo and deterministic convolutions. It has:

* the median step and the range, in milliseconds, and the first step;
* the peak above weights, gradients and a batch (on a CPU: of resident memory);
* the bytes that the last step offloaded;
* whether losses, gradients and statistics are bit for bit those of ``plain``.

On a CPU, tensors are offloaded to the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import spillway
from _table import describe_hardware, describe_versions
from spillway.cli.bench import CHILD_ENVIRONMENT
from spillway.cli.training import add_to_hash
from spillway.profiler.meter import DeviceMemory
from spillway.runtime.cpu import set_malloc

PLAIN = "plain"
RATIOS = ("0", "0.25", "0.5", "0.75", "1")
EXAMPLE = Path(__file__).parent.parent / "examples" / "resnet50.py"
HEADINGS = (
    "ratio",
    "step",
    "of plain",
    "from",
    "to",
    "first",
    "peak",
    "of plain",
    "offloaded",
    "reloaded",
    "identical",
)
PASSED_ON = ("images", "size", "width", "steps", "warmup", "window", "tier", "device")


@dataclass
class Row:
    """One ratio."""

    ratio: str
    step_seconds: float
    step_min: float
    step_max: float
    first_seconds: float
    peak_bytes: int
    """Above weights, gradients and a batch, which the first step begins with."""
    peak_source: str
    offloaded_bytes: int
    reloaded_bytes: int
    stall_seconds: float
    notes: list[str]
    digest: str
    """A hash of all losses, and of the gradients and statistics at the end."""


def resnet() -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("resnet50", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    torch.backends.cudnn.deterministic = True
    last: list[spillway.offload] = []
    session = spillway.Session(window=options.window)

    def around() -> AbstractContextManager[Any]:
        if options.child == PLAIN:
            return contextlib.nullcontext()
        last[:] = [
            spillway.offload(ratio=float(options.child), tag="stages", min_bytes=0, tier=options.tier, session=session)
        ]
        return last[0]

    if device.type == "cpu":
        set_malloc()
    torch.manual_seed(0)
    model = resnet().ResNet(around, width=options.width).to(device)
    images = torch.randn(options.images, 3, options.size, options.size, device=device)
    labels = torch.randint(1000, (options.images,), device=device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fingerprint = hashlib.sha256()

    def step() -> float:
        begin = time.perf_counter()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - begin
        add_to_hash(fingerprint, [loss])
        return seconds

    memory = DeviceMemory(device)
    held = memory.level()
    first = step()
    # The first pass offloads all, and counts. The second learns which tensors can stay. The third is like all others.
    for _ in range(options.warmup):
        step()
    memory.reset_peak()
    times = [step() for _ in range(options.steps)]
    peak = memory.peak() - held
    add_to_hash(fingerprint, (parameter.grad for parameter in model.parameters() if parameter.grad is not None))
    add_to_hash(fingerprint, model.buffers())
    stats = last[0].stats() if last else spillway.StepStats()
    return Row(
        options.child,
        statistics.median(times),
        min(times),
        max(times),
        first,
        peak,
        "resident bytes of the process" if device.type == "cpu" else "bytes allocated on the device",
        stats.offloaded_bytes,
        stats.reloaded_bytes,
        stats.stall_seconds,
        list(stats.notes),
        fingerprint.hexdigest(),
    )


def run_child(ratio: str, options: argparse.Namespace) -> Row:
    given = {name: getattr(options, name) for name in PASSED_ON}
    arguments = [f"--{name}={value}" for name, value in given.items() if value is not None]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *arguments, f"--child={ratio}", f"--json={file.name}"]
        subprocess.run(command, env={**CHILD_ENVIRONMENT, **os.environ}, check=True)
        return Row(**json.loads(Path(file.name).read_text()))


def line(row: Row, plain: Row) -> str:
    cells = (
        row.ratio,
        f"{row.step_seconds * 1e3:.1f} ms",
        f"{row.step_seconds / plain.step_seconds:.2f}",
        f"{row.step_min * 1e3:.1f}",
        f"{row.step_max * 1e3:.1f}",
        f"{row.first_seconds * 1e3:.0f} ms",
        f"{row.peak_bytes / 2**20:.1f} MiB",
        f"{row.peak_bytes / max(plain.peak_bytes, 1):.0%}",
        f"{row.offloaded_bytes / 2**20:.1f} MiB",
        f"{row.reloaded_bytes / 2**20:.1f} MiB",
        "yes" if row.digest == plain.digest else "NO",
    )
    return " ".join([joined(cells), *row.notes])


def joined(cells: tuple[str, ...]) -> str:
    return " ".join([cells[0].ljust(6), *(cell.rjust(11) for cell in cells[1:])])


def parser() -> argparse.ArgumentParser:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    small = accelerator is None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=16 if small else 128, help="in a batch")
    parser.add_argument("--size", type=int, default=96 if small else 224, help="pixels of a side")
    parser.add_argument("--width", type=int, default=32 if small else 64, help="channels of the first stage")
    parser.add_argument("--steps", type=int, default=3 if small else 9, help="steps to take the median of")
    parser.add_argument("--warmup", type=int, default=3, help="steps before these, beside the first")
    parser.add_argument("--window", default="4MiB" if small else None, help="of the session, in bytes or as 512MiB")
    parser.add_argument("--tier", default="auto", help="where to: auto, host or disk")
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--ratios", nargs="*", default=list(RATIOS), metavar="RATIO", help="from 0 to 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.child:
        options.json.write_text(json.dumps(asdict(measure(options))))
        return
    print(joined(HEADINGS), flush=True)
    rows: list[Row] = []
    for ratio in (PLAIN, *options.ratios):
        rows.append(run_child(ratio, options))
        print(line(rows[-1], rows[0]), flush=True)
    print(f"peak: {rows[0].peak_source}")
    if options.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": describe_versions(),
            "hardware": describe_hardware(torch.device(options.device)),
            "options": {name: getattr(options, name) for name in PASSED_ON},
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
