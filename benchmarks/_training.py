"""Times training steps of a Llama stack: a method between two measurements of the baseline, in one process."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import spillway
from _llama import make_stack
from spillway.profiler.meter import meter_of
from step import METHODS, MIXTURE, Way

KEEP = "keep"
ATTACHED: dict[str, Callable[[], spillway.Recompute]] = {
    "attach(inputs offloaded)": lambda: spillway.Recompute(offload="inputs"),
    "attach(attention kept)": lambda: spillway.Recompute(save="attention", offload="inputs"),
    "attach(mixture)": lambda: spillway.Recompute(offload=MIXTURE),
}
"""Options of one call that attaches to all layers. The mixture is the one that ``step.py`` applies by hand."""

WARMUP = 3
"""Steps before the first measured one, of a method, and of the baseline when nothing ran before."""

Steps = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Times and peak of some steps."""

    step_seconds: float
    """Seconds of a step, from steps that are timed together: the median of such runs."""
    step_min: float
    step_max: float
    single_seconds: float
    """Seconds of a step with a synchronisation before and after it: the median."""
    peak_bytes: int
    """The peak of allocated memory, above parameters and gradients."""


class Training:
    """A stack with its gradients and a batch.

    Args:
        options: ``shape``, ``layers``, ``seq``, ``device``, ``window``, and how much is timed: ``runs``, ``together``.
        layers: so many, and not ``options.layers``.
        tokens: so many, and not ``options.seq``.
    """

    def __init__(self, options: argparse.Namespace, *, layers: int | None = None, tokens: int | None = None) -> None:
        self.options = options
        self.device = torch.device("cpu") if options.device == "cpu" else torch.device(options.device, 0)
        tokens = options.seq if tokens is None else tokens
        layers = options.layers if layers is None else layers
        self.session = spillway.Session(window=options.window)
        self.session.use_as_default()
        self.stack = make_stack(options.shape, layers, tokens, self.device, torch.bfloat16)
        size = self.stack.layers[0].shape.hidden
        self.hidden = torch.randn(1, tokens, size, device=self.device, dtype=torch.bfloat16)
        self.ones = nn.Parameter(torch.ones(size, device=self.device, dtype=torch.bfloat16))
        self.parameters = [*self.stack.parameters(), self.ones]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        # Kernels are loaded, and workspaces made, which stay.
        few = min(tokens, 128)
        layer = self.stack.layers[0]
        layer(self.hidden[:, :few] * self.ones, self.stack.cos[:few], self.stack.sin[:few]).sum().backward()
        self.static_bytes = self.allocated()

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def step(self, way: Way = nullcontext) -> Tensor:
        """Forward, backward, and what follows: gradients stay where they are, and become zero. Gives the loss."""
        torch._foreach_zero_(self.gradients)
        with way():
            # As after an embedding: what the first layer is given is no leaf.
            loss = self.stack(self.hidden * self.ones).float().square().mean()
        loss.backward()
        return loss.detach()

    @contextmanager
    def by(self, method: str) -> Iterator[Steps]:
        """A step by this method, as long as the context lasts."""
        call = self.stack.call
        try:
            if method in ATTACHED:
                with spillway.attach(self.stack, policy=ATTACHED[method]()):
                    yield self.step
            else:
                way: Callable[[], AbstractContextManager[Any]] = METHODS[method](self.stack, self.options)
                yield lambda: self.step(way)
        finally:
            self.stack.call = call

    def plain(self, warmup: int = 1) -> Times | None:
        """Measure a few baseline steps, after others. ``None`` if they do not fit."""
        try:
            for _ in range(warmup):
                self.step()
            return self.times(self.step, runs=1, singles=1)
        except torch.OutOfMemoryError:
            pass
        self.empty()
        return None

    def times(self, step: Steps, *, runs: int | None = None, singles: int = 3) -> Times:
        """Measure steps after the warm-up."""
        # As trainers do: long-lived objects are frozen, so that no step pays for a full collection.
        gc.collect()
        gc.freeze()
        peak = 0
        if self.device.type == "cpu":
            # Its allocations are counted by a profiler, so in a step that is not timed.
            meter = meter_of(self.device)
            meter.mark()
            step()
            meter.mark()
            begin, end = meter.finish()
            peak = end.peak - begin.level
        else:
            torch.accelerator.synchronize(self.device)
            torch.accelerator.reset_peak_memory_stats(self.device)
        together = [self._timed(step, self.options.together) for _ in range(runs or self.options.runs)]
        alone = [self._timed(step, 1) for _ in range(singles)]
        if self.device.type != "cpu":
            peak = torch.accelerator.max_memory_allocated(self.device) - self.static_bytes
        gc.unfreeze()
        return Times(statistics.median(together), min(together), max(together), statistics.median(alone), peak)

    def _timed(self, step: Steps, count: int) -> float:
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        self.synchronize()
        return (time.perf_counter() - begin) / count

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def allocated(self) -> int:
        """Bytes at rest; of the CPU, those of the process that are resident."""
        if self.device.type == "cpu":
            return int(psutil.Process().memory_info().rss)
        self.synchronize()
        return int(torch.accelerator.memory_allocated(self.device))

    def empty(self) -> None:
        """Free the memory of the last method, so that the next one starts as that one did."""
        gc.collect()
        if self.device.type != "cpu":
            self.synchronize()
            torch.accelerator.empty_cache()
