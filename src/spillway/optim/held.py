"""A parameter whose state, master and step are on the host."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.away import AwayGradient
from spillway.optim.gradient import Gradient, Snapshot
from spillway.optim.masters import Stamp, flat, take
from spillway.optim.parcels import Sent
from spillway.optim.pinned import Pinned
from spillway.optim.sharding import local_of
from spillway.optim.shared import Shared
from spillway.optim.traffic import Way, is_dense, memory_of
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes, Cells, over
from spillway.runtime.cpu import anonymous_pages

CHUNK = 1 << 22
"""Elements that are worked on at a time: what is between two passes over them stays in the caches."""
_HUGE = 4 << 20


class _Form(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Piece:
    """A part of a master, as a parameter of its own.

    Args:
        start: its first element, in the order in which they lie.
        tensor: over the master's memory.
    """

    __slots__ = ("known", "numel", "parts", "start", "tensor")

    def __init__(self, start: int, tensor: torch.nn.Parameter) -> None:
        self.start = start
        self.numel = tensor.numel()
        self.tensor = tensor
        self.known = False
        """Whether it was ever written."""
        self.parts: dict[Any, Any] = {}
        """Of its state, what is part of the whole parameter's."""

    def follow(self, values: torch.Tensor) -> None:
        """Say what the parameter says."""
        if self.known:
            take(flat(self.tensor.detach()), values)
        else:
            flat(self.tensor.detach()).copy_(values)
        self.known = True


