"""Adapters trained on a frozen Llama whose weights stay in CPU memory, and are on the GPU only while their layer runs.

    python examples/lora_70b.py                     # small, on the CPU or a GPU
    python examples/lora_70b.py --layers 80 --width 8192 --words 128256 --tokens 8192 --alone
    python examples/lora_70b.py --weights path/to/Llama-3.1-70B --tokens 8192 --alone

By count, the last two need 150 GiB of CPU memory, and less with --on-disk. It prints tokens per second and peaks of
memory. Without --alone it trains once more, with all weights on the GPU, and compares losses and adapters, bit for bit.
It needs transformers, accelerate and safetensors.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import spillway


class LoRA(nn.Module):
    """A frozen linear layer, plus a product of two thin matrices, which is 0 at first."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) * frozen.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        added = functional.linear(functional.linear(x.float(), self.down), self.up)
        y: Tensor = self.frozen(x) + added.to(x.dtype)
        return y


def make_model(options: argparse.Namespace, session: spillway.Session, device: torch.device) -> Any:
    """A model with adapters on the CPU, with random weights or those of the files."""
    heads = max(options.width // 128, 4)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=min(heads // 2, 8),
        vocab_size=options.words,
    )
    torch.manual_seed(0)
    if options.weights is None:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        with init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(options.weights)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Before the adapters, which change names.
        spillway.load_weights(model, options.weights, device=device, session=session, on_disk=options.on_disk)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, LoRA(child, options.rank))
    return model


def train(model: Any, options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Some steps on random words: losses, and the adapters in the end."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(options.steps):
        if step == min(1, options.steps - 1):
            # The first step is slower.
            start, first = time.perf_counter(), step
        words = torch.randint(model.config.vocab_size, (1, options.tokens), generator=generator).to(device)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    seconds = time.perf_counter() - start
    print(f"{(options.steps - first) * options.tokens / seconds:.0f} tokens/s, loss {losses[-1]:.4f}, {memory(device)}")
    return [*losses, *(each.detach().cpu() for each in trained)]


def memory(device: torch.device) -> str:
    """Peaks so far."""
    on_gpu = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    on_cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peaks: {on_gpu / 2**30:.2f} GiB of the GPU, {on_cpu / 2**30:.2f} GiB of CPU memory"


def run(options: argparse.Namespace, device: torch.device, *, streams: bool) -> list[Tensor]:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    with spillway.Session() as session:
        model = make_model(options, session, device)
        if not streams:
            model.to(device)
        more: dict[str, Any] = {"stream": LlamaDecoderLayer, "device": device} if streams else {}
        attached = spillway.attach(
            model,
            policy=spillway.Recompute(offload="inputs"),
            blocks=LlamaDecoderLayer,
            min_bytes="16KiB",
            session=session,
            **more,
        )
        print(f"{len(attached.streamed)} of {len(attached.blocks)} blocks have their weights in CPU memory: ", end="")
        found = train(model, options, device)
        attached.remove()
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--words", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--weights", help="a folder with a config and safetensors files")
    parser.add_argument("--on-disk", action="store_true", help="leave the weights in the files of --weights")
    parser.add_argument("--alone", action="store_true", help="leave out the run with all weights on the GPU")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if not options.alone and device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    streamed = run(options, device, streams=True)
    if not options.alone:
        same = all(map(torch.equal, streamed, run(options, device, streams=False)))
        print(f"losses and adapters are {'equal, bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
