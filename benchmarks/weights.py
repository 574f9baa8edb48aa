"""Plans that choose how many blocks have their weights on the GPU (``stream="auto"``): their peaks, times and bounds.

    python benchmarks/weights.py --json weights.json                        # LoRA on 8B's shape, five budgets
    python benchmarks/weights.py --kind full --layers 32 --batch 4 --seq 16384 --budgets 24GiB --card 24GiB

``--kind lora`` has frozen weights and adapters; ``--kind full`` trains all weights of a whole model, with embedding and
head, by ``OffloadedOptimizer`` with chunks on the GPU, clipped, with steps that overlap the next forward. Budgets are
given, or are shares between the smallest feasible one (0) and the peak with everything on the GPU and kept (1).

*peak* is ``max_memory_allocated`` over the timed steps. *bound* is the longer of two times: the step that the profile
predicts for the same plan on a link without limits, and the bytes that a step copied to the GPU at the measured rate of
copies (in one direction for LoRA, in both at once for full). ``--card`` holds the process to so many bytes of the GPU.
Without it, the step with all weights on the GPU and all blocks recomputed is measured first (LoRA only).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spillway
from _llama import SHAPES, Layer, make_stack
from _table import describe_hardware, describe_versions, gib
from longest import Whole
from optimizer import ADAMW, MAX_NORM, link_rate
from spillway.profiler.machine import known_hardware
from spillway.profiler.meter import meter_of
from spillway.units import parse_bytes
from streams import Stack as Adapted
from streams import bandwidth, mapped

MOST_STEPS = 30
FREE = 1e15
"""Bytes a second of a link without limits."""


@dataclass
class Row:
    """One budget."""

    kind: str
    tokens: int
    budget: int
    blocks: int
    resident_blocks: int
    peak_bytes: int
    predicted_peak: int
    step_seconds: float
    step_min: float
    step_max: float
    predicted_seconds: float
    compute_seconds: float
    """A micro-batch on a link without limits, simulated."""
    copied_bytes: int
    """Bytes to the GPU in a step: weights, activations and, in *full*, state of the optimizer."""
    placed_bound: float
    steps: int
    """Until the plan was active."""


class Training:
    """A model in CPU memory, its optimizer, and its batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)
        self.events = spillway.EventList()
        self.session = spillway.Session(window=options.window, recorder=self.events)
        shape, seq, batch = SHAPES[options.shape], options.seq, options.batch
        self.optimizer: Any
        if options.kind == "lora":
            in_files = options.files is not None
            self.model: nn.Module = (
                mapped(options, self.session) if in_files else Adapted(options.shape, options.layers, torch.bfloat16)
            )
            trained = [each for each in self.model.parameters() if each.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
            angles = torch.rand(seq, shape.head, device=self.device)
            self.batch: tuple[Tensor, ...] = (
                torch.randn(batch, seq, shape.hidden, device=self.device, dtype=torch.bfloat16),
                angles.cos().bfloat16(),
                angles.sin().bfloat16(),
            )
        else:
            self.model = whole(options, self.device)
            self.optimizer = spillway.OffloadedOptimizer(
                self.model.parameters(), torch.optim.AdamW, step_on="gpu", fused=True, session=self.session, **ADAMW
            )
            self.batch = (torch.randint(options.vocabulary, (batch, seq), device=self.device),)

    def attach(self, budget: int) -> spillway.Attached:
        more = {} if self.options.kind == "lora" else {"optimizer": self.optimizer}
        attached = spillway.attach(
            self.model,
            budget=budget,
            stream="auto",
            blocks=Layer,
            device=self.device,
            session=self.session,
            min_bytes=self.options.min_bytes,
            **more,
        )
        if self.options.kind == "full":
            self.optimizer.overlap_forward(self.model, blocks=Layer)
        return attached

    def step(self, micro: int) -> None:
        for _ in range(micro):
            self.model(*self.batch).backward()
        if self.options.kind == "full":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, count: int) -> float:
        """Of a step, from some that are timed together: the end of one may overlap the begin of the next."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            self.step(self.options.micro)
        self.synchronize()
        return (time.perf_counter() - begin) / count

    def copied(self) -> int:
        """Bytes of one step's copies to the GPU."""
        self.events.events.clear()
        self.step(self.options.micro)
        self.synchronize()
        found = sum(event.nbytes for event in self.events.events if event.kind is spillway.EventKind.RETURN)
        return found + (self.optimizer.stats().received_bytes if self.options.kind == "full" else 0)

    def peaked(self) -> int:
        """The peak of the steps since the last call; on the CPU, of another step."""
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        meter = meter_of(self.device)
        meter.mark()
        self.step(1)
        meter.mark()
        return meter.finish()[1].peak

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def whole(options: argparse.Namespace, device: torch.device) -> Whole:
    """A language model in CPU memory. Each layer is made on its device, which is faster."""
    stack = make_stack(options.shape, 0, options.seq, device, torch.bfloat16)
    for _ in range(options.layers):
        stack.layers.extend(make_stack(options.shape, 1, 1, device, torch.bfloat16).layers.cpu())
    torch.manual_seed(1)
    with device:
        return Whole(stack, SHAPES[options.shape].hidden, options.vocabulary).to(torch.bfloat16)


