"""How two runs of a function are compared: fingerprints, and comparisons whose outcome the device has yet to tell.

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

NOTE [ Pending checks ]

To ask a device for a number means to wait until it is through with all that was queued before. So whether a re-run gave
what the first run had is asked for by a copy to the host, and read when that has come: in a later call, a later
backward, or when the session is closed.

NOTE [ When to ask ]

A device has one engine for what goes to host memory, whose copies follow one another. A copy of some bytes on the
stream that computes waits for all that lanes have queued before it, and all that is computed after waits with it: in a
forward, behind a block that sends 640 MiB away, for milliseconds. So it is queued at the end of the backward that made
the comparisons, when what its forward sent away is through, and before that where there are many. An optimizer's
gradients, or another micro-batch, may leave then all the same. Where there is no such end (it has raised, or autograd
itself is compiled), the next call of a checkpointed function asks.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from spillway.checkpointing.tensors import PLAIN, below_modes, has_bits, is_dense, is_strided, may_be_seed, tensors_in
from spillway.errors import RecomputeError
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


def print_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A fingerprint, if the bits of such a tensor say something: kernels leave workspaces and seeds unwritten."""
    if tensor.dtype is torch.uint8 or may_be_seed(tensor):
        return None
    if is_strided(tensor) and has_bits(tensor) and not tensor.untyped_storage().nbytes():
        # FSDP has taken the memory of a gathered parameter back.
        return None
    found = sums(tensor)
    return None if found is None else fingerprint(found)


def prints_of(output: Any) -> list[torch.Tensor | None]:
    """Fingerprints of all tensors that a function gives."""
    parts = tensors_in(tree_leaves(output))
    with below_modes(next((part for part in parts if type(part) not in PLAIN), None)):
        return [print_of(part) for part in parts]


def has_content_of(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor still has the content of an earlier copy."""
    a, b = print_of(tensor), print_of(copy)
    return a is None or b is None or torch.equal(a, b)


_MANY = 32
_NONE = -1

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class Verdicts:
    """Takes comparisons, and raises :class:`~spillway.errors.RecomputeError` of those that failed. See the top."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._waiting: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        self._sent: deque[tuple[list[tuple[str, torch.Tensor]], torch.Tensor, torch.Event]] = deque()
        self._streams: dict[torch.device, dict[torch.Stream, None]] = {}
        """Those on which what waits was compared."""
        self._asks_after = _NONE
        """The latest backward at whose end it will be asked for what waits."""
        self._has_ended = False

    def add(self, label: str, differs: torch.Tensor) -> None:
        """Two runs of a function were compared. See NOTE [ When to ask ].

        Args:
            label: names the function.
            differs: a bool, without dimensions, on the device.

        Raises:
            RecomputeError: if it is known that this one, or an earlier one, failed.
        """
        device = differs.device
        if device.type == "cpu" or self._has_ended:
            # Nobody would ask later.
            if differs:
                raise differed([label])
            return
        with self._lock:
            self._streams.setdefault(device, {})[self._stream(device)] = None
            waiting = self._waiting.setdefault(device, [])
            waiting.append((label, differs))
            is_full = len(waiting) >= _MANY
            task, asks_after = _graph_task(), self._asks_after
            self._asks_after = task
        if task not in (_NONE, asks_after):
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._send_at_end)
        if is_full:
            self.send()
        self.read()

    def send(self) -> None:
        """Ask for what waits. Nothing is waited for. What cannot be asked for waits on."""
        if not self._waiting:
            return
        # It is no operator of the user's, whose modes may be in force.
        with self._lock, torch._C._DisableTorchDispatch():
            for device in list(self._waiting):
                several, now = self._waiting[device], self._stream(device)
                for stream in self._streams.get(device, ()):
                    if stream != now:
                        # Of another thread's backward, or one that was begun within another.
                        now.wait_stream(stream)
                self._sent.append((several, *self._ask(several, now)))
                del self._waiting[device]
                self._streams.pop(device, None)

    def _send_at_end(self) -> None:
        """The same, when gradients are there: if there is no memory for it, the next call asks, and says so."""
        with suppress(RuntimeError):
            self.send()

    def _ask(self, several: list[tuple[str, torch.Tensor]], now: torch.Stream) -> tuple[torch.Tensor, torch.Event]:
        """A copy on the host that is under way, and when it has come."""
        told = torch.empty(len(several), dtype=torch.bool, device="cpu", pin_memory=True)
        told.copy_(torch.stack([differs for _, differs in several]), non_blocking=True)
        event = torch.Event(several[0][1].device)
        event.record(now)
        # They are held until then: the stream that made them may be another one.
        return told, event

    def _stream(self, device: torch.device) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    def end(self) -> None:
        """Ask for all, and wait for it.

        Raises:
            RecomputeError: if a comparison failed.
        """
        # A forked child has no device of its parent's.
        if self._process == os.getpid():
            self._has_ended = True
            self.send()
            self.read(wait=True)

    def read(self, *, wait: bool = False) -> None:
        """Look at what has come.

        Args:
            wait: for all of it.

        Raises:
            RecomputeError: if a comparison failed.
        """
        while True:
            with self._lock:
                if not self._sent or not (wait or self._sent[0][2].query()):
                    return
                several, told, event = self._sent.popleft()
            event.synchronize()
            wrong = [label for (label, _), differs in zip(several, told.tolist(), strict=True) if differs]
            if wrong:
                raise differed(wrong)


def differed(labels: list[str]) -> RecomputeError:
    """The error of functions of these names, whose runs were not the same."""
    names = ", ".join(dict.fromkeys(labels))
    return RecomputeError(
        f"got other values when {names} ran again for backward than in its first run, expected the same: the gradients "
        f"of that backward are wrong. It reads something besides its arguments and parameters that had changed by "
        f"then; give it that as an argument, or leave it outside of the region"
    )
