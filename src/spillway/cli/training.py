"""A small GPT in plain PyTorch, which learns to predict the bytes of a text. Nothing in it knows of Spillway.

``spillway demo`` trains it in several ways. It prints the exact bits of each loss, and a hash of the gradients.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_HEAD_WIDTH = 64
_MOST_TEXT = 16 << 20
_CPU_SHAPE = {"layers": 8, "width": 256, "sequence": 512, "batch": 8}
_GPU_SHAPE = {"layers": 8, "width": 512, "sequence": 2048, "batch": 16}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the training. Ends the process for a wrong one, as argparse does."""
    parser = argparse.ArgumentParser("spillway demo", allow_abbrev=False)
    gpu = torch.accelerator.current_accelerator(check_available=True)
    parser.add_argument("--device", default=str(gpu or "cpu"))
    parser.add_argument("--data", help="a file or folder to train on; by default Python's own source")
    for name in _CPU_SHAPE:
        parser.add_argument(f"--{name}", type=int, help="by default by device")
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unknown arguments: {unknown}")
    try:
        device = torch.device(given.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        parser.error(f"--device: there is no {given.device!r} here")
    for name, size in (_CPU_SHAPE if device.type == "cpu" else _GPU_SHAPE).items():
        setattr(given, name, size if getattr(given, name) is None else getattr(given, name))
        if getattr(given, name) < 1:
            parser.error(f"--{name}: got {getattr(given, name)}, expected at least 1")
    if given.width % _HEAD_WIDTH:
        parser.error(f"--width: got {given.width}, expected a multiple of {_HEAD_WIDTH}")
    given.text = load_text(given.data)
    if len(given.text) <= given.sequence:
        parser.error(
            f"--data: got {len(given.text)} bytes of text in regular files of {given.data!r}, expected more than "
            f"--sequence, {given.sequence}"
        )
    return given


def load_text(data: str | None) -> bytes:
    """The first 16 MiB of a file, or of a folder's files in alphabetical order; ``None``: the standard library."""
    root = Path(data or sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*") if data else root.glob("*.py")) if root.is_dir() else [root]
    text = b""
    for file in files:
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts):
            text += file.read_bytes()[: _MOST_TEXT - len(text)]
    return text


class Block(nn.Module):
    """One layer: attention, then a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD_WIDTH
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
    """Predicts the next byte."""

    def __init__(self, layers: int, width: int, sequence: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
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
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def batches(settings: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the tokens that follow them, drawn at random: the same ones each time."""
    values, draws = torch.frombuffer(bytearray(settings.text), dtype=torch.uint8), torch.Generator().manual_seed(0)
    span = torch.arange(settings.sequence + 1)
    while True:
        starts = torch.randint(len(values) - settings.sequence, (settings.batch, 1), generator=draws)
        rows = values[starts + span].long().to(settings.device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def add_to_hash(sha: Any, tensors: Iterable[Tensor]) -> None:
    """Add the exact bytes of tensors to a hash of :mod:`hashlib`."""
    for tensor in tensors:
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def main() -> None:
    """Train until the process is ended."""
    settings = parse()
    device = torch.device(settings.device)
    if device.type != "cpu":
        # Some GPU kernels add in a different order in each run.
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(0)
    with device:
        model = GPT(settings.layers, settings.width, settings.sequence)
    # The highest rate at which this model settles without a warm-up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * min(1.0, 384 / settings.width), betas=(0.9, 0.95))
    for number, (tokens, targets) in enumerate(batches(settings)):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            loss = model(tokens, targets)
        loss.backward()
        print(number, loss.item().hex(), flush=True)  # noqa: T201
        if number < 2 or number % 8 == 7:
            gradients = hashlib.sha256()
            add_to_hash(gradients, (each.grad for each in model.parameters() if each.grad is not None))
            print(gradients.hexdigest(), flush=True)  # noqa: T201
        optimizer.step()


if __name__ == "__main__":
    main()