def resident_seconds(training: Training) -> float:
    """A step with all weights on the GPU, and recomputed blocks."""
    training.model.to(training.device)
    with spillway.attach(training.model, policy=spillway.Recompute(), blocks=Layer, session=training.session):
        training.seconds(3)
        found = statistics.median(training.seconds(training.options.together) for _ in range(training.options.runs))
    training.model.to("cpu")
    print(f"all on the GPU: {found * 1e3:.0f} ms", flush=True)
    return found


def rows_of(training: Training, rate: float) -> Iterator[Row]:
    options, hardware = training.options, known_hardware(training.device)
    budgets = [parse_bytes(each) for each in options.budgets]
    if not budgets:
        with training.attach(1 << 50) as attached:
            search(training, attached)
            assert attached.profile is not None and attached.plan is not None
            most = attached.plan.predicted_peak
            try:
                spillway.plan(attached.profile, budget=1, hardware=hardware, stream="auto", window=options.window)
            except spillway.BudgetError as error:
                least = error.least
        print(f"least {gib(least)}, most {gib(most)}", flush=True)
        budgets = [int(least + share * (most - least)) for share in options.shares]
    endless = replace(hardware, bandwidths=tuple(replace(each, out=FREE, back=FREE) for each in hardware.bandwidths))
    for budget in budgets:
        gc.collect()
        with training.attach(budget) as attached:
            try:
                steps = search(training, attached)
            except spillway.BudgetError as error:
                # On a CPU, the rest of the process takes other bytes each time.
                print(f"\n{gib(budget)}: {error}", flush=True)
                continue
            print("\n".join(f"  {line}" for line in attached.explain().splitlines()[:12]), flush=True)
            plan, profile = attached.plan, attached.profile
            assert plan is not None and profile is not None
            training.seconds(1)
            if training.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(training.device)
            times = [training.seconds(options.together) for _ in range(options.runs)]
            peak = training.peaked()
            copied = training.copied()
            compute = spillway.simulate(profile, plan, hardware=endless).seconds
            yield Row(
                options.kind,
                options.batch * options.seq * options.micro,
                budget,
                options.layers,
                len(plan.resident),
                peak,
                plan.predicted_peak,
                statistics.median(times),
                min(times),
                max(times),
                options.micro * plan.predicted_seconds,
                compute,
                copied,
                max(options.micro * compute, copied / rate),
                steps,
            )


def search(training: Training, attached: spillway.Attached) -> int:
    """Step until the plan is active."""
    for count in range(MOST_STEPS):
        begin = time.perf_counter()
        training.step(1)
        training.synchronize()
        print(f"  {attached.stage} {time.perf_counter() - begin:.2f} s", end="", flush=True)
        if attached.stage == "active":
            print(flush=True)
            return count + 1
    raise SystemExit(f"no plan is active after {MOST_STEPS} steps:\n{attached.explain()}")


def described(row: Row) -> str:
    off = row.peak_bytes / row.predicted_peak - 1
    return (
        f"{row.kind}, {row.tokens} tokens, budget {gib(row.budget)}: {row.resident_blocks} of {row.blocks} stay, "
        f"peak {gib(row.peak_bytes)} (predicted {gib(row.predicted_peak)}, {off:+.1%}), step "
        f"{row.step_seconds * 1e3:.0f} ms ({row.step_min * 1e3:.0f} to {row.step_max * 1e3:.0f}; predicted "
        f"{row.predicted_seconds * 1e3:.0f}), {row.step_seconds / row.placed_bound:.3f} of the bound, "
        f"{row.tokens / row.step_seconds:.0f} tokens/s"
    )


def main() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    small = accelerator is None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["lora", "full"], default="lora")
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--shape", choices=SHAPES, default="tiny" if small else "8b")
    parser.add_argument("--layers", type=int, default=4 if small else 32)
    parser.add_argument("--seq", type=int, default=256 if small else 2048)
    parser.add_argument("--batch", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--vocabulary", type=int, default=512 if small else 128256)
    parser.add_argument("--budgets", nargs="*", default=[], help="such as 24GiB")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.0, 0.25, 0.5, 0.75, 1.05])
    parser.add_argument("--card", help="hold the process to so many bytes of the GPU, once the model is made")
    parser.add_argument("--window", default="64KiB" if small else "512MiB", help="the in-flight limit")
    parser.add_argument("--min-bytes", dest="min_bytes", default="4KiB" if small else "1MiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--together", type=int, default=2, help="steps that are timed together")
    parser.add_argument("--files", type=Path, help="with lora: a folder that the weights are in")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    training = Training(options)
    on_gpu = training.device.type != "cpu"
    rate = FREE
    if on_gpu:
        rate = bandwidth(1 << 28, training.device) if options.kind == "lora" else 1e9 * link_rate(options)
        known_hardware(training.device)
        if options.card is not None:
            share = parse_bytes(options.card) / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(share, 0)
    print(f"copies {rate / 1e9:.1f} GB/s", flush=True)
    is_measured = options.kind == "lora" and options.card is None and options.files is None
    resident = resident_seconds(training) if is_measured else 0.0
    rows: list[Row] = []
    for row in rows_of(training, rate):
        print(described(row), flush=True)
        rows.append(row)
        if options.json is not None:
            result = {
                "date": datetime.now(UTC).date().isoformat(),
                "versions": describe_versions(),
                "hardware": describe_hardware(training.device),
                "options": {key: value for key, value in vars(options).items() if key not in ("json", "files")},
                "copies": rate,
                "resident_seconds": resident,
                "rows": [asdict(each) for each in rows],
            }
            options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
