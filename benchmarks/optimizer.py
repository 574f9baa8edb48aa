"""Training steps with the optimizer's state on the GPU and on the CPU, each way in a process of its own.

    python benchmarks/optimizer.py --json optimizer.json      # 973 M parameters, 8192 tokens
    python benchmarks/optimizer.py --micro 8
    python benchmarks/optimizer.py --micro 2 --ways "on the GPU, clipped" "GPU in chunks, fp32 master weights, clipped"
    python benchmarks/optimizer.py --micro 8 --seq 2048 --ways "fp32 master weights, all on the GPU" \
        "GPU in chunks, fp32 master weights, accumulated, in backward, overlapping"
    python benchmarks/optimizer.py --cpu-share 0.4 \
        --ways "split over CPU and GPU, fp32 master weights, clipped, overlapping"
    python benchmarks/optimizer.py --shape 8b --layers 32 --ways "fp32 master weights, clipped, overlapping"

A step is ``--micro`` forwards and backwards over a stack of decoder layers in bfloat16, each layer checkpointed, and
the optimizer's step. Several steps are timed together, since the end of one may overlap the begin of the next. A row
has the median of such runs for one step, and their range. *peak* is all memory that is allocated on the GPU.

*bound* is an estimate for the same work: the time without an optimizer, plus the time of the CPU's step that nothing
hides. The CPU's step moves 32 bytes a parameter with fp32 master weights, and 14 without, at the bandwidth of STREAM's
Add, measured in the same run. A step can exceed this bandwidth. The next forward hides it where it is overlapped, and
the backward where nothing is clipped.

*GPU in chunks* streams state through the GPU, where it is stepped. The bytes in a row are those of the last step in
each direction, gradients included. Its *bound* takes these bytes at the rate of copies in both directions at once,
measured in the same run, in place of the CPU's step. *Split over CPU and GPU* steps parameters in both places at once,
divided by ``--cpu-share``, or by the times of the first steps. Its *bound* takes the longer of the two. *Accumulated*
is ``spillway.Accumulator``: with *in backward*, parameters step during the backward of the last micro-batch.

Other systems are measured if they can be imported, and named as absent if not. FSDP2 runs in one process, with
parameters in float32 on the CPU, gathered in bfloat16, and stepped on the CPU by the fused kernel. *Weights streamed*
have all weights of layers in CPU memory, too: they are copied to the GPU for forward, and again for backward. Their
*bound* counts these copies.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import spillway
from _llama import Layer, Stack, make_stack
from _table import describe_hardware, describe_versions

GIB = 2**30
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 1.0

Update = Callable[[], Any]
"""The part of a step after its last backward."""


def run_micro_batch(forward: Callable[[], torch.Tensor]) -> None:
    """A micro-batch as anybody writes it."""
    forward().backward()


@dataclass
class Loop:
    """The parts of a training step."""

    update: Update
    micro_batch: Callable[[Callable[[], torch.Tensor]], None] = run_micro_batch


@dataclass
class Row:
    """One way."""

    way: str
    absent: str = ""
    step_seconds: float = 0.0
    step_min: float = 0.0
    step_max: float = 0.0
    first_seconds: float = 0.0
    forward_seconds: float = 0.0
    """Seconds of one micro-batch's forward, without an optimizer."""
    peak_bytes: int = 0
    parameters: int = 0
    bound_seconds: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)


def nothing(stack: Stack, options: argparse.Namespace) -> Update:
    def update() -> None:
        stack.zero_grad()

    return update


