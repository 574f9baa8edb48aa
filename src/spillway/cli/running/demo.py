"""What ``spillway demo`` runs: a small GPT in plain PyTorch, trained in several ways that are compared bit for bit."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.cli.running.bench import CHILD_ENVIRONMENT, PeakMeter
from spillway.errors import BudgetError, SpillwayError, UsageError
from spillway.runtime.process_memory import malloc_setting, set_malloc
from spillway.runtime.system import cpu_name, device_name
from spillway.units import format_bytes, format_seconds, parse_bytes

WAYS = {"keep": 3, "checkpoint": 3, "offload": 3, "planned": 11, "optimizer": 3}
"""The ways, each with its fewest steps. ``planned`` finds its plan in the first five."""
NOT_COMPARED = "the CPU's kernels round differently from the GPU's, so its losses are only close to those of keep"
"""Why ``optimizer`` is not compared with ``keep`` on an accelerator."""
_HEAD_WIDTH = 64
_PLANNED_STEPS = 6
"""Steps that ``planned`` makes with its plan, at least."""
_EXTRA_STEPS = 16
"""Steps beyond those asked for that ``planned`` may take to find its plan."""
_START_SECONDS = 8.0
"""Time of one way that is not spent in steps: imports, text, hashes."""
_MOST_TEXT = 16 << 20
_NO_TEXT = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
"""Folders of the standard library that are not trained on."""


class DemoError(SpillwayError, RuntimeError):
    """The process of a way ended early, or its numbers differ from those of ``keep``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training, the same in every way.

    Raises:
        UsageError: for a shape that no model can have.
    """

    device: str
    layers: int
    width: int
    sequence: int
    batch: int
    seed: int = 0
    data: str | None = None
    """A file or folder to train on; ``None``: the Python standard library's own source."""
    window: str | None = None
    """In-flight limit of ``offload``; ``None``: Spillway's own."""
    budget: str | None = None
    """Budget of ``planned``; ``None``: see :meth:`Training._middle_budget`."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UsageError(f"width: got {self.width}, expected a multiple of {_HEAD_WIDTH}")

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(1, self.width // _HEAD_WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one way measured: a row of the table, and of the JSON file. Sizes are bytes."""

    way: str
    step_seconds: float
    """Median, without the first step and without the steps that found the plan."""
    tokens_per_second: float
    peak_bytes: int
    """GPU memory, or resident memory on the CPU."""
    activation_peak_bytes: int
    """The peak above ``baseline_bytes``: activations, gradients, optimizer state."""
    moved_bytes: int
    """Offloaded in the last step: activations, or gradients."""
    loss: float
    """Of the last step."""
    identical: bool | None = None
    """Whether all losses and gradients are bit for bit those of ``keep``; ``None``: not compared."""
    losses: list[float]
    all_step_seconds: list[float]
    baseline_bytes: int
    """In use just before the first step."""
    peak_source: str
    fingerprint: str
    """SHA-256 of every loss, and of all gradients of the first and of the last step."""
    counted_steps: int
    """How many steps ``step_seconds`` is the median of."""
    budget_bytes: int | None = None
    note: str = ""
    """A sentence for below the table."""


