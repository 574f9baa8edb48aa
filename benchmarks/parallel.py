"""Training steps over several devices: a pipeline, FSDP2, and the rate of each device's link while others use theirs.

Each rank has one accelerator, or a CPU. A step is as in ``step.py``: forward, backward, gradients accumulate. For each
way: the median step of the slowest rank and its range, the activation peak of rank 0 above weights and gradients, what
was moved, and whether loss and gradients are bit for bit those of ``keep`` (a smaller run with deterministic
algorithms).

    python benchmarks/parallel.py --ranks 4 --parts link pipeline fsdp --json parallel.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

import spillway
from _llama import Stack, make_stack
from spillway.integrations.pipelining import offload_stages
from step import MIXTURE, NORM_STATISTIC, allocated


@dataclass
class Training:
    """What is trained in one way."""

    stack: Stack
    step: Callable[[], None]
    stats: Callable[[], spillway.StepStats]
    attached: spillway.Attached | None = None
    """Of a way that plans: it is warm when the plan is held."""


@dataclass
class Row:
    """What one way did."""

    part: str
    way: str
    step_seconds: float
    step_min: float
    step_max: float
    peak_bytes: int
    """Of rank 0, above weights, gradients and inputs."""
    whole_bytes: int
    """All that was allocated at the peak of the fullest rank."""
    digest: str = ""
    stats: list[dict[str, Any]] = field(default_factory=list)
    """Spillway's own, of each rank."""


def halves(stack: Stack, **second: Any) -> None:
    """The two halves of each layer are regions: see ``step.py``."""
    first = spillway.Recompute(save=NORM_STATISTIC, offload=("inputs", spillway.saved_by("attention")))
    rest = spillway.Recompute(save=(NORM_STATISTIC, *second.pop("save", ())), **second)
    stack.call = lambda layer, x, cos, sin: rest(layer.feed, first(layer.attend, x, cos, sin))


def checkpointed(stack: Stack) -> None:
    stack.call = lambda layer, *args: checkpoint(layer, *args, use_reentrant=False)


# A pipeline: each rank has a stack of its own for a stage, and 1F1B over twice as many micro-batches as ranks.

PIPELINE: dict[str, dict[str, Any]] = {
    "keep": {},
    "checkpoint": {"change": checkpointed},
    "offload the first bytes": {"stages": {"nbytes": None}},
    "halves, inputs away": {
        "change": partial(halves, offload="inputs"),
        "stages": {"policy": spillway.policies.Keep()},
    },
    "halves, gate and up kept": {
        "change": partial(halves, offload="inputs", save=("*gate", "*up")),
        "stages": {"policy": spillway.policies.Keep()},
    },
}


def pipeline(options: argparse.Namespace, way: str, device: torch.device, *, layers: int, seq: int) -> Training:
    how, rank, ranks = PIPELINE[way], dist.get_rank(), dist.get_world_size()
    stack = make_stack(options.shape, layers, seq, device, torch.bfloat16)
    how.get("change", lambda stack: None)(stack)
    stage = PipelineStage(stack, rank, ranks, device)
    given = dict(how.get("stages", {}))
    if "nbytes" in given:
        given["nbytes"] = (options.first_bytes, 0)
    offloaded = offload_stages(stage, **given) if given else None
    count = 2 * ranks
    schedule = Schedule1F1B(stage, count, loss_fn=lambda output, target: output.float().square().mean())
    hidden = stack.layers[0].shape.hidden
    torch.manual_seed(1)
    batch = torch.randn(count, seq, hidden, device=device, dtype=torch.bfloat16)
    gradients_there(stack)

    def step() -> None:
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == ranks - 1 else None)

    return Training(stack, step, spillway.StepStats if offloaded is None else offloaded.stats)


# FSDP2: every layer sharded over all ranks, each with its own data.

