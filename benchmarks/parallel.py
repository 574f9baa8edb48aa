"""Training steps on several GPUs: a pipeline, FSDP2, and the PCIe bandwidth of each GPU while others copy.

Each rank has one accelerator, or a CPU. A step is as in ``step.py``: forward and backward; gradients accumulate. Each
way is measured after a warm-up and ``gc.freeze()``:

* the median step of the slowest rank, and its range;
* the time in which the CPU of rank 0 queues a step;
* the activation peak of each rank, above weights and gradients;
* offloaded bytes and stalls;
* whether the gradients of each rank are bit for bit those of ``keep`` (a smaller run with deterministic algorithms).

If a way fails, its error is printed, and the others are measured.

    python benchmarks/parallel.py --ranks 4 --parts link pipeline fsdp --json parallel.json
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
from _llama import Layer, Stack, make_stack
from spillway.integrations.pipelining import OffloadedStages, offload_stages
from spillway.policies import Keep
from step import NORM_STATISTIC, allocated


@dataclass
class Training:
    """A way to train."""

    stack: Stack
    step: Callable[[], None]
    stats: Callable[[], spillway.StepStats]
    attached: spillway.Attached | OffloadedStages | None = None
    """For a way with a plan: it is warm when the plan is active."""


@dataclass
class Row:
    """One way."""

    part: str
    way: str
    step_seconds: float
    step_min: float
    step_max: float
    host_seconds: float
    """Seconds until the CPU of rank 0 had queued a step."""
    peak_bytes: int
    """Peak of rank 0, above weights, gradients and inputs."""
    peaks: list[int]
    """The same of each rank."""
    whole_bytes: int
    """Allocated bytes at the peak of the fullest rank."""
    digest: str = ""
    stats: list[dict[str, Any]] = field(default_factory=list)
    """Spillway's own, of each rank."""


def checkpointed(stack: Stack) -> None:
    stack.call = lambda layer, *args: checkpoint(layer, *args, use_reentrant=False)


ATTENTION, INPUTS, PROJECTIONS = spillway.saved_by("attention"), "inputs", ("*gate", "*up")
HALVES: dict[str, tuple[Any, ...]] = {"attend": (INPUTS, ATTENTION), "feed": (INPUTS, *PROJECTIONS)}
"""The halves of a layer, with the tensors of each that are expensive to recompute, and its inputs."""


def checkpoint_halves(layer: Layer, *, kept: Sequence[Any] = (), sent: Sequence[Any] = ()) -> None:
    """Checkpoint the two halves of a layer: see ``step.py``. FSDP2's hooks run around the layer as before."""
    for half, has in HALVES.items():
        save, offload = ([each for each in given if each in has] for given in (kept, sent))
        how = spillway.Recompute(save=(NORM_STATISTIC, *save), offload=offload)
        setattr(layer, half, partial(how, getattr(layer, half)))


