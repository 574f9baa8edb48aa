"""LoRA on Llama layers whose frozen weights are in CPU memory, beside the same layers with all weights on the GPU.

    python benchmarks/streams.py --json streams.json                       # on a GPU
    python benchmarks/streams.py --device cpu --shape tiny --layers 3 --seq 64 --runs 1

For each number of tokens, four ways take steps: ``resident`` keeps all on the GPU, ``streamed`` streams the frozen
weights of all layers, and both recompute their layers; ``streamed, kept`` keeps saved tensors; ``from files`` is
``streamed`` with the weights in safetensors files (``--files``: a folder that they are written to). *bound* is the
longer of the resident step and of the copies: the bytes that a streamed step copied, at the measured bandwidth of one
copy of a layer's weights. *peak* is ``max_memory_allocated`` over one step. *first* is the first step's time: the files
were dropped from the system's cache before it, if the system allows that. Losses must be those of ``resident``, bit for
bit.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import spillway
from _llama import SHAPES, Layer
from _table import describe_hardware, describe_versions, gib
from spillway.profiler.meter import meter_of

DTYPE = torch.bfloat16
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"policy": spillway.Recompute()},
    "streamed": {"policy": spillway.Recompute(), "stream": Layer},
    "streamed, kept": {"policy": spillway.policies.Keep(), "stream": Layer},
    "from files": {"policy": spillway.Recompute(), "stream": Layer},
}


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of rank 16 (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Stack(nn.Module):
    def __init__(self, shape: str, layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList()
        first = Layer(SHAPES[shape]).requires_grad_(False)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(first, name, Adapted(getattr(first, name)))
        first.to(dtype)
        for number in range(layers):
            # Random numbers for each layer would take a minute: rows in another order make layers as different.
            layer = copy.deepcopy(first)
            for parameter, origin in zip(layer.parameters(), first.parameters(), strict=True):
                parameter.data.copy_(origin.data.roll(number, 0))
            self.layers.append(layer)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x.float().square().mean()


def mapped(options: argparse.Namespace, session: spillway.Session) -> Stack:
    """The model with its weights in a file, in ``options.files``, which is no longer in the system's cache."""
    from safetensors.torch import save_file

    path = options.files / "model.safetensors"
    if not path.exists():
        save_file(Stack(options.shape, options.layers, DTYPE).state_dict(), path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with torch.device("meta"):
        model = Stack(options.shape, options.layers, DTYPE)
    spillway.load_weights(model, path, device=options.device, session=session, on_disk=True)
    return model


class Steps:
    """Steps of one way."""

    def __init__(self, way: str, seq: int, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.events = spillway.EventList()
        self.session = spillway.Session(recorder=self.events)
        model = mapped(options, self.session) if way == "from files" else Stack(options.shape, options.layers, DTYPE)
        if way == "resident":
            model.to(self.device)
        more = dict(WAYS[way])
        if "stream" in more:
            more |= {"device": self.device, "min_bytes": options.min_bytes}
        if isinstance(more["policy"], spillway.Recompute):
            more["blocks"] = Layer
        self.attached = spillway.attach(model, session=self.session, **more)
        self.model = model
        self.optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
        hidden, head = SHAPES[options.shape].hidden, SHAPES[options.shape].head
        torch.manual_seed(1)
        self.x = torch.randn(1, seq, hidden, device=self.device, dtype=torch.bfloat16)
        angles = torch.rand(seq, head, device=self.device)
        self.rotation = angles.cos().bfloat16(), angles.sin().bfloat16()

    def step(self, *, zero_grad: bool = True) -> Tensor:
        loss: Tensor = self.model(self.x, *self.rotation)
        loss.backward()
        self.optimizer.step()
        if zero_grad:
            self.optimizer.zero_grad()
        return loss.detach()

    def compared(self) -> list[Tensor]:
        """Losses of three steps, and the gradients of the third."""
        found = [self.step(zero_grad=False) if number == 2 else self.step() for number in range(3)]
        found += [each.grad.cpu() for each in self.model.parameters() if each.grad is not None]
        self.optimizer.zero_grad()
        return found

    def seconds(self) -> float:
        self.synchronize()
        begin = time.perf_counter()
        self.step()
        self.synchronize()
        return time.perf_counter() - begin

    def peak(self) -> int:
        meter = meter_of(self.device)
        meter.mark()
        self.step()
        self.synchronize()
        meter.mark()
        return meter.finish()[1].peak

    def copied(self) -> int:
        """Bytes of one step's copies to the device."""
        self.events.events.clear()
        self.step()
        self.synchronize()
        return sum(event.nbytes for event in self.events.events if event.kind is spillway.EventKind.RETURN)

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def close(self) -> None:
        self.attached.remove()
        self.session.close()


def bandwidth(nbytes: int, device: torch.device) -> float:
    """Bytes a second of one pinned copy of so many bytes."""
    if device.type == "cpu":
        return float("inf")
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(5):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()
        found.append(nbytes / (time.perf_counter() - begin))
    return statistics.median(found)


def measure(seq: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    layer = sum(each.nbytes for each in Stack(options.shape, 1, DTYPE).parameters() if not each.requires_grad)
    rate = bandwidth(layer, torch.device(options.device))
    plain: list[Tensor] = []
    for way in WAYS if options.files is not None else [*WAYS][:-1]:
        steps = Steps(way, seq, options)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        first = steps.seconds()
        found = steps.compared()
        torch.use_deterministic_algorithms(False)
        plain = plain or found
        steps.step()
        seconds = [steps.seconds() for _ in range(options.runs)]
        copied = 0 if way == "resident" else steps.copied()
        resident = rows[0]["step_seconds"] if rows else statistics.median(seconds)
        row = {
            "way": way,
            "tokens": seq,
            "first_seconds": first,
            "step_seconds": statistics.median(seconds),
            "step_min": min(seconds),
            "step_max": max(seconds),
            "peak_bytes": steps.peak(),
            "copied_bytes": copied,
            "bound_seconds": max(resident, copied / rate),
            "bandwidth": rate,
            "is_same": len(found) == len(plain) and all(map(torch.equal, found, plain)),
        }
        rows.append(row)
        print(
            f"{seq} tokens, {way}: first {first:.2f} s, then {row['step_seconds'] * 1e3:.0f} ms "
            f"({row['step_min'] * 1e3:.0f} to {row['step_max'] * 1e3:.0f}), "
            f"{row['step_seconds'] / row['bound_seconds']:.3f} of the bound, peak {gib(row['peak_bytes'])}, "
            f"copied {gib(copied)}, gradients {'the same' if row['is_same'] else 'DIFFER'}",
            flush=True,
        )
        steps.close()
        del steps
        gc.collect()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--min-bytes", dest="min_bytes", default="1MiB")
    parser.add_argument("--files", type=Path, help="a folder for the weights; without it, none are in files")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for seq in options.seq for row in measure(seq, options)]
    if options.json is not None:
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": describe_versions(),
            "hardware": describe_hardware(torch.device(options.device)),
            "options": {key: str(value) for key, value in vars(options).items() if key not in ("json", "files")},
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
