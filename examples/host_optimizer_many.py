"""An optimizer on the CPU with accumulated, ragged micro-batches on several ranks, compared with hand-written loops.

    torchrun --nproc-per-node 2 examples/host_optimizer_many.py --wrap fsdp  # or ddp

It compares every bit, on the CPUs of one machine, or on as many GPUs as there are processes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import spillway

WIDTH, LAYERS, WINDOWS, MICRO, MAX_NORM = 128, 4, 4, 3, 0.5
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
# The gradients of a step are divided by this many words. Sharded gradients are offloaded in backward, and their norm is
# taken before that and scaled later: the bits are those of a norm taken later only if the factor is a power of two.
WORDS = {"fsdp": 1024, "ddp": 1000}


def build(wrap: str, device: torch.device) -> Any:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)).to(device)
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in blocks:
        fully_shard(block)
    return fully_shard(model)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def windows(words: int, device: torch.device) -> list[list[Tensor]]:
    """This rank's micro-batches: one row each, of a length of its own. Those of all ranks together have ``WORDS``."""
    everybody, mine = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(WINDOWS):
        cuts = 1 + torch.randperm(words - 1, generator=everybody)[: MICRO * dist.get_world_size() - 1].sort().values
        lengths = [end - start for start, end in itertools.pairwise([0, *cuts.tolist(), words])]
        own = lengths[dist.get_rank() :: dist.get_world_size()]
        found.append([torch.randint(256, (1, length + 1), generator=mine).to(device) for length in own])
    return found


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Summed, not averaged: the number of words is known at the end of the step."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def rehearse(model: nn.Module, tokens: Tensor) -> None:
    """A backward without a step. After the first norm, norms are taken on the GPU, not on the CPU."""
    loss_of(model, tokens).backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    model.zero_grad()


def written_out(model: Any, step_on: str, data: list[list[Tensor]]) -> list[list[Tensor]]:
    rehearse(model, data[0][0])
    parameters = list(model.parameters())
    there = parameters if step_on == "cpu" else []
    pairs = [(each, nn.Parameter(local(each).detach().to("cpu", copy=True))) for each in there]
    optimizer = torch.optim.AdamW([twin for _, twin in pairs] or parameters, **ADAMW)
    losses, norms = [], []
    for window in data:
        words = torch.zeros((), device=window[0].device)
        for tokens in window:
            last, sharded = tokens is window[-1], isinstance(model, FSDPModule)
            if sharded:
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or sharded else model.no_sync():
                losses.append(loss_of(model, tokens))
                losses[-1].backward()
            words += tokens.numel() - 1
        dist.all_reduce(words)
        for parameter in parameters:
            local(parameter.grad).mul_(dist.get_world_size() / words.item())  # DDP and FSDP2 average over ranks
        norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        for parameter, twin in pairs:
            twin.grad = local(parameter.grad).to("cpu")
        optimizer.step()
        for parameter, twin in pairs:
            local(parameter.data).copy_(twin.data)
        model.zero_grad()
    return [losses, norms, [local(each).detach() for each in parameters]]


def by_spillway(model: Any, step_on: str, data: list[list[Tensor]], session: spillway.Session) -> list[list[Tensor]]:
    attached = spillway.attach(model, policy=spillway.Recompute(offload="inputs"), min_bytes=1, session=session)
    options = {"step_on": step_on, "session": session, **ADAMW}
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, **options)
    rehearse(model, data[0][0])
    window = spillway.Accumulator(model, optimizer, steps=MICRO, normalize="tokens", max_norm=MAX_NORM)
    losses, norms = [], []
    for tokens in window(itertools.chain.from_iterable(data)):
        losses.append(loss_of(model, tokens))
        window.backward(losses[-1], weight=tokens.numel() - 1)
        if window.stepped:
            norms.append(window.last.gradient_norm.tensor)
    steps = optimizer.stats()
    if not (attached.stats().offloaded_bytes and (steps.stepped_on_host if step_on == "cpu" else steps.streamed)):
        sys.exit("nothing was offloaded, expected inputs of blocks, gradients and states")
    window.close()
    optimizer.close()
    return [losses, norms, [local(each).detach() for each in model.parameters()]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", choices=WORDS, default="fsdp")
    wrap = parser.parse_args().wrap
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group()
    data, wrong = windows(WORDS[wrap], device), []
    for step_on in ("cpu", "gpu"):
        plain = written_out(build(wrap, device), step_on, data)
        with spillway.Session(window=0) as session:
            ours = by_spillway(build(wrap, device), step_on, data, session)
        names = ("losses", "norms", "weights")
        differ = [name for name, *two in zip(names, ours, plain, strict=True) if not all(map(torch.equal, *two))]
        wrong += differ
        found = f"{', '.join(differ)} DIFFER" if differ else "losses, norms and weights are equal"
        print(f"rank {dist.get_rank()}: {wrap}, the step on the {step_on}: {found}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
