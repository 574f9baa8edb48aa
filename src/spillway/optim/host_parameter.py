"""A parameter whose optimizer state, fp32 master weight and step are on the CPU.

NOTE [ A step reads the parameter ]

Each step reads the parameter itself, as it is when ``step()`` is called. An fp32 master weight only adds the bits that
the parameter's type cannot hold. So every write between two steps counts, also one that changes no version: through
``.data``, a NumPy view, a library's kernel, a collective.

The read copies as many bytes to the CPU as the parameter has. On the CPU itself the step works on the parameter's own
memory. Tensor versions would miss the writes above, and a checksum on the GPU would arrive no sooner than the bytes.
``step_in_backward=True`` reads each parameter when its gradient has arrived.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from spillway._torch import version_of
from spillway.errors import UnsupportedError, UsageError
from spillway.optim.gradient import DeviceContext, Gradient
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.optim.optimizer_class import State
from spillway.optim.tensors import CHUNK, flat, follow, is_dense, local_of, memory_of
from spillway.optim.transfers import Pinned, SentTensor, Upload
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes, Cells, over
from spillway.runtime.cpu import anonymous_pages

_HUGE_PAGES = 4 << 20
"""Tensors of so many bytes get pages of their own."""


class _Form(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, local: torch.Tensor) -> _Form:
        return cls(tuple(local.shape), local.stride(), local.dtype, local.device)

    def __str__(self) -> str:
        return f"shape {self.size}, strides {self.stride}, {self.dtype}, on {self.device}"


@dataclass(eq=False, slots=True)
class Piece:
    """A part of a master weight that is stepped as a parameter of its own."""

    start: int
    """Its first element, in memory order."""
    numel: int
    tensor: torch.nn.Parameter
    """Over the master weight's memory."""
    known: bool = False
    """Whether it was ever written."""
    begun: bool = False
    """Whether the class's constructor has seen it: some classes make their state there."""
    state: State = field(default_factory=dict)
    parts: State = field(default_factory=dict)
    """Values of its state that are parts of the whole parameter's."""


