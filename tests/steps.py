"""What several tests share: small models, a step with and without Spillway, and what must be left after it."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack

import spillway
from spillway.runtime.device import DeviceRuntime
from spillway.saved_tensors.hooks import SavedState

KiB = 2**10
MiB = 2**20


class Block(nn.Module):
    """A normalised feed-forward layer, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """Two convolutions with batch norm around a shortcut, as in a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(y)))


def small_model(layers: int = 3, width: int = 32) -> nn.Sequential:
    """Blocks, and a head; the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 8))


def small_batch(width: int = 32, rows: int = 64) -> Tensor:
    """``(rows, width)``: an activation of the model has 8 KiB."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def small_resnet() -> nn.Sequential:
    """A ResNet with a stem, max pooling, four residual blocks and a classifier."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    return nn.Sequential(
        *stem, *(Residual(8) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


@dataclass(frozen=True)
class Result:
    """A loss, and the gradients of all parameters."""

    loss: Tensor
    gradients: list[Tensor]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        assert isinstance(other, Result)
        pairs = zip((self.loss, *self.gradients), (other.loss, *other.gradients), strict=True)
        return all(torch.equal(mine, yours) for mine, yours in pairs)


def step(model: nn.Module, x: Tensor, context: AbstractContextManager[Any] | None = None) -> Result:
    """One forward inside the context, and one backward outside of it."""
    model.zero_grad()
    with context if context is not None else nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    return Result(loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])


def failing(error: type[BaseException], run: Callable[[], object], *, match: str | None = None) -> str:
    """The message with which ``run`` fails. No traceback stays behind that could hold its graph."""
    with pytest.raises(error, match=match) as caught:
        run()
    message = str(caught.value)
    del caught
    gc.collect()
    return message


def assert_no_hook() -> None:
    """Nothing of ours is installed in torch, in this thread."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not module_hooks._global_forward_pre_hooks
    assert not module_hooks._global_forward_hooks
    assert _get_current_function_mode_stack() == []


def assert_nothing_left(session: spillway.Session) -> None:
    """No handle, no byte, no hook. Writes that were queued for a dropped tensor are waited for."""
    gc.collect()
    for runtime in session._runtimes.values():
        quiesce(runtime)
    assert session.used_bytes == (0, 0)
    assert len(session.of(SavedState).identity) == 0
    for runtime in session._runtimes.values():
        counts = runtime.mover.counts()
        assert counts.pop("compute streams") >= 0
        assert not any(counts.values()), counts
    assert_no_hook()


def quiesce(runtime: DeviceRuntime) -> None:
    """Wait until the tasks and lanes of a CPU runtime are done with what they have."""
    threads = 2
    meeting = threading.Barrier(threads)

    def meet() -> None:
        meeting.wait(60)

    # Tasks start in the order in which they came: when all threads have met, none is at work on an older one.
    for event in [runtime.backend.run(meet) for _ in range(threads)]:
        event.synchronize()
    for lane in runtime.mover.streams:
        runtime.backend.record(lane).synchronize()
    with runtime.mover.exclusive():
        pass  # whoever lets go reads what finalisers left to be done


@contextmanager
def steady_descriptors() -> Iterator[None]:
    """No descriptor more is open afterwards."""
    before = open_files()
    yield
    gc.collect()
    after = open_files()
    assert len(after) <= len(before), (before, after)


def open_files() -> list[str]:
    """What the open descriptors of this process stand for, as far as it is a file with a place on a disk.

    Sockets, pipes and the like are not ours, and come and go with the threads of others (a process group's store).
    """
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed, as the listing's own is
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(target for target in targets if target.startswith("/") and not target.startswith(("/proc", "/dev")))
