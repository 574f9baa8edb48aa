"""transformers' own Llama under its own Trainer: plain, with gradient checkpointing, and with our callback.

Each way is a process of its own. A step's time is between two ends of steps, by events of the GPU: the median of the
last steps. By default the trainer stalls between steps, to check the loss for NaN and to copy the next inputs. With
--ahead it does neither, so that the CPU runs ahead from step to step. With --waiting it logs and synchronises in each
step.

The callback's first budget is the peak of gradient checkpointing, of all allocated memory. The second one is half-way
between that and the plain peak. Shorter runs of two layers with deterministic algorithms compare losses bit for bit
with the plain ones: without these algorithms, no two runs of plain PyTorch have the same losses. The results have the
times of CPU and GPU for each phase of a step, by hooks of the embedding and of the last norm. Hooks of a block would
change it.

    python benchmarks/trainer.py --json trainer.json                       # 1B width, 8192 tokens
    python benchmarks/trainer.py --layers 2 --hidden 64 --tokens 128       # a rehearsal
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import spillway
from spillway.profiler.meter import allocated
from spillway.units import format_bytes

KEEP, CHECKPOINT, WITHIN, BETWEEN = "keep", "gradient_checkpointing", "callback within it", "callback half-way"


@dataclass
class Phase:
    """A part of a step: medians in seconds."""

    host: float
    """In which the CPU queued it."""
    device: float
    """In which the GPU ran it."""
    lead: float
    """By which the CPU was ahead of the GPU at its end."""


@dataclass
class Row:
    """One way."""

    way: str
    step_seconds: float = 0.0
    step_min: float = 0.0
    step_max: float = 0.0
    all_seconds: list[float] = field(default_factory=list)
    """Seconds of each step but the first, with those of the search."""
    peak_bytes: int = 0
    budget: int | None = None
    predicted_peak: int | None = None
    predicted_seconds: float | None = None
    stage: str | None = None
    plan: str | None = None
    notes: list[str] = field(default_factory=list)
    """Notes on the search for it."""
    profile: dict[str, Any] | None = None
    """The profile of the plan, in short."""
    losses: list[str] = field(default_factory=list)
    identical: bool | None = None
    """Whether a smaller run has the plain one's losses."""
    lead: float | None = None
    """Seconds by which the CPU was ahead of the GPU when forward began, the median of the measured steps."""
    phases: dict[str, Phase] = field(default_factory=dict)
    """Medians of the measured steps."""


