"""Masters follow their parameters.

NOTE [ The parameter is the truth ]

A step reads the parameter itself, as it is when ``step()`` is called. A master only adds the bits that the parameter's
type has no room for. So every write between two steps counts, also one that changes no version: through ``.data``, a
NumPy view, a kernel of a library, a collective.

The read costs as many bytes of the link to the host as the parameter has; on the CPU the step works on the parameter's
own memory. Two cheaper designs were left out. A checksum on the device takes two passes over the parameter, is as
exact as its bits, and its result comes no sooner than the bytes do: both wait for the end of backward. Versions, which
were used before, miss the writes above. ``step_in_backward=True`` reads each parameter when its gradient has come.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import torch

from spillway.optim.sharding import local_of
from spillway.optim.traffic import is_dense

_AT_ONCE = 1 << 22
"""Elements that are compared at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def take(master: torch.Tensor, said: torch.Tensor) -> None:
    """Let a master say what its parameter says. Where it does so already, rounded, it stays, since it says more.

    Args:
        master: written.
        said: the parameter's values, of the same shape and a narrower type.

    Example:
        >>> master = torch.tensor([1.001, 2.0])
        >>> take(master, torch.tensor([1.0, 3.0], dtype=torch.bfloat16))
        >>> master
        tensor([1.0010, 3.0000])
    """
    if master.stride() == said.stride() and is_dense(master):
        master, said = flat(master), flat(said)
    for part, new in zip(_parts(master), _parts(said), strict=True):
        if part.device.type == "cpu" and part.ndim == 1 and _says(part, new):
            continue
        bits = _BITS[new.dtype.itemsize]
        same = part.to(new.dtype).view(bits) == new.view(bits)
        torch.where(same, part, new, out=part)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements, in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,), int(tensor.storage_offset()))


class _Mine(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.rounded: dict[torch.dtype, torch.Tensor] = {}


_mine = _Mine()


def _says(master: torch.Tensor, said: torch.Tensor) -> bool:
    """Whether a master on the host says just what its parameter says, rounded. Few calls, which hands queue for."""
    numel, size = master.numel(), said.itemsize
    rounded = _mine.rounded.get(said.dtype)
    if rounded is None:
        rounded = _mine.rounded[said.dtype] = torch.empty(_AT_ONCE, dtype=said.dtype, device="cpu")
    if numel != _AT_ONCE:
        rounded = rounded[:numel]
    rounded.copy_(master)
    bits = torch.int64 if numel * size % 8 == 0 and said.storage_offset() * size % 8 == 0 else torch.uint8
    return torch.equal(rounded.view(bits), said.view(bits))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A flat tensor in parts; another whole."""
    if tensor.ndim != 1 or tensor.numel() <= _AT_ONCE:
        yield tensor
        return
    for start in range(0, tensor.numel(), _AT_ONCE):
        yield tensor[start : start + _AT_ONCE]


class Stamp:
    """What tells that somebody wrote to a parameter: its versions, and where its bytes are.

    Args:
        parameter: as it is now.
    """

    __slots__ = ("_offset", "_storage", "_versions")

    def __init__(self, parameter: torch.Tensor) -> None:
        local = local_of(parameter)
        self._versions = parameter._version, local._version
        self._offset = local.storage_offset()
        # Not the address: that of memory that is gone is handed out again.
        self._storage = weakref.ref(local.untyped_storage())

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether nobody wrote to it since."""
        local = local_of(parameter)
        return (
            self._versions == (parameter._version, local._version)
            and self._offset == local.storage_offset()
            and self._storage() is local.untyped_storage()
        )
