"""ResNet-50 that offloads a ratio of its saved tensors: losses and weights compared with those of a plain run.

    python examples/resnet50.py                       # on a GPU, if there is one
    python examples/resnet50.py --ratio 0.75 --haiscale
    python examples/resnet50.py --images 8 --size 64 --width 16   # small enough for a CPU

A GPU offloads to CPU memory, and the CPU to disk. ``--haiscale`` uses haiscale's ``CPUOffload``, which offloads to CPU
memory only.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from spillway.compat.haiscale import CPUOffload

TAG = "stages"


class Bottleneck(nn.Module):
    """Narrow, look around, widen, and add what came in."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = 4 * width
        self.narrow, self.norm1 = nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width)
        self.look, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.widen, self.norm3 = nn.Conv2d(width, leaving, 1, bias=False), nn.BatchNorm2d(leaving)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or entering != leaving:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.narrow(x)), inplace=True)
        y = functional.relu(self.norm2(self.look(y)), inplace=True)
        return functional.relu(self.norm3(self.widen(y)).add_(self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """ResNet-50, or one of its shape.

    Args:
        around: makes the context that the four stages run in.
        depths: how many bottlenecks each stage has.
        width: channels of the first stage, within its bottlenecks; each further stage has twice as many.
        classes: how many there are.
    """

    def __init__(
        self,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        *,
        depths: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.around = around
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.ModuleList()
        entering = width
        for stage, depth in enumerate(depths):
            inner = width << stage
            for place in range(depth):
                self.stages.append(Bottleneck(entering, inner, 2 if stage > 0 and place == 0 else 1))
                entering = 4 * inner
        self.head = nn.Linear(entering, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        with self.around():
            for bottleneck in self.stages:
                x = bottleneck(x)
        return self.head(x.mean((2, 3)))


def train(model: ResNet, *, images: int, size: int, steps: int) -> list[Tensor]:
    """A few steps on noise: the losses, and the weights and statistics after them."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        batch = torch.randn(images, 3, size, size, generator=generator).to(device)
        labels = torch.randint(model.head.out_features, (images,), generator=generator).to(device)
        loss = functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(tensor.detach() for tensor in model.state_dict().values())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.5, help="share of the stages' bytes, from 0 to 1")
    parser.add_argument("--haiscale", action="store_true", help="use haiscale's CPUOffload")
    parser.add_argument("--images", type=int, default=32, help="in a batch")
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--depths", type=int, nargs=4, default=(3, 4, 6, 3), help="bottlenecks of each stage")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--window", help="of the session, in bytes or as 64MiB")
    options = parser.parse_args(arguments)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    last: list[spillway.offload] = []

    def around(ratio: float, haiscale: bool) -> AbstractContextManager[Any]:
        context = CPUOffload(ratio, TAG) if haiscale else spillway.offload(ratio=ratio, tag=TAG, min_bytes=0)
        last[:] = [context.hook if isinstance(context, CPUOffload) else context]
        return context

    # Without this, two plain runs would differ.
    with torch.backends.cudnn.flags(deterministic=True), spillway.Session(window=options.window) as session:
        session.use_as_default()
        results = []
        for make in (contextlib.nullcontext, partial(around, options.ratio, options.haiscale)):
            torch.manual_seed(0)
            model = ResNet(make, depths=options.depths, width=options.width).to(device)
            results.append(train(model, images=options.images, size=options.size, steps=options.steps))
        stats = last[0].stats()
    same = all(map(torch.equal, *results))
    print(
        f"of {stats.saved_bytes / 2**20:.1f} MiB that the stages saved in the last step, "
        f"{stats.offloaded_bytes / 2**20:.1f} MiB were offloaded and {stats.reloaded_bytes / 2**20:.1f} MiB reloaded; "
        f"losses, weights and statistics are {'equal, bit for bit' if same else 'DIFFERENT'}"
    )
    for note in stats.notes:
        print(f"note: {note}")


if __name__ == "__main__":
    main()
