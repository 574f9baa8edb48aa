"""The Llama of transformers, with random weights: its decoder layers are found and attached automatically.

    python examples/llama_transformers.py                          # small, on the CPU or a GPU
    python examples/llama_transformers.py --budget 60GiB --layers 32 --width 4096 --heads 32 --tokens 8192 --steps 8

Without a budget, each layer offloads its input and recomputes the rest. Losses and weights are compared with those of a
plain run, bit for bit. ``--alone`` leaves that run out, if it would not fit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import spillway

VOCABULARY = 512


def make_model(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    """Always with the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=max(options.heads // 4, 1),
        max_position_embeddings=options.tokens,
        # A recomputed layer would write its keys and values into the cache a second time.
        use_cache=False,
    )
    with device:
        return LlamaForCausalLM(config).train()


def train(model: LlamaForCausalLM, *, tokens: int, steps: int) -> list[Tensor]:
    """Some steps on noise: the losses, and the weights after them."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = torch.randint(VOCABULARY, (1, tokens), generator=generator).to(model.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(weight.detach() for weight in model.parameters())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help="memory budget of a step, such as 60GiB")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="in the one sequence of a batch")
    parser.add_argument("--steps", type=int, default=3, help="a plan is active from the fifth on")
    parser.add_argument("--window", default="256KiB", help="in-flight limit, in bytes")
    parser.add_argument("--alone", action="store_true", help="leave out the plain run")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        # On a GPU, some backward kernels add in any order, so two plain runs would differ.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    plain = None
    if not options.alone:
        plain = train(make_model(options, device), tokens=options.tokens, steps=options.steps)
    how: dict[str, Any] = {"policy": spillway.Recompute(offload="inputs"), "min_bytes": "64KiB"}
    if options.budget is not None:
        how = {"budget": options.budget}
    with spillway.Session(window=options.window) as session:
        model = make_model(options, device)
        with spillway.attach(model, session=session, **how) as attached:
            ours = train(model, tokens=options.tokens, steps=options.steps)
            stats = attached.stats()
            if options.budget is not None:
                print(attached.explain())
    print(
        f"{len(attached.blocks)} layers, {attached.blocks[0]} to {attached.blocks[-1]}: in the last step "
        f"{stats.offloaded_bytes / 2**20:.1f} MiB were offloaded "
        f"and {stats.recomputed_bytes / 2**20:.1f} MiB recomputed"
    )
    if plain is not None:
        same = all(map(torch.equal, ours, plain))
        print(f"losses and weights are {'equal, bit for bit' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
