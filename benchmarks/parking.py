"""Time of parking a model and of bringing it back, against the bandwidth of one pinned copy each way.

Two cases: the weights of layers of Llama-8B's shape, 16 GiB, and a model of 0.6B with gradients and AdamW. Each is
parked several times. The first time pins CPU memory. Then it is parked with ``reuse``: the second of these copies
nothing.

    python benchmarks/parking.py --json parking.json
    python benchmarks/parking.py --device cpu --shape tiny --layers 4 --small-layers 2      # a rehearsal
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

import spillway
from _llama import SHAPES, Layer, Shape
from _table import describe_hardware, describe_versions
from spillway.runtime.cpu import CpuBackend

SMALL = Shape(hidden=1024, heads=16, kv_heads=8, ffn=3072)
"""That of a model of 0.6B with 28 layers."""
VOCABULARY = 151_936


class Separate(CpuBackend):
    """The CPU's backend for a device that has memory of its own: for a rehearsal."""

    direct_disk = False


@dataclass
class Row:
    """One parking. Rates are relative to the bandwidth of one pinned copy in the same direction."""

    model: str
    way: str
    parked_bytes: int
    copied_bytes: int
    pinned_bytes: int
    freed_bytes: int
    out_seconds: float
    back_seconds: float
    call_seconds: float
    """Until ``unpark()`` returns."""
    out_rate: float
    back_rate: float
    identical: bool


class Bench:
    def __init__(self, device: torch.device, session: spillway.Session) -> None:
        self.device = device
        self.session = session
        self.out, self.back = self.bandwidth()

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin

    def bandwidth(self) -> tuple[float, float]:
        """Bytes a second out and back, of one copy of 1 GiB."""
        is_cpu = self.device.type == "cpu"
        nbytes = 64 << 20 if is_cpu else 1 << 30
        here = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=not is_cpu)
        rates = []
        for to, since in ((host, here), (here, host)):
            times = [self.seconds(lambda to=to, since=since: to.copy_(since, non_blocking=True)) for _ in range(5)]
            rates.append(nbytes / min(times))
        return rates[0], rates[1]

    def allocated(self) -> int:
        return 0 if self.device.type == "cpu" else int(torch.accelerator.memory_allocated(self.device))

    def measure(self, name: str, way: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Row:
        """Park once, and bring it back."""
        sums = [each.double().sum().item() for each in model.parameters()]
        before = self.allocated()
        made: list[spillway.Parked] = []
        park = lambda: made.append(  # noqa: E731
            spillway.park(model, optimizer=optimizer, session=self.session, reuse=way.startswith("reuse"))
        )
        out = self.seconds(park)
        (parking,) = made
        freed, pinned = before - self.allocated(), self.session.host_bytes
        calls = []

        def unpark() -> None:
            begin = time.perf_counter()
            parking.unpark()
            calls.append(time.perf_counter() - begin)
            parking.synchronize()

        back = self.seconds(unpark)
        return Row(
            model=name,
            way=way,
            parked_bytes=parking.nbytes,
            copied_bytes=parking.copied_bytes,
            pinned_bytes=pinned,
            freed_bytes=freed,
            out_seconds=out,
            back_seconds=back,
            call_seconds=calls[0],
            out_rate=parking.nbytes / out / self.out,
            back_rate=parking.nbytes / back / self.back,
            identical=sums == [each.double().sum().item() for each in model.parameters()],
        )


def weights(shape: str, layers: int, device: torch.device) -> nn.Module:
    with device:
        return nn.Sequential(*(Layer(SHAPES[shape]) for _ in range(layers))).bfloat16().requires_grad_(False)


def trained(layers: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of 0.6B after a step, with gradients."""
    with device:
        words = nn.Embedding(VOCABULARY if layers > 8 else 1024, SMALL.hidden)
        model = nn.Sequential(words, *(Layer(SMALL) for _ in range(layers))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@contextmanager
def session_for(device: torch.device) -> Iterator[spillway.Session]:
    with spillway.Session(backend=Separate) if device.type == "cpu" else spillway.Session() as session:
        yield session


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    here = "cpu" if accelerator is None else f"{accelerator.type}:0"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=here)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=40, help="40 layers of 8B's shape have 16.25 GiB")
    parser.add_argument("--small-layers", type=int, default=28)
    parser.add_argument("--times", type=int, default=5, help="parkings of each way after the first")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    for name in ("weights", "0.6B with AdamW"):
        # Each has pinned memory of its own.
        with session_for(device) as session:
            bench = Bench(device, session)
            print(f"one pinned copy: {bench.out / 1e9:.1f} GB/s out, {bench.back / 1e9:.1f} GB/s back", flush=True)
            if name == "weights":
                model, optimizer = weights(options.shape, options.layers, device), None
            else:
                model, optimizer = trained(options.small_layers, device)
            ways = ("first", *["again"] * options.times, "reuse, first", *["reuse, unchanged"] * options.times)
            for way in ways:
                rows.append(bench.measure(name, way, model, optimizer))
                row = rows[-1]
                print(
                    f"{name:16} {way:17} {row.parked_bytes / 2**30:6.2f} GiB, copied {row.copied_bytes / 2**30:6.2f}  "
                    f"out {row.out_seconds * 1e3:8.1f} ms ({row.out_rate:5.2f} of the copy)  "
                    f"back {row.back_seconds * 1e3:8.1f} ms ({row.back_rate:5.2f})  "
                    f"call {row.call_seconds * 1e3:6.1f} ms  pinned {row.pinned_bytes / max(row.parked_bytes, 1):.3f}  "
                    f"freed {row.freed_bytes / max(row.parked_bytes, 1):.4f}"
                    f"  {'identical' if row.identical else 'OTHER BITS'}",
                    flush=True,
                )
            del model, optimizer
            gc.collect()
    for name in ("weights", "0.6B with AdamW"):
        out, unchanged = (
            statistics.median(row.out_seconds for row in rows if row.model == name and row.way == way)
            for way in ("again", "reuse, unchanged")
        )
        print(f"{name}: unchanged, out takes {unchanged / out:.1%} of the time with copies")
    if options.json:
        header = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": describe_versions(),
            "hardware": describe_hardware(device),
            "options": {name: str(value) for name, value in vars(options).items() if name != "json"},
            "copy": {"out": bench.out, "back": bench.back},
        }
        options.json.write_text(json.dumps({**header, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