class HostParameter:
    """A user's parameter, its master weight, its state and its gradient.

    Args:
        work_dtype: the type of its master weight, and of the gradient that it is stepped with.
        cut: whether it may be stepped in pieces.
    """

    def __init__(
        self, parameter: torch.Tensor, group: int, context: DeviceContext, work_dtype: torch.dtype, *, cut: bool
    ) -> None:
        self.pinned: Pinned | None = None
        """Memory of the master weight. If that has no wider type, it is a copy of the parameter."""
        self.parameter = parameter
        self.group = group
        self.context = context
        self.work_dtype = work_dtype
        local = self.local()
        self._form = _Form.of(local)
        if local.layout != torch.strided or not is_dense(local):
            raise UnsupportedError(
                f"The elements of a parameter of shape {tuple(local.shape)}, strides {local.stride()}, {local.layout} "
                f"overlap or leave gaps. Make it contiguous, or give it to an optimizer of its own."
            )
        self.numel = local.numel()
        self.cut = cut
        self.gradient = Gradient(self, context)
        self.in_place = False
        """Whether the step works on the parameter's own memory, which is then the master weight."""
        self.master: torch.Tensor | None = None
        """In the parameter's shape and strides."""
        self.pieces: list[Piece] = []
        self.state: State = {}
        """As the plain optimizer has it. Its tensors are over those of the pieces."""
        self.unhook: Callable[[], object] = lambda: None
        """Removes the hook on the accumulation of its gradients."""
        self.updated: Event | None = None
        """When the parameter has the last step's values."""
        self._stamp: tuple[object, ...] | None = None

    @property
    def has_master(self) -> bool:
        """Whether the master weight has a wider type than the parameter."""
        return self.work_dtype != self._form.dtype

    @property
    def kind(self) -> Hashable:
        """Equal for parameters that may share a call or a chunk."""
        return self.group, self.work_dtype, self.has_master, id(self.context)

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides."""
        return self._form.size, self._form.stride

    def local(self) -> torch.Tensor:
        """This process's part of the parameter, on its device."""
        return local_of(self.parameter)

    def fresh_gradient(self) -> Gradient:
        """The gradient that takes the next one's bytes. A gradient that the user kept stays as it is."""
        kept = self.gradient.stand_in_if_alive()
        if kept is not None:
            kept.kept = kept.home
            self.gradient = Gradient(self, self.context)
        return self.gradient

    def adopt(self, tensor: OffloadedGradient) -> OffloadedGradient:
        """Take a gradient that the user has set: one that was kept, or another parameter's. Gives its stand-in."""
        home = tensor.home
        if home is self.gradient:
            return tensor
        if home.held is not self:
            gradient = self.fresh_gradient()
            gradient.begin(home.restore(exact=True))
            return gradient.stand_in(tensor)
        self.fresh_gradient()
        self.gradient = home
        tensor.kept = None
        return tensor

    def check(self) -> None:
        """Raise a ``UsageError`` if the parameter was moved, cast or resized."""
        if not self.is_unchanged():
            raise UsageError(
                f"A parameter has {_Form.of(self.local())}. It had {self._form} when the optimizer was made. Move, "
                f"cast or resize a model before you make its optimizer."
            )

    def is_unchanged(self) -> bool:
        """Whether the parameter has the shape, strides, type and device that it had at first."""
        return _Form.of(self.local()) == self._form

    def empty_on_device(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor like the parameter, as it was at first."""
        memory = self.context.transfers.backend.empty(self.numel * dtype.itemsize)
        return over(memory.storage, dtype, 0, *self._form[:2])

    def mark_written(self) -> None:
        """A step that writes the parameter is queued."""
        local = self.local()
        for tensor in {id(self.parameter): self.parameter, id(local): local}.values():
            # Autograd refuses to go back through what was computed with the old values.
            torch.autograd.graph.increment_version(tensor)
        self._stamp = self._stamp_now()

    def is_as_written(self) -> bool:
        """Whether nothing wrote to the parameter since a step was queued for it, as far as versions tell."""
        return self._stamp == self._stamp_now()

    def _stamp_now(self) -> tuple[object, ...]:
        local = self.local()
        # Not the address: it is reused when the memory is freed.
        storage = weakref.ref(local.untyped_storage())
        return version_of(self.parameter), version_of(local), local.storage_offset(), storage

    def release(self) -> None:
        """Free all memory, and remove the hook."""
        self.unhook()
        self.gradient.clear()
        self.gradient.sum = None
        self.pinned = self.master = None
        for piece in self.pieces:
            # The frames of an error that the user keeps hold the piece.
            piece.tensor.data = piece.tensor.new_empty(0)
        self.pieces = []
        self.state = {}

    # All below is for the CPU worker thread.

    def new_host_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised CPU memory in the parameter's shape and strides."""
        return self.new_flat_tensor(dtype).as_strided(*self.form)

    def new_flat_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised CPU memory for as many elements."""
        nbytes = self.numel * dtype.itemsize
        if nbytes < _HUGE_PAGES:
            return torch.empty(self.numel, dtype=dtype, device="cpu")
        return anonymous_pages(nbytes, huge=True).view(dtype)

    def make_master(self) -> None:
        """Make the master weight and its pieces, or pieces of the parameter itself, wherever its memory is now."""
        if self.in_place:
            local = self.local()
            if self.master is not None and self.master.data_ptr() == local.data_ptr():
                return
            storage, start = local.untyped_storage(), int(local.storage_offset())
        elif self.master is None:
            self.pinned = Pinned(self.context.transfers.arena, self.numel * self.work_dtype.itemsize)
            self.pinned.synchronize()
            # A state dict that has it keeps the memory, too.
            storage, start = self.pinned.alias().untyped_storage(), 0
        else:
            return
        # Not an alias of the parameter: the step's writes would count up its version from another thread.
        self.master = over(storage, self.work_dtype, start, *self.form)
        if self.cut and self.numel > CHUNK:
            whole = flat(self.master)
            parts = [(start, whole[start : start + CHUNK]) for start in range(0, self.numel, CHUNK)]
        else:
            parts = [(0, self.master)]
        if self.pieces:
            # States belong to the pieces, which stay.
            for piece, (_, part) in zip(self.pieces, parts, strict=True):
                piece.tensor.data = part
        else:
            self.pieces = [
                Piece(start, part.numel(), torch.nn.Parameter(part, requires_grad=False)) for start, part in parts
            ]

    def put_master(self, master: torch.Tensor) -> None:
        """Set the master weight. The next step keeps it where its rounded value is the parameter's."""
        self.begin_step()
        assert self.master is not None
        flat(self.master).copy_(flat(master))
        for piece in self.pieces:
            piece.known = True

    def forget_master(self) -> None:
        """The next step takes the master weight from the parameter."""
        for piece in self.pieces:
            piece.known = False

    def begin_step(self) -> None:
        """Prepare the master weight for being written."""
        self.make_master()
        if self.pinned is not None:
            self.pinned.synchronize()
            self.context.transfers.backend.host_access(self.pinned.block, write=True)

    def range_of(self, piece: Piece) -> Bytes:
        """A piece's bytes in pinned memory."""
        assert self.pinned is not None
        size = self.work_dtype.itemsize
        return self.pinned.range(piece.start * size, piece.numel * size)


HostPiece = tuple[HostParameter, Piece]


class ParameterRead:
    """Copies of parameters to the CPU, for pieces of one GPU. See NOTE [ A step reads the parameter ]."""

    def __init__(self, pieces: Sequence[HostPiece], after: Event) -> None:
        self._transfers = pieces[0][0].context.transfers
        self._sent: dict[Piece, SentTensor] = {}
        read = [(held, piece) for held, piece in pieces if not held.in_place]
        values = {piece: flat(held.local().detach(), piece.start, piece.numel) for held, piece in read}
        narrow = [piece for held, piece in read if held.has_master]
        # First, since there may be no memory.
        sent = self._transfers.fetch([values[piece] for piece in narrow], after)
        self._sent.update(zip(narrow, sent, strict=True))
        pairs = [(held.range_of(piece), memory_of(values[piece])) for held, piece in read if not held.has_master]
        self._arrived = self._transfers.fetch_into(pairs, after) if pairs else None

    def __del__(self) -> None:
        # A step that failed has not read all of it.
        for sent in self._sent.values():
            self._transfers.give_back(sent)

    def finish(self, pieces: Sequence[HostPiece]) -> None:
        """Wait for some pieces, and update their master weights; for the CPU's threads."""
        try:
            for held, piece in pieces:
                if held.has_master:
                    values = self._transfers.read(self._sent[piece])
                elif self._arrived is not None:
                    self._arrived.synchronize()
                if not held.in_place:
                    self._transfers.backend.host_access(held.range_of(piece), write=True)
                if held.has_master and piece.known:
                    follow(flat(piece.tensor.detach()), values)
                elif held.has_master:
                    flat(piece.tensor.detach()).copy_(values)
                piece.known = True
        finally:
            for _, piece in pieces:
                if piece in self._sent:
                    self._transfers.give_back(self._sent.pop(piece))


def upload(pieces: Sequence[HostPiece], after: Event) -> Event:
    """Queue copies of pieces to their GPU, which casts them to the parameters' type; gives their end."""
    sent = [(held, piece) for held, piece in pieces if not held.in_place]
    uploads = [Upload(held.local(), piece.start, Cells(held.range_of(piece), held.work_dtype)) for held, piece in sent]
    end = pieces[0][0].context.transfers.update(uploads, after)
    for held, piece in sent:
        assert held.pinned is not None
        held.pinned.after(piece.start, end)
    return end
