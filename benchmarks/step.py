"""One training step of a Llama stack, each way to save memory in a process of its own.

A step is a forward and a backward over a stack of decoder layers; gradients accumulate. Each method is measured after a
warm-up and ``gc.freeze()``:

* the median step, its range, and the first step;
* the peak of GPU memory above weights and gradients, and the allocator's reserved memory;
* reserved CPU memory, and offloaded bytes;
* whether loss and gradients are bit for bit those of ``keep`` (a second, smaller run with deterministic algorithms).

The *bound* is the least time of a step that moves as many bytes over this PCIe link and computes no faster than
``keep``: max(plain forward, bytes out / rate out) + max(plain backward, bytes back / rate back). The same run measures
all of it.

    python benchmarks/step.py --shape 8b --layers 16 --seq 8192 --json step.json

Other systems are measured if they can be imported, and named as absent if not.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import spillway
from _llama import Stack, make_stack

Way = Callable[[], AbstractContextManager[Any]]

ABSENT = 3
"""Exit code of a child whose method cannot be imported here."""


@dataclass
class Row:
    """One method."""

    method: str
    step_seconds: float
    step_min: float
    step_max: float
    first_seconds: float
    forward_seconds: float
    backward_seconds: float
    host_seconds: float
    """Seconds until the CPU had queued a step."""
    peak_bytes: int
    """Allocated, above weights, gradients and input."""
    reserved_bytes: int
    host_bytes: int
    """CPU memory that the process gained."""
    digest: str = ""
    """A hash of loss and gradients in the deterministic run; empty if nothing was compared."""
    paired: list[float] = field(default_factory=list)
    """Quartiles of the ratio of its step to a plain one right before it, in the same process."""
    stats: dict[str, Any] = field(default_factory=dict)
    """Spillway's own, of the last step."""


# The methods. Each changes the stack, and returns the context of a forward.


def keep(stack: Stack, options: argparse.Namespace) -> Way:
    return nullcontext


def grouped(stack: Stack, options: argparse.Namespace) -> Way:
    """Offload the tensors of each layer together when the layer has run."""
    session = spillway.Session(window=options.window)
    session.use_as_default()

    def call(layer: Any, *args: Tensor) -> Any:
        with spillway.group("layer"):
            return layer(*args)

    stack.call = call
    return Spilled(partial(spillway.offload, session=session, groups=spillway.Groups()))


def by_megatrons_names(stack: Stack, options: argparse.Namespace) -> Way:
    """The same in the names of Megatron's fine-grained offloading. Its first iteration, too, ends with a reset."""
    from spillway.compat.megatron import FineGrainedActivationOffloadingInterface as Interface

    spillway.Session(window=options.window).use_as_default()
    Interface.reset_instance()

    def call(layer: Any, x: Tensor, *tables: Tensor) -> Any:
        with Interface(True, x, "layer") as started:
            result = layer(started, *tables)
        return Interface.group_commit(result, name="layer")

    def way() -> AbstractContextManager[object]:
        Interface.reset()
        Interface.init_chunk_handler(1, 0, 1 << 19)
        return nullcontext()

    stack.call = call
    return way


def checkpointed(stack: Stack, options: argparse.Namespace, *, use_reentrant: bool) -> Way:
    stack.call = lambda layer, *args: checkpoint(layer, *args, use_reentrant=use_reentrant)
    return nullcontext


def saved_on_cpu(stack: Stack, options: argparse.Namespace) -> Way:
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=options.device == "cuda")


def offloaded(stack: Stack, options: argparse.Namespace, **how: Any) -> Way:
    session = spillway.Session(window=options.window)
    session.use_as_default()
    return Spilled(partial(spillway.offload, session=session, **how))


def recomputed(stack: Stack, options: argparse.Namespace, **how: Any) -> Way:
    """Checkpoint each layer, and keep tensors that are saved between layers."""
    session = spillway.Session(window=options.window)
    session.use_as_default()
    stack.call = spillway.Recompute(**how)
    return Spilled(partial(spillway.offload, session=session, policy=spillway.policies.Keep()))


