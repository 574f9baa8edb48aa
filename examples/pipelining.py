"""A pipeline of two or more processes, with and without Spillway: losses and weights compared, offloaded bytes shown.

    torchrun --nproc-per-node 2 examples/pipelining.py
    torchrun --nproc-per-node 4 examples/pipelining.py --schedule Interleaved1F1B
    torchrun --nproc-per-node 2 examples/pipelining.py --budget 1GiB --steps 7

Each process uses one GPU, which offloads to CPU memory, or the CPU, which offloads to disk.
"""

from __future__ import annotations

import argparse
import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional

import spillway
from spillway.integrations.pipelining import offload_stages

BLOCKS, WIDTH, ROWS = 4, 256, 512
IN_A_LOOP = {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}
IN_A_V = {"ZBVZeroBubble", "DualPipeV"}


class Block(nn.Module):
    """A feed-forward layer, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_stages(schedule: str, device: torch.device) -> list[PipelineStage]:
    """This rank's stages, in the schedule's order, with the same weights each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    indices, count = [rank], ranks
    if schedule in IN_A_LOOP:
        indices, count = [rank, rank + ranks], 2 * ranks
    elif schedule in IN_A_V:
        indices, count = [rank, 2 * ranks - 1 - rank], 2 * ranks
    stages = []
    for index in indices:
        torch.manual_seed(index)
        part = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        stages.append(PipelineStage(part.to(device), index, count, device))
    return stages


def train(name: str, stages: list[PipelineStage], micro_batches: int, steps: int) -> list[Tensor]:
    """A few steps: this rank's weights after them, and the losses on the last stage."""
    kind: Any = getattr(schedules, f"Schedule{name}")
    single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, micro_batches, loss_fn=functional.mse_loss)
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    results: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(step)
        batch, target = torch.randn(2, micro_batches * ROWS, WIDTH, device=stages[0].device)
        # The first stage gets the inputs, the last one the targets and the losses.
        losses: list[Tensor] = []
        more = {"target": target, "losses": losses} if last else {}
        schedule.step(*((batch,) if first else ()), **more)
        results += [loss.detach() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    return results + [weight.detach() for weight in weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1F1B", help="as in ScheduleGPipe, Schedule1F1B, ScheduleZBVZeroBubble")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="the sixth is the first with a plan")
    parser.add_argument("--budget", help="memory budget of each rank, such as 1GiB")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    dist.init_process_group()
    if accelerator is not None:
        device = torch.device(accelerator.type, dist.get_rank() % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)

    results = []
    for ours in (False, True):
        stages = make_stages(arguments.schedule, device)
        context: AbstractContextManager[Any] = contextlib.nullcontext()
        if ours and arguments.budget is not None:
            context = offload_stages(stages, budget=arguments.budget)
        elif ours:
            # The first rank has the most chunks before their backward, and offloads the most of each.
            context = offload_stages(stages, nbytes=("16MiB", "8MiB"), window="2MiB")
        with context as offloaded:
            results.append(train(arguments.schedule, stages, arguments.micro_batches, arguments.steps))
    same = all(map(torch.equal, *results))
    stats = offloaded.stats()
    if offloaded.plans:
        print(f"rank {dist.get_rank()} ({offloaded.stage}): {offloaded.explain()}", flush=True)
    print(
        f"rank {dist.get_rank()}: of {stats.saved_bytes >> 20} MiB that the last step saved, "
        f"{stats.offloaded_bytes >> 20} MiB were offloaded and {stats.reloaded_bytes >> 20} MiB reloaded; "
        f"losses and weights are {'equal' if same else 'DIFFERENT'}",
        flush=True,
    )
    spillway.Session.default().close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