class Held:
    """A parameter of the user's, and what the host has of it.

    Args:
        parameter: the user's.
        group: the index of its group.
        shared: what belongs to its device.
        work_dtype: of its master, and of the gradient that it is stepped with.
        cut: whether it may be stepped in pieces.

    Raises:
        UnsupportedError: if its elements overlap, or leave gaps.
    """

    def __init__(
        self, parameter: torch.Tensor, group: int, shared: Shared, work_dtype: torch.dtype, *, cut: bool
    ) -> None:
        self.pinned: Pinned | None = None
        """Memory under the master. It is the parameter's own bytes, if the two have one type."""
        self.parameter = parameter
        self.group = group
        self.shared = shared
        self.work_dtype = work_dtype
        local = self.local()
        self._known = _form_of(local)
        if local.layout != torch.strided or not is_dense(local):
            raise UnsupportedError(
                f"got a parameter of shape {tuple(local.shape)}, strides {local.stride()}, {local.layout}, expected "
                f"one whose elements fill its memory; make it contiguous, or give it to an optimizer of its own"
            )
        self.numel = local.numel()
        self.cut = cut
        self.gradient = Gradient(self, shared)
        self.in_place = False
        """Whether the step works on the parameter's own memory, which the master then is."""
        self.master: torch.Tensor | None = None
        """In the parameter's shape and strides."""
        self.pieces: list[Piece] = []
        self._stamp: Stamp | None = None
        self.state: dict[Any, Any] = {}
        """As the plain optimizer would have it, over the pieces' own."""
        self.hook: RemovableHandle | None = None
        """What sees its gradients come."""
        self.finalizer: weakref.finalize[Any, Any] | None = None
        """Takes that off when the optimizer is gone."""
        self.coming: Event | None = None
        """When the parameter is what the last step made of it."""

    @property
    def has_master(self) -> bool:
        """Whether the master is of another type than the parameter."""
        return self.work_dtype != self._known[2]

    @property
    def known(self) -> bool:
        """Whether all of the master was ever written."""
        return bool(self.pieces) and all(piece.known for piece in self.pieces)

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides."""
        return tuple(self._known[0]), tuple(self._known[1])

    def local(self) -> torch.Tensor:
        """The parameter's own bytes, on the device."""
        return local_of(self.parameter)

    def another_gradient(self) -> Gradient:
        """Where a new gradient is to be: what somebody kept of the last one stays as it is."""
        kept = self.gradient.away()
        if kept is not None:
            kept.part()
            self.gradient = Gradient(self, self.shared)
        return self.gradient

    def adopt(self, away: AwayGradient) -> AwayGradient:
        """Somebody made this the parameter's gradient: one that was kept, or another parameter's.

        Returns:
            What stands in its place.
        """
        home = away.home
        assert isinstance(home, Gradient)
        if home is self.gradient:
            return away
        if home.held is not self:
            gradient = self.another_gradient()
            gradient.begin(home.restore(exact=True))
            return gradient.stand_in(away)
        self.another_gradient()
        self.gradient = home
        away.join()
        return away

    def check(self) -> None:
        """Raise if the parameter is no longer what it was when it was given."""
        now = _form_of(self.local())
        if now != self._known:
            raise UsageError(
                f"got a parameter of {_described(*now)}, expected {_described(*self._known)}, as it was when the "
                f"optimizer was made; move, cast or resize a model before its optimizer is made"
            )

    def is_as_it_was(self) -> bool:
        """Whether the parameter is still of the form that it had when it was given."""
        return _form_of(self.local()) == self._known

    def empty_on_device(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor like the parameter, as it was when it was given."""
        shape, strides, *_ = self._known
        return self.shared.traffic.backend.empty(_Form(shape, strides, dtype))

    def is_as_written(self) -> bool:
        """Whether nobody wrote to the parameter since a step was queued for it, as far as its versions tell."""
        return self._stamp is not None and self._stamp.holds(self.parameter)

    def refresh(self) -> None:
        """The next step takes the master from the parameter, whatever both say."""
        self.shared.lane.run(self.forget_master)

    def written(self) -> None:
        """The parameter is to be what the master says, when what is queued is done."""
        local = self.local()
        for tensor in {id(self.parameter): self.parameter, id(local): local}.values():
            # Autograd refuses to go back through what was computed with the parameter as it was.
            torch.autograd.graph.increment_version(tensor)
        self._stamp = Stamp(self.parameter)

    # All below is for the host lane.

    def new_host_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host in the parameter's shape and strides, unwritten."""
        shape, strides, *_ = self._known
        return self.new_flat_tensor(dtype).as_strided(shape, strides)

    def new_flat_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host for as many elements, unwritten."""
        nbytes = self.numel * dtype.itemsize
        if nbytes < _HUGE:
            return torch.empty(self.numel, dtype=dtype, device="cpu")
        return anonymous_pages(nbytes, huge=True).view(dtype)

    def make_master(self) -> None:
        """Memory for the master, and its pieces; or pieces of the parameter itself, wherever it is now."""
        shape, strides, *_ = self._known
        if self.in_place:
            local = self.local()
            if self.master is not None and self.master.data_ptr() == local.data_ptr():
                return
            storage, start = local.untyped_storage(), int(local.storage_offset())
        elif self.master is None:
            self.pinned = Pinned(self.shared.traffic.arena, self.numel * self.work_dtype.itemsize)
            self.pinned.synchronize()
            # Who has it in a state dictionary keeps the memory, too.
            storage, start = self.pinned.alias().untyped_storage(), 0
        else:
            return
        # Not an alias of the parameter: what a step writes would count up its version from another thread.
        self.master = over(storage, self.work_dtype, start, shape, strides)
        if self.cut and self.numel > CHUNK:
            parts = [(start, self.flat_master()[start : start + CHUNK]) for start in range(0, self.numel, CHUNK)]
        else:
            parts = [(0, self.master)]
        if self.pieces:
            # States are those of the pieces: these stay.
            for piece, (_, part) in zip(self.pieces, parts, strict=True):
                piece.tensor.data = part
        else:
            self.pieces = [Piece(start, torch.nn.Parameter(part, requires_grad=False)) for start, part in parts]

    def flat_master(self) -> torch.Tensor:
        """The master in the order in which its elements lie."""
        assert self.master is not None
        return self.master.as_strided((self.numel,), (1,), int(self.master.storage_offset()))

    def put_master(self, master: torch.Tensor) -> None:
        """The master is this, as far as the parameter says the same at the next step."""
        self.begin_step()
        self.flat_master().copy_(master.as_strided((self.numel,), (1,)))
        for piece in self.pieces:
            piece.known = True

    def forget_master(self) -> None:
        """The master is to be what the parameter is at the next step, and no more exact."""
        for piece in self.pieces:
            piece.known = False

    def whole(self, values: Snapshot) -> torch.Tensor:
        """The gradient in the type of the step, with its factors, in the parameter's shape."""
        return self.part(values, 0, self.numel, None).as_strided(*self._known[:2])

    def part(self, values: Snapshot, start: int, numel: int, scratch: torch.Tensor | None) -> torch.Tensor:
        """Elements of the gradient in the type of the step, with its factors; in scratch, if they change."""
        found = values.sum.tensor if values.sum is not None else values.read(self.shared.traffic)
        if numel != self.numel:
            found = found[start : start + numel]
        scratch = None if scratch is None else scratch[:numel]
        factors = list(values.factors)
        if found.dtype != self.work_dtype:
            found = found.to(self.work_dtype) if scratch is None else scratch.copy_(found)
        elif factors:
            found = factors.pop(0).applied(found, scratch)
        for factor in factors:
            factor.apply(found)
        return found

    def begin_step(self) -> None:
        """The master is about to be written."""
        self.make_master()
        if self.pinned is not None:
            self.pinned.synchronize()
        self._touch(write=True)

    def range_of(self, piece: Piece) -> Bytes:
        """Where a piece of the master lies in pinned memory."""
        assert self.pinned is not None
        size = self.work_dtype.itemsize
        return self.pinned.range(piece.start * size, piece.numel * size)

    def values_of(self, piece: Piece) -> torch.Tensor:
        """The parameter's own elements, of a piece."""
        local = self.local().detach()
        return local.as_strided((piece.numel,), (1,), int(local.storage_offset()) + piece.start)

    def give_up(self) -> None:
        """Give all memory back, and see no more gradients."""
        self.unhook()
        self.gradient.clear()
        self.gradient.sum = None
        self.pinned = self.master = None
        for piece in self.pieces:
            # The frames of an error that somebody keeps hold it.
            piece.tensor.data = piece.tensor.new_empty(0)
        self.pieces = []
        self.state = {}

    def unhook(self) -> None:
        """See no more gradients."""
        if self.hook is not None:
            self.hook.remove()
        if self.finalizer is not None:
            self.finalizer.detach()

    def _touch(self, *, write: bool) -> None:
        if self.pinned is not None:
            self.shared.traffic.backend.host_access(self.pinned.block, write=write)


class Asked:
    """What the parameters of some pieces of one device are, on its way to the host.

    See NOTE [ The parameter is the truth ].

    Args:
        pieces: whose masters are about to be written.
        after: what the parameters wait for.
    """

    def __init__(self, pieces: Sequence[tuple[Held, Piece]], after: Event) -> None:
        self._traffic = pieces[0][0].shared.traffic
        self._sent: dict[Piece, Sent] = {}
        whole = [(held, piece) for held, piece in pieces if not held.in_place and not held.has_master]
        narrow = [(held, piece) for held, piece in pieces if held.has_master]
        # First what there may be no memory for.
        sent = self._traffic.fetch([held.values_of(piece) for held, piece in narrow], after)
        self._sent.update({piece: one for (_, piece), one in zip(narrow, sent, strict=True)})
        pairs = [(held.range_of(piece), memory_of(held.values_of(piece))) for held, piece in whole]
        self._arrived = self._traffic.fetch_into(pairs, after) if pairs else None

    def __del__(self) -> None:
        # Where a step failed before all of it was read.
        for sent in self._sent.values():
            self._traffic.give_back(sent)

    def read(self, pieces: Sequence[tuple[Held, Piece]]) -> None:
        """Wait for some of it; the masters say it then. For the host."""
        try:
            for held, piece in pieces:
                if held.has_master:
                    values = self._traffic.read(self._sent[piece])
                elif self._arrived is not None:
                    self._arrived.synchronize()
                if not held.in_place:
                    self._traffic.backend.host_access(held.range_of(piece), write=True)
                if held.has_master:
                    piece.follow(values)
                piece.known = True
        finally:
            for _, piece in pieces:
                if piece in self._sent:
                    self._traffic.give_back(self._sent.pop(piece))


def send_back(pieces: Sequence[tuple[Held, Piece]], after: Event) -> Event:
    """Queue the ways of pieces to their device, which makes them of the parameters' type; the end of them."""
    away = [(held, piece) for held, piece in pieces if not held.in_place]
    ways = [Way(held.local(), piece.start, Cells(held.range_of(piece), held.work_dtype)) for held, piece in away]
    end = pieces[0][0].shared.traffic.receive(ways, after)
    for held, piece in away:
        assert held.pinned is not None
        held.pinned.after(piece.start, end)
    return end


def _form_of(local: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]:
    return local.shape, local.stride(), local.dtype, local.device


def _described(shape: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> str:
    return f"shape {tuple(shape)}, strides {tuple(strides)}, {dtype}, on {device}"
