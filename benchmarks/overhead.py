"""CPU overhead of Spillway for one saved tensor, without the copies.

The model is a chain of small operators, each of which saves one tensor. A way's figure is its step (forward, backward
and the death of the graph) less the plain step of the same round, over the number of tensors: so it holds packing,
unpacking and the death of the handle. Rounds go through all ways in turn, and a figure is the median over the rounds.

Three ways run Spillway's engine without copies:

* ``moved``: every tensor is offloaded to CPU memory and reloaded. The streams of a backend for ``Session(backend=...)``
  do nothing. Slots, in-flight limits, prefetching and destinations are the real ones.
* ``caught``: the same with an in-flight limit that holds the whole step, so that backward asks before a tensor is
  offloaded.
* ``kept``: a policy that keeps everything is asked for each tensor.

The clock is that of the calling thread, which a busy machine disturbs less; waiting for another thread is not in it.

``moved by threads`` is ``moved`` with the streams of the CPU's own backend: two threads that copy tensors of 4 KiB. The
difference is the cost of handing work to a thread, which an accelerator's streams do not have.

Run it on a quiet machine: ``python benchmarks/overhead.py --json overhead.json``.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import platform
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import spillway
from spillway.policies import Keep, Modules, Offload, Operators
from spillway.runtime.backend import Event, Stream, Task
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import CpuBackend

TARGET_MICROSECONDS = 15.0
_BYTES = 4096
# As many tensors of the smallest default size as the CPU's default in-flight limit holds.
_WINDOW = 64 * _BYTES


class Reached:
    """A stream that does nothing, and its only event."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class IdleBackend(CpuBackend):
    """Copies nothing, so that only Spillway's own time is left. Reloaded tensors have undefined content."""

    _reached = Reached()

    def compute(self) -> Stream:
        return self._reached

    def new_stream(self, name: str) -> Stream:
        return Reached()

    def record(self, lane: Stream) -> Event:
        return self._reached

    def wait(self, lane: Stream, event: Event) -> None:
        return None

    def copy(self, lane: Stream, destination: Bytes, source: Bytes) -> None:
        return None

    def run(self, task: Task) -> Event:
        task()
        return self._reached


@dataclass(frozen=True)
class Row:
    """A way's time per saved tensor beyond plain, in microseconds."""

    way: str
    median: float
    low: float
    """The first quartile over the rounds."""
    high: float
    """The third."""
    within_target: bool | None
    """Whether it is at most the target; ``None`` where there is none."""


Way = Callable[[], AbstractContextManager[Any]]


def step(model: nn.Module, x: Tensor, way: Way) -> None:
    """One forward and one backward."""
    with way():
        loss = model(x).sum()
    loss.backward()


def seconds(model: nn.Module, x: Tensor, way: Way, steps: int) -> float:
    """Seconds of the calling thread for one step, averaged over a few."""
    begin = time.thread_time()
    for _ in range(steps):
        step(model, x, way)
    return (time.thread_time() - begin) / steps


def ways(idle: spillway.Session, wide: spillway.Session, threaded: spillway.Session) -> dict[str, tuple[Way, bool]]:
    """Ways by name, and whether the target is for them."""

    def offload(session: spillway.Session, policy: Any = None) -> Way:
        return lambda: spillway.offload(min_bytes=0, tier="host", policy=policy, session=session)

    return {
        "identity hooks": (lambda: saved_tensors_hooks(lambda x: x, lambda x: x), False),
        "save_on_cpu (copies)": (save_on_cpu, False),
        "spillway.keep": (spillway.keep, True),
        "kept": (offload(idle, Keep()), True),
        "caught": (offload(wide), True),
        "moved": (offload(idle), True),
        "moved by threads (copies)": (offload(threaded), False),
        "moved, module path known": (offload(idle, Modules("*", Offload())), False),
        "moved, operator known": (offload(idle, Operators("*", Offload())), False),
    }


def measure(tensors: int, rounds: int, steps: int) -> list[Row]:
    """All ways, each against the plain step of the same round."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(tensors)))
    x = torch.rand(_BYTES // 4, requires_grad=True)
    with (
        spillway.Session(backend=IdleBackend, window=_WINDOW) as idle,
        spillway.Session(backend=IdleBackend, window=tensors * _BYTES) as wide,
        spillway.Session(window=_WINDOW) as threaded,
    ):
        named = ways(idle, wide, threaded)
        costs: dict[str, list[float]] = {name: [] for name in named}
        for number in range(rounds + 2):
            gc.collect()
            gc.disable()
            for name, (way, _) in named.items():
                # Plain again beside each way, so that a drift of the machine is in both.
                plain = seconds(model, x, nullcontext, steps)
                cost = (seconds(model, x, way, steps) - plain) / tensors * 1e6
                if number >= 2:  # the first rounds fill the slabs and learn the order
                    costs[name].append(cost)
            gc.enable()
    rows = []
    for name, (_, bound) in named.items():
        low, median, high = statistics.quantiles(costs[name], n=4)
        rows.append(Row(name, median, low, high, median <= TARGET_MICROSECONDS if bound else None))
    return rows


def profile(tensors: int, lines: int) -> None:
    """Print where ``moved`` spends its time. The profiler adds about 0.1 us a call, so read shares, not seconds."""
    model = nn.Sequential(*(nn.Tanh() for _ in range(tensors)))
    x = torch.rand(_BYTES // 4, requires_grad=True)
    with spillway.Session(backend=IdleBackend, window=_WINDOW) as idle:
        way = ways(idle, idle, idle)["moved"][0]
        seconds(model, x, way, 20)
        profiler = cProfile.Profile()
        profiler.runcall(seconds, model, x, way, 100)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(lines)


def hardware() -> dict[str, str | int | None]:
    """The machine that the figures are of."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
    return {"cpu": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release().split('-')[0]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=200, help="saved tensors in a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a way in a round (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print a profile of `moved` instead")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Whatever was there may be denormal numbers, which would slow the operators down.
    torch.set_flush_denormal(True)
    if options.profile:
        profile(options.tensors, options.profile)
        return

    rows = measure(options.tensors, options.rounds, options.steps)
    print(
        f"us per saved tensor beyond plain: median (quartiles) of {options.rounds} rounds; target {TARGET_MICROSECONDS}"
    )
    for row in rows:
        verdict = "" if row.within_target is None else "  within target" if row.within_target else "  OVER TARGET"
        print(f"  {row.way:28} {row.median:7.2f}  ({row.low:.2f} to {row.high:.2f}){verdict}")
    if options.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "spillway": spillway.__version__,
            },
            "hardware": hardware(),
            "options": {name: getattr(options, name) for name in ("tensors", "rounds", "steps", "threads")},
            "unit": "microseconds per saved tensor beyond plain",
            "target": TARGET_MICROSECONDS,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
