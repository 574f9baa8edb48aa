"""Fine-tunes of libraries: TRL's SFTTrainer with LoRA; diffusers' UNet and DiT beside a frozen VAE and text encoder.

Each fine-tune runs plain, with the library's own gradient checkpointing, and within two budgets: checkpointing's peak
and one percent more, and half-way between both peaks. The peak may be in the optimizer's step, where it differs by a
few thousandths from run to run. Nothing else differs. A step's time is that between two ends of steps, at which the
CPU waits for the device. Smaller fine-tunes with deterministic algorithms, whose plans recompute all blocks, compare
all losses and the trained weights bit for bit. All weights are random.

    python benchmarks/libraries.py --json libraries.json
    python benchmarks/libraries.py --tiny --device cpu        # a rehearsal
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from _table import describe_hardware, describe_versions
from spillway.profiler.meter import DeviceMemory
from spillway.units import format_bytes

KEEP, CHECKPOINT, WITHIN, BETWEEN = "keep", "own checkpointing", "budget of its peak", "budget half-way"
Limits = dict[str, Any]
"""Options of a plan."""
MORE = 1.01
"""The budget of checkpointing's peak, of that peak."""
WARM = 4
"""Steps before the measured ones."""
SEARCH = 10
"""Steps until a plan is active."""
IN_TURN = 24
"""Steps in which a plan and torch's own checkpointing may run in turn."""


@dataclass
class Row:
    """One way of one fine-tune."""

    library: str
    way: str
    step_seconds: float
    step_min: float
    step_max: float
    peak_bytes: int
    budget: int | None
    predicted_peak: int | None
    predicted_seconds: float | None
    stage: str | None
    identical: bool
    notes: list[str]
    """What Spillway says of the plan."""


@dataclass
class Found:
    """What a fine-tune gave."""

    ends: list[float]
    """When each step had ended."""
    peak_bytes: int
    """Of the measured steps."""
    digest: str
    """Of all losses, and of the trained weights."""
    attached: spillway.Attached | None


class Meter:
    """Notes ends of steps, and the peak after the search."""

    def __init__(self, device: torch.device, before: int) -> None:
        self.ends: list[float] = []
        self._before = before
        self._memory = DeviceMemory(device)
        self._waits = device.type != "cpu"

    def step_ended(self) -> None:
        if self._waits:
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self._before:
            self._memory.reset_peak()

    def peak(self) -> int:
        return self._memory.peak()


def digest_of(losses: list[float], model: nn.Module) -> str:
    found = hashlib.sha256(repr([loss.hex() for loss in losses]).encode())
    for parameter in model.parameters():
        if parameter.requires_grad:
            found.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# TRL


def trl(way: str, limits: Limits | None, before: int, steps: int, device: torch.device, tiny: bool) -> Found:
    """LoRA of a Llama."""
    import datasets
    import tokenizers
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from spillway.integrations.transformers import SpillwayCallback

    width, layers, length, words = (64, 3, 32, 64) if tiny else (2048, 16, 4096, 32000)
    meter, kept = Meter(device, before), []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.step_ended()
            kept[:] = [] if ours is None else [ours.attached]

    vocabulary = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, words)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        num_key_value_heads=max(width // 256, 1),
        max_position_embeddings=length,
        use_cache=False,
    )
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rows = torch.randint(2, words, (8, length)).tolist()
    ours = None if limits is None else SpillwayCallback(**limits)
    with TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            max_steps=before + steps,
            max_length=length,
            per_device_train_batch_size=2 if tiny else 4,
            gradient_checkpointing=way == CHECKPOINT,
            logging_steps=1,
            learning_rate=1e-3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=device.type != "cpu",
        )
        trainer = SFTTrainer(
            model,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer,
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear"),
            callbacks=[Clock(), *([ours] if ours is not None else [])],
        )
        trainer.train()
    losses = [float(each["loss"]) for each in trainer.state.log_history if "loss" in each]
    return Found(meter.ends, meter.peak(), digest_of(losses, trainer.model), kept[0] if kept else None)


# diffusers


def frozen(width: int, words: int, device: torch.device, tiny: bool) -> tuple[nn.Module, nn.Module]:
    """A VAE and a text encoder."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    channels = (8, 16) if tiny else (128, 256, 512, 512)
    count = len(channels)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * count, "up_block_types": ("UpDecoderBlock2D",) * count}
    with device:
        vae = AutoencoderKL(block_out_channels=channels, norm_num_groups=4, latent_channels=4, **kinds)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2 if tiny else 12}
    sizes |= {"num_attention_heads": max(width // 64, 1), "vocab_size": words, "bos_token_id": 0, "eos_token_id": 1}
    with device:
        text = CLIPTextModel(CLIPTextConfig(**sizes))
    vae, text = (each.requires_grad_(False).to(device, torch.bfloat16) for each in (vae, text))
    return vae, text


def unet(width: int, tiny: bool) -> nn.Module:
    """That of Stable Diffusion 1.5."""
    from diffusers import UNet2DConditionModel

    if not tiny:
        return UNet2DConditionModel(sample_size=64, cross_attention_dim=width)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=width,
        norm_num_groups=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def dit(width: int, tiny: bool) -> nn.Module:
    """That of Stable Diffusion 3, in 24 blocks of width 1,536."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8 if tiny else 64,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3 if tiny else 24,
        num_attention_heads=4 if tiny else 24,
        attention_head_dim=8 if tiny else 64,
        joint_attention_dim=width,
        caption_projection_dim=32 if tiny else 1536,
        pooled_projection_dim=width,
        pos_embed_max_size=8 if tiny else 64,
    )


