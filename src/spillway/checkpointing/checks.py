"""Checks of replays: fingerprints of tensors, and the error of a replay that differs.

NOTE [ Sums ]

A large tensor is reduced before it is hashed. Its bytes, as 64-bit integers, are laid out in rows, and the rows are
added up, until few sums are left. Each byte is read once, in any order. One changed word is always seen, and so are
many unrelated ones. Two words that change places are not seen if they lie in the same column. So the distance between
rows is coprime to the number of words: tokens, heads or halves that change places are seen. The last row is longer for
it.

Up to 32,768 sums one reduction is enough, which takes half the CPU time of two. Beyond that, there are some 65,000
columns, each with a thread of its own. Small tensors are reduced to a 61st. There are at most 255 rows, at odd
distances. Otherwise torch lets several blocks of threads add up one column. Their counter is cleared by a copy engine,
which waits for what is being offloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from spillway._torch import node_number, tree_leaves
from spillway.checkpointing.tensors import PLAIN, below_modes, has_bits, is_dense, is_strided, may_be_seed, tensors_in
from spillway.errors import RecomputeError
from spillway.runtime.bytes import over

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_SHIFT = 0x2545F4914F6CDD1D

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALL = 1 << 12
"""Words of a tensor that are held as they are, without sums."""
_FEW = 1 << 15
"""Sums that are not reduced further."""
_COLUMNS = 1 << 16
_FEWEST_ROWS, _MOST_ROWS = 61, 251


def sums(tensor: torch.Tensor) -> torch.Tensor | None:
    """Sums over its bytes in memory: at most 32,768 integers; ``None`` without strides. See NOTE [ Sums ]."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not has_bits(tensor):
        return None
    if tensor.is_neg() or tensor.is_conj() or not is_dense(tensor):
        # A tensor with gaps is copied.
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
    """Shape and strides of the rows of this many words. See NOTE [ Sums ]."""
    rows = max(count // (_FEW - _FEW // 32) + 1, _FEWEST_ROWS)
    if rows > _MOST_ROWS:
        rows = min(count // _COLUMNS, _MOST_ROWS)
    apart = count // rows
    while apart % 2 == 0 or math.gcd(apart, count) > 1:
        apart -= 1
    # The last row ends with the last word, and overlaps the row before.
    return (rows, count - (rows - 1) * apart), (apart, 1)


def odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """The odd numbers of the first positions. A shift and a second product mix them (Steele et al. 2014).

    With equal steps between them, some changes of signs would cancel out.
    """
    odd = torch.arange(count, dtype=torch.int64, device=device).mul_(_ODD).add_(_SHIFT)
    return odd.bitwise_xor_(odd >> 32).mul_(_ODD).bitwise_or_(1)


def fingerprint_of(
    tensor: torch.Tensor, odd_of: Callable[[int, torch.device], torch.Tensor] = odd_numbers
) -> torch.Tensor | None:
    """A hash of 64 bits, on the tensor's device; ``None`` for tensors without strides or content.

    The hash is a sum of 32-bit words, each times an odd number for its position (multiplicative hashing, Dietzfelbinger
    et al. 1997). ``odd_of`` gives as many of these numbers, on that device.
    """
    if is_strided(tensor) and has_bits(tensor) and not tensor.untyped_storage().nbytes():
        # FSDP has freed a gathered parameter.
        return None
    found = sums(tensor)
    if found is None:
        return None
    # The low half of round 64-bit numbers is zero: as one word, the product would lose their position.
    words = found.view(torch.int32)
    return (odd_of(words.numel(), words.device) * words).sum()


def _may_be_unwritten(tensor: torch.Tensor) -> bool:
    """Whether it may be a workspace or a seed, which a kernel leaves unwritten in part."""
    return tensor.dtype is torch.uint8 or may_be_seed(tensor)


def fingerprints_of(output: Any) -> list[torch.Tensor | None]:
    """Fingerprints of all tensors in a function's output."""
    parts = tensors_in(tree_leaves(output))
    with below_modes(next((part for part in parts if type(part) not in PLAIN), None)):
        return [None if _may_be_unwritten(part) else fingerprint_of(part) for part in parts]


class Fingerprints:
    """Fingerprints of the tensors that a run of a function saves, by numbers.

    An operator may still write a tensor that it has saved: its fingerprint is taken when a later operator saves.
    """

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[int, torch.Tensor, int]] = []
        self._nodes: dict[int, int] = {}
        """For each of them, the number that autograd gave next when it was saved."""
        self._odd: dict[torch.Stream | None, torch.Tensor] = {}
        """The most odd numbers of each stream: to make them takes seven kernels, and a block saves thirty tensors."""

    def add(self, number: int, tensor: torch.Tensor, node: int) -> None:
        self._pending.append((number, tensor, node))

    def compute(self, node: int | None = None) -> None:
        """Compute the fingerprints of tensors that operators before this node have saved; ``None``: of all."""
        while self._pending and (node is None or self._pending[0][2] < node):
            number, tensor, saved_by = self._pending.pop(0)
            found = None if _may_be_unwritten(tensor) else fingerprint_of(tensor, self._odd_of)
            if found is not None:
                self.found[number], self._nodes[number] = found, saved_by

    def end(self, output: Any, first: int) -> None:
        """Compute all. Drop those of memory that a kernel leaves unwritten in part, for nodes from the first one on.

        ``ctc_loss`` saves its table of probabilities, and fills the part for the lengths of its inputs.
        """
        self.compute()
        self._odd.clear()
        unwritten: set[int] = set()
        seen, rest = set[Any](), [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        while rest:
            node: Any = rest.pop()
            if node is None or node in seen or node_number(node) < first:
                continue
            seen.add(node)
            if node.name() == "CtcLossBackward0":
                unwritten.add(node_number(node) + 1)
            rest += [each for each, _ in node.next_functions]
        self.found = {number: each for number, each in self.found.items() if self._nodes[number] not in unwritten}

    def _odd_of(self, count: int, device: torch.device) -> torch.Tensor:
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        odd = self._odd.get(stream)
        if odd is None or len(odd) < count:
            odd = self._odd[stream] = odd_numbers(count, device)
        return odd[:count]


def has_content_of(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor still has the content of an earlier copy."""
    a, b = fingerprint_of(tensor), fingerprint_of(copy)
    return a is None or b is None or torch.equal(a, b)


_OTHER_VALUES = (
    "gave other values when it was recomputed than in its forward pass: the gradients of that backward are wrong"
)


def difference_error(label: str, how: str = _OTHER_VALUES) -> RecomputeError:
    """The error for a function with this name, whose replay differs from forward."""
    return RecomputeError(
        f"{label} {how}. It reads something besides its arguments, parameters and Python "
        f"state that changed in between. Pass that as an argument, or leave it outside of the checkpointed function. "
        f"If forward writes a parameter in place, make that parameter a buffer."
    )