FSDP: dict[str, Callable[[Stack], Any]] = {
    "keep": lambda stack: None,
    "checkpoint": checkpointed,
    "mixture, gates": lambda stack: setattr(stack, "call", spillway.Recompute(offload=(*MIXTURE, "*gate"))),
    "mixture, gate and up kept": lambda stack: setattr(
        stack, "call", spillway.Recompute(save=("*gate", "*up"), offload=MIXTURE)
    ),
}


PLANNED = {"planned, checkpointing's peak": "checkpoint", "planned, half of keep's peak": "keep"}
"""Ways to plan for a budget, and by whose peak it is set."""
MOST_WARMUP = 24


def sharded(options: argparse.Namespace, way: str, device: torch.device, *, layers: int, seq: int) -> Training:
    stack = make_stack(options.shape, layers, seq, device, torch.bfloat16)
    hidden = stack.layers[0].shape.hidden
    for layer in stack.layers:
        fully_shard(layer)
    fully_shard(stack)
    attached = None
    if way in PLANNED:
        # In a smaller stack, of which all would fit, nothing stays that can leave or be computed again.
        small = {"allow": {"host", "disk", "recompute"}} if layers != options.layers else {}
        attached = spillway.attach(stack, budget=options.budgets[way], blocks="layers.*", **small)
    else:
        FSDP[way](stack)
    context = spillway.offload(policy=spillway.policies.Keep())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1, seq, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with context if attached is None else contextlib.nullcontext():
            loss = stack(x).float().square().mean()
        loss.backward()

    return Training(stack, step, context.stats if attached is None else attached.stats, attached)


def gradients_there(stack: Stack) -> None:
    for parameter in stack.parameters():
        parameter.grad = torch.zeros_like(parameter)


PARTS: dict[str, tuple[list[str], Callable[..., Training]]] = {
    "pipeline": (list(PIPELINE), pipeline),
    "fsdp": ([*FSDP, *PLANNED], sharded),
}


def measure(options: argparse.Namespace, part: str, way: str, device: torch.device) -> Row:
    session = spillway.Session(window=options.window)
    session.use_as_default()
    training = PARTS[part][1](options, way, device, layers=options.layers, seq=options.seq)
    warm(training, options.warmup)
    base = allocated(device, reset=True)
    times = []
    for _ in range(options.steps):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        training.step()
        synchronize(device)
        times.append(most(time.perf_counter() - begin))
    whole = 0 if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))
    stats: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(stats, asdict(training.stats()))
    if training.attached is not None and dist.get_rank() == 0:
        print(training.attached.explain().partition("\n")[0], flush=True)
    del training
    session.close()
    row = Row(
        part, way, statistics.median(times), min(times), max(times), max(whole - base, 0), most(whole), stats=stats
    )
    for planned, other in PLANNED.items():
        if way == other:
            room = row.whole_bytes if way == "checkpoint" else row.whole_bytes - row.peak_bytes // 2
            options.budgets[planned] = room if device.type != "cpu" else "1TiB"
    row.digest = digest(options, part, way, device)
    return row


def warm(training: Training, least: int) -> None:
    done = 0
    while done < least or (training.attached is not None and training.attached.stage != "holding"):
        training.step()
        done += 1
        if done > MOST_WARMUP:
            raise SystemExit(f"no plan is held after {MOST_WARMUP} steps")


