"""One training, one way, in this process: what a child of the demo does.

It waits for an order before every step, so that the parent can let the ways take turns, and end all of them after the
same number of steps.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from spillway.demo.measure import Fingerprint, meter_for
from spillway.demo.model import GPT
from spillway.demo.records import HEAD_WIDTH, Message, Order, Outcome, Settings, Started, Step
from spillway.demo.text import Batches, load_text
from spillway.demo.ways import WAYS, Way
from spillway.runtime.malloc import set_malloc


def train(settings: Settings, say: Callable[[Message], None], hear: Callable[[], Order]) -> None:
    """Train as ``settings`` tell and as ``hear`` orders; ``say`` what happens.

    That is :class:`Started`, a :class:`Step` for every order, and the :class:`Outcome` after the last.

    Raises:
        UsageError: if the shape is none that a model can have, or the text cannot be read.
    """
    settings.check()
    device = torch.device(settings.device)
    if device.type == "cpu":
        # For every way alike: its peak is then that of the training.
        set_malloc()
    _make_deterministic(device)
    text = load_text(None if settings.data is None else Path(settings.data))
    batches = Batches(text, batch=settings.batch, sequence=settings.sequence, seed=settings.seed, device=device)
    _warm_up(settings, device)
    way = WAYS[settings.way](settings, _make_model(settings, device))
    meter = meter_for(device)
    gc.collect()
    baseline = meter.start()
    say(Started(parameters=_count_parameters(way.model), text_bytes=len(text)))

    losses, seconds, fingerprint, settled = _run_steps(way, batches, say, hear)
    counted = counted_seconds(seconds, settled)
    middle = statistics.median(counted)
    say(
        Outcome(
            step_seconds=middle,
            all_step_seconds=seconds,
            tokens_per_second=settings.tokens / middle,
            peak_bytes=max(meter.peak(), way.checked_peak()),
            baseline_bytes=baseline,
            peak_source=meter.source,
            moved_bytes=way.moved_bytes(),
            losses=losses,
            fingerprint=fingerprint,
            counted_steps=len(counted),
            budget_bytes=way.budget_bytes(),
            note=way.note(),
        )
    )


def counted_seconds(seconds: list[float], settled: list[bool]) -> list[float]:
    """Those of the steps that were done as all later ones are, but for the first of them.

    That makes pools and caches, or takes leave of what has watched the steps before. If there is none, all steps count,
    but for the first.

    Args:
        seconds: of each step; at least one.
        settled: of each step, whether it was done as all later ones are.
    """
    steady = [each for each, is_settled in zip(seconds, settled, strict=True) if is_settled]
    return steady[1:] or steady or seconds[1:] or seconds


def _run_steps(
    way: Way, batches: Batches, say: Callable[[Message], None], hear: Callable[[], Order]
) -> tuple[list[float], list[float], str, list[bool]]:
    """Losses, seconds, a fingerprint, and of each step whether it was done as all later ones are."""
    losses: list[float] = []
    seconds: list[float] = []
    settled: list[bool] = []
    fingerprint = Fingerprint()
    last = False
    while not last:
        last = hear() is Order.LAST_STEP
        tokens, targets = batches.draw()
        before = _now(tokens.device)
        loss = way.step(tokens, targets)
        seconds.append(_now(tokens.device) - before)
        settled.append(way.is_settled())
        losses.append(loss.item())
        fingerprint.add([loss])
        if last or len(losses) == 1:
            fingerprint.add(way.gradients())
        say(Step(index=len(losses) - 1, loss=losses[-1], seconds=seconds[-1], settled=settled[-1]))
    return losses, seconds, fingerprint.text(), settled


def _make_model(settings: Settings, device: torch.device) -> GPT:
    torch.manual_seed(settings.seed)
    with device:
        return GPT(layers=settings.layers, width=settings.width, heads=settings.heads, sequence=settings.sequence)


def _warm_up(settings: Settings, device: torch.device) -> None:
    # A step of a tiny model, the plain way: code is read from disk, thread pools and libraries are started. That is
    # memory and time of the process rather than of a step, and would fall to the first step of every way.
    tiny = replace(settings, layers=1, width=HEAD_WIDTH, sequence=16, batch=2)
    tokens = torch.zeros(tiny.batch, tiny.sequence, dtype=torch.int64, device=device)
    Way(tiny, _make_model(tiny, device)).step(tokens, tokens)


def _make_deterministic(device: torch.device) -> None:
    # Kernels on the CPU are. On accelerators some add in the order in which threads arrive (attention's backward), and
    # no two runs of plain PyTorch would agree with each other.
    if device.type != "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _count_parameters(model: GPT) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