class Block(nn.Module):
    """One layer: attention, then a feed-forward network. Nothing in the model knows of Spillway."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
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


def choose_ways(names: str | None, device: str, steps: int) -> list[str]:
    """Ways by their names with commas between, in the order in which they run.

    ``None``: those for which so many steps are enough. On the CPU, ``optimizer`` is not among them: it gains nothing.

    Raises:
        UsageError: for an unknown name, or none at all.
    """
    if names is None:
        enough = [way for way, fewest in WAYS.items() if fewest <= max(steps, WAYS["keep"])]
        return [way for way in enough if way != "optimizer" or device != "cpu"]
    wanted = set(names.split(",")) - {""}
    if not wanted or wanted - WAYS.keys():
        got = ", ".join(sorted(wanted - WAYS.keys())) or "none"
        raise UsageError(f"ways: got {got}, expected some of {', '.join(WAYS)}; write them like --ways keep,offload")
    return [way for way in WAYS if way in wanted]


def load_text(path: Path | None = None) -> bytes:
    """The first 16 MiB of a file, or of a folder's files in alphabetical order; ``None``: the standard library.

    Raises:
        UsageError: if there is no text.
    """
    root = path or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir() and not root.is_file():
        raise UsageError(f"data: {root} is neither a file nor a folder; give one with --data")
    files = sorted(root.rglob("*" if path else "*.py")) if root.is_dir() else [root]
    text = b""
    for file in files:
        parts = file.relative_to(root).parts
        if any(part.startswith(".") or (path is None and part in _NO_TEXT) for part in parts) or not file.is_file():
            continue
        try:
            with file.open("rb") as opened:
                text += opened.read(_MOST_TEXT - len(text))
        except OSError as error:
            raise UsageError(
                f"data: cannot read {file}: {error.strerror}; give a file or folder with --data"
            ) from error
    if not text:
        raise UsageError(f"data: found no text in {root}; give a file or folder with --data")
    return text


def batches(text: bytes, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the tokens that follow them, drawn at random: the same ones for the same seed.

    Raises:
        UsageError: if the text is not longer than one sequence.
    """
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
    """One way, in this process. The only lines of Spillway's are in :meth:`__init__`."""

    def __init__(self, way: str, settings: Settings, say: Callable[[str], object] = lambda line: None) -> None:
        self.way, self.settings, self.say, self.device = way, settings, say, torch.device(settings.device)
        if self.device.type == "cpu":
            # In every way, so that the peak is the training's and not that of freed memory.
            set_malloc()
        else:
            # Some kernels of accelerators add in a different order in each run.
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.batches = batches(load_text(None if settings.data is None else Path(settings.data)), settings)
        # The highest rate at which this model settles without a warm-up.
        self.options: dict[str, Any] = {"lr": 1e-3 * min(1.0, 384 / settings.width), "betas": (0.9, 0.95)}
        self._warm_up()
        self.model = self._model(settings)
        self.model.checkpoint_blocks = way == "checkpoint"
        self.offload = spillway.offload(window=settings.window) if way == "offload" else None
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), **self.options)
        if way == "optimizer":
            if self.device.type == "cpu":
                # The loop that keep has there, so that the two are comparable.
                self.options["fused"] = False
            self.optimizer = spillway.OffloadedOptimizer(self.model.parameters(), torch.optim.AdamW, **self.options)
        self.attached: spillway.Attached | None = None
        if way == "planned":
            given = settings.budget
            budget = self._middle_budget() if given is None else parse_bytes(given, what="budget")
            self.attached = spillway.attach(self.model, budget=budget)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.settled: list[bool] = []
        """Of each step, whether later steps run as it did. Steps that look for a plan do not."""
        self.hash = hashlib.sha256()
        self.meter = PeakMeter(self.device)
        gc.collect()
        self.baseline = self.meter.start()

    def _warm_up(self) -> None:
        """One step of a tiny model: libraries and thread pools start here, and not in the first step."""
        tiny = self._model(replace(self.settings, layers=1, width=_HEAD_WIDTH, sequence=16))
        tokens = torch.zeros(2, 16, dtype=torch.int64, device=self.device)
        optimizer = torch.optim.AdamW(tiny.parameters(), **self.options)
        self._loss(tiny, tokens, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def _model(self, settings: Settings) -> GPT:
        torch.manual_seed(settings.seed)
        with self.device:
            return GPT(layers=settings.layers, width=settings.width, heads=settings.heads, sequence=settings.sequence)

    def _loss(self, model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type != "cpu"):
            loss: Tensor = model(tokens, targets)
            return loss

    def _middle_budget(self) -> int:
        """The middle between the peaks of the plan that keeps everything and of the smallest plan.

        The profile's optimizer has no state yet, so AdamW's is added. On the CPU the budget is at least 64 MiB above
        the smallest peak: resident memory includes what profiling and planning hold.
        """
        tokens = torch.zeros(self.settings.batch, self.settings.sequence, dtype=torch.int64, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type != "cpu"):
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
        with self.offload or contextlib.nullcontext():
            loss = self._loss(self.model, tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.seconds.append(self._now() - begin)
        self.settled.append(self.attached is None or self.attached.stage == "active")
        self.losses.append(loss.item())
        add_to_hash(self.hash, [loss])
        taken = format_seconds(self.seconds[-1])
        self.say(f"{self.way:<11} step {len(self.losses)}   loss {self.losses[-1]:.3f}   {taken} a step")

    def _hash_gradients(self) -> None:
        # Copies, since the gradients of optimizer are in CPU memory and cannot be viewed.
        add_to_hash(self.hash, (each.grad.clone() for each in self.model.parameters() if each.grad is not None))

    def _row(self) -> Row:
        source = self.attached or self.offload
        moved = 0 if source is None else source.stats().offloaded_bytes
        if self.way == "optimizer":
            assert isinstance(self.optimizer, spillway.OffloadedOptimizer)
            moved = self.optimizer.stats().sent_bytes
        seconds = counted_seconds(self.seconds, self.settled)
        middle, peak = statistics.median(seconds), self.meter.peak()
        # Profiling resets the allocator's peak, and the last step may still belong to the search.
        if self.attached is not None and self.attached.measured is not None and not self.settled[-1]:
            peak = max(peak, self.attached.measured.peak_bytes)
        return Row(
            way=self.way,
            step_seconds=middle,
            tokens_per_second=self.settings.batch * self.settings.sequence / middle,
            peak_bytes=peak,
            activation_peak_bytes=peak - self.baseline,
            moved_bytes=moved,
            loss=self.losses[-1],
            losses=self.losses,
            all_step_seconds=self.seconds,
            baseline_bytes=self.baseline,
            peak_source=self.meter.source,
            fingerprint=self.hash.hexdigest(),
            counted_steps=len(seconds),
            budget_bytes=None if self.attached is None else self.attached.budget,
            note=self._note(),
        )

    def _note(self) -> str:
        if self.attached is None:
            return ""
        plan, budget = self.attached.plan, f"planned: a budget of {format_bytes(self.attached.budget or 0)}"
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


def add_to_hash(sha: Any, tensors: Any) -> None:
    """Add the exact bytes of tensors to a hash of :mod:`hashlib`."""
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def compare(
    ways: Sequence[str], settings: Settings, steps: int, *, seconds: float = 0, said: Callable[[str], object]
) -> list[Row]:
    """Train in each way, one after the other, and compare with ``keep`` if it is among them.

    ``planned`` runs first, since it may need more steps; the others then make as many. If all of it would take longer
    than ``seconds``, fewer are made; 0: no limit. ``said`` is called with a line for each step.

    Raises:
        SpillwayError: what Spillway raises in a way; :class:`DemoError` if a process ends early.
    """
    rows: dict[str, Row] = {}
    limit = seconds / len(ways) - _START_SECONDS if seconds else None
    for way in sorted(ways, key=lambda way: way != "planned"):
        rows[way] = run_way(way, settings, steps, limit, said=said)
        steps, limit = len(rows[way].losses), None
    return [compared(rows[way], rows.get("keep"), settings.device) for way in ways]


def run_way(
    way: str, settings: Settings, steps: int, limit: float | None = None, *, said: Callable[[str], object]
) -> Row:
    """Train in one way, in a process of its own. No process is left behind.

    Raises:
        SpillwayError: what Spillway raises in the process; :class:`DemoError` if it ends early.
    """
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(other, way, settings, steps, limit), daemon=True)
    process.start()
    other.close()
    try:
        while isinstance(message := connection.recv(), str):
            said(message)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        memory = " (the system may have run out of memory; try a smaller --batch)" if code == -signal.SIGKILL else ""
        raise DemoError(f"{way}: its process {how}{memory}") from None
    finally:
        process.kill()
        process.join()
    if isinstance(message, SpillwayError):
        raise message
    row: Row = message
    return row


def _train(connection: Connection, way: str, settings: Settings, steps: int, limit: float | None) -> None:
    """The process of a way. It sends a line for each step, then the row. It ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends it.
    for name, value in CHILD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        connection.send(Training(way, settings, connection.send).run(steps, limit))
    except SpillwayError as error:
        connection.send(error)
    except BrokenPipeError:
        return


def compared(row: Row, reference: Row | None, device: str) -> Row:
    """A row that tells whether its bits are those of another, where they have to be."""
    if reference is None or (row.way == "optimizer" and device != "cpu"):
        return row
    return replace(row, identical=row.fingerprint == reference.fingerprint)


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """The device, the processor with the cores that this process may use, the memory in bytes, the system."""
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of Spillway, torch and Python."""
    return {"spillway": spillway.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def to_json(rows: Sequence[Row], settings: Settings) -> str:
    """All that was measured, with the machine, the versions and the settings."""
    device = torch.device(settings.device)
    report = {
        "rows": [asdict(row) for row in rows],
        "hardware": describe_hardware(device),
        "versions": describe_versions(),
        "settings": {**asdict(settings), "steps": len(rows[0].losses)},
        "malloc": malloc_setting() if device.type == "cpu" else "",
    }
    return json.dumps(report, indent=2) + "\n"
