"""The training that ``spillway demo`` repeats in several ways: a small GPT in plain PyTorch."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.cli.bench import CHILD_ENVIRONMENT, PeakMeter
from spillway.errors import BudgetError, SpillwayError, UsageError
from spillway.runtime.process_memory import set_malloc
from spillway.units import format_bytes, format_seconds, parse_bytes

WAYS = {"baseline": 3, "checkpoint": 3, "offload": 3, "planned": 11, "optimizer": 3}
"""The ways, each with its fewest steps. ``planned`` finds its plan in the first five."""
_HEAD_WIDTH = 64
_PLANNED_STEPS = 6
"""Steps that ``planned`` makes with its plan, at least."""
_EXTRA_STEPS = 16
"""Steps beyond those asked for that ``planned`` may take to find its plan."""
_MOST_TEXT = 16 << 20
_NO_TEXT = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
"""Folders of the standard library that are not trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training, the same in every way."""

    device: str
    layers: int
    width: int
    sequence: int
    batch: int
    seed: int = 0
    data: str | None = None
    """A file or folder to train on; ``None``: the Python standard library's own source."""
    window: str | None = None
    """In-flight limit of ``offload``; ``None``: Spillway's default."""
    budget: str | None = None
    """Budget of ``planned``; ``None``: half-way to the smallest."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UsageError(f"width: got {self.width}, expected a multiple of {_HEAD_WIDTH}")
        for name, size in (("window", self.window), ("budget", self.budget)):
            if size is not None:
                parse_bytes(size, what=name)

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(1, self.width // _HEAD_WIDTH)


Row = dict[str, Any]
"""The result of one way, with the keys of the JSON file. Sizes are bytes."""


class Block(nn.Module):
    """One layer: attention, then a feed-forward network. Nothing in the model knows of Spillway."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        parts = self.project_in(self.attention_norm(x)).chunk(3, dim=-1)
        query, key, value = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        out: Tensor = x + self.feed_forward(self.forward_norm(x))
        return out