def none_kept(stack: Stack, options: argparse.Namespace) -> Update:
    """Only parameters and activations are in memory."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in stack.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return lambda: None


def on_device(stack: Stack, options: argparse.Namespace, *, clipped: bool = False) -> Update:
    return updates(stack, torch.optim.AdamW(stack.parameters(), fused=True, **ADAMW), clipped=clipped)


def torchao(stack: Stack, options: argparse.Namespace, *, gradients: bool) -> Update:
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer(
        stack.parameters(), torch.optim.AdamW, offload_gradients=gradients, fused=True, **ADAMW
    )
    return updates(stack, optimizer)


def offloaded(
    stack: Stack, options: argparse.Namespace, *, clipped: bool = False, overlap: bool = False, **given: Any
) -> Update:
    optimizer = spillway.OffloadedOptimizer(
        stack.parameters(), torch.optim.AdamW, threads=options.threads, fused=True, **given, **ADAMW
    )
    if overlap:
        optimizer.overlap_forward(stack)
    return updates(stack, optimizer, clipped=clipped)


def streamed(
    stack: Stack, options: argparse.Namespace, *, clipped: bool = False, overlap: bool = True, **given: Any
) -> Update:
    optimizer = spillway.OffloadedOptimizer(
        stack.parameters(), torch.optim.AdamW, threads=options.threads, fused=True, **given, **ADAMW
    )
    stack.call = lambda layer, *args: layer(*args)
    least = 1 if options.device == "cpu" else None
    spillway.attach(
        stack,
        policy=spillway.Recompute(),
        blocks=Layer,
        stream=Layer,
        device=options.device,
        optimizer=optimizer,
        min_bytes=least,
    )
    if overlap:
        optimizer.overlap_forward(stack, blocks=Layer)
    return updates(stack, optimizer, clipped=clipped)


def split(stack: Stack, options: argparse.Namespace, **given: Any) -> Update:
    return offloaded(stack, options, step_on="auto", cpu_share=options.cpu_share, overlap=True, **given)


def streamed_split(stack: Stack, options: argparse.Namespace, **given: Any) -> Update:
    return streamed(stack, options, step_on="auto", cpu_share=options.cpu_share, **given)


def accumulated(stack: Stack, options: argparse.Namespace, **given: Any) -> Loop:
    optimizer = spillway.OffloadedOptimizer(
        stack.parameters(), torch.optim.AdamW, threads=options.threads, fused=True, **given, **ADAMW
    )
    optimizer.overlap_forward(stack)
    accumulator = spillway.Accumulator(stack, optimizer, steps=options.micro, normalize="sum")

    def micro_batch(forward: Callable[[], torch.Tensor]) -> None:
        with accumulator.micro():
            accumulator.backward(forward())

    def update() -> Any:
        accumulator.step()
        return optimizer

    return Loop(update, micro_batch)


def split_accumulated(stack: Stack, options: argparse.Namespace) -> Loop:
    return accumulated(stack, options, step_on="auto", cpu_share=options.cpu_share, step_in_backward=True)


def fsdp2(stack: Stack, options: argparse.Namespace, *, clipped: bool = False) -> Update:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if options.device == "cpu":
        raise ImportError("it offloads from a GPU only")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1, store=store)
    for parameter in stack.parameters():
        parameter.data = parameter.data.float()
    sharding: dict[str, Any] = {
        "offload_policy": CPUOffloadPolicy(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for layer in stack.layers:
        fully_shard(layer, **sharding)
    fully_shard(stack, **sharding)
    return updates(stack, torch.optim.AdamW(stack.parameters(), fused=True, **ADAMW), clipped=clipped)


def updates(stack: Stack, optimizer: Any, *, clipped: bool = False) -> Update:
    def update() -> Any:
        if clipped:
            torch.nn.utils.clip_grad_norm_(stack.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return update


NOTHING = "no optimizer"
WAYS: dict[str, Callable[[Stack, argparse.Namespace], Update | Loop]] = {
    NOTHING: nothing,
    "no gradients kept": none_kept,
    "on the GPU": on_device,
    "on the GPU, clipped": partial(on_device, clipped=True),
    "torchao": partial(torchao, gradients=False),
    "torchao, gradients offloaded": partial(torchao, gradients=True),
    "no fp32 master weights": partial(offloaded, master_dtype=None),
    "no fp32 master weights, overlapping": partial(offloaded, master_dtype=None, overlap=True),
    "no fp32 master weights, in backward, overlapping": partial(
        offloaded, master_dtype=None, step_in_backward=True, overlap=True
    ),
    "fp32 master weights": offloaded,
    "fp32 master weights, in backward, overlapping": partial(offloaded, step_in_backward=True, overlap=True),
    "GPU in chunks, no fp32 master weights": partial(offloaded, master_dtype=None, step_on="gpu"),
    "GPU in chunks, no fp32 master weights, in backward, overlapping": partial(
        offloaded, master_dtype=None, step_on="gpu", step_in_backward=True, overlap=True
    ),
    "GPU in chunks, fp32 master weights": partial(offloaded, step_on="gpu"),
    "GPU in chunks, fp32 master weights, in backward, overlapping": partial(
        offloaded, step_on="gpu", step_in_backward=True, overlap=True
    ),
    "GPU in chunks, fp32 master weights, clipped": partial(offloaded, clipped=True, step_on="gpu"),
    "GPU in chunks, fp32 master weights, clipped, overlapping": partial(
        offloaded, clipped=True, step_on="gpu", overlap=True
    ),
    "GPU in chunks, fp32 master weights, clipped, overlapping, gradients stay": partial(
        offloaded, clipped=True, step_on="gpu", overlap=True, offload_gradients=False
    ),
    "split over CPU and GPU, fp32 master weights, clipped, overlapping": partial(split, clipped=True),
    "split over CPU and GPU, fp32 master weights, in backward, overlapping": partial(split, step_in_backward=True),
    "GPU in chunks, fp32 master weights, accumulated, in backward, overlapping": partial(
        accumulated, step_on="gpu", step_in_backward=True
    ),
    "split over CPU and GPU, fp32 master weights, accumulated, in backward, overlapping": split_accumulated,
    "FSDP2's CPUOffloadPolicy": fsdp2,
    "FSDP2's CPUOffloadPolicy, clipped": partial(fsdp2, clipped=True),
    "weights streamed, GPU in chunks, fp32 master weights, in backward, overlapping": partial(
        streamed, step_on="gpu", step_in_backward=True
    ),
    "weights streamed, GPU in chunks, fp32 master weights, clipped, overlapping": partial(
        streamed, step_on="gpu", clipped=True
    ),
    "weights streamed, split over CPU and GPU, fp32 master weights, in backward, overlapping": partial(
        streamed_split, step_in_backward=True
    ),
    "weights streamed, split over CPU and GPU, fp32 master weights, clipped, overlapping": partial(
        streamed_split, clipped=True
    ),
    "weights streamed, GPU in chunks, fp32 master weights": partial(streamed, step_on="gpu", overlap=False),
    "weights streamed, fp32 master weights, in backward, overlapping": partial(streamed, step_in_backward=True),
    "fp32 master weights, all on the GPU": partial(offloaded, fraction=0.0),
    "fp32 master weights, clipped": partial(offloaded, clipped=True),
    "fp32 master weights, clipped, overlapping": partial(offloaded, clipped=True, overlap=True),
    "fp32 master weights, clipped, all on the GPU": partial(offloaded, clipped=True, fraction=0.0),
    "fp32 master weights, clipped, overlapping, half": partial(offloaded, clipped=True, overlap=True, fraction=0.5),
    "fp32 master weights, clipped, overlapping, auto": partial(offloaded, clipped=True, overlap=True, fraction="auto"),
}


def measure(options: argparse.Namespace) -> Row:
    device = torch.device(options.device)
    stack = make_stack(options.shape, options.layers, options.seq, device, torch.bfloat16)
    stack.call = lambda layer, *args: checkpoint(layer, *args, use_reentrant=False)
    parameters = sum(parameter.numel() for parameter in stack.parameters())
    hidden = stack.layers[0].shape.hidden
    batch = torch.randn(options.batch, options.seq, hidden, device=device, dtype=torch.bfloat16)
    spillway.Session(window=options.window).use_as_default()
    try:
        made = WAYS[options.child](stack, options)
    except ImportError as error:
        return Row(options.child, absent=str(error))
    loop = made if isinstance(made, Loop) else Loop(made)
    last: list[Any] = []

    def step() -> None:
        for _ in range(options.micro):
            loop.micro_batch(lambda: stack(batch).float().square().mean())
        last[:] = [loop.update()]

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(device)
        return (time.perf_counter() - begin) / steps

    def forward() -> float:
        synchronize(device)
        begin = time.perf_counter()
        stack(batch).float().square().mean()
        synchronize(device)
        return time.perf_counter() - begin

    first = run(1)
    run(2)
    if options.child.endswith("auto") or "split" in options.child:
        settle(last, run)
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    times = [run(options.together) for _ in range(options.runs)]
    peak = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    return Row(
        options.child,
        step_seconds=statistics.median(times),
        step_min=min(times),
        step_max=max(times),
        first_seconds=first,
        forward_seconds=statistics.median(forward() for _ in range(5)) if options.child == NOTHING else 0.0,
        peak_bytes=peak,
        parameters=parameters,
        stats=asdict(last[0].stats()) if isinstance(last[0], spillway.OffloadedOptimizer) else {},
    )


def settle(last: list[Any], run: Callable[[int], float]) -> None:
    """Step until the fraction, and the CPU's share of it, are chosen."""
    for _ in range(8):
        before = last[0].fraction, last[0].cpu_share
        run(20)
        if (last[0].fraction, last[0].cpu_share) == before:
            return


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def host_rates(options: argparse.Namespace) -> dict[str, float]:
    """GB/s of CPU memory (additions, as STREAM counts them), and of a step of float32 parameters."""
    from spillway.runtime.arena import anonymous_pages

    numel = options.host_elements
    if options.threads:
        torch.set_num_threads(options.threads)
    one, two, three = (anonymous_pages(4 * numel, huge=True).view(torch.float32).fill_(1) for _ in range(3))

    def rate(nbytes: int, work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return nbytes / statistics.median(times) / 1e9

    found = {
        "stream": rate(12 * numel, partial(torch.add, one, two, out=three)),
        "stream_in_place": rate(12 * numel, partial(one.add_, two)),
    }
    if options.device != "cpu":
        found["link"] = link_rate(options)
    # On a CPU its ways there and back are copies that cost the host's memory the same again.
    parameter = torch.nn.Parameter(torch.zeros(numel, device=options.device))
    optimizer = spillway.OffloadedOptimizer([parameter], torch.optim.AdamW, threads=options.threads, **ADAMW)
    parameter.grad = torch.ones(numel, device=options.device)

    def step() -> None:
        optimizer.step()
        synchronize(torch.device(options.device))

    found["step"] = rate(28 * numel, step)
    return found


def link_rate(options: argparse.Namespace) -> float:
    """GB/s in each direction, of copies of 64 MiB in both directions at once."""
    nbytes, pieces = 1 << 26, 16
    pinned = [torch.empty(pieces, nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device=options.device) for _ in range(2)]
    streams = [torch.Stream(device=torch.device(options.device)) for _ in range(2)]

    def copy() -> float:
        synchronize(torch.device(options.device))
        begin = time.perf_counter()
        for piece in range(pieces):
            with streams[0]:
                device[0].copy_(pinned[0][piece], non_blocking=True)
            with streams[1]:
                pinned[1][piece].copy_(device[1], non_blocking=True)
        synchronize(torch.device(options.device))
        return time.perf_counter() - begin

    copy()
    return nbytes * pieces / statistics.median(copy() for _ in range(7)) / 1e9


def bound(row: Row, plain: Row, rates: dict[str, float], options: argparse.Namespace) -> float:
    """Seconds of a step whose state crosses the link, or is stepped on the CPU, at these rates."""
    elsewhere = any(word in row.way for word in ("auto", "all on the GPU"))
    if "master weights" not in row.way or elsewhere or not plain.step_seconds or not rates["stream"]:
        return 0.0
    with_masters = "no fp32 master weights" not in row.way
    share = 0.5 if "half" in row.way else 1.0
    on_link = any(word in row.way for word in ("GPU in chunks", "split"))
    if on_link:
        if not row.stats or "link" not in rates:
            return 0.0
        share = row.stats["stepped_on_host"] / row.parameters
    host = (32 if with_masters else 14) * row.parameters * share / (rates["stream"] * 1e9)
    if on_link:
        # Weights in bfloat16 are copied for forward, and for backward.
        weights = 4 * row.parameters if "weights streamed" in row.way else 0
        most = max(row.stats["received_bytes"] + weights, row.stats["sent_bytes"])
        host = max(host, most / (rates["link"] * 1e9))
    backward = plain.step_seconds / options.micro - plain.forward_seconds
    hidden = plain.forward_seconds if "overlapping" in row.way else 0.0
    if "in backward" in row.way or ("clipped" not in row.way and "GPU in chunks" not in row.way):
        hidden += backward
    return plain.step_seconds + max(0.0, host - hidden)


def run_child(way: str, options: argparse.Namespace) -> Row:
    names = ("shape", "layers", "seq", "batch", "micro", "runs", "together", "device", "threads", "cpu_share", "window")
    given = [
        f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names if getattr(options, name) is not None
    ]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([sys.executable, __file__, *given, f"--child={way}", f"--json={file.name}"], check=True)
        return Row(**json.loads(Path(file.name).read_text()))


def line(row: Row, plain: Row, device: Row | None) -> str:
    if row.absent:
        return f"{row.way:<64} absent: {row.absent}"
    cells = [
        f"{row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to {row.step_max * 1e3:.1f})",
        f"x{row.step_seconds / device.step_seconds:5.2f}" if device else "",
        f"bound {row.bound_seconds * 1e3:.1f} ms x{row.step_seconds / row.bound_seconds:.3f}"
        if row.bound_seconds
        else "",
        f"first {row.first_seconds:.1f} s",
        f"peak {row.peak_bytes / GIB:.2f} GiB",
    ]
    if row.stats:
        cells.append(f"CPU {row.stats['host_seconds'] * 1e3:.0f} ms, stall {row.stats['stall_seconds'] * 1e3:.0f} ms")
        cells.append(f"on the CPU {row.stats['stepped_on_host'] / row.parameters:.0%}")
        to, since = (row.stats[name] / row.parameters for name in ("received_bytes", "sent_bytes"))
        cells.append(f"{to:.1f} bytes a parameter to the GPU, {since:.1f} from there")
        cells.append(f"pinned {row.stats['host_bytes'] / GIB:.2f} GiB")
    return f"{row.way:<64}" + "  ".join(cells)


def parser() -> argparse.ArgumentParser:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    small = accelerator is None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny" if small else "1b", help="tiny, 1b, 8b or 70b")
    parser.add_argument("--layers", type=int, default=4 if small else 16)
    parser.add_argument("--seq", type=int, default=64 if small else 8192)
    parser.add_argument("--batch", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--micro", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--window", default="512MiB", help="the session's limit of copies that are under way")
    parser.add_argument("--together", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--runs", type=int, default=5, help="such runs, to take the median of")
    parser.add_argument("--threads", type=int, help="of the host's step")
    parser.add_argument("--cpu-share", type=float, help="of the ways that are split; default: measured")
    parser.add_argument(
        "--host-elements", type=int, default=1 << 20 if small else 1 << 28, help="for the CPU's bandwidths; 0 for none"
    )
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), metavar="WAY")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.child == "host":
        options.json.write_text(json.dumps(host_rates(options)))
        return
    if options.child:
        options.json.write_text(json.dumps(asdict(measure(options))))
        return
    rates = host(options) if options.host_elements else {"stream": 0.0, "stream_in_place": 0.0, "step": 0.0}
    if "link" in rates:
        print(f"copies in both directions at once {rates['link']:.1f} GB/s each", flush=True)
    print(
        f"CPU memory {rates['stream']:.1f} GB/s, in place {rates['stream_in_place']:.1f}; "
        f"step of float32, transfers and all, {rates['step']:.1f} GB/s of 28 bytes a parameter",
        flush=True,
    )
    rows: list[Row] = []
    for way in dict.fromkeys((NOTHING, *options.ways)):
        row = run_child(way, options)
        rows.append(row)
        row.bound_seconds = bound(row, rows[0], rates, options)
        device = next((one for one in rows if one.way == "on the GPU"), None)
        print(line(row, rows[0], device), flush=True)
        if options.json:
            write(options, rates, rows)


def host(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--child=host", f"--json={file.name}"]
        command += [f"--host-elements={options.host_elements}"]
        command += [f"--device={options.device}"]
        command += [f"--threads={options.threads}"] if options.threads else []
        subprocess.run(command, env=dict(os.environ), check=True)
        rates: dict[str, float] = json.loads(Path(file.name).read_text())
        return rates


def write(options: argparse.Namespace, rates: dict[str, float], rows: list[Row]) -> None:
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": describe_versions(),
        "hardware": describe_hardware(torch.device(options.device)),
        "options": {name: value for name, value in vars(options).items() if name not in ("json", "child", "ways")},
        "host_gigabytes_a_second": rates,
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