def diffusers(
    make: Callable[[int, bool], nn.Module],
    way: str,
    limits: Limits | None,
    before: int,
    steps: int,
    device: torch.device,
    tiny: bool,
) -> Found:
    """A denoiser learns from images and words."""
    from diffusers.training_utils import EMAModel

    width, words, size, count = (32, 99, 16, 2) if tiny else (768, 49408, 512, 32)
    vae, text = frozen(width, words, device, tiny)
    with device:
        model = make(width, tiny).to(torch.bfloat16).train()
    if way == CHECKPOINT:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    average, meter, losses = EMAModel(model.parameters(), decay=0.9), Meter(device, before), []
    attached = None if limits is None else spillway.attach(model, **limits)
    with nullcontext() if attached is None else attached:
        for _ in range(before + steps):
            with torch.no_grad():
                images = torch.rand(count, 3, size, size, device=device, dtype=torch.bfloat16)
                latents: Tensor = vae.encode(images).latent_dist.sample()  # type: ignore[operator]
                said = text(torch.randint(2, words, (count, 8 if tiny else 77), device=device))
            noise, times = torch.randn_like(latents), torch.randint(1000, (count,), device=device)
            noisy = latents.lerp(noise, (times / 1000).view(-1, 1, 1, 1).to(latents.dtype))
            pooled = {"pooled_projections": said.pooler_output} if make is dit else {}
            found = model(noisy, timestep=times, encoder_hidden_states=said.last_hidden_state, **pooled).sample
            loss = functional.mse_loss(found, noise - latents)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            losses.append(loss.item())
            meter.step_ended()
        return Found(meter.ends, meter.peak(), digest_of(losses, model), attached)


LIBRARIES: dict[str, Callable[[str, Limits | None, int, int, torch.device, bool], Found]] = {
    "TRL, LoRA": trl,
    "diffusers, UNet": lambda *args: diffusers(unet, *args),
    "diffusers, DiT": lambda *args: diffusers(dit, *args),
}


def steps_before(way: str) -> int:
    """Steps before the measured ones."""
    return SEARCH + IN_TURN if way in (WITHIN, BETWEEN) else WARM


def compared(library: str, options: argparse.Namespace) -> Iterator[tuple[str, Found, bool, int | None]]:
    """Each way: what it gave, whether a small one's bits are the plain ones', and its budget."""
    run, device = LIBRARIES[library], torch.device(options.device)
    plain = ""
    peaks: dict[str, int] = {}
    for way in (KEEP, CHECKPOINT, WITHIN, BETWEEN):
        budget = None
        if way in (WITHIN, BETWEEN):
            budget = int(peaks[CHECKPOINT] * MORE) if way == WITHIN else (peaks[CHECKPOINT] + peaks[KEEP]) // 2
        found = []
        for is_small in (True, False):
            gc.collect()
            torch.manual_seed(0)
            torch.use_deterministic_algorithms(is_small)
            limits: Limits | None = None if budget is None else {"budget": budget}
            if limits is not None and (is_small or options.tiny):
                # The peak of a small model is not that of its blocks.
                limits = {"budget": 64 << 30, "allow": {"recompute"}}
            before = SEARCH if is_small else steps_before(way)
            found.append(run(way, limits, before, 4 if is_small else options.steps, device, is_small or options.tiny))
        small, large = found
        plain = plain or small.digest
        peaks[way] = large.peak_bytes
        yield way, large, small.digest == plain, budget


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu" if accelerator is None else accelerator.type)
    parser.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--steps", type=int, default=8, help="measured ones")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Deterministic products of matrices need it, and it is read when the first one runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": describe_versions(),
        "hardware": describe_hardware(torch.device(options.device)),
        "options": {name: str(value) for name, value in vars(options).items() if name != "json"},
        "rows": [],
    }
    for library in options.libraries:
        for way, found, identical, budget in compared(library, options):
            times = [end - begin for begin, end in pairwise(found.ends[steps_before(way) - 1 :])]
            plan = None if found.attached is None else found.attached.plan
            row = Row(
                library,
                way,
                statistics.median(times),
                min(times),
                max(times),
                found.peak_bytes,
                budget,
                None if plan is None else plan.predicted_peak,
                None if plan is None else plan.predicted_seconds,
                None if found.attached is None else found.attached.stage,
                identical,
                [] if found.attached is None else [*found.attached.notes],
            )
            result["rows"].append(asdict(row))
            print(
                f"{library:16} {way:20} {row.step_seconds * 1e3:8.1f} ms ({row.step_min * 1e3:.1f} to "
                f"{row.step_max * 1e3:.1f})  {format_bytes(row.peak_bytes):>9}  {row.stage or '':8} "
                f"{'identical' if identical else 'OTHER BITS'}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
