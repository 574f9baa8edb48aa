"""Real models in plain loops with their optimizer: Spillway beside keeping everything and beside torch's checkpointing.

    python benchmarks/models.py --json models.json                  # all families, on a GPU
    python benchmarks/models.py --models vit unet --ways keep checkpoint recompute --rounds 3
    python benchmarks/models.py --device cpu --tiny --steps 2

Each model has a process of its own, and each way a fresh model in it. The ways:

keep         everything that autograd saves stays on the GPU
checkpoint   each block under ``torch.utils.checkpoint`` (non-reentrant)
recompute    ``attach(model, policy=Recompute())``: each block is recomputed, nothing is kept, no plan
at-peak      ``attach(model, budget=<checkpoint's peak and half a percent>)``
half-way     ``attach(model, budget=<mean of keep's and checkpoint's peaks>)``

A step is forward, backward, ``optimizer.step()`` and ``zero_grad()``. *ms* is the median of ``--steps`` steps, each
between two synchronizations, with the range. With several ``--rounds``, all ways are run in turn as often, with the
plans of the first round: the CPU of a shared host may be slow for seconds. *of keep* divides by keep's median in the
same process. *peak* is ``max_memory_allocated`` over one step. The losses of the first steps, from one seed, must be
keep's in every way, bit for bit. They are of a model of their own, which runs deterministic kernels: these take longer,
and a plan must not be made of their times. ``search`` is the number of steps, and seconds, until the plan is active,
and the highest peak until then. The half percent is for the allocator: its blocks are up to 1 MiB larger than asked
for, and checkpointing's peak is not the same to the byte in each step.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway
from _table import describe_hardware, describe_versions
from spillway.units import format_bytes

WAYS = ("keep", "checkpoint", "recompute", "at-peak", "half-way")
COMPARED = 6
"""Steps whose losses are compared."""
MOST_SEARCH = 60
IN_TURN = 24


@dataclass
class Family:
    """A model, its blocks, and its loss for one batch."""

    model: nn.Module
    blocks: list[nn.Module]
    loss: Callable[[], Tensor]


def llama(width: int, layers: int, batch: int, length: int) -> Callable[[bool], Family]:
    def make(tiny: bool) -> Family:
        from transformers import LlamaConfig, LlamaForCausalLM

        hidden, count, rows, tokens = (64, 2, 2, 16) if tiny else (width, layers, batch, length)
        config = LlamaConfig(
            vocab_size=512 if tiny else 32000,
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=count,
            num_attention_heads=max(hidden // 128, 1),
            num_key_value_heads=max(hidden // 512, 1),
            max_position_embeddings=tokens,
            use_cache=False,
        )
        model = LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, (rows, tokens))
        return Family(model, list(model.model.layers), lambda: model(input_ids=ids, labels=ids).loss)

    return make


def gpt2(tiny: bool) -> Family:
    from transformers import GPT2Config, GPT2LMHeadModel

    width, layers, rows, tokens = (64, 2, 2, 16) if tiny else (1280, 24, 8, 1024)
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=width // 64, n_positions=tokens, vocab_size=512 if tiny else 50257
    )
    config.use_cache = False
    model = GPT2LMHeadModel(config)
    ids = torch.randint(config.vocab_size, (rows, tokens))
    return Family(model, list(model.transformer.h), lambda: model(input_ids=ids, labels=ids).loss)


def vit(tiny: bool) -> Family:
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, images, size = (64, 2, 2, 32) if tiny else (1280, 24, 64, 224)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 80, 1),
        intermediate_size=4 * width,
        image_size=size,
        patch_size=16 if tiny else 14,
        num_labels=100,
    )
    model = ViTForImageClassification(config)
    pixels, labels = torch.randn(images, 3, size, size), torch.randint(100, (images,))
    blocks = [each for each in model.modules() if type(each).__name__ == "ViTLayer"]
    return Family(model, blocks, lambda: model(pixel_values=pixels, labels=labels).loss)


def convnext(tiny: bool) -> Family:
    from torchvision.models import convnext_large, convnext_tiny
    from torchvision.models.convnext import CNBlock

    images, size = (2, 64) if tiny else (64, 224)
    # Stochastic depth would draw on the CPU, and is the same in all ways.
    model = convnext_tiny(num_classes=100) if tiny else convnext_large(num_classes=100)
    pixels, labels = torch.randn(images, 3, size, size), torch.randint(100, (images,))
    blocks = [each for each in model.modules() if isinstance(each, CNBlock)]
    return Family(model, blocks, lambda: functional.cross_entropy(model(pixels).float(), labels))


def mixtral(tiny: bool) -> Family:
    from transformers import MixtralConfig, MixtralForCausalLM

    width, layers, rows, tokens = (64, 2, 2, 16) if tiny else (1024, 8, 4, 2048)
    config = MixtralConfig(
        vocab_size=512 if tiny else 32000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        num_key_value_heads=max(width // 256, 1),
        num_local_experts=8,
        use_cache=False,
    )
    model = MixtralForCausalLM(config)
    ids = torch.randint(config.vocab_size, (rows, tokens))
    return Family(model, list(model.model.layers), lambda: model(input_ids=ids, labels=ids).loss)


def t5(tiny: bool) -> Family:
    from transformers import T5Config, T5ForConditionalGeneration

    width, layers, rows, tokens = (64, 2, 2, 16) if tiny else (1024, 12, 8, 1024)
    config = T5Config(
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=max(width // 64, 1),
        vocab_size=512 if tiny else 32128,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config)
    ids, labels = (torch.randint(config.vocab_size, (rows, tokens)) for _ in range(2))
    blocks = [*model.encoder.block, *model.decoder.block]
    return Family(model, blocks, lambda: model(input_ids=ids, labels=labels).loss)


class Down(nn.Module):
    """Two convolutions with group norm, and a residual."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.first = nn.GroupNorm(8, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.second_norm, self.second = nn.GroupNorm(8, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(functional.silu(self.norm(x)))
        return self.skip(x) + self.second(functional.silu(self.second_norm(h)))