class GPT(nn.Module):
    """Predicts the next byte. ``checkpoint_blocks`` recomputes each block in backward, as most training code offers."""

    def __init__(self, *, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.checkpoint_blocks = False
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of ``targets`` after ``tokens``, both ``(batch, sequence)`` of byte values."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint_blocks else block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def load_text(path: Path | None = None) -> bytes:
    """The first 16 MiB of a file, or of a folder's files in alphabetical order; ``None``: the standard library."""
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir() and not root.is_file():
        raise UsageError(f"data: {root} is neither a file nor a folder; give one with --data")
    text = b""
    for file in sorted(root.rglob("*" if path else "*.py")) if root.is_dir() else [root]:
        parts = file.relative_to(root).parts
        if any(part.startswith(".") or (path is None and part in _NO_TEXT) for part in parts) or not file.is_file():
            continue
        try:
            with file.open("rb") as opened:
                text += opened.read(_MOST_TEXT - len(text))
        except OSError as error:
            raise UsageError(f"data: cannot read {file}: {error.strerror}; give text with --data") from error
    if not text:
        raise UsageError(f"data: found no text in {root}; give a file or folder with --data")
    return text


def batches(text: bytes, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the tokens that follow them, drawn at random: the same ones for the same seed."""
    if len(text) <= settings.sequence:
        raise UsageError(
            f"data: got {format_bytes(len(text))} of text, expected more than a sequence of {settings.sequence} bytes; "
            f"give more text with --data or a smaller --sequence"
        )
    values, draws = torch.frombuffer(bytearray(text), dtype=torch.uint8), torch.Generator().manual_seed(settings.seed)
    span = torch.arange(settings.sequence + 1)
    while True:
        starts = torch.randint(len(text) - settings.sequence, (settings.batch, 1), generator=draws)
        rows = values[starts + span].long().to(settings.device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Training:
    """One way, in this process. Spillway appears only in ``__init__``, and in :meth:`_step` as a context."""

    def __init__(self, way: str, settings: Settings, say: Callable[[str], object] = lambda line: None) -> None:
        self.way, self.settings, self.say, self.device = way, settings, say, torch.device(settings.device)
        if self.device.type == "cpu":
            # In every way, so that the peak is the training's and not that of freed memory.
            set_malloc()
        else:
            # Some GPU kernels add in a different order in each run.
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type != "cpu")
        self.batches = batches(load_text(None if settings.data is None else Path(settings.data)), settings)
        # The highest rate at which this model settles without a warm-up.
        options: dict[str, Any] = {"lr": 1e-3 * min(1.0, 384 / settings.width), "betas": (0.9, 0.95)}
        # One step of a tiny model starts libraries and thread pools.
        tiny = self._model(replace(settings, layers=1, width=_HEAD_WIDTH, sequence=16))
        tokens = torch.zeros(2, 16, dtype=torch.int64, device=self.device)
        with self.autocast:
            loss = tiny(tokens, tokens)
        loss.backward()
        torch.optim.AdamW(tiny.parameters(), **options).step()
        self.model = self._model(settings)
        self.model.checkpoint_blocks = way == "checkpoint"
        self.offload = spillway.offload(window=settings.window) if way == "offload" else None
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        if way == "optimizer":
            if self.device.type == "cpu":
                # The baseline's kernels there, so that the two are comparable.
                options["fused"] = False
            self.optimizer = spillway.OffloadedOptimizer(self.model.parameters(), torch.optim.AdamW, **options)
        self.attached: spillway.Attached | None = None
        if way == "planned":
            budget = parse_bytes(settings.budget, what="budget") if settings.budget else self._middle_budget()
            self.attached = spillway.attach(self.model, budget=budget)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.settled: list[bool] = []
        """For each step, whether later steps run as it did. Steps that look for a plan do not."""
        self.hash = hashlib.sha256()
        self.meter = PeakMeter(self.device)
        gc.collect()
        self.baseline = self.meter.start()

    def _model(self, settings: Settings) -> GPT:
        torch.manual_seed(settings.seed)
        with self.device:
            return GPT(layers=settings.layers, width=settings.width, heads=settings.heads, sequence=settings.sequence)

    def _middle_budget(self) -> int:
        """The middle between the peaks of the plan that keeps everything and of the smallest plan.

        The profile's optimizer has no state yet, so AdamW's is added. On the CPU the budget is at least 64 MiB above
        the smallest peak: resident memory includes the memory of profiling and planning.
        """
        tokens = torch.zeros(self.settings.batch, self.settings.sequence, dtype=torch.int64, device=self.device)
        with self.autocast:
            profile = spillway.profile(self.model, (tokens, tokens))
        most = spillway.plan(profile, budget=1 << 60, allow={"keep"}).predicted_peak
        try:
            least = spillway.plan(profile, budget=1).predicted_peak
        except BudgetError as error:
            least = error.least
        state = 2 * sum(parameter.nbytes for parameter in self.model.parameters())
        return state + max((most + least) // 2, least + (64 << 20 if self.device.type == "cpu" else 0))

    def run(self, steps: int, limit: float | None = None) -> Row:
        """Train for so many steps.

        ``planned`` continues until six steps had its plan, for at most 16 more. With a limit in seconds, training ends
        earlier if the next step would exceed it.
        """
        begin = self._now()
        for done in range(1, steps + _EXTRA_STEPS + 1):
            self._step()
            if done == 1:
                self._hash_gradients()
            is_late = limit is not None and (self._now() - begin) * (done + 1) / done > limit
            is_enough = done >= steps or (is_late and done >= WAYS[self.way])
            if is_enough and (self.attached is None or sum(self.settled) >= _PLANNED_STEPS):
                break
        self._hash_gradients()
        return self._row()

    def _step(self) -> None:
        """Forward, backward and update."""
        tokens, targets = next(self.batches)
        begin = self._now()
        self.optimizer.zero_grad(set_to_none=True)
        with self.offload or contextlib.nullcontext(), self.autocast:
            loss: Tensor = self.model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.seconds.append(self._now() - begin)
        self.settled.append(self.attached is None or self.attached.stage == "active")
        self.losses.append(loss.item())
        add_to_hash(self.hash, [loss])
        taken = format_seconds(self.seconds[-1])
        self.say(f"{self.way:<11} step {len(self.losses)}   loss {self.losses[-1]:.3f}   {taken} a step")

    def _hash_gradients(self) -> None:
        # Clones, since gradients that OffloadedOptimizer has offloaded cannot be viewed.
        add_to_hash(self.hash, (each.grad.clone() for each in self.model.parameters() if each.grad is not None))

    def _row(self) -> Row:
        source = self.attached or self.offload
        moved = 0 if source is None else source.stats().offloaded_bytes
        if isinstance(self.optimizer, spillway.OffloadedOptimizer):
            moved = self.optimizer.stats().sent_bytes
        seconds = counted_seconds(self.seconds, self.settled)
        middle, peak = statistics.median(seconds), self.meter.peak()
        # Profiling resets the allocator's peak, and the last step may still belong to the search.
        if self.attached is not None and self.attached.measured is not None and not self.settled[-1]:
            peak = max(peak, self.attached.measured.peak_bytes)
        return {
            "way": self.way,
            "step_seconds": middle,
            "tokens_per_second": self.settings.batch * self.settings.sequence / middle,
            "peak_bytes": peak,
            "activation_peak_bytes": peak - self.baseline,
            "moved_bytes": moved,
            "loss": self.losses[-1],
            "identical": None,
            "losses": self.losses,
            "all_step_seconds": self.seconds,
            "baseline_bytes": self.baseline,
            "peak_source": self.meter.source,
            "fingerprint": self.hash.hexdigest(),
            "counted_steps": len(seconds),
            "budget_bytes": None if self.attached is None else self.attached.budget,
            "note": "" if self.attached is None else self._note(self.attached),
        }

    def _note(self, attached: spillway.Attached) -> str:
        plan, budget = attached.plan, f"planned: a budget of {format_bytes(attached.budget or 0)}"
        if plan is None or not self.settled[-1]:
            return f"{budget}. {len(self.losses)} steps found no plan; give more --steps."
        plain = sum(block.plain for block in plan.blocks)
        return (
            f"{budget}. {self.settled.count(False)} steps found the plan. It leaves {plain} of "
            f"{len(plan.blocks)} blocks alone, offloads {format_bytes(plan.sent_bytes)}, and predicts a peak of "
            f"{format_bytes(plan.predicted_peak)}."
        )

    def _now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def counted_seconds(seconds: Sequence[float], settled: Sequence[bool]) -> list[float]:
    """Times of the settled steps but the first of them, or else of all steps but the first."""
    steady = [each for each, is_settled in zip(seconds, settled, strict=True) if is_settled]
    return steady[1:] or steady or list(seconds[1:] or seconds)


def add_to_hash(sha: Any, tensors: Iterable[Tensor]) -> None:
    """Add the exact bytes of tensors to a hash of :mod:`hashlib`."""
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def train(connection: Connection, way: str, settings: Settings, steps: int, limit: float | None) -> None:
    """Train in one way, and send a line for each step, then the row or the error.

    It runs in a process of its own, which ends when its parent is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
    for name, value in CHILD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        connection.send(Training(way, settings, connection.send).run(steps, limit))
    except SpillwayError as error:
        connection.send(error)
    except BrokenPipeError:
        return