def measure(way: str, budget: int | None, options: argparse.Namespace, pipe: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

    from spillway.integrations.transformers import SpillwayCallback

    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)

    class Clock(TrainerCallback):
        """Ends of steps, and the peak of the measured ones."""

        def __init__(self) -> None:
            self._ends: list[Any] = []
            self.peak = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if device.type == "cpu":
                self._ends.append(time.perf_counter())
                return
            if waits:
                torch.accelerator.synchronize()
            if state.global_step > options.steps - options.timed:
                self.peak = max(self.peak, allocated(device)[1])
            torch.accelerator.reset_peak_memory_stats()
            event = torch.Event(device, enable_timing=True)
            event.record()
            self._ends.append(event)
            if marks is not None:
                marks.end()

        def seconds(self) -> list[float]:
            """Seconds of each step but the first."""
            if device.type == "cpu":
                return [end - begin for begin, end in pairwise(self._ends)]
            torch.accelerator.synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self._ends)]

    class Marks:
        """Times of CPU and GPU at the ends of a step's phases."""

        def __init__(self, model: LlamaForCausalLM) -> None:
            self._steps: list[dict[str, tuple[float, Any]]] = [{}]
            torch.accelerator.synchronize()
            self._begin = self._now()
            model.register_forward_pre_hook(lambda *_: self.mark("begin"))
            model.model.embed_tokens.register_forward_hook(self._when_embedded)
            model.model.norm.register_forward_pre_hook(lambda _, inputs: self._when_ended(inputs[0]))

        def _when_embedded(self, _: Any, __: Any, hidden: torch.Tensor) -> None:
            hidden.register_hook(lambda _: self.mark("backward"))

        def _when_ended(self, hidden: torch.Tensor) -> None:
            self.mark("forward")
            hidden.register_hook(lambda _: self.mark("head and loss"))

        def _now(self) -> tuple[float, Any]:
            event = torch.Event(device, enable_timing=True)
            event.record()
            return time.perf_counter(), event

        def mark(self, name: str) -> None:
            self._steps[-1][name] = self._now()

        def end(self) -> None:
            self.mark("rest")
            self._steps.append({})

        def phases(self, count: int) -> tuple[float, dict[str, Phase]]:
            """The CPU's lead at the begin of the last steps, and their phases."""
            torch.accelerator.synchronize()
            start, since = self._begin
            leads: list[float] = []
            found: dict[str, list[Phase]] = {}
            for step in self._steps[-count - 1 : -1]:
                reached = {
                    name: (host - start, since.elapsed_time(event) / 1e3) for name, (host, event) in step.items()
                }
                host, there = reached["begin"]
                leads.append(there - host)
                for (_, (host, there)), (name, (host_end, end)) in pairwise(reached.items()):
                    found.setdefault(name, []).append(Phase(host_end - host, end - there, end - host_end))
            medians = {name: zip(*map(astuple, each), strict=True) for name, each in found.items()}
            phases = {name: Phase(*map(statistics.median, columns)) for name, columns in medians.items()}
            return statistics.median(leads), phases

    class Tracing(TrainerCallback):
        """A trace of all that comes after some steps."""

        def __init__(self, after: int) -> None:
            self._after = after
            # The CPU's work shows in its launches: tracing its operators, too, makes it twice as slow.
            device_only = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else None
            self.profile = torch.profiler.profile(activities=device_only)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self._after:
                self.profile.start()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.profile.stop()

    set_seed(0)
    torch.use_deterministic_algorithms(options.deterministic)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=max(options.hidden // 64, 1),
        num_key_value_heads=max(options.hidden // 256, 1),
        max_position_embeddings=options.tokens,
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(options.vocabulary, (8, options.tokens))]
    waits = options.waiting or options.deterministic
    marks = Marks(model) if device.type != "cpu" and not options.deterministic else None
    clock = Clock()
    traces = options.trace is not None and way == WITHIN and not options.deterministic
    tracing = Tracing(options.steps) if traces else None
    ours = SpillwayCallback(budget=budget) if budget is not None else None
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=options.steps + (2 if traces else 0),
                per_device_train_batch_size=1,
                gradient_checkpointing=way == CHECKPOINT,
                logging_steps=1 if waits else 500,
                logging_nan_inf_filter=not options.ahead,
                accelerator_config={"non_blocking": options.ahead},
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=device.type == "cpu",
            ),
            train_dataset=rows,
            callbacks=[clock, *([ours] if ours is not None else [])],
        )
        attached = None
        if ours is not None:

            class Keep(TrainerCallback):
                """Keeps the result of attaching, before it is removed."""

                def on_step_end(self, *_: Any, **__: Any) -> None:
                    nonlocal attached
                    attached = ours.attached

            trainer.add_callback(Keep())
        if tracing is not None:
            trainer.add_callback(tracing)
        trainer.train()
        if tracing is not None:
            tracing.profile.export_chrome_trace(str(options.trace))
    every = clock.seconds()[: options.steps - 1]
    times = every[-options.timed :]
    row = Row(way, statistics.median(times), min(times), max(times), every, clock.peak, budget)
    if marks is not None:
        row.lead, row.phases = marks.phases(options.timed)
    row.losses = [float(each["loss"]).hex() for each in trainer.state.log_history if "loss" in each]
    if attached is not None and attached.plan is not None:
        row.predicted_peak = attached.plan.predicted_peak
        row.predicted_seconds = attached.plan.predicted_seconds
        row.stage = attached.stage
        row.plan, row.notes = str(attached.plan), list(attached.notes)
        profile = attached.profile
        if profile is not None:
            outside = {name: asdict(getattr(profile, name)) for name in ("before", "middle", "after")}
            kinds = [
                {
                    "forward_seconds": kind.forward_seconds,
                    "operator_seconds": sum(each.seconds for each in kind.operators),
                    "backward_seconds": kind.backward_seconds,
                    "host": None if kind.host is None else asdict(kind.host),
                }
                for kind in profile.kinds
            ]
            row.profile = {**outside, "kinds": kinds}
    pipe.send(row)