class UNet(nn.Module):
    """Blocks on the way down, whose outputs the blocks on the way up read."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip([widths[0], *widths], widths, strict=False))
        self.down = nn.ModuleList(Down(inner, outer) for inner, outer in pairs for inner in (inner, outer))
        self.middle = Down(widths[-1], widths[-1])
        ups = [(outer, inner) for inner, outer in reversed(pairs)]
        self.up = nn.ModuleList(Down(outer * 2, inner) for outer, inner in ups)
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h, kept = self.first(x), []
        for index in range(0, len(self.down), 2):
            h = self.down[index + 1](self.down[index](h))
            kept.append(h)
            h = functional.avg_pool2d(h, 2)
        h = self.middle(h)
        for block in self.up:
            h = block(torch.cat([functional.interpolate(h, scale_factor=2.0), kept.pop()], 1))
        return self.last(h)


def unet(tiny: bool) -> Family:
    widths, images, size = ([8, 16], 2, 16) if tiny else ([128, 256, 256, 512], 32, 128)
    model = UNet(widths)
    pixels, noise = torch.randn(images, 3, size, size), torch.randn(images, 3, size, size)
    blocks = [*model.down, model.middle, *model.up]
    return Family(model, blocks, lambda: functional.mse_loss(model(pixels + noise).float(), noise.float()))


class Recurrent(nn.Module):
    """A GRU with a residual and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gru, self.mix = (
            nn.LayerNorm(width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(functional.gelu(self.gru(self.norm(x))[0]))


def recurrent(tiny: bool) -> Family:
    width, layers, rows, tokens = (16, 2, 2, 8) if tiny else (1024, 12, 64, 512)
    blocks = [Recurrent(width) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(width, 256))
    x, labels = torch.randn(rows, tokens, width), torch.randint(256, (rows, tokens))
    return Family(
        model, list(blocks), lambda: functional.cross_entropy(model(x).float().flatten(0, 1), labels.flatten())
    )


FAMILIES: dict[str, Callable[[bool], Family]] = {
    "llama-2048": llama(2048, 16, 2, 4096),
    "llama-4096": llama(4096, 8, 1, 8192),
    "vit": vit,
    "convnext": convnext,
    "mixtral": mixtral,
    "gpt2": gpt2,
    "t5": t5,
    "unet": unet,
    "recurrent": recurrent,
}


# One way of one model.


class Way:
    """A fresh model that trains in one way."""

    def __init__(
        self, name: str, way: str, peaks: dict[str, int], options: argparse.Namespace, plan: spillway.Plan | None = None
    ) -> None:
        self.name, self.cuda = name, options.device != "cpu"
        torch.manual_seed(0)
        with torch.device(options.device):
            self.family = FAMILIES[name](options.tiny)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        # Inputs are made in the default type, and are cast once.
        self.family.model.to(dtype).train()
        self.autocast = functools.partial(torch.autocast, options.device, dtype, enabled=self.cuda and name in CAST)
        self.optimizer = torch.optim.AdamW(self.family.model.parameters(), lr=1e-5, fused=self.cuda)
        self.attached: Any = None
        if way == "checkpoint":
            for block in self.family.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        elif way == "recompute":
            self.attached = spillway.attach(self.family.model, policy=spillway.Recompute(), blocks=self._names())
        elif plan is not None:
            self.attached = spillway.attach(self.family.model, plan=plan)
        elif way in ("at-peak", "half-way"):
            least, most = peaks["checkpoint"], peaks["keep"]
            budget = int(1.005 * least) if way == "at-peak" else (least + most) // 2
            self.attached = spillway.attach(self.family.model, budget=budget)

    def _names(self) -> list[str]:
        wanted = set(map(id, self.family.blocks))
        return [name for name, module in self.family.model.named_modules() if id(module) in wanted]

    def step(self) -> Tensor:
        with self.autocast():
            loss = self.family.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self) -> list[Tensor]:
        """Those of the first steps, by kernels that add up in one order."""
        torch.use_deterministic_algorithms(True, warn_only=self.name in ROUNDING)
        try:
            return [self.step() for _ in range(COMPARED)]
        finally:
            torch.use_deterministic_algorithms(False)

    def end(self) -> None:
        """Let go of the model."""
        if self.attached is not None:
            self.attached.remove()
        self.family = self.optimizer = self.attached = None  # type: ignore[assignment]
        # A checkpointed block refers to itself by its forward.
        gc.collect()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def search(self) -> tuple[int, float]:
        """Steps and seconds until the plan is active. The next steps time two plans in turn, and are not counted."""
        begin = time.perf_counter()
        for count in range(MOST_SEARCH):
            if self.attached.stage == "active":
                # A step is judged when the next one begins, which has the plan already.
                found = count - 1, time.perf_counter() - begin
                for _ in range(IN_TURN):
                    self.step()
                return found
            self.step()
        raise SystemExit(f"no plan is active after {MOST_SEARCH} steps: {self.attached.explain()}")

    def times(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            self.synchronize()
            begin = time.perf_counter()
            self.step()
            self.synchronize()
            found.append(time.perf_counter() - begin)
        return found

    def peak(self) -> int:
        if not self.cuda:
            return 1 << 30
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.synchronize()
        return torch.cuda.max_memory_allocated()


ROUNDING = {"unet", "recurrent"}
"""Models with kernels that have no deterministic form."""
CAST = {"vit", "convnext", "unet", "recurrent"}
"""Models whose inputs are made in float32, and cast by autocast."""


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    losses, peaks, plans, rows = None, dict[str, int](), dict[str, spillway.Plan](), dict[str, dict[str, Any]]()
    # The backward of cuDNN's attention has no deterministic form.
    torch.backends.cuda.enable_cudnn_sdp(False)
    for way in options.ways:
        row = rows[way] = {"model": name, "way": way}
        try:
            training = Way(name, way, peaks, options)
            found = training.losses()
            losses = losses or [loss.item() for loss in found]
            row["same_losses"] = [loss.item() for loss in found] == losses
            training.end()
            training = Way(name, way, peaks, options)
            if training.cuda:
                torch.cuda.reset_peak_memory_stats()
            if training.attached is not None and way != "recompute":
                row["search_steps"], row["search_seconds"] = training.search()
                row["search_peak"] = torch.cuda.max_memory_allocated() if training.cuda else 0
                plan = plans[way] = training.attached.plan
                row["predicted"] = {"seconds": plan.predicted_seconds, "peak": plan.predicted_peak}
                row["recomputed_blocks"] = sum(block.recomputes for block in plan.blocks)
                row["offloaded_bytes"] = plan.host_bytes
                row["notes"] = list(training.attached.notes)
                if options.profiles is not None and training.attached.profile is not None:
                    training.attached.profile.save(options.profiles / f"{name}-{way}.json")
            training.times(2)
            row["rounds"] = [training.times(options.steps)]
            peaks[way] = row["peak"] = training.peak()
            training.end()
        except (torch.OutOfMemoryError, spillway.SpillwayError) as error:
            row["failed"] = str(error)[:300]
        training = None  # type: ignore[assignment]
        clean_up(options)
        yield summed_up(row, rows)
    for _ in range(options.rounds - 1):
        for way in (way for way in options.ways if "failed" not in rows[way]):
            training = Way(name, way, peaks, options, plans.get(way))
            # Its first calls are compared with their replays.
            training.times(COMPARED)
            rows[way]["rounds"].append(training.times(options.steps))
            training.end()
            training = None  # type: ignore[assignment]
            clean_up(options)
            yield summed_up(rows[way], rows)


def summed_up(row: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The row with figures of its rounds until now."""
    if "failed" not in row:
        times = [seconds for each in row["rounds"] for seconds in each]
        row.update(seconds=statistics.median(times), fastest=min(times), slowest=max(times))
        row["of_keep"] = row["seconds"] / next(each["seconds"] for each in rows.values() if "seconds" in each)
    return row


def clean_up(options: argparse.Namespace) -> None:
    # A checkpointed block refers to itself by its forward: without this, the next way's peak has its model, too.
    gc.collect()
    spillway.Session.default().close()
    if options.device != "cpu":
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    head = f"{row['model']:12s} {row['way']:10s}"
    if "failed" in row:
        return f"{head} failed: {row['failed'][:120]}"
    search = ""
    if "search_steps" in row:
        search = (
            f"  search {row['search_steps']} steps {row['search_seconds']:.1f} s {format_bytes(row['search_peak'])}"
        )
    return (
        f"{head} {row['seconds'] * 1e3:8.1f} ms ({row['fastest'] * 1e3:.1f} to {row['slowest'] * 1e3:.1f})  "
        f"{row['of_keep']:.3f} of keep  {format_bytes(row['peak'])}"
        f"{'' if row['same_losses'] else '  OTHER LOSSES'}{search}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1, help="rounds through all ways, each with --steps steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profiles", type=Path, help="a folder for the profiles, to plan from them without the GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for row in measure(options.child, options):
            print("row: " + json.dumps(row), flush=True)
        return
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name in options.models:
        words = [
            "--child",
            name,
            "--steps",
            str(options.steps),
            "--rounds",
            str(options.rounds),
            "--device",
            options.device,
            "--ways",
            *options.ways,
            *([] if options.profiles is None else ["--profiles", str(options.profiles)]),
        ]
        command = [sys.executable, "-W", "ignore", __file__, *words, *(["--tiny"] if options.tiny else [])]
        environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for said in process.stdout:
                if said.startswith("row: "):
                    row = json.loads(said.removeprefix("row: "))
                    # A later round of a way replaces its row.
                    rows[row["model"], row["way"]] = row
                    print(line(row), flush=True)
        if process.returncode:
            print(f"{name}: its process ended with {process.returncode}", flush=True)
        if options.json:
            about = {"date": datetime.now(UTC).isoformat(), "hardware": describe_hardware(torch.device(options.device))}
            options.json.write_text(
                json.dumps({**about, "versions": describe_versions(), "rows": [*rows.values()]}, indent=1)
            )


if __name__ == "__main__":
    main()
