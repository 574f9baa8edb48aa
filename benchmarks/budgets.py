"""Peaks within budgets, and errors of predictions: models of five kinds, eight budgets each.

The budgets of a model are spread between its smallest feasible budget and the baseline's peak. Each one is given to
``spillway.attach``. Steps are timed once the plan is active. A row has the budget, the largest peak and the median time
of these steps, and both predictions. The summary has the number of peaks within their budgets, and the median errors.

    python benchmarks/budgets.py --json budgets.json

On a CPU, tensors are offloaded to the disk, a peak is that of the validating step, and models are small. ``--rehearse``
makes them small anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from _llama import make_stack
from spillway import BudgetError
from spillway.profiler.machine import known_hardware
from spillway.profiler.meter import meter_of
from spillway.units import format_bytes

SHARES = (0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.05)
MOST_STEPS = 30
PEAK_NEAR, TIME_NEAR = 0.02, 0.05


class Attention(nn.Module):
    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Experts(nn.Module):
    """Each token goes to one of eight, as the router says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero()[:, 0]
            out = out.index_copy(0, mine, expert(tokens[mine]) * weight[mine, None])
        return x + out.view_as(x)


class Bottleneck(nn.Module):
    """He et al. 2015, without a stride."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = channels // 4
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


class Stacked(nn.Module):
    """Something, blocks, and something."""

    def __init__(self, first: nn.Module, blocks: Iterator[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def llama(shape: str, layers: int, tokens: int) -> Callable[[torch.device], tuple[nn.Module, Tensor]]:
    def make(device: torch.device) -> tuple[nn.Module, Tensor]:
        stack = make_stack(shape, layers, tokens, device, torch.bfloat16)
        size = stack.layers[0].shape.hidden
        # As after an embedding.
        model = nn.Sequential(nn.Linear(64, size, device=device, dtype=torch.bfloat16), stack)
        return model, torch.randn(1, tokens, 64, device=device, dtype=torch.bfloat16)

    return make


def stacked(
    block: Callable[[], nn.Module], count: int, first: Callable[[], nn.Module], batch: tuple[int, ...], out: int
) -> Callable[[torch.device], tuple[nn.Module, Tensor]]:
    def make(device: torch.device) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        with device:
            head = nn.AdaptiveAvgPool2d(1) if len(batch) == 4 else nn.Linear(out, 64)
            model = Stacked(first(), (block() for _ in range(count)), head).to(torch.bfloat16)
            return model, torch.randn(batch).to(torch.bfloat16)

    return make


def models(small: bool) -> dict[str, Callable[[torch.device], tuple[nn.Module, Tensor]]]:
    width, channels = (256, 32) if small else (1024, 256)

    def vision() -> nn.Module:
        return nn.Sequential(Attention(width, causal=False), Mlp(width))

    def mixture() -> nn.Module:
        return nn.Sequential(Attention(width, causal=True), Experts(width))

    def convolution() -> nn.Module:
        return nn.Conv2d(3, channels, 3, stride=2, padding=1)

    def linear() -> nn.Module:
        return nn.Linear(64, width)

    few = 4 if small else 12
    return {
        "llama 1b": llama("tiny" if small else "1b", few, 2048 if small else 8192),
        "llama 8b": llama("tiny" if small else "8b", few // 2, 4096 if small else 8192),
        "vit": stacked(vision, few, linear, (48, 197, 64) if small else (64, 577, 64), width),
        "resnet": stacked(
            lambda: Bottleneck(channels), few, convolution, (8, 3, 64, 64) if small else (64, 3, 112, 112), channels
        ),
        "experts": stacked(mixture, few, linear, (2, 1024, 64) if small else (8, 4096, 64), width),
    }


@dataclass
class Row:
    """One budget of one model."""

    model: str
    share: float
    """Place between the smallest budget (0) and the baseline's peak (1)."""
    budget: int
    peak: int
    predicted_peak: int
    seconds: float
    predicted_seconds: float
    keep_seconds: float
    steps: int
    """Steps until a plan is active."""
    anew: int
    """Plans after the first."""
    stages_peak: int
    """Peak of the steps before."""

    @property
    def peak_off(self) -> float:
        return abs(self.predicted_peak - self.peak) / self.peak

    @property
    def seconds_off(self) -> float:
        return abs(self.predicted_seconds - self.seconds) / self.seconds

    def __str__(self) -> str:
        kept = "" if self.peak <= self.budget else "  OVER THE BUDGET"
        return (
            f"{self.model:9} {self.share:5.2f}: {format_bytes(self.peak):>9} of {format_bytes(self.budget):>9}, "
            f"predicted {format_bytes(self.predicted_peak):>9} ({self.peak_off:5.1%}); x{self.of_keep:5.3f}, "
            f"{self.seconds * 1e3:7.1f} ms, predicted {self.predicted_seconds * 1e3:7.1f} ({self.seconds_off:5.1%}); "
            f"active after {self.steps}, planned again {self.anew} times{kept}"
        )

    @property
    def of_keep(self) -> float:
        return self.seconds / self.keep_seconds