def in_a_process(way: str, budget: int | None, options: argparse.Namespace) -> Row:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(way, budget, options, theirs))
    process.start()
    theirs.close()
    try:
        row: Row = ours.recv()
    except EOFError:
        raise SystemExit(f"{way}: its process ended without an answer") from None
    process.join()
    return row


def sweep(options: argparse.Namespace, identical: dict[str, bool] | None = None) -> list[Row]:
    """All ways; printed as they come if it is known whether they are identical."""
    rows: list[Row] = []
    budgets: dict[str, int | None] = {KEEP: None, CHECKPOINT: None}
    for way in (KEEP, CHECKPOINT, WITHIN, BETWEEN):
        row = in_a_process(way, budgets[way], options)
        rows.append(row)
        if way == CHECKPOINT:
            # The smaller run's peak is that of the head, so it gets a little more.
            small = (row.peak_bytes if identical is not None else row.peak_bytes * 5 // 4) or 16 << 30
            budgets |= {WITHIN: small, BETWEEN: (small + rows[0].peak_bytes) // 2 or small}
        if identical is None:
            continue
        row.identical = identical[way]
        print(
            f"{row.way:24} {row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to {row.step_max * 1e3:.1f})  "
            f"x{row.step_seconds / rows[0].step_seconds:5.3f}  {format_bytes(row.peak_bytes):>9}  {row.stage or '':8} "
            f"{'identical' if row.identical else 'OTHER LOSSES'}",
            flush=True,
        )
        if row.lead is not None:
            print(f"  when forward begins, the CPU is ahead by {row.lead * 1e3:.1f} ms", flush=True)
        for name, phase in row.phases.items():
            print(
                f"  {name:13} GPU {phase.device * 1e3:6.1f} ms, CPU {phase.host * 1e3:6.1f}, "
                f"at its end ahead by {phase.lead * 1e3:.1f}",
                flush=True,
            )
        if row.predicted_seconds is not None:
            print(f"  predicted {row.predicted_seconds * 1e3:.1f} ms; {row.plan}", flush=True)
    return rows


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else accelerator.type
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=here)
    parser.add_argument("--layers", type=int, default=16 if here != "cpu" else 2)
    parser.add_argument("--hidden", type=int, default=2048 if here != "cpu" else 64)
    parser.add_argument("--tokens", type=int, default=8192 if here != "cpu" else 128)
    parser.add_argument("--vocabulary", type=int, default=32000 if here != "cpu" else 97)
    parser.add_argument("--steps", type=int, default=24 if here != "cpu" else 10)
    parser.add_argument("--timed", type=int, default=9 if here != "cpu" else 3, help="of these, the last")
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument("--waiting", action="store_true", help="log and wait for the device at the end of each step")
    waiting.add_argument("--ahead", action="store_true", help="nothing between steps waits for the device")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of two more steps within checkpointing's peak")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.deterministic = True
    # Deterministic products of matrices need it, and it is read when a process begins.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    smaller = sweep(argparse.Namespace(**{**vars(options), "layers": 2, "steps": min(options.steps, 14), "timed": 3}))
    identical = {row.way: row.losses == smaller[0].losses for row in smaller}
    options.deterministic = False
    rows = sweep(options, identical)
    if options.json:
        header = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "spillway": spillway.__version__,
            },
            "hardware": {
                "device": "cpu" if options.device == "cpu" else torch.cuda.get_device_name(0),
                "cores": os.cpu_count(),
            },
            "options": {name: str(value) for name, value in vars(options).items()},
        }
        options.json.write_text(json.dumps({**header, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