def recomputed_halves(stack: Stack, options: argparse.Namespace, **how: Any) -> Way:
    """Checkpoint the two halves of each layer."""
    way = recomputed(stack, options)
    call = spillway.Recompute(**how)
    stack.call = lambda layer, x, cos, sin: call(layer.feed, call(layer.attend, x, cos, sin))
    return way


def is_residual(call: spillway.OperatorCall) -> bool:
    """The sum of a layer's input and its attention: what the second norm saves."""
    return call.module == "" and call.name == "aten::add.Tensor"


def mixed(stack: Stack, options: argparse.Namespace) -> Way:
    """The mixture, and with it the gate of every second layer: as many bytes as PCIe carries during forward."""
    way = recomputed(stack, options)
    ways = (spillway.Recompute(offload=(*MIXTURE, "*gate")), spillway.Recompute(offload=MIXTURE))
    places = {layer: place for place, layer in enumerate(stack.layers)}
    stack.call = lambda layer, *args: ways[places[layer] % 2](layer, *args)
    return way


def halves(
    stack: Stack,
    options: argparse.Namespace,
    *,
    gates: float = 0.0,
    ups: float = 0.0,
    plain: int = 0,
    kept: tuple[str, ...] = (),
) -> Way:
    """Checkpoint the two halves of each layer apart, so that backward has only one of them on the GPU at a time.

    Args:
        gates: the share of the layers whose gates are offloaded, evenly spread.
        ups: the share of the layers whose other projections are offloaded.
        plain: how many of the last halves are plain, since backward begins with them.
        kept: tensors that the second half keeps.
    """
    way = recomputed(stack, options)
    first = spillway.Recompute(save=NORM_STATISTIC, offload=("inputs", spillway.saved_by("attention")))
    second: dict[Any, spillway.Recompute] = {}
    for place, layer in enumerate(stack.layers):
        leaves = [
            name for name, share in (("*gate", gates), ("*up", ups)) if int((place + 1) * share) > int(place * share)
        ]
        second[layer] = spillway.Recompute(save=(NORM_STATISTIC, *kept), offload=("inputs", *leaves))
    halves = [half for layer in stack.layers for half in ((layer, "attend"), (layer, "feed"))]
    plainly = set(halves[max(0, len(halves) - plain) :])

    def call(layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = layer.attend(x, cos, sin) if (layer, "attend") in plainly else first(layer.attend, x, cos, sin)
        return layer.feed(x) if (layer, "feed") in plainly else second[layer](layer.feed, x)

    stack.call = call
    return way


NORM_STATISTIC = "aten::rsqrt"
"""Four bytes a token, with which the norm's mean need not be recomputed."""

MIXTURE = ("inputs", spillway.saved_by("attention"), is_residual)
"""Tensors that are expensive to recompute for their bytes: the input, roped queries and keys, values, attention."""


class Spilled:
    """Makes contexts, and remembers the last for its statistics."""

    def __init__(self, make: Callable[[], spillway.offload]) -> None:
        self._make = make
        self.last: spillway.offload | None = None

    def __call__(self) -> spillway.offload:
        self.last = self._make()
        return self.last


def trl(stack: Stack, options: argparse.Namespace) -> Way:
    module = peer("trl", "models/activation_offloading.py")
    return lambda: module.OffloadActivations(use_streams=True)


def torchtune(stack: Stack, options: argparse.Namespace) -> Way:
    module = peer("torchtune", "training/_activation_offloading.py")
    return lambda: module.OffloadActivations(use_streams=True)


def peer(package: str, path: str) -> Any:
    """One file of a package, without what its ``__init__`` would import."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        sys.exit(ABSENT)
    file = Path(found.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(f"{package}_peer", file)
    if spec is None or spec.loader is None or not file.exists():
        sys.exit(ABSENT)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        print(f"{package}: {error}", file=sys.stderr)
        sys.exit(ABSENT)
    return module


METHODS: dict[str, Callable[[Stack, argparse.Namespace], Way]] = {
    "keep": keep,
    "checkpoint": partial(checkpointed, use_reentrant=False),
    "checkpoint (reentrant)": partial(checkpointed, use_reentrant=True),
    "save_on_cpu": saved_on_cpu,
    "trl": trl,
    "torchtune": torchtune,
    "spillway.offload()": offloaded,
    "spillway.offload(ratio=1)": partial(offloaded, ratio=1.0),
    "spillway.offload(ratio=0.5)": partial(offloaded, ratio=0.5),
    "spillway.group(), one a layer": grouped,
    "spillway.compat.megatron, one group a layer": by_megatrons_names,
    "spillway.recompute()": recomputed,
    "spillway.recompute(inputs offloaded)": partial(recomputed, offload="inputs"),
    "spillway.recompute(mixture)": partial(recomputed, offload=MIXTURE),
    "spillway.recompute(mixture, half of the gates)": mixed,
    "spillway.recompute(mixture, all gates)": partial(recomputed, offload=(*MIXTURE, "*gate")),
    "spillway.recompute(mixture, gate and up kept)": partial(recomputed, save=("*gate", "*up"), offload=MIXTURE),
    "spillway.recompute(halves, inputs offloaded)": partial(recomputed_halves, offload="inputs"),
    "spillway.recompute(halves, mixture, half of the gates)": partial(halves, gates=0.5),
    "spillway.recompute(halves, mixture, gates, last plain)": partial(halves, gates=0.67, plain=2),
    "spillway.recompute(halves, mixture, all gates, some ups)": partial(halves, gates=1.0, ups=0.25),
    "spillway.recompute(halves, mixture, all gates, half of the ups)": partial(halves, gates=1.0, ups=0.5),
    "spillway.recompute(halves, mixture, all gates, some ups, last half plain)": partial(
        halves, gates=1.0, ups=0.25, plain=1
    ),
    "spillway.recompute(halves, gate and up kept, last plain)": partial(halves, plain=2, kept=("*gate", "*up")),
    "spillway.recompute(halves, gate and up kept, last five halves plain)": partial(
        halves, plain=5, kept=("*gate", "*up")
    ),
    "spillway.offload(tier='disk')": partial(offloaded, ratio=1.0, tier="disk"),
}


# A child measures one method.


class Clock:
    """Moments on the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def between(self, first: Any, last: Any) -> float:
        return last - first if self._device.type == "cpu" else first.elapsed_time(last) / 1e3

    def synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def measure(options: argparse.Namespace) -> Row:
    device = device_of(options)
    row = timed(options, device)
    gc.collect()
    if options.equality_layers:
        row.digest = digest(options, device)
    return row


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)


