"""Which pruned re-runs were seen to be right. See NOTE [ What the trace does not see ] in ``replay.py``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

_ENOUGH = 64

_PIECE = 1 << 22
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT = 0x2545F4914F6CDD1D


class Proofs:
    """What is known of one function, over all its regions.

    A re-run is known by its operators, how they hang together and what is done with each. After some different ones of
    the same function were right (experts that are called or not, say), the others are believed.
    """

    def __init__(self) -> None:
        self._right: set[Hashable] = set()
        self.wrong: str | None = None
        """Why its regions are not pruned, if they must not be."""

    @property
    def is_untried(self) -> bool:
        """Whether no re-run was tried: then the first run's own fingerprints are taken."""
        return not self._right and self.wrong is None

    def needs_trial(self, signature: Hashable) -> bool:
        return self.wrong is None and len(self._right) < _ENOUGH and signature not in self._right

    def add(self, signature: Hashable) -> None:
        """It was right."""
        self._right.add(signature)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    """64 bits that tell a tensor's bits from others, on its device: one number, NaN and all told apart.

    ``None`` of plain bytes, since kernels keep workspaces in such, and leave some of them unwritten; and of what has no
    strides.

    A sum of the tensor's words, each times an odd number that its place gives (multiplicative hashing, Dietzfelbinger
    et al. 1997), in pieces, since the device may be full. Integer sums do not depend on their order.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype is torch.uint8:
        return None
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    words = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    if words.numel() % 4 == 0 and words.data_ptr() % 4 == 0:
        words = words.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        places = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=tensor.device)
        total += ((places * _ODD + _SHIFT).bitwise_or_(1) * piece).sum()
    return total


def same_bits(a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> bool:
    """Whether two lists of fingerprints are equal, as far as they were taken."""
    return len(a) == len(b) and all(x is None or y is None or x.item() == y.item() for x, y in zip(a, b, strict=True))