def spread(layers: Sequence[Layer], share: float) -> list[Layer]:
    """A share of the layers, evenly spread, rounded up. Backward begins at the last one, so it comes last."""
    count = math.ceil(len(layers) * share)
    return [layers[place * len(layers) // count] for place in range(count)]


# A pipeline: each rank has a stack of its own for a stage, and 1F1B over twice as many micro-batches as ranks.


@dataclass(frozen=True)
class Staged:
    """Treatment of some layers of each stage, evenly spread. The others are plain."""

    shares: tuple[float, float, float, float]
    """Share of the layers in each quarter of the pipeline. The first stage has most chunks alive."""
    kinds: tuple[str, ...] = ("halves",)
    """Their kinds, in turn. ``"halves"`` are checkpointed by halves. ``"wide"`` layers offload tensors as wide as the
    feed-forward network, and recompute nothing."""
    kept: tuple[Any, ...] = ()
    """Tensors that checkpointed halves keep."""
    sent: tuple[Any, ...] = ()
    """Tensors that checkpointed halves offload."""
    window: str | None = None
    """The session's in-flight limit."""


PIPELINE: dict[str, Staged | Callable[[Stack], Any] | None] = {
    "keep": None,
    "checkpoint": checkpointed,
    "halves, nothing offloaded": Staged((1, 6 / 8, 1 / 8, 0), kept=(INPUTS, ATTENTION, *PROJECTIONS)),
    "halves, inputs and attention offloaded": Staged(
        (7 / 8, 4 / 8, 1 / 8, 0), kept=PROJECTIONS, sent=(INPUTS, ATTENTION), window="1GiB"
    ),
    "halves and wide offloaded, in turn": Staged(
        (1, 6 / 8, 1 / 8, 0), ("halves", "wide"), kept=(INPUTS, ATTENTION, *PROJECTIONS), window="1GiB"
    ),
    "wide offloaded, no halves": Staged((1, 6 / 8, 1 / 8, 0), ("wide",), window="2GiB"),
}
PLANNED_STAGES = {
    "planned, half of the baseline's peak of rank 0": "keep",
    "planned, checkpointing's peak of rank 0": "checkpoint",
}
"""Ways with a budget, the same on all ranks, and the way whose peak sets it."""


def pipeline(options: argparse.Namespace, way: str, device: torch.device, *, layers: int, seq: int) -> Training:
    how, rank, ranks = PIPELINE.get(way), dist.get_rank(), dist.get_world_size()
    stack = make_stack(options.shape, layers, seq, device, torch.bfloat16)
    stage = PipelineStage(stack, rank, ranks, device)
    offloaded = None
    if way in PLANNED_STAGES:
        # A smaller stack would fit as a whole: so that it offloads and recomputes, keeping is not allowed.
        small = {"allow": {"host", "disk", "recompute"}} if layers != options.layers else {}
        budget = options.budgets[way]
        if isinstance(budget, int):
            # Weights, their gradients and the batch come on top.
            gradients_there(stack)
            budget += allocated(device, reset=False) + 2 * ranks * seq * stack.layers[0].shape.hidden * 2
        offloaded = offload_stages(stage, budget=budget, blocks="layers.*", **small)
    elif isinstance(how, Staged):
        policy = treated(stack, how, how.shares[4 * rank // ranks])
        offloaded = None if policy is None else offload_stages(stage, policy=policy)
    elif how is not None:
        how(stack)
    count = 2 * ranks
    schedule = Schedule1F1B(stage, count, loss_fn=lambda output, target: output.float().square().mean())
    hidden = stack.layers[0].shape.hidden
    torch.manual_seed(1)
    batch = torch.randn(count, seq, hidden, device=device, dtype=torch.bfloat16)
    gradients_there(stack)

    def step() -> None:
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == ranks - 1 else None)

    stats = spillway.StepStats if offloaded is None else offloaded.stats
    return Training(stack, step, stats, offloaded if way in PLANNED_STAGES else None)


def treated(stack: Stack, how: Staged, share: float) -> spillway.policies.Policy | None:
    """Treat a share of the layers. Returns the policy for tensors outside of checkpointed halves, if any is needed."""
    chosen = dict(zip(spread(list(stack.layers), share), itertools.cycle(how.kinds), strict=False))
    for layer in (layer for layer, kind in chosen.items() if kind == "halves"):
        checkpoint_halves(layer, kept=how.kept, sent=how.sent)
    if "wide" not in chosen.values():
        return Keep() if chosen and how.sent else None

    def call(layer: Layer, *args: Tensor) -> Tensor:
        with contextlib.nullcontext() if layer in chosen else spillway.keep():
            return layer(*args)

    stack.call = call
    ffn = stack.layers[0].shape.ffn
    return lambda saved: spillway.Decision.OFFLOAD if saved.shape[-1] == ffn else spillway.Decision.KEEP


# FSDP2: every layer sharded over all ranks, each with its own data.


@dataclass(frozen=True)
class Sharded:
    """All layers but the last ones are checkpointed by halves, and offload inputs and attention."""

    plain: int
    """How many of the last layers are plain."""
    kept: float
    """Share of the layers whose gate and up are kept: the last of the checkpointed ones."""
    gates: float
    """Share of the other checkpointed layers whose gates are offloaded, evenly spread."""


FSDP: dict[str, Sharded | Callable[[Stack], Any] | None] = {
    "keep": None,
    "checkpoint": checkpointed,
    "halves, last plain, 1/4 of gates offloaded": Sharded(plain=1, kept=1 / 12, gates=1 / 4),
    "halves, last plain, 1/2 of gates offloaded": Sharded(plain=1, kept=1 / 12, gates=1 / 2),
    "halves, last 3 kept, 1/9 of gates offloaded": Sharded(plain=0, kept=3 / 12, gates=1 / 9),
    "halves, last 3 kept, 1/2 of gates offloaded": Sharded(plain=0, kept=3 / 12, gates=1 / 2),
}


def checkpoint_sharded(stack: Stack, how: Sharded) -> None:
    layers = list(stack.layers)
    some = layers[: len(layers) - how.plain]
    first = max(0, len(some) - math.ceil(len(layers) * how.kept))
    with_gates = set(spread(some[:first], how.gates))
    for place, layer in enumerate(some):
        gate = ("*gate",) if layer in with_gates else ()
        checkpoint_halves(layer, kept=PROJECTIONS if place >= first else (), sent=(INPUTS, ATTENTION, *gate))


PLANNED = {"planned, checkpointing's peak": "checkpoint", "planned, half of the baseline's peak": "keep"}
"""Ways with a budget, and the way whose peak sets it."""
MOST_WARMUP = 24


def sharded(options: argparse.Namespace, way: str, device: torch.device, *, layers: int, seq: int) -> Training:
    stack = make_stack(options.shape, layers, seq, device, torch.bfloat16)
    hidden = stack.layers[0].shape.hidden
    for layer in stack.layers:
        fully_shard(layer)
    fully_shard(stack)
    attached, context = None, None
    if way in PLANNED:
        # A smaller stack would fit as a whole: so that it offloads and recomputes, keeping is not allowed.
        small = {"allow": {"host", "disk", "recompute"}} if layers != options.sharded_layers else {}
        attached = spillway.attach(stack, budget=options.budgets[way], blocks="layers.*", **small)
    elif isinstance(how := FSDP[way], Sharded):
        checkpoint_sharded(stack, how)
        context = spillway.offload(policy=Keep())
    elif how is not None:
        how(stack)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(1, seq, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with contextlib.nullcontext() if context is None else context:
            loss = stack(x).float().square().mean()
        loss.backward()

    counts = context if attached is None else attached
    return Training(stack, step, spillway.StepStats if counts is None else counts.stats, attached)


def gradients_there(stack: Stack) -> None:
    for parameter in stack.parameters():
        parameter.grad = torch.zeros_like(parameter)


PARTS: dict[str, tuple[list[str], Callable[..., Training]]] = {
    "pipeline": ([*PIPELINE, *PLANNED_STAGES], pipeline),
    "fsdp": ([*FSDP, *PLANNED], sharded),
}


def measure(options: argparse.Namespace, part: str, way: str, device: torch.device) -> Row:
    session = new_session(options, way)
    layers = options.sharded_layers if part == "fsdp" else options.layers
    training = PARTS[part][1](options, way, device, layers=layers, seq=options.seq)
    warm(training, options.warmup)
    gc.collect()
    gc.freeze()
    base = allocated(device, reset=True)
    times, queued = [], []
    for _ in range(options.steps):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        training.step()
        queued.append(time.perf_counter() - begin)
        synchronize(device)
        times.append(max(of_all(time.perf_counter() - begin)))
    whole = 0 if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))
    stats = of_all(asdict(training.stats()))
    if training.attached is not None and dist.get_rank() == 0:
        print(training.attached.explain().partition("\n")[0], flush=True)
    peaks = of_all(max(whole - base, 0))
    row = Row(
        part=part,
        way=way,
        step_seconds=statistics.median(times),
        step_min=min(times),
        step_max=max(times),
        host_seconds=statistics.median(queued),
        peak_bytes=peaks[0],
        peaks=peaks,
        whole_bytes=max(of_all(whole)),
        stats=stats,
    )
    del training
    forget(session, device)
    row.digest = digest(options, part, way, device)
    return row


def new_session(options: argparse.Namespace, way: str) -> spillway.Session:
    """The in-flight limit is the given one, or else the way's own."""
    session = spillway.Session(window=options.window or getattr(PIPELINE.get(way), "window", None))
    session.use_as_default()
    return session


def forget(session: spillway.Session, device: torch.device) -> None:
    """Free the memory of a way, so that the next one starts as it did."""
    session.close()
    gc.unfreeze()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def warm(training: Training, least: int) -> None:
    done = 0
    # A pipeline's ranks have active plans at different steps, and go on together.
    while done < least or any(of_all(training.attached is not None and training.attached.stage != "active")):
        training.step()
        done += 1
        if done > MOST_WARMUP:
            raise SystemExit(f"no plan is active after {MOST_WARMUP} steps")


DIGEST_LAYERS, DIGEST_TOKENS = 3, 2048
"""As many layers as it takes to have one of each kind in each way."""


def digest(options: argparse.Namespace, part: str, way: str, device: torch.device) -> str:
    """A hash of each rank's gradients after three steps of a smaller stack, with deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    session = new_session(options, way)
    seq = min(options.seq, DIGEST_TOKENS)
    training = PARTS[part][1](options, way, device, layers=DIGEST_LAYERS, seq=seq)
    warm(training, 1)
    for parameter in training.stack.parameters():
        parameter.grad = None
    for _ in range(3):
        training.step()
    sums = hashlib.blake2b(digest_size=16)
    for parameter in training.stack.parameters():
        gradient: Any = parameter.grad
        local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        sums.update(local.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    found = of_all(sums.hexdigest())
    del training, parameter, gradient, local
    forget(session, device)
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
        rates[active] = of_all((mine[0], mine[1]))[:active]
        active *= 2
    return rates


def of_all(mine: Any) -> list[Any]:
    """That of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def rank_main(
    rank: int,
    options: argparse.Namespace,
    store: Path,
    state: Path,
    result: dict[str, Any],
    ways: list[tuple[str, str]],
) -> None:
    """Measures some ways, after others that are in the result already."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["LOCAL_WORLD_SIZE"] = str(options.ranks)
    device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(device)
        affinity = spillway.bind_to_device(device)
        if rank == 0:
            print(affinity.why_not or f"rank 0 is on {len(affinity.after)} CPUs of node {affinity.node}", flush=True)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(
        f"cpu:gloo,{device.type}:{backend}" if device.type != "cpu" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
    )
    if "link" in options.parts and device.type != "cpu" and "link" not in result:
        result["link"] = links(device)
        if rank == 0:
            for active, rates in result["link"].items():
                told = (f"{out / 1e9:.1f}/{back / 1e9:.1f}" for out, back in rates)
                print(f"{active} active:", *told, "GB/s", flush=True)
            write(options, result, state)
    for part, way in ways:
        options.budgets = budgets(result["rows"], device)
        row = measure(options, part, way, device)
        result["rows"].append(asdict(row))
        if rank == 0:
            print(line(row, next(Row(**each) for each in result["rows"] if each["part"] == part)), flush=True)
            write(options, result, state)
    dist.barrier()
    dist.destroy_process_group()


def budgets(rows: list[dict[str, Any]], device: torch.device) -> dict[str, int | str]:
    """Budgets of the ways with a plan, from the peaks of others."""
    found: dict[str, int | str] = {}
    for planned, other in PLANNED.items():
        for row in (row for row in rows if (row["part"], row["way"]) == ("fsdp", other)):
            size = row["whole_bytes"] if other == "checkpoint" else row["whole_bytes"] - row["peak_bytes"] // 2
            found[planned] = size if device.type != "cpu" else "1TiB"
    for planned, other in PLANNED_STAGES.items():
        for row in (row for row in rows if (row["part"], row["way"]) == ("pipeline", other)):
            # Above weights and gradients.
            size = row["peak_bytes"] if other == "checkpoint" else row["peak_bytes"] // 2
            found[planned] = size if device.type != "cpu" else "1TiB"
    return found


def chosen(options: argparse.Namespace, way: str) -> bool:
    needed = {{**PLANNED, **PLANNED_STAGES}.get(each) for each in options.ways}
    return way == "keep" or not options.ways or way in options.ways or way in needed


def line(row: Row, plain: Row) -> str:
    moved = [each["offloaded_bytes"] / 2**30 for each in row.stats]
    return "  ".join(
        (
            f"{row.part:9} {row.way:38} {row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to "
            f"{row.step_max * 1e3:.1f})  x{row.step_seconds / plain.step_seconds:5.3f}",
            f"CPU {row.host_seconds * 1e3:7.1f} ms",
            f"peak of rank 0 {row.peak_bytes / 2**30:6.2f} GiB ({row.peak_bytes / max(plain.peak_bytes, 1):6.1%})",
            "of each " + " ".join(f"{each / 2**30:.2f}" for each in row.peaks),
            "offloaded " + " ".join(f"{each:.2f}" for each in moved) + " GiB",
            "stalls " + " ".join(f"{each['stall_seconds'] * 1e3:.0f}" for each in row.stats) + " ms",
            "identical" if row.digest == plain.digest else "DIFFERENT",
        )
    )


def write(options: argparse.Namespace, result: dict[str, Any], state: Path) -> None:
    """Write the results so far, for processes that continue after a failure, and for the user."""
    state.write_text(json.dumps(result))
    if options.json is None:
        return
    name = "cpu" if options.device == "cpu" else torch.cuda.get_device_name(0)
    given = {each: value for each, value in vars(options).items() if each not in ("json", "budgets")}
    header = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "spillway": spillway.__version__},
        "hardware": {"device": name, "count": options.ranks, "cores": os.cpu_count()},
        "options": given,
    }
    options.json.write_text(json.dumps({**header, **result}, indent=2) + "\n")


def measure_all(options: argparse.Namespace) -> None:
    """Measure every way in turn. If a rank fails, all end, and new processes measure the remaining ways."""
    ways = [(part, way) for part, (names, _) in PARTS.items() if part in options.parts for way in names]
    ways = [(part, way) for part, way in ways if chosen(options, way)]
    result: dict[str, Any] = {"rows": [], "failed": {}}
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "result.json"
        while True:
            store = Path(folder) / f"store {len(ways)}"
            try:
                mp.spawn(rank_main, args=(options, store, state, result, ways), nprocs=options.ranks)
                return
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                result = json.loads(state.read_text()) if state.exists() else result
                done = {(row["part"], row["way"]) for row in result["rows"]}
                ways = [each for each in ways if each not in done]
                if not ways or ways[0][1] == "keep":
                    # Nothing can be compared.
                    raise
                (part, way), *ways = ways
                print(f"{part:9} {way:38} FAILED\n{error}", flush=True)
                result["failed"][f"{part}: {way}"] = str(error).strip().rpartition("\n")[2]
                write(options, result, state)
                if not ways:
                    return


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else accelerator.type
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2 if here == "cpu" else torch.accelerator.device_count())
    parser.add_argument("--parts", nargs="*", default=["link", "pipeline", "fsdp"], metavar="PART")
    parser.add_argument("--ways", nargs="*", default=[], metavar="WAY", help="besides keep; by default all")
    parser.add_argument("--shape", default="tiny" if here == "cpu" else "8b", help="tiny, 1b, 8b or 70b")
    parser.add_argument("--layers", type=int, default=2 if here == "cpu" else 8, help="of each stage of a pipeline")
    parser.add_argument("--sharded-layers", type=int, default=2 if here == "cpu" else 12, help="of FSDP2's model")
    parser.add_argument("--seq", type=int, default=64 if here == "cpu" else 8192)
    parser.add_argument("--window", default=None, help="in-flight limit, in bytes or as 512MiB; instead of a way's own")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default=here)
    parser.add_argument("--json", type=Path, metavar="FILE")
    measure_all(parser.parse_args())


if __name__ == "__main__":
    main()