def timed(options: argparse.Namespace, device: torch.device) -> Row:
    stack = make_stack(options.shape, options.layers, options.seq, device, torch.bfloat16)
    way = METHODS[options.child](stack, options)
    hidden = stack.layers[0].shape.hidden
    x = torch.randn(options.batch, options.seq, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    for tensor in (*stack.parameters(), x):
        tensor.grad = torch.zeros_like(tensor)
    clock = Clock(device)
    resident = host_memory()

    def step(way: Way = way) -> tuple[float, ...]:
        begin, start = time.perf_counter(), clock.now()
        with way():
            loss = stack(x).float().square().mean()
        middle = clock.now()
        loss.backward()
        end, queued = clock.now(), time.perf_counter() - begin
        clock.synchronize()
        return time.perf_counter() - begin, clock.between(start, middle), clock.between(middle, end), queued

    # The first step also loads kernels, for every method: plain once before it.
    stack.layers[0](x[:, :128], stack.cos[:128], stack.sin[:128]).sum().backward()
    clock.synchronize()
    base = allocated(device, reset=True)
    first = step()[0]
    for _ in range(options.warmup):
        step()
    # As trainers do: what lives for good is looked at no more, so that no step pays for a look at all of it.
    gc.collect()
    gc.freeze()
    allocated(device, reset=True)
    times = [step() for _ in range(options.steps)]
    peak, reserved = peaks(device)
    host_bytes = host_memory() - resident
    stats: dict[str, Any] = {}
    if isinstance(way, Spilled) and way.last is not None:
        stats = asdict(way.last.stats())
    pairs = [(plain_step(stack, step), step()[0]) for _ in range(options.pairs)]
    if options.trace:
        write_trace(options.trace, step)
    steps, forwards, backwards, queued = (list(column) for column in zip(*times, strict=True))
    return Row(
        options.child,
        statistics.median(steps),
        min(steps),
        max(steps),
        first,
        statistics.median(forwards),
        statistics.median(backwards),
        statistics.median(queued),
        peak - base,
        reserved,
        host_bytes,
        paired=statistics.quantiles([ours / plain for plain, ours in pairs], n=4) if pairs else [],
        stats=stats,
    )


def plain_step(stack: Stack, step: Callable[[Way], tuple[float, ...]]) -> float:
    """Seconds of a step that keeps everything, in the process of a method that does not."""
    call, stack.call = stack.call, lambda layer, *args: layer(*args)
    try:
        return step(nullcontext)[0]
    finally:
        stack.call = call


def write_trace(file: Path, step: Callable[[], object]) -> None:
    """Two steps, as a Chrome trace."""
    with torch.profiler.profile() as profile:
        for _ in range(2):
            step()
    profile.export_chrome_trace(str(file))


def digest(options: argparse.Namespace, device: torch.device) -> str:
    """A hash of loss and gradients of the third step of a smaller stack, with deterministic algorithms.

    Empty if Spillway offloaded nothing in it, since that would compare a plain step with itself.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    tokens = min(options.seq, 4096)
    stack = make_stack(options.shape, options.equality_layers, tokens, device, torch.bfloat16)
    way = METHODS[options.child](stack, options)
    torch.manual_seed(1)
    hidden = stack.layers[0].shape.hidden
    x = torch.randn(options.batch, tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        stack.zero_grad()
        x.grad = None
        with way():
            loss = stack(x).float().square().mean()
        loss.backward()
    if isinstance(way, Spilled):
        stats = spillway.StepStats() if way.last is None else way.last.stats()
        if stats.offloaded_bytes + stats.recomputed_bytes == 0:
            return ""
    sums = hashlib.blake2b(digest_size=16)
    for tensor in (loss.detach(), x.grad, *(parameter.grad for parameter in stack.parameters())):
        assert isinstance(tensor, Tensor)
        sums.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data)
    return sums.hexdigest()


def allocated(device: torch.device, *, reset: bool) -> int:
    if device.type == "cpu":
        return host_memory()
    torch.accelerator.synchronize(device)
    if reset:
        torch.accelerator.reset_peak_memory_stats(device)
    return int(torch.accelerator.memory_allocated(device))


def peaks(device: torch.device) -> tuple[int, int]:
    if device.type == "cpu":
        return host_memory(), host_memory()
    return (
        int(torch.accelerator.max_memory_allocated(device)),
        int(torch.accelerator.max_memory_reserved(device)),
    )


def host_memory() -> int:
    """Resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


# The parent runs the children, and measures the link.


def link_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second out and back, each alone, between pinned CPU memory and the GPU."""
    if device.type == "cpu":
        return float("inf"), float("inf")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    clock, rates = Clock(device), []
    for destination, source in ((host, there), (there, host)):
        best = 0.0
        for _ in range(5):
            start = clock.now()
            destination.copy_(source, non_blocking=True)
            end = clock.now()
            clock.synchronize()
            best = max(best, host.numel() / clock.between(start, end))
        rates.append(best)
    return rates[0], rates[1]


PASSED_ON = ("shape", "layers", "seq", "batch", "device", "steps", "warmup", "pairs", "window", "equality_layers")


def run_child(method: str, options: argparse.Namespace, trace: Path | None) -> Row | None:
    given = {name: getattr(options, name) for name in PASSED_ON} | {"trace": trace}
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, *arguments, f"--child={method}", f"--child-json={file.name}"]
        done = subprocess.run(command, check=False)
        if done.returncode == ABSENT:
            return None
        if done.returncode:
            print(f"{method}: ended with exit code {done.returncode}", flush=True)
            return None
        return Row(**json.loads(Path(file.name).read_text()))


def bound(row: Row, plain: Row, rates: tuple[float, float]) -> float | None:
    """Seconds of the least step that moves as many bytes."""
    if not row.stats:
        return None
    out = row.stats["offloaded_bytes"] / rates[0]
    back = row.stats["reloaded_bytes"] / rates[1]
    return max(plain.forward_seconds, out) + max(plain.backward_seconds, back)


def line(row: Row, plain: Row, rates: tuple[float, float]) -> str:
    least = bound(row, plain, rates)
    figures = [
        f"{row.method:58}",
        f"{row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to {row.step_max * 1e3:.1f})",
        f"x{row.step_seconds / plain.step_seconds:5.2f}",
        "bound      " if least is None else f"bound x{row.step_seconds / least:5.3f}",
        f"first {row.first_seconds / row.step_seconds:5.1f} steps",
        f"CPU {row.host_seconds * 1e3:6.1f} ms",
        f"peak {row.peak_bytes / 2**30:6.2f} GiB ({row.peak_bytes / max(plain.peak_bytes, 1):6.1%})",
        f"reserved {row.reserved_bytes / 2**30:6.2f}",
    ]
    if row.stats:
        moved = row.stats["offloaded_bytes"] + row.stats["reloaded_bytes"]
        figures.append(
            f"out {row.stats['offloaded_bytes'] / 2**30:6.2f} reused {row.stats['reused_bytes'] / 2**30:5.2f} of "
            f"{row.stats['saved_bytes'] / 2**30:6.2f} GiB, {moved / row.step_seconds / 1e9:5.1f} GB/s, CPU "
            f"{row.stats['host_bytes'] / 2**30:6.2f} GiB, stall {row.stats['stall_seconds'] * 1e3:.0f} ms, again "
            f"{row.stats['recomputed_bytes'] / 2**30:5.2f} GiB"
        )
    figures.extend(row.stats.get("notes", ()))
    if row.paired:
        figures.append("paired x{1:.3f} ({0:.3f} to {2:.3f})".format(*row.paired))
    figures.append("not compared" if not row.digest else "identical" if row.digest == plain.digest else "DIFFERENT")
    return "  ".join(figures)


def hardware(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def parser() -> argparse.ArgumentParser:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else accelerator.type
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny" if here == "cpu" else "8b", help="tiny, 1b, 8b or 70b")
    parser.add_argument("--layers", type=int, default=2 if here == "cpu" else 16)
    parser.add_argument("--seq", type=int, default=256 if here == "cpu" else 8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--device", default=here)
    parser.add_argument("--steps", type=int, default=7, help="steps to take the median of")
    parser.add_argument("--warmup", type=int, default=3, help="steps before these, beside the first")
    parser.add_argument(
        "--pairs", type=int, default=0, help="plain and other steps to alternate, for small differences"
    )
    parser.add_argument("--window", default=None, help="of the session, in bytes or as 512MiB")
    parser.add_argument("--equality-layers", type=int, default=2, help="layers of the deterministic run; 0 for none")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace of two steps of the last method")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-json", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser().parse_args()
    if options.child:
        options.child_json.write_text(json.dumps(asdict(measure(options))))
        return
    device = device_of(options)
    rates = link_rates(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"PCIe: {rates[0] / 1e9:.1f} GB/s out, {rates[1] / 1e9:.1f} back", flush=True)
    methods = ["keep", *(method for method in options.methods if method != "keep")]
    rows: list[Row] = []
    absent: list[str] = []
    for method in methods:
        row = run_child(method, options, options.trace if method == methods[-1] else None)
        if row is None:
            absent.append(method)
            print(f"{method:30}  absent", flush=True)
            continue
        rows.append(row)
        print(line(row, rows[0], rates), flush=True)
    if options.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "spillway": spillway.__version__,
            },
            "hardware": hardware(device),
            "options": {name: getattr(options, name) for name in PASSED_ON},
            "link": {"out_bytes_per_second": rates[0], "back_bytes_per_second": rates[1]},
            "absent": absent,
            "rows": [{**asdict(row), "bound_seconds": bound(row, rows[0], rates)} for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
