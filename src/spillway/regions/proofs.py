"""What is known of a function, and fingerprints by which two runs of it are compared.

NOTE [ Sums ]

Large tensors are summed up before a fingerprint is taken: their bytes, as integers of 64 bits, lie in rows, which
are added up, and so is what comes of that, until little is left. Each byte is read once, and integer sums do not depend
on their order. One difference is always seen, and many that hang on nothing in common are; an exchange of two words is
not seen if their distance is a whole number of rows. So rows begin at a distance that has no factor in common with the
number of all words, as the distances of tokens, heads or halves have: where these have changed places, it is seen. (By
chance it is not where parts of less than some sixty words are exchanged at just such a distance.) The last row is the
longer for it.

What fits into so few columns as are left in the end is added up in one go, which takes the host half as long as two. Of
what does not, there is a thread for each of some 65,000 columns, to be fast. What is small is added up to a 61st. There
are no more than 255 rows, and they begin an odd number of words after each other, since otherwise torch has
several blocks of threads add up a column, with a counter for them that is cleared by a copy engine, and that waits for
what is being offloaded.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Any

import torch

from spillway.regions.tensors import has_bits, is_dense
from spillway.runtime.bytes import over

_PIECE, _MOST_PIECE = 1 << 20, 1 << 23
"""Elements of a piece at least, and at most: of large tensors, so many are taken at once."""
_HOST_PIECE = 1 << 14
"""Elements of a piece on the CPU: larger ones take more memory, and more time."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT = 0x2545F4914F6CDD1D

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 1 << 12
"""Words of a tensor that are not added up, but held as they are."""
_FEW = 1 << 15
"""Sums that are not added up any more."""
_COLUMNS = 1 << 16
_FEWEST_ROWS, _MOST_ROWS = 61, 251


class Proofs:
    """What is known of one function, over all its calls."""

    def __init__(self) -> None:
        self.learned: dict[Hashable, Any] = {}
        """What calls of each kind taught."""
        self.ranks_agreed = False
        """Whether the ranks that share its inputs were seen to have the same ones."""


class ProofStore:
    """The proofs of a session, by function: ``session.of(ProofStore)``."""

    def __init__(self) -> None:
        self._proofs: dict[Hashable, Proofs] = {}
        self._lock = threading.Lock()

    def of(self, function: Hashable) -> Proofs:
        """The proofs of the function that this key identifies."""
        with self._lock:
            found = self._proofs.get(function)
            if found is None:
                # Modules that are gone are never asked for again.
                self._proofs = {known: each for known, each in self._proofs.items() if not _is_gone(known)}
                found = self._proofs[function] = Proofs()
            return found

    def __len__(self) -> int:
        return len(self._proofs)


def _is_gone(function: Hashable) -> bool:
    """Whether the key of a function names a module that is gone."""
    if isinstance(function, tuple):
        return any(map(_is_gone, function))
    return isinstance(function, weakref.ref) and function() is None


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    """64 bits that tell a tensor's bits from others, on its device: one number, NaN and all told apart.

    ``None`` of plain bytes, since kernels keep workspaces in such, and leave some of them unwritten; of what has no
    strides; and of what is quantized.

    A sum of the tensor's elements as integers, or of both halves of wide ones, each times an odd number that its place
    gives (multiplicative hashing, Dietzfelbinger et al. 1997), in pieces, since the device may be full. Integer sums do
    not depend on their order. The odd numbers are mixed by a shift and a second product (Steele et al. 2014): in a
    series with equal steps, some changes of signs would add up to nothing.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.dtype is torch.uint8:
        return None
    if not has_bits(tensor):
        return None
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    places, start = total.new_empty(0), 0
    for piece in _pieces(tensor, _piece_of(tensor)):
        dense = piece if piece.stride(0) == 1 else piece.clone(memory_format=torch.contiguous_format)
        # Of round numbers in 64 bits the low half is nothing, and what is left would lose its place in the product.
        words = dense.view(_INTEGERS[min(piece.element_size(), 4)])
        if words.numel() > places.numel():
            places = torch.empty(words.numel(), dtype=torch.int64, device=tensor.device)
        here = torch.arange(start, start + words.numel(), device=places.device, out=places[: words.numel()])
        here.mul_(_ODD).add_(_SHIFT)
        here.bitwise_xor_(here >> 32).mul_(_ODD).bitwise_or_(1)
        total += here.mul_(words).sum()
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


def sums(tensor: torch.Tensor) -> torch.Tensor | None:
    """What tells its bytes, as they lie in memory, from others: at most 32,768 integers. See NOTE [ Sums ].

    ``None`` of what has no strides.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not has_bits(tensor):
        return None
    if tensor.is_neg() or tensor.is_conj() or not (tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride())):
        # What has gaps is copied.
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # The widest integers that fit: fewer to add up.
    size, start, nbytes = tensor.element_size(), tensor.storage_offset() * tensor.element_size(), tensor.nbytes
    size = 8 if start % 8 == 0 and nbytes % 8 == 0 else size
    storage, dtype, first, count = tensor.untyped_storage(), _INTEGERS[size], start // size, nbytes // size
    if count <= _SMALL:
        return over(storage, dtype, first, (count,), (1,)).to(torch.int64, copy=True)
    found = over(storage, dtype, first, *_rows(count)).sum(0, dtype=torch.int64)
    while found.numel() > _FEW:
        found = found.as_strided(*_rows(found.numel())).sum(0)
    return found


@lru_cache(maxsize=1024)
def _rows(count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shape and strides of the rows of so many words. See NOTE [ Sums ]."""
    # The last row is a little longer than the others.
    rows = max(count // (_FEW - _FEW // 32) + 1, _FEWEST_ROWS)
    if rows > _MOST_ROWS:
        rows = min(count // _COLUMNS, _MOST_ROWS)
    apart = count // rows
    while apart % 2 == 0 or math.gcd(apart, count) > 1:
        apart -= 1
    # The last row ends with the last word, and begins before the one before it has ended.
    return (rows, count - (rows - 1) * apart), (apart, 1)
