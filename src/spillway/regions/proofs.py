"""Which pruned re-runs were seen to be right. See NOTE [ What the trace does not see ] in ``replay.py``."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch

from spillway.regions.script import Script

_ENOUGH_STRUCTURES = 64
_ENOUGH_FORMS = 8

_PIECE, _MOST_PIECE = 1 << 20, 1 << 23
"""Elements of a piece at least, and at most: of large tensors, so many are taken at once."""
_HOST_PIECE = 1 << 14
"""Elements of a piece on the CPU, whose memory would be left in holes by larger ones, and never be given back."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT = 0x2545F4914F6CDD1D

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW = 1024
_GO = 128

Sums = tuple[torch.Tensor, ...]


class Proofs:
    """What is known of one function, over all its regions.

    A re-run is known by its operators, how they hang together, on which types, and what is done with each; and by the
    shapes of what they give. After some different ones of the same function were right (experts that are called or
    not, say), or of one with different shapes (sentences), the others are believed.
    """

    def __init__(self) -> None:
        self._right: dict[Hashable, set[Hashable]] = {}
        self.script = Script()
        self.wrong: str | None = None
        """Why its regions are not pruned, if they must not be."""
        self.ranks_agreed = False
        """Whether the ranks that share its inputs were seen to have the same ones."""

    @property
    def is_untried(self) -> bool:
        """Whether no re-run was tried: then the first run's own fingerprints are taken."""
        return not self._right and self.wrong is None

    def needs_trial(self, structure: Hashable, forms: Hashable) -> bool:
        if self.wrong is not None:
            return False
        known = self._right.get(structure)
        if known is None:
            return len(self._right) < _ENOUGH_STRUCTURES
        return len(known) < _ENOUGH_FORMS and forms not in known

    def add(self, structure: Hashable, forms: Hashable) -> None:
        """It was right."""
        self._right.setdefault(structure, set()).add(forms)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    """64 bits that tell a tensor's bits from others, on its device: one number, NaN and all told apart.

    ``None`` of plain bytes, since kernels keep workspaces in such, and leave some of them unwritten; of what has no
    strides; and of what is quantized.

    A sum of the tensor's elements as integers, or of both halves of wide ones, each times an odd number that its place
    gives (multiplicative hashing, Dietzfelbinger et al. 1997), in pieces, since the device may be full. Integer sums do
    not depend on their order.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.dtype is torch.uint8:
        return None
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    start = 0
    for piece in _pieces(tensor, _piece_of(tensor)):
        dense = piece if piece.stride(0) == 1 else piece.clone(memory_format=torch.contiguous_format)
        # Of round numbers in 64 bits the low half is nothing, and what is left would lose its place in the product.
        words = dense.view(_INTEGERS[min(piece.element_size(), 4)])
        places = torch.arange(start, start + words.numel(), dtype=torch.int64, device=tensor.device)
        total += places.mul_(_ODD).add_(_SHIFT).bitwise_or_(1).mul_(words).sum()
        start += words.numel()
    return total


def _piece_of(tensor: torch.Tensor) -> int:
    """Elements of a piece: a 64th of what is large, since each piece takes the host as long as any other."""
    if tensor.device.type == "cpu":
        return _HOST_PIECE
    return min(max(tensor.numel() // 64, _PIECE), _MOST_PIECE)


def _pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """All elements in their order, so many at a time, in one dimension. No more than that are copied at once."""
    if tensor.is_contiguous():
        yield from torch.split(tensor.flatten(), size)
    elif tensor.numel() <= size:
        yield tensor.flatten()
    else:
        for rows in torch.split(tensor, max(size * len(tensor) // tensor.numel(), 1)):
            yield from _pieces(rows if len(rows) > 1 else rows[0], size)


def same_bits(a: Sequence[torch.Tensor | None], b: Sequence[torch.Tensor | None]) -> bool:
    """Whether two lists of fingerprints are equal, as far as they were taken."""
    return len(a) == len(b) and all(x is None or y is None or x.item() == y.item() for x, y in zip(a, b, strict=True))


def sums(tensor: torch.Tensor) -> Sums | None:
    """Of its elements' bits, as integers: the sums of rows, that of each column, and what is left of a row, if any is.

    A weaker fingerprint, which costs two readings of the tensor and nothing else, so that it can be taken of what every
    region gives, and is some thousandth part of it. ``None`` of what has no strides.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    words = _words(tensor.detach())
    rest = words.numel() % _ROW
    rows = (words[:-rest] if rest else words).view(-1, _ROW)
    found = rows.sum(1, dtype=torch.int64), _columns(rows)
    return (*found, words[-rest:].clone()) if rest else found


def _columns(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each column, in two goes.

    A device adds up long columns with a counter that it clears by a copy engine, where that waits for what is being
    offloaded. Short ones need none.
    """
    if rows.shape[0] < _GO * 2:
        return rows.sum(0, dtype=torch.int64)
    rest = rows.shape[0] % _GO
    total = (rows[:-rest] if rest else rows).view(-1, _GO, _ROW).sum(1, dtype=torch.int64).sum(0)
    return total + rows[-rest:].sum(0, dtype=torch.int64) if rest else total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as integers in one dimension, the widest that fit: fewer to add up. As they lie in memory, if they can.

    What is not dense is copied.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if not tensor.is_contiguous():
        strides = tensor.stride()
        tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda place: -strides[place])).contiguous()
    flat = tensor.view(-1)
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(_INTEGERS[flat.element_size()])


def same_sums(a: Sequence[Sums | None], b: Sequence[Sums | None]) -> bool:
    """Whether two lists of such are equal."""
    if len(a) != len(b):
        return False
    return all(_same_sums(x, y) for x, y in zip(a, b, strict=True))


def _same_sums(a: Sums | None, b: Sums | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(map(torch.equal, a, b))
