"""Real text that every machine has: the source files of Python's standard library, or a path of the user's own."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from spillway.errors import UsageError
from spillway.units import format_bytes

MOST_BYTES = 16 * 2**20
"""More is not read: no demo gets through it."""

_LEFT_OUT = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}


def load_text(path: Path | None = None) -> bytes:
    """All bytes of a file, or of the files of a folder one after the other, in an order that never changes.

    Args:
        path: a file or folder; ``None`` is the standard library.

    Raises:
        UsageError: if nothing can be read there.

    Example:
        >>> len(load_text()) > 2**20
        True
    """
    pieces, size = [], 0
    for file in _files(path):
        try:
            with file.open("rb") as opened:
                pieces.append(opened.read(MOST_BYTES - size))
        except OSError as error:
            raise UsageError(
                f"data: cannot read {file}: {error.strerror}; give a file or folder with --data"
            ) from error
        size += len(pieces[-1])
        if size >= MOST_BYTES:
            break
    if not size:
        place = path or "the standard library, whose sources are not installed here"
        raise UsageError(f"data: found no text in {place}; give a file or folder with --data")
    return b"".join(pieces)


def _files(path: Path | None) -> Iterator[Path]:
    if path is not None and not path.exists():
        raise UsageError(f"data: {path} does not exist; give a file or folder with --data")
    if path is not None and not path.is_dir():
        if not path.is_file():
            raise UsageError(f"data: got {path}, which is no regular file; give a file or folder with --data")
        yield path
        return
    root = path or Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*" if path else "*.py")):
        parts = file.relative_to(root).parts
        if any(part.startswith(".") for part in parts) or (path is None and _LEFT_OUT.intersection(parts)):
            continue
        if file.is_file():
            yield file


class Batches:
    """Windows of a text drawn at random: the same ones for the same seed, whatever the way and the device.

    Args:
        text: what to draw from; at least ``sequence + 1`` bytes.
        batch: windows at once.
        sequence: tokens of one window.
        seed: of the draws.
        device: where the batches are wanted.
    """

    def __init__(self, text: bytes, *, batch: int, sequence: int, seed: int, device: torch.device) -> None:
        if len(text) <= sequence:
            raise UsageError(
                f"data: got {format_bytes(len(text))} of text, expected more than a sequence of {sequence} bytes; "
                "give more text with --data or a smaller --sequence"
            )
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch, self._device = batch, device
        self._span = torch.arange(sequence + 1)
        self._draws = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Tokens and the tokens that follow them, both ``(batch, sequence)`` of ``int64``."""
        last_start = len(self._text) - len(self._span)
        starts = torch.randint(0, last_start + 1, (self._batch, 1), generator=self._draws)
        windows = self._text[starts + self._span].long().to(self._device)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