def digest(options: argparse.Namespace, part: str, way: str, device: torch.device) -> str:
    """Of all ranks' gradients after three steps of a smaller stack, with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    session = spillway.Session(window=options.window)
    session.use_as_default()
    training = PARTS[part][1](options, way, device, layers=2, seq=min(options.seq, 2048))
    warm(training, 3)
    for parameter in training.stack.parameters():
        parameter.grad = None
    for _ in range(3):
        training.step()
    sums = hashlib.blake2b(digest_size=16)
    for parameter in training.stack.parameters():
        gradient: Any = parameter.grad
        local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        sums.update(local.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sums.hexdigest())
    session.close()
    torch.use_deterministic_algorithms(False)
    return " ".join(found)


def links(device: torch.device) -> dict[int, list[tuple[float, float]]]:
    """Bytes a second out and back of each active device, with 1, 2, 4, ... of them active."""
    rates: dict[int, list[tuple[float, float]]] = {}
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    active = 1
    while active <= dist.get_world_size():
        mine = []
        for destination, source in ((host, there), (there, host)):
            dist.barrier()
            synchronize(device)
            begin = time.perf_counter()
            if dist.get_rank() < active:
                for _ in range(16):
                    destination.copy_(source, non_blocking=True)
            synchronize(device)
            mine.append(16 * host.numel() / (time.perf_counter() - begin))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (mine[0], mine[1]))
        rates[active] = found[:active]
        active *= 2
    return rates


def most(mine: Any) -> Any:
    """Of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return max(found)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{backend}" if device.type != "cpu" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
    )
    result: dict[str, Any] = {"rows": []}
    if "link" in options.parts and device.type != "cpu":
        result["link"] = links(device)
        if rank == 0:
            for active, rates in result["link"].items():
                print(
                    f"{active} active:",
                    *(f"{out / 1e9:.1f}/{back / 1e9:.1f}" for out, back in rates),
                    "GB/s",
                    flush=True,
                )
    for part, (ways, _) in PARTS.items():
        options.budgets = {}
        rows = [measure(options, part, way, device) for way in ways if part in options.parts and chosen(options, way)]
        for row in rows if rank == 0 else []:
            print(line(row, rows[0]), flush=True)
            result["rows"].append(asdict(row))
    if rank == 0 and options.json:
        write(options, result)
    dist.barrier()
    dist.destroy_process_group()


def chosen(options: argparse.Namespace, way: str) -> bool:
    needed = {PLANNED.get(each) for each in options.ways}
    return way == "keep" or not options.ways or way in options.ways or way in needed


def line(row: Row, plain: Row) -> str:
    moved = [each["offloaded_bytes"] / 2**30 for each in row.stats]
    return "  ".join(
        (
            f"{row.part:9} {row.way:28} {row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to "
            f"{row.step_max * 1e3:.1f})  x{row.step_seconds / plain.step_seconds:5.3f}",
            f"peak of rank 0 {row.peak_bytes / 2**30:6.2f} GiB ({row.peak_bytes / max(plain.peak_bytes, 1):6.1%})",
            "out " + " ".join(f"{each:.2f}" for each in moved) + " GiB",
            "identical" if row.digest == plain.digest else "DIFFERENT",
        )
    )


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    name = "cpu" if options.device == "cpu" else torch.cuda.get_device_name(0)
    given = {each: value for each, value in vars(options).items() if each not in ("json", "budgets")}
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "spillway": spillway.__version__},
        "hardware": {"device": name, "count": options.ranks, "cores": os.cpu_count()},
        "options": given,
    }
    options.json.write_text(json.dumps({**header, **result}, indent=2) + "\n")


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else accelerator.type
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2 if here == "cpu" else torch.accelerator.device_count())
    parser.add_argument("--parts", nargs="*", default=["link", "pipeline", "fsdp"], metavar="PART")
    parser.add_argument("--ways", nargs="*", default=[], metavar="WAY", help="beside keep; all, if none is named")
    parser.add_argument("--shape", default="tiny" if here == "cpu" else "8b", help="tiny, 1b, 8b or 70b")
    parser.add_argument("--layers", type=int, default=2 if here == "cpu" else 8, help="of each stage, or of all")
    parser.add_argument("--seq", type=int, default=64 if here == "cpu" else 4096)
    parser.add_argument(
        "--first-bytes", default="2GiB", help="that leave of each chunk on the first rank of a pipeline"
    )
    parser.add_argument("--window", default=None, help="of the session, in bytes or as 512MiB")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default=here)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(options, str(Path(folder) / "store")), nprocs=options.ranks)


if __name__ == "__main__":
    main()
