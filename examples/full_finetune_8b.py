"""All weights of a Llama trained on one GPU, with weights, gradients, fp32 master weights and moments in CPU memory.

    python examples/full_finetune_8b.py                     # small, on the CPU or a GPU
    python examples/full_finetune_8b.py --layers 32 --width 4096 --words 128256 --tokens 8192 --alone
    python examples/full_finetune_8b.py --weights path/to/Llama-3.1-8B --tokens 8192 --alone --budget 24GiB --steps 12

Without --budget, all layers are streamed, and recomputed. By count, the last two need 130 GiB of CPU memory. It prints
tokens per second and peaks of memory. Without --alone it trains once more, with all weights on the GPU, and compares
losses, norms and weights, bit for bit. It needs transformers, accelerate and safetensors.
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
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import spillway


def make_model(options: argparse.Namespace, session: spillway.Session, device: torch.device) -> Any:
    """A model on the CPU, with random weights or those of the files."""
    heads = max(options.width // 128, 4)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.width * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=min(heads // 2, 8),
        vocab_size=options.words,
    )
    if options.weights is None:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(options.weights)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    spillway.load_weights(model, options.weights, device=device, session=session)
    return model


def train(
    model: Any, optimizer: torch.optim.Optimizer, options: argparse.Namespace, device: torch.device
) -> list[Tensor]:
    """Some steps on random words: losses and norms of gradients."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(options.steps):
        if step == min(1, options.steps - 1):
            # The first step is slower.
            start, first = time.perf_counter(), step
        words = torch.randint(model.config.vocab_size, (1, options.tokens), generator=generator).to(device)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach().cpu(), norm.cpu()]
    seconds = time.perf_counter() - start
    print(f"{(options.steps - first) * options.tokens / seconds:.0f} tokens/s, loss {found[-2]:.4f}, {memory(device)}")
    return found


def memory(device: torch.device) -> str:
    """Peaks so far."""
    on_gpu = 0 if device.type == "cpu" else torch.accelerator.max_memory_allocated(device)
    on_cpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"peaks: {on_gpu / 2**30:.2f} GiB of the GPU, {on_cpu / 2**30:.2f} GiB of CPU memory"


def run(options: argparse.Namespace, device: torch.device, *, streams: bool) -> list[Tensor]:
    """Losses, norms, and weights in the end."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
    with spillway.Session() as session:
        model = make_model(options, session, device)
        if not streams:
            model.to(device)
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-4, step_on="gpu", session=session
        )
        more: dict[str, Any] = {"stream": LlamaDecoderLayer, "device": device, "optimizer": optimizer}
        if streams and options.budget is not None:
            more |= {"stream": "auto", "budget": options.budget}
        attached = spillway.attach(
            model, blocks=LlamaDecoderLayer, min_bytes="16KiB", session=session, **(more if streams else {})
        )
        # Clipping needs all gradients. So parameters step beside the next forward, block by block.
        optimizer.overlap_forward(model)
        print(f"{len(attached.streamed)} of {len(attached.blocks)} blocks have their weights in CPU memory: ", end="")
        found = train(model, optimizer, options, device)
        optimizer.synchronize()
        if attached.plan is not None:
            print(f"the weights of {len(attached.plan.resident)} blocks stay on the GPU by the plan:")
            print("\n".join(attached.explain().splitlines()[:3]))
        attached.remove()
        optimizer.close()
        return [*found, *(each.detach().cpu() for each in model.parameters())] if not options.alone else []


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--words", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256, help="of each step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--weights", help="a folder with a config and safetensors files")
    parser.add_argument("--budget", help='of GPU memory, for a plan, such as "24GiB"; it takes about 9 steps')
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
        print(f"losses, norms and weights are {'equal, bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