class Training:
    """Steps whose gradients stay allocated, and are set to zero."""

    def __init__(self, make: Callable[[torch.device], tuple[nn.Module, Tensor]], device: torch.device) -> None:
        self.device = device
        self.model, self.batch = make(device)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.step()

    def step(self) -> None:
        self.model(self.batch).float().square().mean().backward()
        self.batch.grad = None
        torch._foreach_zero_([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])

    def peak(self) -> int:
        """Peak bytes of a step."""
        if self.device.type == "cpu":
            meter = meter_of(self.device)
            meter.mark()
            self.step()
            meter.mark()
            return max(reading.peak for reading in meter.finish() or ())
        torch.accelerator.reset_peak_memory_stats(self.device)
        self.step()
        return int(torch.accelerator.max_memory_allocated(self.device))

    def seconds(self, steps: int) -> float:
        """Median seconds of a step."""
        times = []
        for _ in range(steps):
            self.synchronize()
            begin = time.perf_counter()
            self.step()
            self.step()
            self.synchronize()
            times.append((time.perf_counter() - begin) / 2)
        return statistics.median(times)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def rows_of(name: str, training: Training, options: argparse.Namespace) -> Iterator[Row]:
    keep_peak, keep_seconds = training.peak(), training.seconds(options.steps)
    least = least_of(training)
    print(
        f"{name}: plain {format_bytes(keep_peak)}, {keep_seconds * 1e3:.1f} ms; least {format_bytes(least)}", flush=True
    )
    for share in options.shares:
        budget = int(least + share * (keep_peak - least))
        gc.collect()
        with spillway.Session() as session, spillway.attach(training.model, budget=budget, session=session) as attached:
            steps, highest = 0, 0
            while attached.stage != "active":
                highest = max(highest, 0 if training.device.type == "cpu" else training.peak())
                if training.device.type == "cpu":
                    training.step()
                steps += 1
                if steps > MOST_STEPS:
                    raise SystemExit(f"{name}, {share}: no plan is active after {MOST_STEPS} steps")
            assert attached.plan is not None
            peaks = [training.peak() for _ in range(3)] if training.device.type != "cpu" else [0]
            if training.device.type == "cpu" and attached.measured is not None:
                peaks = [attached.measured.peak_bytes]
            yield Row(
                name,
                share,
                budget,
                max(peaks),
                attached.plan.predicted_peak,
                training.seconds(options.steps),
                attached.plan.predicted_seconds,
                keep_seconds,
                steps,
                sum(note.startswith("planned") for note in attached.notes),
                highest,
            )


def least_of(training: Training) -> int:
    """The smallest feasible budget, which the error names."""
    with spillway.Session() as session:
        attached = spillway.attach(training.model, budget=1, session=session)
        try:
            for _ in range(4):
                training.step()
        except BudgetError as error:
            return error.least
        finally:
            attached.remove()
    raise AssertionError("a byte was enough")


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else accelerator.type
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=here)
    parser.add_argument("--models", nargs="*", default=list(models(True)), choices=list(models(True)))
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rehearse", action="store_true", help="small models")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)
    known_hardware(device)
    rows: list[Row] = []
    for name in options.models:
        training = Training(models(options.rehearse or device.type == "cpu")[name], device)
        try:
            for row in rows_of(name, training, options):
                print(row, flush=True)
                rows.append(row)
                if options.json:
                    write(options, rows)
        except BudgetError as error:
            # Small models on a CPU: the rest of the process takes other bytes each time.
            print(f"{name}: {error}", flush=True)
        del training
        gc.collect()
    print("\n".join(summary(rows)) if rows else "no budget was met")


def summary(rows: list[Row]) -> Iterator[str]:
    yield f"{sum(row.peak <= row.budget for row in rows)} of {len(rows)} peaks are within their budgets"
    for what, limit, off in (
        ("peaks", PEAK_NEAR, [row.peak_off for row in rows]),
        ("times", TIME_NEAR, [row.seconds_off for row in rows]),
    ):
        near = sum(each <= limit for each in off)
        yield f"predicted {what}: {statistics.median(off):.1%} off (median), {near} of {len(off)} within {limit:.0%}"


def write(options: argparse.Namespace, rows: list[Row]) -> None:
    name = platform.processor() if options.device == "cpu" else torch.cuda.get_device_name(0)
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "spillway": spillway.__version__},
        "hardware": {"device": name, "cores": os.cpu_count()},
        "options": {key: str(value) for key, value in vars(options).items()},
    }
    options.json.write_text(
        json.dumps({**header, "rows": [asdict(row) for row in rows], "summary": list(summary(rows))}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
