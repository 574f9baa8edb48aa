"""A parameter whose optimizer state, fp32 master weight and step are on the CPU.

NOTE [ A step reads the parameter ]

Each step reads the parameter itself, as it is when ``step()`` is called. An fp32 master weight only adds the bits that
the parameter's type cannot hold. So every write between two steps counts, also one that changes no version: through
``.data``, a NumPy view, a library's kernel, a collective.

The read copies as many bytes to the CPU as the parameter has. On the CPU itself the step works on the parameter's own
memory. Tensor versions would miss the writes above, and a checksum on the GPU would arrive no sooner than the bytes.
``step_in_backward=True`` reads each parameter when its gradient has arrived.

NOTE [ Steps of streamed parameters ]

A streamed parameter is in pinned CPU memory between uses, its *home*: see NOTE [ Streamed parameters ] in
``parameters/streamed.py``. A step reads and writes the home, and not the copy that a block may compute with just then.
On the CPU it does so in place. On the GPU the home is copied in and out with its chunk, since a copy of its own would
queue behind the chunks that are fetched ahead. A block's next copy of the home comes after the step: it waits for
compute, and compute waits for the step. With ``overlap_forward`` compute waits just before a home is copied, which is
one block ahead of its call. A step inside of a call of its block is refused. A step raises the parameter's version. So
a copy from before it is never used after it: a saved parameter raises an error, and a block that was fetched ahead is
fetched once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spillway._torch import version_of
from spillway.checkpointing.tensors import is_dense
from spillway.errors import UnsupportedError, UsageError
from spillway.optim.gradient import DeviceContext, Gradient
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.optim.tensors import local_of
from spillway.runtime.arena import anonymous_pages
from spillway.runtime.backend import Event

if TYPE_CHECKING:
    from spillway.optim.state_store import StateStore
    from spillway.parameters.homes import StreamedParameter

_HUGE_PAGES = 4 << 20
"""Tensors of so many bytes get pages of their own."""


class _Form(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    has_bit: bool
    """Whether its bytes are those of the conjugate, or of the negative."""

    @classmethod
    def of(cls, local: torch.Tensor) -> _Form:
        has_bit = local.is_conj() or local.is_neg()
        return cls(tuple(local.shape), local.stride(), local.dtype, local.device, has_bit)

    def __str__(self) -> str:
        bit = ", with a conjugate or negative bit" if self.has_bit else ""
        return f"shape {self.size}, strides {self.stride}, {self.dtype}, on {self.device}{bit}"


class HostParameter:
    """A user's parameter, its master weight, its state and its gradient.

    Args:
        work_dtype: the type of its master weight, and of the gradient that it is stepped with.
    """

    streamed: StreamedParameter | None = None
    """If it is streamed: see NOTE [ Steps of streamed parameters ]."""

    own: torch.nn.Parameter | None = None
    """The parameter that a class of the user's own steps in its place: the class may know it again."""

    store: StateStore
    """It has the master weight and the state, and steps the parameter."""
    cut: bool
    """Whether the store may step it in pieces."""

    def __init__(self, parameter: torch.Tensor, group: int, context: DeviceContext, work_dtype: torch.dtype) -> None:
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
        if self._form.has_bit:
            raise UnsupportedError(
                f"A parameter has {self._form}, which steps on the CPU do not see. Make it of "
                f"tensor.resolve_conj().resolve_neg()."
            )
        self.numel = local.numel()
        self.gradient = Gradient(self, context)
        self.unhook: Callable[[], object] = lambda: None
        """Removes the hook on the accumulation of its gradients."""
        self.updated: Event | None = None
        """When the parameter has the last step's values."""
        self.node: Any = None
        """Autograd's node that adds its gradients, which has a hook only while it is alive."""
        self.backward: tuple[weakref.ref[Any] | None, int] = None, 0
        """The last backward that had a gradient of it, and its thread."""
        self._stamp: tuple[object, ...] | None = None

    @property
    def has_master(self) -> bool:
        """Whether the master weight has a wider type than the parameter."""
        return self.work_dtype != self._form.dtype

    @property
    def in_place(self) -> bool:
        """Whether a step on the CPU works on the parameter's own memory."""
        return self.context.transfers.backend.direct_disk and not self.has_master

    @property
    def kind(self) -> Hashable:
        """Equal for parameters that may share a call or a chunk."""
        return self.group, self.work_dtype, self.has_master, id(self.context)

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self._form.size, self._form.stride

    def local(self) -> torch.Tensor:
        """This process's part of the parameter, on its device."""
        return local_of(self.parameter) if self.streamed is None else self.streamed.at_rest

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
        if self.streamed is not None:
            if self.streamed.is_in_use:
                raise UsageError(
                    f"{self.streamed.name} is streamed, and was stepped inside of a call of its block, expected a step "
                    f"after the call"
                )
            self.streamed.check()
        if not self.is_unchanged():
            raise UsageError(
                f"A parameter has {_Form.of(self.local())}. It had {self._form} when the optimizer was made. Move, "
                f"cast or resize a model before you make its optimizer."
            )

    @property
    def device(self) -> torch.device:
        """The parameter's device at first."""
        return self._form.device

    def is_unchanged(self) -> bool:
        """Whether the parameter has the shape, strides, type and device that it had at first."""
        return _Form.of(self.local()) == self._form

    def wait_for_home(self) -> None:
        """Let compute wait until no block's copy reads the home of a streamed parameter."""
        if self.streamed is not None:
            backend = self.context.transfers.backend
            for event in self.streamed.home.before_write():
                backend.wait(backend.compute(), event)

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
        self.unhook()
        self.gradient.clear()
        self.gradient.sum = None
        self.own = None
        # A chunk that others share keeps this object.
        self.streamed = None

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
